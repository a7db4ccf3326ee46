"""Private steps by jax-privacy, told through a pipe when to take one: ``python jax_worker.py FOLDER``.

Runs in an environment that has jax_privacy and needs nothing else of this package. FOLDER holds ``program.json``, a
network as a list of PyTorch's operations, and ``arrays.npz``, its weights, the rows and the outputs that are expected.
The first answer is ``ready DIFFERENCE``, or ``no OPERATION`` where the network has one that is unknown here. After
that, ``step`` is answered by seconds and ``memory`` by the bytes that were needed at most beyond model and data.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from jax import lax

# pyright: reportMissingImports=false


Array = Any
Size = int | list[int] | tuple[int, ...]
_PICTURES: Final = ("NCHW", "OIHW", "NCHW")
_SELF: Final = Path("/proc/self")


class UnknownOperationError(Exception):
    """The network has an operation, or a way to use one, that is not known here."""


def _conv2d(
    x: Array,
    w: Array,
    bias: Array | None = None,
    stride: Size = (1, 1),
    padding: Size = (0, 0),
    dilation: Size = (1, 1),
    groups: int = 1,
) -> Array:
    y = lax.conv_general_dilated(
        x,
        w,
        _pair(stride),
        [(side, side) for side in _pair(padding)],
        rhs_dilation=_pair(dilation),
        dimension_numbers=_PICTURES,
        feature_group_count=groups,
    )
    return y if bias is None else y + bias[:, None, None]


def _linear(x: Array, w: Array, bias: Array | None = None) -> Array:
    return x @ w.T if bias is None else x @ w.T + bias


def _group_norm(
    x: Array,
    groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    _cudnn: bool = True,
) -> Array:
    y = _standardised(x.reshape(x.shape[0], groups, -1), (-1,), eps).reshape(x.shape)
    channels = (-1, *[1] * (x.ndim - 2))
    y = y if weight is None else y * weight.reshape(channels)
    return y if bias is None else y + bias.reshape(channels)


def _layer_norm(
    x: Array,
    shape: list[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    _cudnn: bool = True,
) -> Array:
    y = _standardised(x, tuple(range(-len(shape), 0)), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _standardised(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + eps)


def _max_pool2d(
    x: Array, size: Size, stride: Size = (), padding: Size = 0, dilation: Size = 1, ceil_mode: bool = False
) -> Array:
    _only(not ceil_mode and _pair(dilation) == (1, 1), "max_pool2d with ceil_mode or dilation")
    return _pool(x, -jnp.inf, lax.max, size, stride, padding)


def _avg_pool2d(
    x: Array,
    size: Size,
    stride: Size = (),
    padding: Size = 0,
    ceil_mode: bool = False,
    count_pad: bool = True,
    divisor: int | None = None,
) -> Array:
    _only(not ceil_mode and divisor is None, "avg_pool2d with ceil_mode or divisor_override")
    _only(count_pad or _pair(padding) == (0, 0), "avg_pool2d with count_include_pad=False")
    return _pool(x, 0.0, lax.add, size, stride, padding) / float(np.prod(_pair(size)))


def _pool(x: Array, start: float, combine: Any, size: Size, stride: Size, padding: Size) -> Array:
    window, strides = (1, 1, *_pair(size)), (1, 1, *_pair(stride or size))
    return lax.reduce_window(
        x, start, combine, window, strides, [(0, 0)] * 2 + [(side, side) for side in _pair(padding)]
    )


def _adaptive(x: Array, size: Size, reduce: Any) -> Array:
    rows, columns = _pair(size)
    n, c, h, w = x.shape
    _only(h % rows == 0 and w % columns == 0, "adaptive pooling into uneven windows")
    return reduce(x.reshape(n, c, rows, h // rows, columns, w // columns), (3, 5))


def _upsample_nearest2d(x: Array, size: list[int] | None = None, scales: list[float] | None = None) -> Array:
    down, across = scales or [new / old for new, old in zip(size or (), x.shape[2:], strict=True)]
    _only(down == int(down) and across == int(across), "upsample_nearest2d by a fraction")
    return jnp.repeat(jnp.repeat(x, int(down), 2), int(across), 3)


def _pad(x: Array, sides: list[int], mode: str = "constant", value: float | None = None) -> Array:
    _only(mode == "constant", f"pad with mode {mode}")
    pairs = list(zip(sides[::2], sides[1::2], strict=True))[::-1]  # PyTorch begins with the last dimension
    every = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    return lax.pad(x, jnp.asarray(value or 0.0, x.dtype), [(low, high, 0) for low, high in every])


def _flatten(x: Array, start: int = 0, end: int = -1) -> Array:
    end = end % x.ndim
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _add(x: Array, other: Array, alpha: float = 1) -> Array:
    return x + alpha * other


def _pair(value: Size) -> tuple[int, int]:
    sides = [value] if isinstance(value, int) else value
    return sides[0], sides[-1]


def _only(known: bool, what: str) -> None:
    if not known:
        raise UnknownOperationError(what)


OPERATIONS: Final[Mapping[str, Callable[..., Array]]] = {
    "aten.conv2d.default": _conv2d,
    "aten.linear.default": _linear,
    "aten.group_norm.default": _group_norm,
    "aten.layer_norm.default": _layer_norm,
    "aten.max_pool2d.default": _max_pool2d,
    "aten.avg_pool2d.default": _avg_pool2d,
    "aten.adaptive_avg_pool2d.default": lambda x, size: _adaptive(x, size, jnp.mean),
    "aten.adaptive_max_pool2d.default": lambda x, size: (_adaptive(x, size, jnp.max), None),
    "aten.upsample_nearest2d.vec": _upsample_nearest2d,
    "aten.pad.default": _pad,
    "aten.flatten.using_ints": _flatten,
    "aten.view_as.default": lambda x, other: x.reshape(other.shape),
    "aten.unsqueeze.default": jnp.expand_dims,
    "aten.slice.Tensor": _slice,
    "aten.cat.default": lambda xs, dim=0: jnp.concatenate(xs, dim),
    "aten.mean.dim": lambda x, dims, keep=False: x.mean(tuple(dims), keepdims=keep),
    "aten.sum.dim_IntList": lambda x, dims, keep=False: x.sum(tuple(dims), keepdims=keep),
    "aten.add.Tensor": _add,
    "aten.sub.Tensor": lambda x, other: x - other,
    "aten.mul.Tensor": lambda x, other: x * other,
    "aten.div.Tensor": lambda x, other: x / other,
    "aten.clamp.default": lambda x, low=None, high=None: jnp.clip(x, low, high),
    "aten.square.default": jnp.square,
    "aten.rsqrt.default": lax.rsqrt,
    "aten.relu.default": jax.nn.relu,
    "aten.tanh.default": jnp.tanh,
    "aten.sigmoid.default": jax.nn.sigmoid,
    "aten.mish.default": jax.nn.mish,
    "aten.silu.default": jax.nn.silu,
    "aten.selu.default": jax.nn.selu,
    "aten.gelu.default": lambda x, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "aten.hardtanh.default": lambda x, low=-1.0, high=1.0: jnp.clip(x, low, high),
    "<built-in function getitem>": lambda xs, index: xs[index],
}


def outputs_of(program: Mapping[str, Any], tensors: Mapping[str, Array], rows: Array) -> Array:
    """Run the program: every node is an operation on nodes before it, on weights and on plain values."""
    found = {**tensors, program["input"]: rows}

    def value(argument: Any) -> Any:
        if isinstance(argument, list):
            return [value(one) for one in argument]
        return found[argument["node"]] if isinstance(argument, dict) else argument

    for node in program["nodes"]:
        named = {name: value(argument) for name, argument in node["named"].items()}
        found[node["name"]] = OPERATIONS[node["operation"]](*map(value, node["arguments"]), **named)
    return found[program["output"]]


def row_losses(outputs: Array, targets: Array) -> Array:
    """Cross-entropy, or for masks its mean over a picture's pixels."""
    if jnp.issubdtype(targets.dtype, jnp.floating):
        return optax.sigmoid_binary_cross_entropy(outputs, targets).reshape(outputs.shape[0], -1).mean(1)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)


