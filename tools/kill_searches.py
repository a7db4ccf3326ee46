"""Kill the processes of searches at random moments, start them again, and read the charges after every kill.

Usage: python -m tools.kill_searches [--kills 200] [--workers 2] [--postgres] [--seed 0] [--folder DIR]

Trials are real private runs. One process imports torch once and forks a child for every life of a worker; a worker runs
trials, then the final run where the search has one, and publishes. After each kill, and at the end, everything that the
ledger of any trial holds must be covered by the charge of that trial in the search's ledger. Fails unless every search
could be brought to its end with all of its trials, verified. Prints how many kills there were while a trial was
running, and how many trials were charged again (over-count). With ``--postgres`` the list of trials is in a server that
is started for it, else in a journal file.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpvision.config import parse_config
from dpvision.privacy.ledger import Ledger, planned_releases, read_ledger
from dpvision.release.verify import verify
from dpvision.training.callbacks import RunCallback
from dpvision.tune.search import begin_search, continue_search, resume_search
from dpvision.tune.search_folder import SearchFolder
from dpvision.tune.search_plan import SearchLimits, SearchSettings

TRIALS = 6
SIDE = 8


def write_images(path: Path) -> Path:
    """240 synthetic training images of three classes and 60 test images."""
    generator = np.random.default_rng(0)
    parts: dict[str, Any] = {}
    for split, count in (("train", 240), ("test", 60)):
        labels = np.arange(count) % 3
        images = generator.integers(0, 120, size=(count, 1, SIDE, SIDE), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[:, 2 * label + 1] += 100
        parts |= {f"x_{split}": images, f"y_{split}": labels}
    np.savez(path, **parts)
    return path


KINDS: tuple[dict[str, Any], ...] = (
    {"sampler": "tpe"},
    {"sampler": "tpe", "budget_share": 0.5},
    {"sampler": "tpe", "space": {"learning_rate": "log:0.1:4", "steps": "int:4:12"}},
    {"price": "best_of", "trials": 3},
)
"""Searches: all trials alike; with a final run; under a filter; the best of a random number, which has no database."""


def begin(folder: Path, source: Path, *, kind: dict[str, Any], storage: str | None) -> SearchFolder:
    """Begin a search of a few short trials."""
    config = parse_config(
        {
            "data": {"source": str(source)},
            "model": {"name": "linear", "options": {"image_size": SIDE}},
            "privacy": {
                "target_epsilon": 3.0,
                "delta": 1e-3,
                "num_units": 240,
                "expected_batch_size": 60.0,
                "steps": 8,
                "clip_norm": 0.7,
                "anyway": True,
            },
            "evaluations": 1,
            "checkpoint_every": 2,
        }
    )
    wanted: dict[str, Any] = {"space": {"learning_rate": "log:0.1:4"}, "trials": TRIALS, "score_noise": 20.0}
    place = SearchFolder(folder)
    begin_search(
        config, SearchSettings(**{**wanted, **kind}), place, seed=None, device="cpu", database=storage is not None
    )
    return place


def work(place: SearchFolder, storage: str | None) -> int:
    """Fork a worker; return its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        limits = SearchLimits(storage=storage)
        continue_search(place, callback=RunCallback(), limits=limits)
        code = 0
    except BaseException:  # noqa: BLE001, the parent reads the exit code
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def uncovered(place: SearchFolder) -> list[str]:
    """Name every trial whose own ledger holds more than the search's ledger was charged for it."""
    # A copy, because opening a ledger cuts off a line that was torn.
    with tempfile.TemporaryDirectory() as kept:
        copy = Path(kept) / "search.jsonl"
        shutil.copy(place.ledger_path, copy)
        Ledger.open(copy)
        entries = read_ledger(copy)
        whole = [planned_releases(entry.payload) for entry in entries if entry.kind == "selection"]
        charged = {
            (entry.payload["trial"], entry.payload["attempt"]): dict(planned_releases(entry.payload))
            for entry in entries
            if entry.kind == "trial"
        }
        wrong = []
        for run in sorted(place.trials.glob("*-[0-9]")):
            ledger = run / "release" / "ledger.jsonl"
            if not ledger.exists():
                continue
            own = Path(kept) / f"{run.name}.jsonl"
            shutil.copy(ledger, own)
            number, _, attempt = run.name.partition("-")
            allowed = dict(whole[0]) if whole else charged.get((int(number), int(attempt)), {})
            spent = Ledger.open(own).charges()
            wrong += [
                f"{run.name}: {count} × {event.purpose}" for event, count in spent if count > allowed.get(event, 0)
            ]
        return wrong


