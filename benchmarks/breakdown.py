"""Where the time of a private step goes.

The engine's own step is watched from outside, through the interpreter's profiling hook, so that what is timed is what
runs. Time belongs to the innermost watched function; watching costs about a microsecond for each call in Python.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import numpy as np

from benchmarks.contender import CLIP_NORM
from benchmarks.contenders_engine import Kernels, mechanism_of, optimizer_of, performance_of
from benchmarks.workload import Workload
from dpvision.data import ImageBatches, ImageStore, ViewsConfig, fixed_normalisation, store_of_arrays
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import Mechanism, OrdinarySampling
from dpvision.privacy.noise import noisy_mean, steps_per_draw
from dpvision.privacy.randomness import Keys

PARTS: Final = (
    *("forward", "backward", "norms", "weighted sum", "rest of the sum", "noise", "optimizer", "data", "ledger"),
)
REST: Final = "rest of the sum"
_ENGINE: Final = "dpvision.gradients"
_PART_OF: Final = {
    "row_losses": "forward",
    "backpropagate": "backward",
    "unit_gradients": "norms",  # what remains in it after forward and backward: the rules
    "norms_sq": "norms",
    "factors": "norms",
    "weighted_sum": "weighted sum",
    "add": "weighted sum",  # over micro-batches, in float64
    "gradients": "weighted sum",
}
_IMAGES, _SIDE, _UNITS_AT_ONCE = 50_000, 32, 256


def breakdown(workload: Workload, *, kernels: Kernels, repeats: int) -> dict[str, float]:
    """Mean seconds of each part of a private step, in the order of ``PARTS``.

    Means over at least ``repeats`` steps and over whole draws: a small model's noise is drawn for several at once.
    """
    model, batch = workload.make_model(), Rows(*workload.make_rows(), workload.views)
    mechanism, keys, optimizer = mechanism_of(workload), Keys.from_os_entropy(), optimizer_of(model, private=True)
    performance = performance_of(workload, kernels)
    passes: list[dict[str, float]] = []
    draw_steps = steps_per_draw(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
    timed = -(-repeats // draw_steps) * draw_steps
    with _ledger(mechanism) as ledger:
        for step in range(timed + 1):
            watch = Watch()
            with watch.part("data"):
                draw(workload, step=step)
            with watch.part(REST), watch.inside():
                clipped = clipped_sum_of_batch(
                    model, workload.row_losses, batch, clip_norm=CLIP_NORM, performance=performance
                )
            with watch.part("ledger"):
                ledger.charge(mechanism.step_event, step=step)
            with watch.part("noise"):
                private = noisy_mean(clipped, mechanism, keys, step=step)
            with watch.part("optimizer"):
                optimizer.step(private)
            passes.append(watch.seconds)
    # The first pass also looks the model over.
    return {part: statistics.fmean(one.get(part, 0.0) for one in passes[1:]) for part in PARTS}


@final
class Watch:
    """Seconds by part; parts may nest, and the inner one's time is not the outer one's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Everything inside belongs to ``name``, but for parts inside it."""
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Watch the engine's functions while the block runs."""
        before = sys.getprofile()
        sys.setprofile(self._saw)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _saw(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        part = _PART_OF.get(frame.f_code.co_name)
        if part is None or not str(frame.f_globals.get("__name__")).startswith(_ENGINE):
            return
        if event == "call":
            self._enter(part)
        else:
            self._leave()

    def _enter(self, name: str) -> None:
        self._charge()
        self._open.append(name)

    def _leave(self) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


@contextmanager
def _ledger(mechanism: Mechanism) -> Iterator[Ledger]:
    """A ledger on the disk, as a run has."""
    header = {"run_id": "benchmark", "delta": 1e-5, **mechanism.to_dict()}
    with tempfile.TemporaryDirectory() as folder:
        yield Ledger.create(Path(folder) / "ledger", header)


def draw(workload: Workload, *, step: int) -> None:
    """Draw a Poisson batch of the workload's size from 50,000 small colour images.

    They are cropped and mirrored at random, unless the workload is one of features, which are taken as they are.
    """
    for _ in _draws(workload).batch(step).microbatches(_UNITS_AT_ONCE):
        pass


@functools.lru_cache(maxsize=1)
def _draws(workload: Workload) -> ImageBatches:
    views = ViewsConfig() if workload.image_size == 1 else ViewsConfig(count=workload.views, crop_padding=4, flip=0.5)
    batch = min(workload.batch, _IMAGES)
    return ImageBatches(
        mechanism=OrdinarySampling(num_units=_IMAGES, expected_batch_size=batch, steps=1),
        store=_store(),
        normalisation=fixed_normalisation(3),
        keys=Keys.from_os_entropy(),
        views=views,
    )


@functools.lru_cache(maxsize=1)
def _store() -> ImageStore:
    return store_of_arrays(
        images=np.random.default_rng(0).integers(256, size=(_IMAGES, 3, _SIDE, _SIDE), dtype=np.uint8),
        labels=np.arange(_IMAGES) % 10,
        class_names=[str(label) for label in range(10)],
        name="synthetic images",
    )
