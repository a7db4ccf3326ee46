"""The drawings of a report or a comparison: charts as inline SVG, and test images with outlines as PNG.

matplotlib draws the charts. Its SVG is cleaned so that it can be part of a page: no XML header, no metadata, no
references to other documents, no style rules of its own. Colours become CSS variables, so that the page's light and
dark themes apply. Equal inputs give equal bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray
from PIL import Image

from dpvision.accounting import Profile, true_positive_bound
from dpvision.storage.run_folder import Example

# Shapes: C channels, H × W pixels of the example, then of the drawing.

Point = tuple[float, float]
MARKED_RATES = (0.001, 0.01)
_LOWEST_RATE = 1e-4
_LABEL_HEIGHT, _LABEL_FIELD = 15.0, 200.0  # CSS pixels: a label, and the smaller of the heights of the charts' fields
_WIDE, _NARROW = 470.0, 350.0  # CSS pixels: a column of the page, and a phone
_ACCENT, _SHADE, _RULE, _FAINT, _SOFT, _INK, _PAPER = (f"#0a0b{code:02x}" for code in range(1, 8))
_COLOURS = {
    _ACCENT: "var(--accent)",
    _SHADE: "var(--accent-soft)",
    _RULE: "var(--rule)",
    _FAINT: "var(--faint)",
    _SOFT: "var(--soft)",
    _INK: "var(--ink)",
    _PAPER: "var(--paper)",
}
_SERIES = tuple(f"#0a0c{code:02x}" for code in range(6))
_COLOURS |= {colour: f"var(--s{number})" for number, colour in enumerate(_SERIES)}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def score_chart(
    points: Sequence[Point],
    *,
    x_title: str,
    score_name: str,
    final_label: str,
    baseline: float | None = None,
    baseline_name: str = "constant mask",
    best: tuple[Point, str] | None = None,
) -> Markup:
    """Draw accuracy or Dice on public test data over epsilon or steps.

    Args:
        points: (x, score) pairs in the order of x, scores from 0 to 1. One point is enough.
        x_title: The name of the x axis.
        score_name: "accuracy" or "Dice".
        final_label: The text beside the last point.
        baseline: A score to compare with, drawn as a dashed line: that of the best constant prediction.
        baseline_name: What it is.
        best: The best point of a curve that falls, and its label; it is marked too.

    Returns:
        One SVG for wide screens and one for narrow screens; the style sheet shows one of them.
    """
    scores = [y for _, y in points] + ([] if baseline is None else [baseline])
    spread = max(max(scores) - min(scores), 0.02)
    furthest = max(x for x, _ in points) or 1.0

    def shown(value: float, style: str) -> str:
        return f"{value:.3g}" if score_name == "mean AUC" else f"{100 * value:{style}} %"

    def draw(axes: Axes) -> None:
        axes.set(xlim=(0, 1.03 * furthest), ylim=(max(0.0, min(scores) - 0.2 * spread), max(scores) + 0.2 * spread))
        axes.yaxis.set_major_formatter(lambda value, _: shown(value, ".4g"))
        axes.locator_params(axis="y", nbins=6)
        if baseline is not None:
            axes.axhline(baseline, color=_FAINT, linewidth=1.5, dashes=(4, 4), clip_on=False)
            # On the side of the dashed line that the curve's beginning is not on, but never on the axis.
            lowest, highest = axes.get_ylim()
            room = (baseline - lowest) / (highest - lowest) * _LABEL_FIELD
            above = points[0][1] < baseline or room < 1.5 * _LABEL_HEIGHT
            text = f"{baseline_name} {shown(baseline, '.1f')}"
            _label(axes, text, (0, baseline), offset=(6, 6 if above else -17), colour=_SOFT)
        axes.plot(*zip(*points, strict=True), "o-", color=_ACCENT, markersize=4, linewidth=2.5, clip_on=False)
        falls = len(points) > 1 and points[-2][1] > points[-1][1]  # then the label goes below, off the line
        _mark(axes, points[-1], final_label, offset=(6, -22 if falls else 11), align="right")
        if best is not None:
            early = best[0][0] < 0.5 * furthest
            _mark(axes, *best, offset=(-6 if early else 6, 11), align="left" if early else "right")

    label = f"Line chart: test {score_name} over {x_title.lower()}, ending at {100 * points[-1][1]:.1f} %."
    return _svg(draw, height=0.7, titles=(x_title, f"Test {score_name}"), label=label)


class Series(NamedTuple):
    """One run of a comparison: its number, the points (epsilon, score) in the order of epsilon, and its last score."""

    number: int
    points: tuple[Point, ...]
    final: float


def comparison_chart(series: Sequence[Series], *, score_name: str) -> Markup:
    """Draw the curves of several runs over epsilon; a run without points (no privacy) is a dashed line.

    Args:
        series: At least one run. Each is marked with its number at its end.
        score_name: "accuracy", "Dice" or "mean AUC".

    Returns:
        One SVG for wide screens and one for narrow screens.
    """
    scores = [y for run in series for _, y in run.points] + [run.final for run in series]
    spread = max(max(scores) - min(scores), 0.02)
    low, high = max(0.0, min(scores) - 0.1 * spread), max(scores) + 0.12 * spread
    furthest = max((x for run in series for x, _ in run.points), default=1.0) or 1.0
    ends = {run.number: run.points[-1] if run.points else (0.0, run.final) for run in series}

    def draw(axes: Axes) -> None:
        axes.set(xlim=(0, 1.08 * furthest), ylim=(low, high))
        axes.yaxis.set_major_formatter(
            lambda value, _: f"{value:.3g}" if score_name == "mean AUC" else f"{100 * value:.4g} %"
        )
        axes.locator_params(axis="y", nbins=6)
        for run in series:
            colour = _SERIES[(run.number - 1) % len(_SERIES)]
            if run.points:
                axes.plot(*zip(*run.points, strict=True), "o-", color=colour, markersize=3, linewidth=2, clip_on=False)
                axes.plot(*run.points[-1], "o", color=colour, markersize=8, markeredgecolor=_PAPER, clip_on=False)
            else:
                axes.axhline(run.final, color=colour, linewidth=2, dashes=(4, 4), clip_on=False)
        for number, (x, y), lift in _spread(ends, (furthest, high - low)):
            colour = _SERIES[(number - 1) % len(_SERIES)]
            above = 0 if x else 12  # off a dashed line
            _label(axes, str(number), (x, y), offset=(9, -4 + above + lift), colour=colour, weight="bold")

    label = f"Line chart: test {score_name} of {len(series)} runs over epsilon."
    return _svg(draw, height=0.66, titles=("Epsilon spent", f"Test {score_name}"), label=label)


def _spread(ends: dict[int, Point], size: Point) -> list[tuple[int, Point, float]]:
    """Labels at the ends of lines, with a vertical shift in CSS pixels for those that would cover each other."""
    placed: list[tuple[int, Point, float]] = []
    for number, (x, y) in sorted(ends.items(), key=lambda end: (end[1][1], end[0])):
        lift = 0.0
        for _, (other_x, other_y), other_lift in placed:
            below = (y - other_y) / size[1] * _LABEL_FIELD + lift - other_lift  # how far above the other label
            if abs(x - other_x) < 0.06 * size[0] and below < _LABEL_HEIGHT:
                lift += _LABEL_HEIGHT - below
        placed.append((number, (x, y), lift))
    return placed


def reliability_chart(bins: Sequence[tuple[float, float, Point]]) -> Markup:
    """Draw accuracy over confidence, with 95 % intervals; a calibrated model is on the diagonal.

    Args:
        bins: mean confidence, accuracy and its interval of the images in each bin.

    Returns:
        One SVG for wide screens and one for narrow screens.
    """

    def draw(axes: Axes) -> None:
        axes.set(xlim=(0, 1), ylim=(0, 1))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.plot([0, 1], [0, 1], color=_FAINT, linewidth=1.5, dashes=(4, 4), clip_on=False)
        for confidence, _, (low, high) in bins:
            axes.plot([confidence, confidence], [low, high], color=_ACCENT, linewidth=1.5, clip_on=False)
        shown = [(confidence, accuracy) for confidence, accuracy, _ in bins]
        axes.plot(*zip(*shown, strict=True), "o-", color=_ACCENT, markersize=6, linewidth=1.5, clip_on=False)
        _label(axes, "calibrated", (0.06, 0.06), offset=(10, -6), colour=_SOFT)

    label = "Reliability diagram: the share of correct answers over the model's confidence."
    return _svg(draw, height=0.8, titles=("Confidence of the answer", "Correct answers"), label=label)


def attack_chart(profile: Profile, *, marked: Sequence[tuple[Point, str]]) -> Markup:
    """Draw the proved bound on every membership attack, with random guessing for comparison.

    Args:
        profile: The (epsilon, delta) pairs that the run's charges prove.
        marked: Points of the curve, (false positive rate, true positive rate), with their labels.

    Returns:
        One SVG for wide screens and one for narrow screens.
    """
    rates = np.geomspace(_LOWEST_RATE, 1.0, 41)
    bound = [true_positive_bound(profile, false_positive_rate=float(rate)) for rate in rates]

    def draw(axes: Axes) -> None:
        axes.set(xscale="log", yscale="log", xlim=(_LOWEST_RATE, 1), ylim=(_LOWEST_RATE, 1))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks([1e-4, 1e-3, 1e-2, 1e-1, 1.0], ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"])
            axis.set_minor_locator(NullLocator())
        axes.fill_between(rates, bound, 1.0, color=_SHADE, linewidth=0, clip_on=False)
        axes.plot([_LOWEST_RATE, 1], [_LOWEST_RATE, 1], color=_FAINT, linewidth=1.5, dashes=(4, 4), clip_on=False)
        axes.plot(rates, bound, color=_ACCENT, linewidth=2.5, clip_on=False)
        _label(axes, "guessing", (10**-1.55, 10**-1.55), offset=(12, -14), colour=_SOFT)
        for point, text in marked:
            above = point[1] < 0.25  # where there is room above the curve
            _mark(axes, point, text, offset=(-8, 8) if above else (8, -18), align="right" if above else "left")

    label = "Log-log chart: the largest share of members that any attack can recognise, over its false positive rate."
    return _svg(draw, height=0.92, titles=("Non-members wrongly accused", "Members recognised, at most"), label=label)


def _mark(axes: Axes, point: Point, text: str, *, offset: Point, align: str) -> None:
    axes.plot(*point, "o", color=_ACCENT, markersize=10, markeredgecolor=_PAPER, markeredgewidth=2, clip_on=False)
    _label(axes, text, point, offset=offset, colour=_INK, align=align, weight="bold")


def _label(
    axes: Axes, text: str, point: Point, *, offset: Point, colour: str, align: str = "left", weight: str = "normal"
) -> None:
    """Write ``text`` beside ``point``; ``offset`` is in CSS pixels. The style sheet gives it a paper-coloured edge."""
    axes.annotate(
        text, point, xytext=offset, textcoords="offset points", ha=align, color=colour, weight=weight, gid="label"
    )


def _svg(draw: Callable[[Axes], None], *, height: float, titles: tuple[str, str], label: str) -> Markup:
    """Draw on two canvases, whose height is ``height`` times their width, and return both as inline SVG."""
    parts = []
    for kind, width in (("wide", _WIDE), ("narrow", _NARROW)):
        settings: dict[Any, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": f"{label}{kind}",  # ids that are references differ between the charts of a page
            "font.size": 13,
            "axes.edgecolor": _FAINT,
            "axes.spines.left": False,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "grid.color": _RULE,
            "text.color": _SOFT,
            "axes.labelcolor": _SOFT,
            "xtick.color": _SOFT,
            "ytick.color": _SOFT,
        }
        with matplotlib.rc_context(settings):
            # SVG has 72 points an inch, and a point of ours is a CSS pixel.
            figure = Figure(figsize=(width / 72, height * width / 72), layout="constrained")
            figure.patch.set_alpha(0)
            axes = figure.add_subplot()
            axes.patch.set_alpha(0)
            axes.grid(axis="y", linewidth=1)
            axes.set_axisbelow(True)
            axes.tick_params(length=0, pad=8)
            axes.set_xlabel(titles[0], labelpad=6)
            axes.set_title(titles[1], loc="left", fontsize=13, pad=10)
            draw(axes)
            content = io.StringIO()
            figure.savefig(content, format="svg", metadata=_NO_METADATA)
        parts.append(_inline(content.getvalue(), kind=kind, label=label))
    return Markup("").join(parts)


def _inline(svg: str, *, kind: str, label: str) -> Markup:
    """The ``<svg>`` element of a matplotlib document, without what a page must not have."""
    (view,) = re.findall(r'viewBox="([^"]*)"', svg)
    body = svg[svg.index("<defs>") :]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = body.replace('id="label"', 'class="label"').replace("xlink:href", "href")
    body = re.sub(r' id="(?!m[0-9a-f]{10}")[^"]*"| clip-path="[^"]*"', "", body)
    for colour, variable in _COLOURS.items():
        body = body.replace(colour, variable)
    opening = Markup('<svg viewBox="{}" class="chart {}" role="img" aria-label="{}">').format(view, kind, label)
    return opening + Markup(re.sub(r"\n\s*", "\n", body))  # noqa: S704 (the texts in it are our own)


# Two colours of Okabe and Ito's palette, which people with any kind of colour vision can tell apart. The truth is the
# wider line, so that it also shows below a prediction that follows it.
TRUTH, PREDICTION = (86, 180, 233), (230, 159, 0)
_TRUTH_RADIUS, _PREDICTION_RADIUS = 2, 1
_DARKER = 0.45
_SIDE = 336  # a third of the page's width, at two dots for a CSS pixel


def overlay_png(example: Example) -> bytes:
    """Draw an example with the outlines of its true and its predicted mask.

    Args:
        example: Image, masks and Dice of one public test image.

    Returns:
        A PNG of at most 336 × 336 pixels; equal examples give equal bytes.
    """
    size = _drawn_size(*example.truth_HW.shape)
    image_HWC = _resized_image(example.image_CHW, size)
    truth_HW, predicted_HW = _resized_mask(example.truth_HW, size), _resized_mask(example.predicted_HW, size)
    around = outline(truth_HW, _TRUTH_RADIUS + 1) | outline(predicted_HW, _PREDICTION_RADIUS + 1)
    image_HWC[around] = (image_HWC[around] * _DARKER).astype(np.uint8)  # a dark edge, for bright images
    image_HWC[outline(truth_HW, _TRUTH_RADIUS)] = TRUTH
    image_HWC[outline(predicted_HW, _PREDICTION_RADIUS)] = PREDICTION
    content = io.BytesIO()
    Image.fromarray(image_HWC).save(content, "PNG", optimize=True)
    return content.getvalue()


def outline(mask_HW: NDArray[np.uint8], radius: int) -> NDArray[np.bool_]:
    """Mark the pixels that have one of another class at most ``radius`` pixels away in their row or column."""
    height, width = mask_HW.shape
    wide = np.pad(mask_HW, radius, mode="edge")
    found = np.zeros(mask_HW.shape, dtype=bool)
    for away in range(1, radius + 1):
        for down, right in ((away, 0), (-away, 0), (0, away), (0, -away)):
            top, left = radius + down, radius + right
            found |= wide[top : top + height, left : left + width] != mask_HW
    return found


def _drawn_size(height: int, width: int) -> tuple[int, int]:
    """Height and width of the drawing, in pixels."""
    scale = _SIDE / max(height, width)
    if scale > 1:
        scale = int(scale)  # every pixel becomes a square of the same size
    return max(1, round(height * scale)), max(1, round(width * scale))


def _resized_image(image_CHW: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """The image with three channels, H × W × 3, at the size of the drawing."""
    image_HWC = np.ascontiguousarray(np.broadcast_to(image_CHW, (3, *image_CHW.shape[1:])).transpose(1, 2, 0))
    drawn = Image.fromarray(image_HWC).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.array(drawn)


def _resized_mask(mask_HW: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """The mask at the size of the drawing; classes are not mixed."""
    return np.asarray(Image.fromarray(mask_HW).resize((size[1], size[0]), Image.Resampling.NEAREST))
