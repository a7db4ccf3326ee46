"""What every epsilon must keep to, whichever accountant computes it."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpvision.accounting import Accountant, Charges, EpsilonMeter, guarantee, mechanism_guarantee
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Adjacency, Event, Mechanism

ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp")
both_accountants = pytest.mark.parametrize("accountant", ACCOUNTANTS)


def epsilon_of(
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    *,
    delta: float = 1e-5,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
) -> float:
    charges = [(Event(sample_rate=sample_rate, noise_multiplier=noise_multiplier), steps)]
    return guarantee(charges, delta=delta, accountant=accountant, adjacency=adjacency).epsilon


def a_mechanism(**changes: Any) -> Mechanism:
    facts: dict[str, Any] = {"num_units": 1000, "expected_batch_size": 100.0, "clip_norm": 0.7}
    return Mechanism(**{**facts, "noise_multiplier": 2.5, "steps": 60, **changes})


def test_accounting_imports_without_torch() -> None:
    program = "import sys, dpvision.accounting; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@both_accountants
def test_nothing_done_costs_nothing(accountant: Accountant) -> None:
    event = Event(sample_rate=0.1, noise_multiplier=1.0)
    assert guarantee([], delta=1e-5, accountant=accountant).epsilon == 0.0
    assert guarantee([(event, 0)], delta=1e-5, accountant=accountant).epsilon == 0.0
    assert mechanism_guarantee(a_mechanism(), delta=1e-5, steps=0, accountant=accountant).epsilon == 0.0


@both_accountants
@pytest.mark.parametrize("delta", [0.5, 0.999999])
@pytest.mark.parametrize("noise", [0.7, 20.0])
def test_epsilon_is_never_negative_at_a_large_delta(accountant: Accountant, delta: float, noise: float) -> None:
    assert epsilon_of(0.05, noise, 10, delta=delta, accountant=accountant) >= 0.0


def test_epsilon_is_exactly_zero_where_delta_covers_everything() -> None:
    # One draw holds the unit with probability 0.01 < delta: no test can do better than that.
    assert epsilon_of(0.01, 1.0, 1, delta=0.02) == 0.0


@both_accountants
@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1e-3, 0.01, 0.1])
@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_epsilon_is_finite_however_little_noise_there_is(accountant: Accountant, noise: float, rate: float) -> None:
    assert 0 < epsilon_of(rate, noise, 200, accountant=accountant) < math.inf


def test_more_of_anything_costs_more() -> None:
    noises = [epsilon_of(0.1, noise, 100) for noise in (50.0, 10.0, 3.0, 2.999, 2.0, 1.0, 0.5, 0.1, 0.01, 1e-3)]
    rates = [epsilon_of(rate, 2.0, 100) for rate in (1e-6, 1e-3, 0.05, 0.0501, 0.2, 0.5, 0.99, 1.0)]
    steps = [epsilon_of(0.1, 2.0, count) for count in (1, 2, 3, 10, 100, 101, 1000, 10_000, 10_000_000)]
    deltas = [epsilon_of(0.1, 2.0, 100, delta=delta) for delta in (0.3, 1e-2, 1e-5, 1e-8, 1e-11)]
    for ladder in (noises, rates, steps, deltas):
        assert all(lower <= higher for lower, higher in pairwise(ladder)), ladder
        assert ladder[0] < ladder[-1]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    rate=st.floats(0.02, 0.6),
    noise=st.floats(1.5, 30.0),
    steps=st.integers(1, 2000),
    log_delta=st.floats(-9, -1),
    accountant=st.sampled_from(ACCOUNTANTS),
    more=st.floats(1.0, 1.5),
)
def test_epsilon_is_monotone_in_rate_noise_and_steps(
    rate: float, noise: float, steps: int, log_delta: float, accountant: Accountant, more: float
) -> None:
    def cost(rate: float, noise: float, steps: int) -> float:
        return epsilon_of(rate, noise, steps, delta=10**log_delta, accountant=accountant)

    here = cost(rate, noise, steps)
    # For rounding errors only: pessimism grows with the cells, and cells grow with the cost, on nested grids.
    slack = 1e-6 * here + 1e-9
    assert cost(rate * more, noise, steps) >= here - slack
    assert cost(rate, noise / more, steps) >= here - slack
    assert cost(rate, noise, steps + max(1, round(steps * (more - 1)))) >= here - slack
    assert here >= 0


@both_accountants
def test_order_purpose_and_splitting_of_charges_do_not_matter(accountant: Accountant) -> None:
    one = Event(sample_rate=0.1, noise_multiplier=2.0)
    other = Event(sample_rate=0.1, noise_multiplier=2.0, purpose="statistics")
    third = Event(sample_rate=1.0, noise_multiplier=9.0)
    fourth = Event(sample_rate=1.0, noise_multiplier=12.0)
    together: Charges = [(one, 50), (third, 2), (fourth, 1)]
    scattered: Charges = [(fourth, 1), (one, 20), (third, 1), (other, 30), (third, 1)]
    first, second = (guarantee(charges, delta=1e-5, accountant=accountant) for charges in (together, scattered))
    assert first == second


@both_accountants
def test_extra_charges_compose_in(accountant: Accountant) -> None:
    mechanism = a_mechanism()
    extra = [(Event(sample_rate=1.0, noise_multiplier=8.0, purpose="normalisation"), 2)]
    alone = mechanism_guarantee(mechanism, delta=1e-5, accountant=accountant)
    together = mechanism_guarantee(mechanism, delta=1e-5, extra=extra, accountant=accountant)
    expected = guarantee([(mechanism.step_event, 60), *extra], delta=1e-5, accountant=accountant)
    assert alone.epsilon < together.epsilon == expected.epsilon
    assert together.epsilon < alone.epsilon + guarantee(extra, delta=1e-5, accountant=accountant).epsilon


def test_full_batch_releases_compose_as_one_gaussian() -> None:
    many = epsilon_of(1.0, 30.0, 9)
    assert many == pytest.approx(epsilon_of(1.0, 10.0, 1), rel=1e-12)


def test_zero_out_costs_what_add_remove_costs_and_replacing_costs_more() -> None:
    add_remove = epsilon_of(0.1, 2.0, 100)
    assert epsilon_of(0.1, 2.0, 100, adjacency="zero_out") == add_remove
    replaced = epsilon_of(0.1, 2.0, 100, adjacency="replace_one")
    # Replacing is removing and adding: dearer than either, and no dearer than a unit of twice the size.
    assert add_remove < replaced <= epsilon_of(0.1, 1.0, 100)
    assert epsilon_of(1.0, 6.0, 4, adjacency="replace_one") == pytest.approx(epsilon_of(1.0, 3.0, 4), rel=3e-4)


def test_rdp_refuses_replace_one_because_it_is_not_proved() -> None:
    with pytest.raises(ArgumentError, match=r"replace_one.*not proved.*pld"):
        epsilon_of(0.1, 2.0, 10, accountant="rdp", adjacency="replace_one")


@both_accountants
@pytest.mark.parametrize("delta", [0.0, 1.0, 1.5, -1e-5, math.nan, math.inf])
def test_a_delta_outside_its_range_is_refused(accountant: Accountant, delta: float) -> None:
    with pytest.raises(ArgumentError, match="delta must lie strictly between 0 and 1"):
        epsilon_of(0.1, 1.0, 10, delta=delta, accountant=accountant)
    with pytest.raises(ArgumentError, match="delta"):
        EpsilonMeter(a_mechanism(), delta=delta)


@both_accountants
@pytest.mark.parametrize("count", [-1, -500, 2.5, math.nan, True])
def test_negative_and_broken_step_counts_are_refused(accountant: Accountant, count: Any) -> None:
    # Opacus answers -500 steps with an epsilon of -13410.
    with pytest.raises(ArgumentError, match="whole number >= 0"):
        epsilon_of(0.1, 1.0, count, accountant=accountant)
    with pytest.raises(ArgumentError, match="steps must be a whole number >= 0"):
        mechanism_guarantee(a_mechanism(), delta=1e-5, steps=count, accountant=accountant)


@pytest.mark.parametrize(
    ("rate", "noise"),
    [(0.0, 1.0), (-0.1, 1.0), (1.1, 1.0), (math.nan, 1.0), (0.1, 0.0), (0.1, -1.0), (0.1, math.nan), (0.1, math.inf)],
)
def test_impossible_rates_and_noises_are_refused(rate: float, noise: float) -> None:
    with pytest.raises(ArgumentError):
        epsilon_of(rate, noise, 10)


@both_accountants
@pytest.mark.parametrize(("rate", "noise"), [(1e-13, 1.0), (0.1, 1e-7), (0.1, 1e10)])
def test_what_rounding_errors_would_decide_is_refused(accountant: Accountant, rate: float, noise: float) -> None:
    with pytest.raises(ArgumentError, match="no accountant is exact"):
        epsilon_of(rate, noise, 10, accountant=accountant)


def test_unknown_adjacencies_and_accountants_are_refused() -> None:
    unknown: Any = "swap"
    with pytest.raises(ArgumentError, match="adjacency must be one of add_remove, replace_one, zero_out, got 'swap'"):
        epsilon_of(0.1, 1.0, 10, adjacency=unknown)
    with pytest.raises(ArgumentError, match="accountant must be pld or rdp, got 'swap'"):
        epsilon_of(0.1, 1.0, 10, accountant=unknown)


def test_a_guarantee_names_all_that_it_depends_on() -> None:
    mechanism = a_mechanism(privacy_unit="patient", adjacency="zero_out")
    spent = mechanism_guarantee(mechanism, delta=1e-4)
    assert (spent.delta, spent.adjacency, spent.accountant, spent.privacy_unit) == (1e-4, "zero_out", "pld", "patient")


def test_the_meter_says_what_the_accountant_says() -> None:
    mechanism = a_mechanism(privacy_unit="patient")
    extra = [(Event(sample_rate=1.0, noise_multiplier=8.0), 1)]
    meter = EpsilonMeter(mechanism, delta=1e-5, extra=extra)
    assert meter.spent(0) == guarantee(extra, delta=1e-5, privacy_unit="patient")
    for steps in (1, 7, 60, 61):
        assert meter.spent(steps) == mechanism_guarantee(mechanism, delta=1e-5, steps=steps, extra=extra)
    assert EpsilonMeter(mechanism, delta=1e-5).spent(0).epsilon == 0.0
    curve = [meter.spent(steps).epsilon for steps in range(0, 61, 5)]
    assert all(earlier < later for earlier, later in pairwise(curve))


def test_the_meter_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = EpsilonMeter(a_mechanism(), delta=1e-5)
    first = meter.spent(60)
    monkeypatch.setattr("dpvision.accounting.epsilon.mechanism_guarantee", None)
    assert meter.spent(60) is first


def test_epsilon_falls_as_delta_rises() -> None:
    charges = [(Event(sample_rate=0.1, noise_multiplier=2.0), 100)]
    curve = [guarantee(charges, delta=delta).epsilon for delta in (1e-7, 1e-5, 1e-3)]
    assert curve[0] > curve[1] > curve[2]
