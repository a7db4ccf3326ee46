"""Draws from a user's own rows: tensors, arrays, or any map-style Dataset. Only the rows that were drawn are read.

A row is read, transformed and collated by itself, with random numbers of its own, in this process or in worker
processes: what one row becomes does not depend on which others were drawn.

Shapes: D drawn units, U units of a micro-batch, R rows per unit, K views of a row.
A unit gives R·K neighbouring rows to a micro-batch: all views of its first row, then those of its second, and so on.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dpvision.data.store import dense_units
from dpvision.errors import ArgumentError, PrivacyError, Problems
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import PoissonSampler, Sampling, choose_without_replacement
from dpvision.privacy.values import (
    Microbatch,
    RowTree,
    chosen_starts,
    map_tensors,
    number_of_rows,
    row_tensors,
    rows_digest,
)

_MOST_IN_A_REQUEST = 32  # rows that a worker process reads at once
_MOST_VIEWS = 10_000
_MOST_COMPARED = 128  # rows of a Dataset that are read to tell it from another


@final
@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows become inputs and targets.

    Attributes:
        transform: from an item of the dataset to another, such as a random crop; called once for each view. Without
            it the dataset itself is read once for each view.
        collate: from a list with one item to its inputs and targets with one row each.
        views_per_unit: augmented views of each row; averaged before clipping.
        workers: processes that read rows; 0 reads in this process. No influence on what is read.
    """

    transform: Callable[[Any], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    views_per_unit: int = 1
    workers: int = 0

    @property
    def of_arrays(self) -> bool:
        """Whether rows of arrays are used as they are."""
        return self.transform is None and self.collate is None and self.views_per_unit == 1


@final
class DatasetBatches:
    """The draws of one run over a user's rows.

    Args:
        rows: a pair (inputs, targets) of tensors, arrays, or dicts or tuples of them; or a map-style Dataset whose
            items are such pairs of single rows, at least after ``reading``.
        units: the owner of each row; default: each row is a unit of its own.
        rows_per_unit: rows that a unit gives at most to a step; averaged before clipping.
        reading: transform, collate, views and worker processes.
        mechanism: gives the rate; the rows have no influence on it.
        keys: the keys of the run; streams "sampling", "rows" and "augmentation" are used.
        device: where micro-batches are placed.

    Raises:
        ArgumentError: rows that can't be read at random, or units that do not name every row.

    Guarantee: units join as ``PoissonSampler`` says. A unit's rows are chosen, and torch's, numpy's and Python's global
    generators are seeded for each of its views, by its own parts of the streams; its weights sum to one: together its
    rows and views are clipped once. That the dataset and the functions of ``reading`` keep nothing of one row for
    another is the caller's part.
    """

    def __init__(
        self,
        rows: Any,
        *,
        units: Sequence[object] | None,
        rows_per_unit: int,
        reading: Reading,
        mechanism: Mechanism,
        keys: Keys,
        device: torch.device | str,
    ) -> None:
        problems = Problems().count("rows_per_unit", rows_per_unit)
        problems.count("views_per_unit", reading.views_per_unit).count("workers", reading.workers, least=0)
        problems.raise_if_any()
        problems.require(reading.views_per_unit <= _MOST_VIEWS, f"views_per_unit is above {_MOST_VIEWS}.")
        problems.raise_if_any()
        self._reader = _Reader(rows, reading)
        owners = _owners(len(self._reader), units)
        self._order = np.argsort(owners, kind="stable")
        self._offsets = np.concatenate([[0], np.cumsum(np.bincount(owners))]).astype(np.int64)
        self.num_units = len(self._offsets) - 1
        self._rows_per_unit, self._reading, self._device = rows_per_unit, reading, device
        self._sampler = PoissonSampler(
            num_units=self.num_units,
            sample_rate=mechanism.sample_rate,
            keys=keys,
            expected_batch_size=mechanism.expected_batch_size,
        )
        self._requests = _Requests()
        self._loader: DataLoader[RowTree] | None = None

    def fingerprint(self) -> str:
        """Digest the number of rows, their units, and their content. Sensitive.

        Of a Dataset some rows are read, spread evenly over all: another order of the rows is noticed, one other row
        may not be.
        """
        digest = hashlib.sha256(f"{len(self._reader)} {self._rows_per_unit} {self._reading.views_per_unit}".encode())
        for array in (self._order, self._offsets, *self._reader.arrays()):
            digest.update(f"{array.shape} {array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
        if not self._reader.arrays() and len(self._reader):
            rows = np.unique(np.linspace(0, len(self._reader) - 1, _MOST_COMPARED).round().astype(np.int64))
            seeds = np.repeat(rows[:, None], self._reading.views_per_unit, axis=1).astype(np.uint64)
            digest.update(rows_digest(self._reader[_Request(rows, seeds)]))
        return digest.hexdigest()

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
        views = self._reading.views_per_unit
        seeds = self._sampler.keys.bits_by_unit(units, most * views, "augmentation", step)
        return DatasetBatch(self, self._sampler.sampling, rows_DR, seeds.reshape(len(units), most, views))

    def read(
        self, rows_DR: NDArray[np.int64], seeds_DRK: NDArray[np.uint64], *, units: int, only: range | None = None
    ) -> Iterator[Microbatch]:
        """Yield micro-batches of exactly ``units`` units, all or ``only`` some; -1 is an absent row, of zeros."""
        starts = chosen_starts(len(rows_DR), units, only)
        pieces = [self._requests_for(rows_DR[i : i + units], seeds_DRK[i : i + units]) for i in starts]
        fetched = self._fetched([request for piece in pieces for request in piece])
        for start, piece in zip(starts, pieces, strict=True):
            parts = [next(fetched) for _ in piece]
            read = parts[0] if len(parts) == 1 else tree_map(lambda *each: torch.cat(each), *parts)
            rows_UR = rows_DR[start : start + units]
            missing = units - len(rows_UR)
            yield self._microbatch(read, np.pad(rows_UR, ((0, missing), (0, 0)), constant_values=-1))

    def _requests_for(self, rows_UR: NDArray[np.int64], seeds_URK: NDArray[np.uint64]) -> list[_Request]:
        """Divide the rows of a micro-batch into requests; one is enough where this process reads them."""
        there_UR = rows_UR >= 0
        rows, seeds = rows_UR[there_UR], seeds_URK[there_UR]
        size = max(1, len(rows))
        if self._reading.workers:
            size = max(1, min(_MOST_IN_A_REQUEST, -(-len(rows) // self._reading.workers)))
        return [_Request(rows[i : i + size], seeds[i : i + size]) for i in range(0, len(rows), size)]

    def _fetched(self, requests: list[_Request]) -> Iterator[RowTree]:
        """Yield what was asked for, in order."""
        if not self._reading.workers:
            yield from map(self._reader.__getitem__, requests)
            return
        if self._loader is None:
            self._loader = DataLoader(
                self._reader,
                sampler=self._requests,  # pyright: ignore[reportArgumentType] - any iterable of keys will do
                batch_size=None,
                num_workers=self._reading.workers,
                collate_fn=_as_it_is,
                persistent_workers=True,
                generator=torch.Generator(),  # a seed from torch's own would change what random layers draw
            )
        self._requests.waiting = requests
        for read in self._loader:
            if self._requests.waiting is not requests:
                raise PrivacyError("another draw is being read: finish or drop one before the next.")
            yield read

    def _microbatch(self, read: RowTree, rows_UR: NDArray[np.int64]) -> Microbatch:
        """Put the rows that were read into their places."""
        there_UR = np.repeat(rows_UR >= 0, self._reading.views_per_unit, axis=1)
        places = torch.from_numpy(np.flatnonzero(there_UR))

        def spread(x: Tensor) -> Tensor:
            whole = x.new_zeros((there_UR.size, *x.shape[1:]))
            whole[places] = x
            return whole.to(self._device)

        inputs, targets = map_tensors(spread, read)
        weights_UR = (there_UR / np.maximum(there_UR.sum(1, keepdims=True), 1)).astype(np.float32)
        return Microbatch(inputs, targets, torch.from_numpy(weights_UR).to(self._device))


@final
@dataclass(frozen=True, eq=False)
class DatasetBatch:
    """One draw. Sensitive: hand it to the step, and to nothing else."""

    _source: DatasetBatches
    sampling: Sampling
    _rows_DR: NDArray[np.int64]
    _seeds_DRK: NDArray[np.uint64]

    def __repr__(self) -> str:
        return "DatasetBatch(sensitive)"

    @property
    def drawn_batch_size(self) -> int:
        """The number of drawn units. Sensitive."""
        return len(self._rows_DR)

    def microbatches(self, units: int, only: range | None = None) -> Iterator[Microbatch]:
        """Yield the draw in pieces of exactly ``units`` units, the last one padded, or those of these numbers."""
        Problems().count("units", units).raise_if_any()
        return self._source.read(self._rows_DR, self._seeds_DRK, units=units, only=only)


def count_of_units(rows: Any, units: Sequence[object] | None) -> int:
    """Return the number of units in a user's rows. Sensitive.

    Args:
        rows: as for ``DatasetBatches``.
        units: the owner of each row; default: each row is a unit of its own.
    """
    return len(np.unique(_owners(len(_Reader(rows, Reading())), units)))


def _owners(count: int, units: Sequence[object] | None) -> NDArray[np.int64]:
    """Number the owner of each row."""
    if units is None:
        return np.arange(count)
    if isinstance(units, (str, bytes, Mapping, Set)) or not (hasattr(units, "__len__") and hasattr(units, "__iter__")):
        raise ArgumentError(f"units must be a list or an array with the owner of each row, got {type(units).__name__}.")
    if len(units) != count:
        raise ArgumentError(f"units must name the owner of each of {count} rows, got {len(units)}.")
    names = [_owner(unit) for unit in units]
    if len({type(name) for name in names}) > 1:
        raise ArgumentError(
            "units must be all whole numbers or all texts, so that it is certain which rows have the same owner. "
            "Convert them."
        )
    return dense_units(names).numpy()


def _owner(unit: Any) -> int | str:
    """Return the name of an owner: two rows have the same one if and only if they are meant to."""
    value: Any = unit.item() if isinstance(unit, (Tensor, np.ndarray, np.generic)) and unit.shape == () else unit
    if isinstance(value, (Tensor, np.ndarray)):
        raise ArgumentError(f"units must have one entry for each row, got entries of shape {tuple(value.shape)}.")
    if isinstance(value, bytes):
        value = value.decode(errors="surrogateescape")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as tables with gaps hold them
    if isinstance(value, str) and value:
        return str(value)
    if isinstance(value, int):
        return int(value)
    missing = value is None or value == "" or value != value
    kind = "None, NaN or an empty text" if missing else f"a {type(value).__name__}"
    raise ArgumentError(
        f"units must be whole numbers or texts, got {kind}: it must be certain which rows have the same owner. "
        "Name the owner of every row, or leave rows without one out."
    )


@final
@dataclass(frozen=True, eq=False)
class _Request:
    """Rows to read, and a seed for each of their views."""

    rows: NDArray[np.int64]
    seeds_NK: NDArray[np.uint64]


@final
class _Requests(Iterable[_Request]):
    """What a DataLoader asks its workers for, in this order."""

    def __init__(self) -> None:
        self.waiting: list[_Request] = []

    def __iter__(self) -> Iterator[_Request]:
        return iter(self.waiting)

    def __len__(self) -> int:
        return len(self.waiting)


@final
class _Reader(Dataset[RowTree]):
    """The user's rows by number, as worker processes read them too."""

    def __init__(self, rows: Any, reading: Reading) -> None:
        if isinstance(rows, (DataLoader, IterableDataset)) or not hasattr(rows, "__getitem__"):
            raise ArgumentError(
                "rows must be tensors, arrays or a map-style Dataset, which Poisson sampling reads at random: the "
                "batches of a DataLoader have no such epsilon. Give the dataset itself."
            )
        if isinstance(rows, TensorDataset):
            rows = rows.tensors
        self._rows, self._reading, self._arrays = rows, reading, None
        # A list holds items, as a Dataset does, unless it holds arrays.
        if isinstance(rows, tuple) or (isinstance(rows, list) and _only_arrays(rows)):
            if len(rows) != 2:
                raise ArgumentError(f"rows must be a pair of inputs and targets, got {len(rows)} parts.")
            self._arrays = _tree(tuple(rows))
        self._count = len(rows) if self._arrays is None else number_of_rows(self._arrays)

    def __len__(self) -> int:
        return self._count

    def arrays(self) -> list[NDArray[Any]]:
        """Return the rows where they are arrays; a Dataset has none."""
        tensors = [] if self._arrays is None else row_tensors(self._arrays)
        return [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for tensor in tensors]

    def __getitem__(self, request: _Request) -> RowTree:
        """Return the inputs and targets of all views of the rows, one after the other."""
        if self._arrays is not None and self._reading.of_arrays:
            index = torch.from_numpy(request.rows)
            return map_tensors(lambda x: x[index.to(x.device)], self._arrays)
        with _generators_restored():
            each = [
                view
                for row, seeds in zip(request.rows.tolist(), request.seeds_NK.tolist(), strict=True)
                for view in self._views(row, seeds)
            ]
        try:
            return tree_map(lambda *leaves: torch.cat(leaves), *each)
        except (RuntimeError, ValueError) as error:
            raise ArgumentError(
                f"the rows do not have the same shape and structure: {error}. Bring each row to a fixed one with "
                "transform, such as a resize or padding to a fixed length."
            ) from error

    def _views(self, row: int, seeds: list[int]) -> Iterator[RowTree]:
        """Yield the views of one row, each with random numbers of its own."""
        transform, item = self._reading.transform, None
        for place, seed in enumerate(seeds):
            _seed_generators(seed)
            if place == 0 or transform is None:
                item = self._item(row)
            yield self._collated(item if transform is None else transform(item))

    def _item(self, row: int) -> Any:
        return self._rows[row] if self._arrays is None else map_tensors(lambda x: x[row], self._arrays)

    def _collated(self, item: Any) -> RowTree:
        """Make the inputs and targets of one row, with one row each."""
        collate = self._reading.collate
        pair = item if collate is None else collate([item])
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentError(
                f"each row must become a pair of inputs and targets, got {type(pair).__name__}. Make the pair in the "
                "dataset, in transform or in collate."
            )
        tree = _tree(tuple(pair))
        if collate is None:
            return map_tensors(lambda x: x[None], tree)
        if number_of_rows(tree) != 1:
            raise ArgumentError(f"collate is given one row at a time, and made {number_of_rows(tree)} of it.")
        return tree


def _only_arrays(values: list[Any]) -> bool:
    return len(values) > 0 and all(isinstance(value, (Tensor, np.ndarray)) for value in values)


def _as_it_is(read: RowTree) -> RowTree:
    return read


def _tree(value: Any) -> RowTree:
    """Bring mappings, tuples and lists of arrays and numbers to dicts, tuples and lists of tensors."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (np.ndarray, np.generic, int, float, bool)):
        return torch.as_tensor(value)
    if isinstance(value, Mapping):
        return {name: _tree(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_tree(each) for each in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    raise ArgumentError(
        f"rows must be tensors, arrays or numbers, or dicts or tuples of them, got {type(value).__name__}. Convert "
        "them, for example with transform."
    )


@contextmanager
def _generators_restored() -> Iterator[None]:
    """Restore torch's, numpy's and Python's global generators: what is drawn in a row changes nothing outside."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed >> 1)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    random.seed(seed)
