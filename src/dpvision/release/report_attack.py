"""The most that an attack can achieve: numbers, from everything that is proved about a run.

One (epsilon, delta) pair says little about an attack with false alarms. The same charges prove a whole curve of pairs,
and the smallest of all limits holds. docs/report.md has an example where that is 30 % instead of 99.97 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from dpvision.accounting import Charges, attack_success, guarantee, privacy_curve
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Adjacency, Event, Guarantee
from dpvision.release.schema import Certificate

Pairs = Sequence[tuple[float, float]]
_MORE_DELTAS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)
_SAME_EPSILON = 1e-3  # relative; other versions of the accountant differ by less


def proved_pairs(certificate: Certificate) -> Pairs:
    """(epsilon, delta) pairs that all hold: those of the certificate, and more of the curve that its charges prove.

    Guarantee: charges that don't give the certificate's own epsilon are not believed, and add no pair.
    """
    pairs = [(point.epsilon, point.delta) for point in certificate.curve]
    if certificate.epsilon is None or certificate.delta is None:
        return pairs
    charges = tuple(
        (Event(sample_rate=part.sample_rate, noise_multiplier=part.noise_multiplier), part.count)
        for part in certificate.charged
    )
    stated = (certificate.epsilon, certificate.delta)
    return [*pairs, stated, *_more_pairs(charges, stated, certificate.adjacency)]


def true_positive_bound(pairs: Pairs, false_positive_rate: float) -> float:
    """The largest share of members that any attack can recognise when it wrongly accuses ``false_positive_rate``.

    Guarantee: an upper bound, because each pair gives one and the smallest of upper bounds is one too.
    """
    proved = (
        Guarantee(epsilon=epsilon, delta=delta, adjacency="add_remove", accountant="pld") for epsilon, delta in pairs
    )
    return min([1.0, *(attack_success(pair, false_positive_rate=false_positive_rate) for pair in proved)])


def balanced_attack_bound(pairs: Pairs) -> float:
    """The largest share of right answers to "was it in?" when both answers are equally likely beforehand."""
    return min([1.0, *(_half_right(epsilon, delta) for epsilon, delta in pairs)])


def _half_right(epsilon: float, delta: float) -> float:
    """(e^epsilon + delta) / (e^epsilon + 1), without overflow."""
    inverse = math.exp(-epsilon)
    return (1 + delta * inverse) / (1 + inverse)


@lru_cache(maxsize=64)
def _more_pairs(charges: Charges, stated: tuple[float, float], adjacency: Adjacency) -> Pairs:
    epsilon, delta = stated
    try:
        again = guarantee(charges, delta=delta, adjacency=adjacency).epsilon
        if not abs(again - epsilon) <= _SAME_EPSILON * epsilon:
            return ()
        curve = privacy_curve(charges, deltas=_MORE_DELTAS, adjacency=adjacency)
    except ArgumentError:  # beyond what the accountant can compute: the certificate's own pairs must do
        return ()
    return tuple((point.epsilon, point.delta) for point in curve if math.isfinite(point.epsilon))
