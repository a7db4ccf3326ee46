"""The bar chart of docs/evidence/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import PLAIN, Result
from dpvision.errors import ArgumentError
from dpvision.papers.table_page import svg_chart

# pyright: reportUnknownMemberType=false
# matplotlib's stubs leave keyword arguments untyped.


_WIDEST: Final = 4.0
_INK, _SOFT, _RULE = "#18212b", "#55616e", "#e1e5ea"
_BAR: Final = 0.19


@final
@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One bar of every workload: its place in the group, its colour, and whose ratio it shows."""

    label: str
    colour: str
    place: int

    def ratio(self, result: Result) -> float | None:
        names = (result.fastest_ordinary, result.headline, PLAIN, result.fastest_peer)
        name = names[self.place]
        return None if name is None else result.ratio(name)


_KINDS: Final = (
    _Kind(label="fastest ordinary PyTorch", colour="#8591a0", place=0),
    _Kind(label="dpvision, private", colour="#1c5d99", place=1),
    _Kind(label="dpvision, private, without native kernels", colour="#7fa9cf", place=2),
    _Kind(label="fastest peer, private", colour="#c4561a", place=3),
)


def bar_chart(results: Sequence[Result]) -> bytes:
    """Times as multiples of the ordinary eager step, as SVG: four bars a workload, and a line at one."""
    if not results:
        raise ArgumentError("a chart must have at least one workload, got none.")

    def draw(figure: Figure, axes: Axes) -> None:
        for kind in _KINDS:
            _draw(axes, kind, results)
        _dress(axes, results)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=_INK)

    return svg_chart(draw, width=9.5, height=1.3 + 0.95 * len(results))


def _draw(axes: Axes, kind: _Kind, results: Sequence[Result]) -> None:
    """The bars of one kind. One that is too long ends at the edge, and its label tells how long it is."""
    found = [(place, kind.ratio(result)) for place, result in enumerate(results)]
    bars = [(place + (kind.place - 1.5) * _BAR * 1.1, value) for place, value in found if value is not None]
    axes.barh(
        [place for place, _ in bars],
        [min(value, _WIDEST) for _, value in bars],
        height=_BAR,
        color=kind.colour,
        label=kind.label,
    )
    for place, value in bars:
        text = f"{value:.2f}" if value <= _WIDEST else f"{value:.1f} →"
        # On white, so that the line at one does not run through the figure.
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axes.text(min(value, _WIDEST) + 0.03, place, text, va="center", fontsize=8, color=_INK, bbox=box)


def _dress(axes: Axes, results: Sequence[Result]) -> None:
    axes.axvline(1.0, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(results)), [result.workload.title.replace(", batch", ",\nbatch") for result in results])
    axes.invert_yaxis()
    longest = max((kind.ratio(result) or 0.0 for kind in _KINDS for result in results), default=1.0)
    axes.set_xlim(0, min(max(longest, 1.0), _WIDEST) + 0.3)
    axes.set_xlabel("time of a training step; ordinary eager PyTorch = 1", color=_SOFT)
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="x", color=_RULE)
    axes.tick_params(colors=_SOFT, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)
