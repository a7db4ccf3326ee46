"""Epsilon by Rényi differential privacy: looser than PLD, and what most papers report."""

# pyright: reportMissingTypeStubs=false
# dp-accounting has annotations but no stubs.

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, ZCDpEvent
from dp_accounting.rdp import RdpAccountant

from dpvision.accounting.charges import Charges, merge
from dpvision.checks import ArgumentError
from dpvision.mechanism import Adjacency

# One step's divergence is the logarithm of a number near 1 and carries rounding errors of some 1e-16. They can turn it
# negative, which dp-accounting would read as an epsilon of zero. This is added to every step's divergence.
ROUNDING_PER_STEP = 2.0**-45

_RELATIONS: dict[Adjacency, NeighboringRelation] = {
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
}


def rdp_epsilon(charges: Charges, *, delta: float, adjacency: Adjacency) -> float:
    """An epsilon that the charges keep at ``delta``: dp-accounting's RDP at its own orders (1.1 to 1024).

    Guarantee: an upper bound; refuses ``replace_one``, for which no RDP of a Poisson-sampled Gaussian is proved.
    """
    if adjacency not in _RELATIONS:
        raise ArgumentError(
            f"adjacency must be add_remove or zero_out for the rdp accountant, got {adjacency}: RDP of Poisson-sampled "
            "Gaussian noise is not proved for it. Use the pld accountant."
        )
    merged = merge(charges)
    if not merged:
        return 0.0
    accountant = RdpAccountant(neighboring_relation=_RELATIONS[adjacency])
    with _without_notes_on_orders():
        for event, count in merged:
            sampled = PoissonSampledDpEvent(event.sample_rate, GaussianDpEvent(event.noise_multiplier))
            accountant.compose(sampled, count)
            accountant.compose(ZCDpEvent(rho=0.0, xi=ROUNDING_PER_STEP), count)
        return max(0.0, float(accountant.get_epsilon(delta)))


@contextmanager
def _without_notes_on_orders() -> Generator[None]:
    """dp-accounting logs a line for each order whose series is slow and leaves the order out: looser, still true."""
    logger = logging.getLogger("absl")
    logger.addFilter(_says_more_than_excluded)
    try:
        yield
    finally:
        logger.removeFilter(_says_more_than_excluded)


def _says_more_than_excluded(record: logging.LogRecord) -> bool:
    return "Excluding this order" not in record.getMessage()
