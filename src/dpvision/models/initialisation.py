"""Ways to draw initial weights, in place, from the default generator: ``seeded`` gives it a seed of its own.

Norms and gains keep their ones and zeros in all of them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from dpvision.errors import ArgumentError
from dpvision.models.layers import WSConv2d

WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, WSConv2d)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw from ``seed`` (None: fresh entropy of the operating system) and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed other devices, whose state is not ours to move.
        torch.default_generator.manual_seed(secrets.randbits(63) if seed is None else seed)
        yield


def weighted_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Every layer with a matrix or a kernel, in the order of ``model.modules()``."""
    return (module for module in model.modules() if isinstance(module, WEIGHTED))


def pytorch(model: nn.Module) -> None:
    """What PyTorch draws by default, for every layer that knows how to draw itself."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


def glorot_uniform(model: nn.Module) -> None:
    """Xavier-uniform weights and zero biases, as Keras does."""
    _redraw(model, nn.init.xavier_uniform_, zero_bias=True)


def xavier_uniform(model: nn.Module, *, gain: float = 1.0) -> None:
    """Xavier-uniform weights with ``gain``; biases stay."""
    _redraw(model, lambda weight: nn.init.xavier_uniform_(weight, gain=gain), zero_bias=False)


def kaiming_normal(model: nn.Module, *, mode: Literal["fan_in", "fan_out"] = "fan_in") -> None:
    """Kaiming-normal weights for ReLU; biases stay."""
    _redraw(model, lambda weight: nn.init.kaiming_normal_(weight, mode=mode, nonlinearity="relu"), zero_bias=False)


def truncated_normal(model: nn.Module, *, corrected: bool = True) -> None:
    """Normal weights of variance 1/fan_in cut at two standard deviations, zero biases.

    ``corrected`` widens the normal so that the variance after the cut is 1/fan_in, as JAX does.
    """
    _redraw(model, lambda weight: truncated_normal_(weight, corrected=corrected), zero_bias=True)


def truncated_normal_(weight: Tensor, *, corrected: bool = True, std: float | None = None) -> None:
    """Fill one weight; ``std`` is 1/sqrt(fan_in) unless given."""
    std = math.sqrt(1 / weight[0].numel()) if std is None else std
    # The standard deviation of a standard normal cut at ±2.
    std = std / 0.87962566103423978 if corrected else std
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def mean_var(model: nn.Module, source: nn.Module) -> None:
    """Draw each layer i.i.d. normal with the mean and variance of the same layer's weights in ``source`` (Mean-Var).

    Weights and biases have their own statistics; a tensor of one value becomes that value.

    Guarantee: none. If ``source`` was trained on the private data, its charge counts for this model too.
    """
    ours, theirs = list(weighted_layers(model)), list(weighted_layers(source))
    if [_shapes(layer) for layer in ours] != [_shapes(layer) for layer in theirs]:
        raise ArgumentError("Mean-Var needs a source with the same layers: create both models with the same options.")
    with torch.no_grad():
        for layer, origin in zip(ours, theirs, strict=True):
            for parameter, example in zip(layer.parameters(False), origin.parameters(False), strict=True):
                var, mean = torch.var_mean(example, correction=0)
                parameter.normal_(mean.item(), math.sqrt(var.item()))


def _redraw(model: nn.Module, draw: Callable[[Tensor], object], *, zero_bias: bool) -> None:
    for layer in weighted_layers(model):
        draw(_tensor(layer.weight))
        if zero_bias and layer.bias is not None:
            nn.init.zeros_(_tensor(layer.bias))


def _tensor(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise ArgumentError(f"a layer's weight must be a tensor, got {type(value).__name__}.")
    return value


def _shapes(layer: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in layer.parameters(False)]


OWN = "own"
SCHEMES: dict[str, Callable[[nn.Module], None]] = {
    "pytorch": pytorch,
    "glorot_uniform": glorot_uniform,
    "xavier_uniform": xavier_uniform,
    "kaiming_normal": kaiming_normal,
    "truncated_normal": truncated_normal,
}


def initialise(model: nn.Module, scheme: str) -> None:
    """Redraw all weights by the scheme of that name; "own" leaves them as the network's authors draw them."""
    if scheme == OWN:
        return
    if scheme not in SCHEMES:
        raise ArgumentError(f"init must be one of {', '.join((OWN, *SCHEMES))}, got {scheme!r}.")
    SCHEMES[scheme](model)
