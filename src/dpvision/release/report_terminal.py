"""The wording of a run's end on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpvision.accounting import DISPLAY_RATE, true_positive_bound
from dpvision.release import report_words
from dpvision.release.report_facts import (
    FinalMetrics,
    Overlaps,
    checked_certificate,
    checked_metrics,
    read_run,
    reasons_against_release,
)
from dpvision.release.report_markup import visible
from dpvision.release.schema import Certificate
from dpvision.release.statements import proved_profile

_NEIGHBOURS = {"add_remove": "added or removed", "replace_one": "replaced", "zero_out": "left out"}


def summary_lines(certificate: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> list[str]:
    """Accuracy or Dice, guarantee and what it means, a line each; reasons against release come first, and last."""
    facts = checked_certificate(certificate)
    final = checked_metrics(metrics).final if metrics is not None else None
    warning = [f"NOT FOR RELEASE: {reason}" for reason in reasons_against_release(facts)]
    lines = [*_score_lines(final), *_guarantee_lines(facts)]
    return [visible(line.replace(report_words.SPACE, " ")) for line in (*lines, *warning)]


def figures_of(run: Path) -> dict[str, Any]:
    """The same figures for machines: as they are in the files, not rounded."""
    facts = read_run(run)
    final = facts.metrics.final if facts.metrics else None
    names = ("epsilon", "delta", "epsilon_rdp", "privacy_unit", "adjacency", "steps_taken", "for_release")
    return {
        **_scores(final),
        **{name: getattr(facts.certificate, name) for name in names},
        "reasons_against_release": list(reasons_against_release(facts.certificate)),
    }


def _scores(final: FinalMetrics | None) -> dict[str, Any]:
    if final is None or final.overlaps is None:
        return {"accuracy": None if final is None else final.accuracy}
    found = final.overlaps
    return {"dice": found.dice, "dice_per_patient": found.dice_per_patient, "baseline_dice": found.baseline_dice}


def _score_lines(final: FinalMetrics | None) -> list[str]:
    if final is None:
        return ["accuracy  not measured: no public test data"]
    size = f", {final.pictures:,} pictures" if final.pictures else ""
    weights = f", {final.weights} weights" if final.weights else ""
    where = f"({final.evaluated_on}{size}{weights})"
    if final.overlaps is None:
        return [f"accuracy  {report_words.percent(final.score, of=final.pictures)}  {where}", *_worst_line(final)]
    return [f"dice      {report_words.percent(final.score)}  {where}", *_overlap_lines(final.overlaps)]


def _overlap_lines(found: Overlaps) -> list[str]:
    lines = []
    if found.dice_per_patient is not None:
        lines.append(f"patients  {report_words.percent(found.dice_per_patient)}  (Dice of each patient, averaged)")
    if found.per_patient and len(found.per_patient) > 1:
        lines.append(f"worst     {report_words.percent(min(found.per_patient.values()))}  (Dice of one patient)")
    if found.baseline_dice is not None:
        lines.append(f"baseline  {report_words.percent(found.baseline_dice)}  (Dice of the best single mask for all)")
    return lines


def _worst_line(final: FinalMetrics) -> list[str]:
    known = {name: share for name, share in final.per_class.items() if share is not None}
    if len(known) < 2:
        return []
    name = min(known, key=lambda key: (known[key], key))
    return [f"worst     {report_words.percent(known[name])}  (class {name})"]


def _guarantee_lines(facts: Certificate) -> list[str]:
    if facts.epsilon is None or facts.delta is None:
        return ["epsilon   none: trained without privacy, no guarantee"]
    most = true_positive_bound(proved_profile(facts), false_positive_rate=DISPLAY_RATE)
    found = report_words.bound_percent(most)
    change = f"one {facts.privacy_unit} {_NEIGHBOURS[facts.adjacency]}"
    members = f"{report_words.the_unit(facts.privacy_unit)}s"
    return [
        f"epsilon   {report_words.epsilon_text(facts.epsilon)}  (proved upper bound, {change})",
        f"delta     {facts.delta:g}",
        f"meaning   an attack that wrongly accuses 1 % of outsiders finds at most {found} of the {members}",
    ]
