"""Standard normals in float64 by Box–Muller, and their release on a grid: ``privacy.noise`` defines what they must be.

Arrays hold 64-bit numbers and are overwritten, so that a step's noise takes no more memory than its random words.
Every entry is computed separately: no result depends on the number of threads.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpvision.kernels.ops import call, is_dense, kernel


def _is_row(array: NDArray[Any], dtype: type) -> bool:
    return array.ndim == 1 and array.flags.c_contiguous and array.dtype == dtype


def _words_fit(words: NDArray[np.uint64], tails: NDArray[np.int64], tail_radii: NDArray[np.float64]) -> bool:
    words_fit = _is_row(words, np.uint64) and words.flags.writeable and words.size % 2 == 0
    return words_fit and _is_row(tails, np.int64) and _is_row(tail_radii, np.float64) and tails.size == tail_radii.size


@kernel(_words_fit, "an even number of writable uint64 words, and as many int64 tails as float64 radii")
def from_words(
    words: NDArray[np.uint64], tails: NDArray[np.int64], tail_radii: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Turn random words into normals, in the same memory.

    Args:
        words: Uniform 64-bit words; the first half become radii, the other half angles.
        tails: Positions of radius words that must not be used, ascending.
        tail_radii: The radii to use there instead.

    Returns:
        ``words`` seen as float64: one normal in the place of each word.
    """
    addresses = map(_address, (words, tails, tail_radii))
    call("normals", (words.size // 2, tails.size), *addresses)
    return words.view(np.float64)


def row_of(sums: Tensor, *, copy: bool) -> Tensor:
    """Return sums in the form that ``release`` takes: contiguous float64, the widest float, without a graph.

    They are on the CPU for every device, so that all devices give equal bits. Without ``copy``, sums that already fit
    are returned as they are.
    """
    if not copy and is_dense(sums, torch.float64) and not sums.requires_grad:
        return sums
    return torch.empty(sums.shape, dtype=torch.float64).copy_(sums.detach())


def _release_fits(rows: list[Tensor], normals: NDArray[np.float64], **_: float) -> bool:
    rows_fit = all(is_dense(row, torch.float64) and not row.requires_grad for row in rows)
    return rows_fit and _is_row(normals, np.float64) and sum(row.numel() for row in rows) == normals.size


@kernel(_release_fits, "float64 rows on the CPU, contiguous, with one float64 normal for each of their numbers")
def release(
    rows: list[Tensor],
    normals: NDArray[np.float64],
    *,
    steps_per_sum: float,
    steps_per_normal: float,
    mean_per_step: float,
) -> bool:
    """Replace sums by ``(round(sum · steps_per_sum) + round(normal · steps_per_normal)) · mean_per_step``.

    Args:
        rows: The sums, overwritten; the rows take the normals one after the other.
        normals: As many as there are sums.
        steps_per_sum: One over the spacing of the grid.
        steps_per_normal: Standard deviation of the noise, in steps of the grid.
        mean_per_step: Spacing of the grid over the divisor of the mean.

    Returns:
        Whether all sums were finite. If not, the results must not be used.
    """
    counts = (ctypes.c_int64 * len(rows))(*[row.numel() for row in rows])
    pointers = (ctypes.c_void_p * len(rows))(*[row.data_ptr() for row in rows])
    numbers = (len(rows), steps_per_sum, steps_per_normal, mean_per_step)
    return not call("release", numbers, counts, pointers, _address(normals))


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]  # ``ctypes.data`` is slower: it runs code in Python
