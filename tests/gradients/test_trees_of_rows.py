"""Inputs, targets and outputs as dicts, tuples, lists and dataclasses: the same clipped sum as with tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpvision
from dpvision.errors import ArgumentError


@dataclass
class Output:
    """A model's own output class, as Hugging Face's models return."""

    logits: Tensor


class TwoInputs(nn.Module):
    """A model of an image and a vector."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3)
        self.vector = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)
        self.wrap = wrap

    def forward(self, pixel_values: Tensor, age: Tensor) -> Any:
        h = self.conv(pixel_values).mean((2, 3)) + self.vector(age)
        return self.wrap(self.head(torch.tanh(h)))


WRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda y: y, lambda out: out),
    "tuple": (lambda y: (y, y.detach()), lambda out: out[0]),
    "dict": (lambda y: {"logits": y}, lambda out: out["logits"]),
    "dataclass": (Output, lambda out: out.logits),
}


def rows(units: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(units, 1, 6, 6, generator=generator)
    return images, torch.randn(units, 5, generator=generator), torch.arange(units) % 3


@pytest.mark.parametrize("wrap", sorted(WRAPS))
@pytest.mark.parametrize("form", ["dict", "tuple", "list"])
def test_trees_of_rows_give_the_clipped_sum_of_single_units(form: str, wrap: str) -> None:
    images, ages, labels = rows()
    make, take = WRAPS[wrap]
    model = TwoInputs(make)

    def loss_fn(outputs: Any, targets: Any) -> Tensor:
        return F.cross_entropy(take(outputs), targets["labels"], reduction="none")

    trees = {"dict": {"pixel_values": images, "age": ages}, "tuple": (images, ages), "list": [images, ages]}
    found = dpvision.clipped_sum(
        model, loss_fn, trees[form], {"labels": labels}, clip_norm=0.1, microbatch_size=4, rows_per_unit=1
    )
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for unit in range(len(labels)):
        mine = slice(unit, unit + 1)
        loss = loss_fn(model(images[mine], ages[mine]), {"labels": labels[mine]}).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for total, gradient in zip(expected.values(), gradients, strict=True):
            total += gradient * min(1.0, 0.1 / float(norm))
    for name, total in expected.items():
        assert torch.allclose(found.gradients[name], total, atol=1e-5), name


def test_an_input_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(ArgumentError, match="must be tensors, or dicts, tuples or lists of tensors, got str"):
        dpvision.clipped_sum(nn.Linear(2, 1), lambda y, _: y[:, 0], {"input": "x"}, torch.zeros(2), clip_norm=1.0)


def test_inputs_with_different_numbers_of_rows_are_refused() -> None:
    images, ages, labels = rows()
    with pytest.raises(ArgumentError, match="same number of rows"):
        dpvision.clipped_sum(TwoInputs(lambda y: y), lambda y, _: y[:, 0], (images, ages[:3]), labels, clip_norm=1.0)
