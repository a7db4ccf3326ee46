"""Standard normals in float64 by Box–Muller, and their release on a grid: see ``noise.py`` for what they must be.

Arrays are 64 bits wide and changed in place, so that a step's noise takes no more memory than its random words did.
Every entry is computed by itself: no result depends on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpvision.errors import ArgumentError
from dpvision.kernels.compile import build, loaded


def takes(array: NDArray[Any]) -> bool:
    """Whether these kernels can work in ``array``: they exist, and it is one writable row of 64-bit numbers."""
    return build().library is not None and _fits(array, np.uint64, np.float64) and array.flags.writeable


def from_words(
    words: NDArray[np.uint64], tails: NDArray[np.int64], tail_radii: NDArray[np.float64]
) -> NDArray[np.float64]:
    """One normal in the place of each word; the first half of the words are radii, the others angles.

    ``tails`` are the places of radius words that are not to be used, ascending, and ``tail_radii`` what to use there.
    """
    fits = takes(words) and words.dtype == np.uint64 and words.size % 2 == 0
    if not fits or not _fits(tails, np.int64) or not _fits(tail_radii, np.float64) or tails.size != tail_radii.size:
        raise ArgumentError(
            "words must be an even number of writable uint64, with as many int64 tails as float64 tail_radii, got "
            f"{words.size} {words.dtype}, {tails.size} {tails.dtype} and {tail_radii.size} {tail_radii.dtype}. "
            "Use `takes` first."
        )
    pairs = words.size // 2
    kernel = _normals_kernel()
    kernel(pairs, tails.size, *map(_address, (words, tails, tail_radii)), torch.get_num_threads())
    return words.view(np.float64)


def row_of(sums: Tensor, *, copy: bool) -> Tensor:
    """Sums as ``release`` takes them: contiguous float64, of which no kind of float is wider.

    On the CPU wherever they live, so that every device gives equal bits. Without ``copy``, what fits is taken as it is.
    """
    if not copy and _is_row(sums):
        return sums
    return torch.empty(sums.shape, dtype=torch.float64).copy_(sums.detach())


def _is_row(sums: Tensor) -> bool:
    plain = sums.dtype == torch.float64 and sums.is_contiguous() and sums.device.type == "cpu"
    return plain and not sums.requires_grad


def release(
    rows: list[Tensor],
    normals: NDArray[np.float64],
    *,
    steps_per_sum: float,
    steps_per_normal: float,
    mean_per_step: float,
) -> bool:
    """``(round(sum · steps_per_sum) + round(normal · steps_per_normal)) · mean_per_step`` in the place of the sums.

    The rows take the normals one after the other. Returns whether all sums were finite.
    """
    counts = [row.numel() for row in rows]
    if not all(map(_is_row, rows)) or not _fits(normals, np.float64) or sum(counts) != normals.size:
        raise ArgumentError(
            "rows and normals must be as many float64, contiguous and on the CPU, got "
            f"{sum(counts)} in {len(rows)} rows, and {normals.size} {normals.dtype}."
        )
    each = (ctypes.c_int64 * len(rows))(*counts), (ctypes.c_void_p * len(rows))(*(row.data_ptr() for row in rows))
    scales = (steps_per_sum, steps_per_normal, mean_per_step)
    return not _release_kernel()(len(rows), *each, _address(normals), *scales, torch.get_num_threads())


def _fits(array: NDArray[Any], *dtypes: type) -> bool:
    return array.ndim == 1 and array.flags.c_contiguous and any(array.dtype == dtype for dtype in dtypes)


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]  # ``ctypes.data`` is slower: it runs code in Python


@functools.cache
def _normals_kernel() -> Callable[..., None]:
    function = loaded()["dpvision_normals"]
    function.argtypes = [*[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3, ctypes.c_int]
    function.restype = None
    return function


@functools.cache
def _release_kernel() -> Callable[..., int]:
    function = loaded()["dpvision_release"]
    function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3, *[ctypes.c_double] * 3, ctypes.c_int]
    function.restype = ctypes.c_int64
    return function
