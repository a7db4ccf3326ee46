"""Observe and stop a run: callbacks for progress displays and tests, and signal handling.

Ctrl-C and SIGTERM end a run between two steps; a second signal ends it immediately.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from dpvision.training.defaults import Choice


class RunCallback:
    """What a progress display or a test is told about a run: override what you need, every method does nothing here.

    Guarantee: only public values are passed: step counts, epsilon and metrics of the public test split.
    """

    def started(self, *, name: str, steps: int, done: int, choices: tuple[Choice, ...]) -> None:
        """The run of model ``name`` starts, or continues after ``done`` of its ``steps`` steps."""

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        """``done`` steps are finished; the epsilon spent so far is at most ``epsilon_bound``."""

    def evaluated(self, point: dict[str, Any]) -> None:
        """One more point of the curve on the public test split."""

    def progressed(self, what: str, *, done: int, total: int) -> None:
        """``done`` of ``total`` rows of other long work, such as "features of mnist", are finished."""

    def message(self, text: str) -> None:
        """A note for the user, one line."""

    def finished(self) -> None:
        """The loop has ended, also after an error."""

    def of_baseline(self) -> RunCallback:
        """Return who is told about the non-private baseline of the run: no one, unless overridden.

        Its metrics come from weights without noise. They are public only where the training images are.
        """
        return RunCallback()


@final
class Callbacks(RunCallback):
    """Several callbacks as one, told in their order.

    Args:
        callbacks: the callbacks.
    """

    def __init__(self, *callbacks: RunCallback) -> None:
        self._callbacks = callbacks

    def started(self, *, name: str, steps: int, done: int, choices: tuple[Choice, ...]) -> None:
        """Tell each callback."""
        for each in self._callbacks:
            each.started(name=name, steps=steps, done=done, choices=choices)

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        """Tell each callback."""
        for each in self._callbacks:
            each.stepped(done=done, epsilon_bound=epsilon_bound)

    def evaluated(self, point: dict[str, Any]) -> None:
        """Tell each callback."""
        for each in self._callbacks:
            each.evaluated(point)

    def progressed(self, what: str, *, done: int, total: int) -> None:
        """Tell each callback."""
        for each in self._callbacks:
            each.progressed(what, done=done, total=total)

    def message(self, text: str) -> None:
        """Tell each callback."""
        for each in self._callbacks:
            each.message(text)

    def finished(self) -> None:
        """Tell each callback."""
        for each in self._callbacks:
            each.finished()

    def of_baseline(self) -> RunCallback:
        """Return those that the callbacks give."""
        return Callbacks(*(each.of_baseline() for each in self._callbacks))


@final
class StopRequest:
    """Whether a stop was requested by a signal."""

    def __init__(self) -> None:
        self.requested = False

    def ask(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: remember the first one, raise KeyboardInterrupt on the second."""
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
