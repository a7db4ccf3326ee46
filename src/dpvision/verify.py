"""Checks a release against itself: every hash, every figure, every statement. Needs neither torch nor the data.

What this shows: the files belong together, nothing was changed since they were written, and the ledger's charges
cost what the certificate says. What it can't show: that the program which wrote them told the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from dpvision.certificate import (
    HAND_SEEDED,
    TRAINING_DATA,
    Certificate,
    Spent,
    charged_list,
    differing_facts,
    parse_certificate,
    required_declared,
    required_stamps,
    required_uncovered,
    spent_by,
    steps_taken,
)
from dpvision.checks import ArgumentError, DPVisionError, TamperError
from dpvision.files import disk_errors
from dpvision.ledger import Entry, charges_of, read_ledger, require_mark
from dpvision.mechanism import Mechanism
from dpvision.runfolder import (
    CERTIFICATE,
    CONFIG,
    LEDGER,
    MANIFEST,
    WEIGHTS,
    RunFolder,
    file_sha256,
    inspect_checkpoints,
    json_bytes,
    parse_object,
    read_file,
    release_files,
)

# Another version of the accountant or of the FFT may move the last digits: by less than this, relative.
MAY_CLAIM_LESS = 1e-4
# A claim that is larger than needed is safe, but beyond this it was not made from this ledger.
MAY_CLAIM_MORE = 1e-2
_T = TypeVar("_T")


@final
@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found. ``epsilon`` is recomputed from the ledger alone; ``claimed_epsilon`` is the certificate's."""

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

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. A run that says it is not for release can be in order, too."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"ok": self.ok, **asdict(self), "problems": list(self.problems), "stamps": list(self.stamps)}


@final
@dataclass(frozen=True)
class _Place:
    """Where things lie. ``whole``: a release, of which no file may be missing."""

    release: Path
    certificate: Path
    whole: bool
    run: RunFolder | None = None


