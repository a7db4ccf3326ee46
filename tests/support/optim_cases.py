"""A small model and settings that the optimizer's tests share."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from dpvision.config import OptimizerSettings
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.noise import noisy_mean
from dpvision.privacy.optimizer import Optimizer
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import ClippedSum, OrdinaryGrad, PrivateGrad

MECHANISM = Mechanism(num_units=100, expected_batch_size=10, clip_norm=1.0, noise_multiplier=1.0, steps=100)
KEYS = Keys.from_seed(5)
SGD = OptimizerSettings(learning_rate=0.1)
OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01},
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    {"name": "adam", "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-6},
    {"name": "adamw"},
    {"name": "nadam", "momentum_decay": 0.01},
    {"name": "rmsprop", "momentum": 0.5, "centered": True, "smoothing": 0.9},
]
SCHEDULES: list[dict[str, Any]] = [
    {"kind": "constant"},
    {"kind": "step", "every_steps": 2, "factor": 0.5},
    {"kind": "cosine", "warmup_steps": 3, "final_fraction": 0.1},
    {"kind": "plateau", "public_metric": True, "patience": 1, "factor": 0.5},
]
AVERAGES: list[dict[str, Any]] = [{"kind": "none"}, {"kind": "ema", "decay": 0.5}, {"kind": "polyak", "start_step": 2}]


class Net(nn.Module):
    """A frozen layer, a scalar, a shared weight and a saved buffer."""

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Linear(4, 4, dtype=dtype)
        self.again = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(2, 2, dtype=dtype).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))
        self.register_buffer("constant", torch.ones(3, dtype=dtype))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in trainable(model).items()}


def private_grad(model: Net, step: int) -> PrivateGrad:
    return _private_grad(model.gain.dtype, step)


@functools.cache  # the gradients depend on names and shapes alone
def _private_grad(dtype: torch.dtype, step: int) -> PrivateGrad:
    return noisy_mean(ClippedSum(gradients(Net(dtype=dtype), step), 1.0), MECHANISM, KEYS, step=step)


def ordinary_grad(model: nn.Module, step: int) -> OrdinaryGrad:
    return OrdinaryGrad(gradients(model, step), step)


def door(model: nn.Module, *, private: bool = True, settings: OptimizerSettings = SGD, **others: Any) -> Optimizer:
    return Optimizer(model, settings=settings, total_steps=10, private=private, **others)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name]), name
