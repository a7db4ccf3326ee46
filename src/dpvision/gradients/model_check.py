"""Is this model, with this loss, fit for private training? Behaviour is checked, not lists of types.

A few rows go through the model itself; it is left exactly as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients.ownership import module_label, parameter_owners, trainable_parameters
from dpvision.gradients.per_unit import LossFunction, row_losses, unit_gradients
from dpvision.gradients.plan import find_plan
from dpvision.gradients.refusals import BY_ROW_LOSS, LOSS, listed
from dpvision.gradients.separability import find_mixing
from dpvision.gradients.synthetic_batch import model_restored, repeat_units, repeatable_randomness
from dpvision.privacy.values import Microbatch

_MOST_UNITS = 4
_BY_ROW = "Replace it by a module that treats each row by itself, such as GroupNorm for BatchNorm."


@final
@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing about a model: where, what, and what to do. A fatal one makes a privacy claim false."""

    module: str
    problem: str
    remedy: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.module}: {self.problem}. {self.remedy}"


def check_model(
    model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor, *, rows_per_unit: int = 1
) -> list[Finding]:
    """Everything found at once: mixing units, moving buffers, wrong gradients, unsplit losses, idle parameters.

    Guarantee: without a fatal finding, the engine's gradients of these very rows are those of single units.
    """
    rows = _rows(inputs, targets, rows_per_unit)
    idle = list(_idle_parameters(model))
    try:
        with torch.no_grad(), model_restored(model) as moved, repeatable_randomness(inputs.device):
            state = torch.get_rng_state()
            losses = row_losses(model, loss_fn, rows)
            drew = not torch.equal(state, torch.get_rng_state())
    except ArgumentError as error:
        return [*idle, Finding(module=LOSS, problem="does not split into rows", remedy=str(error), fatal=True)]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
        return [*idle, _fatal("the model", f"can't be run on these rows: {_parts(error)[0]}", "Check their shape.")]
    findings = [*idle, *_moving(model, moved)]
    if not bool(torch.isfinite(losses).all()):
        problem = "gives losses that are not finite, so that nothing can be checked"
        return [*findings, _fatal("the model", problem, "Check its weights and inputs.")]
    mixing = list(_mixing(model, loss_fn, rows))
    findings += mixing
    if not mixing and trainable_parameters(model):
        findings += _gradients(model, loss_fn, rows, drew=drew)
        findings += _unused(model, loss_fn, rows)
    return findings


def require_private_ready(
    model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor, *, rows_per_unit: int = 1
) -> list[Finding]:
    """The findings that are not fatal. Raises PrivacyError naming all that are."""
    findings = check_model(model, loss_fn, inputs, targets, rows_per_unit=rows_per_unit)
    fatal = [str(finding) for finding in findings if finding.fatal]
    if fatal:
        raise PrivacyError(f"the model is not ready for private training: {' '.join(fatal)}")
    return findings


def _rows(inputs: Tensor, targets: Tensor, rows_per_unit: int) -> Microbatch:
    """The first few units; two at least, because one has nobody to notice."""
    units = inputs.shape[0] // rows_per_unit if inputs.dim() else 0
    if not units or targets.shape[:1] != inputs.shape[:1]:
        raise ArgumentError(
            f"preflight needs the rows of at least one unit (rows_per_unit={rows_per_unit}) and as many targets, got "
            f"{tuple(inputs.shape)} and {tuple(targets.shape)}."
        )
    weights = torch.ones(units, rows_per_unit, device=inputs.device)
    given = Microbatch(inputs[: units * rows_per_unit], targets[: units * rows_per_unit], weights)
    return repeat_units(given, units=max(2, min(units, _MOST_UNITS)))


def _idle_parameters(model: nn.Module) -> Iterator[Finding]:
    if not trainable_parameters(model):
        yield _fatal("the model", "has no trainable parameter", "Set requires_grad on those that should learn.")
    for name, module in model.named_modules():
        frozen = [own for own, parameter in module.named_parameters(recurse=False) if not parameter.requires_grad]
        if frozen:
            problem = f"frozen, stays as it is: {', '.join(frozen)}"
            yield Finding(module=module_label(name, module), problem=problem, remedy="Nothing, if meant.", fatal=False)


