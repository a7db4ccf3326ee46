"""The optimizer's door: what it takes, what it refuses, and plain torch behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpvision.config import OptimizerSettings, ScheduleSettings
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.values import ClippedSum, OrdinaryGrad
from optim_cases import (
    OPTIMIZERS,
    Net,
    assert_equal_bits,
    door,
    gradients,
    ordinary_grad,
    private_grad,
    trainable,
    weights,
)


def test_a_private_optimizer_takes_private_gradients_only() -> None:
    model = Net()
    optimizer, before = door(model), weights(model)
    sums = ClippedSum(gradients(model, 0), 1.0)
    for grad in (ordinary_grad(model, 0), sums, gradients(model, 0), None):
        with pytest.raises(PrivacyError, match="takes a PrivateGrad only"):
            optimizer.step(grad)  # type: ignore[arg-type]
    assert_equal_bits(weights(model), before)
    optimizer.step(private_grad(model, 0))
    assert optimizer.steps_taken == 1


def test_an_ordinary_optimizer_takes_ordinary_gradients_only() -> None:
    model = Net()
    with pytest.raises(PrivacyError, match="takes a OrdinaryGrad only, got PrivateGrad"):
        door(model, private=False).step(private_grad(model, 0))


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_repeated_or_skipped_step_is_refused(step: int) -> None:
    model = Net()
    optimizer = door(model)
    optimizer.step(private_grad(model, 0))
    optimizer.step(private_grad(model, 1))
    with pytest.raises(PrivacyError, match=f"the next step is 2, got the gradient of step {step}"):
        optimizer.step(private_grad(model, step))


def test_missing_unknown_and_frozen_names_are_refused_by_name() -> None:
    model = Net()
    optimizer, before = door(model, private=False), weights(model)
    grads = gradients(model, 0)
    missing = {name: value for name, value in grads.items() if name != "gain"}
    for wrong, message in (
        (missing, "missing: gain; unknown or frozen: none"),
        ({**grads, "frozen.bias": torch.zeros(2)}, "missing: none; unknown or frozen: frozen.bias"),
        ({**grads, "again.weight": torch.zeros(4, 4)}, "unknown or frozen: again.weight"),
        ({}, "missing: gain, first.weight, first.bias"),
    ):
        with pytest.raises(PrivacyError, match=message):
            optimizer.step(OrdinaryGrad(wrong, 0))
    assert_equal_bits(weights(model), before)


@pytest.mark.parametrize("wrong", [torch.zeros(4, 3), torch.zeros(4, 4, dtype=torch.int64), torch.zeros(16)])
def test_a_gradient_of_another_shape_or_of_whole_numbers_is_refused(wrong: Tensor) -> None:
    model = Net()
    with pytest.raises(PrivacyError, match=r"the gradient of first\.weight must be .* of shape \(4, 4\)"):
        door(model, private=False).step(OrdinaryGrad({**gradients(model, 0), "first.weight": wrong}, 0))


def test_a_gradient_of_higher_precision_is_cast() -> None:
    model, twin = Net(), Net()
    precise = {name: value.double() for name, value in gradients(model, 0).items()}
    door(model, private=False).step(OrdinaryGrad(precise, 0))
    door(twin, private=False).step(ordinary_grad(twin, 0))
    assert_equal_bits(weights(model), weights(twin))


def test_a_step_leaves_no_grad_and_neither_frozen_parameters_nor_the_gradient_changed() -> None:
    for kwargs in OPTIMIZERS:
        model = Net()
        frozen = model.frozen.weight.clone()
        optimizer = door(model, settings=OptimizerSettings(learning_rate=0.1, **kwargs))
        for step in range(3):
            grad = private_grad(model, step)
            copies = {name: value.clone() for name, value in grad.gradients.items()}
            optimizer.step(grad)
            assert_equal_bits(dict(grad.gradients), copies)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(model.frozen.weight, frozen)
        assert model.again.weight is model.first.weight


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no trainable parameter"):
        door(nn.Linear(2, 2).requires_grad_(False))


TORCH: list[tuple[dict[str, Any], Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    ({"name": "sgd"}, torch.optim.SGD, {}),
    ({"name": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    (
        {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    ({"name": "adam"}, torch.optim.Adam, {}),
    ({"name": "adam", "betas": (0.5, 0.9)}, torch.optim.Adam, {"betas": (0.5, 0.9)}),
    ({"name": "adam", "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
    ({"name": "adamw"}, torch.optim.AdamW, {}),
    ({"name": "nadam"}, torch.optim.NAdam, {}),
    ({"name": "rmsprop"}, torch.optim.RMSprop, {}),
    ({"name": "rmsprop", "centered": True, "smoothing": 0.5}, torch.optim.RMSprop, {"centered": True, "alpha": 0.5}),
]


@pytest.mark.parametrize(("ours", "torchs", "kwargs"), TORCH)
def test_without_clipping_and_noise_it_is_the_plain_torch_optimizer_with_its_defaults(
    ours: dict[str, Any], torchs: Callable[..., torch.optim.Optimizer], kwargs: dict[str, Any]
) -> None:
    model, twin = Net(), Net()
    optimizer = door(model, private=False, settings=OptimizerSettings(learning_rate=0.05, **ours))
    plain = torchs(trainable(twin).values(), lr=0.05, **kwargs)
    for step in range(6):
        grad = ordinary_grad(model, step)
        for name, parameter in trainable(twin).items():
            parameter.grad = grad.gradients[name].clone()
        plain.step()
        optimizer.step(grad)
    for name, value in weights(model).items():  # torch's multi-tensor loops may round in another order
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_momentum_nesterov_and_weight_decay_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.data.fill_(2.0)
    settings = OptimizerSettings(learning_rate=0.5, momentum=0.9, nesterov=True, weight_decay=0.1)
    optimizer = door(model, private=False, settings=settings)
    one = {"weight": torch.ones(1, 1, dtype=torch.float64)}
    optimizer.step(OrdinaryGrad(one, 0))
    # g = 1 + 0.1·2 = 1.2; v = 1.2; w = 2 − 0.5·(1.2 + 0.9·1.2) = 0.86
    assert model.weight.item() == pytest.approx(0.86, rel=1e-12)
    optimizer.step(OrdinaryGrad(one, 1))
    # g = 1.086; v = 0.9·1.2 + 1.086 = 2.166; w = 0.86 − 0.5·(1.086 + 0.9·2.166) = −0.6577
    assert model.weight.item() == pytest.approx(-0.6577, rel=1e-12)


def test_the_schedules_rate_is_the_one_that_moves_the_weights() -> None:
    model = Net()
    schedule = ScheduleSettings(kind="step", every_steps=2, factor=0.5)
    optimizer = door(model, private=False, schedule=schedule)
    for step, rate in enumerate([0.1, 0.1, 0.05, 0.05, 0.025]):
        before, grad = model.gain.item(), ordinary_grad(model, step)
        optimizer.step(grad)
        assert before - model.gain.item() == pytest.approx(rate * grad.gradients["gain"].item(), rel=1e-4)
        assert optimizer.learning_rate(step) == pytest.approx(rate)
