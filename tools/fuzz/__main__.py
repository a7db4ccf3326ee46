"""Feed spoiled input to everything that reads anything, and see that each case ends in a value or in one clear line.

Usage: python -m tools.fuzz [--cases 20000] [--seed 0] [--only npz,weights] [--folder DIR] [--replay npz:0:17]

A case is made from its name alone (target, seed, number), so it can be made again: ``--replay`` prints the traceback.
Fails on any other exception, on more than 10 seconds of computing or a minute of waiting, more than 512 MiB, a file
written outside the case's folder, a program started, a name taken from a pickle, or a raw control character on the
terminal. Prints counts by target; failures.jsonl in the folder holds the failed cases.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import final

from dpvision.errors import DPVisionError
from tools.fuzz import readers, runs
from tools.fuzz.guard import CANARY, Guard, Hang
from tools.fuzz.readers import Case
from tools.fuzz.seeds import Seeds, make_seeds

Target = Callable[[Random, Seeds, Path], Case]
TARGETS: dict[str, tuple[Target, int]] = {
    "image": (readers.image, 30),
    "folder": (readers.folder, 8),
    "idx": (readers.idx, 14),
    "cifar": (readers.cifar, 10),
    "archive": (readers.archive, 12),
    "npz": (readers.npz, 20),
    "arrays": (readers.labels, 10),
    "weights": (readers.weights, 20),
    "features": (readers.features, 6),
    "volume": (readers.volume, 12),
    "pairs": (readers.pairs, 8),
    "json_config": (runs.json_config, 16),
    "toml_config": (runs.toml_config, 12),
    "certificate": (runs.certificate, 8),
    "ledger": (runs.ledger, 8),
    "run_folder": (runs.run_folder, 6),
    "arguments": (runs.arguments, 1),
    "training": (runs.training, 1),
    "commands": (runs.commands, 2),
}
"""What is fed, and its share of the cases."""
ENDED_WELL = ("read", "refused")


@final
@dataclass(frozen=True)
class Outcome:
    """How a case ended: ``read``, ``refused`` with a clear line, or what went wrong."""

    kind: str
    text: str = ""
    trace: str = ""
    seconds: float = 0.0


@final
class Fuzzer:
    """Makes and runs cases in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _plant_canary(folder)
        shutil.rmtree(folder / "seeds", ignore_errors=True)
        (folder / "seeds").mkdir()
        self._seeds = make_seeds(folder / "seeds")
        importlib.import_module("matplotlib.font_manager")  # it asks programs for fonts when it is first imported
        self._guard = Guard(folder / "box")
        self._guard.limit_memory()

    def run(self, target: str, seed: int, number: int) -> Outcome:
        """One case."""
        box, outside = self.folder / "box", self.folder / "outside"
        for place in (box, outside):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        (self.folder / "now").write_text(f"{target}:{seed}:{number}")
        rng = Random(f"{target}:{seed}:{number}")  # noqa: S311 - a case must be the same again
        try:
            case = TARGETS[target][0](rng, self._seeds, box)
        except Exception as error:  # noqa: BLE001 - a mistake of this tool: counted as a failure, and the rest goes on
            return Outcome("unmade", f"{type(error).__name__}: {error}"[:300], traceback.format_exc())
        began = time.process_time()
        found = replace(self._tried(case), seconds=round(time.process_time() - began, 3))
        if self._guard.violations:
            return replace(found, kind="violation", text="; ".join(self._guard.violations))
        return found

    def _tried(self, case: Case) -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with self._guard.watching():
                    case()
            except DPVisionError as error:
                text = str(error)
                clear = "\n" not in text and len(text) < 4000
                return Outcome("refused" if clear else "unclear", text[:300])
            except Hang:
                return Outcome("hang", "too long", traceback.format_exc())
            except BaseException as error:  # whatever else comes out is what we look for
                if isinstance(error, KeyboardInterrupt):
                    raise
                return Outcome("exception", f"{type(error).__name__}: {error}"[:300], traceback.format_exc())
        return Outcome("read")


def _plant_canary(folder: Path) -> None:
    (folder / f"{CANARY}.py").write_text("def run(*_): raise SystemError('a file was executed')\n")
    sys.path.insert(0, str(folder))


