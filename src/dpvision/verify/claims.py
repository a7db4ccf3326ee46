"""What a certificate says against what its ledger shows."""

from __future__ import annotations

from pathlib import Path

from dpvision.certificate import (
    HAND_SEEDED,
    TRAINING_DATA,
    Certificate,
    OtherUnit,
    Spent,
    charged_list,
    deployment,
    differing_facts,
    other_units,
    required_declared,
    required_stamps,
    required_uncovered,
    steps_taken,
)
from dpvision.checks import TamperError, brief
from dpvision.ledger import Entry, charges_of, require_mark
from dpvision.mechanism import Mechanism
from dpvision.runfolder import LEDGER
from dpvision.verify.findings import Findings

# Another version of the accountant or of the FFT may move the last digits: by less than this, relative.
MAY_CLAIM_LESS = 1e-4
# A claim that is larger than needed is safe, but beyond this it was not made from this ledger.
MAY_CLAIM_MORE = 1e-2


def check_claims(certificate: Certificate, entries: tuple[Entry, ...], findings: Findings) -> None:
    """Everything but epsilon: each statement against the ledger."""
    with findings.noted():
        _require_same_ledger(certificate, entries)
    header, charges = entries[0].payload, charges_of(entries)
    for name in ("privacy_unit", "adjacency", "delta"):
        claimed = getattr(certificate, name)
        findings.require(claimed == header[name], f"certificate: {name} is {claimed!r}, the ledger's {header[name]!r}.")
    same = certificate.charged == charged_list(charges)
    findings.require(same, "certificate: the list of charges is not the ledger's.")
    taken = steps_taken(charges)
    text = f"certificate: steps_taken is {certificate.steps_taken}, but {taken} training steps are charged."
    findings.require(certificate.steps_taken == taken, text)
    _check_lists(certificate, entries, findings)
    _check_data(certificate, entries, findings)
    with findings.noted():
        _check_mechanism(certificate, entries, findings)
    same = certificate.deployment == deployment(header)
    findings.require(same, "certificate: deployment is not what the ledger's header says.")
    consistent = certificate.for_release == (not certificate.stamps)
    findings.require(consistent, "certificate: for_release must be true without stamps and false with any.")


def _check_lists(certificate: Certificate, entries: tuple[Entry, ...], findings: Findings) -> None:
    """Exactly what the ledger declares and leaves uncovered: a line more is a claim that nobody can check."""
    declared, wanted = [(item.what, item.how) for item in certificate.declared], required_declared(entries)
    for what, how in wanted:
        findings.require((what, how) in declared, f"certificate: it does not declare {what!r} ({how}).")
    for what, how in declared:
        findings.require((what, how) in wanted, f"certificate: it declares {what!r} ({how}), the ledger does not.")
    uncovered = required_uncovered(entries)
    for text in uncovered:
        findings.require(text in certificate.not_covered, f"certificate: not_covered lacks: {text}")
    for text in certificate.not_covered:
        findings.require(text in uncovered, f"certificate: not_covered has what the ledger does not give: {text}")
    twice = len(set(declared)) < len(declared) or len(set(certificate.not_covered)) < len(certificate.not_covered)
    findings.require(not twice, "certificate: a line of declared or not_covered is there twice.")


def _check_data(certificate: Certificate, entries: tuple[Entry, ...], findings: Findings) -> None:
    data, num_units = certificate.data, entries[0].payload["num_units"]
    layout = {"source": str, "class_names": list, "image_shape": list, "num_units": int}
    same = data.keys() == layout.keys() and all(type(data[name]) is kind for name, kind in layout.items())
    findings.require(same, f"certificate: data must be {', '.join(layout)}, and nothing else.")
    claimed = brief(data.get("num_units"))
    same = data.get("num_units") == num_units
    findings.require(same, f"certificate: data.num_units is {claimed}, the ledger's {num_units}.")
    names = [how for what, how in required_declared(entries) if what == TRAINING_DATA]
    source = data.get("source")
    findings.require(not names or source in names, f"certificate: the data are {source!r}, the ledger's {names}.")


def _require_same_ledger(certificate: Certificate, entries: tuple[Entry, ...]) -> None:
    mark = certificate.ledger
    if len(entries) > mark.length:
        raise TamperError(
            f"the ledger has {len(entries)} entries, the certificate covers {mark.length}: the run went on after it."
        )
    require_mark(entries, length=mark.length, head=mark.head, path=Path(LEDGER))


