"""Mixing that a trial may not see: branches on data or number of rows, on who asks, and on chance and time."""

from __future__ import annotations

import datetime
import functools
import inspect
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hostile_table import BRANCH, COIN, SHARED_DRAW, WATCHED, Mix, Sandwich, conv_own, hostile, linear_own, mixes
from model_cases import SIDE, Own, cross_entropy, images

# ------------------------------------------------------------------------------------------------- branches on all rows


def _if(condition: Callable[[Tensor], Any], then: Mix = lambda x: x.flip(0) + x) -> Mix:
    return lambda x: then(x) if condition(x) else x


def _from(k: int) -> Mix:
    return _if(lambda x: x.shape[0] >= k)


def _typed(x: Tensor) -> Tensor:
    return x + x.flip(0) if type(x.shape[0]) is int else x


def _tried(x: Tensor) -> Tensor:
    try:
        return x / 255 if x.max() > 0.8 else x
    except Exception:  # noqa: BLE001 - what a tracer raises is swallowed
        return x


for _k in range(2, 34):
    mixes(f"mixing from {_k} rows on", BRANCH, _from(_k))
mixes("mixing from 5 rows on, by len", BRANCH, _if(lambda x: len(x) >= 5))
mixes("mixing from 5 rows on, by size", BRANCH, _if(lambda x: x.size(0) > 4))
mixes("mixing from 5 rows on, by numel", BRANCH, _if(lambda x: x.numel() >= 30))
mixes("mixing from 5 rows on, by a tensor", BRANCH, _if(lambda x: torch.tensor(x.shape[0]) >= 5))
mixes("mixing from 5 rows on, by bytes", BRANCH, _if(lambda x: x.nbytes >= 120))
mixes("mixing from 5 rows on, by slicing", BRANCH, lambda x: torch.cat([x[:4], x[4:].flip(0)]))
mixes("mixing from 5 rows on, by an exponent", BRANCH, lambda x: x + x.flip(0) * min(1, x.shape[0] // 5))
mixes(
    "mixing from 5 rows on, by a loop",
    BRANCH,
    lambda x: functools.reduce(lambda y, _: y.roll(1, 0), range(5, x.shape[0]), x),
)
mixes("mixing of even batches", BRANCH, _if(lambda x: x.shape[0] % 2 == 0))
mixes("mixing of one size", BRANCH, _if(lambda x: x.shape[0] == 17))
mixes("mixing of a set of sizes", BRANCH, _if(lambda x: x.shape[0] in {3, 5, 8, 64}))
mixes("mixing where the size cannot be compared", "falls back when the size is no plain number", _typed)

mixes("branch on the maximum", BRANCH, _if(lambda x: x.max() > 0.8, lambda x: x / 255))
mixes("branch on the maximum by item", BRANCH, _if(lambda x: x.max().item() > 0.8, lambda x: x / 255))
mixes("branch on any", BRANCH, _if(lambda x: (x > 0.8).any(), lambda x: x / 255))
mixes("branch on a list", BRANCH, _if(lambda x: max(x.flatten().tolist()) > 0.8, lambda x: x / 255))
mixes("branch without a branch", BRANCH, lambda x: torch.where(x.max() > 0.8, x / 255, x))
mixes("branch as an index", BRANCH, lambda x: torch.stack([x, x / 255])[(x.max() > 0.8).long()])
mixes("branch as a factor", BRANCH, lambda x: x * (x.max() < 0.8))
mixes("branch of torch.cond", BRANCH, lambda x: torch.cond(x.max() > 0.8, lambda x: x / 255, lambda x: x.clone(), (x,)))
mixes("branch that hides an error", BRANCH, _tried)
mixes("branch on equality of tensors", BRANCH, _if(lambda x: torch.equal(x, x.clamp(max=0.8)), lambda x: x / 255))
mixes("branch on allclose", BRANCH, _if(lambda x: torch.allclose(x, x.clamp(max=0.8)), lambda x: x / 255))
mixes("branch on numpy", BRANCH, _if(lambda x: x.detach().numpy().max() > 0.8, lambda x: x / 255))
mixes("through numpy", "numpy is outside of every trace", lambda x: x - torch.from_numpy(x.detach().numpy().mean(0)))


class InputMixup(nn.Module):
    """Mixup of the images themselves, as in a training script that was moved into the model."""

    def __init__(self, share: Callable[[], Any]) -> None:
        super().__init__()
        self.share, self.body = share, Sandwich(lambda x: x, conv=True)

    def forward(self, x: Tensor) -> Tensor:
        share = self.share() if self.training else 0.0
        return self.body((1 - share) * x + share * x.flip(0))


@hostile("mixup of the images by Python's coin", COIN, random=True, refused=True)
def python_input_mixup() -> Own:
    return conv_own(InputMixup(lambda: 0.4 if random.random() < 0.3 else 0.0))


@hostile("mixup of the images by torch's coin", COIN, random=True)
def torch_input_mixup() -> Own:
    return conv_own(InputMixup(lambda: 0.4 * (torch.rand(()) < 0.3)))


class ScaledImages(nn.Module):
    """``if x.max() > 1.5: x = x / 255``, as it stands in many repositories."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Sandwich(lambda x: x, conv=True)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 1.5:
            x = x / 255
        return self.body(x)


@hostile("images scaled if one is bright", "one bright image darkens all others")
def scaled_images() -> Own:
    return Own(ScaledImages(), cross_entropy, lambda n, g: (torch.rand(n, 3, SIDE, SIDE, generator=g), images(n, g)[1]))


# ---------------------------------------------------------------------------------- who is asking: honest while watched

mixes("mixing with gradients only", WATCHED, _if(lambda x: torch.is_grad_enabled()))
mixes("mixing where gradients are required", WATCHED, _if(lambda x: x.requires_grad))
mixes("mixing outside of a compiler", WATCHED, _if(lambda x: not torch.compiler.is_compiling()))
mixes("mixing outside of an export", WATCHED, _if(lambda x: not torch.compiler.is_exporting()))
mixes("mixing of ordinary tensors", WATCHED, _if(lambda x: type(x) is Tensor))
mixes("mixing in float32", WATCHED, _if(lambda x: x.dtype == torch.float32))
mixes("mixing if not contiguous", WATCHED, _if(lambda x: not x.is_contiguous()), conv=True)
mixes("mixing by the caller's name", WATCHED, _if(lambda x: any("export" in f.filename for f in inspect.stack(0))))
mixes("mixing by depth of the stack", WATCHED, _if(lambda x: sys._getframe(8).f_lineno % 2 == 0))


class InTraining(Sandwich):
    def mix(self, x: Tensor) -> Tensor:
        return x + x.flip(0) if self.training else x


@hostile("mixing in training mode only", WATCHED)
def mixing_in_training() -> Own:
    return linear_own(InTraining())


# -------------------------------------------------------------------------------------------------- randomness and time


_RNG, _NUMPY_RNG = random.Random(0), np.random.default_rng(0)


def _mixup(x: Tensor) -> Tensor:
    return 0.6 * x + 0.4 * x.roll(1, 0)


def _beta_mixup(x: Tensor) -> Tensor:
    share = torch.distributions.Beta(0.3, 0.3).sample()
    return share * x + (1 - share) * x.flip(0)


def _mean_dropout(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) < 0.3, x.mean(0, keepdim=True), x)


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(int(x.detach().sum() * 1000))
    return x * torch.rand_like(x)


mixes(
    "mixup by Python's coin", COIN, _if(lambda x: random.random() < 0.3, _mixup), conv=None, random=True, refused=True
)
mixes("mixup by numpy's coin", COIN, _if(lambda x: np.random.rand() < 0.3, _mixup), random=True, refused=True)
mixes("mixup by torch's coin", COIN, _if(lambda x: torch.rand(()).item() < 0.3, _mixup), random=True, refused=True)
mixes("mixup by torch's coin as a tensor", COIN, _if(lambda x: torch.rand(()) < 0.3, _mixup), random=True, refused=True)
mixes("mixup with a random share", COIN, lambda x: x + (torch.rand(()) < 0.3) * (x.roll(1, 0) - x), random=True)
mixes(
    "mixup with a random partner", COIN, lambda x: 0.7 * x + 0.3 * x[torch.randperm(x.shape[0])], conv=None, random=True
)
mixes("mixup by a generator of its own", COIN, _if(lambda x: _RNG.random() < 0.3, _mixup), random=True)
mixes("mixup by numpy's new generator", COIN, _if(lambda x: _NUMPY_RNG.random() < 0.3, _mixup), random=True)
mixes("mixup by the system's entropy", COIN, _if(lambda x: os.urandom(1)[0] < 77, _mixup), random=True)
mixes("mixup by a beta distribution", COIN, _beta_mixup, random=True)
mixes(
    "mixup by a shuffled list",
    COIN,
    lambda x: x + 0.3 * x[random.sample(range(x.shape[0]), x.shape[0])],
    random=True,
    refused=True,
)
mixes("mixup by the clock", COIN, _if(lambda x: time.time() % 1 < 0.3, _mixup), random=True, refused=True)
mixes(
    "mixup by the processor's clock",
    COIN,
    _if(lambda x: time.perf_counter_ns() % 10 < 3, _mixup),
    random=True,
    refused=True,
)
mixes("mixup by the date", COIN, _if(lambda x: datetime.datetime.now().microsecond % 10 < 3, _mixup), random=True)
mixes("mixup by an address", COIN, _if(lambda x: id(x) // 64 % 10 < 3, _mixup), random=True)
mixes("mixup by a tensor's address", COIN, _if(lambda x: x.data_ptr() // 64 % 10 < 3, _mixup), random=True)
mixes(
    "scaled by Python's coin",
    "separable, but frozen by a trace",
    lambda x: x * random.random(),
    random=True,
    refused=True,
)
mixes(
    "scaled by numpy's coin",
    "separable, but frozen by a trace",
    lambda x: x * np.random.rand(),
    random=True,
    refused=True,
)
mixes("batch-mean dropout", "dropped entries become the batch's mean", _mean_dropout, conv=None, random=True)
mixes(
    "dropout of the batch by its mean",
    "the rate is a statistic",
    lambda x: x * torch.bernoulli(x.mean(0).sigmoid()),
    random=True,
)
mixes("one mask for all rows", SHARED_DRAW, lambda x: x * (torch.rand(1, 6) < 0.5), random=True, refused=True)
mixes(
    "depth that is stochastic for all rows at once",
    SHARED_DRAW,
    lambda x: x + 10 * torch.empty(1, 1).bernoulli_(0.5) * torch.tanh(x),
    random=True,
    refused=True,
)
mixes("columns in a random order", SHARED_DRAW, lambda x: x[:, torch.randperm(6)], random=True, refused=True)
mixes("seeded by the data", "the next draw tells what the data was", _seeded, random=True)

_RNG, _NUMPY_RNG = random.Random(0), np.random.default_rng(0)
