"""The last value on a scale whose cost stays within a target, found with few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

_FIRST_STRIDE = 0.02
_PATIENCE = 8


class Scale(Protocol):
    """Values numbered by whole numbers; a higher number costs at least as much."""

    def value(self, index: int) -> float:
        """The value of that number."""
        ...

    def place(self, index: int) -> float:
        """A logarithmic coordinate that grows with ``index``."""
        ...

    def index_at(self, place: float) -> int:
        """The number at that coordinate, give or take one."""
        ...


@final
@dataclass(frozen=True)
class WholeNumbers:
    """1, 2, 3, …, each numbered by itself."""

    def value(self, index: int) -> float:
        """The number itself."""
        return float(index)

    def place(self, index: int) -> float:
        """Its logarithm."""
        return math.log(index)

    def index_at(self, place: float) -> int:
        """Rounded down."""
        return math.floor(math.exp(place))


@final
@dataclass(frozen=True)
class Decimals:
    """All positive decimals of ``digits`` significant digits. ``descending`` numbers them from large to small."""

    digits: int
    descending: bool = False

    @property
    def _first_mantissa(self) -> int:
        return 10 ** (self.digits - 1)

    @property
    def _sign(self) -> int:
        return -1 if self.descending else 1

    def value(self, index: int) -> float:
        """The decimal, exactly as a person would write it."""
        decade, position = divmod(self._sign * index, 9 * self._first_mantissa)
        return float(f"{self._first_mantissa + position}e{decade - self.digits + 1}")

    def place(self, index: int) -> float:
        """Its logarithm; negated if descending."""
        return self._sign * math.log(self.value(index))

    def index_at(self, place: float) -> int:
        """The decimal next to ``exp(place)``, on its cheaper side."""
        value = math.exp(self._sign * place)
        decade = math.floor(math.log10(value))
        scaled = value / 10.0 ** (decade - self.digits + 1)
        mantissa = math.ceil(scaled) if self.descending else math.floor(scaled)
        return self._sign * (decade * 9 * self._first_mantissa + mantissa - self._first_mantissa)


@final
@dataclass(frozen=True)
class _Probe:
    index: int
    place: float
    cost: float


def last_within(
    cost: Callable[[float], float], *, target: float, scale: Scale, guess: float, cheapest: int, dearest: int
) -> float | None:
    """The value whose cost is <= ``target`` while that of the next number on the scale is above it.

    ``guess`` is a place on the scale. None if even the value of number ``cheapest`` costs too much; the value of
    number ``dearest`` if nothing does.

    Guarantee: the cost of the returned value was computed and is <= ``target``.
    """

    def probe(index: int) -> _Probe:
        return _Probe(index, scale.place(index), cost(scale.value(index)))

    sensible = min(max(guess, scale.place(cheapest)), scale.place(dearest))
    start = min(max(scale.index_at(sensible), cheapest), dearest)
    low, high = _bracket(probe, target, scale, start, cheapest, dearest)
    if low is None:
        return None
    if high is not None:
        low = _narrow(probe, target, scale, low, high)
    return scale.value(low.index)


def _bracket(
    probe: Callable[[int], _Probe], target: float, scale: Scale, start: int, cheapest: int, dearest: int
) -> tuple[_Probe | None, _Probe | None]:
    """A probe within the target and one above it, as near to the start as doubling strides find them."""
    low: _Probe | None = None
    high: _Probe | None = None
    index, stride = start, _FIRST_STRIDE
    while low is None or high is None:
        here = probe(index)
        if here.cost <= target:
            low = here
            if index == dearest:
                break
            index = min(max(scale.index_at(here.place + stride), index + 1), dearest)
        else:
            high = here
            if index == cheapest:
                break
            index = max(min(scale.index_at(here.place - stride), index - 1), cheapest)
        stride *= 2
    return low, high


def _narrow(probe: Callable[[int], _Probe], target: float, scale: Scale, low: _Probe, high: _Probe) -> _Probe:
    """Regula falsi on logarithms; after several moves of the same end it strides past the root, then bisects."""
    moves_of_low = moves_of_high = 0
    while high.index - low.index > 1:
        if max(moves_of_low, moves_of_high) > _PATIENCE:
            index = (low.index + high.index) // 2
        else:
            index = scale.index_at(_interpolate(low, high, target))
            index += 2**moves_of_low - 2**moves_of_high
        here = probe(min(max(index, low.index + 1), high.index - 1))
        if here.cost <= target:
            low, moves_of_low, moves_of_high = here, moves_of_low + 1, 0
        else:
            high, moves_of_low, moves_of_high = here, 0, moves_of_high + 1
    return low


def _interpolate(low: _Probe, high: _Probe, target: float) -> float:
    if not 0 < low.cost < high.cost < math.inf:
        return (low.place + high.place) / 2
    share = math.log(target / low.cost) / math.log(high.cost / low.cost)
    return low.place + share * (high.place - low.place)
