"""Activations by name. None works in place, because per-unit gradients need what an in-place layer overwrites."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from dpvision.checks import ArgumentError


@final
class TemperedSigmoid(nn.Module):
    """``scale · sigmoid(temperature · x) − offset``; (2, 2, 1) is tanh, (1, 1, 0) the logistic function.

    Bounded activations keep per-unit gradients small, so that clipping takes less of them (Papernot et al. 2021).
    """

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        """Apply it elementwise."""
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset

    def extra_repr(self) -> str:
        """The three constants."""
        return f"{self.scale}, {self.temperature}, {self.offset}"


@final
class UnitVariance(nn.Module):
    """An activation times the constant that gives it unit variance on standard normal input (NF networks).

    The mean of the output is not zero; the standardised filters that follow take it away.
    """

    def __init__(self, function: nn.Module, factor: float) -> None:
        super().__init__()
        self.function, self.factor = function, factor

    def forward(self, x: Tensor) -> Tensor:
        """Apply it elementwise."""
        return self.function(x) * self.factor


_MAKERS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "mish": nn.Mish,
    "selu": nn.SELU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "tempered_sigmoid": TemperedSigmoid,
    # The constants of the NF papers; GELU is JAX's default tanh approximation.
    "nf_relu": lambda: UnitVariance(nn.ReLU(), 1.7139588594436646),
    "nf_gelu": lambda: UnitVariance(nn.GELU(approximate="tanh"), 1.7015043497085571),
    "none": nn.Identity,
}
ACTIVATIONS: tuple[str, ...] = tuple(_MAKERS)
_TEMPERED = re.compile(r"tempered_sigmoid\(([^,()]+),([^,()]+),([^,()]+)\)")


def activation(name: str) -> nn.Module:
    """An activation by name; ``tempered_sigmoid(scale, temperature, offset)`` takes its constants in brackets."""
    if name in _MAKERS:
        return _MAKERS[name]()
    match = _TEMPERED.fullmatch(name.replace(" ", "")) if isinstance(name, str) else None
    try:
        constants = [float(text) for text in match.groups()] if match else None
    except ValueError:
        constants = None
    if constants is None:
        raise ArgumentError(
            f"activation must be one of {', '.join(ACTIVATIONS)} or tempered_sigmoid(scale,temperature,offset), "
            f"got {name!r}."
        )
    return TemperedSigmoid(*constants)
