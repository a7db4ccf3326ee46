"""What depends on the device of a step: its random generators, its precision, and whether it has float64.

The plain route runs on any device of torch that has float64.

Precision. With ``bfloat16`` torch's autocast rounds what layers multiply, forward and backward, to 8 significant bits.
Everything after that is as without it: what a layer was given and the gradient of its output are taken to float32
(exactly), per-unit gradients and norms are computed from them in float32, and sums in float64. So a unit's norm is that
of the gradient that is summed, and the bound on its contribution is the same. What autocast changes is which gradient
is clipped: one of a network that rounds more.

float32 means float32: a program may let matrix products and convolutions of float32 round to 10 or 8 bits (TF32, which
is PyTorch's default for convolutions on CUDA; ``torch.set_float32_matmul_precision``). A norm from one operation and a
sum from another would then differ by that much. ``exact_float32`` switches it off inside a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from dpvision.config import Precision
from dpvision.errors import ArgumentError

_WITHOUT_GENERATOR: Final = ("cpu", "meta")
_HALF: Final = (torch.bfloat16, torch.float16)
_EXACT: Final = ("ieee", "none")
_OPERATIONS: Final = ("matmul", "conv", "rnn")
_PLACES: Final = (
    ("generic", "all"),
    *((kind, each) for kind in ("mkldnn", "cuda") for each in ("all", *_OPERATIONS)),
)
_TWO_INTERFACES: Final = hasattr(torch._C, "_get_fp32_precision_getter")  # since PyTorch 2.9


def require_device(device: torch.device) -> None:
    """Refuse a device without float64, in which norms and sums are added up.

    Raises:
        ArgumentError: it has none.
    """
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"the device {device} has no float64, in which clipped gradients are added up ({error}). Use cpu or cuda."
        ) from error


@contextmanager
def forked_generators(device: torch.device | str, *, seed: int | None = None) -> Iterator[None]:
    """Restore the generators of the CPU and of ``device`` after the block; give them a seed in it, if there is one."""
    device = torch.device(device)
    own = device.type not in _WITHOUT_GENERATOR
    with torch.random.fork_rng(devices=[device] if own else [], device_type=device.type if own else "cuda"):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if own:
                torch.get_device_module(device).manual_seed_all(seed)  # manual_seed is for the current device alone
        yield


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators of the CPU and of ``device``."""
    states = [torch.get_rng_state()]
    if device.type not in _WITHOUT_GENERATOR:
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Let float32 be float32 in the block: no surrounding autocast, and no faster products that round more."""
    with ExitStack() as stack:
        for kind in sorted({"cpu", "cuda", device.type}):
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if _rounds_products(device):
            stack.enter_context(_without_fast_products())
        yield


def _read(kind: str, operation: str) -> str:
    return torch._C._get_fp32_precision_getter(kind, operation)


def _write(kind: str, operation: str, precision: str) -> None:
    torch._C._set_fp32_precision_setter(kind, operation, precision)


def _rounds_products(device: torch.device) -> bool:
    """Return whether products of float32 may round to fewer bits on this device."""
    if not _TWO_INTERFACES:
        return device.type != "cpu" or torch.get_float32_matmul_precision() != "highest"
    kinds = ("mkldnn",) if device.type == "cpu" else ("mkldnn", "cuda")
    places = [("generic", "all"), *((kind, each) for kind in kinds for each in ("all", *_OPERATIONS))]
    return any(_read(*place) not in _EXACT for place in places)


@contextmanager
def _without_fast_products() -> Iterator[None]:
    """Switch products that round off, and back to what they were. PyTorch has two interfaces that must agree."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    before = {place: _read(*place) for place in _PLACES} if _TWO_INTERFACES else {}
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        for place in before:
            if _read(*place) not in _EXACT:
                _write(*place, "ieee")
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
        for place, was in before.items():
            if _read(*place) != was:
                _write(*place, was)


@contextmanager
def rounding(device: torch.device, precision: Precision) -> Iterator[None]:
    """Compute layers in this precision inside the block: with autocast, or as they are."""
    if precision == "float32":
        yield
        return
    with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
        yield


def widened(value: Any) -> Any:
    """Return a tensor of 16 bits in float32, without rounding; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value
