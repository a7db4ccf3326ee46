"""Who looks on while a run goes: told public things only."""

from __future__ import annotations

from typing import Any, Protocol

from dpvision.training.proposals import Choice


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
