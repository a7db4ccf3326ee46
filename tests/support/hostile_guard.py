"""Watch a test case from inside its process: no writes elsewhere, programs, pickles, network, hangs or large memory."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, final

SECONDS = 10.0
"""A case that computes for longer hangs."""
PATIENCE = 6
"""This many times as long may pass on the clock, because other programs use the processor too."""
MAX_GROWTH = 512 * 2**20
"""Bytes of memory that one case may use: the inputs are small."""
ADDRESS_SPACE = 3 * 2**30
"""During a case the system refuses more address space than this, on top of what the process has before it."""
CANARY = "dpvision_fuzz_canary"
"""A module that hostile pickles name. A reader that imports it executes what a file says."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PROGRAMS = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "pty.spawn"}
)
_CHANGES = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"})
_NETWORK = frozenset({"socket.connect", "socket.getaddrinfo", "socket.bind"})


class Hang(BaseException):
    """Raised in the middle of a case that takes too long. Nothing in the product catches it."""


@final
class Guard:
    """The watcher of one process. An audit hook cannot be removed, so a process has one guard.

    Args:
        allowed: folders in which a case may write.
        seconds: limit on computing in a case.
    """

    def __init__(self, *allowed: Path, seconds: float = SECONDS) -> None:
        self._allowed = (*(os.path.realpath(folder) + os.sep for folder in allowed), "/dev/null")
        self._seconds = seconds
        self._active = False
        self._began = (0.0, 0.0)
        self.violations: list[str] = []
        sys.addaudithook(self._on_event)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one case. Afterwards, ``violations`` lists the forbidden things that it did.

        Raises:
            Hang: the case takes too long.
        """
        self.violations = []
        Path("/proc/self/clear_refs").write_text("5")  # start the peak again
        before, limits = _status("VmRSS"), resource.getrlimit(resource.RLIMIT_AS)
        # The alarm reaches Python code only; this ends the process when a library hangs.
        faulthandler.dump_traceback_later(2 * PATIENCE * self._seconds, exit=True, file=sys.__stderr__)
        handler = signal.signal(signal.SIGALRM, self._on_alarm)
        resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + ADDRESS_SPACE, limits[1]))
        signal.setitimer(signal.ITIMER_REAL, self._seconds, 1)
        self._began = (time.process_time(), time.monotonic())
        self._active = True
        try:
            yield
        finally:
            self._active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            faulthandler.cancel_dump_traceback_later()
            growth = _status("VmHWM") - before
            if growth > MAX_GROWTH:
                self.violations.append(f"took {growth / 2**20:.0f} MiB of memory")
            if CANARY in sys.modules:
                del sys.modules[CANARY]
                self.violations.append("imported a module that a file names")

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        found = None
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
            found = self._outside(arguments[:1], followed=not arguments[2] & os.O_NOFOLLOW)
        elif event in _CHANGES:
            found = self._outside(arguments)
        elif event in _PROGRAMS or event in _NETWORK:
            found = f"{arguments!r:.100}"
        elif event == "pickle.find_class":
            found = f"{arguments[1:]!r:.100}"
        if found is not None:
            self.violations.append(f"{event} of {found}")

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        computed, passed = time.process_time() - self._began[0], time.monotonic() - self._began[1]
        if self._active and (computed >= self._seconds or passed >= PATIENCE * self._seconds):
            raise Hang

    def _outside(self, arguments: tuple[Any, ...], *, followed: bool = False) -> str | None:
        for path in arguments:
            if not isinstance(path, (str, bytes)):
                continue
            # Renaming or removing a link changes the link, opening it changes what it leads to.
            folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
            real = os.path.realpath(path) if followed else os.path.join(os.path.realpath(folder), name)
            if not os.fsdecode(real).startswith(self._allowed):
                return repr(real)
        return None


def _status(name: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
