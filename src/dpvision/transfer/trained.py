"""Which parameters learn: the head, the last stages, or all."""

from __future__ import annotations

from typing import Literal

from torch import nn

from dpvision.checks import ArgumentError

Trained = Literal["head", "last", "all"]


def head_of(model: nn.Module) -> str:
    """The name of the module that owns the model's last parameter: what gives the scores."""
    names = [name for name, _ in model.named_parameters()]
    if not names or "." not in names[-1]:
        raise ArgumentError("the model has no last layer with parameters of its own, so there is no head to replace.")
    return names[-1].rpartition(".")[0]


def stages_of(model: nn.Module) -> list[str]:
    """Names of the model's stages in their order, the head last.

    A stage is a child of the model that has parameters. A child that is itself a chain of blocks (a Sequential whose
    parts have parts of their own) is as many stages as it has blocks.
    """
    found: list[str] = []
    for name, child in model.named_children():
        parts = list(child.named_children()) if isinstance(child, (nn.Sequential, nn.ModuleList)) else []
        blocks = any(True for _, part in parts for _ in part.children())
        names = [f"{name}.{part}" for part, _ in parts] if blocks else [name]
        found += [stage for stage in names if any(True for _ in model.get_submodule(stage).parameters())]
    return found


def trained_names(model: nn.Module, trained: Trained, *, stages: int | None = None) -> frozenset[str]:
    """Names of the parameters that learn: of the ``head``, of the ``last`` so many ``stages``, or ``all``."""
    names = [name for name, _ in model.named_parameters()]
    if trained == "all":
        return frozenset(names)
    owners = [head_of(model)]
    if trained == "last":
        known = stages_of(model)
        if stages is None or stages > len(known):
            raise ArgumentError(f"stages must be 1 to {len(known)} for this model, got {stages}.")
        owners = known[-stages:]
    return frozenset(name for name in names if any(name.startswith(f"{owner}.") for owner in owners))
