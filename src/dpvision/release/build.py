"""From a ledger to its certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from dpvision.errors import PrivacyError
from dpvision.privacy.ledger import Entry, charges_of
from dpvision.privacy.mechanism import Mechanism
from dpvision.release.schema import (
    FORMAT,
    AttackBound,
    Certificate,
    CurvePoint,
    Declared,
    GaussianBound,
    LedgerMark,
    parse_certificate,
)
from dpvision.release.statements import (
    HAND_SEEDED,
    Spent,
    charged_list,
    deployment,
    differing_facts,
    other_units,
    required_declared,
    required_stamps,
    required_uncovered,
    spent_by,
    steps_taken,
    unique,
)


@final
@dataclass(frozen=True, kw_only=True)
class ReleaseFacts:
    """What is released, by its hashes, and public descriptions of the data and the software."""

    weights_sha256: str
    config_sha256: str
    data: Mapping[str, Any]
    software: Mapping[str, Any]


def build_certificate(
    *,
    ledger: Sequence[Entry],
    mechanism: Mechanism | None,
    hand_seeded: bool,
    release: ReleaseFacts,
) -> dict[str, Any]:
    """The certificate of a run, from the entries of its ledger; ``mechanism`` is None without privacy.

    All that it declares stands in the ledger, so that ``verify`` can ask for exactly that.

    Guarantee: epsilon covers every charge in the ledger, and a run that must not be released says so.
    """
    header = ledger[0].payload
    _require_same_facts(header, mechanism)
    charges = charges_of(ledger)
    spent = spent_by(charges, delta=header["delta"], adjacency=header["adjacency"])
    stamps = [HAND_SEEDED] if hand_seeded else []
    stamps = unique([*stamps, *required_stamps(ledger, mechanism)])
    certificate = Certificate(
        format=FORMAT,
        for_release=not stamps,
        stamps=stamps,
        privacy_unit=header["privacy_unit"],
        adjacency=header["adjacency"],
        delta=header["delta"],
        epsilon=spent.epsilon,
        epsilon_rdp=spent.epsilon_rdp,
        curve=[CurvePoint(delta=delta, epsilon=epsilon) for delta, epsilon in spent.curve],
        gaussian_dp=_gaussian_bound(spent),
        attack_success=[
            AttackBound(false_positive_rate=false, true_positive_rate=true) for false, true in spent.attack_success
        ],
        other_units=other_units(header, charges),
        mechanism={} if mechanism is None else mechanism.to_dict(),
        sampler=None if mechanism is None else "poisson",
        divisor=None if mechanism is None else mechanism.divisor,
        steps_taken=steps_taken(charges),
        charged=charged_list(charges),
        declared=[Declared(what=what, how=how) for what, how in required_declared(ledger)],
        not_covered=required_uncovered(ledger),
        deployment=deployment(header),
        ledger=LedgerMark(length=len(ledger), head=ledger[-1].hash),
        weights_sha256=release.weights_sha256,
        config_sha256=release.config_sha256,
        data=dict(release.data),
        software=dict(release.software),
        attachments=[],
    )
    return certificate.model_dump()


def _gaussian_bound(spent: Spent) -> GaussianBound | None:
    return None if spent.gaussian_dp is None else GaussianBound(**asdict(spent.gaussian_dp))


def with_attachment(certificate: Mapping[str, Any], *, name: str, sha256: str) -> dict[str, Any]:
    """The same certificate that names one more file; an earlier file of that name gives way."""
    known = parse_certificate(certificate)
    hashes = {attachment.name: attachment.sha256 for attachment in known.attachments} | {name: sha256}
    named = [{"name": name, "sha256": sha256} for name, sha256 in sorted(hashes.items())]
    return parse_certificate({**known.model_dump(), "attachments": named}).model_dump()


def _require_same_facts(header: Mapping[str, Any], mechanism: Mechanism | None) -> None:
    if mechanism is None:
        if header["delta"] is not None:
            raise PrivacyError("the ledger is that of a private run, so its certificate needs the mechanism.")
        return
    wrong = differing_facts(header, mechanism)
    if header["delta"] is None or wrong:
        names = ", ".join(wrong) or "delta"
        raise PrivacyError(f"the mechanism is not the one that the ledger was opened for: {names} differ.")
