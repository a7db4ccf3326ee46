"""From workloads to figures: time, memory, breakdown and distance from the machine's peak."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from benchmarks import contenders
from benchmarks.breakdown import breakdown
from benchmarks.contender import Contender
from benchmarks.contenders_jax import JAX, jax_privacy, nameless
from benchmarks.figures import NATIVE, PLAIN, Figures, Result, Row
from benchmarks.machine import machine, peak_flops, step_flops, threads
from benchmarks.memory import PeakMemory, peak_memory
from benchmarks.suites import Item
from benchmarks.timing import Progress, Times, quiet, reason_of, time_contenders
from benchmarks.workload import Workload
from dpvision.errors import ArgumentError, Problems
from dpvision.kernels.memory import give_back_freed_memory


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure. ``contenders`` None: each suite's own choice.

    ``jax_python`` is the Python of an environment that has jax_privacy; naming it lets jax-privacy take part.
    """

    contenders: tuple[str, ...] | None = None
    compile: bool = False
    repeats: int = 7
    threads: int | None = None
    memory: bool = True
    breakdown: bool = True
    jax_python: Path | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        problems.count("repeats", self.repeats)
        if self.threads is not None:
            problems.count("threads", self.threads)
        problems.raise_if_any()
        contenders.named(self.contenders or ())
        if JAX in (self.contenders or ()) and self.jax_python is None:
            nameless()


def run(items: Sequence[Item], settings: Settings, progress: Progress) -> Figures:
    """Measure every workload, one after the other; ``progress`` is told in words what is going on."""
    guests = () if settings.jax_python is None else (jax_privacy(settings.jax_python),)
    with threads(settings.threads) as num_threads:
        progress("measuring the machine's peak")
        before = peak_flops()
        results = tuple(_measured(item, settings, progress, guests) for item in items)
        # Twice, because other work on the machine can only lower it.
        peak = max(before, peak_flops())
    return Figures(machine=machine(), threads=num_threads, repeats=settings.repeats, peak_flops=peak, results=results)


def _measured(item: Item, settings: Settings, progress: Progress, guests: tuple[Contender, ...]) -> Result:
    workload = item.workload
    flops = _counted(item)
    chosen = (*_chosen(item, settings), *guests)
    times = time_contenders(chosen, workload, repeats=settings.repeats, progress=progress)
    gc.collect()
    give_back_freed_memory()  # those who are asked for their memory next need it: a large model's may be all there is
    if contenders.REFERENCE not in times.seconds:
        raise ArgumentError(f"{workload.title}: an ordinary step fails: {times.failures[contenders.REFERENCE]}.")
    memories: dict[str, PeakMemory] = {}
    for one in chosen:
        if settings.memory and one.name in times.seconds:
            progress(f"{workload.title}: peak memory, {one.name}")
            memories[one.name] = _memory(one, workload)
    return Result(
        suite=item.suite,
        workload=workload,
        flops=flops,
        rows=tuple(_row(one, times, memories.get(one.name)) for one in chosen),
        breakdown=_parts(item, settings, progress, times),
        target=item.target,
    )


def _memory(one: Contender, workload: Workload) -> PeakMemory:
    if one.memory is None:
        return peak_memory(one.name, workload, num_threads=torch.get_num_threads())
    try:
        return PeakMemory(one.memory(workload))
    except Exception as error:  # noqa: BLE001 - whatever a peer does, its row says so
        return PeakMemory(None, reason_of(error))


def _chosen(item: Item, settings: Settings) -> tuple[Contender, ...]:
    """Who takes part from this environment; guests bring their own."""
    asked = settings.contenders or item.contenders
    there = contenders.default(compile_=settings.compile)
    if asked is None:
        return there
    extra = [one.name for one in there if settings.compile and one.compiles]
    return tuple(one for one in contenders.named((*asked, *extra)) if one.name != JAX)


def _counted(item: Item) -> int:
    """The step's operations; a model that can't take such rows at all is refused here, before anything is timed."""
    try:
        with quiet():
            return step_flops(item.workload)
    except (RuntimeError, ValueError, IndexError) as error:
        raise ArgumentError(
            f"{item.workload.title}: the model can't take such rows: {reason_of(error)}. "
            "Choose another image_size or in_channels."
        ) from error


def _row(one: Contender, times: Times, memory: PeakMemory | None) -> Row:
    return Row(
        contender=one.name,
        label=one.label,
        kind=one.kind,
        all_seconds=tuple(times.seconds.get(one.name, ())),
        fails=times.failures.get(one.name),
        memory_bytes=None if memory is None else memory.added_bytes,
        memory_fails=None if memory is None else memory.fails,
    )


def _parts(item: Item, settings: Settings, progress: Progress, times: Times) -> dict[str, float]:
    """The breakdown of this library's fastest kind of step that took part; nothing where none did."""
    if not settings.breakdown or not {NATIVE, PLAIN} & set(times.seconds):
        return {}
    progress(f"{item.workload.title}: breakdown")
    kernels = "native" if NATIVE in times.seconds else "plain"
    return breakdown(item.workload, kernels=kernels, repeats=min(settings.repeats, 3))
