"""Kill short runs at random moments, resume them each time, and compare with the runs that were left alone.

Usage: python -m tools.kill_runs [--kills 500] [--folder DIR] [--seed 0]

One process imports torch once and forks a child for every life of a run, so that hundreds of kills take minutes.
Moments are spread over four parts of a life: its start, its steps, the writing of checkpoints and the writing of the
release. Prints where the kills hit, and fails unless every run could be brought to its end, with weights and ledger
equal bit for bit to those of the run left alone, and unless the ledger on disk covered each noisy value that had been
drawn, after every single kill.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from dpvision.privacy.ledger import Ledger

PARTS = ("start", "steps", "checkpoint", "release")
MOST_KILLS_PER_RUN = 8
PAUSE = 0.003
"""Seconds that a step is made longer by, so that kills between charge and checkpoint are not rare."""
POLL = 0.0002
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"model": {"name": "linear", "options": {"image_size": 8}}},
    "views": {
        "model": {"name": "linear", "options": {"image_size": 8}},
        "views": {"count": 2, "crop_padding": 1, "flip": 0.5},
        "optimizer": {"name": "nadam", "learning_rate": 0.01},
    },
    "statistics": {
        "model": {"name": "linear", "options": {"image_size": 8}},
        "data": {"normalisation": "released", "statistics_noise_multiplier": 4.0},
        "privacy": {"clipping": "per_layer", "unit_norm": True},
    },
    "network": {"model": {"name": "shoefit_cnn", "options": {"image_size": 28, "activation": "tanh"}}},
}


@final
class Board:
    """Memory that parent and child share: the part of its life that the child is in, and how long each part took.

    Args:
        path: a file to map, for processes that are no forks of each other; made if it is not there.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, mmap.PAGESIZE)
            return
        if not path.exists():
            path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def clear(self) -> None:
        """Before a new life."""
        self._memory[:] = bytes(len(self._memory))

    @property
    def part(self) -> int:
        """Index into PARTS."""
        return self._memory[0]

    @property
    def seconds(self) -> list[float]:
        """Time spent in each part."""
        return list(struct.unpack_from(f"{len(PARTS)}d", self._memory, 8))

    @property
    def entered(self) -> list[int]:
        """How often each part began."""
        return list(struct.unpack_from(f"{len(PARTS)}q", self._memory, 8 + 8 * len(PARTS)))

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Say that the block belongs to this part."""
        part, before, started = PARTS.index(name), self._memory[0], time.perf_counter()
        count = self.entered[part] + 1
        struct.pack_into("q", self._memory, 8 + 8 * len(PARTS) + 8 * part, count)
        self._memory[0] = part
        try:
            yield
        finally:
            self._memory[0] = before
            took = self.seconds[part] + time.perf_counter() - started
            struct.pack_into("d", self._memory, 8 + 8 * part, took)


@final
@dataclass
class Counts:
    """What came of it."""

    kills: int = 0
    runs: int = 0
    under_reported: int = 0
    unrecoverable: int = 0
    different: int = 0
    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.under_reported or self.unrecoverable or self.different)


@final
@dataclass(frozen=True)
class Life:
    """One run and what is remembered of it outside of its folder."""

    run: Path
    config: dict[str, Any]
    seed: int

    @property
    def drawn(self) -> Path:
        """Where the child notes a digest of every noisy value, after it was drawn."""
        return self.run.with_suffix(".drawn")

    @property
    def lost(self) -> Path:
        """Where a run goes that was killed before its first checkpoint."""
        return self.run.with_suffix(".lost")

    @property
    def errors(self) -> Path:
        """Where the child says why it failed."""
        return self.run.with_suffix(".errors")


def write_pictures(folder: Path, *, side: int) -> Path:
    """Made-up pictures, 60 to train on and 30 to test on."""
    generator = np.random.default_rng(side)
    labels = np.arange(90) % 3
    images = generator.integers(0, 256, size=(90, 1, side, side), dtype=np.uint8)
    path = folder / f"pictures{side}.npz"
    np.savez(path, x_train=images[:60], y_train=labels[:60], x_test=images[60:], y_test=labels[60:])
    return path


def config_of(kind: str, folder: Path, *, steps: int) -> dict[str, Any]:
    """The configuration of a short run."""
    changes = KINDS[kind]
    privacy = {
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "num_units": 60,
        "expected_batch_size": 20.0,
        "steps": steps,
        "clip_norm": 0.5,
    }
    return {
        "name": f"killed {kind}",
        "optimizer": {"name": "adam", "learning_rate": 0.01},
        "averaging": {"kind": "ema", "decay": 0.9},
        "evaluations": 4,
        "checkpoint_every": 3,
        **changes,
        "data": {"source": str(folder / f"pictures{28 if kind == 'network' else 8}.npz"), **changes.get("data", {})},
        "privacy": {**privacy, **changes.get("privacy", {})},
    }


def live(life: Life, board: Board) -> None:
    """In the child: begin the run, or go on with it; told step by step on the board."""
    from dpvision.config import parse_config
    from dpvision.errors import DPVisionError
    from dpvision.training import resume_training, train

    tell(board, life.drawn)
    if life.run.exists():
        try:
            resume_training(life.run)
            return
        except DPVisionError as error:
            if "before its first checkpoint" not in str(error):
                raise
            if life.drawn.exists() and "It did spend" not in str(error):
                raise RuntimeError(f"noise was drawn, and the message hides it: {error}") from error
        # What the lost run spent was told; the one that begins anew draws the same, having the same seed. Each of these
        # is one operation, because a kill may come between any two.
        life.drawn.unlink(missing_ok=True)
        shutil.rmtree(life.lost, ignore_errors=True)
        life.run.rename(life.lost)
    train(parse_config(life.config), run=life.run, seed=life.seed)


def tell(board: Board, drawn: Path) -> None:
    """Make the library say where it is, and note each noisy value after it was drawn. Only in a child."""
    from dpvision.privacy import private_step
    from dpvision.storage.run_folder import RunFolder
    from dpvision.training import resume, start, write_release

    def part(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*arguments: Any, **options: Any) -> Any:
            with board.inside(name):
                return function(*arguments, **options)

        return inside

    def noted(function: Callable[..., Any], bytes_of: Callable[[Any], bytes]) -> Callable[..., Any]:
        def noting(*arguments: Any, **options: Any) -> Any:
            time.sleep(PAUSE)
            value = function(*arguments, **options)
            digest = hashlib.sha256(bytes_of(value)).hexdigest()
            with drawn.open("a") as file:
                file.write(f"{options.get('step', 'statistics')}:{digest}\n")
            return value

        return noting

    start.start_run = part("start", start.start_run)
    resume.resume_run = part("start", resume.resume_run)
    write_release.run_steps = part("steps", write_release.run_steps)
    write_release.write_release = part("release", write_release.write_release)
    RunFolder.save_checkpoint = part("checkpoint", RunFolder.save_checkpoint)
    private_step.noisy_mean = noted(
        private_step.noisy_mean, lambda noisy: b"".join(g.numpy().tobytes() for g in noisy.gradients.values())
    )
    start.released_normalisation = noted(start.released_normalisation, lambda released: repr(released).encode())


def spawn(life: Life, board: Board) -> int:
    """Fork a child that lives the run on; its process id."""
    board.clear()
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        live(life, board)
    except BaseException:  # noqa: BLE001 - a child must not come back from here
        life.errors.write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def wait(child: int) -> int:
    """The child's end: 0, an exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_somewhere(child: int, board: Board, *, chance: random.Random, usual: Board) -> str | None:
    """Kill the child in a part of its life chosen by chance; the part it died in, or None if it was done before."""
    target = chance.randrange(len(PARTS))
    times = max(1, usual.entered[target])
    turn = chance.randint(1, min(times, 3))  # a life that resumes late has few of them left
    delay = chance.uniform(0, usual.seconds[target] / times)
    while board.entered[target] < turn and not _is_over(child):
        time.sleep(POLL)
    time.sleep(delay)
    if _is_over(child):
        return None
    os.kill(child, signal.SIGKILL)
    return PARTS[board.part]


