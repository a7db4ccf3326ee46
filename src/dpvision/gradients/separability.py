"""Does a unit's gradient depend on that unit alone? Checks of a model's behaviour, not of its module types.

The clipped sum is only as private as this claim. The checks run a few synthetic units through the model and leave it
exactly as it was. A forward pass must not change buffers or parameters (``try_forward``); one unit's input must not
reach another unit's loss (``find_mixing``); and each unit's gradient must equal that of the unit alone in its batch
(``compare_with_single_units``). Each problem is a ``Finding`` that names the module. ``plan.plan_for`` raises them,
``plan.check_model`` reports them.

Shapes: U units, R rows per unit, N = U·R rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules import module as torch_modules
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from dpvision.errors import PrivacyError, some_of
from dpvision.gradients.devices import forked_generators, generator_states
from dpvision.gradients.layer_gradient import LayerGradient
from dpvision.gradients.ownership import module_label, parameter_places, trainable_parameters
from dpvision.gradients.per_unit import CapturedCall, LossFunction, UnitGradients, attributes_restored, row_losses
from dpvision.privacy.values import Microbatch, map_tensors

LossesOfRows = Callable[[Microbatch], Tensor]
LOSS: Final = "loss_fn"
MIXING_REMEDY: Final = "Replace it by a module that treats each row by itself, such as GroupNorm for BatchNorm."
# A mistake in the wiring is of order one. In float32, activations that flip at a kink alone make a few percent.
_TOLERANCE: Final = {torch.float64: 1e-7, torch.float32: 0.1}
# A gradient that is exactly zero has a norm of about this, because of what squares may lose by underflow.
_ZERO_NORM: Final = 1e-15


@final
@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about a model.

    Attributes:
        module: where: a module's label, "loss_fn" or "the model".
        problem: what is wrong or worth knowing, without a final full stop.
        remedy: what to do about it.
        fatal: whether it would make a privacy claim false.
    """

    module: str
    problem: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.module}: {self.problem}. {self.remedy}"


def refuse(findings: Iterable[Finding], *, saying: str = "") -> None:
    """Raise one ``PrivacyError`` that names all fatal findings, modules with the same problem together."""
    modules: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        if finding.fatal:
            modules.setdefault((finding.problem, finding.remedy), []).append(finding.module)
    if modules:
        texts = (f"{some_of(named, limit=4)}: {problem}. {remedy}" for (problem, remedy), named in modules.items())
        raise PrivacyError(f"{saying}{' '.join(texts)}")


def moving_state(model: nn.Module, moved: Iterable[str]) -> list[Finding]:
    """Return one finding for each module whose buffers or parameters a forward pass changed.

    Args:
        model: the model.
        moved: qualified names of the changed tensors.
    """
    modules = dict(model.named_modules())
    by_module: dict[str, list[str]] = {}
    for name in moved:
        owner, _, own = name.rpartition(".")
        by_module.setdefault(owner, []).append(own)
    return [
        Finding(
            module=module_label(owner, modules[owner]),
            problem=f"a forward pass moves {', '.join(names)}, which would be released without noise",
            remedy="Use GroupNorm instead of BatchNorm (dpvision.models.make_private_ready replaces it), or put the "
            "module into evaluation mode.",
        )
        for owner, names in by_module.items()
    ]


def mixing_units(model: nn.Module, place: str | None) -> list[Finding]:
    """Return the findings for a place that mixes units, as ``find_mixing`` names it; none for None."""
    if place is None:
        return []
    if place == LOSS:
        problem = "mixes units: one unit's loss depends on another unit's row, so clipping bounds nothing"
        remedy = "Return one loss per row, each from its own row alone: Dice of each image, not summed over the batch."
        return [Finding(module=LOSS, problem=problem, remedy=remedy)]
    named = [module_label(name, module) for name, module in model.named_modules() if uses_batch_statistics(module)]
    problem = "mixes units: one unit's output depends on another unit's input"
    return [Finding(module=label, problem=problem, remedy=MIXING_REMEDY) for label in dict.fromkeys([place, *named])]


