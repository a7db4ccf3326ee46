"""The report of a run: one self-contained HTML page, and a summary for the terminal.

The page loads nothing and runs nothing, and is made from public files only. templates/report.html.jinja has its text
and markup, templates/report.css its style, charts.py its drawings; this module computes what they show.

Rounding is part of the claim: an epsilon, a delta and a bound on attacks are rounded up, never down.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dpvision.accounting import DISPLAY_RATE, balanced_accuracy_bound, true_positive_bound
from dpvision.errors import DataError, printable
from dpvision.privacy.mechanism import COUNTED_UNITS
from dpvision.release.build import proved_profile
from dpvision.release.certificate_page import search_sentence
from dpvision.release.run_facts import (
    FinalMetrics,
    Metrics,
    RunFacts,
    checked_certificate,
    checked_metrics,
    images_are_public,
    read_run,
    reasons_against_release,
    score_name,
    tests_on_held_out_images,
)
from dpvision.release.schema import Certificate
from dpvision.scoring import GUESSING, Comparison, wilson
from dpvision.storage.files import write_page
from dpvision.storage.run_folder import REPORT, RunFolder

SPACE = "\u00a0"  # keeps a number and its sign on one line
NO_BOUND = 0.999  # from here on a bound on attacks is shown as 100 %
_CALIBRATED = 0.05
_FEW_IMAGES = 30
_RATES = (0.001, 0.01, 0.1)  # false positive rates of the table
_LONGEST_TEXT = 4000
_DEEPEST = 6
_ALL_BARS_UP_TO, _WORST_BARS, _BEST_BARS, _WIDEST_NAME = 24, 14, 6, 26


def write_report(run: Path, *, output: Path | None = None) -> Path:
    """Write the HTML report of a finished run.

    Args:
        run: A run folder that holds release/.
        output: Where to write the page. By default it becomes release/report.html and part of the manifest, which
            needs the run's private/ folder beside it.

    Returns:
        The path of the page.

    Raises:
        DataError: The folder is not a finished run, one of its files is not what dpvision writes, or it has no
            private/ folder and no ``output`` is given.

    Guarantee:
        Made of release/certificate.json, metrics.json and config.json only, and of images that the certificate
        declares public. The same files give the same bytes.
    """
    page = render(read_run(run)).encode()
    if output is not None:
        write_page(output, page)
        return output
    if not (run / "private").is_dir():
        raise DataError(f"{run} is a release without its private/ folder, so it is left as it is. Give --output.")
    with RunFolder.open(run) as folder:
        folder.add_to_release(REPORT, page)
        return folder.release / REPORT


def environment() -> Environment:
    """Return the Jinja environment of the page: it escapes every text, and an unknown name is an error."""
    made = Environment(
        loader=PackageLoader("dpvision.release"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = (area, between, bound_percent, epsilon_text, flat, number, percent, power, sentence)
    made.filters |= {function.__name__: function for function in shown}
    return made


def render(run: RunFacts) -> str:
    """Render the page.

    Args:
        run: The checked contents of a run's public files.

    Returns:
        The HTML page as text. Nothing in it depends on the time or the machine.
    """
    style = files("dpvision.release").joinpath("templates/report.css").read_text()
    certificate = run.certificate
    private = certificate.epsilon is not None and certificate.delta is not None
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            style=Markup(style),  # noqa: S704 (our own file)
            run=run,
            name=_setting(run, "name") or run.name,
            model=_setting(run, "model", "name"),
            source=Path(_setting(run, "data", "source")).name,
            certificate=certificate,
            final=run.final,
            private=private,
            reasons=reasons_against_release(certificate),
            unit=unit_name(certificate.privacy_unit),
            num_units=certificate.mechanism.get("num_units"),
            protected=_protected(certificate),
            attacks=_attacks(certificate) if private else None,
            factor=odds_factor(certificate.epsilon) if certificate.epsilon is not None else None,
            score_chart=_score_chart(run, private=private),
            class_bars=_class_bars(run.final),
            overlap_bars=_overlap_bars(run.final),
            examples=_examples(run),
            images_are_public=images_are_public(certificate),
            held_out=tests_on_held_out_images(certificate),
            comparison=run.final.comparison if run.final else None,
            verdict=chance_verdict(run.final),
            ranks=ranking_note(run.final),
            search=None if certificate.search is None else search_sentence(certificate.search),
            fall=fall_text(run.metrics, run.score_name) if run.metrics else None,
            baseline=run.metrics.baseline if run.metrics else None,
            trust=trust(run.final),
            score=score_text(run.final, run.final.score) if run.final else None,
            other_score=lambda value: score_text(run.final, value),
            reliability_chart=_reliability_chart(run.final),
        )
    )


def _protected(certificate: Certificate) -> str:
    """How many units are protected: "of about 800 images" where they were counted with noise."""
    unit, units = unit_name(certificate.privacy_unit), certificate.mechanism.get("num_units")
    if not isinstance(units, int) or units <= 1:
        return unit
    counted = any(charge.purpose == COUNTED_UNITS for charge in certificate.charged)
    return f"of {'about ' if counted else ''}{number(units)} {unit}s"


def _setting(run: RunFacts, *keys: str) -> str:
    """A text of the configuration; empty where there is none."""
    value: object = run.config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def _shown(value: object) -> object:
    """What a template writes for a value: None is nothing, and control characters of a text become codes.

    Jinja escapes the result unless it is ``Markup``.
    """
    if value is None:
        return ""
    return visible(value) if type(value) is str else value


def visible(text: str) -> str:
    """Cut a text to 4,000 characters and write control and direction characters as codes."""
    cut = text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
    return SPACE.join(printable(part) for part in cut.split(SPACE))


def _attacks(certificate: Certificate) -> dict[str, Any]:
    """Bounds on attacks, as a table, one balanced bound and a chart."""
    from dpvision.release.charts import MARKED_RATES, attack_chart

    profile = proved_profile(certificate)
    bounds = {rate: true_positive_bound(profile, false_positive_rate=rate) for rate in _RATES}
    marked = [((rate, bounds[rate]), bound_percent(bounds[rate])) for rate in MARKED_RATES]
    balanced = balanced_accuracy_bound(profile)
    return {
        "rows": [(f"{100 * rate:g} %", bound) for rate, bound in bounds.items()],
        "balanced": balanced if balanced < NO_BOUND else None,
        "chart": attack_chart(profile, marked=marked),
    }


# Charts, bars and examples


def _score_chart(run: RunFacts, *, private: bool) -> Markup | None:
    """The score over epsilon, or over steps without privacy or after a search; None if there are no points."""
    curve, final = run.metrics.curve if run.metrics else (), run.final
    private = private and run.certificate.search is None
    at = [(point.epsilon if private else float(point.step), point.score) for point in curve]
    points = sorted(((x, y) for x, y in at if x is not None), key=lambda point: point[0])
    if not points:
        return None
    from dpvision.release.charts import score_chart

    return score_chart(
        points,
        x_title="Epsilon spent" if private else "Steps",
        score_name=run.score_name,
        final_label=score_text(final, points[-1][1]),
        baseline=final.comparison.chance if final and final.comparison else None,
        baseline_name={"Dice": "constant mask", "mean AUC": "guessing"}.get(run.score_name, "one class for all"),
        best=_best_point(run, points) if run.metrics and run.metrics.fall else None,
    )


def _best_point(run: RunFacts, points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], str]:
    """The best point of a falling curve, and its label."""
    best = max(points, key=lambda point: point[1])
    return best, score_text(run.final, best[1])


def _reliability_chart(final: FinalMetrics | None) -> Markup | None:
    """The reliability diagram; None where no bin has enough images."""
    if final is None or not final.reliability:
        return None
    from dpvision.release.charts import reliability_chart

    return reliability_chart([(each.confidence, each.accuracy, each.interval) for each in final.reliability])


def _class_bars(final: FinalMetrics | None) -> dict[str, Any] | None:
    """The accuracy of each class, worst first, with 95 % intervals."""
    if final is None or final.accuracy is None or not final.class_shares:
        return None
    bars = _bars(final.class_shares, mean=final.accuracy, what="classes", counts=final.per_class_count)
    return {**bars, "unmeasured": sorted(final.per_class.keys() - final.class_shares.keys())}


def _overlap_bars(final: FinalMetrics | None) -> list[dict[str, Any]]:
    """The Dice of each class, where there are several, and of each patient, worst first."""
    bars: list[dict[str, Any]] = []
    if final is not None and final.dice is not None and len(final.class_shares) > 1:
        bars.append({"title": "class", **_bars(final.class_shares, mean=final.dice, what="classes")})
    if final is not None and final.per_patient and final.dice_per_patient is not None:
        patients = _bars(final.per_patient, mean=final.dice_per_patient, what="patients")
        bars.append({"title": "patient", **patients, "baseline": final.baseline_dice_per_patient})
    return bars


def _bars(shares: Mapping[str, float], *, mean: float, what: str, counts: Mapping[str, int] | None = None) -> dict:
    """Bars, worst first, equal ones by name. Of many, those between the worst and the best are folded away."""
    ordered = sorted(shares, key=lambda name: (shares[name], name))
    worst, best = shares[ordered[0]], shares[ordered[-1]]
    bars = []
    for name in ordered:
        count = (counts or {}).get(name)
        interval = wilson(shares[name] * count, count) if count else None
        is_worst = shares[name] == worst < best
        bars.append({"name": name, "share": shares[name], "count": count, "interval": interval, "worst": is_worst})
    folds = len(bars) > _ALL_BARS_UP_TO
    return {
        "first": bars[:_WORST_BARS] if folds else bars,
        "folded": bars[_WORST_BARS:-_BEST_BARS] if folds else [],
        "last": bars[-_BEST_BARS:] if folds else [],
        "worst": bars[0],
        "best": bars[-1],
        "mean": mean,
        "baseline": None,
        "what": what,
        "name_width": math.ceil(1.3 * min(max(len(name) for name in shares), _WIDEST_NAME)) + 1,  # capitals are wide
    }


def _examples(run: RunFacts) -> list[tuple[str, list[dict[str, Any]]]]:
    """Public test images with outlines, as data URIs, by their rank: best, median, worst."""
    if not run.examples:
        return []
    from dpvision.release.charts import overlay_png

    def shown(example: Any) -> dict[str, Any]:
        source = f"data:image/png;base64,{b64encode(overlay_png(example)).decode('ascii')}"
        return {"source": Markup(source), "dice": example.dice, "owner": example.owner}  # noqa: S704 (made here)

    return [(rank, [shown(each) for each in group]) for rank, group in groupby(run.examples, lambda e: e.rank)]


# The terminal


_CHANGES = {"add_remove": "added or removed", "replace_one": "replaced", "zero_out": "left out"}


def summary_lines(certificate: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> list[str]:
    """Return the end of a run for the terminal: score, guarantee, what it means, and reasons against release.

    Args:
        certificate: The content of certificate.json.
        metrics: The content of metrics.json; None if nothing was measured.

    Returns:
        Lines without control characters. The reasons against release come last.
    """
    facts = checked_certificate(certificate)
    checked = checked_metrics(metrics) if metrics is not None else None
    final = checked.final if checked else None
    reasons = reasons_against_release(facts)
    warning = [f"NOT FOR RELEASE: {reason}" for reason in reasons]
    fall = fall_text(checked, score_name(final)) if checked else None
    verdicts = [
        f"guarantee in order:  {'no' if reasons else 'yes'}",
        f"better than chance:  {chance_verdict(final)}",
        *([f"note: {ranking_note(final)}"] if ranking_note(final) else []),
        *([f"note: {fall}"] if fall else []),
    ]
    found = checked.baseline if checked else None
    compared = None if found is None or found.score is None else score_text(final, found.score)
    known = [] if found is None or compared is None else [f"baseline  {compared}  ({found.what})"]
    lines = [*_score_lines(final), *known, *_guarantee_lines(facts), *verdicts, *warning]
    return [visible(line.replace(SPACE, " ")) for line in lines]


def chance_verdict(final: FinalMetrics | None) -> str:
    """Yes, no or cannot tell, with the score, its interval and that of the best constant prediction."""
    found = final.comparison if final is not None else None
    if final is None or found is None:
        return "cannot tell (no metrics from public data)"
    return comparison_text(found, of=final.images if final.dice is None else None)


def comparison_text(found: Comparison, of: int | None = None) -> str:
    """The verdict and its numbers in one line."""
    interval = "no interval: too few test images or patients" if found.interval is None else between(found.interval)
    if found.constant == GUESSING:
        return f"{found.better} ({area(found.score, found.interval)}; {found.constant}: {found.chance:.1f})"
    score = percent(found.score, of=of)
    return f"{found.better} ({score}, {interval}; {found.constant}: {percent(found.chance, of=of)})"


def ranking_note(final: FinalMetrics | None) -> str | None:
    """A hint where two classes are told apart by their scores, but not by the usual threshold of one half."""
    if final is None or final.auc is None or final.comparison is None or len(final.per_class_count) != 2:
        return None
    gains = _another_threshold_gains(final)
    interval = final.intervals.get("auc")
    if interval is None or interval[0] <= 0.5 or (final.comparison.better == "yes" and not gains):
        return None
    return (
        f"the scores rank better than chance (AUC {final.auc:.3f}, 95 % interval {interval[0]:.3f} to "
        f"{interval[1]:.3f}): another threshold {'gives' if gains else 'may give'} better answers, "
        "see dpvision evaluate --operating-point"
    )


def _another_threshold_gains(final: FinalMetrics) -> bool:
    """Whether the mean of sensitivity and specificity is 5 points higher at the operating point than at one half."""
    point = final.operating_point
    if point is None or point.sensitivity is None or point.specificity is None or final.balanced_accuracy is None:
        return False
    return (point.sensitivity + point.specificity) / 2 > final.balanced_accuracy + 0.05


def score_text(final: FinalMetrics | None, value: float) -> str:
    """A headline score: a percentage, or three decimals for an AUC."""
    if final is not None and final.accuracy is None and final.dice is None:
        return area(value)
    return percent(value, of=final.images if final is not None and final.dice is None else None)


def trust(final: FinalMetrics | None) -> tuple[str, str]:
    """What the first screen says about trust in single answers: a few words, and what they were measured on.

    A classifier is too sure or not sure enough where its mean confidence differs from its accuracy by more than 5
    percentage points; masks have no confidence, so their number of test images is stated.
    """
    if final is None:
        return "not known", "no metrics from public data"
    if final.images is not None and final.images < _FEW_IMAGES:
        return f"{final.images} test image{'s' * (final.images != 1)}", "too few to tell how far to trust its answers"
    if final.dice is not None:
        interval = final.intervals.get("dice")
        detail = "too few for an interval" if interval is None else f"Dice: {between(interval)}"
        return f"{final.images or 'no'} test images", detail
    if final.comparison is not None and final.comparison.better == "no" and final.accuracy is not None:
        return "no", f"it is no better than {final.comparison.constant}"
    if final.accuracy is None:
        few = sum(each is None for each in final.findings.values())
        interval = final.intervals.get("mean_auc")
        spread = "no interval" if interval is None else f"AUC {interval[0]:.3f} to {interval[1]:.3f} with 95{SPACE}%"
        lacking = f"; {few} findings have too few test images with or without them" if few else ""
        return f"{final.images or 'no'} test images", f"{spread}{lacking}"
    if final.temperature is not None:
        gap = final.temperature.before.overconfidence
        if abs(gap) <= _CALIBRATED:
            return "well calibrated", f"confidence and accuracy differ by {percent(abs(gap))}"
        words = "too sure" if gap > 0 else "not sure enough"
        if abs(final.temperature.after.overconfidence) > _CALIBRATED:
            return (
                words,
                f"by {percent(abs(gap))} on average, and no temperature corrects it: ignore its probabilities",
            )
        value = f"{float(f'{final.temperature.value:.2g}'):g}"
        return words, f"by {percent(abs(gap))} on average: divide the logits by {value} before reading probabilities"
    if final.calibration is not None:
        return f"{percent(final.calibration)} off", "calibration error: mean gap between confidence and accuracy"
    return "not known", "calibration was not measured"


def fall_text(metrics: Metrics, score_name: str) -> str | None:
    """Point out a curve that ends clearly below its best point; None if it does not."""
    if metrics.fall is None:
        return None
    best, last = metrics.fall
    where = f"step {best.step}" if best.epsilon is None else f"epsilon {epsilon_text(best.epsilon)}"
    shown = area if score_name == "mean AUC" else percent
    return (
        f"{score_name} was {shown(best.score)} at {where} and ended at {shown(last.score)}: lower --learning-rate, "
        "or train for fewer steps. A further run spends its epsilon on the same images again"
    )


def verdicts_of(certificate: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return both verdicts for machines.

    Args:
        certificate: The content of certificate.json.
        metrics: The content of metrics.json; None if nothing was measured.

    Returns:
        ``guarantee_in_order``; ``better_than_chance`` (yes, no or cannot tell) with ``chance``, ``interval`` and what
        chance is; ``falling_curve`` as a sentence, or None; ``baseline`` where one was trained on public images.
    """
    checked = checked_metrics(metrics) if metrics is not None else None
    final = checked.final if checked else None
    found = final.comparison if final else None
    nothing = {"better_than_chance": "cannot tell", "interval": None, "chance": None, "chance_is": None}
    name = score_name(final)
    compared = checked.baseline if checked else None
    return {
        **({} if compared is None else {"baseline": compared.model_dump(exclude_none=True)}),
        "guarantee_in_order": not reasons_against_release(checked_certificate(certificate)),
        **(nothing if found is None else {key: value for key, value in found.to_dict().items() if key != "score"}),
        "falling_curve": fall_text(checked, name) if checked else None,
    }


