"""Activations of a network on given images: their distribution at each join, and their norm at each layer.

The figures are those of the ScaleNorm papers (histograms along V_F, V_R and V_A) and of Making the shoe fit (the L2
norm of the first convolution's activations during training).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpvision.analyze.joins import Join, Joins
from dpvision.errors import ArgumentError, Problems

BATCH = 64
_UNINTERESTING = (nn.Identity, nn.Flatten, nn.Dropout)


@final
@dataclass(frozen=True, kw_only=True)
class Distribution:
    """The values of one activation over all images, channels and positions.

    Attributes:
        join: where it was measured.
        path: one of ``joins.PATHS``.
        mean: mean of all values.
        std: their standard deviation, not corrected for the sample's size.
        skew: their third standardised moment; 0 for symmetric values and for constant ones.
        norm: L2 norm of an image's activation, averaged over images.
        edges: bounds of the histogram's bins, one more than ``counts``.
        counts: values in each bin.
    """

    join: Join
    path: str
    mean: float
    std: float
    skew: float
    norm: float
    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the histogram is last."""
        return {
            "block": self.join.name,
            "kind": self.join.kind,
            "path": self.path,
            "mean": self.mean,
            "std": self.std,
            "skew": self.skew,
            "norm": self.norm,
            "edges": list(self.edges),
            "counts": list(self.counts),
        }


@final
@dataclass
class _Moments:
    """Sums over values, in float64, from which mean, deviation and skew follow."""

    shift: float | None = None
    count: int = 0
    rows: int = 0
    powers: NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    norms: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, values: Tensor) -> None:
        exact = values.double()
        if self.shift is None:
            self.shift = float(exact.mean())  # powers of centred values do not cancel
        centred = exact - self.shift
        self.powers += [float(centred.sum()), float(centred.square().sum()), float(centred.pow(3).sum())]
        self.count += values.numel()
        self.rows += len(values)
        self.norms += float(exact.flatten(1).norm(dim=1).sum())
        self.low, self.high = min(self.low, float(exact.min())), max(self.high, float(exact.max()))

    def summary(self) -> dict[str, float]:
        first, second, third = self.powers / self.count
        variance = max(0.0, second - first**2)
        central = third - 3 * first * second + 2 * first**3
        skew = central / variance**1.5 if variance > 0 else 0.0
        mean = float((self.shift or 0.0) + first)
        return {"mean": mean, "std": float(variance**0.5), "skew": float(skew), "norm": self.norms / self.rows}


def activation_distributions(model: nn.Module, inputs: Tensor, *, bins: int = 80) -> tuple[Distribution, ...]:
    """Measure the activations along both paths of every residual block and skip, and after they join.

    Args:
        model: the network; it runs in evaluation mode.
        inputs: normalised images (N, C, H, W). What is returned is a function of them, without noise.
        bins: bins of the histograms, at least 1; all paths of a join share their edges.

    Returns:
        One distribution for each join and path, in the order of the network.

    Raises:
        ArgumentError: there are no images, the network can't be traced, or no paths meet in it.
    """
    problems = Problems()
    problems.count("bins", bins)
    problems.raise_if_any()
    if not len(inputs):
        raise ArgumentError("activations need at least one image, got none.")
    joins = Joins(model, inputs[:1])
    moments: dict[tuple[str, str], _Moments] = {}

    def measure(join: Join, path: str, value: Tensor) -> None:
        moments.setdefault((join.name, path), _Moments()).add(value)

    for batch in inputs.split(BATCH):
        joins.observe(batch, measure)
    ranges = {name: _range(moments, name) for name, _ in moments}
    counts = {key: np.zeros(bins, dtype=np.int64) for key in moments}

    def sort(join: Join, path: str, value: Tensor) -> None:
        found, _ = np.histogram(value.double().numpy(), bins=bins, range=ranges[join.name])
        counts[join.name, path] += found

    for batch in inputs.split(BATCH):
        joins.observe(batch, sort)
    return tuple(
        Distribution(
            join=join,
            path=path,
            edges=tuple(np.linspace(*ranges[join.name], bins + 1).tolist()),
            counts=tuple(counts[join.name, path].tolist()),
            **moments[join.name, path].summary(),
        )
        for join in joins.found
        for path in join.nodes
    )


def _range(moments: dict[tuple[str, str], _Moments], name: str) -> tuple[float, float]:
    own = [each for (join, _), each in moments.items() if join == name]
    low, high = min(each.low for each in own), max(each.high for each in own)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def activation_norms(model: nn.Module, inputs: Tensor) -> dict[str, float]:
    """Measure the L2 norm of an image's activation after each layer, averaged over images.

    Args:
        model: the network; it runs in evaluation mode.
        inputs: normalised images (N, C, H, W). What is returned is a function of them, without noise.

    Returns:
        The mean norm by name of the layer, in the order of their first calls. A layer that is called several times
        has the mean over its calls.

    Raises:
        ArgumentError: there are no images.
    """
    if not len(inputs):
        raise ArgumentError("activations need at least one image, got none.")
    sums: dict[str, list[float]] = {}
    with _evaluating(model), _observed(model, sums), torch.no_grad():
        for batch in inputs.split(BATCH):
            model(batch)
    return {name: sum(norms) / len(norms) for name, norms in sums.items()}


def first_activation(model: nn.Module, norms: dict[str, float]) -> str | None:
    """Return the layer whose norm Making the shoe fit plots: the activation after the first convolution.

    Args:
        model: the network.
        norms: what ``activation_norms`` found for it.

    Returns:
        The name of the first layer without parameters after the first convolution that changes its values (not a
        pool), else of the convolution; None without a convolution.
    """
    names, modules = list(norms), dict(model.named_modules())
    convolutions = [i for i, name in enumerate(names) if isinstance(modules.get(name), nn.Conv2d)]
    if not convolutions:
        return None
    first = convolutions[0]
    for name in names[first + 1 :]:
        module = modules[name]
        if any(True for _ in module.parameters()):
            if isinstance(module, nn.Conv2d | nn.Linear):
                break
            continue  # a norm between convolution and activation
        if "Pool" not in type(module).__name__:
            return name
    return names[first]


@contextmanager
def _observed(model: nn.Module, sums: dict[str, list[float]]) -> Iterator[None]:
    """Record the norms of what every layer without children returns."""

    def recorder(name: str) -> Any:
        def record(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim >= 2:
                sums.setdefault(name, []).extend(output.double().flatten(1).norm(dim=1).tolist())

        return record

    layers = [
        (name, module)
        for name, module in model.named_modules()
        if name and not any(module.children()) and not isinstance(module, _UNINTERESTING)
    ]
    handles = [module.register_forward_hook(recorder(name)) for name, module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode while the block runs."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
