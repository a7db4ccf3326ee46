"""What a check collects.

The files of a release against each other: manifest, hashes, signature, and what only the owner has.

What config.json says against what the ledger was opened for, and what it charges.

What a certificate says against what its ledger shows.

Files for readers: the pages, made anew from the files that they speak of, and the figures in metrics.json.

The whole check, from a path to what was found.
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
from dpvision.privacy.ledger import TRAINING, Entry, charges_of, read_ledger, require_mark
from dpvision.privacy.mechanism import Mechanism
from dpvision.release.certificate_page import known_certificate_pages
from dpvision.release.model_card import model_card
from dpvision.release.schema import Certificate, OtherUnit, parse_certificate
from dpvision.release.sign import Signature, checked_signature, fingerprint, load_private_key, signature_bytes
from dpvision.release.statements import (
    COUNTED_UNITS,
    HAND_SEEDED,
    PIXEL_STATISTICS,
    TRAINING_DATA,
    Spent,
    charged_list,
    deployment,
    differing_facts,
    history_digest,
    noted_history,
    other_units,
    required_declared,
    required_stamps,
    required_uncovered,
    spent_by,
    steps_taken,
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
    SIGNATURE,
    WEIGHTS,
    RunFolder,
    release_files,
)

_T = TypeVar("_T")


@final
@dataclass(frozen=True)
class Place:
    """Where things lie. ``whole``: a release, of which no file may be missing."""

    release: Path
    certificate: Path
    whole: bool
    run: RunFolder | None = None


@final
class Findings:
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


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, if the file is as it was written.

    The very bytes that we would write: a key that is there twice means one thing to us and another to others.
    """
    content = read_file(path)
    values = parse_object(content, name=str(path))
    if rewritten(values) != content:
        raise TamperError(f"{path} is not as it was written: reformatted, or a key is there twice.")
    return values


def rewritten(values: dict[str, Any]) -> bytes | None:
    """The very bytes that we would write; None if we could not."""
    try:
        return json_bytes(values)
    except (ArgumentError, RecursionError):
        return None


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


# Facts of a ledger's header that are no settings: its own format, and what the run drew.
_NO_SETTINGS = frozenset({"format", "run_id", "hand_seeded"})
_OF_DATA = frozenset({"units"})


def check_config(place: Place, entries: tuple[Entry, ...], findings: Findings) -> None:
    """Every setting that the ledger holds too, and what the ledger noted of the data and the first weights."""
    path = place.release / CONFIG
    if not path.exists():
        return  # named already where it must not be missing
    config = findings.attempt(lambda: read_object(path))
    if config is None:
        return
    with findings.noted():
        privacy, data = _section(config, "privacy", path), _section(config, "data", path)
        _compare_header(privacy, data, entries[0].payload, findings)
        _compare_charges(privacy, data, entries, findings)
        names = [how for what, how in required_declared(entries) if what == TRAINING_DATA]
        source = data.get("source")
        findings.require(not names or source in names, f"config: the data are {brief(source)}, the ledger's {names}.")
    with findings.noted():
        same = history_digest(config.get("transfer")) == noted_history(entries)
        findings.require(same, f"{path} tells another history of the first weights than the ledger noted.")


def _section(config: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise TamperError(f"{path} has no section {name}.")
    return section


def _compare_header(privacy: dict[str, Any], data: dict[str, Any], header: dict[str, Any], findings: Findings) -> None:
    private = header["delta"] is not None
    enabled = privacy.get("enabled")
    findings.require(enabled is private, f"config: privacy.enabled is {brief(enabled)}, the ledger's {private}.")
    for name, known in header.items():
        # Without privacy the header leaves the mechanism out, while its settings may have defaults.
        if name in _NO_SETTINGS or (known is None and not private):
            continue
        section, where = (data, "data") if name in _OF_DATA else (privacy, "privacy")
        claimed = section.get(name)
        same = claimed == known and isinstance(claimed, bool) == isinstance(known, bool)
        findings.require(same, f"config: {where}.{name} is {brief(claimed)}, the ledger's {known}.")


def _compare_charges(
    privacy: dict[str, Any], data: dict[str, Any], entries: tuple[Entry, ...], findings: Findings
) -> None:
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
