"""What a release claims about privacy, and what it does not. Every figure comes from the ledger. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from functools import lru_cache
from typing import Any, Literal, TypeVar, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpvision.accounting import Charges, cautions, describe, guarantee
from dpvision.checks import ArgumentError, PrivacyError
from dpvision.ledger import TRAINING, Entry, charges_of
from dpvision.mechanism import Adjacency, Event, Guarantee, Mechanism

FORMAT = 1
NO_PRIVACY = "trained without privacy: no guarantee"
HAND_SEEDED = "hand-seeded key: whoever knows the seed can subtract the noise; reproducible, not for release"
NOT_FOR_RELEASE = "not for release"  # a note of the ledger that is a stamp of the certificate
TRAINING_DATA = "training data"
CURVE_DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
ALWAYS_DECLARED: tuple[tuple[str, str], ...] = (
    ("num_units, class names and picture shape", "declared public by whoever configured the run"),
)
ALWAYS_UNCOVERED: tuple[str, ...] = (
    "How hyper-parameters, architecture and clip norm were chosen outside this run.",
    "Other runs and releases on the same data: each of them composes with this one.",
    "Timing, memory use and other side channels of the machine that trained.",
    "Floating-point arithmetic: the proof speaks of real numbers. Noise is drawn and added in finite precision.",
    "The honesty of the program that wrote the ledger: hashes show later changes, not a lie at the time of writing.",
    "Whoever can read private/: it holds the key of the noise.",
)

_CEILING = Context(prec=4, rounding=ROUND_CEILING)
_T = TypeVar("_T")
_Digest = Field(pattern="^[0-9a-f]{64}$")


@final
@dataclass(frozen=True, kw_only=True)
class ReleaseFacts:
    """What is released, by its hashes, and public descriptions of the data and the software."""

    weights_sha256: str
    config_sha256: str
    data: Mapping[str, Any]
    software: Mapping[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class Disclosures:
    """What the run adds to the lists that every certificate has. ``stamps`` are reasons not to release."""

    declared: tuple[tuple[str, str], ...] = ()
    not_covered: tuple[str, ...] = ()
    stamps: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Spent:
    """Upper bounds on what the charges of a ledger spend. All None in a run without privacy."""

    epsilon: float | None
    epsilon_rdp: float | None
    curve: tuple[tuple[float, float], ...] = ()


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@final
class Charged(_Part):
    """One kind of noisy release and how often it was charged."""

    purpose: str
    sample_rate: float
    noise_multiplier: float
    count: int = Field(ge=1)


@final
class Declared(_Part):
    """A public fact, or a look at data, that is declared and not charged."""

    what: str
    how: str


@final
class CurvePoint(_Part):
    """One more proved pair."""

    delta: float = Field(gt=0, lt=1)
    epsilon: float = Field(ge=0)


@final
class LedgerMark(_Part):
    """The ledger from which the certificate was made."""

    length: int = Field(ge=1)
    head: str = _Digest


@final
class Certificate(_Part):
    """The layout of certificate.json."""

    format: Literal[1]
    for_release: bool
    stamps: list[str]
    privacy_unit: str = Field(min_length=1)
    adjacency: Adjacency
    delta: float | None = Field(gt=0, lt=1)
    epsilon: float | None = Field(ge=0)
    epsilon_rdp: float | None = Field(ge=0)
    mechanism: dict[str, Any]
    steps_taken: int = Field(ge=0)
    charged: list[Charged]
    declared: list[Declared]
    not_covered: list[str]
    curve: list[CurvePoint]
    ledger: LedgerMark
    weights_sha256: str = _Digest
    config_sha256: str = _Digest
    data: dict[str, Any]
    software: dict[str, Any]


def build_certificate(
    *,
    ledger: Sequence[Entry],
    mechanism: Mechanism | None,
    hand_seeded: bool,
    release: ReleaseFacts,
    disclosures: Disclosures | None = None,
) -> dict[str, Any]:
    """The certificate of a run, from the entries of its ledger; ``mechanism`` is None without privacy.

    Guarantee: epsilon covers every charge in the ledger, and a run that must not be released says so.
    """
    header, more = ledger[0].payload, disclosures or Disclosures()
    _require_same_facts(header, mechanism)
    charges = charges_of(ledger)
    spent = spent_by(charges, delta=header["delta"], adjacency=header["adjacency"])
    stamps = [HAND_SEEDED] if hand_seeded else []
    stamps = _unique([*stamps, *required_stamps(ledger, mechanism), *more.stamps])
    certificate = Certificate(
        format=FORMAT,
        for_release=not stamps,
        stamps=stamps,
        privacy_unit=header["privacy_unit"],
        adjacency=header["adjacency"],
        delta=header["delta"],
        epsilon=spent.epsilon,
        epsilon_rdp=spent.epsilon_rdp,
        mechanism={} if mechanism is None else mechanism.to_dict(),
        steps_taken=steps_taken(charges),
        charged=charged_list(charges),
        declared=[Declared(what=what, how=how) for what, how in _unique([*required_declared(ledger), *more.declared])],
        not_covered=_unique([*required_uncovered(header), *more.not_covered]),
        curve=[CurvePoint(delta=delta, epsilon=epsilon) for delta, epsilon in spent.curve],
        ledger=LedgerMark(length=len(ledger), head=ledger[-1].hash),
        weights_sha256=release.weights_sha256,
        config_sha256=release.config_sha256,
        data=dict(release.data),
        software=dict(release.software),
    )
    return certificate.model_dump()


@lru_cache(maxsize=64)
def spent_by(charges: tuple[tuple[Event, int], ...], *, delta: float | None, adjacency: Adjacency) -> Spent:
    """Epsilon by both accountants, and by PLD at several deltas. Without privacy (delta None) there is none."""
    if delta is None:
        return Spent(None, None)
    headline = guarantee(charges, delta=delta, adjacency=adjacency, accountant="pld").epsilon
    by_rdp = guarantee(charges, delta=delta, adjacency=adjacency, accountant="rdp").epsilon
    if not (math.isfinite(headline) and math.isfinite(by_rdp)):
        raise PrivacyError(f"no finite epsilon can be proved at delta {delta:g}. Choose a larger delta.")
    points = ((at, _or_none(charges, delta=at, adjacency=adjacency)) for at in CURVE_DELTAS if at != delta)
    curve = [(delta, headline), *((at, epsilon) for at, epsilon in points if epsilon is not None)]
    return Spent(headline, by_rdp, tuple(sorted(curve, reverse=True)))


def _or_none(charges: Charges, *, delta: float, adjacency: Adjacency) -> float | None:
    """Epsilon at a further delta; None where rounding does not let one be proved."""
    try:
        epsilon = guarantee(charges, delta=delta, adjacency=adjacency, accountant="pld").epsilon
    except ArgumentError:
        return None
    return epsilon if math.isfinite(epsilon) else None


def required_stamps(ledger: Sequence[Entry], mechanism: Mechanism | None) -> list[str]:
    """Reasons against a release that the ledger itself shows."""
    stamps = [HAND_SEEDED] if ledger[0].payload.get("hand_seeded") else []
    notes = [e.payload for e in ledger if e.kind == "declare"]
    stamps += [note["how"] for note in notes if note["what"] == NOT_FOR_RELEASE]
    if mechanism is None:
        return [*stamps, NO_PRIVACY]
    charges = charges_of(ledger)
    if any(event != mechanism.step_event for event, _ in charges if event.purpose == TRAINING):
        stamps.append("the mechanism was changed during the run: its parts compose, but the plan followed the data")
    if steps_taken(charges) > mechanism.steps:
        stamps.append(f"{steps_taken(charges)} steps were charged, but {mechanism.steps} were planned")
    return stamps


def required_declared(ledger: Sequence[Entry]) -> list[tuple[str, str]]:
    """What every certificate of this ledger declares."""
    declared = [e.payload for e in ledger if e.kind == "declare"]
    notes = [(note["what"], note["how"]) for note in declared if note["what"] != NOT_FOR_RELEASE]
    forks = [
        (f"fork {e.payload['fork']} at step {e.payload['step']}", f"{e.payload['reason']}; repeated steps are charged")
        for e in ledger
        if e.kind == "fork"
    ]
    return _unique([*ALWAYS_DECLARED, *notes, *forks])


def required_uncovered(header: Mapping[str, Any]) -> list[str]:
    """What every certificate under this header says that it does not cover."""
    found = list(ALWAYS_UNCOVERED)
    if header["privacy_unit"] == "example":
        found.append("A person who owns several examples: the guarantee protects one example at a time.")
    if header["delta"] is not None and not header["delta"] < 1 / header["num_units"]:
        found.append(
            f"Delta {header['delta']:g} is not below 1/{header['num_units']}: a mechanism that publishes one "
            f"{header['privacy_unit']} in full could keep such a guarantee."
        )
    return found


def charged_list(charges: Charges) -> list[Charged]:
    """The charges as a certificate lists them."""
    return [
        Charged(purpose=e.purpose, sample_rate=e.sample_rate, noise_multiplier=e.noise_multiplier, count=count)
        for e, count in charges
    ]


def steps_taken(charges: Charges) -> int:
    """Training steps that were charged, over all forks: at least as many as were taken."""
    return sum(count for event, count in charges if event.purpose == TRAINING)


def parse_certificate(values: object) -> Certificate:
    """Check a certificate's layout; ``ArgumentError`` names every field that is wrong."""
    try:
        return Certificate.model_validate(values)
    except ValidationError as error:
        found = (f"{'.'.join(map(str, p['loc'])) or 'all'}: {p['msg']}" for p in error.errors(include_url=False))
        raise ArgumentError("; ".join(found)) from error


