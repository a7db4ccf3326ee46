"""Observe and stop a run: callbacks for progress displays and tests, and signal handling.

Ctrl-C and SIGTERM end a run between two steps; a second signal ends it immediately.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from dpvision.training.defaults import Choice

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpvision.data import Normalisation
    from dpvision.data.store import MappedImages


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A copy of a run's weights at one moment, for a callback that wants them.

    Attributes:
        step: finished steps.
        epsilon: spent so far; None without privacy.
        private: whether the weights are covered by the run's guarantee.
        model: a copy in evaluation mode; the run does not see what happens to it.
        moments: copies of the optimizer's state, by "exp_avg/PARAMETER" and the like.
        normalisation: the pixel constants.
        public_images: test images (uint8) that are public for any use; None if the run has none.
    """

    step: int
    epsilon: float | None
    private: bool
    model: nn.Module
    moments: Mapping[str, Tensor]
    normalisation: Normalisation
    public_images: Tensor | MappedImages | None

    def normalised(self, images: Tensor) -> Tensor:
        """Return images as the model takes them."""
        return self.normalisation.apply(images)


class RunCallback:
    """What a progress display or a test is told about a run: override what you need, every method does nothing here.

    Guarantee: only public values are passed: step counts, epsilon, metrics of the public test split and, to callbacks
    that want them, weights, which are as public as those of the release.
    """

    def started(self, *, name: str, steps: int, done: int, choices: tuple[Choice, ...]) -> None:
        """The run of model ``name`` starts, or continues after ``done`` of its ``steps`` steps."""

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        """``done`` steps are finished; the epsilon spent so far is at most ``epsilon_bound``."""

    def evaluated(self, point: dict[str, Any]) -> None:
        """One more point of the curve on the public test split."""

    @property
    def wants_weights(self) -> bool:
        """Whether ``weights`` is to be called; copies are not made otherwise."""
        return False

    def weights(self, snapshot: Snapshot) -> None:
        """A copy of the weights before the first step and at each evaluation, if ``wants_weights``.

        Those of a private run are functions of charged releases: they may be used like released weights.
        """

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

    @property
    def wants_weights(self) -> bool:
        """Whether any callback wants them."""
        return any(each.wants_weights for each in self._callbacks)

    def weights(self, snapshot: Snapshot) -> None:
        """Tell the callbacks that want them."""
        for each in self._callbacks:
            if each.wants_weights:
                each.weights(snapshot)

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