@final
class _Findings:
    """Collects every problem; what can't be read is one of them."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def require(self, holds: bool, problem: str) -> None:
        """Note the problem unless the rule holds."""
        if not holds:
            self.problems.append(problem)

    @contextmanager
    def noted(self) -> Generator[None]:
        """Turn an error inside the block into a problem."""
        try:
            yield
        except (DPVisionError, ArithmeticError, ValueError) as error:
            self.problems.append(str(error))

    def attempt(self, read: Callable[[], _T]) -> _T | None:
        """The value of ``read``, or None and a problem."""
        with self.noted():
            return read()
        return None


def verify(path: Path) -> Verification:
    """Check a run folder, a release folder or a certificate with its ledger beside it; name all that is wrong.

    Guarantee: ok only if the recomputed epsilon of the ledger is at most the claimed one, within ``MAY_CLAIM_LESS``.
    """
    return _examine(path)[0]


def require_verified(path: Path) -> tuple[Certificate, tuple[Entry, ...]]:
    """The certificate and the ledger of a release in which nothing is wrong, as they were when they were checked."""
    found, certificate, entries = _examine(path)
    if found.problems or certificate is None or entries is None:
        more = f" and {len(found.problems) - 1} more" if len(found.problems) > 1 else ""
        reason = found.problems[0].rstrip(".") if found.problems else "it is not whole"
        raise TamperError(
            f"{path} is not a release that can be relied on: {reason}{more}. Get it anew, and see dpvision verify."
        )
    return certificate, entries


def _examine(path: Path) -> tuple[Verification, Certificate | None, tuple[Entry, ...] | None]:
    with disk_errors(f"read {path}"):
        place = _find(path)
        findings = _Findings()
        if place.whole:
            _check_manifest(place.release, findings)
        entries = findings.attempt(lambda: read_ledger(place.release / LEDGER))
        certificate = findings.attempt(lambda: _read_certificate(place))
        if certificate is not None:
            _check_files(place, certificate, findings)
        if place.run is not None:
            _check_private(place.run, entries, certificate, findings)
        spent = None
        if entries is not None:
            spent = findings.attempt(lambda: _spent(entries))
        if entries is not None and certificate is not None:
            _check_claims(certificate, entries, findings)
            _check_epsilon(certificate, spent, findings)
    return _verification(path, entries, certificate, spent, findings), certificate, entries


def _find(path: Path) -> _Place:
    if (path / "release").is_dir():
        run = RunFolder(path)
        return _Place(run.release, run.release / CERTIFICATE, True, run if run.private.is_dir() else None)
    if path.is_dir() and any((path / name).exists() for name in (CERTIFICATE, LEDGER, MANIFEST)):
        return _Place(path, path / CERTIFICATE, True)
    if path.is_file():
        whole = path.name == CERTIFICATE and (path.parent / MANIFEST).exists()
        return _Place(path.parent, path, whole)
    found = "it holds none of their files" if path.exists() else "there is nothing"
    raise ArgumentError(f"{path} must be a run folder, a release folder or a certificate: {found}.")


def _read_certificate(place: _Place) -> Certificate:
    path = place.certificate
    if place.whole and not path.exists():
        raise TamperError(f"{path} is missing: the run is not finished (resume it), or somebody took it away.")
    content = read_file(path)
    values = parse_object(content, name=str(path))
    # The very bytes that we would write: a key that is there twice means one thing to us and another to others.
    if _rewritten(values) != content:
        raise TamperError(f"{path} is not as it was written: reformatted, or a key is there twice.")
    try:
        return parse_certificate(values)
    except ArgumentError as error:
        raise TamperError(f"{path} is not a certificate: {error}.") from error


def _rewritten(values: dict[str, Any]) -> bytes | None:
    try:
        return json_bytes(values)
    except ArgumentError:
        return None


def _check_manifest(release: Path, findings: _Findings) -> None:
    path = release / MANIFEST
    if not path.exists():
        findings.require(False, f"{path} is missing: the release is not finished, or somebody took it away.")
        return
    content = findings.attempt(lambda: read_file(path))
    hashes = None if content is None else findings.attempt(lambda: parse_object(content, name=str(path)))
    if hashes is None:
        return
    findings.require(_rewritten(hashes) == content, f"{path} is not as it was written.")
    present = set(release_files(release))
    for name in sorted(present - hashes.keys()):
        findings.require(False, f"{release / name} is not in the manifest: it was added later.")
    for name in sorted(hashes.keys() - present):
        findings.require(False, f"{name} is in the manifest, but not in {release}: it was taken away or renamed.")
    for name in sorted(present & hashes.keys()):
        with findings.noted():
            same = file_sha256(release / name) == hashes[name]
            findings.require(same, f"{release / name} is not the file that the manifest names: it was changed.")


def _check_files(place: _Place, certificate: Certificate, findings: _Findings) -> None:
    """Weights and configuration by their hashes; they may be absent where only a certificate was given."""
    for name, claimed in ((WEIGHTS, certificate.weights_sha256), (CONFIG, certificate.config_sha256)):
        path = place.release / name
        if path.exists() or path.is_symlink():
            with findings.noted():
                same = file_sha256(path) == claimed
                findings.require(same, f"{path} is not the file that the certificate names.")
        else:
            findings.require(not place.whole, f"{path} is missing.")


def _check_private(
    run: RunFolder, entries: tuple[Entry, ...] | None, certificate: Certificate | None, findings: _Findings
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


def _check_claims(certificate: Certificate, entries: tuple[Entry, ...], findings: _Findings) -> None:
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
    declared = {(item.what, item.how) for item in certificate.declared}
    for what, how in required_declared(entries):
        findings.require((what, how) in declared, f"certificate: it does not declare {what!r} ({how}).")
    names = [how for what, how in required_declared(entries) if what == TRAINING_DATA]
    source = certificate.data.get("source")
    findings.require(not names or source in names, f"certificate: the data are {source!r}, the ledger's {names}.")
    for uncovered in required_uncovered(header):
        findings.require(uncovered in certificate.not_covered, f"certificate: not_covered lacks: {uncovered}")
    with findings.noted():
        _check_mechanism(certificate, entries, findings)
    consistent = certificate.for_release == (not certificate.stamps)
    findings.require(consistent, "certificate: for_release must be true without stamps and false with any.")


def _require_same_ledger(certificate: Certificate, entries: tuple[Entry, ...]) -> None:
    mark = certificate.ledger
    if len(entries) > mark.length:
        raise TamperError(
            f"the ledger has {len(entries)} entries, the certificate covers {mark.length}: the run went on after it."
        )
    require_mark(entries, length=mark.length, head=mark.head, path=Path(LEDGER))


def _check_mechanism(certificate: Certificate, entries: tuple[Entry, ...], findings: _Findings) -> None:
    header = entries[0].payload
    private = header["delta"] is not None
    findings.require(
        bool(certificate.mechanism) == private, "certificate: a mechanism is given if and only if private."
    )
    mechanism = Mechanism.from_dict(certificate.mechanism) if certificate.mechanism else None
    if mechanism is not None:
        for name in differing_facts(header, mechanism):
            findings.require(False, f"certificate: the mechanism's {name} is not the ledger's {header.get(name)!r}.")
    for stamp in required_stamps(entries, mechanism if private else None):
        findings.require(stamp in certificate.stamps, f"certificate: it lacks the stamp: {stamp}.")


def _check_epsilon(certificate: Certificate, spent: Spent | None, findings: _Findings) -> None:
    if spent is None:
        return
    _compare("epsilon", certificate.epsilon, spent.epsilon, findings)
    _compare("epsilon_rdp", certificate.epsilon_rdp, spent.epsilon_rdp, findings)
    claimed = {point.delta: point.epsilon for point in certificate.curve}
    known = dict(spent.curve)
    same = len(certificate.curve) == len(claimed) and claimed.keys() == known.keys()
    findings.require(same, f"certificate: the curve must have one point each at the deltas {sorted(known)}.")
    for delta in sorted(claimed.keys() & known.keys()):
        _compare(f"epsilon at delta {delta:g}", claimed[delta], known[delta], findings)


def _compare(name: str, claimed: float | None, known: float | None, findings: _Findings) -> None:
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


def _spent(entries: tuple[Entry, ...]) -> Spent:
    """Epsilon from the ledger alone."""
    header = entries[0].payload
    return spent_by(charges_of(entries), delta=header["delta"], adjacency=header["adjacency"])


def _verification(
    path: Path,
    entries: tuple[Entry, ...] | None,
    certificate: Certificate | None,
    spent: Spent | None,
    findings: _Findings,
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