def running(place: SearchFolder) -> bool:
    """Whether a trial has begun and has no score: a kill now hits it."""
    begun = {path.name.partition("-")[0] for path in place.trials.glob("*.started")}
    return any(place.read_score(int(number)) is None for number in begun)


def _wait(place: SearchFolder, children: list[int], chance: random.Random) -> None:
    """Wait for the moment of a kill: mostly within a trial, however slow the machine is, sometimes at any time."""
    if chance.random() < 0.2:
        time.sleep(chance.uniform(0.05, 6.0))
        return
    until = time.monotonic() + 90
    while time.monotonic() < until and not running(place) and all(_alive(child) for child in children):
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 1.5))


def _alive(child: int) -> bool:
    """Whether a child has not ended; its exit code stays to be read."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def one_search(
    folder: Path,
    source: Path,
    *,
    kind: dict[str, Any],
    storage: str | None,
    workers: int,
    kills: int,
    chance: random.Random,
) -> dict[str, int]:
    """Run one search to its end under at most ``kills`` kills; return what was counted."""
    place = begin(folder, source, kind=kind, storage=storage)
    done = {"kills": 0, "during a trial": 0, "charged again": 0, "trials": 0}
    while True:
        children = [work(place, storage) for _ in range(workers)]
        if done["kills"] >= kills:
            codes = [os.waitpid(child, 0)[1] for child in children]
            if any(codes):
                raise SystemExit(f"a worker failed: {codes}")
            break
        _wait(place, children, chance)
        victim = chance.choice(children)
        finished, status = os.waitpid(victim, os.WNOHANG)
        if finished == 0:
            done["during a trial"] += int(running(place))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            done["kills"] += 1
        elif status:
            raise SystemExit(f"a worker failed with status {status}")
        others = [child for child in children if child != victim]
        for child in others:  # the others go on for a moment, perhaps with the victim's trial
            time.sleep(chance.uniform(0, 0.5))
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended == 0:
                done["during a trial"] += int(running(place))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                done["kills"] += 1
            elif status:
                raise SystemExit(f"a worker failed with status {status}")
        wrong = uncovered(place)
        if wrong:
            raise SystemExit(f"UNDER-COUNTED in {folder}: {wrong}")
        if finished and not others:
            break
    result = resume_search(folder, limits=SearchLimits(storage=storage))
    found = verify(folder)
    if not found.ok or uncovered(place):
        raise SystemExit(f"{folder} does not verify: {found.problems} {uncovered(place)}")
    if kind.get("price") is None:
        rows = [row for row in result.trials or () if row.state == "complete"]
        if len(rows) != TRIALS:
            raise SystemExit(f"{folder} lost trials: {len(rows)} of {TRIALS} are complete.")
        done["trials"] = len(rows)
        done["charged again"] = int(result.certificate["search"]["repeated"])
    return done


def main() -> None:
    """Kill until the asked number is reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--postgres", action="store_true", help="the list of trials is in a PostgreSQL server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    chance = random.Random(asked.seed)  # noqa: S311, moments of kills
    torch.set_num_threads(1)  # a thread of the parent would not live on in a child
    with tempfile.TemporaryDirectory() as made, _server() if asked.postgres else nullcontext() as storage:
        folder = asked.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        source = write_images(folder / "images.npz")
        kinds = KINDS[:3] if asked.postgres else KINDS
        total: dict[str, int] = {}
        number = 0
        while total.get("kills", 0) < asked.kills:
            found = one_search(
                folder / f"search-{number}",
                source,
                kind=kinds[number % len(kinds)],
                storage=storage,
                workers=asked.workers,
                kills=min(24, asked.kills - total.get("kills", 0)),
                chance=chance,
            )
            total = {name: total.get(name, 0) + count for name, count in found.items()}
            number += 1
            print(f"{number} searches: {total}", file=sys.stderr)
    print(f"{number} searches, {total}: nothing lost, nothing under-counted.")


def _server() -> AbstractContextManager[str]:
    """A PostgreSQL server of its own, as the tests start it."""
    from tests.support.postgres import postgres_url

    return postgres_url()


if __name__ == "__main__":
    main()
