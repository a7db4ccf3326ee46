"""``dpvision verify``: check a release without trusting the program that wrote it.

The certificate is rebuilt from the ledger by the one builder (build.py), in the words of its own format, and compared;
so are the pages and the metrics' epsilons. The files are compared with their hashes, the configuration with the
ledger's header, and what only the owner has (checkpoints, key) with the ledger. Every problem is named, not only the
first. This module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, final

from dpvision.accounting import guarantee
from dpvision.errors import ArgumentError, DPVisionError, TamperError, brief
from dpvision.privacy.ledger import (
    COMMITTING_FORMAT,
    TRAINING,
    Entry,
    charges_of,
    committed_release,
    read_ledger,
    release_payload,
    require_mark,
)
from dpvision.privacy.mechanism import COUNTED_UNITS, Mechanism
from dpvision.release.build import (
    Bounds,
    ReleaseFacts,
    SearchCost,
    attack_rates,
    bounds_of,
    build_certificate,
    steps_taken,
)
from dpvision.release.certificate_page import known_certificate_pages
from dpvision.release.model_card import known_model_cards
from dpvision.release.schema import Certificate, format_for, parse_certificate
from dpvision.release.search_claim import search_cost
from dpvision.release.sign import Signature, checked_signature, fingerprint
from dpvision.release.statements import (
    HAND_SEEDED_STAMPS,
    PIXEL_STATISTICS,
    data_names,
    history_digest,
    is_noted_own_code,
    noted_history,
    own_code_declarations,
)
from dpvision.storage.checkpoint import inspect_checkpoints
from dpvision.storage.files import disk_errors, file_sha256, json_bytes, parse_object, read_file
from dpvision.storage.run_folder import (
    CARD,
    CERTIFICATE,
    CERTIFICATE_PAGE,
    CONFIG,
    LEDGER,
    MANIFEST,
    METRICS,
    SEARCH_LEDGER,
    SIGNATURE,
    WEIGHTS,
    RunFolder,
    empty_folders,
    release_files,
)

# Relative: another version of the accountant or of the FFT may change the last digits by less than this.
MAY_CLAIM_LESS = 1e-4
# Relative: a claim that is larger than needed is safe, but beyond this it was not made from this ledger.
MAY_CLAIM_MORE = 1e-2
# Metrics: a run that was stopped after its last step evaluates again when resumed, perhaps with other threads.
MAY_DIFFER = 1e-3
# Points of a training curve whose epsilon is recomputed: each takes some hundredths of a second.
MOST_POINTS = 50
# Facts of a ledger's header that are not settings: its own format, and what the run drew.
_NOT_SETTINGS = frozenset({"format", "run_id", "hand_seeded"})
_DATA_LAYOUT = {"source": str, "class_names": list, "image_shape": list, "num_units": int}
# What a release entry of the ledger commits to, by field, in words.
_COMMITTED = {
    "weights_sha256": "weights",
    "config_sha256": "settings (model, pixel constants)",
    "data_sha256": "facts about the data (class names, image shape)",
}
NO_COMMITMENT = (
    "The ledger has format 1, which does not commit to the released files: weights, class names or image shape that "
    "were replaced together with certificate, manifest and pages would not be noticed."
)
_BOUNDS = frozenset({"epsilon", "epsilon_of_this_run_alone", "epsilon_rdp", "mu", "true_positive_rate"})
_Entries = tuple[Entry, ...]
_T = TypeVar("_T")


@final
@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of ``verify``.

    ``epsilon`` is recomputed from the ledger alone; ``claimed_epsilon`` is the certificate's. ``signed_by`` is the
    fingerprint of the key of a valid signature. Anyone can sign with a key of their own, so it means little unless
    ``signer_is_known``: the key is the one that was asked for. ``search`` is what the ledger of a search gives: then
    ``epsilon`` is that of the whole search. ``limits`` says what a release of an old format does not
    let anyone check.
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
    search: dict[str, Any] | None = None
    signed_by: str | None = None
    signer_is_known: bool = False
    limits: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. A run that says it is not for release can be in order, too."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        lists = {name: list(getattr(self, name)) for name in ("problems", "stamps", "limits")}
        return {"ok": self.ok, **asdict(self), **lists}


@final
@dataclass(frozen=True)
class Examined:
    """A verification, and what was read for it. ``manifest`` has the bytes that were checked, if any were."""

    found: Verification
    certificate: Certificate | None
    entries: _Entries | None
    release: Path
    manifest: bytes | None

    def require_ok(self) -> tuple[Certificate, _Entries]:
        """Return certificate and ledger; ``TamperError`` names the first problem."""
        problems = self.found.problems
        if problems or self.certificate is None or self.entries is None:
            more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
            reason = problems[0].rstrip(".") if problems else "it is not whole"
            raise TamperError(
                f"{self.found.path} is not a release that can be relied on: {reason}{more}. Get it again from its "
                "owner, and see dpvision verify."
            )
        return self.certificate, self.entries


def verify(path: Path | str, *, key: bytes | None = None) -> Verification:
    """Check a release and name everything that is wrong.

    Args:
        path: A run folder, a release folder, or a certificate with its ledger beside it.
        key: The 32 bytes of a public key; if given, the release must be signed by it.

    Returns:
        What was found. ``ok`` if nothing is wrong.

    Raises:
        ArgumentError: There is no release at ``path``.

    Guarantee:
        ok only if the epsilon that is recomputed from the ledger is at most the claimed one, within
        ``MAY_CLAIM_LESS``.
    """
    return examine(Path(path), key=key).found


def require_verified(path: Path) -> tuple[Certificate, _Entries]:
    """Return the certificate and the ledger of a release in which nothing is wrong, as they were when checked."""
    return examine(path).require_ok()


def examine(path: Path, *, key: bytes | None = None) -> Examined:
    """Check everything; the result also holds what was read."""
    with disk_errors(f"read {path}"):
        place = _find(path)
        findings = Findings()
        manifest = _check_manifest(place.release, findings) if place.whole else None
        signature = _check_signature(place, manifest, key, findings)
        entries = findings.attempt(lambda: read_ledger(place.release / LEDGER))
        certificate = findings.attempt(lambda: _read_certificate(place))
        if certificate is not None:
            _check_files(place, certificate, findings)
        if place.run is not None:
            _check_private(place.run, entries, certificate, findings)
        search = _read_search(place, findings)
        cost = None
        if entries is not None and search is not None:
            cost = findings.attempt(lambda: search_cost(search, entries))
        bounds = None if entries is None or search is not None else findings.attempt(lambda: _bounds(entries))
        bounds = cost.bounds if cost is not None else bounds
        if entries is not None:
            _check_config(place, entries, findings)
        if entries is not None and certificate is not None:
            before = len(findings.problems)
            _check_certificate(certificate, entries, findings, search=search, cost=cost)
            _check_commitment(certificate, entries, findings)
            if len(findings.problems) == before:  # the pages of a false certificate do not matter
                _check_pages(place, certificate, findings)
            _check_metrics(place, certificate, entries, findings)
    header: dict[str, Any] = {} if entries is None else entries[0].payload
    found = Verification(
        path=str(path),
        problems=tuple(dict.fromkeys(findings.problems)),
        epsilon=None if bounds is None else bounds.epsilon,
        epsilon_rdp=None if bounds is None else bounds.epsilon_rdp,
        delta=header.get("delta"),
        privacy_unit=header.get("privacy_unit"),
        adjacency=header.get("adjacency"),
        steps=None if entries is None else steps_taken(charges_of(entries)),
        claimed_epsilon=None if certificate is None else certificate.epsilon,
        for_release=certificate is not None and certificate.for_release and not findings.problems,
        stamps=() if certificate is None else tuple(certificate.stamps),
        search=None if cost is None else cost.claim.model_dump(),
        limits=() if header.get("format", COMMITTING_FORMAT) >= COMMITTING_FORMAT else (NO_COMMITMENT,),
    )
    if signature is not None:
        found = replace(found, signed_by=signature.fingerprint, signer_is_known=signature.public_key == key)
    return Examined(found, certificate, entries, place.release, manifest)


def _bounds(entries: _Entries) -> Bounds:
    """Epsilon from the ledger alone."""
    header = entries[0].payload
    rates = attack_rates(header)
    return bounds_of(charges_of(entries), delta=header["delta"], adjacency=header["adjacency"], rates=rates)


# Reading files


@final
class Findings:
    """Collects every problem; a file that cannot be read is one of them."""

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
        """Return the value of ``read``, or None and note a problem."""
        with self.noted():
            return read()
        return None


@final
@dataclass(frozen=True)
class _Place:
    """Where the files are. Of a ``whole`` release no file may be missing; ``run`` is set if its private/ is there."""

    release: Path
    certificate: Path
    whole: bool
    run: RunFolder | None = None


def _find(path: Path) -> _Place:
    """Find the release that ``path`` means."""
    if (path / "release").is_dir():
        also = [name for name in (CERTIFICATE, LEDGER, MANIFEST, SIGNATURE, WEIGHTS) if (path / name).exists()]
        if also:
            raise TamperError(f"{path} holds a folder release and a {also[0]} beside it: name the one that you mean.")
        run = RunFolder(path)
        return _Place(run.release, run.release / CERTIFICATE, True, run if run.private.is_dir() else None)
    if path.is_dir() and any((path / name).exists() for name in (CERTIFICATE, LEDGER, MANIFEST)):
        return _Place(path, path / CERTIFICATE, True)
    if path.is_file():
        whole = path.name == CERTIFICATE and (path.parent / MANIFEST).exists()
        return _Place(path.parent, path, whole)
    found = "it holds none of their files" if path.exists() else "there is nothing"
    raise ArgumentError(f"{path} must be a run folder, a release folder or a certificate: {found}.")


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that has exactly the bytes that we write.

    A key that is there twice would mean one thing to this program and another to others.
    """
    content = read_file(path)
    values = parse_object(content, name=str(path))
    if _rewritten(values) != content:
        raise TamperError(f"{path} is not as it was written: reformatted, or a key is there twice.")
    return values


