"""Which rule belongs to which layer: by exact type, so that an overridden forward never meets its parent's rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from torch import Tensor, nn

from dpvision.gradients.layer_gradient import LayerGradient


@final
@dataclass(frozen=True)
class LayerCall:
    """One call of a layer that has a rule. Rows of ``x`` and ``dy`` come unit by unit.

    ``per_row`` has the gradients of a layer that takes its parameters once for each row, ``y`` the output of a layer
    that says ``keeps_output``.
    """

    module: nn.Module
    x: Tensor
    dy: Tensor
    units: int
    wanted: frozenset[str]
    per_row: Mapping[str, Tensor] = field(default_factory=dict)
    y: Tensor | None = None


Rule = Callable[[LayerCall], dict[str, LayerGradient]]


@final
@dataclass(frozen=True)
class _Entry:
    rule: Rule
    parameters: frozenset[str]
    applies: Callable[[nn.Module], bool]


_ENTRIES: dict[type[nn.Module], _Entry] = {}


def register(
    *types: type[nn.Module],
    rule: Rule,
    parameters: tuple[str, ...] = ("weight", "bias"),
    applies: Callable[[nn.Module], bool] = lambda _: True,
) -> None:
    """Make ``rule`` answer for layers of exactly these types whose only parameters are ``parameters``."""
    for layer in types:
        _ENTRIES[layer] = _Entry(rule, frozenset(parameters), applies)


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of this very layer, or ``None`` where only the fallback is safe."""
    entry = _ENTRIES.get(type(module))
    if entry is None or "forward" in vars(module):
        return None
    # Legacy weight_norm and its kin keep the type but own other parameters and write a computed weight.
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if not own <= entry.parameters or any(True for _ in module.children()) or _has_shadowed(module, entry.parameters):
        return None
    return entry.rule if entry.applies(module) else None


def _has_shadowed(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether one of the rule's parameters is not a registered parameter but some tensor put in its place."""
    return any(name not in module._parameters and getattr(module, name, None) is not None for name in names)
