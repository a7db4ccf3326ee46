"""Parts of networks that were trained in public and stay as they are: frozen BatchNorm, resizing, a new head.

Shapes: N rows, C channels, H height, W width.

A model cut in two: a front that stays as it is, and the rest, which learns.

What the front makes of an image never changes, so it need be computed only once.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpvision.errors import ArgumentError, Problems

BackboneNorm = Literal["frozen", "group", "batch"]
FeatureNorm = Literal["layer", "none"]


@final
class FrozenBatchNorm(nn.Module):
    """What BatchNorm computes in evaluation, in training too: an affine map of fixed numbers.

    Its buffers have BatchNorm's names, so that a file of a trained BatchNorm fits.

    Guarantee: rows don't mix and nothing moves. The numbers must come from public training.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Scale and shift each channel."""
        return functional.batch_norm(
            x_NCHW, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )

    def extra_repr(self) -> str:
        """Channels and eps, as BatchNorm prints them."""
        return f"{len(self.weight)}, eps={self.eps}"


@final
class Resize(nn.Module):
    """Images scaled to ``size`` × ``size`` pixels, each by itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Bicubic; smoothed first where the image becomes smaller."""
        if tuple(x_NCHW.shape[-2:]) == (self.size, self.size):
            return x_NCHW
        return functional.interpolate(
            x_NCHW, size=(self.size, self.size), mode="bicubic", align_corners=False, antialias=True
        )

    def extra_repr(self) -> str:
        """The size."""
        return f"{self.size}"


def resize(size: int) -> nn.Module:
    """The layer that resizes to ``size`` pixels; 0 leaves images as they are."""
    problems = Problems()
    problems.count("resize_to", size, least=0)
    problems.raise_if_any()
    return Resize(size) if size else nn.Identity()


def norm_maker(norm: BackboneNorm, *, groups: int, eps: float) -> Callable[[int], nn.Module]:
    """What follows a convolution: ``frozen`` or ordinary BatchNorm, or GroupNorm with gcd(``groups``, C) groups.

    Ordinary BatchNorm mixes rows: it is for training in public, and the preflight refuses it.
    """
    if norm not in ("frozen", "group", "batch"):
        raise ArgumentError(f"norm must be frozen, group or batch, got {norm!r}.")
    if norm == "frozen":
        return lambda channels: FrozenBatchNorm(channels, eps=eps)
    if norm == "batch":
        return lambda channels: nn.BatchNorm2d(channels, eps=eps)
    return lambda channels: nn.GroupNorm(math.gcd(groups, channels), channels, eps=eps)


def feature_norm_layer(kind: FeatureNorm, features: int) -> nn.Module:
    """``layer`` brings every row's features to mean 0 and variance 1 by that row alone; nothing is learned."""
    if kind not in ("layer", "none"):
        raise ArgumentError(f"feature_norm must be layer or none, got {kind!r}.")
    return nn.LayerNorm(features, elementwise_affine=False) if kind == "layer" else nn.Identity()


def draw(model: nn.Module) -> None:
    """Convolutions normal with variance 2/fan_out and zero biases; linear layers as PyTorch draws them."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.weight[0, 0].numel() * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)


_Named = list[tuple[str, nn.Module]]


@final
@dataclass(frozen=True)
class Split:
    """``rest(front(x))`` is the model. Both share its layers and its parameters, under its names."""

    front: nn.Module
    rest: nn.Module


def split(model: nn.Module, example: Tensor) -> Split | None:
    """Cut in front of the first layer with a parameter that requires gradients; None where that gains nothing.

    Only a chain of layers can be cut: a Sequential, or a module that turns out to run its children one after the
    other. The front must hold weights or constants (else it is no work worth saving) and treat ``example``, a few
    made-up rows, in training as in evaluation.

    Guarantee: the front of a split treats the rows of ``example`` each by itself.
    """
    chain = _as_chain(model, example)
    if chain is None:
        return None
    front_parts, rest_parts = _divide(chain)
    front, rest = _sequential(front_parts), _sequential(rest_parts).train(model.training)
    works = any(True for _ in front.parameters()) or any(True for _ in front.buffers())
    if not rest_parts or not works or not _same_in_both_modes(front, example) or not _rows_apart(front, example):
        return None
    return Split(front, rest)


def _as_chain(model: nn.Module, example: Tensor) -> nn.Sequential | None:
    """The model as a Sequential under the same names, if that is what it computes."""
    if type(model) is nn.Sequential:
        return model
    if any(True for _ in model.parameters(recurse=False)) or any(True for _ in model.buffers(recurse=False)):
        return None
    chain = _sequential([(name, child) for name, child in model._modules.items() if child is not None])
    # Copies, because a pass in evaluation mode still may write into a module of somebody's own.
    one, other = copy.deepcopy(model).eval(), copy.deepcopy(chain).eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return chain if torch.equal(one(example), other(example)) else None
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None  # its children don't fit one behind the other: no chain, and no error


def _divide(chain: nn.Sequential) -> tuple[_Named, _Named]:
    """The leading layers that don't learn, and all from the first that does; a Sequential is cut inside."""
    children = [(name, child) for name, child in chain._modules.items() if child is not None]
    for index, (name, child) in enumerate(children):
        if not any(parameter.requires_grad for parameter in child.parameters()):
            continue
        front, rest = children[:index], children[index + 1 :]
        if type(child) is not nn.Sequential:
            return front, [(name, child), *rest]
        inner_front, inner_rest = _divide(child)
        if inner_front:
            front = [*front, (name, _sequential(inner_front))]
        return front, [(name, _sequential(inner_rest).train(child.training)), *rest]
    return children, []


def _sequential(parts: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


def _rows_apart(front: nn.Module, example: Tensor) -> bool:
    """Whether the other rows stay as they are, to the last bit, when the last one changes."""
    twin, changed = copy.deepcopy(front).eval(), example.clone()
    changed[-1] = example[-1].flip(-1) * 2 + 1
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return torch.equal(twin(example)[:-1], twin(changed)[:-1])


def _same_in_both_modes(front: nn.Module, example: Tensor) -> bool:
    """Whether the front draws nothing and keeps no statistics: dropout and BatchNorm in training do."""
    twin = copy.deepcopy(front)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return torch.equal(twin.eval()(example), twin.train()(example))
