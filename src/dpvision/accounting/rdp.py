"""Epsilon by Rényi differential privacy: looser than PLD, and what most papers report.

dp-accounting bounds the divergence at fractional orders by a series of absolute values, and leaves out the orders
where that converges slowly: with large batches or little noise its epsilon is up to a few per cent above the papers'.
So the same orders are also computed by quadrature, and the smaller epsilon is used. Both are upper bounds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, ZCDpEvent
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from numpy.typing import NDArray

from dpvision.accounting.charges import Charges, merge
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Adjacency, Event

# pyright: reportMissingTypeStubs=false
# dp-accounting has annotations but no stubs.


# One step's divergence is the logarithm of a number near 1, with rounding errors of up to 4e-14. They can turn it
# negative, which dp-accounting would read as an epsilon of zero. This is added to every step's divergence.
ROUNDING_PER_STEP = 2.0**-42

FRACTIONAL_ORDERS = np.array([1 + tenths / 10 for tenths in range(1, 100)])
LEAST_NOISE_FOR_QUADRATURE = 0.1

_RELATIONS: dict[Adjacency, NeighboringRelation] = {
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
}


def rdp_epsilon(charges: Charges, *, delta: float, adjacency: Adjacency) -> float:
    """Compute epsilon of the charges at ``delta`` by RDP, at dp-accounting's own orders (1.1 to 1024).

    Args:
        charges: Noisy releases and how often each was made, already checked by ``check_request``.
        delta: The delta of the guarantee, in (0, 1).
        adjacency: ``add_remove`` or ``zero_out``.

    Returns:
        Epsilon, at least 0.

    Raises:
        ArgumentError: ``replace_one``, for which no RDP of a Poisson-sampled Gaussian is proved.

    Guarantee:
        An upper bound.
    """
    _require_relation(adjacency)
    merged = merge(charges)
    if not merged:
        return 0.0
    epsilon = _epsilon_by_dp_accounting(merged, delta, _RELATIONS[adjacency])
    if all(event.noise_multiplier >= LEAST_NOISE_FOR_QUADRATURE for event, _ in merged):
        epsilon = min(epsilon, _epsilon_by_quadrature(merged, delta))
    return max(0.0, epsilon)


def rdp_curve(charges: Charges, *, adjacency: Adjacency) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return orders above 1 and a finite bound on the charges' Rényi divergence at each.

    Guarantee:
        Upper bounds: the smaller of dp-accounting's and, at fractional orders, the quadrature's.
    """
    _require_relation(adjacency)
    merged = merge(charges)
    with _without_notes_on_orders():
        accountant = _accountant(merged, _RELATIONS[adjacency])
    known = dict(zip(accountant.orders.tolist(), accountant.rdp.tolist(), strict=True))
    if all(event.noise_multiplier >= LEAST_NOISE_FOR_QUADRATURE for event, _ in merged):
        for order, divergence in zip(FRACTIONAL_ORDERS.tolist(), _by_quadrature(merged).tolist(), strict=True):
            known[order] = min(divergence, known.get(order, math.inf))
    found = sorted((order, value) for order, value in known.items() if order > 1 and math.isfinite(value))
    return np.array([order for order, _ in found]), np.array([value for _, value in found])


def _require_relation(adjacency: Adjacency) -> None:
    if adjacency not in _RELATIONS:
        raise ArgumentError(
            f"adjacency must be add_remove or zero_out for the rdp accountant, got {adjacency}: RDP of Poisson-sampled "
            "Gaussian noise is not proved for it. Use the pld accountant."
        )


def _epsilon_by_dp_accounting(charges: Charges, delta: float, relation: NeighboringRelation) -> float:
    with _without_notes_on_orders():
        return float(_accountant(charges, relation).get_epsilon(delta))


def _accountant(charges: Charges, relation: NeighboringRelation) -> RdpAccountant:
    accountant = RdpAccountant(neighboring_relation=relation)
    for event, count in charges:
        sampled = PoissonSampledDpEvent(event.sample_rate, GaussianDpEvent(event.noise_multiplier))
        accountant.compose(sampled, count)
        accountant.compose(ZCDpEvent(rho=0.0, xi=ROUNDING_PER_STEP), count)
    return accountant


def _epsilon_by_quadrature(charges: Charges, delta: float) -> float:
    epsilon, _ = compute_epsilon(list(FRACTIONAL_ORDERS), list(_by_quadrature(charges)), delta)
    return float(epsilon)


def _by_quadrature(charges: Charges) -> NDArray[np.float64]:
    total = np.zeros_like(FRACTIONAL_ORDERS)
    for event, count in charges:
        total += count * (renyi_divergences(event, FRACTIONAL_ORDERS) + ROUNDING_PER_STEP)
    return total


def renyi_divergences(event: Event, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the Rényi divergences of one release at ``orders`` above 1: ln E[exp(order · loss)] / (order − 1).

    By the trapezoidal rule, whose error falls exponentially with the step: the integrand is analytic in a strip of
    half-width πσ², so that a step of σ²/3 leaves e^-59, and decays like a normal density.
    """
    noise, rate = event.noise_multiplier, event.sample_rate
    if rate == 1:
        return orders / (2 * noise**2)
    step = min(noise / 8, noise**2 / 3)
    x = np.arange(-9 * noise, float(orders.max()) + 9 * noise, step)
    loss = np.logaddexp(math.log1p(-rate), math.log(rate) + (x - 0.5) / noise**2)
    log_density = -((x / noise) ** 2) / 2 - math.log(noise * math.sqrt(2 * math.pi))
    exponents = orders[:, None] * loss + log_density
    highest = exponents.max(axis=1, keepdims=True)
    log_moments = highest[:, 0] + np.log(np.exp(exponents - highest).sum(axis=1) * step)
    return log_moments / (orders - 1)


@contextmanager
def _without_notes_on_orders() -> Generator[None]:
    """Hide dp-accounting's log lines about orders that it leaves out: the bound is looser there, and still true."""
    logger = logging.getLogger("absl")
    logger.addFilter(_says_more_than_excluded)
    try:
        yield
    finally:
        logger.removeFilter(_says_more_than_excluded)


def _says_more_than_excluded(record: logging.LogRecord) -> bool:
    return "Excluding this order" not in record.getMessage()
