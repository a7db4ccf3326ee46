"""Real torchruns: killed ranks, changing numbers of workers, workers that come and go, and a cut network."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.release.verify import verify
from tools.kill_ranks import PARTIAL_SUMS, Forks, Job, change_sizes, double_releases, experiment
from tools.kill_runs import PARTS, Board, Life, charged, config_of, is_under_reported, same, spawn, wait, write_pictures

pytestmark = pytest.mark.slow
LONGEST = 400.0
LEDGER = Path("release", "ledger.jsonl")


def a_run(folder: Path, *, steps: int = 9) -> tuple[Life, Life]:
    """A run that one process took alone, and the same run, not begun yet."""
    write_pictures(folder, side=8)
    config = config_of("linear", folder, steps=steps)
    config["performance"] = {"microbatch_size": 2, "partial_sums": PARTIAL_SUMS}
    alone, other = (Life(folder / name, config, 4711) for name in ("alone", "run"))
    assert wait(spawn(alone, Board())) == 0, alone.errors.read_text()
    return alone, other


def until(true: Callable[[], bool], what: str) -> None:
    """Wait for it, at most LONGEST seconds."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < LONGEST, f"waited too long: {what}"
        time.sleep(0.005)


def entered(job: Job, part: str) -> int:
    return job.board.entered[PARTS.index(part)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def ended_at_last(*jobs: Job) -> Iterator[None]:
    try:
        yield
    finally:
        for job in jobs:
            if not job.over:
                job.kill()


def test_killed_ranks_under_torchrun_lose_nothing_and_release_nothing_twice(tmp_path: Path) -> None:
    counts = experiment(tmp_path, kills=4, seed=3, kinds=("linear", "own loop"), changing=False)
    assert counts.kills == 4
    assert counts.good


def test_a_run_of_four_then_two_then_three_workers_equals_one_left_alone(tmp_path: Path) -> None:
    alone, run = a_run(tmp_path)
    assert change_sizes(run, "linear", (4, 2, 3)), run.errors.read_text()[-2000:]
    assert same(alone.run, run.run)
    assert not is_under_reported(run)
    assert double_releases(run) == 0


def test_workers_that_leave_and_join_an_elastic_job_change_nothing(tmp_path: Path) -> None:
    """One torchrun of two is killed; later another one joins. Membership changes are no failures to torchrun."""
    alone, run = a_run(tmp_path, steps=150)
    endpoint = f"127.0.0.1:{free_port()}"
    elastic = (
        "--nnodes=1:4",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-id=job",
        f"--rdzv-endpoint={endpoint}",
    )
    elastic += ("--rdzv-conf=last_call_timeout=2",)

    def another() -> Job:
        # Without the last one, torchrun of PyTorch 2.13 waits in vain for an address when a machine joins later.
        more = {"DPVISION_RANK_TIMEOUT": "60", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return Job.start(run, "linear", size=1, torchrun=elastic, pause=0.3, forks=forks, **more)

    def together(*jobs: Job) -> bool:
        return {rank for job in jobs for rank in job.workers()} == set(range(len(jobs)))

    def checkpoints() -> int:
        return entered(first, "checkpoint")

    forks = Forks(tmp_path)
    first = another()
    until(lambda: bool(first.workers()), "the first torchrun hosts the rendezvous")
    second = another()
    with ended_at_last(first, second):
        until(lambda: together(first, second) and checkpoints() >= 3, "two workers")
        second.kill()
        first.board.clear()
        until(lambda: checkpoints() >= 3, "the worker that is left continues")
        third = another()
        with ended_at_last(third):
            until(lambda: first.over or together(first, third), "a new worker joins")
            assert not first.over, run.errors.read_text()[-3000:]
            assert first.end(), run.errors.read_text()[-3000:]
    forks.end()
    # Workers that torchrun ends for a new one release what they have, as after Ctrl-C; nothing else may differ.
    weights, charges = (
        "release/weights.safetensors",
        [charges_of(read_ledger(each.run / LEDGER)) for each in (alone, run)],
    )
    assert (alone.run / weights).read_bytes() == (run.run / weights).read_bytes()
    assert charges[0] == charges[1]
    assert verify(run.run).ok
    assert not is_under_reported(run)
    assert double_releases(run) == 0


# ---- Two machines whose network is cut


@contextmanager
def two_networks() -> Iterator[tuple[list[str], list[str], Callable[[], None]]]:
    """Two network namespaces with one cable: a command to enter each, and a function that cuts the cable.

    They have no names and no way out, and end with the two processes that hold them, at the latest after ten minutes.
    """
    holders = []
    try:
        hold = ["unshare", "--net", "sleep", "600"]
        for _ in range(2):
            holders.append(subprocess.Popen(hold))
        inside = [["nsenter", f"--net=/proc/{holder.pid}/ns/net"] for holder in holders]
        own = os.readlink("/proc/self/ns/net")
        until(lambda: all(os.readlink(f"/proc/{holder.pid}/ns/net") != own for holder in holders), "the namespaces")
        one, other = inside
        _run([*one, "ip", "link", "add", "name", "cable0", "type", "veth", "peer", "name", "cable1"])
        _run([*one, "ip", "link", "set", "cable1", "netns", str(holders[1].pid)])
        for number, enter in enumerate(inside):
            _run([*enter, "ip", "address", "add", f"10.77.0.{number + 1}/24", "dev", f"cable{number}"])
            for device in ("lo", f"cable{number}"):
                _run([*enter, "ip", "link", "set", device, "up"])
        yield one, other, lambda: _run([*one, "ip", "link", "set", "cable0", "down"])
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr}")


def _why_no_networks() -> str | None:
    """Say why no network namespaces can be made here."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    try:
        with two_networks():
            return None
    except OSError as error:
        return f"network namespaces can't be made: {error}"


@pytest.mark.parametrize("first", [0, 1])
def test_a_cut_network_never_gives_two_releases_of_a_step(tmp_path: Path, first: int) -> None:
    """Both halves try to continue the run of their shared folder, while the old processes still hang and afterwards."""
    reason = _why_no_networks()
    if reason is not None:
        pytest.skip(reason)
    alone, run = a_run(tmp_path, steps=60)
    with two_networks() as (one, other, cut):

        def part(number: int) -> Job:
            flags = ("--nnodes=2", f"--node-rank={number}", "--master-addr=10.77.0.1", "--master-port=29400")
            return Job.start(
                run,
                "linear",
                size=1,
                torchrun=flags,
                pause=0.03,
                inside=(one, other)[number],
                GLOO_SOCKET_IFNAME=f"cable{number}",
                DPVISION_RANK_TIMEOUT="30",
            )

        halves = [part(0), part(1)]
        with ended_at_last(*halves):
            until(lambda: entered(halves[0], "checkpoint") >= 4 or halves[0].over, "the run goes on")
            cut()
            before = time.monotonic()
            early = Job.start(
                run, "linear", size=1, torchrun=("--standalone",), verb="resume", inside=(one, other)[first]
            )
            with ended_at_last(early):
                assert not early.end(), "the old rank 0 still holds the run"
            assert "is in use by process" in run.errors.read_text()
            for half in halves:
                until(lambda half=half: not half.workers(), "both halves end")
            assert time.monotonic() - before < 60, "the timeout is 30 s"
            assert not is_under_reported(run)
        again = [
            Job.start(run, "linear", size=2, torchrun=("--standalone",), verb="resume", inside=(one, other)[number])
            for number in random.Random(first).sample((0, 1), 2)
        ]
        with ended_at_last(*again):
            ended = [job.end() for job in again]
    assert any(ended), run.errors.read_text()[-3000:]
    assert verify(run.run).ok
    assert same(alone.run, run.run)
    assert charged(run.run) == 60
    assert not is_under_reported(run)
    assert double_releases(run) == 0
