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

from dpvision.checks import ArgumentError
from dpvision.native.build import build, loaded


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
    kernel = _kernel("dpvision_normals", *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3)
    kernel(pairs, tails.size, words.ctypes.data, tails.ctypes.data, tail_radii.ctypes.data, torch.get_num_threads())
    return words.view(np.float64)


def release(
    sums: NDArray[np.float64],
    normals: NDArray[np.float64],
    *,
    steps_per_sum: float,
    steps_per_normal: float,
    mean_per_step: float,
) -> NDArray[np.float64]:
    """``(round(sum · steps_per_sum) + round(normal · steps_per_normal)) · mean_per_step`` in the normals' place."""
    if not takes(normals) or normals.dtype != np.float64 or not _fits(sums, np.float64) or sums.size != normals.size:
        raise ArgumentError(
            "sums and normals must be as many float64, the normals writable, got "
            f"{sums.size} {sums.dtype} and {normals.size} {normals.dtype}. Use `takes` first."
        )
    kernel = _kernel("dpvision_release", ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_double] * 3)
    scales = (steps_per_sum, steps_per_normal, mean_per_step)
    kernel(normals.size, sums.ctypes.data, normals.ctypes.data, *scales, torch.get_num_threads())
    return normals


def _fits(array: NDArray[Any], *dtypes: type) -> bool:
    return array.ndim == 1 and array.flags.c_contiguous and any(array.dtype == dtype for dtype in dtypes)


@functools.cache
def _kernel(name: str, *arguments: type) -> Callable[..., None]:
    function = loaded()[name]
    function.argtypes = [*arguments, ctypes.c_int]
    function.restype = None
    return function
