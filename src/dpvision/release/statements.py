"""Every figure of a certificate, from the charges of a ledger and its header alone.

What a certificate must say in words, given its ledger. ``verify`` asks for the same words.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, final

from dpvision.accounting import (
    CURVE_DELTAS,
    Charges,
    GaussianDP,
    Profile,
    full_profile,
    gaussian_dp,
    guarantee,
    owner_guarantee,
    row_guarantee,
    true_positive_bound,
)
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.ledger import TRAINING, Entry, charges_of
from dpvision.privacy.mechanism import Adjacency, Event, Guarantee, Mechanism
from dpvision.release.schema import Certificate, Charged, OtherUnit

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
ROW_UNITS = ("example", "slice")
VOLUME = "volume"  # the word for a unit that is a file with many slices, where nobody said whose it is
"""Words for a unit that is a single row. Any other unit owns its rows."""


@final
@dataclass(frozen=True)
class Spent:
    """Upper bounds on what the charges of a ledger spend. All None or empty in a run without privacy."""

    epsilon: float | None
    epsilon_rdp: float | None
    curve: tuple[tuple[float, float], ...] = ()
    gaussian_dp: GaussianDP | None = None
    attack_success: tuple[tuple[float, float], ...] = ()


MOST_KINDS = 24
"""Releases of different noise or rate: each takes a while to compose, and no run has more than a few."""


@lru_cache(maxsize=64)
def spent_by(charges: tuple[tuple[Event, int], ...], *, delta: float | None, adjacency: Adjacency) -> Spent:
    """Epsilon by both accountants, and by PLD the whole curve. Without privacy (delta None) there is none."""
    if delta is None:
        return Spent(None, None)
    if len(charges) > MOST_KINDS:
        raise PrivacyError(f"{len(charges)} kinds of releases are charged, more than the {MOST_KINDS} of any run.")
    headline = guarantee(charges, delta=delta, adjacency=adjacency, accountant="pld").epsilon
    by_rdp = guarantee(charges, delta=delta, adjacency=adjacency, accountant="rdp").epsilon
    if not (math.isfinite(headline) and math.isfinite(by_rdp)):
        raise PrivacyError(f"no finite epsilon can be proved at delta {delta:g}. Choose a larger delta.")
    points = ((at, _or_none(charges, delta=at, adjacency=adjacency)) for at in CURVE_DELTAS if at != delta)
    curve = [(delta, headline), *((at, epsilon) for at, epsilon in points if epsilon is not None)]
    profile = full_profile(charges, delta=delta, adjacency=adjacency)
    return Spent(
        epsilon=headline,
        epsilon_rdp=by_rdp,
        curve=tuple(sorted(curve, reverse=True)),
        gaussian_dp=gaussian_dp(profile),
        attack_success=tuple(
            (rate, true_positive_bound(profile, false_positive_rate=rate)) for rate in FALSE_POSITIVE_RATES
        ),
    )


def _or_none(charges: Charges, *, delta: float, adjacency: Adjacency) -> float | None:
    """Epsilon at a further delta; None where rounding does not let one be proved."""
    try:
        epsilon = guarantee(charges, delta=delta, adjacency=adjacency, accountant="pld").epsilon
    except ArgumentError:
        return None
    return epsilon if math.isfinite(epsilon) else None


_SAME_EPSILON = 1e-3  # relative; other versions of the accountant differ by less


def proved_profile(certificate: Certificate) -> Profile:
    """Return the privacy profile behind a certificate, for ``true_positive_bound``.

    Args:
        certificate: A parsed certificate.

    Returns:
        The profile of the certificate's charges, if they give its stated epsilon. Otherwise a profile of the
        (epsilon, delta) pairs that the certificate states; without privacy it is empty.

    Guarantee:
        Charges that contradict the stated epsilon are ignored: they cannot make a bound smaller.
    """
    charges = tuple(
        (Event(sample_rate=part.sample_rate, noise_multiplier=part.noise_multiplier), part.count)
        for part in certificate.charged
    )
    pairs = [(point.epsilon, point.delta) for point in certificate.curve]
    if certificate.epsilon is None or certificate.delta is None:
        return Profile.from_pairs(pairs)
    stated = (certificate.epsilon, certificate.delta)
    return _profile_of(charges, stated, certificate.adjacency) or Profile.from_pairs([*pairs, stated])


@lru_cache(maxsize=64)
def _profile_of(
    charges: tuple[tuple[Event, int], ...], stated: tuple[float, float], adjacency: Adjacency
) -> Profile | None:
    """The profile of the charges; None if they do not give the stated epsilon or cannot be computed."""
    epsilon, delta = stated
    try:
        again = guarantee(charges, delta=delta, adjacency=adjacency).epsilon
        same = abs(again - epsilon) <= _SAME_EPSILON * epsilon
        return full_profile(charges, delta=delta, adjacency=adjacency) if same else None
    except ArgumentError:
        return None


def other_units(header: Mapping[str, Any], charges: Charges) -> list[OtherUnit]:
    """What the charges prove for the owner of several units, or for one row of a unit that owns several."""
    delta, unit, adjacency = header["delta"], header["privacy_unit"], header["adjacency"]
    if delta is None:
        return []
    if unit not in ROW_UNITS:
        return [
            OtherUnit(
                unit=f"one picture of a {unit} who has others too, added, removed or changed",
                epsilon=_if_proved(lambda: row_guarantee(charges, delta=delta, adjacency=adjacency)),
                delta=delta,
                why=f"the {unit} stays and its clipped gradient becomes another one: replacement of a {unit}, by PLD",
            )
        ]
    most_rows = header.get("most_rows_per_owner")
    if most_rows is None:
        return []
    return [
        OtherUnit(
            unit=f"an owner of at most {most_rows} {unit}s, with all of them",
            epsilon=_if_proved(lambda: owner_guarantee(charges, most_rows=most_rows, delta=delta, adjacency=adjacency)),
            delta=delta,
            why=(
                f"each {unit} of the owner joins a step by itself, and the owner moves the sum by a binomial number "
                "of clip norms: a mixture of Gaussians a step, composed by PLD"
            ),
        )
    ]


def _if_proved(prove: Callable[[], Guarantee]) -> float | None:
    """Epsilon, or None where there is no proof: a run's release must not fail for want of a second figure."""
    try:
        epsilon = prove().epsilon
    except ArgumentError:
        return None
    return epsilon if math.isfinite(epsilon) else None


