"""The progress display of a run, on stderr: stdout carries results only.

A bar for the steps with the epsilon spent and the newest test metric, and a bar for other long work such as the
extraction of features. Both show the time that has passed and the time that is left.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from dpvision.errors import printable
from dpvision.training.callbacks import RunCallback
from dpvision.training.defaults import Choice


class TimeColumn(ProgressColumn):
    """The time that has passed, and an estimate of the time that is left."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """Write both times as h:mm:ss."""
        text = f"elapsed {_clock(task.finished_time if task.finished else task.elapsed)}"
        if not task.finished and task.time_remaining is not None:
            text += f", about {_clock(task.time_remaining)} left"
        return Text(text)


def _clock(seconds: float | None) -> str:
    """Seconds as m:ss, or h:mm:ss from one hour on."""
    text = str(timedelta(seconds=math.ceil(seconds or 0)))
    return text.removeprefix("0:").removeprefix("0") if text.startswith("0:") else text


class TerminalProgress(RunCallback):
    """Draws on stderr what a run reports."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._tasks: dict[str, Any] = {}

    def started(self, *, name: str, steps: int, done: int, choices: tuple[Choice, ...]) -> None:
        """Print what was chosen, and show the bar of the steps."""
        for choice in choices:
            chosen = escape(printable(f"{choice.setting} = {choice.value}"))
            line = f"  {chosen}  [dim]({escape(choice.reason)})[/dim]"
            self._console.print(line, highlight=False)
        self._add("steps", description=escape(name), total=steps, completed=done)

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        """Move the bar of the steps."""
        # Rounded up: a bound that is shown must be one.
        text = "no privacy" if epsilon_bound is None else f"ε ≤ {math.ceil(epsilon_bound * 1000) / 1000:.3f}"
        self._update("steps", completed=done, epsilon=text)

    def evaluated(self, point: dict[str, Any]) -> None:
        """Show the newest metric of the test split: Dice, mean AUC or accuracy."""
        if "mean_auc" in point:
            metric = "AUC not known" if point["mean_auc"] is None else f"AUC {point['mean_auc']:.3f}"
        else:
            metric = f"Dice {point['dice']:.3f}" if "dice" in point else f"{point['accuracy']:.2%}"
        self._update("steps", metric=f"test {metric}")

    def progressed(self, what: str, *, done: int, total: int) -> None:
        """Show or move the bar of other long work; it disappears when the work is done."""
        if what not in self._tasks:
            self._add(what, description=escape(printable(what)), total=total)
        self._update(what, completed=done)
        if done >= total and self._bar is not None:
            self._bar.remove_task(self._tasks.pop(what))

    def message(self, text: str) -> None:
        """Print one line above the bars."""
        self._console.print(escape(printable(text)), highlight=False)

    def of_baseline(self) -> TerminalProgress:
        """Show the progress of the baseline too: the terminal is the operator's."""
        return self

    def close(self) -> None:
        """Close the bars, also after an error before the first step."""
        self.finished()

    def finished(self) -> None:
        """Close the bars."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._tasks = None, {}

    def _add(self, name: str, **fields: Any) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
            values = (TextColumn("{task.fields[epsilon]}"), TextColumn("{task.fields[metric]}"))
            self._bar = Progress(*columns, *values, TimeColumn(), console=self._console)
            self._bar.start()
        self._tasks[name] = self._bar.add_task(epsilon="", metric="", **fields)

    def _update(self, name: str, **fields: Any) -> None:
        if self._bar is not None and name in self._tasks:
            self._bar.update(self._tasks[name], **fields)
