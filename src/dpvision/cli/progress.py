"""The progress bar of a run: step, epsilon spent, accuracy on the public test split, time left."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dpvision.cli.console import printable
from dpvision.training.callbacks import RunCallback
from dpvision.training.defaults import Choice


class TerminalProgress(RunCallback):
    """Draws on stderr, so that stdout carries figures only."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None

    def started(self, *, name: str, steps: int, done: int, choices: tuple[Choice, ...]) -> None:
        """Print what was chosen and open the bar."""
        for choice in choices:
            line = f"  {choice.setting} = {choice.value}  [dim]({escape(choice.reason)})[/dim]"
            self._console.print(line, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[epsilon]}"),
            TextColumn("{task.fields[accuracy]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar.start()
        self._task = self._bar.add_task(escape(name), total=steps, completed=done, epsilon="", accuracy="")

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        """Move the bar."""
        if self._bar is None:
            return
        # Rounded up: a bound that is shown must be one.
        text = "no privacy" if epsilon_bound is None else f"ε ≤ {math.ceil(epsilon_bound * 1000) / 1000:.3f}"
        self._bar.update(self._task, completed=done, epsilon=text)

    def evaluated(self, point: dict[str, Any]) -> None:
        """Show the newest figure of the test split: accuracy, or Dice."""
        if self._bar is not None:
            figure = f"Dice {point['dice']:.3f}" if "dice" in point else f"{point['accuracy']:.2%}"
            self._bar.update(self._task, accuracy=f"test {figure}")

    def message(self, text: str) -> None:
        """One line above the bar."""
        self._console.print(escape(printable(text)), highlight=False)

    def finished(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
