"""The whole curve of a run: what its charges prove at every epsilon, and what that leaves to an attacker.

What an epsilon means, in plain words and in the success of attacks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpvision.accounting.charges import Charges, check_request, merge
from dpvision.accounting.pld import gaussian_deltas, pld_deltas, pld_epsilon, shift_without_sampling
from dpvision.errors import Problems
from dpvision.privacy.mechanism import Adjacency, Guarantee, rounded_up

POINTS = 2048
_ROUNDING = 1e-9  # of the Gaussian's deltas, relative; the search below stays on the safe side of it


@final
@dataclass(frozen=True, eq=False)
class Profile:
    """Pairs that all hold at once: at ``epsilons[i]`` the charges keep ``deltas[i]``.

    ``most_mu`` is the shift of a Gaussian release that is no better than the charges at any epsilon: their own without
    sampling.
    """

    epsilons: NDArray[np.float64]
    deltas: NDArray[np.float64]
    most_mu: float


@final
@dataclass(frozen=True)
class GaussianDP:
    """A Gaussian release with shift ``mu`` is no more private than the charges, at epsilons up to ``epsilon_up_to``.

    Poisson sampling leaves rare draws in which a unit takes part very often. Far out in the tails they are all that
    counts, and no mu below that without sampling would hold there: so it is said up to where the statement goes.
    """

    mu: float
    epsilon_up_to: float


def privacy_profile(charges: Charges, *, delta: float, adjacency: Adjacency = "add_remove") -> Profile:
    """Pairs from epsilon 0 to the one at which ``delta`` is kept.

    Guarantee: every pair is an upper bound by PLD.
    """
    check_request(charges, delta=delta, adjacency=adjacency)
    last = pld_epsilon(charges, delta=delta, adjacency=adjacency)
    epsilons = np.linspace(0.0, last, POINTS) if last > 0 else np.zeros(1)
    deltas = pld_deltas(charges, epsilons=epsilons, delta=delta, adjacency=adjacency)
    return Profile(epsilons, deltas, shift_without_sampling(merge(charges), adjacency))


def gaussian_dp(profile: Profile) -> GaussianDP:
    """The least mu whose curve of deltas lies above the proved one, from epsilon 0 to the profile's last.

    Guarantee: holds between the profile's points too, because deltas fall as epsilons rise: each delta is compared with
    that of the Gaussian at the next point.
    """
    following = np.append(profile.epsilons[1:], profile.epsilons[-1])
    low, high = 0.0, profile.most_mu
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        holds = bool(np.all(gaussian_deltas(middle, following) * (1 - _ROUNDING) >= profile.deltas))
        low, high = (low, middle) if holds else (middle, high)
    return GaussianDP(mu=high, epsilon_up_to=float(profile.epsilons[-1]))


def true_positive_bound(profile: Profile, *, false_positive_rate: float) -> float:
    """The most members that any test can recognise while it wrongly accuses ``false_positive_rate`` of the others.

    Guarantee: an upper bound against every attacker: each pair gives one, and the smallest of them holds.
    """
    problems = Problems()
    problems.require(
        0 <= false_positive_rate <= 1, f"false_positive_rate must lie between 0 and 1, got {false_positive_rate}."
    )
    problems.raise_if_any()
    by_positives = np.exp(np.minimum(profile.epsilons, 700.0)) * false_positive_rate + profile.deltas
    by_negatives = 1 - np.exp(-profile.epsilons) * (1 - profile.deltas - false_positive_rate)
    return float(np.clip(np.minimum(by_positives, by_negatives).min(), 0.0, 1.0))


# Largest share of 1/num_units that still counts as clearly below it.
_CLEARLY_BELOW = 2 / 3
_STRONG, _WEAK, _MEANINGLESS = 1.0, 10.0, 20.0
_DISPLAY_RATE = 0.01


def propose_delta(num_units: int) -> float:
    """The largest power of ten that is clearly below ``1 / num_units``: 60000 → 1e-5, 1797 → 1e-4."""
    problems = Problems()
    problems.count("num_units", num_units)
    problems.raise_if_any()
    exponent = 1
    while float(f"1e-{exponent}") * num_units > _CLEARLY_BELOW:
        exponent += 1
    return float(f"1e-{exponent}")


def attack_success(guarantee: Guarantee, *, false_positive_rate: float) -> float:
    """The most true positives that any membership test can have at this rate of false positives.

    Guarantee: holds against every attacker, whatever they know, for one unit and its presence or absence.
    """
    problems = Problems()
    problems.require(
        0 <= false_positive_rate <= 1, f"false_positive_rate must lie between 0 and 1, got {false_positive_rate}."
    )
    problems.raise_if_any()
    epsilon, delta = guarantee.epsilon, guarantee.delta
    by_positives = math.exp(min(epsilon, 700.0)) * false_positive_rate + delta
    by_negatives = 1 - math.exp(-epsilon) * (1 - delta - false_positive_rate)
    return max(0.0, min(1.0, by_positives, by_negatives))


def describe(guarantee: Guarantee) -> str:
    """One sentence for a reader who has never heard of epsilon."""
    change = {
        "add_remove": f"Adding or removing one {guarantee.privacy_unit}",
        "zero_out": f"Blanking out one {guarantee.privacy_unit}",
        "replace_one": f"Replacing one {guarantee.privacy_unit} by another",
    }[guarantee.adjacency]
    success = attack_success(guarantee, false_positive_rate=_DISPLAY_RATE)
    factor = math.exp(min(guarantee.epsilon, 700.0))
    return (
        f"{change} makes any outcome at most {rounded_up(factor, digits=3)} times as likely, plus "
        f"{rounded_up(guarantee.delta)}; an attacker who "
        f"may wrongly accuse 1 in 100 outsiders finds at most {rounded_up(100 * success, digits=3)} in 100 members "
        f"(epsilon {rounded_up(guarantee.epsilon)}, {_strength(guarantee.epsilon)})."
    )


def cautions(guarantee: Guarantee, *, num_units: int) -> tuple[str, ...]:
    """What a reader must be warned of, each as one sentence; empty if nothing."""
    problems = Problems()
    problems.count("num_units", num_units)
    problems.raise_if_any()
    found: list[str] = []
    if guarantee.delta * num_units >= 1:
        found.append(
            f"delta {rounded_up(guarantee.delta)} is not below 1/num_units ({1 / num_units:.3g}): publishing one "
            f"{guarantee.privacy_unit} at random would satisfy it. Use {propose_delta(num_units):g} or less."
        )
    if guarantee.epsilon >= _MEANINGLESS:
        found.append(
            f"epsilon {rounded_up(guarantee.epsilon)} is so large that it promises next to nothing: the bound alone "
            "lets an attacker recognise practically every member. Aim for 10 or less."
        )
    elif guarantee.epsilon > _WEAK:
        found.append(f"epsilon {rounded_up(guarantee.epsilon)} is a weak promise. Aim for 10 or less.")
    return tuple(found)


def _strength(epsilon: float) -> str:
    if epsilon <= _STRONG:
        return "a strong guarantee"
    if epsilon <= _WEAK:
        return "a moderate guarantee"
    return "a weak guarantee" if epsilon < _MEANINGLESS else "practically no guarantee"
