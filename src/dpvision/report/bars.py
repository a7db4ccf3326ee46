"""Accuracy of each class as bars, worst first: an average hides whom privacy costs most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from dpvision.report.facts import FinalMetrics
from dpvision.report.markup import Markup, element
from dpvision.report.words import percent, wilson

_ALL_UP_TO = 24
_WORST_SHOWN, _BEST_SHOWN = 14, 6
_WIDEST_NAME = 26


@final
@dataclass(frozen=True, kw_only=True)
class ClassAccuracy:
    """One class with pictures in the test set."""

    name: str
    accuracy: float
    count: int | None


def measured_classes(final: FinalMetrics) -> list[ClassAccuracy]:
    """Classes that were measured, worst first; equal ones by name."""
    rows = [
        ClassAccuracy(name=name, accuracy=accuracy, count=final.per_class_count.get(name))
        for name, accuracy in final.per_class.items()
        if accuracy is not None
    ]
    return sorted(rows, key=lambda row: (row.accuracy, row.name))


def unmeasured_classes(final: FinalMetrics) -> list[str]:
    """Classes without a picture in the test set."""
    return sorted(name for name, accuracy in final.per_class.items() if accuracy is None)


def class_bars(rows: list[ClassAccuracy], *, overall: float) -> Markup:
    """The bars. Of many classes the worst and the best are shown and the rest folded away, not left out."""
    worst, best = rows[0].accuracy, rows[-1].accuracy
    bars = [_bar(row, overall=overall, is_worst=row.accuracy == worst < best) for row in rows]
    if len(bars) > _ALL_UP_TO:
        middle = bars[_WORST_SHOWN:-_BEST_SHOWN]
        folded = element("details", element("summary", f"{len(middle)} classes in between"), *middle)
        bars = [*bars[:_WORST_SHOWN], folded, *bars[-_BEST_SHOWN:]]
    longest = max(len(row.name) for row in rows)
    return element("div", *bars, class_="bars", style=f"--names:{min(longest, _WIDEST_NAME) + 1}ch")


def _bar(row: ClassAccuracy, *, overall: float, is_worst: bool) -> Markup:
    filled = element("span", class_="fill", style=f"width:{100 * row.accuracy:.2f}%")
    mean = element("span", class_="mean", style=f"left:{100 * overall:.2f}%")
    return element(
        "div",
        element("span", row.name, class_="name"),
        element("span", filled, _whisker(row), mean, class_="track"),
        element("span", percent(row.accuracy), class_="share"),
        element("span", "" if row.count is None else f"of {row.count:,}", class_="count"),
        class_="bar worst" if is_worst else "bar",
    )


def _whisker(row: ClassAccuracy) -> Markup | None:
    if not row.count or row.count < 1:
        return None
    low, high = wilson(row.accuracy, row.count)
    return element("span", class_="whisker", style=f"left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%")
