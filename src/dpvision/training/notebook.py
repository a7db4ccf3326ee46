"""A run in a notebook: its progress, and results and certificates as HTML. Only public values are shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, final

from dpvision.release.report import summary_lines
from dpvision.training.callbacks import RunCallback
from dpvision.training.defaults import Choice


def in_notebook() -> bool:
    """Return whether the program runs in a notebook's kernel; a terminal, IPython's too, is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def default_callback() -> RunCallback:
    """Return what is told about progress if the caller names nothing: a bar in a notebook, and nothing elsewhere."""
    return NotebookProgress() if in_notebook() else RunCallback()


@final
class NotebookProgress(RunCallback):
    """A progress bar in the output of a cell: steps, epsilon so far, the last metric of public test data."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._name, self._steps, self._shown, self._last = "", 1, -1, ""

    def started(self, *, name: str, steps: int, done: int, choices: tuple[Choice, ...]) -> None:
        """Show the bar."""
        del choices
        self._name, self._steps = name, max(1, steps)
        self._show(done, "")

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        """Move the bar, a hundred times in a run at most."""
        percent = 100 * done // self._steps
        if percent > self._shown:
            self._show(done, "" if epsilon_bound is None else f", epsilon at most {epsilon_bound:.2f}")

    def evaluated(self, point: dict[str, Any]) -> None:
        """Keep the newest score."""
        score = point.get("accuracy", point.get("dice"))
        self._last = "" if score is None else f", test score {score:.1%}"

    def _show(self, done: int, epsilon: str) -> None:
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports] - only inside of IPython

        self._shown = 100 * done // self._steps
        text = escape(f"{self._name}: step {done} of {self._steps}{epsilon}{self._last}")
        page = HTML(f'<progress value="{done}" max="{self._steps}"></progress> {text}')
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


@final
class ShownCertificate(dict[str, Any]):
    """The content of certificate.json; a notebook shows it as a table."""

    def _repr_html_(self) -> str:
        names = ("epsilon", "delta", "adjacency", "privacy_unit", "steps_taken", "for_release")
        return table("Certificate", [(name.replace("_", " "), str(self[name])) for name in names if name in self])


def result_table(certificate: Mapping[str, Any], metrics: Mapping[str, Any], files: Mapping[str, object]) -> str:
    """Return a result as HTML: what the command prints, and where the files are."""
    parts = (line.partition("  ") for line in summary_lines(certificate, metrics))
    lines = [(first.rstrip(":"), rest.strip()) for first, _, rest in parts]
    return table("Private training", [*lines, *((name, str(path)) for name, path in files.items())])


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return rows of two texts as an HTML table."""
    left = 'style="text-align:left"'
    cells = (f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(title)}</caption>{''.join(cells)}</table>"
