"""Kill random processes of runs that torchrun started, at random moments, and compare with the runs left alone.

Usage: python -m tools.kill_ranks [--kills 100] [--folder DIR] [--seed 0]

Every run is started once by torchrun with 2 to 4 processes and restarts (``--max-restarts``), as a user would start it;
torchrun notices that a process died, ends the others and starts all of them again. Moments are spread over the parts of
rank 0's life: its start, its steps, the writing of checkpoints and the writing of the release. Runs of ``dpvision
train`` must end with the weights and the ledger of the run that one process took alone, bit for bit, and no step may
have had two noisy values. Runs of an own loop (``PrivateRun``) are forks after each restart: they must end with a
release that ``dpvision verify`` accepts. Of both, the ledger on disk must cover each noisy value that existed, after
every single kill. The last run changes its number of processes twice: 4, then 2, then 3.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, final

from tools import kill_runs
from tools.kill_runs import (
    PARTS,
    PAUSE,
    Board,
    Life,
    charged,
    config_of,
    is_under_reported,
    same,
    spawn,
    tell,
    wait,
    warm_up,
    write_pictures,
)

SIZES = (2, 3, 4)
KINDS = ("linear", "own loop", "views", "statistics")
MOST_KILLS_PER_RUN = 7
RANK_TIMEOUT = 60.0
LONGEST_LIFE = 240.0
"""Seconds after which a run that does not end counts as lost."""
POLL = 0.0005
PARTIAL_SUMS = 8
"""What torchrun's runs have by default: the run that is left alone, in one process, is told so."""


@final
@dataclass
class Counts:
    """What came of it."""

    kills: int = 0
    runs: int = 0
    under_reported: int = 0
    lost: int = 0
    double: int = 0
    different: int = 0
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    ranks: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(max(SIZES)), 0))

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.under_reported or self.lost or self.double or self.different)


# ---- In the processes that torchrun starts


def work_as(description: Path) -> None:
    """Be one process of the run that a file describes."""
    spec = json.loads(description.read_text())
    life = Life(Path(spec["run"]), spec["config"], spec["seed"])
    work(life, spec["kind"], Board(Path(spec["board"])), spec["verb"], spec["pause"])


def work(life: Life, kind: str, board: Board, verb: str, pause: float) -> None:
    """Be one process of the run: begin it, or continue it."""
    kill_runs.PAUSE = pause
    if os.environ["RANK"] == "0":
        tell(board, life.drawn)
    if kind == "own loop":
        _own_loop(life, board)
        return
    from dpvision.cli import main

    if verb == "train":
        settings = life.run.with_suffix(".toml")
        flags = ["--config", str(settings), "--output", str(life.run), "--unsafe-seed", str(life.seed)]
    else:
        flags = [str(life.run)]
    sys.argv = ["dpvision", verb, *flags, "--threads", "1"]
    main()


def _own_loop(life: Life, board: Board) -> None:
    """A user's script: resume the run if it is there, and take the steps that are left."""
    import torch
    from torch import Tensor, nn

    from dpvision import Mechanism, PrivateRun

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(life.seed)
    inputs, targets = torch.randn((60, 12), generator=generator), torch.arange(60) % 3
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mechanism = Mechanism(
        num_units=60,
        expected_batch_size=20.0,
        clip_norm=0.5,
        noise_multiplier=1.0,
        steps=int(life.config["privacy"]["steps"]),
        delta=1e-3,
    )

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    with board.inside("start"):
        run = PrivateRun.resume(life.run, model, optimizer, or_start=mechanism, checkpoint_every=2)
    with board.inside("steps"):
        for batch in run.batches((inputs, targets)):
            run.step(batch, loss, microbatch_size=2)
    with board.inside("release"):
        if run.steps_taken and (run.steps_left or not (life.run / "release" / "certificate.json").exists()):
            run.release()


# ---- In the process that forks ranks


