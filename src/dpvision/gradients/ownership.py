"""Which module's calls give which parameter's per-unit gradient.

Each module owns the parameters registered on itself. Where that fails for a model (a parameter is used outside of its
module, the rows are not in the first dimension), ``OwnershipOverrides`` assign the parameter to a module above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from torch import nn

from dpvision.gradients.rules import Rule, rule_for


@final
@dataclass(frozen=True)
class OwnershipOverrides:
    """Exceptions from "each module owns its own parameters", for one model.

    Attributes:
        moved: from a parameter's name to the name of the module above that owns it completely.
        looped: names of modules that must be run one unit at a time.
    """

    moved: Mapping[str, str] = field(default_factory=dict)
    looped: frozenset[str] = frozenset()


@final
@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """A parameter and the names under which its owner reaches it (several if it is tied)."""

    parameter: nn.Parameter
    names: tuple[str, ...]


@final
@dataclass(frozen=True, eq=False)
class ParameterOwner:
    """A module whose calls are captured, and the parameters whose gradients are computed from them.

    Attributes:
        name: the module's qualified name; empty for the model itself.
        module: the module.
        parameters: what it owns.
        rule: the rule of its layer type, or None if only recomputing the module is safe.
        looped: whether the module is recomputed one unit at a time.
    """

    name: str
    module: nn.Module
    parameters: tuple[OwnedParameter, ...]
    rule: Rule | None
    looped: bool

    @property
    def label(self) -> str:
        """How messages call the module."""
        return module_label(self.name, self.module)


def module_label(name: str, module: nn.Module) -> str:
    """Return how messages call a module: its qualified name and its type."""
    return f"{name or 'the model itself'} ({type(module).__name__})"


def parameter_owners(model: nn.Module, overrides: OwnershipOverrides) -> tuple[ParameterOwner, ...]:
    """Return every module that owns trainable parameters, in the order of ``named_modules``.

    Guarantee: each trainable parameter is owned wherever it is registered, or by exactly one module above.
    """
    names = {parameter: name for name, parameter in trainable_parameters(model).items()}
    owners: list[ParameterOwner] = []
    for name, module in model.named_modules():
        own = _names_by_parameter(module, recurse=False)
        owned = [OwnedParameter(p, aliases) for p, aliases in own.items() if names[p] not in overrides.moved]
        moved = [parameter for parameter, home in overrides.moved.items() if home == name]
        if moved:
            below = _names_by_parameter(module, recurse=True)
            owned += [OwnedParameter(p, aliases) for p, aliases in below.items() if names[p] in moved]
        if owned:
            rule = None if moved else rule_for(module)
            owners.append(ParameterOwner(name, module, tuple(owned), rule, name in overrides.looped))
    return tuple(owners)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name, shared ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_places(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every place that holds a parameter: tied parameters once for each place, shared modules only once.

    These are the names that ``functional_call`` accepts safely with ``tie_weights=False``. Given one place under two
    names, it would put its own tensor back into the model instead of the parameter.
    """
    for prefix, part in module.named_modules() if recurse else [("", module)]:
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield (f"{prefix}.{name}" if prefix else name), parameter


def _names_by_parameter(module: nn.Module, *, recurse: bool) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return all names of each trainable parameter."""
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in parameter_places(module, recurse=recurse):
        if parameter.requires_grad:
            names[parameter] = (*names.get(parameter, ()), name)
    return names
