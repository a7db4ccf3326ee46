"""What the tests of the gradient engine share: losses, comparisons, and a draw made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision.privacy.sampling import Sampling
from dpvision.privacy.values import Microbatch


def wavy_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Smooth, one per row, different for every row and output, for outputs of any shape."""
    flat = outputs.reshape(targets.shape[0], -1)
    slope = torch.linspace(0.3, 1.7, flat.shape[1], dtype=flat.dtype)
    return (torch.sin(flat * slope) * (1 + targets[:, None])).sum(1)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def total_norm(gradients: Mapping[str, Tensor]) -> float:
    return float(torch.sqrt(sum((g.double().square().sum() for g in gradients.values()), torch.zeros(()).double())))


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert list(a) == list(b)
    assert all(a[name].shape == b[name].shape for name in a)
    return total_norm({name: a[name].double() - b[name].double() for name in a})


def relative_error(found: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> float:
    """Relative to the sum, or to 1e-4 where the units' contributions, all of order one, happen to cancel."""
    return distance(found, true) / max(total_norm(true), 1e-4)


@dataclass(frozen=True)
class PaddedDraw:
    """A draw in fixed-shape micro-batches, the last one padded with units of weight zero, as the trainer makes them."""

    inputs: Tensor
    targets: Tensor
    rows_per_unit: int = 1
    padding: float = 0.0

    @property
    def sampling(self) -> Sampling:
        return Sampling("poisson", 0.5)

    def microbatches(self, units: int) -> Iterator[Microbatch]:
        size = units * self.rows_per_unit
        for first in range(0, self.inputs.shape[0], size):
            inputs, targets = self.inputs[first : first + size], self.targets[first : first + size]
            missing = size - inputs.shape[0]
            weights = torch.full((size,), 1 / self.rows_per_unit)
            weights[size - missing :] = 0.0
            yield Microbatch(
                torch.cat([inputs, inputs.new_full((missing, *inputs.shape[1:]), self.padding)]),
                torch.cat([targets, targets.new_zeros((missing, *targets.shape[1:]))]),
                weights.view(units, self.rows_per_unit),
            )


def traces_of(model: nn.Module) -> dict[str, object]:
    """Everything that a step might leave in a model."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "identity": [id(p) for p in model.parameters()],
        "buffers": [id(b) for b in model.buffers()],
        "grad": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "versions": [t._version for t in (*model.parameters(), *model.buffers())],
        "training": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._backward_pre_hooks))
            for m in model.modules()
        ],
        "tensor hooks": [p._backward_hooks for p in model.parameters()],
        "attributes of parameters": [sorted(vars(p)) for p in model.parameters()],
    }


def assert_same_traces(before: dict[str, object], after: dict[str, object]) -> None:
    assert before.keys() == after.keys()
    for key, value in before.items():
        if key in {"state", "grad"}:
            torch.testing.assert_close(after[key], value, rtol=0, atol=0, equal_nan=True)
        else:
            assert after[key] == value, key


class Root(nn.Module):
    """A layer, then a square root: finite outputs, but an infinite gradient at zero, in the first layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).abs().sqrt())