@final
class Forks:
    """A warm process that forks the ranks of all runs: torchrun's own processes only stand for them (``rank_stub``).

    Args:
        folder: where its socket is, and a file for each stub with the process that stands behind it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = folder / "forks"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.address))
        self._listening.listen(64)
        self._server = os.fork()
        if not self._server:
            self._serve()
        self._listening.close()

    def end(self) -> None:
        """End the process."""
        _kill(self._server)
        os.waitpid(self._server, 0)

    def of_stub(self, stub: int) -> int | None:
        """Return the process behind a stub, once it is there."""
        note = self.folder / f"stub-{stub}"
        text = note.read_text() if note.exists() else ""
        return int(text) if text.endswith("\n") else None

    def _serve(self) -> NoReturn:
        waiting: dict[int, socket.socket] = {}
        self._listening.settimeout(0.005)
        while True:
            try:
                stub, _ = self._listening.accept()
            except TimeoutError:
                pass
            else:
                stub.settimeout(None)
                asked = json.loads(stub.makefile().readline())
                worker = os.fork()
                if not worker:
                    self._be_a_rank(asked)
                waiting[worker] = stub
                (self.folder / f"stub-{asked['stub']}").write_text(f"{worker}\n")
                stub.sendall(f"{worker}\n".encode())
            while waiting:
                ended, status = os.waitpid(-1, os.WNOHANG)
                if not ended:
                    break
                with suppress(OSError), waiting.pop(ended) as stub:  # the stub may have ended before
                    stub.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())

    def _be_a_rank(self, asked: Mapping[str, Any]) -> NoReturn:
        code = 1
        try:
            os.environ.clear()
            os.environ.update(asked["environment"])
            described = Path(asked["description"])
            with (described.parent / f"{described.name.partition('.')[0]}.errors").open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            work_as(described)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:  # noqa: BLE001 - a child must not come back from here
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                sys.stdout.flush()
                atexit._run_exitfuncs()
            os._exit(code)


# ---- In the process that kills


@final
@dataclass(frozen=True)
class Job:
    """A torchrun and what it works on."""

    agent: subprocess.Popen[bytes]
    life: Life
    board: Board
    size: int
    forks: Forks | None = None

    @staticmethod
    def start(
        life: Life,
        kind: str,
        *,
        size: int,
        torchrun: Sequence[str],
        verb: str = "train",
        pause: float = PAUSE,
        forks: Forks | None = None,
        inside: Sequence[str] = (),
        **environment: str,
    ) -> Job:
        """Start torchrun.

        Args:
            life: the run.
            kind: of the run, from KINDS.
            size: the number of processes of this torchrun.
            torchrun: its flags.
            verb: "train" or "resume".
            pause: seconds that a step is made longer by.
            forks: makes the processes; without it torchrun starts Python programs.
            inside: a command before torchrun, which replaces itself by it.
            environment: variables.
        """
        board = life.run.with_suffix(".board")
        described = {"run": str(life.run), "config": life.config, "seed": life.seed, "kind": kind, "verb": verb}
        spec = life.run.with_suffix(f".{verb}.json")
        spec.write_text(json.dumps({**described, "board": str(board), "pause": pause}))
        life.run.with_suffix(".toml").write_text(_toml(life.config))
        command = [*inside, sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1", *torchrun]
        program = ["-m", "tools.kill_ranks", "--work", str(spec)]
        if forks is not None:
            program = [str(Path(__file__).with_name("rank_stub.py")), str(forks.address), str(spec)]
        command += [f"--nproc-per-node={size}", *program]
        more = {"DPVISION_RANK_TIMEOUT": str(RANK_TIMEOUT), "OMP_NUM_THREADS": "1", **environment}
        with life.errors.open("ab") as log:
            agent = subprocess.Popen(
                command, env={**os.environ, **more}, stdout=log, stderr=log, start_new_session=True
            )
        return Job(agent, life, Board(board), size, forks)

    @property
    def over(self) -> bool:
        """Whether torchrun ended."""
        return self.agent.poll() is not None

    def workers(self) -> dict[int, int]:
        """The processes of the run that live now: their ids by rank."""
        found: dict[int, int] = {}
        try:
            children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()
            for child in children:
                words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                rank = next((word[5:] for word in words if word.startswith(b"RANK=")), None)
                process = int(child) if self.forks is None else self.forks.of_stub(int(child))
                if rank is not None and process is not None:
                    found[int(rank)] = process
        except OSError:  # it ended while we looked
            return {}
        return found

    def new_workers(self, before: Mapping[int, int]) -> dict[int, int]:
        """Wait until all processes are other ones than ``before``; empty if torchrun ended.

        The board is cleared in between: torchrun starts new processes some time after it saw the last one end.
        """
        while not self.over and any(Path(f"/proc/{process}").exists() for process in before.values()):
            time.sleep(POLL)
        self.board.clear()
        while not self.over:
            found = self.workers()
            if len(found) == self.size and not set(found.values()) & set(before.values()):
                return found
            time.sleep(POLL)
        return {}

    def end(self, timeout: float = LONGEST_LIFE) -> bool:
        """Wait for torchrun; whether it ended well. A torchrun that takes too long is killed with its processes."""
        try:
            return self.agent.wait(timeout) == 0
        except subprocess.TimeoutExpired:
            self.kill()
            return False

    def kill(self) -> None:
        """Kill torchrun and all of its processes, as a power cut does."""
        for process in (self.agent.pid, *self.workers().values()):
            _kill(process)
        self.agent.wait()


def _kill(process: int) -> bool:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _toml(config: Mapping[str, Any], prefix: str = "") -> str:
    """Plain values as TOML: JSON writes numbers, texts and booleans in the same way."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in config.items() if not isinstance(value, Mapping)]
    for name, value in config.items():
        if isinstance(value, Mapping):
            lines += [f"[{prefix}{name}]", _toml(value, f"{prefix}{name}.")]
    return "\n".join(lines)