def _rewritten(values: dict[str, Any]) -> bytes | None:
    """The bytes that we would write for these values; None if we could not."""
    try:
        return json_bytes(values)
    except (ArgumentError, RecursionError):
        return None


def _read_certificate(place: _Place) -> Certificate:
    """The certificate, if it has the layout and is as it was written."""
    path = place.certificate
    if place.whole and not path.exists():
        raise TamperError(f"{path} is missing: the run is not finished (resume it), or the file was deleted.")
    values = _read_object(path)
    try:
        return parse_certificate(values)
    except ArgumentError as error:
        raise TamperError(f"{path} is not a certificate: {error}.") from error


# Hashes and signature


def _check_manifest(release: Path, findings: Findings) -> bytes | None:
    """Compare every file with its hash, none missing and none added; the manifest's bytes, for its signature."""
    path = release / MANIFEST
    if not path.exists():
        findings.require(False, f"{path} is missing: the release is not finished, or the file was deleted.")
        return None
    content = findings.attempt(lambda: read_file(path))
    hashes = None if content is None else findings.attempt(lambda: parse_object(content, name=str(path)))
    if hashes is None:
        return content
    findings.require(_rewritten(dict(sorted(hashes.items()))) == content, f"{path} is not as it was written.")
    present = set(release_files(release))
    for name in sorted(present - hashes.keys()):
        findings.require(False, f"{release / name} is not in the manifest: it was added later.")
    for folder in empty_folders(release):
        findings.require(False, f"{release / folder} is an empty folder: it was added later.")
    for name in sorted(hashes.keys() - present):
        findings.require(False, f"{name} is in the manifest, but not in {release}: it was deleted or renamed.")
    for name in sorted(present & hashes.keys()):
        with findings.noted():
            same = file_sha256(release / name) == hashes[name]
            findings.require(same, f"{release / name} is not the file that the manifest names: it was changed.")
    return content