def _moving(model: nn.Module, moved: list[str]) -> Iterator[Finding]:
    modules = dict(model.named_modules())
    by_module: dict[str, list[str]] = {}
    for name in moved:
        owner, _, own = name.rpartition(".")
        by_module.setdefault(owner, []).append(own)
    for owner, names in by_module.items():
        problem = f"a forward pass moves {', '.join(names)}, which would be released without noise"
        remedy = "Use a module without running statistics, or put it into evaluation mode."
        yield _fatal(module_label(owner, modules[owner]), problem, remedy)


def _mixing(model: nn.Module, loss_fn: LossFunction, rows: Microbatch) -> Iterator[Finding]:
    place = find_mixing(model, loss_fn, rows)
    if place is None:
        return
    if place == LOSS:
        problem = "mixes units: one unit's loss depends on another unit's row, so clipping bounds nothing"
        yield _fatal(LOSS, problem, BY_ROW_LOSS)
        return
    named = [module_label(name, module) for name, module in model.named_modules() if _uses_batch_statistics(module)]
    for label in dict.fromkeys([place, *named]):
        yield _fatal(label, "mixes units: one unit's output depends on another unit's input", _BY_ROW)


def _uses_batch_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _gradients(model: nn.Module, loss_fn: LossFunction, rows: Microbatch, *, drew: bool) -> Iterator[Finding]:
    """Compare every parameter's gradient with that of a unit by itself, in float64 where the model allows it."""
    two = repeat_units(rows, units=2)
    double, double_rows = _float64_copy(model, loss_fn, two)
    try:
        found = find_plan(double, loss_fn, double_rows, evaluate=drew)
        if drew:
            # Drawing inside a module that must be run again shows only when it draws.
            with model_restored(model), repeatable_randomness(rows.inputs.device):
                unit_gradients(
                    model, loss_fn, two, parameter_owners(model, found.plan.overrides), found.plan.axes_by_module
                )
    except (PrivacyError, RuntimeError) as error:
        yield _fatal("the model", *_parts(error))
        return
    owners = dict(_owners(model))
    by_owner: dict[str, list[str]] = {}
    for name in found.wrong:
        by_owner.setdefault(owners[name], []).append(name)
    for owner, names in by_owner.items():
        problem = f"the gradient of {listed(names)} is not that of a unit by itself"
        yield _fatal(owner, problem, "Units mix in a way that only the gradient shows; use a plain module.")


def _unused(model: nn.Module, loss_fn: LossFunction, rows: Microbatch) -> Iterator[Finding]:
    parameters = trainable_parameters(model)
    with torch.enable_grad(), model_restored(model), repeatable_randomness(rows.inputs.device):
        losses = row_losses(model, loss_fn, rows)
    if losses.requires_grad:
        gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
        used = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    else:
        used = set[str]()
    owners = dict(_owners(model))
    for name in parameters:
        if name not in used:
            problem = f"the loss does not depend on {name}: it gets a zero gradient and learns only noise"
            yield Finding(module=owners[name], problem=problem, remedy="Use it, freeze it or remove it.", fatal=False)


def _float64_copy(model: nn.Module, loss_fn: LossFunction, rows: Microbatch) -> tuple[nn.Module, Microbatch]:
    """A copy in float64 with its rows, or the model itself where it can't be copied or does not run in float64."""
    doubled = Microbatch(_doubled(rows.inputs), _doubled(rows.targets), rows.row_weights_UR)
    try:
        double = copy.deepcopy(model).double()
        with torch.no_grad(), repeatable_randomness(rows.inputs.device), model_restored(double):
            row_losses(double, loss_fn, doubled)
    except (RuntimeError, TypeError, NotImplementedError):
        return model, rows
    return double, doubled


def _doubled(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _owners(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Parameter names and how messages call the modules that own them."""
    for name, module in model.named_modules():
        for own, _ in module.named_parameters(recurse=False):
            yield (f"{name}.{own}" if name else own), module_label(name, module)


def _fatal(module: str, problem: str, remedy: str) -> Finding:
    return Finding(module=module, problem=problem, remedy=remedy, fatal=True)


def _parts(error: Exception) -> tuple[str, str]:
    """Problem and remedy of an error, each on one line."""
    problem, _, remedy = " ".join(str(error).split()).partition(". ")
    return problem, remedy or "Train it without privacy once to see the cause."
