"""The whole check, from a path to what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from dpvision.certificate import Certificate, Spent, spent_by, steps_taken
from dpvision.checks import TamperError
from dpvision.files import disk_errors
from dpvision.ledger import Entry, charges_of, read_ledger
from dpvision.runfolder import LEDGER, MANIFEST, SIGNATURE, RunFolder, read_file
from dpvision.signing import fingerprint, load_private_key, signature_bytes
from dpvision.verify.claims import check_claims, check_epsilon
from dpvision.verify.files import (
    check_files,
    check_history,
    check_manifest,
    check_private,
    check_signature,
    find,
    read_certificate,
)
from dpvision.verify.findings import Findings


@final
@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found. ``epsilon`` is recomputed from the ledger alone; ``claimed_epsilon`` is the certificate's.

    ``signed_by`` is the fingerprint of the key of a signature that fits. Anybody can sign with a key of their own, so
    it says little unless ``signer_is_known``: the key is the one that was asked for.
    """

    path: str
    problems: tuple[str, ...]
    epsilon: float | None = None
    epsilon_rdp: float | None = None
    delta: float | None = None
    privacy_unit: str | None = None
    adjacency: str | None = None
    steps: int | None = None
    claimed_epsilon: float | None = None
    for_release: bool = False
    stamps: tuple[str, ...] = ()
    signed_by: str | None = None
    signer_is_known: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. A run that says it is not for release can be in order, too."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"ok": self.ok, **asdict(self), "problems": list(self.problems), "stamps": list(self.stamps)}


def verify(path: Path, *, key: bytes | None = None) -> Verification:
    """Check a run folder, a release folder or a certificate with its ledger beside it; name all that is wrong.

    With a public ``key`` the release must be signed by it.

    Guarantee: ok only if the recomputed epsilon of the ledger is at most the claimed one, within ``MAY_CLAIM_LESS``.
    """
    return _examine(path, key)[0]


def require_verified(path: Path) -> tuple[Certificate, tuple[Entry, ...]]:
    """The certificate and the ledger of a release in which nothing is wrong, as they were when they were checked."""
    found, certificate, entries = _examine(path, None)
    if found.problems or certificate is None or entries is None:
        more = f" and {len(found.problems) - 1} more" if len(found.problems) > 1 else ""
        reason = found.problems[0].rstrip(".") if found.problems else "it is not whole"
        raise TamperError(
            f"{path} is not a release that can be relied on: {reason}{more}. Get it anew, and see dpvision verify."
        )
    return certificate, entries


def sign_release(path: Path, key_file: Path, *, ask_password: Callable[[], str]) -> tuple[Path, str]:
    """Sign a release, by a run's folder or its own, with a private key; the signature's path and the key's fingerprint.

    Guarantee: refused unless everything in the release is in order. An older signature gives way, if it fits.
    """
    key = load_private_key(key_file, ask_password=ask_password)
    require_verified(path)
    release = find(path).release
    content = signature_bytes(read_file(release / MANIFEST), key)
    RunFolder(release.parent).write_signature(content, release)
    return release / SIGNATURE, fingerprint(key.public_key().public_bytes_raw())


def _examine(path: Path, key: bytes | None) -> tuple[Verification, Certificate | None, tuple[Entry, ...] | None]:
    with disk_errors(f"read {path}"):
        place = find(path)
        findings = Findings()
        manifest = check_manifest(place.release, findings) if place.whole else None
        signature = check_signature(place, manifest, key, findings)
        entries = findings.attempt(lambda: read_ledger(place.release / LEDGER))
        certificate = findings.attempt(lambda: read_certificate(place))
        if certificate is not None:
            check_files(place, certificate, findings)
        if place.run is not None:
            check_private(place.run, entries, certificate, findings)
        spent = None
        if entries is not None:
            spent = findings.attempt(lambda: _spent(entries))
        if entries is not None:
            check_history(place, entries, findings)
        if entries is not None and certificate is not None:
            check_claims(certificate, entries, findings)
            check_epsilon(certificate, spent, entries, findings)
    found = _verification(path, entries, certificate, spent, findings)
    if signature is not None:
        found = replace(found, signed_by=signature.fingerprint, signer_is_known=signature.public_key == key)
    return found, certificate, entries


def _spent(entries: tuple[Entry, ...]) -> Spent:
    """Epsilon from the ledger alone."""
    header = entries[0].payload
    return spent_by(charges_of(entries), delta=header["delta"], adjacency=header["adjacency"])


def _verification(
    path: Path,
    entries: tuple[Entry, ...] | None,
    certificate: Certificate | None,
    spent: Spent | None,
    findings: Findings,
) -> Verification:
    header: dict[str, Any] = {} if entries is None else entries[0].payload
    return Verification(
        path=str(path),
        problems=tuple(dict.fromkeys(findings.problems)),
        epsilon=None if spent is None else spent.epsilon,
        epsilon_rdp=None if spent is None else spent.epsilon_rdp,
        delta=header.get("delta"),
        privacy_unit=header.get("privacy_unit"),
        adjacency=header.get("adjacency"),
        steps=None if entries is None else steps_taken(charges_of(entries)),
        claimed_epsilon=None if certificate is None else certificate.epsilon,
        for_release=certificate is not None and certificate.for_release and not findings.problems,
        stamps=() if certificate is None else tuple(certificate.stamps),
    )
