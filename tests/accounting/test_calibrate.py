"""Calibration never overshoots, and leaves nothing on the table."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpvision.accounting import (
    Charges,
    calibrate_expected_batch_size,
    calibrate_noise_multiplier,
    calibrate_steps,
    guarantee,
)
from dpvision.accounting.calibrate import SearchGrid, last_within
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Adjacency, Event

FACTS: dict[str, Any] = {"num_units": 50_000, "target_epsilon": 1.0, "delta": 1e-5}
STATISTICS: Charges = [(Event(sample_rate=1.0, noise_multiplier=50.0, purpose="normalisation"), 2)]


def epsilon_of(
    batch: float,
    noise: float,
    steps: int,
    *,
    num_units: int = 50_000,
    delta: float = 1e-5,
    adjacency: Adjacency = "add_remove",
    extra: Charges = (),
) -> float:
    event = Event(sample_rate=batch / num_units, noise_multiplier=noise)
    return guarantee([(event, steps), *extra], delta=delta, adjacency=adjacency).epsilon


@pytest.mark.parametrize(
    ("adjacency", "extra"), [("add_remove", ()), ("zero_out", STATISTICS), ("replace_one", STATISTICS)]
)
def test_calibrated_values_keep_the_target_and_the_next_ones_do_not(adjacency: Adjacency, extra: Charges) -> None:
    facts = {**FACTS, "adjacency": adjacency, "extra": extra}
    noise = calibrate_noise_multiplier(expected_batch_size=4096, steps=300, **facts)
    steps = calibrate_steps(expected_batch_size=4096, noise_multiplier=9.0, **facts)
    batch = calibrate_expected_batch_size(noise_multiplier=9.0, steps=300, **facts)

    def cost(batch: float, noise: float, steps: int) -> float:
        return epsilon_of(batch, noise, steps, adjacency=adjacency, extra=extra)

    assert cost(4096, noise, 300) <= 1.0 < cost(4096, noise * 0.999, 300)
    assert cost(4096, 9.0, steps) <= 1.0 < cost(4096, 9.0, steps + 1)
    assert cost(batch, 9.0, 300) <= 1.0 < cost(batch * 1.0001, 9.0, 300)
    assert noise == float(f"{noise:.5g}")
    assert batch == float(f"{batch:.6g}")


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    batch=st.floats(5_000, 50_000),
    steps=st.integers(1, 500),
    target=st.floats(0.05, 8.0),
    log_delta=st.floats(-8, -3),
)
@example(batch=50_000.0, steps=1, target=0.5, log_delta=-5.0)
def test_noise_steps_and_batch_are_inverse_to_each_other(
    batch: float, steps: int, target: float, log_delta: float
) -> None:
    facts = {"num_units": 50_000, "target_epsilon": target, "delta": 10**log_delta}
    noise = calibrate_noise_multiplier(expected_batch_size=batch, steps=steps, **facts)
    assert epsilon_of(batch, noise, steps, delta=10**log_delta) <= target
    assert epsilon_of(batch, noise * 0.999, steps, delta=10**log_delta) > target
    allowed = calibrate_steps(expected_batch_size=batch, noise_multiplier=noise, **facts)
    assert steps <= allowed <= steps * 1.002 + 1
    largest = calibrate_expected_batch_size(noise_multiplier=noise, steps=steps, **facts)
    assert batch * (1 - 1e-5) <= largest <= batch * 1.002


def test_calibrated_noise_is_what_was_used_before() -> None:
    # MNIST, batch 6000, 40 epochs, epsilon 2.925: noise 2.997 (found with dp-accounting, four digits)
    facts = {"num_units": 60_000, "expected_batch_size": 6000, "steps": 400, "target_epsilon": 2.925, "delta": 1e-5}
    assert calibrate_noise_multiplier(**facts) == pytest.approx(2.997, rel=1e-3)


def test_the_whole_dataset_is_the_largest_batch() -> None:
    assert calibrate_expected_batch_size(noise_multiplier=50.0, steps=10, **FACTS) == 50_000.0


def test_extra_charges_leave_less_room() -> None:
    alone = calibrate_steps(expected_batch_size=4096, noise_multiplier=9.0, **FACTS)
    assert calibrate_steps(expected_batch_size=4096, noise_multiplier=9.0, **FACTS, extra=STATISTICS) < alone


def test_extra_charges_beyond_the_target_are_refused_by_their_cost() -> None:
    dear: Charges = [(Event(sample_rate=1.0, noise_multiplier=0.5), 1)]
    with pytest.raises(ArgumentError, match=r"target_epsilon must be above what the extra charges cost \(9\."):
        calibrate_noise_multiplier(expected_batch_size=4096, steps=300, **FACTS, extra=dear)


def test_a_single_step_that_costs_too_much_is_refused_by_its_cost() -> None:
    with pytest.raises(ArgumentError, match=r"does not allow a single step: one costs 4\d\."):
        calibrate_steps(expected_batch_size=25_000, noise_multiplier=0.15, **FACTS)


def test_a_budget_that_is_never_spent_is_refused() -> None:
    with pytest.raises(ArgumentError, match="is never spent"):
        calibrate_steps(expected_batch_size=1, noise_multiplier=1000.0, **{**FACTS, "target_epsilon": 1e4})


def test_a_target_that_needs_no_noise_is_refused() -> None:
    with pytest.raises(ArgumentError, match="has no value"):
        calibrate_noise_multiplier(num_units=1000, expected_batch_size=1, steps=1, target_epsilon=1.0, delta=0.5)


def test_a_target_that_no_batch_meets_is_refused() -> None:
    with pytest.raises(ArgumentError, match="with any expected_batch_size"):
        calibrate_expected_batch_size(num_units=10, noise_multiplier=1e-5, steps=10**8, target_epsilon=1e-3, delta=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon must be a finite number > 0"),
        ({"target_epsilon": -1.0}, "target_epsilon"),
        ({"target_epsilon": math.nan}, "target_epsilon"),
        ({"target_epsilon": math.inf}, "target_epsilon"),
        ({"target_epsilon": 1e300}, "it would promise nothing"),
        ({"delta": 0.0}, "delta must lie strictly between 0 and 1"),
        ({"delta": math.nan}, "delta"),
        ({"num_units": 0}, "num_units"),
        ({"num_units": 2.5}, "num_units must be a whole number"),
        ({"adjacency": "swap"}, "adjacency must be one of"),
    ],
)
def test_nonsense_is_refused_by_all_calibrations(change: dict[str, Any], message: str) -> None:
    facts: dict[str, Any] = {**FACTS, **change}
    with pytest.raises(ArgumentError, match=message):
        calibrate_noise_multiplier(expected_batch_size=1.0, steps=10, **facts)
    with pytest.raises(ArgumentError, match=message):
        calibrate_steps(expected_batch_size=1.0, noise_multiplier=1.0, **facts)
    with pytest.raises(ArgumentError, match=message):
        calibrate_expected_batch_size(noise_multiplier=1.0, steps=10, **facts)


@pytest.mark.parametrize("target", [1e-300, 1e-6, 1e3])
def test_extreme_targets_are_kept(target: float) -> None:
    facts = {**FACTS, "target_epsilon": target}
    noise = calibrate_noise_multiplier(expected_batch_size=50_000, steps=2, **facts)
    assert epsilon_of(50_000, noise, 2) <= target


@pytest.mark.parametrize("noise", [5e-324, 1e-308, 1e308])
def test_noise_that_no_accountant_takes_is_refused_by_both_searches(noise: float) -> None:
    with pytest.raises(ArgumentError, match="noise_multiplier must lie between"):
        calibrate_steps(expected_batch_size=1.0, noise_multiplier=noise, **FACTS)
    with pytest.raises(ArgumentError, match="noise_multiplier must lie between"):
        calibrate_expected_batch_size(noise_multiplier=noise, steps=10, **FACTS)


@pytest.mark.parametrize("batch", [5e-324, 1e-300])
def test_a_batch_below_the_least_sample_rate_is_refused(batch: float) -> None:
    with pytest.raises(ArgumentError, match="sample_rate must be >="):
        calibrate_noise_multiplier(expected_batch_size=batch, steps=10, **FACTS)


def test_the_smallest_float_as_a_target_is_no_traceback() -> None:
    facts = {**FACTS, "target_epsilon": 5e-324}
    with pytest.raises(ArgumentError, match="does not allow a single step"):
        calibrate_steps(expected_batch_size=100.0, noise_multiplier=1.0, **facts)


@pytest.mark.slow
def test_delta_alone_covers_draws_that_are_rare_enough() -> None:
    facts = {**FACTS, "target_epsilon": 5e-324}
    assert 0 < calibrate_expected_batch_size(noise_multiplier=1.0, steps=10, **facts) < 1


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ArgumentError, match=r"target_epsilon.*delta.*sample_rate must be <= 1.*steps"):
        calibrate_noise_multiplier(num_units=10, expected_batch_size=11, steps=-1, target_epsilon=-2, delta=7)


@pytest.mark.parametrize("grid", [SearchGrid(digits=3), SearchGrid(digits=3, falling=True), SearchGrid()])
def test_grids_are_ordered_by_cost_and_find_their_own_values(grid: SearchGrid) -> None:
    indices = range(1, 3000) if grid.digits is None else range(-2500, 2500)
    values = [grid.value(index) for index in indices]
    assert values == sorted(set(values), reverse=grid.falling)
    assert all(abs(grid.index(grid.value(index)) - index) <= 1 for index in indices)


def test_decimals_are_written_with_few_digits() -> None:
    grid = SearchGrid(digits=3)
    assert [grid.value(index) for index in (-1, 0, 1, 899, 900)] == [0.999, 1.0, 1.01, 9.99, 10.0]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    power=st.floats(0.1, 6.0),
    target=st.floats(1e-3, 1e3),
    flat=st.floats(0.0, 2.0),
    guess=st.floats(-5, 12),
    steep=st.booleans(),
)
def test_the_search_finds_the_last_value_within_the_target(
    power: float, target: float, flat: float, guess: float, steep: bool
) -> None:
    evaluations: list[float] = []

    def cost(value: float) -> float:
        evaluations.append(value)
        grown = (value / 1000) ** power * (math.exp(min(value / 5000, 600)) if steep else 1.0)
        return max(0.0, grown - flat)  # nothing at first, as epsilon is while delta covers it

    found = last_within(cost, target=target, grid=SearchGrid(), guess=math.exp(guess), ends=(1, 10**7))
    used = len(evaluations)
    if found is None:
        assert cost(1) > target
    else:
        assert cost(found) <= target
        assert found == 10**7 or cost(found + 1) > target
    assert used <= 60