def charged_list(charges: Charges) -> list[Charged]:
    """The charges as a certificate lists them."""
    return [
        Charged(purpose=e.purpose, sample_rate=e.sample_rate, noise_multiplier=e.noise_multiplier, count=count)
        for e, count in charges
    ]


def steps_taken(charges: Charges) -> int:
    """Training steps that were charged, over all forks: at least as many as were taken."""
    return sum(count for event, count in charges if event.purpose == TRAINING)


NO_PRIVACY = "trained without privacy: no guarantee"
HAND_SEEDED = "hand-seeded key: whoever knows the seed can subtract the noise; reproducible, not for release"
NOT_FOR_RELEASE = "not for release"  # a note of the ledger that is a stamp of the certificate
TRAINING_DATA = "training data"
SHOWN_PICTURES = "test pictures in the release"  # a declaration without which no picture leaves the house
HISTORY = "history of the first weights"
TEST_SPLIT = "test split"
HELD_OUT = "held out of training by a keyed draw and declared public: this run's epsilon does not protect them"
ALWAYS_DECLARED: tuple[tuple[str, str], ...] = (
    ("num_units, class names and picture shape", "declared public by whoever configured the run"),
)
# Purposes of charges besides the training steps: what nobody declared is computed from the data, with noise.
COUNTED_UNITS, PIXEL_STATISTICS = "number of units", "normalisation statistics"
_DECLARED_BESIDE_A_COUNT = (("class names and picture shape", ALWAYS_DECLARED[0][1]),)
ALWAYS_UNCOVERED: tuple[str, ...] = (
    "How hyper-parameters, architecture and clip norm were chosen outside this run.",
    "Other runs and releases on the same data: each of them composes with this one.",
    "Timing, memory use and other side channels of the machine that trained.",
    "Floating-point arithmetic: the proof speaks of real numbers. Noise is drawn and added in finite precision.",
    "The honesty of the program that wrote the ledger: hashes show later changes, not a lie at the time of writing.",
    "Whoever can read private/: it holds the key of the noise.",
    "Whoever also has pictures in the test split: figures on those are published without noise.",
)
_NEIGHBOURS = {
    "add_remove": "unbounded: one {unit} more or less",
    "zero_out": "one {unit}'s contribution becomes zero, and the number of them stays",
    "replace_one": "bounded: one {unit} becomes another",
}
_T = TypeVar("_T")


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
    counted = any(event.purpose == COUNTED_UNITS for event, _ in charges_of(ledger))
    facts = _DECLARED_BESIDE_A_COUNT if counted else ALWAYS_DECLARED
    return unique([*facts, *notes, *forks])


