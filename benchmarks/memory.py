"""Peak memory of one contender's steps, measured in a process of its own: ``python -m benchmarks.memory JSON``.

Model and data are built first; what the steps take beyond that is the figure. The first step is among them: whatever
it compiles or tries out must fit as well. Program code that a step is the first to touch is not: the kernel maps it
from its file, and can drop it again.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Final

from benchmarks.contenders import contender
from benchmarks.machine import threads
from benchmarks.timing import quiet, reason_of
from benchmarks.workload import Workload

STEPS: Final = 2
_KIBIBYTE: Final = 1024
_SELF: Final = Path("/proc/self")


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