def figures_of(run: Path) -> dict[str, Any]:
    """Return the headline values of a run for machines, as they are in the files, not rounded.

    Args:
        run: A run folder that holds release/.

    Returns:
        Accuracy or Dice, epsilon, delta, unit, adjacency, steps, and the reasons against release.

    Raises:
        DataError: The folder is not a finished run, or a file is not what dpvision writes.
    """
    facts = read_run(run)
    final, names = facts.final, ("epsilon", "delta", "epsilon_rdp", "privacy_unit", "adjacency", "steps_taken")
    kind = score_name(final)
    scores = ("dice", "dice_per_patient", "baseline_dice") if kind == "Dice" else ("accuracy",)
    scores = ("mean_auc", "mean_average_precision") if kind == "mean AUC" else scores
    return {
        **{name: getattr(final, name, None) for name in scores},
        **{name: getattr(facts.certificate, name) for name in (*names, "for_release")},
        "reasons_against_release": list(reasons_against_release(facts.certificate)),
        **verdicts_of(
            facts.certificate.model_dump(), facts.metrics.model_dump() if facts.metrics is not None else None
        ),
    }


def _score_lines(final: FinalMetrics | None) -> list[str]:
    """The headline metric, and the worst class or patient."""
    if final is None:
        return ["accuracy  not measured: no public test data"]
    size = f", {final.images:,} images" if final.images else ""
    weights = f", {final.weights} weights" if final.weights else ""
    where = f"({final.evaluated_on}{size}{weights})"
    if final.accuracy is None and final.dice is None:
        known = {name: each for name, each in final.findings.items() if each is not None}
        worst = min(known, key=lambda name: (known[name].auc, name)) if known else None
        low = [] if worst is None else [f"worst     {area(known[worst].auc, known[worst].auc_interval)}  ({worst})"]
        return [f"mean AUC  {area(final.score, final.intervals.get('mean_auc'))}  {where}", *low]
    if final.dice is None:
        lines, known = [f"accuracy  {percent(final.score, of=final.images)}  {where}"], final.class_shares
        if len(known) > 1:
            name = min(known, key=lambda key: (known[key], key))
            lines.append(f"worst     {percent(known[name])}  (class {name})")
        return lines
    lines = [f"dice      {percent(final.score)}  {where}"]
    if final.dice_per_patient is not None:
        lines.append(f"patients  {percent(final.dice_per_patient)}  (Dice of each patient, averaged)")
    if final.per_patient and len(final.per_patient) > 1:
        lines.append(f"worst     {percent(min(final.per_patient.values()))}  (Dice of one patient)")
    if final.baseline_dice is not None:
        lines.append(f"baseline  {percent(final.baseline_dice)}  (Dice of the best constant mask)")
    return lines


