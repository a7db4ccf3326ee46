"""The clipped sum of per-unit gradients: one forward, one backward, exact.

``clipped_sum_of_batch`` cuts a draw into micro-batches, computes every unit's gradient (``per_unit``), scales it to at
most ``clip_norm`` (``privacy.clipping``) and adds it up in float64. The result is sensitive: only ``noise.noisy_mean``
may open it.

Shapes: U units, R rows per unit.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor, nn

from dpvision.config import Performance
from dpvision.errors import PrivacyError, Problems
from dpvision.gradients.fast import NarrowLinear, weight_cache
from dpvision.gradients.layer_gradient import Finish, LayerGradient
from dpvision.gradients.ownership import parameter_owners, trainable_parameters
from dpvision.gradients.per_unit import LossFunction, UnitGradients, attributes_restored, unit_gradients
from dpvision.gradients.plan import Plan, blind_trial, check_faithful, plan_for
from dpvision.gradients.separability import model_state, moving_state, no_outside_code, outside_code, refuse
from dpvision.kernels.memory import GivingBack, give_back_freed_memory
from dpvision.privacy.clipping import Clipper
from dpvision.privacy.mechanism import Clipping
from dpvision.privacy.sampling import Sampling
from dpvision.privacy.values import Batch, ClippedSum, Microbatch, RowTree, map_tensors, number_of_rows, row_tensors


@final
class Accumulator:
    """One running sum per parameter, over micro-batches.

    In float64, because rounding in a long float32 sum could let one unit move it by more than the clip norm.
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._finish: dict[nn.Parameter, Finish] = {}
        self._giving_back = GivingBack()

    @torch.no_grad()
    def add(
        self,
        layer_gradients: dict[nn.Parameter, LayerGradient],
        factors: Mapping[nn.Parameter, Tensor],
        nonfinite_U: Tensor | None,
    ) -> None:
        """Add one micro-batch: every unit's gradient times its factor, without the units in ``nonfinite_U``.

        Takes the entries out of ``layer_gradients``, so that the memory of one is free before the next is added, and
        all of it before the next micro-batch runs.
        """
        for parameter in list(layer_gradients):
            layer_gradient, is_new = layer_gradients.pop(parameter), parameter not in self._finish
            if is_new:
                # The first micro-batch's will do: it depends on weights alone, which are the same for all of them.
                self._finish[parameter] = layer_gradient.finish
            self._sums[parameter] = layer_gradient.add_weighted_sum(
                self._sums.get(parameter), factors[parameter], nonfinite_U
            )
            del layer_gradient
            if is_new:
                self._giving_back.replaced(self._sums[parameter].nbytes)

    @torch.no_grad()
    def gradients(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the sums by name, in the parameters' own shapes; zeros where nothing was added. Empties this."""
        return {name: self._gradient(parameter) for name, parameter in parameters.items()}

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self._sums:
            return torch.zeros_like(parameter.detach(), dtype=torch.float64)
        return self._finish.pop(parameter)(self._sums.pop(parameter)).contiguous()


_MOST_IMAGES: Final = 512  # units of a micro-batch
_MOST_FEATURE_ROWS: Final = 4096
_EVEN: Final = 8  # whole multiples of it share evenly among threads
_FEW: Final = 4
_MOST_COMPARED: Final = 64  # units on which a user's code is compared with its proved graph
_LARGE: Final = 1 << 25  # parameters from which on memory is given back to the system


def clipped_sum(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: RowTree,
    targets: RowTree,
    *,
    clip_norm: float,
    clipping: Clipping = "flat",
    rows_per_unit: int = 1,
    microbatch_size: int | None = None,
) -> ClippedSum:
    """Compute the sum over units of their gradients, each scaled to at most ``clip_norm``; the model is not changed.

    Args:
        model: any module whose rows do not influence each other.
        loss_fn: from outputs and targets to one loss per row.
        inputs: rows; rows ``u * rows_per_unit`` and following belong to unit u. A tensor, or a dict (given to the model
            by keyword), tuple or list (by position) of tensors with their rows in dimension 0.
        targets: as many targets, in the same forms.
        clip_norm: L2 bound on one unit's contribution, above zero.
        clipping: "flat" scales a gradient that is too long down, "automatic" brings every gradient to nearly
            ``clip_norm``, "per_layer" scales each layer's part down to its even share of it.
        rows_per_unit: rows of one unit; a unit's loss is the mean over its rows.
        microbatch_size: units computed at once; chosen by memory if None. No influence on the result beyond rounding.

    Returns:
        The sum, in the parameters' own dtypes. Sensitive.

    Raises:
        ArgumentError: an argument breaks its rule.
        PrivacyError: the model mixes units, or its per-unit gradients cannot be computed.

    Guarantee: adding or removing one unit moves the result by at most ``clip_norm`` in L2. A unit whose gradient is
    not finite contributes zero.
    """
    problems = Problems()
    problems.count("rows_per_unit", rows_per_unit)
    if microbatch_size is not None:
        problems.count("microbatch_size", microbatch_size)
    problems.raise_if_any()
    batch = Rows(inputs, targets, rows_per_unit)
    performance = Performance(microbatch_size=microbatch_size)
    clipped = clipped_sum_of_batch(
        model, loss_fn, batch, clip_norm=clip_norm, clipping=clipping, performance=performance, own_code=True
    )
    dtypes = {name: parameter.dtype for name, parameter in trainable_parameters(model).items()}
    return ClippedSum({name: value.to(dtypes[name]) for name, value in clipped.gradients.items()}, clip_norm)


def clipped_sum_of_batch(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    clip_norm: float,
    clipping: Clipping = "flat",
    performance: Performance,
    own_code: bool = True,
) -> ClippedSum:
    """Compute ``clipped_sum`` over a whole draw, in float64. An empty draw is a sum of zeros.

    Args:
        model: the model or the part of it that trains.
        loss_fn: one loss per row.
        batch: the draw.
        clip_norm: L2 bound on one unit's contribution, above zero.
        clipping: the style of clipping.
        performance: speed and memory settings.
        own_code: whether model and loss may be anyone's code; see ``plan_for``.

    Returns:
        The sum, by parameter name. Sensitive.

    Guarantee: as ``clipped_sum``; the result does not depend on the micro-batch size beyond rounding.
    """
    parameters = trainable_parameters(model)
    clip, totals = Clipper.for_parameters(parameters, clip_norm=clip_norm, clipping=clipping), Accumulator()
    each = _each_microbatch(model, loss_fn, batch, performance, own_code=own_code)
    with _float32(), _unmoved(model), performance.chosen_kernels(), closing(each):
        for microbatch, found in each:
            real_U = microbatch.row_weights_UR.ne(0).any(1)
            totals.add(found.layer_gradients, *clip.factors(found.layer_gradients, real_U))
    return ClippedSum(totals.gradients(parameters), clip_norm, disposable=True)


def unclipped_sum_of_batch(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, *, performance: Performance
) -> dict[str, Tensor]:
    """Add up the units' gradients by the same engine without any bound: no privacy guarantee.

    For non-private baselines; it also shows what clipping costs.
    """
    totals = Accumulator()
    each = _each_microbatch(model, loss_fn, batch, performance, own_code=False)
    with _unmoved(model), performance.chosen_kernels(), closing(each):
        for microbatch, found in each:
            ones_U = microbatch.row_weights_UR.ne(0).any(1).to(torch.float64)
            totals.add(found.layer_gradients, dict.fromkeys(found.layer_gradients, ones_U), None)
    return totals.gradients(trainable_parameters(model))


def _each_microbatch(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, performance: Performance, *, own_code: bool
) -> Generator[tuple[Microbatch, UnitGradients], None, None]:
    """Yield each micro-batch with its per-unit gradients."""
    first = next(batch.microbatches(1), None)
    if first is None:
        return
    refuse(outside_code())
    plan = plan_for(model, loss_fn, first, performance, own_code=own_code)
    network = plan.network(model)
    owners = parameter_owners(network, plan.overrides)
    units = _microbatch_size(plan, network, first, performance)
    if plan.proof is not None and units not in plan.proof.checked:
        synthetic, _ = blind_trial(model, loss_fn, first, units=max(2, min(units, _MOST_COMPARED)))
        check_faithful(model, loss_fn, plan.proof, synthetic)
        plan.proof.checked.add(units)
    with weight_cache(network):
        for index, microbatch in enumerate(batch.microbatches(units)):
            arranged = plan.arranged(microbatch)
            with no_outside_code(), _unwritten(plan, arranged):
                found = unit_gradients(network, plan.loss(loss_fn), arranged, owners, plan.axes_by_module)
            if index == 0 and _is_large(model):
                give_back_freed_memory()  # the sums come next, and do not fit where activations were
            yield arranged, found


def _is_large(model: nn.Module) -> bool:
    """Return whether the sums of all parameters take much memory."""
    return sum(parameter.numel() for parameter in model.parameters()) >= _LARGE


def _microbatch_size(plan: Plan, network: nn.Module, like: Microbatch, performance: Performance) -> int:
    """Return the units of a micro-batch: as asked for, or as many as fit the memory that one may take."""
    if performance.microbatch_size is not None:
        return performance.microbatch_size
    memory, unit = performance.memory_mib * 2**20, max(1, plan.bytes_per_unit)
    # One unit at a time would leave threads idle and pay every layer's fixed cost: a few may take more, and as much as
    # the sums that they are added to.
    sums = 8 * sum(parameter.numel() for parameter in trainable_parameters(network).values())  # of float64
    fitting = max(memory // unit, min(_FEW, max(4 * memory, sums) // unit))
    # Every micro-batch reads all weights and sums again: where they are large beside it, it may be twice as large.
    if _EVEN * unit <= min(2 * memory, 3 * sums):
        fitting = max(fitting, _EVEN)
    # What a model works with between its layers is not counted, and may be much for images (a scattering transform).
    features = all(x.dim() <= 2 for x in row_tensors(like.inputs))
    most = _MOST_FEATURE_ROWS if features or _only_linear(network) else _MOST_IMAGES
    even = _EVEN if fitting >= _EVEN else 2 if fitting >= 2 else 1
    return max(1, min(most, fitting // even * even))


def _only_linear(network: nn.Module) -> bool:
    """Return whether nothing large can lie between the layers, because there are hardly any."""
    leaves = [module for module in network.modules() if not list(module.children())]
    return all(isinstance(leaf, (nn.Linear, NarrowLinear, nn.Flatten, nn.Identity)) for leaf in leaves)


@contextmanager
def _float32() -> Iterator[None]:
    """Switch a surrounding autocast off: the norms of gradients in 16 bits are not exact."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _unmoved(model: nn.Module) -> Iterator[None]:
    """Restore the model's attributes, and raise if the block wrote into a buffer or a parameter."""
    before = {name: (id(tensor), tensor._version) for name, tensor in model_state(model)}
    with attributes_restored(model):
        yield
        moved = [name for name, tensor in model_state(model) if before.get(name) != (id(tensor), tensor._version)]
    refuse(moving_state(model, moved))


@contextmanager
def _unwritten(plan: Plan, microbatch: Microbatch) -> Iterator[None]:
    """Raise if a proved graph wrote into its constants or inputs: a second look at what the proof refuses."""
    constants = [] if plan.proof is None else [*plan.proof.network.buffers(), *row_tensors(microbatch.inputs)]
    watched = [tensor for tensor in constants if not tensor.is_inference()]
    before = [tensor._version for tensor in watched]
    yield
    if before != [tensor._version for tensor in watched]:
        raise PrivacyError(
            "the model or the loss writes into its inputs or into a tensor that it keeps, which the next rows would "
            "see. Make a new tensor instead of writing in place."
        )


@final
@dataclass(frozen=True)
class Rows:
    """Rows in memory as a batch. They were not drawn by a sampler, so no step can be charged for them.

    Attributes:
        inputs: rows, unit by unit.
        targets: as many targets.
        rows_per_unit: rows of one unit.
    """

    inputs: RowTree
    targets: RowTree
    rows_per_unit: int

    def __post_init__(self) -> None:
        shapes = [x.shape for x in (*row_tensors(self.inputs), *row_tensors(self.targets))]
        rows = number_of_rows(self.inputs)
        problems = Problems()
        problems.require(
            all(shape[:1] == (rows,) for shape in shapes),
            f"inputs and targets must have as many rows, got shapes {' and '.join(str(tuple(s)) for s in shapes)}.",
        )
        problems.require(
            rows % self.rows_per_unit == 0,
            f"the number of rows must be a multiple of rows_per_unit={self.rows_per_unit}, got {rows}.",
        )
        problems.raise_if_any()

    @property
    def sampling(self) -> Sampling:
        """Not Poisson: no epsilon follows from it."""
        return Sampling("by hand", 1.0)

    def microbatches(self, units: int) -> Iterator[Microbatch]:
        """Yield slices of ``units`` units; the last one may be smaller."""
        size = units * self.rows_per_unit
        device = row_tensors(self.inputs)[0].device
        for first in range(0, number_of_rows(self.inputs), size):
            mine = slice(first, first + size)
            inputs, targets = (map_tensors(lambda x, mine=mine: x[mine], tree) for tree in (self.inputs, self.targets))
            shape = (number_of_rows(inputs) // self.rows_per_unit, self.rows_per_unit)
            weights = torch.full(shape, 1 / self.rows_per_unit, dtype=torch.float64)
            yield Microbatch(inputs, targets, weights.to(device))
