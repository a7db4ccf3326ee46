"""The machine by its features, and how fast it can multiply matrices: never a model name, a host name or a path."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.workload import Workload

_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_SIDE: Final = 2048
_TRIES: Final = 5
_COUNTED_ROWS: Final = 2


def machine() -> dict[str, str | int]:
    """What a reader needs to compare figures: cores, vector instructions, caches, torch's version."""
    return {
        "cores": os.cpu_count() or 1,
        "simd": torch.backends.cpu.get_cpu_capability(),
        **_cache_sizes(),
        "torch": torch.__version__,
    }


def _cache_sizes() -> dict[str, str]:
    """Sizes of the second- and third-level caches as the kernel states them; nothing where it does not."""
    sizes: dict[str, str] = {}
    for folder in sorted(_CACHES.glob("index*")):
        level, size = ((folder / name).read_text().strip() for name in ("level", "size"))
        if level in ("2", "3"):
            sizes[f"l{level}_cache"] = size
    return sizes


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Run with ``count`` threads, or as many as torch has; afterwards everything is as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def peak_flops() -> float:
    """Floating-point operations a second in a large float32 matrix product: best of five."""
    a, b = (torch.ones(_SIDE, _SIDE) for _ in range(2))
    torch.mm(a, b)
    fastest = min(_seconds_of_product(a, b) for _ in range(_TRIES))
    return 2 * _SIDE**3 / fastest


def _seconds_of_product(a: torch.Tensor, b: torch.Tensor) -> float:
    started = time.perf_counter()
    torch.mm(a, b)
    return time.perf_counter() - started


def step_flops(workload: Workload) -> int:
    """Operations in the convolutions and matrix products of one ordinary forward and backward pass.

    Counted on two rows: all of them grow with the rows.
    """
    model, (inputs, targets) = workload.make_model(), workload.make_rows(_COUNTED_ROWS)
    with FlopCounterMode(display=False) as counter:
        workload.row_losses(model(inputs), targets).mean().backward()
    return counter.get_total_flops() * workload.num_rows // _COUNTED_ROWS