def double_releases(life: Life) -> int:
    """Count the steps of a run with replays that had two different noisy values."""
    lines = set(life.drawn.read_text().splitlines()) if life.drawn.exists() else set()
    return len(lines) - len({line.partition(":")[0] for line in lines})


def torment(job: Job, usual: Board, *, kills: int, chance: random.Random, counts: Counts) -> bool:
    """Kill processes of the run up to ``kills`` times, then let it end. False: it did not."""
    workers: dict[int, int] = {}
    for _ in range(kills):
        workers = job.new_workers(workers)
        target, victim = chance.randrange(len(PARTS)), chance.randrange(job.size)
        if not _reached(job, usual, PARTS[target], chance):
            break
        if workers and _kill(workers[victim]):
            counts.kills += 1
            counts.parts[PARTS[job.board.part]] += 1
            counts.ranks[victim] += 1
        counts.under_reported += is_under_reported(job.life)
    return job.end()


def _reached(job: Job, usual: Board, part: str, chance: random.Random) -> bool:
    """Wait for a random moment in a part of rank 0's life; whether torchrun still runs then."""
    target = PARTS.index(part)
    times = max(1, usual.entered[target])
    turn, delay = chance.randint(1, min(times, 2)), chance.uniform(0, usual.seconds[target] / times)
    while job.board.entered[target] < turn:
        if job.over:
            return False
        time.sleep(POLL)
    time.sleep(delay)
    return not job.over


