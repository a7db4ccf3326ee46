"""Scales and axes of our small charts, as SVG without colours: the page's style sheet gives those."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from dpvision.release.report_markup import Markup, element, join

Point = tuple[float, float]
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@final
@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values from ``low..high`` to pixels from ``start..stop``, by logarithm where asked."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low)
        return round(self.start + share * (self.stop - self.start), 2)


@final
@dataclass(frozen=True, kw_only=True)
class Frame:
    """The plotting area of a chart."""

    width: float
    height: float
    x: Scale
    y: Scale

    def path(self, points: Sequence[Point], *, closed: bool = False) -> str:
        """Path data through ``points``."""
        steps = " L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
        return f"M{steps}{' Z' if closed else ''}"


def frame(
    *, width: float, height: float, x: tuple[float, float], y: tuple[float, float], logarithmic: bool = False
) -> Frame:
    """A frame with room for tick labels on the left and below, and for the y title on top."""
    left, right, top, bottom = 54, 22, 36, 50
    return Frame(
        width=width,
        height=height,
        x=Scale(low=x[0], high=x[1], start=left, stop=width - right, logarithmic=logarithmic),
        y=Scale(low=y[0], high=y[1], start=height - bottom, stop=top, logarithmic=logarithmic),
    )


def ticks(low: float, high: float, *, about: int) -> list[float]:
    """Round numbers inside ``low..high``, ``about`` that many."""
    rough = (high - low) / max(about, 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in _STEPS if factor * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def grid(
    box: Frame,
    *,
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
    x_title: str,
    y_title: str,
) -> Markup:
    """Horizontal grid lines, tick labels, and titles: x below the axis, y upright above it."""
    parts: list[Markup] = []
    left, right, base = box.x.start, box.x.stop, box.y.start
    for value, label in y_ticks:
        y = box.y(value)
        parts.append(element("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
        parts.append(text(label, x=left - 9, y=y + 4.5, anchor="end", class_="tick"))
    parts.append(element("line", class_="axis", x1=left, x2=right, y1=base, y2=base))
    for value, label in x_ticks:
        x = box.x(value)
        parts.append(element("line", class_="axis", x1=x, x2=x, y1=base, y2=base + 5))
        parts.append(text(label, x=x, y=base + 20, anchor="middle", class_="tick"))
    parts.append(text(x_title, x=(left + right) / 2, y=box.height - 8, anchor="middle", class_="title"))
    parts.append(text(y_title, x=left - 45, y=16, anchor="start", class_="title"))
    return join(*parts)


def text(content: str, *, x: float, y: float, anchor: str, class_: str) -> Markup:
    """A piece of text at a place."""
    return element("text", content, x=float(x), y=float(y), text_anchor=anchor, class_=class_)


def picture(box: Frame, *parts: Markup, label: str, class_: str) -> Markup:
    """The finished chart; ``label`` is read out to those who can't see it."""
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {box.width:g} {box.height:g}",
        class_=f"chart {class_}",
        role="img",
        aria_label=label,
    )
