"""Frozen backbones: parts of pretrained networks that stay as they are, and the split of a model into backbone and
rest.

The features that a frozen backbone computes from an image never change, so ``split`` lets them be computed once.
Shapes: N rows, C channels, H height, W width.
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
COLOUR_CHANNELS = 3


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
    """Scale images to ``size`` × ``size`` pixels, each by itself."""

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
    """Return the layer that resizes to ``size`` pixels; 0 leaves images as they are."""
    problems = Problems()
    problems.count("resize_to", size, least=0)
    problems.raise_if_any()
    return Resize(size) if size else nn.Identity()


@final
class GreyToColour(nn.Module):
    """Repeat the one channel of grey images, so that a network for colour images takes them; each image by itself."""

    def forward(self, x_N1HW: Tensor) -> Tensor:
        """(N, 1, H, W) → (N, 3, H, W)."""
        return x_N1HW.repeat(1, COLOUR_CHANNELS, 1, 1)


def colour_front(in_channels: int) -> tuple[nn.Module, int]:
    """Return the layer before a network that was trained on colour images, and the channels that it gives.

    Grey images are repeated to three channels; others stay as they are.
    """
    return (GreyToColour(), COLOUR_CHANNELS) if in_channels == 1 else (nn.Identity(), in_channels)


def norm_maker(norm: BackboneNorm, *, groups: int, eps: float) -> Callable[[int], nn.Module]:
    """Return a function that makes the norm after a convolution, given its channels.

    Args:
        norm: ``frozen`` BatchNorm, ``group`` for GroupNorm with gcd(``groups``, C) groups, or ordinary ``batch`` norm,
            which
            mixes rows: it is for public training, and the model check refuses it.
        groups: of GroupNorm.
        eps: added to the variance.
    """
    if norm not in ("frozen", "group", "batch"):
        raise ArgumentError(f"norm must be frozen, group or batch, got {norm!r}.")
    if norm == "frozen":
        return lambda channels: FrozenBatchNorm(channels, eps=eps)
    if norm == "batch":
        return lambda channels: nn.BatchNorm2d(channels, eps=eps)
    return lambda channels: nn.GroupNorm(math.gcd(groups, channels), channels, eps=eps)


def feature_norm_layer(kind: FeatureNorm, features: int) -> nn.Module:
    """Return a layer that brings the features of each row to mean 0 and variance 1 (``layer``), or none; nothing is
    learned.
    """
    if kind not in ("layer", "none"):
        raise ArgumentError(f"feature_norm must be layer or none, got {kind!r}.")
    return nn.LayerNorm(features, elementwise_affine=False) if kind == "layer" else nn.Identity()


def draw(model: nn.Module) -> None:
    """Initialise convolutions as normal with variance 2/fan_out and zero biases; linear layers stay as PyTorch draws
    them.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.weight[0, 0].numel() * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def zero(head: nn.Module) -> None:
    """Set every parameter of a head to zero: all classes equal before anything is learned."""
    for parameter in head.parameters():
        nn.init.zeros_(parameter)


_Named = list[tuple[str, nn.Module]]


@final
@dataclass(frozen=True)
class Split:
    """A model in two parts: ``rest(backbone(x))`` is the model. Both share its layers and parameters, under its
    names.
    """

    backbone: nn.Module
    rest: nn.Module


def split(model: nn.Module, example: Tensor) -> Split | None:
    """Split a model before the first layer with a parameter that requires gradients.

    Args:
        model: a Sequential, or a module that runs its children one after the other.
        example: a few synthetic rows.

    Returns:
        The parts, or None where nothing is gained: the model is not a chain, or the backbone has no weights or
        constants,
        or it behaves differently in training and in evaluation.

    Guarantee: the backbone of a split treats the rows of ``example`` each by itself.
    """
    chain = _as_chain(model, example)
    if chain is None:
        return None
    frozen_parts, trained_parts = _divide(chain)
    backbone, rest = _sequential(frozen_parts), _sequential(trained_parts).train(model.training)
    works = any(True for _ in backbone.parameters()) or any(True for _ in backbone.buffers())
    useful = bool(trained_parts) and works and _same_in_both_modes(backbone, example) and _rows_apart(backbone, example)
    return Split(backbone, rest) if useful else None


def _as_chain(model: nn.Module, example: Tensor) -> nn.Sequential | None:
    """Return the model as a Sequential under the same names, if that is what it computes."""
    if type(model) is nn.Sequential:
        return model
    if any(True for _ in model.parameters(recurse=False)) or any(True for _ in model.buffers(recurse=False)):
        return None
    chain = _sequential([(name, child) for name, child in model._modules.items() if child is not None])
    # Copies, because a pass in evaluation mode may still write into a user's own module.
    one, other = copy.deepcopy(model).eval(), copy.deepcopy(chain).eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return chain if torch.equal(one(example), other(example)) else None
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None  # its children don't fit one behind the other: no chain, and no error


def _divide(chain: nn.Sequential) -> tuple[_Named, _Named]:
    """Divide a chain into the leading layers that do not learn and the rest; a Sequential is divided inside."""
    children = [(name, child) for name, child in chain._modules.items() if child is not None]
    for index, (name, child) in enumerate(children):
        if not any(parameter.requires_grad for parameter in child.parameters()):
            continue
        backbone, rest = children[:index], children[index + 1 :]
        if type(child) is not nn.Sequential:
            return backbone, [(name, child), *rest]
        inner_frozen, inner_trained = _divide(child)
        if inner_frozen:
            backbone = [*backbone, (name, _sequential(inner_frozen))]
        return backbone, [(name, _sequential(inner_trained).train(child.training)), *rest]
    return children, []


def _sequential(parts: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    """Make a Sequential of named layers."""
    return nn.Sequential(OrderedDict(parts))


def _rows_apart(backbone: nn.Module, example: Tensor) -> bool:
    """Whether the other rows stay the same, to the last bit, when the last row changes."""
    duplicate, changed = copy.deepcopy(backbone).eval(), example.clone()
    changed[-1] = example[-1].flip(-1) * 2 + 1
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return torch.equal(duplicate(example)[:-1], duplicate(changed)[:-1])


def _same_in_both_modes(backbone: nn.Module, example: Tensor) -> bool:
    """Whether the backbone draws nothing and keeps no statistics, unlike dropout and BatchNorm in training."""
    duplicate = copy.deepcopy(backbone)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return torch.equal(duplicate.eval()(example), duplicate.train()(example))