def plan(cases: int, only: list[str]) -> list[str]:
    """The target of each case: in proportion, mixed."""
    names = [name for name, (_, share) in TARGETS.items() if not only or name in only for _ in range(share)]
    Random(0).shuffle(names)  # noqa: S311
    return [names[number % len(names)] for number in range(cases)]


def work(chosen: argparse.Namespace, targets: list[str], results: Path) -> None:
    """Run the cases from ``chosen.start`` on, one line of results a case."""
    fuzzer = Fuzzer(chosen.folder)
    with results.open("a", buffering=1) as file:
        for number in range(chosen.start, len(targets)):
            case = f"{targets[number]}:{chosen.seed}:{number}"
            found = fuzzer.run(targets[number], chosen.seed, number)
            file.write(json.dumps({"case": case, **asdict(found)}) + "\n")


def supervise(chosen: argparse.Namespace, targets: list[str], results: Path) -> None:
    """Run the cases in a process that may die of them: then the case is noted, and a new one goes on after it."""
    flags = ["--cases", str(chosen.cases), "--seed", str(chosen.seed), "--only", chosen.only]
    start = 0
    while start < len(targets):
        command = [sys.executable, "-m", "tools.fuzz", *flags, "--folder", str(chosen.folder), "--start", str(start)]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        if len(done) >= len(targets):
            break
        if not (chosen.folder / "now").exists():
            raise SystemExit(f"no case could be run:\n{ended.stderr[-2000:]}")
        case = (chosen.folder / "now").read_text()
        kind = "hang" if "Timeout (" in ended.stderr else "crash"
        line = {"case": case, "kind": kind, "text": f"exit code {ended.returncode}", "trace": ended.stderr[-4000:]}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        start = int(case.rsplit(":", 1)[1]) + 1


def summarise(results: Path, failures: Path) -> int:
    """Print the table, write the failures, and return how many there are."""
    found = [json.loads(line) for line in results.read_text().splitlines()]
    bad = [each for each in found if each["kind"] not in ENDED_WELL]
    failures.write_text("".join(json.dumps(each) + "\n" for each in bad))
    counts = Counter((each["case"].split(":")[0], each["kind"]) for each in found)
    print(f"{'target':14} {'cases':>7} {'read':>7} {'refused':>8} {'failed':>7}")
    for name in (*TARGETS, "all"):
        kinds = Counter[str]()
        for (target, kind), count in counts.items():
            kinds[kind] += count * (name in (target, "all"))
        if kinds.total():
            failed = kinds.total() - sum(kinds[kind] for kind in ENDED_WELL)
            print(f"{name:14} {kinds.total():7} {kinds['read']:7} {kinds['refused']:8} {failed:7}")
    slowest = max(found, key=lambda each: each.get("seconds", 0.0))
    print(f"slowest: {slowest['case']}, {slowest.get('seconds', 0.0):.1f} s of computing")
    print(f"{len(bad)} failures{f', see {failures}' if bad else ''}")
    return len(bad)


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help=f"some of {', '.join(TARGETS)}")
    parser.add_argument("--folder", type=Path, help="a new one; default: among the temporary files")
    parser.add_argument("--replay", help="target:seed:number of one case")
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    chosen.folder = (chosen.folder or Path(tempfile.mkdtemp(prefix="dpvision-fuzz-"))).resolve()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    os.environ["DPVISION_DATA"] = str(chosen.folder / "cache")
    results = chosen.folder / "results.jsonl"
    targets = plan(chosen.cases, [name for name in chosen.only.split(",") if name])
    if chosen.replay:
        target, seed, number = chosen.replay.split(":")
        found = Fuzzer(chosen.folder).run(target, int(seed), int(number))
        print(found.trace, f"{found.kind}: {found.text}", sep="\n")
        return int(found.kind not in ENDED_WELL)
    if chosen.start is not None:
        work(chosen, targets, results)
        return 0
    results.unlink(missing_ok=True)
    (chosen.folder / "now").unlink(missing_ok=True)
    supervise(chosen, targets, results)
    return int(summarise(results, chosen.folder / "failures.jsonl") > 0)


if __name__ == "__main__":
    raise SystemExit(main())
