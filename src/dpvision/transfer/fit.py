"""Foreign weights into a model: by name, whole, or not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dpvision.checks import ArgumentError
from dpvision.models.initialise import mean_var, seeded
from dpvision.transfer.trained import head_of

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def fit(model: nn.Module, tensors: Mapping[str, Tensor], *, rename: Mapping[str, str], head: bool = False) -> None:
    """Copy ``tensors`` into the model; its head keeps its own weights unless ``head``.

    ``rename`` maps prefixes of their names to ours; the longest that fits counts. Statistics of a BatchNorm that is a
    GroupNorm here are left out.

    Guarantee: every weight below the head comes from the file and none is left over or there twice; otherwise nothing
    is copied, and the error names all that is missing, unexpected, there twice or of another shape.
    """
    head_name = f"{head_of(model)}."
    wanted = {name: value for name, value in model.state_dict().items() if head or not name.startswith(head_name)}
    times = Counter(renamed(name, rename) for name in tensors)
    given = {renamed(name, rename): value for name, value in tensors.items()}
    given = {
        name: value
        for name, value in given.items()
        if (head or not name.startswith(head_name)) and not (name not in wanted and _is_statistic(name, wanted))
    }
    twice = [name for name in given if times[name] > 1]
    missing = [name for name in wanted if name not in given and not name.endswith(".num_batches_tracked")]
    unexpected = [name for name in given if name not in wanted]
    misshapen = [
        f"{name} ({_shape(given[name])} in the file, {_shape(value)} in the model)"
        for name, value in wanted.items()
        if name in given and given[name].shape != value.shape
    ]
    if missing or unexpected or twice or misshapen:
        parts = (
            ("missing", missing),
            ("unexpected", unexpected),
            ("there twice, once renamed", twice),
            ("of another shape", misshapen),
        )
        found = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)
        raise ArgumentError(f"the weights don't fit the model; {found}. Choose their own model, or rename.")
    own = model.state_dict()
    with torch.no_grad():
        for name, value in given.items():
            own[name].copy_(value)


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """The name with its longest known prefix replaced."""
    for prefix in sorted(rename, key=len, reverse=True):
        if name.startswith(prefix):
            return rename[prefix] + name[len(prefix) :]
    return name


def draw_mean_var(
    model: nn.Module, like: nn.Module, tensors: Mapping[str, Tensor], *, rename: Mapping[str, str], seed: int
) -> None:
    """Draw every layer with the mean and variance of the same layer in ``tensors``, which ``like`` is given whole."""
    fit(like, tensors, rename=rename, head=True)
    with seeded(seed):
        mean_var(model, like)


def _is_statistic(name: str, wanted: Mapping[str, Tensor]) -> bool:
    """Whether this is a running statistic of a norm that the model has with weights only."""
    owner, _, own = name.rpartition(".")
    return own in _STATISTICS and f"{owner}.weight" in wanted


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"
