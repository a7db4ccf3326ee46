"""The clipped sum of per-unit gradients: one forward, one backward, exact.

``clipped_sum_of_batch`` cuts a draw into micro-batches, computes every unit's gradient (``per_unit``), scales it to at
most ``clip_norm`` (``privacy.clipping``) and adds it up in float64, in the order of ``partial_sums``. The result is
sensitive: only ``noise.noisy_mean`` may open it. In a run of several processes rank 0 calls it, and the others call
``assist_clipped_sum`` at the same time.

Shapes: U units, R rows per unit.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor, nn

from dpvision.config import Performance
from dpvision.errors import PrivacyError, Problems, brief
from dpvision.gradients.devices import exact_float32
from dpvision.gradients.fast import NarrowLinear, weight_cache
from dpvision.gradients.layer_gradient import Finish, LayerGradient
from dpvision.gradients.ownership import parameter_owners, trainable_parameters
from dpvision.gradients.partial_sums import (
    WHOLE,
    Branch,
    Share,
    SumTree,
    exchange_branches,
    receive_branches,
    send_branches,
)
from dpvision.gradients.per_unit import LossFunction, UnitGradients, attributes_restored, unit_gradients
from dpvision.gradients.plan import Plan, blind_trial, check_faithful, plan_for, require_own_bits
from dpvision.gradients.separability import (
    model_state,
    moving_state,
    no_outside_code,
    outside_code,
    refuse,
    synthetic_batch,
)
from dpvision.kernels.memory import GivingBack, give_back_freed_memory
from dpvision.privacy.clipping import Clipper
from dpvision.privacy.mechanism import Clipping
from dpvision.privacy.sampling import Sampling
from dpvision.privacy.values import (
    Batch,
    ClippedSum,
    Microbatch,
    RowTree,
    chosen_starts,
    map_tensors,
    number_of_rows,
    row_tensors,
    rows_digest,
)
from dpvision.ranks import ALONE, Ranks


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
    problems.require(isinstance(model, nn.Module), f"the model must be a torch.nn.Module, got {brief(model)}.")
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
    ranks: Ranks = ALONE,
    owners: Mapping[str, int] | None = None,
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
        ranks: the processes of the run; this one is rank 0, and the others call ``assist_clipped_sum``.
        owners: the rank that owns each parameter, where state is sharded. All ranks call this function then, and each
            gets the sum of what it owns.

    Returns:
        The sum, by parameter name. Sensitive.

    Raises:
        RankError: another process failed, computed on other weights or another draw, or was lost. There is no sum.

    Guarantee: as ``clipped_sum``; the result does not depend on the micro-batch size beyond rounding, and on the
    number of processes not at all. Each unit is clipped and added by one process.
    """
    tree, share, count = _own_branches(
        model, loss_fn, batch, clip_norm, clipping, performance, own_code=own_code, ranks=ranks
    )
    parameters = trainable_parameters(model)
    if owners is None:
        receive_branches(tree, ranks, parameters, share, count)
    else:
        tree = exchange_branches(tree, ranks, parameters, share, count, owners)
        parameters = {name: parameter for name, parameter in parameters.items() if owners[name] == ranks.rank}
    sums = tree.total() if parameters else {}
    if sums is None:
        sums = {name: torch.zeros_like(p.detach(), dtype=torch.float64) for name, p in parameters.items()}
    return ClippedSum(sums, clip_norm, disposable=True)


def assist_clipped_sum(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    clip_norm: float,
    clipping: Clipping = "flat",
    performance: Performance,
    own_code: bool = True,
    ranks: Ranks,
) -> None:
    """Compute this process's share of rank 0's ``clipped_sum_of_batch``, with the same arguments, and send it there.

    Raises:
        RankError: a process failed, computed on other weights or another draw, or was lost.

    Guarantee: nothing but the sums of this process's clipped units leaves it, and only to rank 0. They are sensitive.
    """
    tree, _, _ = _own_branches(model, loss_fn, batch, clip_norm, clipping, performance, own_code=own_code, ranks=ranks)
    send_branches(tree, ranks)