def _check_signature(place: _Place, manifest: bytes | None, key: bytes | None, findings: Findings) -> Signature | None:
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
    """The signature in a file, if it fits the manifest."""
    content = read_file(path)
    if _rewritten(parse_object(content, name=str(path))) != content:
        raise TamperError(f"{path} is not as it was written.")
    if manifest is None:
        raise TamperError(f"{path} signs a manifest that is not there.")
    return checked_signature(content, manifest, name=str(path))


def _check_files(place: _Place, certificate: Certificate, findings: Findings) -> None:
    """Compare the files that the certificate names; they may be absent where only a certificate was given."""
    named = [(WEIGHTS, certificate.weights_sha256, "file"), (CONFIG, certificate.config_sha256, "file")]
    named += [(attachment.name, attachment.sha256, "attachment") for attachment in certificate.attachments]
    for name, sha256, kind in named:
        path = place.release / name
        if path.exists() or path.is_symlink():
            with findings.noted():
                same = file_sha256(path) == sha256
                findings.require(same, f"{path} is not the {kind} that the certificate names.")
        else:
            findings.require(not place.whole, f"{path} is missing: the certificate names this {kind}.")


def _check_private(
    run: RunFolder, entries: _Entries | None, certificate: Certificate | None, findings: Findings
) -> None:
    """What only the owner can check: checkpoints, the ledger marks that they remember, and the kind of key."""
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
        stamped = HAND_SEEDED_STAMPS & set(certificate.stamps)
        findings.require(bool(stamped), "the key is hand-seeded, and the certificate hides it.")


