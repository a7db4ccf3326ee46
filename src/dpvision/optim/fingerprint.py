"""A few numbers that tell whether a large tensor has changed, where a copy would take as much memory as the tensor.

Of every run of 4,096 words, the sum of the words times keys, modulo 2⁶⁴. Keys are random odd numbers of 64 bits that
nobody else has, words have at most 32 bits: a change of one word in a run always shows, because an odd key has an
inverse; any other change goes unseen with probability 2⁻³² at most, over the choice of keys. A float64 is two words.
"""

# R runs, W words of a run

from __future__ import annotations

import functools
import secrets
from typing import Final

import numpy as np
import torch
from torch import Tensor

_RUN: Final = 4096
_AT_ONCE: Final = 64  # runs whose products stay in the cache
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def fingerprint(tensor: Tensor) -> Tensor:
    """One whole number for every run of the tensor's bits, in the order of its entries.

    Guarantee: two tensors of one shape and type that differ have different ones, but for a chance of 2⁻³².
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    whole = words.numel() // _RUN * _RUN
    keys_W = _keys(words.device)
    sums_R = torch.empty(whole // _RUN + 1, dtype=torch.int64, device=words.device)
    runs_RW = words[:whole].view(-1, _RUN)
    for first in range(0, runs_RW.shape[0], _AT_ONCE):
        some_RW = runs_RW[first : first + _AT_ONCE]
        torch.sum(some_RW * keys_W, 1, out=sums_R[first : first + some_RW.shape[0]])
    rest = words[whole:]
    sums_R[-1] = (rest * keys_W[: rest.numel()]).sum()
    return sums_R


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """Odd numbers, drawn once in a process."""
    words = np.frombuffer(secrets.token_bytes(8 * _RUN), dtype=np.int64) | 1
    return torch.from_numpy(words).to(device)
