"""Every figure of a certificate, from the charges of a ledger and its header alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

from dpvision.accounting import (
    Charges,
    GaussianDP,
    gaussian_dp,
    guarantee,
    owner_guarantee,
    privacy_profile,
    row_guarantee,
    true_positive_bound,
)
from dpvision.certificate.layout import Charged, OtherUnit
from dpvision.checks import ArgumentError, PrivacyError
from dpvision.ledger import TRAINING
from dpvision.mechanism import Adjacency, Event, Guarantee

CURVE_DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
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
    profile = privacy_profile(charges, delta=min(at for at, _ in curve), adjacency=adjacency)
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