# The certificate


def _check_commitment(certificate: Certificate, entries: _Entries, findings: Findings) -> None:
    """Compare the hashes of the certificate with those to which the ledger's last entry commits.

    The ledger's format decides, not the certificate's: a certificate rewritten in an older format escapes nothing.
    """
    header = entries[0].payload
    newest = format_for(header)
    if header["format"] < COMMITTING_FORMAT:
        findings.require(
            certificate.format <= newest, f"certificate: format {certificate.format} needs a newer ledger."
        )
        return
    same = certificate.format == newest
    findings.require(same, f"certificate: its format is {certificate.format}, that of the ledger asks for {newest}.")
    committed = committed_release(entries)
    if committed is None:
        findings.require(False, "the ledger's last entry commits to no release: entries were removed or added.")
        return
    claimed = release_payload(
        weights_sha256=certificate.weights_sha256, config_sha256=certificate.config_sha256, data=certificate.data
    )
    for name, what in _COMMITTED.items():
        same = claimed[name] == committed[name]
        findings.require(same, f"certificate: the ledger commits to other {what}: they were replaced.")


def _read_search(place: _Place, findings: Findings) -> _Entries | None:
    """The ledger of the search, if there is one."""
    path = place.release / SEARCH_LEDGER
    if not (path.exists() or path.is_symlink()):
        return None
    return findings.attempt(lambda: read_ledger(path))


def _check_search_mark(certificate: Certificate, search: _Entries | None, findings: Findings) -> None:
    """A certificate that claims a search needs its ledger, as long as it was, and the reverse."""
    claim = certificate.search
    if (claim is None) != (search is None):
        missing = f"{SEARCH_LEDGER} is missing or damaged" if search is None else "the certificate does not state it"
        findings.require(False, f"search: the release is the result of a search, and {missing}.")
    elif claim is not None and search is not None:
        with findings.noted():
            if len(search) > claim.ledger.length:
                raise TamperError(
                    f"the search's ledger has {len(search)} entries, the certificate covers {claim.ledger.length}: "
                    "the search continued after it."
                )
            require_mark(search, length=claim.ledger.length, head=claim.ledger.head, path=Path(SEARCH_LEDGER))