def _guarantee_lines(facts: Certificate) -> list[str]:
    """Epsilon, delta, and the bound on attacks that they leave."""
    if facts.epsilon is None or facts.delta is None:
        return ["epsilon   none: trained without privacy, no guarantee"]
    found = bound_percent(true_positive_bound(proved_profile(facts), false_positive_rate=DISPLAY_RATE))
    change = f"one {facts.privacy_unit} {_CHANGES[facts.adjacency]}"
    return [
        f"epsilon   {epsilon_text(facts.epsilon)}  (proved upper bound, {change})",
        f"delta     {facts.delta:g}",
        f"meaning   an attack that wrongly accuses 1 % of non-members finds at most {found} of the "
        f"{unit_name(facts.privacy_unit)}s",
    ]


# Wording of values


def unit_name(unit: str) -> str:
    """A privacy unit's name in the middle of a sentence."""
    return "image" if unit == "example" else unit


def epsilon_text(epsilon: float) -> str:
    """At most two decimals (three below 0.1), rounded up."""
    return _rounded_up(epsilon, 2 if epsilon >= 0.1 else 3)


def percent(share: float, of: int | None = None) -> str:
    """A share as a percentage. Two decimals only where there are enough images (``of``) to give them a meaning."""
    return f"{100 * share:.{2 if of is not None and of >= 1000 else 1}f}{SPACE}%"


