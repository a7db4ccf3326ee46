"""Several processes of one run on this machine: forks of the test, joined over gloo on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from dpvision.ranks import TIMEOUT

LONGEST = 400.0
"""Seconds after which the processes of a test are killed."""


@final
@dataclass(frozen=True)
class Ended:
    """How a process ended: what its function returned, or its error; neither if it was killed."""

    value: Any = None
    error: str | None = None
    code: int = 0


def run_ranks(size: int, function: Callable[[int], Any], folder: Path, *, timeout: float = 60.0) -> list[Ended]:
    """Call ``function(rank)`` in as many processes as torchrun would start, and return how each ended.

    Args:
        size: the number of processes; one is told that torchrun started it, too.
        function: returns plain values.
        folder: where results are kept.
        timeout: seconds that a rank waits for another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as kept:
        # Rank 0 may listen on the port meanwhile, and the system gives it to no other process.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        children = {_forked(rank, size, port, function, folder, timeout): rank for rank in range(size)}
        codes, began = {}, time.monotonic()
        while len(codes) < size:
            for child, rank in children.items():
                if rank not in codes:
                    done, status = os.waitpid(child, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
                    elif time.monotonic() - began > LONGEST:
                        os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
    return [_ended(folder / f"ended-{rank}.json", codes[rank]) for rank in range(size)]


def values_of(ended: list[Ended]) -> list[Any]:
    """Return what every process returned; none may have failed."""
    assert [each.error for each in ended] == [None] * len(ended)
    assert {each.code for each in ended} == {0}
    return [each.value for each in ended]


def _forked(rank: int, size: int, port: int, function: Callable[[int], Any], folder: Path, timeout: float) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), TIMEOUT: str(timeout)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            ended = {"value": function(rank)}
        except Exception as error:  # noqa: BLE001 - told to the test
            ended = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        (folder / f"ended-{rank}.json").write_text(json.dumps(ended))
        # Rank 0 holds the store, in which the others may still look up why a step failed.
        time.sleep(0.5 if rank == 0 else 0)
    finally:
        os._exit(0)


def _ended(path: Path, code: int) -> Ended:
    if not path.exists():
        return Ended(code=code)
    found = json.loads(path.read_text())
    path.unlink()
    return Ended(found.get("value"), found.get("error"), code)