def _check_certificate(
    certificate: Certificate,
    entries: _Entries,
    findings: Findings,
    *,
    search: _Entries | None = None,
    cost: SearchCost | None = None,
) -> None:
    """Rebuild the certificate from the ledger and name every difference."""
    _check_search_mark(certificate, search, findings)
    with findings.noted():
        if len(entries) > certificate.ledger.length:
            raise TamperError(
                f"the ledger has {len(entries)} entries, the certificate covers {certificate.ledger.length}: the run "
                "continued after it."
            )
        require_mark(entries, length=certificate.ledger.length, head=certificate.ledger.head, path=Path(LEDGER))
    _check_data(certificate, entries, findings)
    with findings.noted():
        claimed = certificate.model_dump()
        rebuilt = build_certificate(
            ledger=entries,
            mechanism=Mechanism.from_dict(certificate.mechanism) if certificate.mechanism else None,
            hand_seeded=bool(HAND_SEEDED_STAMPS & set(certificate.stamps)),  # only the owner's key may show it
            release=ReleaseFacts(
                weights_sha256=certificate.weights_sha256,
                config_sha256=certificate.config_sha256,
                data=certificate.data,
                software=certificate.software,
            ),
            version=certificate.format,
            search=cost,
        )
        # The mechanism is that of the claim, and the builder has compared it with the ledger; attachments have hashes.
        for name, known in rebuilt.items():
            if name not in ("mechanism", "ledger", "attachments") and name in claimed:
                _compare(name, claimed[name], known, findings)


def _compare(name: str, claimed: object, known: object, findings: Findings) -> None:
    """Name each difference between a claim and what the ledger gives. Only proved bounds have a tolerance."""
    field = name.rpartition(".")[2]
    if isinstance(claimed, dict) and isinstance(known, dict) and claimed.keys() == known.keys():
        for key in known:
            _compare(f"{name}.{key}", claimed[key], known[key], findings)
    elif isinstance(claimed, list) and isinstance(known, list):
        _compare_lists(name, claimed, known, findings)
    elif field in _BOUNDS and isinstance(claimed, float) and isinstance(known, float):
        _compare_bounds(name, claimed, known, findings)
    elif field == "epsilon_up_to" and isinstance(claimed, float) and isinstance(known, float):
        _compare_bounds(name, known, claimed, findings)  # here the larger claim is the bolder one
    else:
        same = type(claimed) is type(known) and claimed == known
        findings.require(same, f"certificate: {name} is {brief(claimed)}, the ledger gives {brief(known)}.")


def _compare_lists(name: str, claimed: list[Any], known: list[Any], findings: Findings) -> None:
    """Lists of equal length item by item; otherwise name what is missing and what was added."""
    if len(claimed) == len(known):
        for index, (one, other) in enumerate(zip(claimed, known, strict=True)):
            label = f"{name}.{index}" if isinstance(one, dict) else name
            _compare(label, one, other, findings)
        return
    missing, added = [item for item in known if item not in claimed], [item for item in claimed if item not in known]
    for item in missing:
        findings.require(False, f"certificate: {name} lacks {brief(item)}.")
    for item in added:
        findings.require(False, f"certificate: {name} has {brief(item)}, which the ledger does not give.")
    findings.require(bool(missing or added), f"certificate: {name} has an item twice.")


def _compare_bounds(name: str, claimed: float, known: float, findings: Findings) -> None:
    """A proved bound may be claimed a little larger than it is, and smaller only within rounding."""
    values = f"{claimed:.8g}, the ledger gives {known:.8g}"
    enough = claimed >= known * (1 - MAY_CLAIM_LESS)
    findings.require(enough, f"certificate: {name} claims LESS than was spent: {values}.")
    fitting = claimed <= known * (1 + MAY_CLAIM_MORE)
    findings.require(fitting, f"certificate: {name} is not that of the ledger: {values}.")