def wrong_gradients(model: nn.Module, wrong: Iterable[str]) -> list[Finding]:
    """Return one finding for each module that owns parameters whose gradient is not that of a unit by itself."""
    modules = dict(model.named_modules())
    by_module: dict[str, list[str]] = {}
    for name in wrong:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    return [
        Finding(
            module=module_label(owner, modules[owner]),
            problem=f"the gradient of {some_of(names, limit=5)} is not that of a unit by itself",
            remedy="Units mix in a way that only the gradient shows, or the gradient depends on the size of the "
            "batch; use a plain module.",
        )
        for owner, names in by_module.items()
    ]


def other_gradients(model: nn.Module, names: Iterable[str]) -> list[Finding]:
    """Return one finding for each module with parameters whose gradient the proved graph does not give."""
    modules = dict(model.named_modules())
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    problem = "the gradient by the code is not that of its operations: a backward pass of its own can't be followed"
    remedy = "Use operations whose derivative torch knows, and detach() instead of writing without gradients."
    return [Finding(module=module_label(owner, modules[owner]), problem=problem, remedy=remedy) for owner in owners]


def unfit_parts(model: nn.Module) -> list[Finding]:
    """Return a finding for each kind of module or parameter that can't be traced or whose norms are not exact."""
    compiled = [name or "the model" for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if compiled:
        problem, remedy = (
            "is compiled by torch.jit, so its operations can't be followed",
            "Use the module it was made of.",
        )
        return [Finding(module=some_of(compiled, limit=3), problem=problem, remedy=remedy)]
    found: list[Finding] = []
    unknown = [name for name, tensor in model_state(model) if is_lazy(tensor)]
    if unknown:
        problem, remedy = f"{some_of(unknown, limit=3)} has no shape yet", "Call the model once on rows like yours."
        return [Finding(module="the model", problem=problem, remedy=remedy)]
    kinds = [name for name, tensor in model_state(model) if _has_own_code(tensor)]
    if kinds:
        problem = f"{some_of(kinds, limit=3)} is of a tensor type with code of its own, which can't be followed"
        remedy = "Use plain tensors and nn.Parameter."
        found.append(Finding(module="the model", problem=problem, remedy=remedy))
    parameters = trainable_parameters(model)
    wrong = [name for name, parameter in parameters.items() if parameter.dtype not in _TOLERANCE]
    if wrong:
        problem = f"{some_of(wrong, limit=3)} must be float32 or float64: norms in other types are not exact"
        remedy = "Call model.float(); split complex numbers into two real ones."
        found.append(Finding(module="the model", problem=problem, remedy=remedy))
    hooked = [name for name, parameter in parameters.items() if parameter_hooks(parameter)]
    if hooked:
        problem = f"{some_of(hooked, limit=3)} has a hook on its gradient, which per-unit gradients do not pass"
        remedy = "Remove the hook; change the loss instead."
        found.append(Finding(module="the model", problem=problem, remedy=remedy))
    return found


def _has_own_code(tensor: Tensor) -> bool:
    """Return whether operations on a tensor call methods of its type."""
    kind: Any = type(tensor)
    functions = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # pyright: ignore
    own = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return own not in functions or kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def outside_code() -> list[Finding]:
    """Return findings for code that would run between the operations of a step: hooks on all modules, and modes."""
    found: list[Finding] = []
    names = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    if any(getattr(torch_modules, f"_global_{name}", None) for name in names):
        problem = "there is a hook on the modules of every model, which would run inside of a private step"
        found.append(Finding(module="torch.nn", problem=problem, remedy="Remove it; use hooks on single modules."))
    if any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
        problem = "a TorchFunctionMode is active, which would change the operations of a private step"
        found.append(Finding(module="the model", problem=problem, remedy="Call dpvision outside of it."))
    return found


@contextmanager
def no_outside_code() -> Iterator[None]:
    """Let no mode of torch's dispatcher, such as a default device or a counter, come between operations."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def parameter_hooks(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the identities of the hooks on a parameter's gradient."""
    tables = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return tuple(id(hook) for table in tables if table for hook in table.values())


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm that normalises by the rows of a batch."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def synthetic_batch(microbatch: Microbatch, *, units: int) -> Microbatch:
    """Return synthetic units of the same shape, so that what a check finds does not depend on private images.

    Args:
        microbatch: rows whose shape, type and targets are taken.
        units: the number of synthetic units.

    Returns:
        Uniform noise where inputs are floating-point numbers, shuffled entries where they are indices.
    """
    rows = repeat_units(microbatch, units=units)
    generator = torch.Generator().manual_seed(0)
    inputs = map_tensors(lambda x: _noise_like(x, generator), rows.inputs)
    return Microbatch(inputs, rows.targets, rows.row_weights_UR)


def blind_batch(microbatch: Microbatch, *, units: int, classes: int) -> Microbatch:
    """Return synthetic units of the same shapes and types, in which nothing depends on any value of the rows.

    For code that is not ours: what it keeps of the rows that it is shown, in a list or in a closure, can then be no
    private value, and no trace can freeze one.

    Args:
        microbatch: rows whose shapes and types are taken.
        units: the number of synthetic units.
        classes: whole numbers are drawn below this.
    """
    rows = repeat_units(microbatch, units=units)
    generator = torch.Generator().manual_seed(0)

    def blind(x: Tensor) -> Tensor:
        if x.is_floating_point() or x.is_complex():
            return torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x)
        return torch.randint(classes, x.shape, generator=generator).to(x)

    return Microbatch(map_tensors(blind, rows.inputs), map_tensors(blind, rows.targets), rows.row_weights_UR)