def _require_same_facts(header: Mapping[str, Any], mechanism: Mechanism | None) -> None:
    if mechanism is None:
        if header["delta"] is not None:
            raise PrivacyError("the ledger is that of a private run, so its certificate needs the mechanism.")
        return
    wrong = differing_facts(header, mechanism)
    if header["delta"] is None or wrong:
        names = ", ".join(wrong) or "delta"
        raise PrivacyError(f"the mechanism is not the one that the ledger was opened for: {names} differ.")


def differing_facts(header: Mapping[str, Any], mechanism: Mechanism) -> list[str]:
    """Names of the mechanism's facts that are not those under which the ledger was opened.

    A header need not name every fact. One without a style of clipping is of a time when there was but one.
    """
    opened_for = {"clipping": "flat", "unit_norm": False, **header}
    names = ("num_units", "privacy_unit", "adjacency", "clip_norm", "clipping", "unit_norm")
    return [name for name in names if name in opened_for and opened_for[name] != getattr(mechanism, name)]


def _unique(items: Sequence[_T]) -> list[_T]:
    return list(dict.fromkeys(items))


def render_certificate_text(certificate: Mapping[str, Any]) -> str:
    """The certificate in plain words."""
    return "\n".join(_lines(parse_certificate(certificate))) + "\n"