def _check_data(certificate: Certificate, entries: _Entries, findings: Findings) -> None:
    """The public description of the data: its layout, and what the ledger knows of it."""
    data, num_units = certificate.data, entries[0].payload["num_units"]
    same = data.keys() == _DATA_LAYOUT.keys() and all(type(data[name]) is kind for name, kind in _DATA_LAYOUT.items())
    findings.require(same, f"certificate: data must be {', '.join(_DATA_LAYOUT)}, and nothing else.")
    same = data.get("num_units") == num_units
    claimed = brief(data.get("num_units"))
    findings.require(same, f"certificate: data.num_units is {claimed}, the ledger's {num_units}.")
    names, source = data_names(entries), data.get("source")
    findings.require(not names or source in names, f"certificate: the data are {source!r}, the ledger's {names}.")


# The configuration


def _check_config(place: _Place, entries: _Entries, findings: Findings) -> None:
    """Compare every setting that the ledger holds too, and what it declares of the data and the initial weights."""
    path = place.release / CONFIG
    if not path.exists():
        return  # named already where it must not be missing
    config = findings.attempt(lambda: _read_object(path))
    if config is None:
        return
    with findings.noted():
        privacy, data = config.get("privacy"), config.get("data")
        if not isinstance(privacy, dict) or not isinstance(data, dict):
            raise TamperError(f"{path} has no section {'privacy' if isinstance(data, dict) else 'data'}.")
        _compare_header(privacy, data, entries[0].payload, findings)
        _compare_charges(privacy, data, entries, findings)
        names, source = data_names(entries), data.get("source")
        findings.require(not names or source in names, f"config: the data are {brief(source)}, the ledger's {names}.")
    with findings.noted():
        same = history_digest(config.get("transfer")) == noted_history(entries)
        findings.require(same, f"{path} gives another history of the initial weights than the ledger.")
        same = is_noted_own_code(own_code_declarations(config), entries)
        findings.require(same, f"{path} names another model or loss of the user's own than the ledger.")


def _compare_header(privacy: dict[str, Any], data: dict[str, Any], header: dict[str, Any], findings: Findings) -> None:
    """Each fact of the ledger's header is a setting of the same value."""
    private = header["delta"] is not None
    enabled = privacy.get("enabled")
    findings.require(enabled is private, f"config: privacy.enabled is {brief(enabled)}, the ledger's {private}.")
    for name, known in header.items():
        # Without privacy the header leaves the mechanism out, while its settings may have defaults.
        if name in _NOT_SETTINGS or (known is None and not private):
            continue
        section, where = (data, "data") if name == "units" else (privacy, "privacy")
        claimed = section.get(name)
        same = claimed == known and isinstance(claimed, bool) == isinstance(known, bool)
        findings.require(same, f"config: {where}.{name} is {brief(claimed)}, the ledger's {known}.")


def _compare_charges(privacy: dict[str, Any], data: dict[str, Any], entries: _Entries, findings: Findings) -> None:
    """What was computed from the data besides the training steps is what was configured, at its noise, once."""
    configured: dict[str, Any] = {}
    if entries[0].payload["delta"] is not None:
        if privacy.get("count_noise_multiplier") is not None:
            configured[COUNTED_UNITS] = privacy["count_noise_multiplier"]
        if data.get("normalisation") == "released":
            configured[PIXEL_STATISTICS] = data.get("statistics_noise_multiplier")
    charged = [(event, count) for event, count in charges_of(entries) if event.purpose != TRAINING]
    for event, count in charged:
        noise = configured.get(event.purpose)
        same = noise == event.noise_multiplier and (event.sample_rate, count) == (1.0, 1)
        text = f"{count} × {event.purpose} at noise {event.noise_multiplier:g}"
        findings.require(same, f"config: its noise for this is {brief(noise)}, the ledger charges {text}.")
    for purpose in configured.keys() - {event.purpose for event, _ in charged}:
        findings.require(False, f"config: it has noise for the {purpose}, and the ledger does not charge that.")