def _own_branches(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    clip_norm: float,
    clipping: Clipping,
    performance: Performance,
    *,
    own_code: bool,
    ranks: Ranks,
) -> tuple[SumTree, Share, int]:
    """Add up this process's parts of the sum; with several processes, wait until all have done so.

    Returns:
        The branches, the share that they are of, and the number of micro-batches of the whole draw.
    """
    share = Share(performance.partial_sums or 1, ranks.rank, ranks.size)
    parameters = trainable_parameters(model)
    tree, sizes, problem = SumTree(), _Sizes(), None
    try:
        clip = Clipper.for_parameters(parameters, clip_norm=clip_norm, clipping=clipping)
        each = _each_microbatch(model, loss_fn, batch, performance, own_code=own_code, share=share, sizes=sizes)
        by_part: dict[int, Accumulator] = {}
        with exact_float32(_device_of(model)), _unmoved(model), performance.chosen_kernels(), closing(each):
            for part, microbatch, found in each:
                if part not in by_part:
                    _close_parts(tree, by_part, parameters, until=part, share=share)
                    by_part[part] = Accumulator()
                real_U = microbatch.row_weights_UR.ne(0).any(1)
                by_part[part].add(found.layer_gradients, *clip.factors(found.layer_gradients, real_U))
            _close_parts(tree, by_part, parameters, until=share.own_parts.stop, share=share)
    except Exception as error:
        if not ranks.several:
            raise
        problem = error
    if ranks.several:
        rounded = int(performance.precision != "float32")
        facts = (2 * sizes.units + rounded, sizes.count, sizes.first, _checksum(model))
        ranks.settle(problem, *facts, about="the draw, the weights, what is trained or the precision of a step")
    return tree, share, sizes.count


def _close_parts(
    tree: SumTree, by_part: dict[int, Accumulator], parameters: dict[str, nn.Parameter], *, until: int, share: Share
) -> None:
    """Move all parts before ``until`` from their accumulators into the tree; most have at most one that is filled."""
    done = tree.branches[-1].first + tree.branches[-1].size if tree.branches else share.own_parts.start
    for part in range(done, until):
        totals = by_part.pop(part, None)
        tree.push(Branch(part, 1, None if totals is None else totals.gradients(parameters)))


