"""Draws from a user's own rows: tensors, arrays, or any map-style Dataset. Only the rows that were drawn are read.

Shapes: D drawn units, U units of a micro-batch, R rows per unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dpvision.data.store import dense_units
from dpvision.errors import ArgumentError, Problems
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import PoissonSampler, Sampling, choose_without_replacement
from dpvision.privacy.values import Microbatch, map_tensors, number_of_rows


@final
class DatasetBatches:
    """The draws of one run over a user's rows.

    Args:
        rows: a pair (inputs, targets) of tensors, arrays, or dicts or tuples of them; or a map-style Dataset whose
            items are such pairs of single rows.
        units: the owner of each row; default: each row is a unit of its own.
        rows_per_unit: rows that a unit gives at most to a step; averaged before clipping.
        sample_rate: the mechanism's rate; the rows have no influence on it.
        keys: the keys of the run; streams "sampling" and "rows" are used.
        device: where micro-batches are placed.

    Raises:
        ArgumentError: rows that can't be read at random, or units that do not name every row.

    Guarantee: units join as ``PoissonSampler`` says. A unit's rows are chosen by its own part of a stream, and their
    weights sum to one: together they are clipped once.
    """

    def __init__(
        self,
        rows: Any,
        *,
        units: Sequence[object] | None,
        rows_per_unit: int,
        sample_rate: float,
        keys: Keys,
        device: torch.device | str,
    ) -> None:
        if isinstance(rows, (DataLoader, IterableDataset)) or not hasattr(rows, "__getitem__"):
            raise ArgumentError(
                "rows must be tensors, arrays or a map-style Dataset, which Poisson sampling reads at random: the "
                "batches of a DataLoader have no such epsilon. Give the dataset itself."
            )
        Problems().count("rows_per_unit", rows_per_unit).raise_if_any()
        if isinstance(rows, TensorDataset):
            rows = rows.tensors
        self._arrays = None
        if isinstance(rows, (tuple, list)):
            if len(rows) != 2:
                raise ArgumentError(f"rows must be a pair of inputs and targets, got {len(rows)} parts.")
            self._arrays = tree_map(_tensor, tuple(rows))
        count = len(rows) if self._arrays is None else number_of_rows(self._arrays)
        if units is not None and len(units) != count:
            raise ArgumentError(f"units must name the owner of each of {count} rows, got {len(units)}.")
        owners = np.arange(count) if units is None else dense_units([str(unit) for unit in units]).numpy()
        self._order = np.argsort(owners, kind="stable")
        self._offsets = np.concatenate([[0], np.cumsum(np.bincount(owners))]).astype(np.int64)
        self.num_units = len(self._offsets) - 1
        self._rows, self._rows_per_unit, self._device = rows, rows_per_unit, device
        self._sampler = PoissonSampler(num_units=self.num_units, sample_rate=sample_rate, keys=keys)

    def batch(self, step: int) -> DatasetBatch:
        """Return the draw of ``step``: the same for every call."""
        units, most = self._sampler.units(step), self._rows_per_unit
        first_D, count_D = self._offsets[units], self._offsets[units + 1] - self._offsets[units]
        places_DR = np.broadcast_to(np.arange(most), (len(units), most)).copy()
        crowded = count_D > most
        if crowded.any():
            words = self._sampler.keys.bits(self.num_units * most, "rows", step).reshape(-1, most)
            places_DR[crowded] = choose_without_replacement(words[units[crowded]], count_D[crowded])
        there_DR = places_DR < count_D[:, None]
        rows_DR = np.full(places_DR.shape, -1, dtype=np.int64)
        rows_DR[there_DR] = self._order[(first_D[:, None] + places_DR)[there_DR]]
        return DatasetBatch(self, self._sampler.sampling, rows_DR)

    def gather(self, rows_UR: np.ndarray) -> Microbatch:
        """Read some rows; -1 is an absent row, of zeros."""
        wanted = rows_UR.reshape(-1)
        present = wanted[wanted >= 0]
        if self._arrays is None:
            items = [tree_map(_tensor, self._item(int(row))) for row in present]
            read = tree_map(lambda *leaves: torch.stack(leaves), *items)
        else:
            index = torch.from_numpy(present)
            read = map_tensors(lambda x: x[index], self._arrays)
        places = torch.from_numpy(np.flatnonzero(wanted >= 0))

        def spread(x: Tensor) -> Tensor:
            whole = x.new_zeros((len(wanted), *x.shape[1:]))
            whole[places] = x
            return whole.to(self._device)

        inputs, targets = map_tensors(spread, read)
        there_UR = rows_UR >= 0
        weights_UR = (there_UR / np.maximum(there_UR.sum(1, keepdims=True), 1)).astype(np.float32)
        return Microbatch(inputs, targets, torch.from_numpy(weights_UR).to(self._device))

    def _item(self, row: int) -> tuple[Any, Any]:
        item = self._rows[row]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise ArgumentError("each item of the dataset must be a pair of inputs and targets.")
        return item[0], item[1]


@final
@dataclass(frozen=True, eq=False)
class DatasetBatch:
    """One draw. Sensitive: hand it to the step, and to nothing else."""

    _source: DatasetBatches
    sampling: Sampling
    _rows_DR: np.ndarray

    def __repr__(self) -> str:
        return "DatasetBatch(sensitive)"

    def microbatches(self, units: int) -> Iterator[Microbatch]:
        """Yield the draw in pieces of exactly ``units`` units, the last one padded. An empty draw yields nothing."""
        for start in range(0, len(self._rows_DR), units):
            piece = self._rows_DR[start : start + units]
            yield self._source.gather(np.pad(piece, ((0, units - len(piece)), (0, 0)), constant_values=-1))


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (np.ndarray, np.generic, int, float, bool)):
        return torch.as_tensor(value)
    raise ArgumentError(f"rows must be tensors, arrays or numbers, got {type(value).__name__}. Convert them first.")
