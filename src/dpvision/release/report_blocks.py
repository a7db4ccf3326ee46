"""The few shapes that every section is made of: cards, facts, tables, lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpvision.release.report_markup import Child, Markup, element, join
from dpvision.release.report_words import number, power_of_ten

_DEEPEST = 6


def card(title: str | None, *children: Child, class_: str = "card") -> Markup:
    """A section with a heading."""
    return element("section", None if title is None else element("h2", title), *children, class_=class_)


def paragraph(*children: Child, class_: str | None = None) -> Markup:
    """A paragraph of text."""
    return element("p", *children, class_=class_)


def power(value: float) -> Markup:
    """A small number as a power of ten, rounded up: 10 to the −5, or 3.2 times that."""
    factor, exponent = power_of_ten(value)
    raised = join("10", element("sup", f"−{-exponent}" if exponent < 0 else str(exponent)))
    return raised if factor == "1" else join(f"{factor} · ", raised)


def equation(left: Child, right: Child) -> Markup:
    """An equation that is never broken over two lines."""
    return element("span", left, " = ", right, class_="whole")


def facts(rows: Iterable[tuple[str, str]]) -> Markup:
    """Names and values."""
    return element("dl", *(join(element("dt", name), element("dd", value)) for name, value in rows))


def bullets(items: Iterable[Child]) -> Markup:
    """A list."""
    return element("ul", *(element("li", item) for item in items))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int], total: Child = None) -> Markup:
    """A table; columns in ``right`` are numbers. ``total`` is a row of its own over the whole width."""

    def cells(kind: str, row: Sequence[str]) -> Markup:
        return join(
            *(element(kind, cell, class_="right" if index in right else None) for index, cell in enumerate(row))
        )

    body = [element("tr", cells("td", row)) for row in rows]
    if total is not None:
        body.append(element("tr", element("td", total, colspan=len(head)), class_="total"))
    heading = element("thead", element("tr", cells("th", head)))
    return element("table", heading, element("tbody", *body), class_=None if total else "plain")


def flat(values: Mapping[str, Any], *, prefix: str = "", depth: int = 0) -> list[tuple[str, str]]:
    """Nested values as dotted names, in their own order; what is unset is left out."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth < _DEEPEST:
            rows += flat(value, prefix=f"{name}.", depth=depth + 1)
        elif isinstance(value, list):
            rows.append((name, ", ".join(number(item) for item in value)))
        elif value is not None:
            rows.append((name, number(value)))
    return rows
