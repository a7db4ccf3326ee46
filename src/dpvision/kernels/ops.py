"""The C functions of the kernels, how they are called, and when they can be.

All C functions have the same form: int64 arguments, then doubles, then pointers, then the number of threads.
``PROTOTYPES`` says how many of each; ``call`` passes them. The Python side of every kernel is a ``Kernel``: ``takes``
says whether it can be used for given arguments, ``attempt`` returns None where it can't, and a call raises an error
instead of reading memory that is not there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar, final

import torch
from torch import Tensor, nn

from dpvision.errors import ArgumentError, brief
from dpvision.kernels.compile import build, loaded

P = ParamSpec("P")
R = TypeVar("R")


class Prototype(NamedTuple):
    """How many arguments of each kind a C function takes, before the number of threads; ``counts``: returns int64."""

    integers: int
    doubles: int
    pointers: int
    counts: bool = False


PROTOTYPES: Final[dict[str, Prototype]] = {
    "add_weighted": Prototype(2, 0, 3),
    "channel_sums": Prototype(3, 0, 2),
    "clip_factors": Prototype(2, 4, 3, counts=True),
    "convolution_moments": Prototype(3, 0, 4),
    "depthwise_gradients": Prototype(12, 0, 4),
    "filter_moments": Prototype(3, 0, 3),
    "filter_order": Prototype(3, 0, 2),
    "gram_norms_sq": Prototype(3, 0, 3),
    "narrow_linear": Prototype(3, 0, 5),
    "norm_act_backward": Prototype(8, 1, 9),
    "norm_act_forward": Prototype(8, 1, 7),
    "normals": Prototype(2, 0, 3),
    "outer_sum": Prototype(3, 0, 4),
    "pool2_backward": Prototype(4, 0, 3),
    "pool2_forward": Prototype(4, 0, 3),
    "pool3_backward": Prototype(4, 0, 3),
    "pool3_forward": Prototype(4, 0, 3),
    "pull_back": Prototype(4, 0, 6),
    "release": Prototype(1, 3, 3, counts=True),
    "scatter": Prototype(1, 0, 6),
    "tanh": Prototype(1, 0, 2),
    "unit_squares": Prototype(2, 0, 2),
    "window_gradients": Prototype(12, 0, 4),
    "winograd_convolve": Prototype(5, 0, 4),
    "winograd_convolve_raw": Prototype(6, 0, 4),
    "winograd_filters": Prototype(3, 0, 2),
    "winograd_sum": Prototype(5, 0, 4),
    "winograd_units": Prototype(6, 0, 5),
}
"""Every ``extern "C"`` function of ``cpp/``, without its prefix ``dpvision_``."""

PLAIN_TYPES: Final = (Tensor, nn.Parameter)
"""Types whose memory a kernel may read: no fake tensors, no subclasses with operations of their own."""


def call(name: str, numbers: Sequence[float], *memory: Tensor | ctypes.Array[Any] | int | None) -> int:
    """Run a C function on as many threads as torch uses.

    Args:
        name: A key of ``PROTOTYPES``.
        numbers: The integers, then the doubles.
        memory: Tensors, arrays of ctypes or addresses, in the order of the pointers; None is a null pointer.

    Returns:
        What the function counts; None for the others.

    Raises:
        ArgumentError: Gradients would be recorded for a tensor: a kernel is not part of any graph.
    """
    if torch.is_grad_enabled() and any(type(each) in PLAIN_TYPES and each.requires_grad for each in memory):  # pyright: ignore
        raise ArgumentError(f"{name} records no gradients: call it under torch.no_grad or on detached tensors.")
    addresses = [each.data_ptr() if type(each) in PLAIN_TYPES else each for each in memory]  # pyright: ignore
    return _function(name)(*numbers, *addresses, torch.get_num_threads())


@functools.cache
def _function(name: str) -> Callable[..., int]:
    """The function with its types declared: a wrong argument is an exception, not a crash."""
    integers, doubles, pointers, counts = PROTOTYPES[name]
    function = loaded()[f"dpvision_{name}"]
    numbers = [ctypes.c_int64] * integers + [ctypes.c_double] * doubles
    function.argtypes = [*numbers, *[ctypes.c_void_p] * pointers, ctypes.c_int]
    function.restype = ctypes.c_int64 if counts else None
    return function


def is_readable(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether ``x`` is a tensor of this type in the CPU's memory, of any strides."""
    return x.dtype is dtype and x.is_cpu and type(x) in PLAIN_TYPES


def is_dense(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether ``x`` is a contiguous tensor of this type in the CPU's memory."""
    return x.dtype is dtype and x.is_contiguous() and x.is_cpu and type(x) in PLAIN_TYPES


def is_dense_or_none(x: Tensor | None, shape: tuple[int, ...]) -> bool:
    """Return whether ``x`` is absent, or dense float32 of this shape."""
    return x is None or (x.shape == shape and is_dense(x))


@final
class Kernel(Generic[P, R]):
    """A function that runs in C++, and the rule that says for which arguments it can."""

    def __init__(self, run: Callable[P, R], fits: Callable[..., bool], needs: str) -> None:
        functools.update_wrapper(self, run)
        self._run = run
        self._fits = fits
        self._needs = needs

    def takes(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Return whether the kernels are available and can be called with these arguments."""
        return build().library is not None and self._fits(*args, **kwargs)

    def attempt(self, *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Run the kernel if it takes these arguments; return None if it doesn't."""
        if build().library is None or not self._fits(*args, **kwargs):
            return None
        return self._run(*args, **kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the kernel.

        Raises:
            ArgumentError: The arguments do not fit, or the kernels are not available.
        """
        if not self._fits(*args, **kwargs):
            name = getattr(self, "__name__", "kernel")
            seen = ", ".join(map(_described, (*args, *kwargs.values())))
            raise ArgumentError(f"{name} needs {self._needs}, got {seen}. Check with `{name}.takes` first.")
        return self._run(*args, **kwargs)


def kernel(fits: Callable[..., bool], needs: str) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Make a ``Kernel`` of a function that uses ``call``.

    Args:
        fits: Takes the same arguments, and returns whether the C function can read and write all of them.
        needs: The same rule in words, for the error.
    """
    return lambda run: Kernel(run, fits, needs)


def _described(argument: object) -> str:
    """An argument as it appears in an error: of tensors everything but the values, which may be private."""
    if isinstance(argument, (list, tuple)) and any(isinstance(item, Tensor) for item in argument):
        return f"[{', '.join(map(_described, argument))}]"
    if not isinstance(argument, Tensor):
        return brief(argument)
    kind = str(argument.dtype).removeprefix("torch.")
    return f"{kind} {tuple(argument.shape)} with strides {argument.stride()} on {argument.device}"
