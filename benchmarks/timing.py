"""Times of several contenders, interleaved, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import gc
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final, final

import torch

from benchmarks.contender import Contender, NoSuchModelError, Step
from benchmarks.workload import Workload

Progress = Callable[[str], None]
_TURN_SECONDS: Final = 0.1
_MOST_STEPS: Final = 50
_LONGEST_REASON: Final = 160
_PATH: Final = re.compile(r"(?:/[\w.+~-]+){2,}")


@final
@dataclass(eq=False)
class Times:
    """Seconds that a step took in every turn, by contender, and why a contender has none."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def time_contenders(contenders: Sequence[Contender], workload: Workload, *, repeats: int, progress: Progress) -> Times:
    """Every contender once for warming up, then ``repeats`` rounds in which each has one turn, in a new order.

    Those with short steps are made anew for every round: where in memory a model and its rows happen to lie makes two
    equal contenders differ by up to a tenth.
    """
    times = Times()
    if any(one.compiles for one in contenders):
        torch.compiler.reset()
    steps = {one.name: _warmed_up(one, workload, times, progress) for one in contenders}
    ready = {name: step for name, step in steps.items() if step is not None}
    order = torch.Generator().manual_seed(0)
    for number in range(repeats):
        in_turn = [contenders[index] for index in torch.randperm(len(contenders), generator=order).tolist()]
        _renew([one for one in in_turn if _is_renewed(one, times)], workload, ready, times)
        gc.collect()
        for name in (one.name for one in in_turn):
            if name in ready:
                progress(f"{workload.title}: round {number + 1} of {repeats}, {name}")
                _take_turn(name, ready, times)
    return times


def _is_renewed(one: Contender, times: Times) -> bool:
    """Whether it has taken short steps and is soon made: peers and compilers may take minutes."""
    seconds = times.seconds.get(one.name, [])
    return bool(seconds) and seconds[-1] < _TURN_SECONDS and one.kind != "peer" and not one.compiles


def _renew(some: Sequence[Contender], workload: Workload, ready: dict[str, Step], times: Times) -> None:
    """Let all of them go, then make them again in this order."""
    for one in some:
        del ready[one.name]
    gc.collect()
    for one in some:
        step = _warmed_up(one, workload, times, lambda _: None)
        if step is not None:
            ready[one.name] = step


def _warmed_up(one: Contender, workload: Workload, times: Times, progress: Progress) -> Step | None:
    progress(f"{workload.title}: warming up, {one.name}")
    with _reported(one.name, times.failures), quiet():
        try:
            step = one.make(workload)
        except NoSuchModelError as error:
            progress(f"{workload.title}: {one.name}: no such model here ({error})")
            return None
        step()
        return step
    return None


def _take_turn(name: str, ready: dict[str, Step], times: Times) -> None:
    with _reported(name, times.failures), quiet():
        times.seconds.setdefault(name, []).append(_turn(ready[name]))
    if name in times.failures:
        del ready[name]
        times.seconds.pop(name, None)


def _turn(step: Step) -> float:
    """Mean seconds of a step, over as many as fill a turn: one of some length, or several of a few milliseconds.

    Training takes one step after the other. A short one alone would mostly show that everybody else's code and data
    are in the caches.
    """
    taken: list[float] = []
    while not taken or (sum(taken) < _TURN_SECONDS and len(taken) < _MOST_STEPS):
        started = time.perf_counter()
        told = step()
        taken.append(time.perf_counter() - started if told is None else told)
    return fmean(taken)


@contextmanager
def _reported(name: str, failures: dict[str, str]) -> Iterator[None]:
    """Turn whatever goes wrong with one contender into its row's text."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - peers and compilers fail in ways of their own, and the row says how
        failures[name] = reason_of(error)


def reason_of(error: BaseException) -> str:
    """An error in one short line, without the paths of this machine."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {_PATH.sub('…', lines[0])}".removesuffix(": ")
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 1]}…"


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings: peers warn at every step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