def private_step(program: Mapping[str, Any]) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
    """Clip each unit's gradient, add noise, take SGD's step, all as jax-privacy's own examples do."""

    def unit_loss(trained: Any, fixed: Any, rows: Array, targets: Array) -> Array:
        return row_losses(outputs_of(program, {**trained, **fixed}, rows), targets).mean()

    clipped = jax_privacy.clipped_grad(
        unit_loss,
        l2_clip_norm=program["clip_norm"],
        normalize_by=program["batch"],
        batch_argnums=(2, 3),
        keep_batch_dim=False,  # a unit has an axis of its own for its views
        microbatch_size=program["microbatch_size"],
    )
    stddev = program["noise_multiplier"] * clipped.sensitivity()
    noise = jax_privacy.noise_addition.gaussian_privatizer(stddev=stddev)
    optimizer = optax.chain(noise, optax.sgd(program["learning_rate"], momentum=program["momentum"]))

    def step(trained: Any, state: Any, fixed: Any, rows: Array, targets: Array) -> tuple[Any, Any]:
        updates, state = optimizer.update(clipped(trained, fixed, rows, targets), state)
        return optax.apply_updates(trained, updates), state

    return optimizer, jax.jit(step, donate_argnums=(0, 1))


def resident(field: str) -> int:
    """Bytes of this process, as the kernel counts them; none where it does not."""
    if not _SELF.exists():
        return 0
    found = re.search(rf"^{field}:\s+(\d+) kB", (_SELF / "status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"the kernel does not tell {field}")
    return int(found[1]) * 1024


def forget_peak() -> None:
    """Start the peak anew, where the kernel lets us."""
    try:
        (_SELF / "clear_refs").write_text("5")
    except OSError as error:
        print(f"the peak while reading counts too: {error}", file=sys.stderr)


def difference(program: Mapping[str, Any], tensors: Mapping[str, Array], rows: Array, expected: Array) -> float:
    """The largest error of the outputs, beside the largest output where that is more than one."""
    outputs = jax.jit(lambda held, units: jax.vmap(lambda x: outputs_of(program, held, x))(units))(tensors, rows)
    return float(jnp.abs(outputs - expected).max() / jnp.maximum(1.0, jnp.abs(expected).max()))


def serve(folder: Path, say: Callable[[object], None]) -> None:
    """Read the program, check it against the expected outputs, then answer until the pipe is closed."""
    program = json.loads((folder / "program.json").read_text())
    with np.load(folder / "arrays.npz") as arrays:
        held = {name: jnp.asarray(arrays[name]) for name in arrays.files}
    rows, targets, expected = (held.pop(name) for name in ("rows", "targets", "expected"))
    trained = {name: held.pop(name) for name in program["trained"]}
    before, code_before = resident("VmRSS"), resident("RssFile")
    forget_peak()
    try:
        unknown = sorted({node["operation"] for node in program["nodes"]} - OPERATIONS.keys())
        _only(not unknown, ", ".join(unknown))
        say(f"ready {difference(program, {**trained, **held}, rows, expected)}")
    except UnknownOperationError as error:
        say(f"no {error}")
        return
    optimizer, step = private_step(program)
    state = optimizer.init(trained)
    for asked in sys.stdin:
        if asked.strip() == "memory":
            code = max(0, resident("RssFile") - code_before)
            say(max(0, resident("VmHWM") - before - code))
            continue
        started = time.perf_counter()
        trained, state = jax.block_until_ready(step(trained, state, held, rows, targets))
        say(time.perf_counter() - started)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not be taken for an answer
    serve(Path(sys.argv[1]), lambda answer: print(answer, file=answers, flush=True))
