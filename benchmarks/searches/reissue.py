"""What the search behind a recipe costs, and the noise at which the recipe's own epsilon covers it.

``python -m benchmarks.searches reissue`` prices trials of one recipe each (``TRIALS``, as docs/evidence/results.md
tells) in the ways that are proved, and prints the command of the run whose total, search included, is the recipe's.
"""

from __future__ import annotations

from dpvision.accounting import all_trials, best_of_random_many, calibrate_noise_multiplier, guarantee
from dpvision.accounting.calibrate import NOISE_GRID, last_within
from dpvision.config import required
from dpvision.papers import find_recipe
from dpvision.privacy.mechanism import Event

TRIALS = {
    "demo": 10,
    "mnist-shoefit-tanh": 10,
    "fashion-shoefit-tanh": 10,
    "mnist-scatter-linear-eps3": 10,
    "fashion-scatter-linear-eps3": 10,
    "fashion-scatter-fine-eps3": 15,
    "cifar10-scatter-cnn-eps3": 15,
}
"""Trials by which the settings were found, rounded up."""


def table() -> str:
    """One line for each recipe."""
    lines = [
        "| recipe | trials | claimed epsilon | all trials composed | best of a random number | noise: before, "
        "re-issued | epsilon of the re-issued run alone |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(name, trials) for name, trials in TRIALS.items())])


def _line(name: str, trials: int) -> str:
    privacy = find_recipe(name).config.privacy
    num_units, steps = required(privacy.num_units, "num_units"), required(privacy.steps, "steps")
    batch = required(privacy.expected_batch_size, "expected_batch_size")
    epsilon, delta = required(privacy.target_epsilon, "target_epsilon"), required(privacy.delta, "delta")

    def releases(noise: float) -> list[tuple[Event, int]]:
        return [(Event(sample_rate=batch / num_units, noise_multiplier=noise), steps)]

    def price(noise: float) -> float:
        return best_of_random_many(releases(noise), mean_trials=float(trials), delta=delta).epsilon

    noise = calibrate_noise_multiplier(
        num_units=num_units, expected_batch_size=batch, steps=steps, target_epsilon=epsilon, delta=delta
    )
    charged = last_within(price, target=epsilon, grid=NOISE_GRID, guess=2 * noise, ends=(1e5, 0.05))
    if charged is None:
        raise SystemExit(f"no noise makes the search of {name} cost {epsilon}.")
    composed = all_trials(releases(noise), trials=trials, delta=delta).epsilon
    alone = guarantee(releases(charged), delta=delta).epsilon
    return (
        f"| `{name}` | {trials} | {epsilon:g} | {composed:.2f} | {price(noise):.2f} | {noise:g}, {charged:g} | "
        f"{alone:.2f} |"
    )