def experiment(
    folder: Path, *, kills: int, steps: int = 9, seed: int = 0, kinds: tuple[str, ...] = KINDS, changing: bool = True
) -> Counts:
    """Kill processes of runs of every kind until ``kills`` kills have hit."""
    folder = folder.absolute()
    write_pictures(folder, side=8)
    replayed = tuple(kind for kind in kinds if kind != "own loop")
    warm_up(folder, kinds=replayed, steps=steps)
    forks = Forks(folder)
    chance = random.Random(seed)  # noqa: S311 - moments of killing, not secrets
    counts = Counts()
    while counts.kills < kills:
        for kind in kinds:
            if counts.kills >= kills:
                break
            size, wanted = chance.choices(SIZES, (3, 2, 1))[0], chance.randint(3, MOST_KILLS_PER_RUN)
            wanted = min(wanted, kills - counts.kills)
            name, before = f"{kind.replace(' ', '-')}-{counts.runs}", time.monotonic()
            one_run(
                folder,
                name,
                kind,
                steps,
                chance,
                counts,
                lambda life, usual, kind=kind, size=size, wanted=wanted: torment(
                    Job.start(
                        life, kind, size=size, torchrun=("--standalone", f"--max-restarts={2 * wanted}"), forks=forks
                    ),
                    usual,
                    kills=wanted,
                    chance=chance,
                    counts=counts,
                ),
            )
            took = time.monotonic() - before
            print(f"{name}, {size} processes, {took:.0f} s: {counts.kills} kills so far {counts.parts}", flush=True)
    if changing:
        kind = replayed[0]
        one_run(folder, "changing", kind, steps, chance, counts, lambda life, _: change_sizes(life, kind, (4, 2, 3)))
        print(f"4, then 2, then 3 processes: {'equal' if counts.good else 'see above'}", flush=True)
    forks.end()
    return counts


def one_run(
    folder: Path,
    name: str,
    kind: str,
    steps: int,
    chance: random.Random,
    counts: Counts,
    disturbed: Callable[[Life, Board], bool],
) -> None:
    """Take a run alone and one that is ``disturbed``, and compare them."""
    config = _config(kind, folder, steps=steps)
    seed, usual = chance.randrange(2**32), Board()
    alone, killed = Life(folder / f"{name}-alone", config, seed), Life(folder / f"{name}-killed", config, seed)
    if wait(spawn(alone, usual)) != 0:
        raise SystemExit(f"the undisturbed run failed:\n{alone.errors.read_text()}")
    ended = disturbed(killed, usual)
    counts.runs += 1
    counts.lost += not ended
    counts.under_reported += is_under_reported(killed)
    if kind != "own loop":
        counts.double += double_releases(killed)
        counts.different += ended and not same(alone.run, killed.run)
    else:
        from dpvision.release.verify import verify

        counts.double += len(killed.drawn.read_text().splitlines()) > charged(killed.run)
        counts.different += ended and not verify(killed.run).ok
    if not ended:
        print(f"{name} did not end:\n{killed.errors.read_text()[-4000:]}", flush=True)


def change_sizes(life: Life, kind: str, sizes: tuple[int, ...]) -> bool:
    """Take parts of a run with different numbers of processes; all of them are killed in between."""
    for index, size in enumerate(sizes):
        job = Job.start(life, kind, size=size, torchrun=("--standalone",), verb="resume" if index else "train")
        if index == len(sizes) - 1:
            return job.end()
        while job.board.entered[PARTS.index("checkpoint")] < 2:
            if job.over:
                return False
            time.sleep(POLL)
        job.kill()
        job.board.clear()
    return False


def _config(kind: str, folder: Path, *, steps: int) -> dict[str, Any]:
    config = config_of("linear" if kind == "own loop" else kind, folder, steps=steps)
    return {**config, "performance": {"microbatch_size": 2, "partial_sums": PARTIAL_SUMS}}


def main() -> int:
    """Run the experiment and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="where the runs are made; a new folder if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work_as(arguments.work)
        return 0
    folder = arguments.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    counts = experiment(folder, kills=arguments.kills, seed=arguments.seed)
    parts = ", ".join(f"{number} in {part}" for part, number in counts.parts.items())
    ranks = ", ".join(f"{number} of rank {rank}" for rank, number in counts.ranks.items())
    print(f"{counts.kills} kills over {counts.runs} runs: {parts}; {ranks}.")
    print(f"under-reported: {counts.under_reported}; lost: {counts.lost}; double releases: {counts.double}")
    print(f"runs that differ from the run left alone, or that do not verify: {counts.different}")
    return 0 if counts.good else 1


if __name__ == "__main__":
    sys.exit(main())
