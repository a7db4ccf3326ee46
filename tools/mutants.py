"""Break the privacy path on purpose, one line at a time, and see a test fail.

Usage: python -m tools.mutants [--only WORD] [--list] [--jobs N]

Each mutation replaces one exact text in a copy of the source and runs the tests that should notice. A mutation is
caught when those tests pass on the untouched copy and at least one fails on the broken one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
PYTEST_FAILED = 1


def run_tests(source: Path, tests: tuple[str, ...]) -> int:
    """pytest's exit code for ``tests`` with the package taken from ``source``."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode


def broken_copy(mutation: Mutation, folder: Path) -> Path:
    """A copy of the source with one text replaced; the text must occur exactly once."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    path = source / "dpvision" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"the text occurs {text.count(mutation.old)} times")
    path.write_text(text.replace(mutation.old, mutation.new))
    return source


def verdict(mutation: Mutation) -> str:
    """``caught``, ``SURVIVED`` or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            code = run_tests(broken_copy(mutation, Path(folder)), mutation.tests)
        except ValueError as error:
            return f"NOT APPLIED ({error})"
    if code == PYTEST_FAILED:
        return "caught"
    return "SURVIVED" if code == 0 else f"BROKEN RUN (pytest exit code {code})"


def main() -> int:
    """Run the chosen mutations and print a table; exit 1 unless all are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose name contains this word")
    parser.add_argument("--list", action="store_true", help="print names and leave")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if arguments.only in m.name]
    if arguments.list:
        print("\n".join(f"{m.name:48} {m.file}" for m in chosen))
        return 0
    tests = tuple(sorted({test for m in chosen for test in m.tests}))
    if run_tests(ROOT / "src", tests) != 0:
        print("the untouched source fails its own tests: mend that first")
        return 1
    with ThreadPoolExecutor(arguments.jobs) as pool:
        verdicts = []
        for mutation, result in zip(chosen, pool.map(verdict, chosen), strict=True):
            print(f"{result:10} {mutation.name}  ({mutation.file})", flush=True)
            verdicts.append(result)
    caught = verdicts.count("caught")
    print(f"{caught} of {len(chosen)} mutants caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