# Pages and metrics


def _check_pages(place: _Place, certificate: Certificate, findings: Findings) -> None:
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
            made = known_model_cards(values, metrics=_read_object(metrics), config=_read_object(config))
            same = read_file(card) in [page.encode() for page in made]
            findings.require(
                same, f"{card} does not say what certificate, metrics and configuration say: it was changed."
            )


def _check_metrics(place: _Place, certificate: Certificate, entries: _Entries, findings: Findings) -> None:
    """The epsilons of the curve, from the ledger; its last point, against the final metrics; the task."""
    path = place.release / METRICS
    if not path.exists():
        return  # named already where it must not be missing
    metrics = findings.attempt(lambda: _read_object(path))
    if metrics is None:
        return
    with findings.noted():
        curve = _points(metrics.get("curve", []))
        _check_epsilons(curve, certificate, entries, findings)
        final = metrics.get("final", {})
        if not isinstance(final, dict):
            raise TamperError("metrics: the final metrics are not an object.")
        if curve and curve[-1]["step"] == entries[0].payload.get("steps"):
            _compare_last(curve[-1], final, findings)
        _compare_classes(final, findings)
    config = place.release / CONFIG
    if "task" in metrics and config.exists():
        with findings.noted():
            task, known = metrics["task"], _read_object(config).get("task")
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
    curve: list[dict[str, Any]], certificate: Certificate, entries: _Entries, findings: Findings
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
        raise TamperError(f"metrics: the curve continues after the {taken} steps that are charged.")
    others = [charge for charge in charges if charge[0].purpose != TRAINING]
    for point in curve[:: -max(1, math.ceil(len(curve) / MOST_POINTS))]:  # from the last one backwards
        step, claimed = point["step"], point["epsilon"]
        steps = [(event, step)] if step else []
        known = guarantee([*steps, *others], delta=header["delta"], adjacency=header["adjacency"]).epsilon
        same = known * (1 - MAY_CLAIM_LESS) <= claimed <= whole * (1 + MAY_CLAIM_MORE)
        text = f"metrics: epsilon after step {step} is {claimed:.8g}, the ledger gives {known:.8g}."
        findings.require(same, text)


def _compare_last(point: Mapping[str, Any], final: Mapping[str, Any], findings: Findings) -> None:
    """The last point of a finished plan was measured with the final weights."""
    shared = {name: name for name in point if name not in ("step", "epsilon")} | {"raw": "raw_weights"}
    for here, there in shared.items():
        measured, claimed = point.get(here), final.get(there)
        text = f"metrics: final {there} is {brief(claimed)}, the last point of the curve has {brief(measured)}."
        findings.require(_close(measured, claimed), text)


def _compare_classes(final: Mapping[str, Any], findings: Findings) -> None:
    """Accuracy is the mean of the classes' accuracies, weighted by their images. Masks have no such counts."""
    if "per_class_count" not in final:
        return
    shares, counts = final.get("per_class"), final["per_class_count"]
    wrong = "metrics: the values of single classes are not what dpvision writes."
    if not isinstance(shares, dict) or not isinstance(counts, dict):
        raise TamperError(wrong)
    if shares.keys() != counts.keys() or any(type(count) is not int for count in counts.values()):
        raise TamperError(wrong)
    whole, seen = final.get("count"), sum(counts.values())
    findings.require(whole == seen, f"metrics: {brief(whole)} images are counted, {brief(seen)} by their classes.")
    right = [counts[name] * share for name, share in shares.items() if isinstance(share, float)]
    mean = math.fsum(right) / max(1, seen)
    text = f"metrics: final accuracy is {brief(final.get('accuracy'))}, that of the classes is {mean:.6g}."
    findings.require(_close(mean, final.get("accuracy")), text)


def _close(one: object, other: object) -> bool:
    """Equal, or floats that another evaluation may give."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=MAY_DIFFER, abs_tol=MAY_DIFFER)
    return one == other