def required_uncovered(ledger: Sequence[Entry]) -> list[str]:
    """What every certificate of this ledger says that it does not cover."""
    header = ledger[0].payload
    found, unit = list(ALWAYS_UNCOVERED), header["privacy_unit"]
    if unit in ROW_UNITS:
        most_rows = header.get("most_rows_per_owner")
        found.append(f"A person who owns several {unit}s: the guarantee protects one {unit} at a time.")
        if most_rows is not None:
            found.append(
                f"One {unit} more or less of an owner who has more than {most_rows}: those beyond are left out, and "
                "another one may come in or go. Owners as a whole have their figure under other_units."
            )
    if unit == VOLUME:
        found.append("A patient with several volumes: each volume counts as a unit of its own.")
    if header["delta"] is not None and not header["delta"] < 1 / header["num_units"]:
        found.append(
            f"Delta {header['delta']:g} is not below 1/{header['num_units']}: a mechanism that publishes one "
            f"{unit} in full could keep such a guarantee."
        )
    if any(what == TEST_SPLIT and how.endswith(HELD_OUT) for what, how in required_declared(ledger)):
        found.append("The units held out for testing: figures on them are published without noise.")
    return found


def deployment(header: Mapping[str, Any]) -> dict[str, str]:
    """How the guarantee is meant, in the terms of NIST SP 800-226 and of the registry of deployments."""
    if header["delta"] is None:
        return {}
    unit = header["privacy_unit"]
    return {
        "flavour": "approximate differential privacy: (epsilon, delta)",
        "neighbours": _NEIGHBOURS[header["adjacency"]].format(unit=unit),
        "trust_model": "central: a trusted curator holds the pictures in the clear, trains, and adds the noise",
        "release_type": "static: one model and the files beside it; the weights after every step are covered too",
        "mechanism": "Gaussian noise on the sum of clipped gradients, once a step (DP-SGD)",
        "sampling": f"Poisson: each {unit} joins each step with the same probability, independently, in secret",
        "accounting": "all charges of this run's ledger, by privacy loss distributions, and by RDP beside them",
        "composition": "other runs and releases on the same data are not counted",
        "post_processing": "division by a public constant, optimizer, schedule and averaging see noisy sums alone",
        "parameters": "epsilon and delta are upper bounds that dpvision verify recomputes from the ledger",
        "noise_source": (
            "a hand-seeded key"
            if header.get("hand_seeded")
            else "AES-256 in counter mode under a secret from the operating system; float64, on a public grid"
        ),
        "access": "private/ stays with the curator: whoever has it can subtract the noise",
        "utility": "figures in metrics.json are measured on data declared public, without noise",
    }


def history_digest(transfer: object) -> str | None:
    """SHA-256 of what a released configuration says of the first weights and all before them; None if nothing."""
    if transfer is None:
        return None
    return hashlib.sha256(json.dumps(transfer, sort_keys=True).encode()).hexdigest()


def noted_history(ledger: Iterable[Entry]) -> str | None:
    """The same as the ledger has it: the last note counts, since a fork may bring other weights."""
    notes = [e.payload["how"] for e in ledger if e.kind == "declare" and e.payload["what"] == HISTORY]
    return notes[-1].removeprefix("SHA-256 ") if notes else None


def differing_facts(header: Mapping[str, Any], mechanism: Mechanism) -> list[str]:
    """Names of the mechanism's facts that are not those under which the ledger was opened.

    A header need not name every fact. One without a style of clipping is of a time when there was but one.
    """
    opened_for = {"clipping": "flat", "unit_norm": False, **header}
    names = ("num_units", "privacy_unit", "adjacency", "clip_norm", "clipping", "unit_norm")
    names += ("steps", "expected_batch_size", "noise_multiplier")
    return [name for name in names if name in opened_for and opened_for[name] != getattr(mechanism, name)]


def unique(items: Sequence[_T]) -> list[_T]:
    """Each item once, in the order of first appearance."""
    return list(dict.fromkeys(items))