def _is_over(child: int) -> bool:
    """Whether the child has ended; it is left to be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def charged(run: Path) -> int:
    """Noisy releases in the ledger on disk; a torn last line counts as not written."""
    path = run / "release" / "ledger.jsonl"
    if not path.exists():
        return 0
    copy = run.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    return sum(count for _, count in Ledger.open(copy).charges())


def certified(run: Path) -> int | None:
    """Noisy releases that the certificate covers, if there is one."""
    path = run / "release" / "certificate.json"
    return sum(item["count"] for item in json.loads(path.read_bytes())["charged"]) if path.exists() else None


def drawn_values(life: Life) -> int:
    """How many different noisy values have existed: two for one step, if a replay was not exact."""
    return len(set(life.drawn.read_text().splitlines())) if life.drawn.exists() else 0


def is_under_reported(life: Life) -> bool:
    """Whether ledger or certificate leave out a noisy value that has existed."""
    drawn, covered = drawn_values(life), certified(life.run)
    return drawn > charged(life.run) or (covered is not None and drawn > covered)


def same(one: Path, other: Path) -> bool:
    """Whether two runs released the same weights and the same ledger, byte by byte."""
    names = ("weights.safetensors", "ledger.jsonl")
    return all((one / "release" / name).read_bytes() == (other / "release" / name).read_bytes() for name in names)


def torment(life: Life, board: Board, usual: Board, *, kills: int, chance: random.Random, counts: Counts) -> bool:
    """Kill the run up to ``kills`` times, then let it end. False: it could not be brought to its end."""
    while True:
        child = spawn(life, board)
        where = kill_somewhere(child, board, chance=chance, usual=usual) if kills else None
        code = wait(child)
        if code == -signal.SIGKILL and where is not None:
            kills -= 1
            counts.kills += 1
            counts.hits[where] += 1
        counts.under_reported += is_under_reported(life)
        if code == 0:
            return True
        if code != -signal.SIGKILL:
            print(f"{life.run.name} can't be resumed:\n{life.errors.read_text()}", flush=True)
            return False


def warm_up(folder: Path, *, kinds: tuple[str, ...], steps: int) -> None:
    """Import and compute in the parent, once, what every child would: torch, kernels, tables of the accountant."""
    import torch

    from dpvision.config import parse_config
    from dpvision.training import train

    torch.set_num_threads(1)  # a thread of the parent would not live on in a child
    for kind in kinds:
        train(parse_config(config_of(kind, folder, steps=steps)), run=folder / f"{kind}-warm", seed=0)


def experiment(
    folder: Path, *, kills: int, steps: int = 9, seed: int = 0, kinds: tuple[str, ...] = tuple(KINDS)
) -> Counts:
    """Kill runs of every kind until ``kills`` kills have hit."""
    for side in (8, 28):
        write_pictures(folder, side=side)
    warm_up(folder, kinds=kinds, steps=steps)
    chance = random.Random(seed)  # noqa: S311 - moments of killing, not secrets
    board, counts = Board(), Counts()
    while counts.kills < kills:
        for kind in kinds:
            name = f"{kind}-{counts.runs}"
            config, run_seed = config_of(kind, folder, steps=steps), chance.randrange(2**32)
            alone, usual = Life(folder / f"{name}-alone", config, run_seed), Board()
            if wait(spawn(alone, usual)) != 0:
                raise SystemExit(f"the undisturbed run failed:\n{alone.errors.read_text()}")
            killed = Life(folder / f"{name}-killed", config, run_seed)
            wanted = min(chance.randint(1, MOST_KILLS_PER_RUN), kills - counts.kills)
            ended = torment(killed, board, usual, kills=wanted, chance=chance, counts=counts)
            counts.runs += 1
            counts.unrecoverable += not ended
            counts.different += ended and not same(alone.run, killed.run)
            print(f"{name}: {counts.kills} kills so far {counts.hits}", flush=True)
            if counts.good:
                _clear(folder, name)
    return counts


def _clear(folder: Path, name: str) -> None:
    for path in folder.glob(f"{name}-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> int:
    """Run the experiment and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--folder", type=Path, help="where the runs are made; a new folder if not given")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    counts = experiment(folder, kills=arguments.kills, seed=arguments.seed)
    hits = ", ".join(f"{number} in {part}" for part, number in counts.hits.items())
    print(f"{counts.kills} kills over {counts.runs} runs: {hits}.")
    print(f"under-reported: {counts.under_reported}; unrecoverable: {counts.unrecoverable}")
    print(f"runs whose weights or ledger differ from the run left alone: {counts.different}")
    return 0 if counts.good else 1


if __name__ == "__main__":
    sys.exit(main())
