"""Peak memory of one contender's steps, measured in a process of its own: ``python -m benchmarks.memory JSON``.

Model and data are built first; the result is what the steps take beyond that. The first step is included: what it
compiles or tries out must fit as well. Program code that a step is the first to touch is not included: the kernel maps
it from its file, and can drop it again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, final

from benchmarks.contenders import contender
from benchmarks.machine import threads
from benchmarks.timing import quiet, reason_of
from benchmarks.workload import Workload

STEPS: Final = 2
_SECONDS: Final = 3600
_KIBIBYTE: Final = 1024
_SELF: Final = Path("/proc/self")


@final
@dataclass(frozen=True)
class PeakMemory:
    """Bytes that a contender's steps took beyond model and data, or why they are not known."""

    added_bytes: int | None
    fails: str | None = None


def peak_memory(name: str, workload: Workload, *, num_threads: int) -> PeakMemory:
    """Measure one contender in a new process; a process that dies, of too little memory say, is a result too."""
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


def added_bytes(name: str, workload: Workload) -> int:
    """The most resident memory during a few steps, minus what was resident before the first and program code."""
    with quiet():
        step = contender(name).make(workload)
        before, code_before = _resident("VmRSS"), _resident("RssFile")
        _forget_peak()
        for _ in range(STEPS):
            step()
    code = max(0, _resident("RssFile") - code_before)
    return max(0, _resident("VmHWM") - before - code)


def _resident(field: str) -> int:
    # Not getrusage: its maximum is inherited from the process that started this one.
    match = re.search(rf"^{field}:\s+(\d+) kB", (_SELF / "status").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"the kernel does not tell {field}")
    return int(match[1]) * _KIBIBYTE


def _forget_peak() -> None:
    """Start the peak anew, where the kernel lets us: building may have needed more than the steps do."""
    try:
        (_SELF / "clear_refs").write_text("5")
    except OSError as error:
        print(f"the peak while building counts too: {reason_of(error)}", file=sys.stderr)


def main(argument: str) -> None:
    """Measure what ``argument`` describes and print the figure, or why there is none, as JSON."""
    asked = json.loads(argument)
    try:
        with threads(asked["threads"]):
            answer = {"bytes": added_bytes(asked["contender"], Workload(**asked["workload"]))}
    except Exception as error:  # noqa: BLE001 - whatever a peer does, its row says so
        answer = {"fails": reason_of(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