def repeat_units(microbatch: Microbatch, *, units: int) -> Microbatch:
    """Return the first ``units`` units, from the beginning again where there are fewer; every row has weight."""
    rows_per_unit = microbatch.row_weights_UR.shape[1]
    order = torch.arange(units * rows_per_unit) % microbatch.rows
    weights = torch.full(
        (units, rows_per_unit), 1 / rows_per_unit, dtype=torch.float64, device=microbatch.row_weights_UR.device
    )
    return _selected(microbatch, order, weights)


def units_in_order(microbatch: Microbatch, order: Sequence[int]) -> Microbatch:
    """Return the units of a micro-batch in another order, or some of them several times."""
    rows_per_unit = microbatch.row_weights_UR.shape[1]
    rows = torch.tensor([unit * rows_per_unit + row for unit in order for row in range(rows_per_unit)])
    units = torch.tensor(order, device=microbatch.row_weights_UR.device)
    return _selected(microbatch, rows, microbatch.row_weights_UR[units])


def _selected(microbatch: Microbatch, rows: Any, weights: Tensor) -> Microbatch:
    """Return some rows, by an index or a slice."""
    if isinstance(rows, Tensor):
        rows = rows.to(microbatch.device)
    inputs, targets = (map_tensors(lambda x: x[rows], tree) for tree in (microbatch.inputs, microbatch.targets))
    return Microbatch(inputs, targets, weights)


def with_changed_unit(microbatch: Microbatch, unit: int) -> Microbatch:
    """Return the micro-batch with other inputs and other targets in one unit."""
    units, rows = microbatch.row_weights_UR.shape
    mine = slice(unit * rows, (unit + 1) * rows)

    def other_inputs(before: Tensor) -> Tensor:
        inputs = before.clone()
        if inputs.is_floating_point():
            inputs[mine] = _noise_like(inputs[mine], torch.Generator().manual_seed(units + unit)) * 2 - 1
        else:
            inputs[mine] = before[mine].flip(-1) if before.dim() > 1 else before.flip(0)[mine]
        return inputs

    def other_targets(before: Tensor) -> Tensor:
        targets = before.clone()
        # Classes 0 and 1 exist wherever there is anything to tell apart.
        theirs = before[mine]
        targets[mine] = 1 - theirs if theirs.is_floating_point() else (theirs == 0).to(theirs.dtype)
        return targets

    inputs, targets = map_tensors(other_inputs, microbatch.inputs), map_tensors(other_targets, microbatch.targets)
    return Microbatch(inputs, targets, microbatch.row_weights_UR)


