"""What slices prove for a patient, and patients for a slice (PITFALLS 17)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, norm

from dpvision.accounting import Charges, guarantee, owner_guarantee, row_guarantee
from dpvision.accounting.groups import MOST_ROWS, joining
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Event

DELTA = 1e-5


def charges(rate: float, noise: float, steps: int) -> Charges:
    return [(Event(sample_rate=rate, noise_multiplier=noise), steps)]


def exact_delta(rate: float, noise: float, rows: int, epsilon: float, *, steps: int) -> float:
    """Delta for one or two steps, by brute force over a fine grid of outputs, the worse of adding and removing."""
    x = np.linspace(-12 * noise, 12 * noise + rows, 1501)
    cell = x[1] - x[0]
    without = norm.pdf(x, scale=noise)
    chances = binom.pmf(np.arange(rows + 1), rows, rate)
    with_owner = sum(chance * norm.pdf(x, loc=count, scale=noise) for count, chance in enumerate(chances))

    def divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
        if steps == 2:
            p, q = np.outer(p, p).ravel(), np.outer(q, q).ravel()
        return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * cell**steps)

    return max(divergence(with_owner, without), divergence(without, with_owner))


@pytest.mark.parametrize(("rate", "noise", "rows", "steps"), [(0.1, 1.0, 3, 1), (0.3, 2.0, 2, 2), (0.5, 3.0, 4, 2)])
def test_an_owners_epsilon_is_that_of_brute_force_and_never_below_it(
    rate: float, noise: float, rows: int, steps: int
) -> None:
    epsilon = owner_guarantee(charges(rate, noise, steps), most_rows=rows, delta=DELTA).epsilon
    assert exact_delta(rate, noise, rows, epsilon, steps=steps) <= DELTA * (1 + 1e-6)
    assert exact_delta(rate, noise, rows, epsilon * 0.99, steps=steps) > DELTA


def test_an_owner_of_one_row_is_a_row() -> None:
    setting = charges(0.05, 1.5, 200)
    assert owner_guarantee(setting, most_rows=1, delta=DELTA).epsilon == guarantee(setting, delta=DELTA).epsilon


def test_more_rows_cost_more_and_less_than_all_of_them_in_every_step() -> None:
    setting = charges(0.1, 6.0, 100)
    epsilons = [owner_guarantee(setting, most_rows=rows, delta=DELTA).epsilon for rows in (1, 2, 8)]
    assert epsilons == sorted(epsilons)
    assert epsilons[1] > 1.5 * epsilons[0]
    all_in = guarantee(charges(1.0, 6.0 / 8, 100), delta=DELTA).epsilon
    assert epsilons[2] < all_in / 10


def test_a_release_that_uses_everybody_moves_by_as_many_rows_as_the_owner_has() -> None:
    everybody = charges(1.0, 12.0, 1)
    assert owner_guarantee(everybody, most_rows=4, delta=DELTA).epsilon == pytest.approx(
        guarantee(charges(1.0, 3.0, 1), delta=DELTA).epsilon, rel=1e-4
    )
    sampled = charges(0.1, 6.0, 100)
    alone = owner_guarantee(sampled, most_rows=4, delta=DELTA).epsilon
    assert owner_guarantee([*sampled, *everybody], most_rows=4, delta=DELTA).epsilon > alone


def test_owners_of_very_many_rows_are_answered_by_a_bound_without_sampling() -> None:
    found = owner_guarantee(charges(0.1, 4.0, 10), most_rows=100_000, delta=DELTA).epsilon
    assert math.isfinite(found)
    assert found >= guarantee(charges(1.0, 4.0 / 100_000, 10), delta=DELTA).epsilon * (1 - 1e-3)


@pytest.mark.parametrize(("rate", "rows"), [(0.02, 5), (0.3, 400), (1e-3, 1000), (0.999, 3)])
def test_the_chances_of_joining_sum_to_one_and_rare_ones_count_as_all_rows(rate: float, rows: int) -> None:
    joined, chances = joining(rate, rows)
    assert joined[-1] == rows
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    assert float(joined @ chances) >= rate * rows * (1 - 1e-9)


def test_nothing_charged_costs_an_owner_nothing() -> None:
    assert owner_guarantee([], most_rows=7, delta=DELTA).epsilon == 0


def test_bad_numbers_and_replacement_are_refused() -> None:
    for rows in (0, -1, 1.5, True, MOST_ROWS + 1):
        with pytest.raises(ArgumentError, match="most_rows"):
            owner_guarantee(charges(0.1, 1.0, 1), most_rows=rows, delta=DELTA)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="replacing a group"):
        owner_guarantee(charges(0.1, 1.0, 1), most_rows=2, delta=DELTA, adjacency="replace_one")


def test_a_changed_slice_of_a_patient_costs_what_replacing_the_patient_costs() -> None:
    setting = charges(0.2, 3.0, 60)
    row, patient = row_guarantee(setting, delta=DELTA), guarantee(setting, delta=DELTA)
    assert row.epsilon == guarantee(setting, delta=DELTA, adjacency="replace_one").epsilon
    assert patient.epsilon < row.epsilon
    # Going by way of the patient's absence gives delta(2e) <= delta(e) + exp(e) delta(e): never better.
    two_steps = guarantee(setting, delta=DELTA / (1 + math.exp(row.epsilon / 2))).epsilon * 2
    assert row.epsilon <= two_steps


def test_no_epsilon_is_negative_even_where_delta_is_absurd() -> None:
    charges: Charges = ((Event(sample_rate=0.01, noise_multiplier=5.0, purpose="training step"), 10),)
    assert owner_guarantee(charges, most_rows=3, delta=0.9, adjacency="add_remove", owner="patient").epsilon >= 0
