"""A forecast before anything is spent: how strong a plan's signal is, and which accuracy to expect from it.

The signal of a plan is ``batch · √steps / noise_multiplier`` (``training.defaults``). The range of accuracy is read off
two curves of the signal per class: an easy and a hard dataset of the benchmark (docs/evidence/defaults.md). The share
of the way from chance to 100 % is ``most · x / (x + half)``, where x is the signal divided by the number of classes.

Guarantee: everything here follows from the resolved configuration and the declared number of classes. It is the same
for neighbouring datasets, unless their noisy counts differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, final

from dpvision.config import RunConfig, required
from dpvision.training.defaults import full_signal, plan_signal, two_digits

# (most, half) of the share of the way from chance to 100 %.
_EASY: Final = (0.97, 8.0)  # digits, MNIST
_HARD: Final = (0.40, 70.0)  # cats and dogs, Tiny ImageNet
_HARD_PRETRAINED: Final = (0.75, 30.0)  # chest X-rays, cats and dogs
LEAST_SHARE: Final = 0.15
"""Below this share of the way from chance, even on an easy dataset, a run is called hopeless."""
LEAST_MASK_SIGNAL: Final = 130.0
"""A network for masks beat a constant mask at 260 (299 blood cells, epsilon 3), and not at 82 (95 polyps, same)."""
_LARGEST_EPSILON: Final = 20.0


@final
@dataclass(frozen=True)
class Forecast:
    """What a plan can be expected to reach.

    Attributes:
        signal: of the plan.
        lowest: accuracy on a hard dataset, 0 to 1; None where no range was measured.
        highest: accuracy on an easy dataset.
        hopeless: whether the plan needs ``--anyway``.
        text: one line for the user, with a remedy where the plan is hopeless.
    """

    signal: float
    lowest: float | None
    highest: float | None
    hopeless: bool
    text: str


def forecast(config: RunConfig, *, num_classes: int, linear_head: bool) -> Forecast | None:
    """Say what to expect of a resolved plan.

    Args:
        config: resolved; its number of units is declared, or counted with noise.
        num_classes: declared public.
        linear_head: whether a linear head on frozen features is trained, which is what was measured.

    Returns:
        The forecast; None without privacy.
    """
    if not config.privacy.enabled:
        return None
    mechanism = config.mechanism
    signal = plan_signal(
        mechanism.num_units,
        batch=mechanism.expected_batch_size,
        steps=mechanism.steps,
        noise_multiplier=mechanism.noise_multiplier,
    )
    target = config.privacy.target_epsilon
    budget = f"noise multiplier {mechanism.noise_multiplier:.3g}" if target is None else f"epsilon {target:g}"
    given = f"{mechanism.num_units} units at {budget}"
    if config.task == "segmentation":
        if signal < LEAST_MASK_SIGNAL:
            remedy = _remedy(config, LEAST_MASK_SIGNAL / signal)
            text = f"with {given} a segmentation network will not beat a constant mask (signal {signal:.0f}; {remedy})"
            return Forecast(signal, None, None, True, text)
        return Forecast(signal, None, None, False, f"forecast: signal {signal:.0f}; no range was measured for masks")
    if not linear_head:
        text = f"forecast: signal {signal:.0f}; no range was measured for this model"
        return Forecast(signal, None, None, False, text)
    share = signal / num_classes
    hard = _HARD if config.transfer is None else _HARD_PRETRAINED
    lowest, highest = (_accuracy(share, curve, num_classes) for curve in (hard, _EASY))
    if _share(share, _EASY) < LEAST_SHARE:
        least = _EASY[1] * LEAST_SHARE / (_EASY[0] - LEAST_SHARE)
        remedy = _remedy(config, least / share)
        text = f"with {given} a model of {num_classes} classes will hardly beat chance (signal {signal:.0f}; {remedy})"
        return Forecast(signal, lowest, highest, True, text)
    text = (
        f"forecast: {lowest:.0%} (hard images) to {highest:.0%} (easy ones) accuracy with {given}, where classes are "
        f"equally frequent; chance is {1 / num_classes:.0%}, signal {signal:.0f}"
    )
    return Forecast(signal, lowest, highest, False, text)


def _share(signal_per_class: float, curve: tuple[float, float]) -> float:
    """The share of the way from chance to 100 %."""
    most, half = curve
    return most * signal_per_class / (signal_per_class + half)


def _accuracy(signal_per_class: float, curve: tuple[float, float], num_classes: int) -> float:
    chance = 1 / num_classes
    return chance + (1 - chance) * _share(signal_per_class, curve)


def _remedy(config: RunConfig, factor: float) -> str:
    """How many units, or which epsilon, would multiply the signal by ``factor``."""
    units = required(config.privacy.num_units, "num_units")
    more = two_digits(math.ceil(1.05 * units * factor))
    target, delta = config.privacy.target_epsilon, required(config.privacy.delta, "delta")
    if target is None:
        return f"about {more} units would"
    wanted = factor * full_signal(units, epsilon=target, delta=delta)
    larger = next(
        (
            value
            for value in range(math.ceil(target), int(_LARGEST_EPSILON) + 1)
            if _reaches(units, value, delta, wanted)
        ),
        None,
    )
    return f"about {more} units would" if larger is None else f"epsilon {larger} or about {more} units would"


def _reaches(units: int, epsilon: float, delta: float, wanted: float) -> bool:
    return full_signal(units, epsilon=epsilon, delta=delta) >= wanted