def single_unit(microbatch: Microbatch, unit: int) -> Microbatch:
    """Return one unit alone in its batch."""
    rows = microbatch.row_weights_UR.shape[1]
    mine = slice(unit * rows, (unit + 1) * rows)
    return _selected(microbatch, mine, microbatch.row_weights_UR[unit : unit + 1])


def _noise_like(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.is_floating_point():
        return torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x)
    if x.dim() == 1:
        return x
    order = torch.randperm(x.shape[-1], generator=generator)
    return x[..., order.to(x.device)]


@contextmanager
def repeatable_randomness(device: torch.device, *, seed: int = 0) -> Iterator[None]:
    """Give every such block with the same seed the same random numbers; the generators outside are untouched."""
    with forked_generators(device, seed=seed):
        yield


@contextmanager
def evaluation_mode(model: nn.Module, *, when: bool = True) -> Iterator[None]:
    """Put all modules into evaluation mode inside the block, if ``when``; each module's own mode returns after it."""
    before = [(module, module.training) for module in model.modules()]
    try:
        if when:
            model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def model_restored(model: nn.Module) -> Iterator[list[str]]:
    """Restore everything that the model stores; afterwards the list names buffers and parameters that had changed."""
    moved: list[str] = []
    saved = [(name, tensor, tensor.detach().clone()) for name, tensor in model_state(model)]
    with attributes_restored(model):
        try:
            yield moved
        finally:
            now = dict(model_state(model))
            with torch.no_grad():
                for name, tensor, value in saved:
                    if now.get(name) is not tensor or not torch.equal(_bits(tensor), _bits(value)):
                        moved.append(name)
                        tensor.copy_(value)


def model_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield everything that a model stores from step to step, by name."""
    yield from model.named_buffers()
    yield from model.named_parameters()


def _bits(x: Tensor) -> Tensor:
    """View the bytes, so that NaN equals NaN; in one row, because a size of 1 leaves strides open."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


@final
@dataclass(frozen=True, eq=False)
class Trial:
    """What one forward pass showed.

    Attributes:
        losses: one loss per row.
        moved: names of buffers and parameters that the pass changed.
        draws_random: whether it drew random numbers.
    """

    losses: Tensor
    moved: list[str]
    draws_random: bool

    @property
    def is_finite(self) -> bool:
        """Whether all losses are finite; otherwise nothing can be compared."""
        return bool(torch.isfinite(self.losses).all())


