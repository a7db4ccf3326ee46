"""Break the privacy path on purpose, one line at a time, and see a test fail.

Usage: python -m tools.mutants [--only WORD] [--list] [--jobs N] [--skip-baseline]

Each mutation replaces one exact text in a copy of the source and runs the tests that should notice, up to the first
failure. A mutation is caught when those tests pass on the untouched copy and at least one fails on the broken one.

Every worker has one copy of the source. The tests run in forks of this process, which has imported torch and pytest
already but not dpvision: starting a test run takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tools.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src", "dpvision")
LONGEST = 900
"""Seconds after which a test run counts as hanging."""


def warm_up() -> None:
    """Import what every test run needs, so that forks share it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch.func  # noqa: F401


def copy_of_source(folder: Path) -> Path:
    """Copy the source into ``folder`` and compile it; returns the copy's ``src``."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    compileall.compile_dir(folder / "src", quiet=2)
    return folder / "src"


def fork_tests(source: Path, tests: tuple[str, ...]) -> int:
    """Run ``tests`` in a fork with the package taken from ``source``; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        signal.alarm(LONGEST)
        sys.dont_write_bytecode = True  # a mutated file must leave no bytecode behind
        os.environ |= {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path.insert(0, str(source))
        os.chdir(ROOT)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        import pytest

        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]))
    finally:
        os._exit(code)


def apply(mutation: Mutation, source: Path) -> str | None:
    """Break the copy; returns why that is not possible, if it is not."""
    path = source / "dpvision" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return f"NOT APPLIED (the text occurs {text.count(mutation.old)} times)"
    path.write_text(text.replace(mutation.old, mutation.new))
    return None


def verdict(status: int) -> str:
    """``caught``, ``SURVIVED`` or what went wrong, from the status of a fork."""
    code = os.waitstatus_to_exitcode(status)
    return {0: "SURVIVED", 1: "caught", -signal.SIGALRM: "TIMED OUT"}.get(code, f"BROKEN RUN (pytest exit code {code})")


def run_mutations(chosen: list[Mutation], folder: Path, *, jobs: int) -> int:
    """Run every mutation and print its verdict and its seconds; returns how many were caught."""
    idle = [copy_of_source(folder / str(number)) for number in range(jobs)]
    running: dict[int, tuple[Mutation, Path, float]] = {}
    waiting, caught = list(reversed(chosen)), 0

    def report(mutation: Mutation, result: str, seconds: float) -> None:
        print(f"{result:10} {seconds:6.1f} s  {mutation.name}  ({mutation.file})", flush=True)

    while waiting or running:
        while waiting and idle:
            mutation = waiting.pop()
            problem = apply(mutation, idle[-1])
            if problem is not None:
                report(mutation, problem, 0.0)
                continue
            source = idle.pop()
            running[fork_tests(source, mutation.tests)] = (mutation, source, time.perf_counter())
        if running:
            child, status = os.wait()
            mutation, source, started = running.pop(child)
            report(mutation, verdict(status), time.perf_counter() - started)
            caught += verdict(status) == "caught"
            shutil.copy2(ROOT / PACKAGE / mutation.file, source / "dpvision" / mutation.file)
            idle.append(source)
    return caught


def main() -> int:
    """Run the chosen mutations and print a table; exit 1 unless all are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose name contains this word")
    parser.add_argument("--list", action="store_true", help="print names and leave")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--skip-baseline", action="store_true", help="the untouched source is known to pass its tests")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if arguments.only in m.name]
    if arguments.list:
        print("\n".join(f"{m.name:48} {m.file}" for m in chosen))
        return 0
    warm_up()
    started = time.perf_counter()
    tests = tuple(sorted({test for m in chosen for test in m.tests}))
    if not arguments.skip_baseline and os.waitpid(fork_tests(ROOT / "src", tests), 0)[1] != 0:
        print("the untouched source fails its own tests: mend that first")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        caught = run_mutations(chosen, Path(folder), jobs=arguments.jobs)
    print(f"{caught} of {len(chosen)} mutants caught in {(time.perf_counter() - started) / 60:.1f} minutes")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
