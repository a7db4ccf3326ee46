"""What a guarantee means for an attacker: privacy profiles, Gaussian DP, and the one bound on membership attacks.

A run proves not one (epsilon, delta) pair but a whole curve of them, its privacy profile. ``true_positive_bound`` turns
a profile into a bound on every membership test. The certificate, the report, the audit and ``dpvision epsilon`` all
call it with ``full_profile``. Where only a pair is known, ``Profile.from_pairs`` gives the (looser) bound of that pair.
``AttackRisk`` is a limit on such an attack, to which noise can be calibrated instead of to an epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpvision.accounting.charges import Charges, check_request, merge
from dpvision.accounting.pld import gaussian_deltas, pld_deltas, pld_epsilon, shift_without_sampling
from dpvision.errors import ArgumentError, Problems, brief
from dpvision.privacy.mechanism import Adjacency, Guarantee, rounded_up

POINTS = 2048
CURVE_DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
"""Deltas at which a certificate states its epsilon; the smallest one ends the profile."""
DISPLAY_RATE = 0.01
"""The false-positive rate of ``describe`` and of ``dpvision epsilon``."""
_ROUNDING = 1e-9  # of the Gaussian's deltas, relative; the search below stays on the safe side of it


@final
@dataclass(frozen=True, eq=False)
class Profile:
    """The privacy profile of a release: (epsilon, delta) pairs that all hold at once.

    ``deltas[i]`` holds at ``epsilons[i]``. ``most_mu`` is the shift of a Gaussian release that is at most as private as
    the charges at every epsilon (the charges without subsampling), or infinity where only pairs are known.
    """

    epsilons: NDArray[np.float64]
    deltas: NDArray[np.float64]
    most_mu: float = math.inf

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[float, float]]) -> Profile:
        """Make a profile of stated (epsilon, delta) pairs, where the charges behind them are not known."""
        known = sorted(pairs)
        return cls(np.array([epsilon for epsilon, _ in known]), np.array([delta for _, delta in known]))


@final
@dataclass(frozen=True)
class GaussianDP:
    """A Gaussian release with shift ``mu`` is at most as private as the charges, at epsilons up to ``epsilon_up_to``.

    With Poisson sampling there are rare runs in which one unit is drawn very often. They dominate the far tail, where
    only the ``mu`` without sampling would hold. So the statement names the range of epsilons in which it is proved.
    """

    mu: float
    epsilon_up_to: float


def privacy_profile(charges: Charges, *, delta: float, adjacency: Adjacency = "add_remove") -> Profile:
    """Compute the profile of the charges from epsilon 0 to the epsilon that holds at ``delta``.

    Args:
        charges: Noisy releases and how often each was made.
        delta: The smallest delta of the profile, in (0, 1).
        adjacency: Which datasets are neighbours.

    Returns:
        2048 equally spaced epsilons with their deltas (one pair if nothing was charged).

    Raises:
        ArgumentError: A value is out of range, or rounding errors would decide the result at this delta.

    Guarantee:
        Every pair is an upper bound by PLD.
    """
    check_request(charges, delta=delta, adjacency=adjacency)
    last = pld_epsilon(charges, delta=delta, adjacency=adjacency)
    epsilons = np.linspace(0.0, last, POINTS) if last > 0 else np.zeros(1)
    deltas = pld_deltas(charges, epsilons=epsilons, delta=delta, adjacency=adjacency)
    return Profile(epsilons, deltas, shift_without_sampling(merge(charges), adjacency))


def full_profile(charges: Charges, *, delta: float, adjacency: Adjacency = "add_remove") -> Profile:
    """Compute the profile down to the smallest of ``delta`` and ``CURVE_DELTAS`` at which an epsilon can be proved.

    Certificates, reports, audits and ``dpvision epsilon`` bound attacks with this profile, so that all of them state
    the same numbers for the same charges.

    Args:
        charges: Noisy releases and how often each was made.
        delta: The delta of the guarantee, in (0, 1).
        adjacency: Which datasets are neighbours.

    Returns:
        The profile; see ``privacy_profile``.

    Raises:
        ArgumentError: No finite epsilon can be proved, not even at ``delta``.
    """
    for least in sorted({delta, *CURVE_DELTAS} - {other for other in CURVE_DELTAS if other > delta}):
        try:
            if math.isfinite(pld_epsilon(charges, delta=least, adjacency=adjacency)):
                return privacy_profile(charges, delta=least, adjacency=adjacency)
        except ArgumentError:
            if least == delta:
                raise
    raise ArgumentError(f"no finite epsilon can be proved at delta {delta:g}. Choose a larger delta.")


def gaussian_dp(profile: Profile) -> GaussianDP:
    """Find the smallest mu whose Gaussian profile lies above the given one at all of its epsilons.

    Args:
        profile: A profile with a finite ``most_mu``, from ``privacy_profile``.

    Returns:
        mu, and the largest epsilon for which the comparison holds.

    Guarantee:
        Holds between the profile's points too: deltas fall as epsilon rises, so each delta is compared with the
        Gaussian delta of the next point.
    """
    following = np.append(profile.epsilons[1:], profile.epsilons[-1])
    low, high = 0.0, profile.most_mu
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        holds = bool(np.all(gaussian_deltas(middle, following) * (1 - _ROUNDING) >= profile.deltas))
        low, high = (low, middle) if holds else (middle, high)
    return GaussianDP(mu=high, epsilon_up_to=float(profile.epsilons[-1]))


def true_positive_bound(profile: Profile, *, false_positive_rate: float) -> float:
    """Bound the true-positive rate of every membership test at a given false-positive rate.

    A mechanism is (epsilon, delta)-private exactly if every test between two neighbours satisfies

        TPR <= e^epsilon * FPR + delta    and    1 - FPR <= e^epsilon * (1 - TPR) + delta

    (Kairouz, Oh, Viswanath 2015, theorem 2.1). The second inequality gives TPR <= 1 - e^-epsilon (1 - delta - FPR). All
    pairs of a profile hold at once, so the smallest bound over its pairs holds as well. With the whole curve this is
    the trade-off function of the mechanism (Dong, Roth, Su 2022, proposition 2.12); with the single pair of
    ``Profile.from_pairs([(epsilon, delta)])`` it is the bound of that pair, which is much looser.

    Args:
        profile: Pairs that hold at once. Without pairs nothing is proved, and the bound is 1.
        false_positive_rate: Share of non-members that the test takes for members, from 0 to 1.

    Returns:
        The largest possible share of members that the test recognises, from 0 to 1.

    Raises:
        ArgumentError: The rate is outside [0, 1].

    Guarantee:
        An upper bound for every attacker, whatever they know, about the presence of one privacy unit.
    """
    problems = Problems()
    problems.require(
        0 <= false_positive_rate <= 1, f"false_positive_rate must lie between 0 and 1, got {false_positive_rate}."
    )
    problems.raise_if_any()
    by_positives = np.exp(np.minimum(profile.epsilons, 700.0)) * false_positive_rate + profile.deltas
    by_negatives = 1 - np.exp(-profile.epsilons) * (1 - profile.deltas - false_positive_rate)
    return float(np.clip(np.minimum(by_positives, by_negatives).min(initial=1.0), 0.0, 1.0))


def balanced_accuracy_bound(profile: Profile) -> float:
    """Bound the accuracy of every membership test when members and non-members are equally likely.

    The sum of the two inequalities of ``true_positive_bound`` gives, for each pair, an accuracy
    (TPR + 1 - FPR) / 2 of at most (e^epsilon + delta) / (e^epsilon + 1).

    Args:
        profile: Pairs that hold at once.

    Returns:
        The largest possible share of correct answers, from 0.5 to 1.

    Guarantee:
        An upper bound for every attacker.
    """
    inverse = np.exp(-profile.epsilons)  # instead of e^epsilon, which may overflow
    return float(((1 + profile.deltas * inverse) / (1 + inverse)).min(initial=1.0))


def advantage_bound(profile: Profile) -> float:
    """Bound the membership advantage, TPR - FPR, of every test: twice the balanced accuracy, minus one.

    Args:
        profile: Pairs that hold at once.

    Returns:
        The largest possible advantage, from 0 to 1. It is the delta of the profile at epsilon 0, where that is known.

    Guarantee:
        An upper bound for every attacker.
    """
    inverse = np.exp(-profile.epsilons)
    return float(((1 - inverse + 2 * profile.deltas * inverse) / (1 + inverse)).min(initial=1.0))


@final
@dataclass(frozen=True)
class AttackRisk:
    """A limit on every membership attack: on its true-positive rate at a false-positive rate, or on its advantage.

    Written ``tpr:0.05@0.01`` (at most 5 % of the members are recognised where 1 % of the non-members are accused) and
    ``advantage:0.1`` (TPR - FPR is at most 0.1 at every threshold).

    Attributes:
        limit: The largest allowed true-positive rate or advantage, below 1.
        false_positive_rate: Where the true-positive rate is limited, in (0, limit); None limits the advantage.

    Raises:
        ArgumentError: A value is out of range. A limit that guessing reaches would need infinite noise.
    """

    limit: float
    false_positive_rate: float | None = None

    def __post_init__(self) -> None:
        least = 0.0 if self.false_positive_rate is None else self.false_positive_rate
        problems = Problems()
        if self.false_positive_rate is not None:
            problems.probability("the false-positive rate of target_risk", self.false_positive_rate)
        problems.require(
            least < self.limit < 1,
            f"target_risk must lie between what guessing reaches ({least:g}) and 1, got {self.limit:g}.",
        )
        problems.raise_if_any()

    @classmethod
    def parse(cls, text: str) -> AttackRisk:
        """Read a limit as it is written.

        Args:
            text: ``tpr:LIMIT@FPR`` or ``advantage:LIMIT``.

        Raises:
            ArgumentError: The text is neither, or a value is out of range.
        """
        kind, colon, rest = text.strip().partition(":")
        values = rest.split("@")
        try:
            numbers = [float(value) for value in values]
        except ValueError:
            numbers = []
        if not colon or len(numbers) != {"tpr": 2, "advantage": 1}.get(kind):
            raise ArgumentError(
                f"target_risk must be tpr:LIMIT@FPR or advantage:LIMIT, such as tpr:0.05@0.01, got {brief(text)!r}."
            )
        return cls(*numbers)

    def __str__(self) -> str:
        """Return the text that ``parse`` reads."""
        if self.false_positive_rate is None:
            return f"advantage:{self.limit!r}"
        return f"tpr:{self.limit!r}@{self.false_positive_rate!r}"

    def bound(self, profile: Profile) -> float:
        """Return the proved bound on the attack: what must be at most ``limit``.

        Args:
            profile: Pairs that hold at once.

        Guarantee:
            An upper bound for every attacker, by ``true_positive_bound`` or ``advantage_bound``.
        """
        if self.false_positive_rate is None:
            return advantage_bound(profile)
        return true_positive_bound(profile, false_positive_rate=self.false_positive_rate)

    @property
    def telling_rate(self) -> float:
        """The false-positive rate at which a certificate shows the limit.

        For an advantage a it is (1 - a) / 2, where a test with TPR (1 + a) / 2 has exactly this advantage.
        """
        return (1 - self.limit) / 2 if self.false_positive_rate is None else self.false_positive_rate

    @property
    def gaussian_shift(self) -> float:
        """The shift mu of the Gaussian release whose best attack reaches exactly ``limit``. A closed form.

        A test of one Gaussian release of shift mu has TPR = Phi(mu + Phi^-1(FPR)), and the advantage 2 Phi(mu/2) - 1.
        """
        normal = NormalDist()
        if self.false_positive_rate is None:
            return 2 * normal.inv_cdf((1 + self.limit) / 2)
        return normal.inv_cdf(self.limit) - normal.inv_cdf(self.false_positive_rate)

    def gaussian_epsilon(self, *, delta: float) -> float:
        """Return about the epsilon at ``delta`` of that Gaussian release, for plans. It proves nothing for others."""
        mu = self.gaussian_shift
        if mu <= 0:
            return 0.0
        low, high = 0.0, mu * mu / 2 + mu * (10 - NormalDist().inv_cdf(delta))
        for _ in range(60):
            middle = (low + high) / 2
            above = float(gaussian_deltas(mu, np.array([middle]))[0]) > delta
            low, high = (middle, high) if above else (low, middle)
        return high


# Largest share of 1/num_units that still counts as clearly below it.
_CLEARLY_BELOW = 2 / 3
_STRONG, _WEAK, _MEANINGLESS = 1.0, 10.0, 20.0


def propose_delta(num_units: int) -> float:
    """Propose a delta: the largest power of ten that is clearly below ``1 / num_units``.

    Args:
        num_units: Number of protected units, at least 1.

    Returns:
        For example 1e-5 for 60000 units and 1e-4 for 1797.

    Raises:
        ArgumentError: ``num_units`` is out of range.
    """
    Problems().count("num_units", num_units).raise_if_any()
    exponent = 1
    while float(f"1e-{exponent}") * num_units > _CLEARLY_BELOW:
        exponent += 1
    return float(f"1e-{exponent}")


def describe(guarantee: Guarantee, *, true_positive_rate: float | None = None) -> str:
    """Explain a guarantee in one sentence for readers who do not know differential privacy.

    Args:
        guarantee: What is proved.
        true_positive_rate: ``true_positive_bound`` at a false-positive rate of 0.01 from the whole profile. Without
            it, the sentence uses the looser bound of the (epsilon, delta) pair.

    Returns:
        The sentence. All numbers in it are rounded up.
    """
    change = {
        "add_remove": f"Adding or removing one {guarantee.privacy_unit}",
        "zero_out": f"Blanking out one {guarantee.privacy_unit}",
        "replace_one": f"Replacing one {guarantee.privacy_unit} by another",
    }[guarantee.adjacency]
    if true_positive_rate is None:
        pair = Profile.from_pairs([(guarantee.epsilon, guarantee.delta)])
        true_positive_rate = true_positive_bound(pair, false_positive_rate=DISPLAY_RATE)
    factor = math.exp(min(guarantee.epsilon, 700.0))
    return (
        f"{change} makes any outcome at most {rounded_up(factor, digits=3)} times as likely, plus "
        f"{rounded_up(guarantee.delta)}; an attacker who "
        f"may wrongly accuse 1 in 100 outsiders finds at most {rounded_up(100 * true_positive_rate, digits=3)} in 100 "
        f"members (epsilon {rounded_up(guarantee.epsilon)}, {_strength(guarantee.epsilon)})."
    )


def cautions(guarantee: Guarantee, *, num_units: int) -> tuple[str, ...]:
    """List the warnings that belong to a guarantee.

    Args:
        guarantee: What is proved.
        num_units: Number of protected units, at least 1.

    Returns:
        One sentence per warning; empty if there is none.

    Raises:
        ArgumentError: ``num_units`` is out of range.
    """
    Problems().count("num_units", num_units).raise_if_any()
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
