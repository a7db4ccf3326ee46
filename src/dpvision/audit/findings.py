"""Audit results as documents: values, what they show, and what they do not show.

Documents on synthetic images may be attached to a release. Results of membership inference are computed from private
images and stay in ``private/``.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from dpvision import __version__
from dpvision.accounting import Profile, true_positive_bound
from dpvision.audit.audited_runs import Subject
from dpvision.audit.canaries import CanaryAudit
from dpvision.audit.mechanism_check import Check
from dpvision.audit.membership import MembershipAudit
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import rounded_up
from dpvision.release.amend import attach
from dpvision.release.build import proved_profile
from dpvision.release.schema import parse_certificate
from dpvision.storage.files import parse_object, read_file
from dpvision.storage.run_folder import RunFolder

AUDIT_FILE: Final = "audit.json"
FORMAT: Final = 1
Document = dict[str, Any]

_MECHANISM_SHOWS = (
    "The code that takes a step clips, draws, charges and adds noise as the certificate says, on synthetic images, as "
    "far as these checks can see."
)
_MECHANISM_LIMITS = (
    "It does not look at the run itself, at what happens outside a step, or at the accounting. A fault that needs "
    "other inputs than these to show stays unseen."
)
_CANARY_LIMITS = (
    "A bound below the claim proves nothing: weak canaries leave much unseen, and the run that was audited is not the "
    "run that is released, though both follow the same path. Nothing above the largest refutable epsilon can be found."
)
_MEMBERSHIP_LIMITS = (
    "Other attacks may do better, and whom they find can't be read off an average: a weak attack proves no privacy. "
    "These values are functions of private images, without noise: don't publish them."
)


def mechanism_document(subject: Subject, checks: Iterable[Check]) -> Document:
    """Describe the checks of the step path. Contains nothing about private images.

    Args:
        subject: The settings that were tested.
        checks: The results of ``check_mechanism``.

    Returns:
        A document for ``attach_audits``.
    """
    rows = [asdict(check) for check in checks]
    return {
        "kind": "mechanism",
        "settings": settings_of(subject),
        "passed": all(row["passed"] for row in rows),
        "checks": rows,
        "shows": _MECHANISM_SHOWS,
        "does_not_show": _MECHANISM_LIMITS,
    }


def canary_document(subject: Subject, audit: CanaryAudit) -> Document:
    """Describe a canary audit. Contains nothing about private images.

    Args:
        subject: The settings that were audited.
        audit: The result of ``audit_with_canaries``.

    Returns:
        A document for ``attach_audits``.
    """
    bound, estimate = audit.bound, audit.estimate
    if audit.refuted:
        shows = (
            f"The claim of epsilon {rounded_up(audit.epsilon_claimed)} is refuted: with {bound.confidence:.0%} "
            f"confidence, epsilon is above {bound.epsilon_lower:.3f} at delta {bound.delta:g}."
        )
    else:
        shows = (
            f"With {bound.confidence:.0%} confidence, epsilon is above {bound.epsilon_lower:.3f}, which the claim of "
            f"{rounded_up(audit.epsilon_claimed)} allows; up to {bound.largest_refutable:.3f} could have been refuted."
        )
    alarm = "more" if audit.suspicious else "no more"
    claimed = "" if audit.mu_claimed is None else f" (claimed: {audit.mu_claimed:.3f})"
    return {
        "kind": f"canaries, {audit.sight} box",
        "settings": settings_of(subject),
        "passed": not (audit.refuted or audit.suspicious),
        "included": audit.included,
        "epsilon_claimed": audit.epsilon_claimed,
        "mu_claimed": audit.mu_claimed,
        "one_run_bound": asdict(bound),
        "gaussian_estimate": {name: _finite(value) for name, value in asdict(estimate).items()},
        "shows": shows,
        "estimate_shows": (
            f"If scores had a Gaussian trade-off, epsilon would be about {_number(estimate.epsilon)}, and "
            f"{_number(estimate.epsilon_lower)} or more with {estimate.confidence:.1%} confidence. The scores lie "
            f"{_number(estimate.mu)} deviations apart{claimed}, {alarm} than the ledger explains. This is an estimate, "
            "not a bound."
        ),
        "does_not_show": _CANARY_LIMITS,
    }


def membership_document(audits: Iterable[MembershipAudit], certificate: Mapping[str, Any]) -> Document:
    """Describe attacks on a finished run, beside the bound that its certificate proves.

    Args:
        audits: Results of ``loss_attack`` and ``shadow_attack``.
        certificate: The run's certificate.

    Returns:
        A private document: for ``keep_private`` only.
    """
    rows = [audit.to_dict() for audit in audits]
    profile = proved_profile(parse_certificate(certificate))
    return {
        "kind": "membership inference",
        "attacks": rows,
        "most_true_positives": {
            str(at["false_positive_rate"]): _allowed(profile, at["false_positive_rate"]) for at in rows[0]["at_rates"]
        },
        "shows": "How well these attacks tell images that were trained on from images that were not.",
        "does_not_show": _MEMBERSHIP_LIMITS,
    }


def settings_of(subject: Subject) -> Document:
    """Return the public settings that were audited."""
    config = subject.config
    return {
        "name": subject.name,
        "model": None if config.model is None else config.model.model_dump(),
        "mechanism": config.mechanism.to_dict(),
        "views": config.views.model_dump(),
        "rows_per_unit": config.data.rows_per_unit,
        "delta": subject.delta,
        "data": "synthetic images",
    }


def attach_audits(run: Path, documents: Iterable[Document]) -> Path:
    """Add audits to ``release/audit.json`` and name it in the certificate; replaces earlier audits of the same kind.

    Args:
        run: The run's folder.
        documents: Documents of canary audits and mechanism checks.

    Returns:
        Path of the attached file.

    Raises:
        ArgumentError: A document was computed from private images.

    Guarantee:
        Nothing that was computed from private images enters the release.
    """
    documents = list(documents)
    private = [document["kind"] for document in documents if "settings" not in document]
    if private:
        raise ArgumentError(f"{', '.join(private)}: computed from private images, not for release.")
    path = RunFolder.open(run).release / AUDIT_FILE
    known: list[Document] = parse_object(read_file(path), name=str(path))["audits"] if path.exists() else []
    kinds = {document["kind"] for document in documents}
    audits = [*(document for document in known if document["kind"] not in kinds), *documents]
    content = {"format": FORMAT, "dpvision": __version__, "audits": audits}
    with tempfile.TemporaryDirectory(prefix="dpvision-audit-") as folder:
        file = Path(folder) / AUDIT_FILE
        file.write_text(json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")
        return attach(run, file)


def keep_private(run: Path, document: Document) -> Path:
    """Write results that were computed from private images into ``private/``, which is never published.

    Args:
        run: The run's folder.
        document: The document.

    Returns:
        Path of the file.
    """
    with RunFolder.open(run) as folder:
        folder.write_unsafe("membership", document)
        return folder.private / "unsafe_membership.json"


def _allowed(profile: Profile, rate: float) -> float | None:
    """The largest true-positive rate that the certificate allows at this false-positive rate; None without privacy."""
    return true_positive_bound(profile, false_positive_rate=rate) if profile.epsilons.size else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "infinite"