def area(value: float, interval: tuple[float, float] | None = None) -> str:
    """An area under a curve (AUC, average precision): three decimals, with its 95 % interval."""
    ends = "" if interval is None else f" (95{SPACE}% interval {interval[0]:.3f} to {interval[1]:.3f})"
    return f"{value:.3f}{ends}"


def between(interval: tuple[float, float]) -> str:
    """A 95 % interval of a share, in percent."""
    return f"95{SPACE}% interval {100 * interval[0]:.1f} to {100 * interval[1]:.1f}{SPACE}%"


def bound_percent(share: float) -> str:
    """An upper bound on a share as a percentage, rounded up: two decimals below 1 %, else one."""
    if share >= NO_BOUND:
        return f"100{SPACE}%"
    return f"{_rounded_up(100 * share, 2 if share < 0.01 else 1)}{SPACE}%"


def power(value: float) -> Markup:
    """A small number as a power of ten in HTML, rounded up: 1e-5 is 10⁻⁵, 3.14e-6 is 3.2 · 10⁻⁶."""
    exponent = math.floor(math.log10(value))
    factor = Decimal(repr(value)).scaleb(-exponent).quantize(Decimal("0.1"), ROUND_CEILING)
    if factor >= 10:
        factor, exponent = Decimal(1), exponent + 1
    raised = Markup("10<sup>{}</sup>").format(str(exponent).replace("-", "−"))
    return raised if factor == 1 else Markup("{} · {}").format(factor, raised)


def number(value: object) -> str:
    """A value as a reader would write it: 60,000, 0.1, yes."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{int(value):,}" if value.is_integer() and abs(value) < 1e15 else f"{value:,.6g}"
    return "none" if value is None else str(value)


def sentence(text: str) -> str:
    """``text`` with a capital first letter, unless its first word is an identifier such as num_units."""
    first = text.partition(" ")[0]
    return text if "_" in first else text[:1].upper() + text[1:]


def odds_factor(epsilon: float) -> str:
    """e^epsilon, rounded up: how much more probable any outcome can become because of one unit."""
    factor = math.exp(min(epsilon, 700.0))
    return _rounded_up(factor, 1) if factor < 100 else (f"{math.ceil(factor):,}" if factor < 1e9 else f"{factor:.2g}")


def flat(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, str]]:
    """Nested values as (dotted name, text) in their own order; unset values are left out."""
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


def _rounded_up(value: float, decimals: int) -> str:
    if value >= 1e12:
        return f"{value:.3g}"
    return str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-decimals), ROUND_CEILING))
