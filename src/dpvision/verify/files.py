"""The files of a release against each other: manifest, hashes, signature, and what only the owner has."""

from __future__ import annotations

from pathlib import Path

from dpvision.certificate import HAND_SEEDED, Certificate, parse_certificate
from dpvision.checks import ArgumentError, TamperError
from dpvision.ledger import Entry, require_mark
from dpvision.runfolder import (
    CERTIFICATE,
    CONFIG,
    LEDGER,
    MANIFEST,
    SIGNATURE,
    WEIGHTS,
    RunFolder,
    file_sha256,
    inspect_checkpoints,
    parse_object,
    read_file,
    release_files,
)
from dpvision.signing import Signature, checked_signature, fingerprint
from dpvision.verify.findings import Findings, Place, read_object, rewritten


def find(path: Path) -> Place:
    """Where the release of ``path`` lies."""
    if (path / "release").is_dir():
        also = [name for name in (CERTIFICATE, LEDGER, MANIFEST, SIGNATURE, WEIGHTS) if (path / name).exists()]
        if also:
            raise TamperError(f"{path} holds a folder release and a {also[0]} beside it: name the one that you mean.")
        run = RunFolder(path)
        return Place(run.release, run.release / CERTIFICATE, True, run if run.private.is_dir() else None)
    if path.is_dir() and any((path / name).exists() for name in (CERTIFICATE, LEDGER, MANIFEST)):
        return Place(path, path / CERTIFICATE, True)
    if path.is_file():
        whole = path.name == CERTIFICATE and (path.parent / MANIFEST).exists()
        return Place(path.parent, path, whole)
    found = "it holds none of their files" if path.exists() else "there is nothing"
    raise ArgumentError(f"{path} must be a run folder, a release folder or a certificate: {found}.")


def read_certificate(place: Place) -> Certificate:
    """The certificate, if it has the layout and is as it was written."""
    path = place.certificate
    if place.whole and not path.exists():
        raise TamperError(f"{path} is missing: the run is not finished (resume it), or somebody took it away.")
    values = read_object(path)
    try:
        return parse_certificate(values)
    except ArgumentError as error:
        raise TamperError(f"{path} is not a certificate: {error}.") from error


def check_manifest(release: Path, findings: Findings) -> bytes | None:
    """Every file by its hash, none missing and none added; the manifest's bytes, for its signature."""
    path = release / MANIFEST
    if not path.exists():
        findings.require(False, f"{path} is missing: the release is not finished, or somebody took it away.")
        return None
    content = findings.attempt(lambda: read_file(path))
    hashes = None if content is None else findings.attempt(lambda: parse_object(content, name=str(path)))
    if hashes is None:
        return content
    findings.require(rewritten(dict(sorted(hashes.items()))) == content, f"{path} is not as it was written.")
    present = set(release_files(release))
    for name in sorted(present - hashes.keys()):
        findings.require(False, f"{release / name} is not in the manifest: it was added later.")
    for name in sorted(hashes.keys() - present):
        findings.require(False, f"{name} is in the manifest, but not in {release}: it was taken away or renamed.")
    for name in sorted(present & hashes.keys()):
        with findings.noted():
            same = file_sha256(release / name) == hashes[name]
            findings.require(same, f"{release / name} is not the file that the manifest names: it was changed.")
    return content


def check_signature(place: Place, manifest: bytes | None, key: bytes | None, findings: Findings) -> Signature | None:
    """A signature that is there must fit the manifest; with a ``key``, there must be one, by that key."""
    path = place.release / SIGNATURE
    signature = None
    if place.whole and (path.exists() or path.is_symlink()):
        signature = findings.attempt(lambda: _read_signature(path, manifest))
        if signature is None:
            return None  # named already
    if key is not None:
        wanted = fingerprint(key)
        if signature is None:
            lacks = "it has no signature" if place.whole else "a certificate alone has none, give the whole release"
            findings.require(False, f"{place.release} is not signed by {wanted}: {lacks}.")
        else:
            same = signature.public_key == key
            findings.require(same, f"{path} is by another key, {signature.fingerprint}, not by {wanted}.")
    return signature


def _read_signature(path: Path, manifest: bytes | None) -> Signature:
    content = read_file(path)
    if rewritten(parse_object(content, name=str(path))) != content:
        raise TamperError(f"{path} is not as it was written.")
    if manifest is None:
        raise TamperError(f"{path} signs a manifest that is not there.")
    return checked_signature(content, manifest, name=str(path))


def check_files(place: Place, certificate: Certificate, findings: Findings) -> None:
    """Weights and configuration by their hashes; they may be absent where only a certificate was given."""
    for name, claimed in ((WEIGHTS, certificate.weights_sha256), (CONFIG, certificate.config_sha256)):
        path = place.release / name
        if path.exists() or path.is_symlink():
            with findings.noted():
                same = file_sha256(path) == claimed
                findings.require(same, f"{path} is not the file that the certificate names.")
        else:
            findings.require(not place.whole, f"{path} is missing.")
    for attachment in certificate.attachments:
        path = place.release / attachment.name
        if path.exists() or path.is_symlink():
            with findings.noted():
                same = file_sha256(path) == attachment.sha256
                findings.require(same, f"{path} is not the attachment that the certificate names.")
        else:
            findings.require(not place.whole, f"{path} is missing: the certificate names it as an attachment.")


def check_private(
    run: RunFolder, entries: tuple[Entry, ...] | None, certificate: Certificate | None, findings: Findings
) -> None:
    """What only the owner can check: checkpoints, what they remember of the ledger, and the kind of key."""
    for file in inspect_checkpoints(run.checkpoints):
        findings.require(file.problem is None, file.problem or "")
    marks = findings.attempt(run.known_marks) or {}
    for length, head in sorted({mark for name, mark in marks.items() if name != CERTIFICATE}):
        if entries is not None:
            with findings.noted():
                require_mark(entries, length=length, head=head, path=run.ledger_path)
    key = findings.attempt(run.load_key) if run.key_path.exists() else None
    if key is None:
        return
    if entries is not None:
        same = key.run_id == entries[0].payload["run_id"]
        findings.require(same, f"{run.key_path} belongs to run {key.run_id!r}, the ledger to another.")
    if certificate is not None and key.keys.hand_seeded:
        findings.require(HAND_SEEDED in certificate.stamps, "the key is hand-seeded, and the certificate hides it.")
