"""The values that travel: doors between them open for the right thing only."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.mechanism import Mechanism, OrdinarySampling
from dpvision.privacy.values import ClippedSum, Microbatch, PrivateGrad

MECHANISM = Mechanism(num_units=100, expected_batch_size=10.5, clip_norm=0.3, noise_multiplier=1.7, steps=5)


def test_nobody_but_privatize_makes_a_private_gradient() -> None:
    with pytest.raises(PrivacyError, match="only"):
        PrivateGrad({"weight": torch.zeros(2)}, 0, proof=object())


def test_sensitive_values_do_not_print_what_they_hold() -> None:
    secret = torch.tensor([123456.0])
    assert "123456" not in repr(ClippedSum({"weight": secret}, 1.0))
    assert "123456" not in repr(Microbatch(secret, secret, secret))


def test_the_divisor_and_the_rate_are_never_rounded() -> None:
    mechanism = Mechanism(num_units=50_000, expected_batch_size=4096, clip_norm=1, noise_multiplier=1, steps=1)
    assert mechanism.sample_rate == 4096 / 50_000
    assert mechanism.expected_batch_size == 4096


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_units": 0},
        {"num_units": 1.5},
        {"expected_batch_size": 101},
        {"expected_batch_size": float("nan")},
        {"clip_norm": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": float("inf")},
        {"steps": 0},
        {"steps": True},
        {"privacy_unit": ""},
        {"adjacency": "neighbour"},
        {"num_units": "100"},
        {"expected_batch_size": None},
        {"expected_batch_size": 10**400},
        {"privacy_unit": 7},
    ],
)
def test_a_mechanism_of_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        Mechanism.from_dict({**MECHANISM.to_dict(), **wrong})


@pytest.mark.parametrize("name", ["delta", "target_epsilon"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), "0.001"])
def test_what_a_mechanism_was_calibrated_for_is_a_guarantee(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must"):
        dataclasses.replace(MECHANISM, **{name: value})


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ArgumentError, match=r"clip_norm.*steps"):
        Mechanism.from_dict({**MECHANISM.to_dict(), "clip_norm": -1, "steps": -5})


def test_a_mechanism_survives_a_round_trip_and_refuses_unknown_fields() -> None:
    assert Mechanism.from_dict(MECHANISM.to_dict()) == MECHANISM
    with pytest.raises(ArgumentError, match="not a mechanism"):
        Mechanism.from_dict({**MECHANISM.to_dict(), "epsilon": 1})


def test_an_ordinary_plan_draws_but_accounts_for_nothing() -> None:
    plan = OrdinarySampling(num_units=100, expected_batch_size=10.5, steps=3)
    assert plan.sample_rate == 0.105
    assert not hasattr(plan, "step_event")
    with pytest.raises(ArgumentError):
        OrdinarySampling(num_units=10, expected_batch_size=11, steps=3)