def try_forward(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> Trial:
    """Run one forward pass without a gradient and without a trace in the model."""
    with torch.no_grad(), model_restored(model) as moved, repeatable_randomness(microbatch.device):
        states = generator_states(microbatch.device)
        losses = row_losses(model, loss_fn, microbatch)
        draws_random = not all(map(torch.equal, states, generator_states(microbatch.device)))
    return Trial(losses, moved, draws_random)


def find_mixing(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> str | None:
    """Look for a way from one unit's input or target to another unit's loss.

    Args:
        model: the model.
        loss_fn: one loss per row.
        microbatch: at least two units.

    Returns:
        The label of the innermost module that mixes, or ``LOSS``; None if nothing was found. Looked for twice: with
        the model's weights, and with others near them, because a gain that is still zero hides what will mix after
        the first step.
    """
    units = microbatch.row_weights_UR.shape[0]
    for weights in ({}, _weights_nearby(model)):
        before = _losses(model, loss_fn, microbatch, weights)
        for unit in (0, units - 1):
            changed = with_changed_unit(microbatch, unit)
            if not _others_equal(before, _losses(model, loss_fn, changed, weights), unit, units):
                seen, seen_after = (_trace(model, loss_fn, rows, weights) for rows in (microbatch, changed))
                return _first_difference(seen, seen_after, unit, units) or LOSS
    return None


def suspect_mixing(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> str | None:
    """Return the innermost module whose output mixes units, whether or not the loss shows it."""
    before = _trace(model, loss_fn, microbatch, {})
    after = _trace(model, loss_fn, with_changed_unit(microbatch, 0), {})
    return _first_difference(before, after, 0, microbatch.row_weights_UR.shape[0])


def _weights_nearby(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters moved a little at random, none of them zero, for every place that holds one."""
    generator = torch.Generator().manual_seed(0)
    moved = {parameter: _nearby(parameter.detach(), generator) for parameter in model.parameters()}
    return {name: moved[parameter] for name, parameter in parameter_places(model)}


def _nearby(x: Tensor, generator: torch.Generator) -> Tensor:
    if not x.is_floating_point() or not x.numel():
        return x
    size = max(0.1, float(x.double().square().mean().sqrt().nan_to_num()))
    return x + (0.1 * size * torch.randn(x.shape, generator=generator, dtype=torch.float64)).to(x)


def _losses(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, weights: dict[str, Tensor]) -> Tensor:
    def run(*args: Any, **kwargs: Any) -> Any:
        return functional_call(model, weights, args, kwargs, tie_weights=False) if weights else model(*args, **kwargs)

    with torch.no_grad(), model_restored(model), repeatable_randomness(microbatch.device):
        return row_losses(run, loss_fn, microbatch)


_Seen = tuple[str, list[Any], list[Any]]
"""A module's label, and copies of what it was given and what it returned."""


def _trace(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, weights: dict[str, Tensor]) -> list[_Seen]:
    """Return all modules' inputs and outputs of one forward pass, in order of completion.

    That is many times what a pass itself holds, so it is made only to name a module, never to look whether any mixes.
    """
    calls: list[_Seen] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            for handle in _trace_hooks(module_label(name, module), module, calls):
                hooks.enter_context(handle)
        _losses(model, loss_fn, microbatch, weights)
    return calls


def _trace_hooks(label: str, module: nn.Module, calls: list[_Seen]) -> list[Any]:
    entries: list[list[Any]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        entries.append(_copies((args, kwargs)))

    def after(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        calls.append((label, entries.pop(), _copies(output)))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def _copies(values: Any) -> list[Any]:
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(values)]


def _first_difference(before: list[_Seen], after: list[_Seen], unit: int, units: int) -> str | None:
    """Return the label of the first module whose inputs agree for all other units and whose outputs do not."""
    for (label, inputs, outputs), (_, inputs_after, outputs_after) in zip(before, after, strict=False):
        same_in = all(_others_equal(a, b, unit, units) for a, b in zip(inputs, inputs_after, strict=False))
        same_out = all(_others_equal(a, b, unit, units) for a, b in zip(outputs, outputs_after, strict=False))
        if same_in and not same_out:
            return label
    return None


def _others_equal(a: Any, b: Any, unit: int, units: int) -> bool:
    """Return whether the rows of all units but ``unit`` agree up to rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    if a.shape != b.shape:
        return False
    if a.dim() and a.shape[0] % units == 0:
        keep = [index for index in range(units) if index != unit]
        a, b = (x.unflatten(0, (units, -1))[keep] for x in (a, b))
    if not a.is_floating_point():
        return torch.equal(a, b)
    rounding = 16 * torch.finfo(a.dtype).eps * float(a.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=rounding, equal_nan=True)


@final
@dataclass(frozen=True)
class Comparison:
    """A step's gradients beside those of single units.

    Attributes:
        wrong: names of parameters whose gradient differs for some unit.
        proved: whether all single units had finite gradients to compare with.
        held_bytes: memory of the per-unit gradients that the step formed.
    """

    wrong: list[str]
    proved: bool
    held_bytes: int


@final
@dataclass(frozen=True, eq=False)
class Reference:
    """What a step's gradients are compared with: each unit's own, by plain autograd.

    Attributes:
        model: the model whose parameters are compared; it need not be the network that makes the step.
        loss_fn: one loss per row.
        microbatch: the units, as ``model`` takes them.
        in_batch: take a unit's gradient from its own loss in the whole batch, with the random numbers of that batch,
            instead of from the unit alone. For a network that is proved to keep units apart and draws random numbers.
    """

    model: nn.Module
    loss_fn: LossFunction
    microbatch: Microbatch
    in_batch: bool = False

    def gradients(self, unit: int) -> dict[nn.Parameter, Tensor]:
        """Return one unit's gradient of each trainable parameter."""
        if not self.in_batch:
            return _gradients_alone(self.model, self.loss_fn, self.microbatch, unit)
        weights_UR = torch.zeros_like(self.microbatch.row_weights_UR)
        weights_UR[unit] = self.microbatch.row_weights_UR[unit]
        with torch.enable_grad(), repeatable_randomness(self.microbatch.device):
            losses = row_losses(self.model, self.loss_fn, self.microbatch)
        return _gradients_of(self.model, losses, weights_UR)


@torch.no_grad()
def compare_with_single_units(reference: Reference, step: UnitGradients) -> Comparison:
    """Compare a step's per-unit gradients with each unit's own, by plain autograd.

    Args:
        reference: gives each unit's own gradients.
        step: per-unit gradients; used up here, so that they are not held beside each unit's own.

    Returns:
        The parameters whose gradients or norms differ by more than rounding and flips at kinks explain.

    Raises:
        PrivacyError: the model cannot run on a single unit, so units depend on each other.
    """
    model, units = reference.model, reference.microbatch.row_weights_UR.shape[0]
    # Norms first, as in every step: some layer gradients take their sums from what the norms have formed.
    norms = {parameter: each.norms_sq().sqrt().cpu().tolist() for parameter, each in step.layer_gradients.items()}
    wrong, held, proved = set[str](), 0, True
    for unit in range(units):
        alone = reference.gradients(unit)
        size = math.hypot(*(_length(gradient) for gradient in alone.values()))
        proved &= math.isfinite(size)
        for name, parameter in trainable_parameters(model).items():
            layer_gradient, gradient = step.layer_gradients.get(parameter), alone.pop(parameter)
            norm = 0.0 if layer_gradient is None else norms[parameter][unit]
            only = torch.zeros(units, dtype=torch.float64, device=gradient.device)
            only[unit] = 1.0
            if math.isfinite(size) and not _is_right(layer_gradient, norm, gradient, size, only):
                wrong.add(name)
            if unit == units - 1:
                held += 0 if layer_gradient is None else layer_gradient.held_bytes
                step.layer_gradients.pop(parameter, None)
    return Comparison([name for name in trainable_parameters(model) if name in wrong], proved, held)


def _is_right(layer_gradient: LayerGradient | None, norm: float, alone: Tensor, size: float, only_U: Tensor) -> bool:
    """Return whether norm and gradient of one unit are those that it has alone, up to rounding and flips at kinks."""
    if layer_gradient is None:
        found = torch.zeros_like(alone)
    else:
        found = layer_gradient.finish(layer_gradient.add_weighted_sum(None, only_U, None))
    true_norm = _length(alone)
    room = _TOLERANCE.get(alone.dtype, 0.3) * (true_norm + size / 100) + _ZERO_NORM
    return _length(found.sub_(alone)) <= room and abs(norm - true_norm) <= room


def _gradients_alone(
    model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, unit: int
) -> dict[nn.Parameter, Tensor]:
    """Return the gradient of one unit's loss by plain autograd, the unit alone in its batch."""
    alone = single_unit(microbatch, unit)
    with torch.enable_grad():
        try:
            losses = row_losses(model, loss_fn, alone)
        except (RuntimeError, ValueError) as error:
            place = suspect_mixing(model, loss_fn, microbatch) or "the model"
            reason = " ".join(str(error).split()).rstrip(".")
            raise PrivacyError(
                f"{place} can't take one unit by itself, so units depend on each other ({reason}). {MIXING_REMEDY}"
            ) from error
    return _gradients_of(model, losses, alone.row_weights_UR)


def _gradients_of(model: nn.Module, losses: Tensor, weights_UR: Tensor) -> dict[nn.Parameter, Tensor]:
    """Return the gradient of weighted losses."""
    parameters = list(trainable_parameters(model).values())
    if not losses.requires_grad:
        return {parameter: torch.zeros_like(parameter.detach()) for parameter in parameters}
    weights = weights_UR.reshape(-1).to(losses.dtype)
    found = torch.autograd.grad(losses, parameters, weights, allow_unused=True, materialize_grads=True)
    dense = (gradient.to_dense() if gradient.is_sparse else gradient for gradient in found)
    return dict(zip(parameters, dense, strict=True))


_TIMES: Final = (1.0, 10.0, 255.0, 1e4)


def unfaithful(model: nn.Module, loss_fn: LossFunction, proved: LossesOfRows, microbatch: Microbatch) -> bool:
    """Return whether a model's code computes other losses than its proved graph, on synthetic units.

    Each of several calls has other random numbers, and one unit scaled by 1, 10, 255 or 10,000. A difference means
    that the code keeps state, draws random numbers outside of torch, branches, or mixes units. The graph is what runs,
    so this is not about privacy: a model must not silently train as something else.

    Args:
        model: the model.
        loss_fn: one loss per row.
        proved: from a micro-batch to the losses by the graph.
        microbatch: the units to scale, in the number that is used.
    """
    rows = microbatch.row_weights_UR.shape[1]
    for number, times in enumerate(_TIMES):
        unit = number % microbatch.row_weights_UR.shape[0]
        mine = slice(unit * rows, (unit + 1) * rows)

        def scaled(x: Tensor, mine: slice = mine, times: float = times) -> Tensor:
            if not x.is_floating_point():
                return x
            changed = x.clone()
            changed[mine] *= times
            return changed

        batch = Microbatch(map_tensors(scaled, microbatch.inputs), microbatch.targets, microbatch.row_weights_UR)
        found = []
        for losses in (lambda rows: row_losses(model, loss_fn, rows), proved):
            with torch.no_grad(), model_restored(model), repeatable_randomness(batch.device, seed=number):
                found.append(losses(batch).double())
        room = 1e-4 * (1 + found[1].abs().nan_to_num(0.0, 0.0, 0.0))
        if not bool(
            torch.where(found[0].isfinite() | found[1].isfinite(), (found[0] - found[1]).abs() <= room, True).all()
        ):
            return True
    return False


def unfaithful_gradients(reference: Reference, network: nn.Module, rows: Microbatch) -> list[str]:
    """Return the parameters whose gradient is another one in the code than in its proved graph, in one batch.

    For code that draws random numbers, whose single units can't be compared: both draw the same ones here. A custom
    backward pass, for one, is not in the graph.

    Args:
        reference: the code, its loss and its units.
        network: the network of the proved graph.
        rows: the same units, as the network takes them.
    """
    found: list[dict[nn.Parameter, Tensor]] = []
    runs = ((reference.model, reference.loss_fn, reference.microbatch), (network, lambda outputs, _: outputs, rows))
    for model, loss_fn, batch in runs:
        with torch.enable_grad(), model_restored(model), repeatable_randomness(batch.device):
            losses = row_losses(model, loss_fn, batch)
        found.append(_gradients_of(model, losses, batch.row_weights_UR))
    names = {parameter: name for name, parameter in trainable_parameters(reference.model).items()}
    code, graph = ({p: each.get(p, torch.zeros_like(p.detach())) for p in names} for each in found)
    size = math.hypot(*(_length(gradient) for gradient in code.values()))
    if not math.isfinite(size):
        return []
    return [
        name
        for parameter, name in names.items()
        if not _length(graph[parameter] - code[parameter])
        <= _TOLERANCE.get(parameter.dtype, 0.3) * (_length(code[parameter]) + size / 100) + _ZERO_NORM
    ]


def leaking_layers(calls: Iterable[CapturedCall], unit: int, units: int) -> list[str]:
    """Return the layers at which the loss of one unit has a gradient in rows of other units.

    Args:
        calls: captured calls of a backward pass in which only ``unit`` has a weight.
        unit: the unit.
        units: the number of units.
    """
    found: list[str] = []
    for call in calls:
        for gradient in call.gradients:
            if gradient is not None and gradient.dim() and gradient.shape[0] % units == 0:
                parts = gradient.unflatten(0, (units, -1)).flatten(1)
                others = [index for index in range(units) if index != unit]
                if parts.numel() and bool(parts[others].ne(0).any()):
                    found.append(call.owner.label)
    return list(dict.fromkeys(found))


def _length(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
