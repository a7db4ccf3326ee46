"""Private steps by jax-privacy for three networks, driven through a pipe: ``python jax_worker.py FOLDER``.

Runs in an environment that has jax_privacy, and imports nothing else of this repository. FOLDER holds ``setting.json``
and ``arrays.npz``: weights under PyTorch's names, rows by unit, and the outputs that PyTorch has for them. The first
answer is ``ready DIFFERENCE``, or ``no MODEL`` for a network that is not written here. After that, ``step`` is answered
by seconds and ``memory`` by the peak of bytes beyond model and data.
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
Weights = Mapping[str, Array]
_SELF: Final = Path("/proc/self")


def _linear(w: Weights, name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _conv(w: Weights, name: str, x: Array, stride: int = 1, padding: int = 0) -> Array:
    sides = [(padding, padding)] * 2
    layout = ("NCHW", "OIHW", "NCHW")
    y = lax.conv_general_dilated(x, w[f"{name}.weight"], (stride, stride), sides, dimension_numbers=layout)
    bias = w.get(f"{name}.bias")
    return y if bias is None else y + bias[:, None, None]


def _max_pool(x: Array, size: tuple[int, int], stride: tuple[int, int]) -> Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, *size), (1, 1, *stride), "VALID")


def _group_norm(w: Weights, name: str, x: Array, groups: int = 32) -> Array:
    grouped = x.reshape(x.shape[0], groups, -1)
    mean, variance = grouped.mean(-1, keepdims=True), grouped.var(-1, keepdims=True)
    y = ((grouped - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return y * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]


def linear(w: Weights, x: Array) -> Array:
    """Logistic regression on the pixels."""
    return _linear(w, "1", x.reshape(len(x), -1))


def shoefit_cnn(w: Weights, x: Array) -> Array:
    """Papernot et al.'s tanh CNN for images of 28 pixels."""
    x = _max_pool(jnp.tanh(_conv(w, "0", x, stride=2, padding=3)), (2, 2), (1, 1))
    x = _max_pool(jnp.tanh(_conv(w, "3", x, stride=2)), (2, 2), (1, 1))
    return _linear(w, "9", jnp.tanh(_linear(w, "7", x.reshape(len(x), -1))))


def resnet9(w: Weights, x: Array) -> Array:
    """Klause et al.'s ResNet-9 with Mish and 32 groups; with ScaleNorm where there are weights for it."""

    def unit(name: str, x: Array) -> Array:
        return jax.nn.mish(_group_norm(w, f"{name}.1", _conv(w, f"{name}.0", x, padding=1)))

    def residual(name: str, x: Array) -> Array:
        y = x + unit(f"{name}.branch.1", unit(f"{name}.branch.0", x))
        return _group_norm(w, f"{name}.scale_norm", y) if f"{name}.scale_norm.weight" in w else y

    def halved(x: Array) -> Array:
        return _max_pool(x, (2, 2), (2, 2))

    x = residual("res1", halved(unit("conv2", unit("conv1", x))))
    x = residual("res2", halved(unit("conv4", halved(unit("conv3", x)))))
    half = (x.shape[2] // 2, x.shape[3] // 2)
    return _linear(w, "classifier", _max_pool(x, half, half).reshape(len(x), -1))


MODELS: Final = {"linear": linear, "shoefit_cnn": shoefit_cnn, "resnet9": resnet9, "scaleresnet9": resnet9}


def private_step(setting: Mapping[str, Any]) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
    """Clip each unit's gradient, add noise and take SGD's step, as jax-privacy's own examples do."""
    model = MODELS[setting["model"]]

    def unit_loss(weights: Weights, rows: Array, targets: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(weights, rows), targets).mean()

    clipped = jax_privacy.clipped_grad(
        unit_loss,
        l2_clip_norm=setting["clip_norm"],
        normalize_by=setting["batch"],
        batch_argnums=(1, 2),
        keep_batch_dim=False,  # a unit has an axis of its own for its views
        microbatch_size=setting["microbatch_size"],
    )
    stddev = setting["noise_multiplier"] * clipped.sensitivity()
    noise = jax_privacy.noise_addition.gaussian_privatizer(stddev=stddev)
    optimizer = optax.chain(noise, optax.sgd(setting["learning_rate"], momentum=setting["momentum"]))

    def step(weights: Weights, state: Any, rows: Array, targets: Array) -> tuple[Any, Any]:
        updates, state = optimizer.update(clipped(weights, rows, targets), state)
        return optax.apply_updates(weights, updates), state

    return optimizer, jax.jit(step, donate_argnums=(0, 1))


def resident(field: str) -> int:
    """Return bytes of this process as the kernel counts them; 0 where it does not."""
    if not _SELF.exists():
        return 0
    found = re.search(rf"^{field}:\s+(\d+) kB", (_SELF / "status").read_text(), re.MULTILINE)
    return 0 if found is None else int(found[1]) * 1024


def serve(folder: Path, say: Callable[[object], None]) -> None:
    """Check the network against the expected outputs, then answer until the pipe is closed."""
    setting = json.loads((folder / "setting.json").read_text())
    if setting["model"] not in MODELS:
        say(f"no {setting['model']}")
        return
    with np.load(folder / "arrays.npz") as arrays:
        weights = {name: jnp.asarray(arrays[name]) for name in arrays.files}
    rows, targets, expected = (weights.pop(name) for name in ("rows", "targets", "expected"))
    before, code_before = resident("VmRSS"), resident("RssFile")
    try:
        (_SELF / "clear_refs").write_text("5")  # start the peak again
    except OSError as error:
        print(f"the peak while reading counts too: {error}", file=sys.stderr)
    outputs = jax.jit(jax.vmap(MODELS[setting["model"]], in_axes=(None, 0)))(weights, rows)
    say(f"ready {float(jnp.abs(outputs - expected).max() / jnp.maximum(1.0, jnp.abs(expected).max()))}")
    optimizer, step = private_step(setting)
    state = optimizer.init(weights)
    for asked in sys.stdin:
        if asked.strip() == "memory":
            code = max(0, resident("RssFile") - code_before)
            say(max(0, resident("VmHWM") - before - code))
            continue
        started = time.perf_counter()
        weights, state = jax.block_until_ready(step(weights, state, rows, targets))
        say(time.perf_counter() - started)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # anything else that prints must not be taken for an answer
    serve(Path(sys.argv[1]), lambda answer: print(answer, file=answers, flush=True))
