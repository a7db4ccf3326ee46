"""``BatchMemoryManager`` with Opacus's name: a limit on the rows that are computed at once."""

from __future__ import annotations

from types import TracebackType
from typing import final

from dpvision.compat.privacy_engine import DPOptimizer, PrivateDataLoader
from dpvision.errors import ArgumentError, Problems


@final
class BatchMemoryManager:
    """Compute at most ``max_physical_batch_size`` rows at once inside of the block.

    Opacus divides a logical batch into several that its loop sees, and lets ``optimizer.step()`` wait. Here the loop
    sees one batch for each step, and the step divides it: nothing of one draw can be left over for the next.

    Args:
        data_loader: the loader that ``make_private`` returned.
        max_physical_batch_size: rows that are computed at once. No influence on the result beyond rounding.
        optimizer: the optimizer that ``make_private`` returned.
    """

    def __init__(self, *, data_loader: PrivateDataLoader, max_physical_batch_size: int, optimizer: DPOptimizer) -> None:
        Problems().count("max_physical_batch_size", max_physical_batch_size).raise_if_any()
        if not isinstance(data_loader, PrivateDataLoader) or not isinstance(optimizer, DPOptimizer):
            raise ArgumentError("BatchMemoryManager takes the loader and the optimizer that make_private returned.")
        self._loader, self._rows = data_loader, max_physical_batch_size
        self._before: int | None = None

    def __enter__(self) -> PrivateDataLoader:
        self._before = self._loader.limit_rows(self._rows)
        return self._loader

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.limit_rows(self._before)
