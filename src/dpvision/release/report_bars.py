"""Each class, or each patient, as a bar, worst first: an average hides whom privacy costs most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from dpvision.release.report_facts import FinalMetrics
from dpvision.release.report_markup import Markup, element
from dpvision.release.report_words import percent, wilson

_ALL_UP_TO = 24
_WORST_SHOWN, _BEST_SHOWN = 14, 6
_WIDEST_NAME = 26


@final
@dataclass(frozen=True, kw_only=True)
class Measured:
    """A class or a patient with pictures in the test set. With ``count`` the share is one of so many pictures."""

    name: str
    share: float
    count: int | None = None


def measured_classes(final: FinalMetrics) -> list[Measured]:
    """Classes that were measured, worst first; equal ones by name."""
    rows = [
        Measured(name=name, share=accuracy, count=final.per_class_count.get(name))
        for name, accuracy in final.per_class.items()
        if accuracy is not None
    ]
    return sorted(rows, key=lambda row: (row.share, row.name))


def unmeasured_classes(final: FinalMetrics) -> list[str]:
    """Classes without a picture in the test set."""
    return sorted(name for name, accuracy in final.per_class.items() if accuracy is None)


def bars_of(rows: list[Measured], *, overall: float, baseline: float | None = None, what: str = "classes") -> Markup:
    """The bars, worst first. Of many the worst and the best are shown and the rest folded away, not left out."""
    worst, best = rows[0].share, rows[-1].share
    lines = _line("mean", overall), None if baseline is None else _line("constant", baseline)
    bars = [_bar(row, *lines, is_worst=row.share == worst < best) for row in rows]
    if len(bars) > _ALL_UP_TO:
        middle = bars[_WORST_SHOWN:-_BEST_SHOWN]
        folded = element("details", element("summary", f"{len(middle)} {what} in between"), *middle)
        bars = [*bars[:_WORST_SHOWN], folded, *bars[-_BEST_SHOWN:]]
    longest = max(len(row.name) for row in rows)
    return element("div", *bars, class_="bars", style=f"--names:{min(longest, _WIDEST_NAME) + 1}ch")


def _line(kind: str, share: float) -> Markup:
    return element("span", class_=kind, style=f"left:{100 * share:.2f}%")


def _bar(row: Measured, *lines: Markup | None, is_worst: bool) -> Markup:
    filled = element("span", class_="fill", style=f"width:{100 * row.share:.2f}%")
    return element(
        "div",
        element("span", row.name, class_="name"),
        element("span", filled, _whisker(row), *lines, class_="track"),
        element("span", percent(row.share), class_="share"),
        element("span", "" if row.count is None else f"of {row.count:,}", class_="count"),
        class_="bar worst" if is_worst else "bar",
    )


def _whisker(row: Measured) -> Markup | None:
    if not row.count or row.count < 1:
        return None
    low, high = wilson(row.share, row.count)
    return element("span", class_="whisker", style=f"left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%")
