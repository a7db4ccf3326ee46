"""Entry point: ``python -m benchmarks.searches run|page|reissue``."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.own_data.page import MARK
from benchmarks.searches import reissue
from benchmarks.searches.arms import TASKS, WAYS, run_once
from benchmarks.searches.table import tables

LOG = Path(__file__).parent / "results.jsonl"


def run(names: list[str], ways: list[str], *, log: Path, repeats: int, seconds: float) -> None:
    """Run these ways of these tasks until the log has ``repeats`` rows of each, or the time is over."""
    until = time.monotonic() + seconds
    folder = Path("runs") / "searches-data"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = Counter((row["task"], row["way"]) for row in rows)
    for repeat in range(repeats):
        for name in names:
            for way in ways:
                if done[name, way] > repeat or time.monotonic() > until:
                    continue
                began = time.process_time()
                found = run_once(TASKS[name](folder), way)
                row = {"task": name, "way": way, **found, "cpu_seconds": round(time.process_time() - began, 1)}
                with log.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def main() -> None:
    """Run what is not in the log yet, or write the table of the page."""
    parser = argparse.ArgumentParser(description="Searches against the defaults, at the same total epsilon.")
    parser.add_argument("what", choices=("run", "page", "reissue"))
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--task", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after this time")
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/searches.md"))
    given = parser.parse_args()
    if given.what == "reissue":
        print(reissue.table())
        return
    torch.set_num_threads(1)
    if given.what == "run":
        run(given.task, given.way, log=given.log, repeats=given.repeats, seconds=given.seconds)
        return
    rows = [json.loads(line) for line in given.log.read_text().splitlines()]
    before, _, rest = given.output.read_text().partition(MARK)
    given.output.write_text(f"{before}{MARK}\n{tables(rows)}\n{MARK}{rest.partition(MARK)[2]}")


if __name__ == "__main__":
    main()
