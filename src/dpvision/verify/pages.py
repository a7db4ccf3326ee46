"""Files for readers: the pages, made anew from the files that they speak of, and the figures in metrics.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dpvision.accounting import guarantee
from dpvision.card import model_card
from dpvision.certificate import Certificate, known_certificate_pages
from dpvision.checks import TamperError, brief
from dpvision.ledger import TRAINING, Entry, charges_of
from dpvision.runfolder import CARD, CERTIFICATE_PAGE, CONFIG, METRICS, read_file
from dpvision.verify.claims import MAY_CLAIM_LESS, MAY_CLAIM_MORE
from dpvision.verify.findings import Findings, Place, read_object

MOST_POINTS = 50
"""Points of a curve whose epsilon is computed anew: each takes some hundredths of a second."""
# A run that was stopped after its last step measures once more when it is resumed, with other threads perhaps.
MAY_DIFFER = 1e-3


def check_pages(place: Place, certificate: Certificate, findings: Findings) -> None:
    """certificate.md and the model card are what their files give. Only for a certificate that is in order itself."""
    values = certificate.model_dump()
    path = place.release / CERTIFICATE_PAGE
    if path.exists():
        with findings.noted():
            pages = [page.encode() for page in known_certificate_pages(values)]
            same = read_file(path) in pages
            findings.require(same, f"{path} does not say what certificate.json says: it was changed.")
    card, metrics, config = (place.release / name for name in (CARD, METRICS, CONFIG))
    if card.exists() and metrics.exists() and config.exists():
        with findings.noted():
            made = model_card(values, metrics=read_object(metrics), config=read_object(config))
            same = read_file(card) == made.encode()
            findings.require(
                same, f"{card} does not say what certificate, metrics and configuration say: it was changed."
            )


def check_metrics(place: Place, certificate: Certificate, entries: tuple[Entry, ...], findings: Findings) -> None:
    """The epsilons of the curve, from the ledger; its last point, against the final figures; the task."""
    path = place.release / METRICS
    if not path.exists():
        return  # named already where it must not be missing
    metrics = findings.attempt(lambda: read_object(path))
    if metrics is None:
        return
    with findings.noted():
        curve = _points(metrics.get("curve", []))
        _check_epsilons(curve, certificate, entries, findings)
        final = metrics.get("final", {})
        if not isinstance(final, dict):
            raise TamperError("metrics: the final figures are not an object.")
        if curve and curve[-1]["step"] == entries[0].payload.get("steps"):
            _compare_last(curve[-1], final, findings)
        _compare_classes(final, findings)
    config = place.release / CONFIG
    if "task" in metrics and config.exists():
        with findings.noted():
            task, known = metrics["task"], read_object(config).get("task")
            findings.require(task == known, f"metrics: the task is {brief(task)}, the configuration's {brief(known)}.")


def _points(curve: object) -> list[dict[str, Any]]:
    """The curve, if each point has a whole step, larger than the one before, and an epsilon or None."""
    if not isinstance(curve, list):
        raise TamperError("metrics: the curve is not a list.")
    last = -1
    for point in curve:
        step = point.get("step") if isinstance(point, dict) else None
        if type(step) is not int or step <= last or not _is_epsilon(point.get("epsilon", "missing")):
            raise TamperError(f"metrics: a point of the curve has no epsilon or no step after {last}.")
        last = step
    return curve


def _is_epsilon(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isfinite(value))


def _check_epsilons(
    curve: list[dict[str, Any]], certificate: Certificate, entries: tuple[Entry, ...], findings: Findings
) -> None:
    """Each is at least what its steps cost, and at most the whole: steps that were repeated count from early on."""
    whole = certificate.epsilon
    for point in curve:
        if (point["epsilon"] is None) != (whole is None):
            raise TamperError("metrics: the curve has epsilons if and only if the run is private.")
    charges = charges_of(entries)
    training = [charge for charge in charges if charge[0].purpose == TRAINING]
    if whole is None or len(training) != 1:
        return
    ((event, taken),), header = training, entries[0].payload
    if curve and curve[-1]["step"] > taken:
        raise TamperError(f"metrics: the curve goes on after the {taken} steps that are charged.")
    others = [charge for charge in charges if charge[0].purpose != TRAINING]
    for point in curve[:: -max(1, math.ceil(len(curve) / MOST_POINTS))]:  # from the last one backwards
        step, claimed = point["step"], point["epsilon"]
        steps = [(event, step)] if step else []
        known = guarantee([*steps, *others], delta=header["delta"], adjacency=header["adjacency"]).epsilon
        same = known * (1 - MAY_CLAIM_LESS) <= claimed <= whole * (1 + MAY_CLAIM_MORE)
        text = f"metrics: epsilon after step {step} is {claimed:.8g}, the ledger gives {known:.8g}."
        findings.require(same, text)


def _compare_last(point: Mapping[str, Any], final: Mapping[str, Any], findings: Findings) -> None:
    """The last point of a plan that was carried out is of the final weights."""
    shared = {name: name for name in point if name not in ("step", "epsilon")} | {"raw": "raw_weights"}
    for here, there in shared.items():
        measured, claimed = point.get(here), final.get(there)
        text = f"metrics: final {there} is {brief(claimed)}, the last point of the curve has {brief(measured)}."
        findings.require(_close(measured, claimed), text)


def _compare_classes(final: Mapping[str, Any], findings: Findings) -> None:
    """Accuracy is that of the classes, each as often as it has pictures. Masks have no such counts."""
    if "per_class_count" not in final:
        return
    shares, counts = final.get("per_class"), final["per_class_count"]
    wrong = "metrics: the figures of single classes are not what dpvision writes."
    if not isinstance(shares, dict) or not isinstance(counts, dict):
        raise TamperError(wrong)
    if shares.keys() != counts.keys() or any(type(count) is not int for count in counts.values()):
        raise TamperError(wrong)
    whole, seen = final.get("count"), sum(counts.values())
    findings.require(whole == seen, f"metrics: {brief(whole)} pictures are counted, {brief(seen)} by their classes.")
    right = [counts[name] * share for name, share in shares.items() if isinstance(share, float)]
    mean = math.fsum(right) / max(1, seen)
    text = f"metrics: final accuracy is {brief(final.get('accuracy'))}, that of the classes is {mean:.6g}."
    findings.require(_close(mean, final.get("accuracy")), text)


def _close(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=MAY_DIFFER, abs_tol=MAY_DIFFER)
    return one == other
