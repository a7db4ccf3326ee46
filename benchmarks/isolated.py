"""Ask a process of its own for a contender's peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Final, final

from benchmarks.workload import Workload

_SECONDS: Final = 3600


@final
@dataclass(frozen=True)
class PeakMemory:
    """Bytes that a contender's steps took beyond model and data, or why they are not known."""

    added_bytes: int | None
    fails: str | None = None


def peak_memory(name: str, workload: Workload, *, num_threads: int) -> PeakMemory:
    """The figure for one contender; a process that dies, of too little memory say, is an answer too."""
    asked = json.dumps({"contender": name, "workload": asdict(workload), "threads": num_threads})
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory", asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return PeakMemory(None, f"took more than {_SECONDS} seconds")
    if done.returncode:
        return PeakMemory(None, f"ended with exit code {done.returncode}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return PeakMemory(answer.get("bytes"), answer.get("fails"))
