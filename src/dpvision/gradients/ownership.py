"""Which module answers for which parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from torch import nn

from dpvision.gradients.rules import Rule, rule_for


@final
@dataclass(frozen=True)
class OwnershipOverrides:
    """Where the usual division of work, each module for its own parameters, does not hold for a model.

    ``moved`` gives a parameter's name and the module above its owners that answers for it wholly; ``looped`` names
    modules that must be run one unit at a time.
    """

    moved: Mapping[str, str] = field(default_factory=dict)
    looped: frozenset[str] = frozenset()


@final
@dataclass(frozen=True, eq=False)
class Target:
    """A parameter and the names under which the module that answers for it reaches it."""

    parameter: nn.Parameter
    names: tuple[str, ...]


@final
@dataclass(frozen=True, eq=False)
class ParameterOwner:
    """A module whose calls are captured, and the parameters whose gradients come out of them."""

    name: str
    module: nn.Module
    targets: tuple[Target, ...]
    rule: Rule | None
    looped: bool

    @property
    def label(self) -> str:
        """How messages call the module."""
        return module_label(self.name, self.module)


def module_label(name: str, module: nn.Module) -> str:
    """How messages call a module."""
    return f"{name or 'the model itself'} ({type(module).__name__})"


def parameter_owners(model: nn.Module, overrides: OwnershipOverrides) -> tuple[ParameterOwner, ...]:
    """Every module answers for the trainable parameters it owns itself, but for the overrides."""
    names = {parameter: name for name, parameter in trainable_parameters(model).items()}
    owners: list[ParameterOwner] = []
    for name, module in model.named_modules():
        own = _names_by_parameter(module, recurse=False)
        targets = [Target(p, aliases) for p, aliases in own.items() if names[p] not in overrides.moved]
        whole = [parameter for parameter, home in overrides.moved.items() if home == name]
        if whole:
            below = _names_by_parameter(module, recurse=True)
            targets += [Target(p, aliases) for p, aliases in below.items() if names[p] in whole]
        if targets:
            rule = None if whole else rule_for(module)
            owners.append(ParameterOwner(name, module, tuple(targets), rule, name in overrides.looped))
    return tuple(owners)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that training moves, by name, shared ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_places(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Every place that holds a parameter, once: tied parameters appear for each place, shared modules only once.

    These are the names that ``functional_call`` can safely be given with ``tie_weights=False``. Told of one place under
    two names, it would put its own tensor back into the model instead of the parameter.
    """
    for prefix, part in module.named_modules() if recurse else [("", module)]:
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield (f"{prefix}.{name}" if prefix else name), parameter


def _names_by_parameter(module: nn.Module, *, recurse: bool) -> dict[nn.Parameter, tuple[str, ...]]:
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in parameter_places(module, recurse=recurse):
        if parameter.requires_grad:
            names[parameter] = (*names.get(parameter, ()), name)
    return names
