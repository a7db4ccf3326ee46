"""The whole check, from a path to what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from dpvision.certificate import Certificate, Spent, spent_by, steps_taken
from dpvision.checks import ArgumentError, TamperError
from dpvision.files import disk_errors
from dpvision.ledger import Entry, charges_of, read_ledger
from dpvision.runfolder import LEDGER, SIGNATURE, RunFolder
from dpvision.signing import fingerprint, load_private_key, signature_bytes
from dpvision.verify.claims import check_claims, check_epsilon
from dpvision.verify.files import (
    check_files,
    check_manifest,
    check_private,
    check_signature,
    find,
    read_certificate,
)
from dpvision.verify.findings import Findings
from dpvision.verify.pages import check_metrics, check_pages
from dpvision.verify.settings import check_config


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


@final
@dataclass(frozen=True)
class _Examined:
    """What was found, and what was read on the way. ``manifest`` has the very bytes that were checked, if any were."""

    found: Verification
    certificate: Certificate | None
    entries: tuple[Entry, ...] | None
    release: Path
    manifest: bytes | None


def verify(path: Path, *, key: bytes | None = None) -> Verification:
    """Check a run folder, a release folder or a certificate with its ledger beside it; name all that is wrong.

    With a public ``key`` the release must be signed by it.

    Guarantee: ok only if the recomputed epsilon of the ledger is at most the claimed one, within ``MAY_CLAIM_LESS``.
    """
    return _examine(path, key).found


def require_verified(path: Path) -> tuple[Certificate, tuple[Entry, ...]]:
    """The certificate and the ledger of a release in which nothing is wrong, as they were when they were checked."""
    return _in_order(_examine(path, None))


def _in_order(examined: _Examined) -> tuple[Certificate, tuple[Entry, ...]]:
    path, problems = examined.found.path, examined.found.problems
    certificate, entries = examined.certificate, examined.entries
    if problems or certificate is None or entries is None:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        reason = problems[0].rstrip(".") if problems else "it is not whole"
        raise TamperError(
            f"{path} is not a release that can be relied on: {reason}{more}. Get it anew, and see dpvision verify."
        )
    return certificate, entries


def sign_release(path: Path, key_file: Path, *, ask_password: Callable[[], str]) -> tuple[Path, str]:
    """Sign a release, by a run's folder or its own, with a private key; the signature's path and the key's fingerprint.

    Guarantee: refused unless everything in the release is in order, and what is signed are the bytes that were checked:
    a manifest that somebody put there since then does not fit the signature. An older signature gives way, if it fits.
    """
    key = load_private_key(key_file, ask_password=ask_password)
    examined = _examine(path, None)
    _in_order(examined)
    release, manifest = examined.release, examined.manifest
    if manifest is None:
        raise ArgumentError(f"{path} must be a run or a release folder: a certificate alone can't be signed.")
    RunFolder(release.parent).write_signature(signature_bytes(manifest, key), release)
    return release / SIGNATURE, fingerprint(key.public_key().public_bytes_raw())


def _examine(path: Path, key: bytes | None) -> _Examined:
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
            check_config(place, entries, findings)
        if entries is not None and certificate is not None:
            before = len(findings.problems)
            check_claims(certificate, entries, findings)
            check_epsilon(certificate, spent, entries, findings)
            if len(findings.problems) == before:  # what a false certificate looks like as a page is no matter
                check_pages(place, certificate, findings)
            check_metrics(place, certificate, entries, findings)
    found = _verification(path, entries, certificate, spent, findings)
    if signature is not None:
        found = replace(found, signed_by=signature.fingerprint, signer_is_known=signature.public_key == key)
    return _Examined(found, certificate, entries, place.release, manifest)


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
