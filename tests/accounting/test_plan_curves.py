"""The curves of a plan keep the target at every point, and rise and fall as they must."""

from __future__ import annotations

import pytest

from dpvision.accounting import AttackRisk, full_profile, guarantee
from dpvision.accounting.plan_curves import Target, epsilon_over_steps, least_epochs, noise_at_batch
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Event, Mechanism

UNITS = 10_000
TARGET = Target(delta=1e-5, epsilon=3.0)


def test_epsilon_rises_with_the_steps_and_ends_at_the_whole_plan() -> None:
    mechanism = Mechanism(num_units=UNITS, expected_batch_size=1000, clip_norm=1.0, noise_multiplier=3.0, steps=200)
    points = epsilon_over_steps(mechanism, delta=1e-5, points=6)
    assert [steps for steps, _ in points] == [1, 40, 80, 120, 160, 200]
    assert [epsilon for _, epsilon in points] == sorted(epsilon for _, epsilon in points)
    assert points[-1][1] == guarantee([(mechanism.step_event, 200)], delta=1e-5).epsilon


def test_signal_and_steps_rise_with_the_noise_and_every_point_keeps_the_target() -> None:
    points = noise_at_batch(num_units=UNITS, expected_batch_size=1000, target=TARGET, noises=[0.3, 1.0, 2.0, 4.0])
    assert [point.noise_multiplier for point in points] == [1.0, 2.0, 4.0]  # 0.3 does not allow a single step
    assert [point.steps for point in points] == sorted(point.steps for point in points)
    shares = [point.share for point in points]
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] <= 1
    for point in points:
        event = Event(sample_rate=0.1, noise_multiplier=point.noise_multiplier)
        assert guarantee([(event, point.steps)], delta=1e-5).epsilon <= 3.0


def test_a_curve_keeps_a_limit_on_attacks() -> None:
    risk = AttackRisk(0.2)
    points = noise_at_batch(
        num_units=UNITS, expected_batch_size=1000, target=Target(delta=1e-5, risk=risk), noises=[2.0]
    )
    event = Event(sample_rate=0.1, noise_multiplier=2.0)
    assert risk.bound(full_profile([(event, points[0].steps)], delta=1e-5)) <= 0.2


def test_larger_batches_need_fewer_epochs_until_the_steps_decide() -> None:
    points = least_epochs(num_units=UNITS, expected_batch_sizes=[100, 1000, 5000], target=TARGET, steps=500)
    budget = [point.epochs_of_budget for point in points]
    assert budget == sorted(budget, key=lambda epochs: -(epochs or 0))
    assert [point.epochs_of_steps for point in points] == [5.0, 50.0, 250.0]
    assert points[0].epochs == points[0].epochs_of_budget
    assert points[-1].epochs == 250.0


def test_a_target_is_an_epsilon_or_a_limit_on_attacks() -> None:
    with pytest.raises(ArgumentError, match="one of them"):
        Target(delta=1e-5)
    with pytest.raises(ArgumentError, match="no noise_multiplier of the curve fits"):
        noise_at_batch(num_units=UNITS, expected_batch_size=UNITS, target=TARGET, noises=[0.1])