def _checksum(model: nn.Module) -> int:
    """Summarise the weights and which of them are trained, so that ranks notice that theirs differ.

    A rank that trains fewer sends fewer bytes than are expected, and what lies in memory would take the place of the
    others. No protection against an adversary.
    """
    total = 0
    for parameter in model.parameters():
        flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
        words = flat[: flat.numel() // 4 * 4].view(torch.int32)
        total = (31 * total + 2 * int(words.sum(dtype=torch.int64)) + parameter.requires_grad) % 2**62
    return total


@final
@dataclass
class _Sizes:
    """The micro-batches of a whole draw: their number, the units of each, and a digest of the first unit's rows."""

    units: int = 0
    count: int = 0
    first: int = 0


def unclipped_sum_of_batch(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, *, performance: Performance
) -> dict[str, Tensor]:
    """Add up the units' gradients by the same engine without any bound: no privacy guarantee.

    For non-private baselines; it also shows what clipping costs.
    """
    totals = Accumulator()
    each = _each_microbatch(model, loss_fn, batch, performance, own_code=False)
    with _unmoved(model), performance.chosen_kernels(), closing(each):
        for _, microbatch, found in each:
            ones_U = microbatch.row_weights_UR.ne(0).any(1).to(torch.float64)
            totals.add(found.layer_gradients, dict.fromkeys(found.layer_gradients, ones_U), None)
    return totals.gradients(trainable_parameters(model))


def _each_microbatch(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    performance: Performance,
    *,
    own_code: bool,
    share: Share = WHOLE,
    sizes: _Sizes | None = None,
) -> Generator[tuple[int, Microbatch, UnitGradients], None, None]:
    """Yield each micro-batch of this share with its part and its per-unit gradients; note the sizes of the whole."""
    # Random layers draw in a part from its own seed: what a part draws does not depend on who computes the others.
    seeds = torch.randint(2**62, (share.parts,)).tolist() if share.parts > 1 else []
    first = next(batch.microbatches(1), None)
    if first is None:
        return
    sizes = sizes or _Sizes()
    if share.size > 1:
        sizes.first = int.from_bytes(rows_digest(first.inputs, first.targets)[:7])
    refuse(outside_code())
    plan = plan_for(model, loss_fn, first, performance, own_code=own_code)
    network = plan.network(model)
    owners = parameter_owners(network, plan.overrides)
    units = _microbatch_size(plan, network, first, performance, expected=batch.sampling.expected_batch_size)
    if plan.proof is not None and units not in plan.proof.checked:
        synthetic, _ = blind_trial(model, loss_fn, first, units=max(2, min(units, _MOST_COMPARED)))
        check_faithful(model, loss_fn, plan.proof, synthetic)
        plan.proof.checked.add(units)
    if performance.precision != "float32" and units not in plan.own_bits:
        synthetic = (
            blind_trial(model, loss_fn, first, units=units)[0] if own_code else synthetic_batch(first, units=units)
        )
        require_own_bits(model, loss_fn, plan, synthetic, performance.precision)
        plan.own_bits.add(units)
    with weight_cache(network):
        for index, (part, microbatch) in enumerate(_microbatches(batch, units, share, seeds, sizes)):
            arranged = plan.arranged(microbatch)
            with no_outside_code(), _unwritten(plan, arranged):
                found = unit_gradients(
                    network,
                    plan.loss(loss_fn),
                    arranged,
                    owners,
                    plan.axes_by_module,
                    precision=performance.precision,
                )
            if index == 0 and _is_large(model):
                give_back_freed_memory()  # the sums come next, and do not fit where activations were
            yield part, arranged, found


def _microbatches(
    batch: Batch, units: int, share: Share, seeds: list[int], sizes: _Sizes
) -> Iterator[tuple[int, Microbatch]]:
    """Yield this share's micro-batches, each with its part."""
    if share.parts == 1 and share.size == 1:
        yield from ((0, microbatch) for microbatch in batch.microbatches(units))
        return
    sizes.units, sizes.count = units, -(-batch.drawn_batch_size // units)
    own, seeded = share.own_microbatches(sizes.count), -1
    for index, microbatch in zip(own, batch.microbatches(units, own), strict=True):
        part = share.part_of(index, sizes.count)
        if seeds and part != seeded:
            torch.manual_seed(seeds[part])
            seeded = part
        yield part, microbatch


def _device_of(model: nn.Module) -> torch.device:
    """Return where the model computes."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _is_large(model: nn.Module) -> bool:
    """Return whether the sums of all parameters take much memory."""
    return sum(parameter.numel() for parameter in model.parameters()) >= _LARGE


def _microbatch_size(
    plan: Plan, network: nn.Module, like: Microbatch, performance: Performance, *, expected: float | None = None
) -> int:
    """Return the units of a micro-batch: as asked for, or as many as fit the memory that one may take.

    No more than most draws have: the last micro-batch is padded, and padding costs as much as units do.
    """
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
    if expected is not None:
        drawn = expected + 2 * math.sqrt(expected)  # 98 draws of 100 have no more
        most = min(most, -(-math.ceil(drawn) // _EVEN) * _EVEN)
    even = _EVEN if fitting >= _EVEN else 2 if fitting >= 2 else 1
    return max(1, min(most, fitting // even * even))


def _only_linear(network: nn.Module) -> bool:
    """Return whether nothing large can lie between the layers, because there are hardly any."""
    leaves = [module for module in network.modules() if not list(module.children())]
    return all(isinstance(leaf, (nn.Linear, NarrowLinear, nn.Flatten, nn.Identity)) for leaf in leaves)


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

    @property
    def drawn_batch_size(self) -> int:
        """The number of units."""
        return number_of_rows(self.inputs) // self.rows_per_unit

    def microbatches(self, units: int, only: range | None = None) -> Iterator[Microbatch]:
        """Yield slices of ``units`` units, or those of these numbers; the last one may be smaller."""
        size = units * self.rows_per_unit
        device = row_tensors(self.inputs)[0].device
        for first in chosen_starts(number_of_rows(self.inputs), size, only):
            mine = slice(first, first + size)
            inputs, targets = (map_tensors(lambda x, mine=mine: x[mine], tree) for tree in (self.inputs, self.targets))
            shape = (number_of_rows(inputs) // self.rows_per_unit, self.rows_per_unit)
            weights = torch.full(shape, 1 / self.rows_per_unit, dtype=torch.float64)
            yield Microbatch(inputs, targets, weights.to(device))