def _check_mechanism(certificate: Certificate, entries: tuple[Entry, ...], findings: Findings) -> None:
    header = entries[0].payload
    private = header["delta"] is not None
    findings.require(
        bool(certificate.mechanism) == private, "certificate: a mechanism is given if and only if private."
    )
    mechanism = Mechanism.from_dict(certificate.mechanism) if certificate.mechanism else None
    divisor, sampler = (None, None) if mechanism is None else (mechanism.divisor, "poisson")
    findings.require(certificate.divisor == divisor, f"certificate: divisor must be {divisor} for its mechanism.")
    findings.require(certificate.sampler == sampler, f"certificate: sampler must be {sampler} for its mechanism.")
    if mechanism is not None:
        for name in differing_facts(header, mechanism):
            findings.require(False, f"certificate: the mechanism's {name} is not the ledger's {header.get(name)!r}.")
    stamps = required_stamps(entries, mechanism if private else None)
    for stamp in stamps:
        findings.require(stamp in certificate.stamps, f"certificate: it lacks the stamp: {stamp}.")
    for stamp in certificate.stamps:
        # Of a hand-seeded key only the owner's side may know.
        known = stamp in stamps or stamp == HAND_SEEDED
        findings.require(known, f"certificate: its stamp is not one of the ledger's: {stamp}.")


def check_epsilon(
    certificate: Certificate, spent: Spent | None, entries: tuple[Entry, ...], findings: Findings
) -> None:
    """Every figure, recomputed."""
    if spent is None:
        return
    _compare("epsilon", certificate.epsilon, spent.epsilon, findings)
    _compare("epsilon_rdp", certificate.epsilon_rdp, spent.epsilon_rdp, findings)
    curve = {point.delta: point.epsilon for point in certificate.curve}
    whole = len(curve) == len(certificate.curve)
    _compare_points("epsilon at delta", curve if whole else {}, dict(spent.curve), findings)
    attacks = {bound.false_positive_rate: bound.true_positive_rate for bound in certificate.attack_success}
    whole = len(attacks) == len(certificate.attack_success)
    _compare_points("attack_success at", attacks if whole else {}, dict(spent.attack_success), findings)
    _compare_gaussian(certificate, spent, findings)
    with findings.noted():
        _compare_other_units(certificate, other_units(entries[0].payload, charges_of(entries)), findings)


def _compare_points(name: str, claimed: dict[float, float], known: dict[float, float], findings: Findings) -> None:
    same = claimed.keys() == known.keys()
    kind = "curve" if name.startswith("epsilon") else "list of attacks"
    findings.require(same, f"certificate: the {kind} must have one point each at {sorted(known)}.")
    for at in sorted(claimed.keys() & known.keys()):
        _compare(f"{name} {at:g}", claimed[at], known[at], findings)


def _compare_gaussian(certificate: Certificate, spent: Spent, findings: Findings) -> None:
    claimed, known = certificate.gaussian_dp, spent.gaussian_dp
    if claimed is None or known is None:
        findings.require(claimed is None and known is None, "certificate: gaussian_dp is given if and only if private.")
        return
    _compare("gaussian_dp.mu", claimed.mu, known.mu, findings)
    # Here the larger claim is the bolder one.
    _compare("gaussian_dp.epsilon_up_to", known.epsilon_up_to, claimed.epsilon_up_to, findings)


def _compare_other_units(certificate: Certificate, known: list[OtherUnit], findings: Findings) -> None:
    claimed = certificate.other_units
    same = [(o.unit, o.delta, o.why) for o in claimed] == [(o.unit, o.delta, o.why) for o in known]
    findings.require(same, "certificate: other_units are not those of the ledger.")
    if same:
        for one, other in zip(claimed, known, strict=True):
            _compare(f"epsilon for {one.unit}", one.epsilon, other.epsilon, findings)


def _compare(name: str, claimed: float | None, known: float | None, findings: Findings) -> None:
    if claimed is None or known is None:
        findings.require(claimed is known, f"certificate: {name} is {claimed}, the ledger gives {known}.")
        return
    figures = f"{claimed:.8g}, the ledger gives {known:.8g}"
    findings.require(
        claimed >= known * (1 - MAY_CLAIM_LESS), f"certificate: {name} claims LESS than was spent: {figures}."
    )
    findings.require(
        claimed <= known * (1 + MAY_CLAIM_MORE), f"certificate: {name} is not that of the ledger: {figures}."
    )
