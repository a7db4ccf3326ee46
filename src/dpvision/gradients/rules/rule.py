"""Which rule belongs to which layer, and what a rule is given.

A rule turns one call of a layer (input, output gradient) into per-unit gradients of its parameters. Rules are looked up
by exact type, so that an overridden forward never gets its parent's rule; a layer without one is recomputed per unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, final

from torch import Tensor, nn

from dpvision.gradients.layer_gradient import LayerGradient

M = TypeVar("M", bound=nn.Module)


@final
@dataclass(frozen=True)
class LayerCall:
    """One call of a layer that has a rule. Rows of ``x`` and ``dy`` are ordered by unit.

    Attributes:
        module: the layer.
        x: its input, rows first.
        dy: the loss's gradient at its output.
        units: number of units U; each has ``x.shape[0] // units`` rows.
        wanted: names of the parameters whose gradients are wanted.
        per_row: the gradients of a layer that takes its parameters once for each row.
        y: the output of a layer with ``keeps_output``.
    """

    module: nn.Module
    x: Tensor
    dy: Tensor
    units: int
    wanted: frozenset[str]
    per_row: Mapping[str, Tensor] = field(default_factory=dict)
    y: Tensor | None = None

    def layer(self, kind: type[M]) -> M:
        """Return the module as the type that the rule is for."""
        if not isinstance(self.module, kind):
            raise TypeError(f"this rule is for {kind.__name__}, got {type(self.module).__name__}")
        return self.module

    def only_wanted(self, parts: Mapping[str, Callable[[], LayerGradient]]) -> dict[str, LayerGradient]:
        """Compute the wanted ones of some parameters' gradients."""
        return {name: part() for name, part in parts.items() if name in self.wanted}


Rule = Callable[[LayerCall], dict[str, LayerGradient]]
"""From a call to the layer gradients of its wanted parameters, by name."""


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
    """Make ``rule`` responsible for layers of exactly these types.

    Args:
        types: the layer types.
        rule: the rule.
        parameters: all parameters that such a layer may own; with another one it gets no rule.
        applies: a further condition on the layer's settings.
    """
    for layer in types:
        _ENTRIES[layer] = _Entry(rule, frozenset(parameters), applies)


def rule_for(module: nn.Module) -> Rule | None:
    """Return the rule of this layer, or None where only recomputing the layer per unit is safe."""
    entry = _ENTRIES.get(type(module))
    if entry is None or "forward" in vars(module):
        return None
    # Legacy weight_norm and similar ones keep the type but own other parameters and write a computed weight.
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if not own <= entry.parameters or any(True for _ in module.children()) or _has_shadowed(module, entry.parameters):
        return None
    return entry.rule if entry.applies(module) else None


def _has_shadowed(module: nn.Module, names: frozenset[str]) -> bool:
    """Return whether one of the rule's parameters is not registered but replaced by some tensor."""
    return any(name not in module._parameters and getattr(module, name, None) is not None for name in names)
