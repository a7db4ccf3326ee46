"""The two charts of the page: accuracy or Dice over epsilon, and the most that an attacker can achieve."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpvision.accounting import Profile, true_positive_bound
from dpvision.release.report_axes import Frame, Point, frame, grid, picture, text, ticks
from dpvision.release.report_markup import Markup, element, join
from dpvision.release.report_words import bound_percent, percent

_FLAT = (("wide", 470.0, 330.0), ("narrow", 350.0, 290.0))
_SQUARE = (("wide", 470.0, 440.0), ("narrow", 350.0, 340.0))
Shapes = tuple[tuple[str, float, float], ...]
_LOWEST_RATE = 1e-4
MARKED_RATES = (0.001, 0.01, 0.1)


def _for_each_screen(shapes: Shapes, draw: Callable[[float, float, str], Markup]) -> Markup:
    """A chart drawn for a wide and for a narrow screen; the style sheet shows one. Text keeps its size that way."""
    return join(*(draw(width, height, name) for name, width, height in shapes))


def score_chart(
    points: Sequence[Point], *, x_title: str, score_name: str, final_label: str, baseline: float | None = None
) -> Markup:
    """Accuracy or Dice on public test data (0..1) over epsilon or steps. One point is enough.

    ``baseline`` is a level to compare with: what an answer reaches that no picture has a part in.
    """
    levels = [y for _, y in points] + ([] if baseline is None else [baseline])

    def draw(width: float, height: float, class_: str) -> Markup:
        box = _score_frame(levels, furthest=max(x for x, _ in points), width=width, height=height)
        y_ticks = [(value, f"{100 * value:.4g} %") for value in ticks(box.y.low, box.y.high, about=5)]
        x_ticks = [(value, f"{value:,.6g}") for value in ticks(box.x.low, box.x.high, about=6 if width > 400 else 4)]
        marks = [element("circle", class_="dot", cx=box.x(x), cy=box.y(y), r=2.6) for x, y in points]
        last_x, last_y = points[-1]
        return picture(
            box,
            grid(box, x_ticks=x_ticks, y_ticks=y_ticks, x_title=x_title, y_title=f"Test {score_name}"),
            *([] if baseline is None else [_level(box, baseline)]),
            element("path", class_="line", d=box.path(points)),
            join(*marks[:-1]),
            element("circle", class_="dot last", cx=box.x(last_x), cy=box.y(last_y), r=5),
            text(final_label, x=box.x(last_x) + 8, y=box.y(last_y) - 14, anchor="end", class_="value"),
            label=f"Line chart: test {score_name} over {x_title.lower()}, ending at {percent(last_y)}.",
            class_=class_,
        )

    return _for_each_screen(_FLAT, draw)


def attack_chart(profile: Profile) -> Markup:
    """The proved limit on every membership attack, with guessing for comparison."""
    decades = 40
    rates = [_LOWEST_RATE ** (1 - index / decades) for index in range(decades + 1)]
    bound = [(rate, true_positive_bound(profile, false_positive_rate=rate)) for rate in rates]

    def draw(width: float, height: float, class_: str) -> Markup:
        box = frame(width=width, height=height, x=(_LOWEST_RATE, 1), y=(_LOWEST_RATE, 1), logarithmic=True)
        labels = [(1e-4, "0.01 %"), (1e-3, "0.1 %"), (1e-2, "1 %"), (1e-1, "10 %"), (1.0, "100 %")]
        ruled_out = [*bound, (1.0, 1.0), (_LOWEST_RATE, 1.0)]
        return picture(
            box,
            grid(
                box,
                x_ticks=labels,
                y_ticks=labels,
                x_title="Outsiders wrongly accused",
                y_title="Members recognised, at most",
            ),
            element("path", class_="ruled-out", d=box.path(ruled_out, closed=True)),
            element("path", class_="guess", d=box.path([(_LOWEST_RATE, _LOWEST_RATE), (1, 1)])),
            element("path", class_="line", d=box.path(bound)),
            join(*(_marked(box, profile, rate) for rate in MARKED_RATES[:2])),
            _guessing_label(box),
            label="Log-log chart: the largest share of members that any attack can recognise, over its false alarms.",
            class_=class_,
        )

    return _for_each_screen(_SQUARE, draw)


def _level(box: Frame, baseline: float) -> Markup:
    """A dashed line with its name at its beginning, where a curve is still below it."""
    label = f"one mask for all {percent(baseline)}"
    return join(
        element("path", class_="guess", d=box.path([(box.x.low, baseline), (box.x.high, baseline)])),
        text(label, x=box.x.start + 6, y=box.y(baseline) - 7, anchor="start", class_="note"),
    )


def _score_frame(values: Sequence[float], *, furthest: float, width: float, height: float) -> Frame:
    """Limits around the values: room above for the label, never an empty range, never beyond what can be."""
    spread = max(max(values) - min(values), 0.02)
    low = max(0.0, min(values) - 0.08 * spread)
    high = max(values) + 0.16 * spread
    return frame(width=width, height=height, x=(0.0, 1.03 * furthest or 1.0), y=(low, high))


def _marked(box: Frame, profile: Profile, rate: float) -> Markup:
    """A dot with its value: in the ruled-out corner while there is room above, else below the line."""
    limit = true_positive_bound(profile, false_positive_rate=rate)
    x, y = box.x(rate), box.y(limit)
    low = limit < 0.25
    label = text(
        bound_percent(limit),
        x=x - 8 if low else x + 8,
        y=y - 8 if low else y + 20,
        anchor="end" if low else "start",
        class_="value",
    )
    return join(element("circle", class_="dot last", cx=x, cy=y, r=5), label)


def _guessing_label(box: Frame) -> Markup:
    place = 10**-1.55
    return text("guessing", x=box.x(place) + 10, y=box.y(place) + 16, anchor="start", class_="note")
