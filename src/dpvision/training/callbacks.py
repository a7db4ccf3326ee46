"""Who looks on while a run goes: told public things only.

Ctrl-C and SIGTERM end a run between two steps; a second one ends it at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, final

from dpvision.training.defaults import Choice


class Watcher(Protocol):
    """What a progress display or a test hears of a run. No private figure passes through here."""

    def started(self, *, name: str, steps: int, done: int, choices: tuple[Choice, ...]) -> None:
        """The run begins, or goes on after ``done`` steps."""

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        """A step is over; what was spent so far is at most ``epsilon_bound``."""

    def evaluated(self, point: dict[str, Any]) -> None:
        """One more point of the curve on the public test split."""

    def said(self, text: str) -> None:
        """Something the user should know."""

    def finished(self) -> None:
        """The loop is over."""


class Silence:
    """Hears everything, says nothing."""

    def started(self, *, name: str, steps: int, done: int, choices: tuple[Choice, ...]) -> None:
        """Nothing."""

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        """Nothing."""

    def evaluated(self, point: dict[str, Any]) -> None:
        """Nothing."""

    def said(self, text: str) -> None:
        """Nothing."""

    def finished(self) -> None:
        """Nothing."""


@final
class StopRequest:
    """True once somebody asked the run to stop."""

    def __init__(self) -> None:
        self.requested = False

    def ask(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: remember the first request, obey the second at once."""
        del signum, frame
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM while the block runs; outside the main thread, catch nothing."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    old = {number: signal.signal(number, request.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