def _lines(certificate: Certificate) -> Iterator[str]:
    yield "For release." if certificate.for_release else "NOT FOR RELEASE:"
    yield from (f"  - {stamp}" for stamp in certificate.stamps)
    yield from _guarantee_lines(certificate)
    yield "Charged:"
    for part in certificate.charged:
        yield (
            f"  - {part.purpose}, {part.count} times: each {certificate.privacy_unit} joins with probability "
            f"{part.sample_rate:.6g}, noise {part.noise_multiplier:.6g} times the most that one can add"
        )
    yield "Declared, not charged:"
    yield from (f"  - {item.what}: {item.how}" for item in certificate.declared)
    yield "Not covered:"
    yield from (f"  - {text}" for text in certificate.not_covered)
    yield f"Ledger: {certificate.ledger.length} entries, head {certificate.ledger.head}"
    yield f"Weights: SHA-256 {certificate.weights_sha256}"


def _guarantee_lines(certificate: Certificate) -> Iterator[str]:
    if certificate.epsilon is None or certificate.delta is None or certificate.epsilon_rdp is None:
        yield "There is no guarantee: parts of the training data may be read off such a model."
        return
    proved = Guarantee(
        epsilon=certificate.epsilon,
        delta=certificate.delta,
        adjacency=certificate.adjacency,
        accountant="pld",
        privacy_unit=certificate.privacy_unit,
    )
    yield (
        f"Epsilon {rounded_up(proved.epsilon)} at delta {rounded_up(proved.delta)} for {proved.adjacency} of one "
        f"{proved.privacy_unit}, by PLD ({rounded_up(certificate.epsilon_rdp)} by RDP)."
    )
    yield describe(proved)
    yield from (f"Caution: {text}" for text in cautions(proved, num_units=certificate.mechanism["num_units"]))


def rounded_up(value: float) -> str:
    """Four digits, rounded up: a rounded bound is still a bound."""
    return f"{float(_CEILING.create_decimal(repr(value))):.4g}"
