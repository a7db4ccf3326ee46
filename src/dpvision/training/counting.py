"""How many units there are, where nobody declared it: counted with noise, and charged."""

from __future__ import annotations

import math

from dpvision.certificate import COUNTED_UNITS as COUNT
from dpvision.checks import ArgumentError
from dpvision.config import RunConfig, required
from dpvision.data import ImageStore, known_sources
from dpvision.keys import Keys
from dpvision.mechanism import Event
from dpvision.noise import standard_normals
from dpvision.training.proposals import Choice, two_digits

UNITS_OF_NOISE = 45.0
"""The noise at a target of epsilon one. Whatever the target, the noise on the gradients grows by about 0.3 % for it."""
USUAL_TARGET = 3.0


def with_number_of_units(config: RunConfig, store: ImageStore, keys: Keys) -> tuple[RunConfig, tuple[Choice, ...]]:
    """The configuration with its number of units, if private units are there to be counted.

    Guarantee: sample rate, divisor, delta and all that is proposed from the number depend on the data through one
    Gaussian release, which one unit more or less moves by one, and which ``count_charges`` names. A published dataset
    has a published size, and a number that was declared is taken as it is.
    """
    privacy = config.privacy
    if privacy.count_noise_multiplier is not None and privacy.num_units is not None:
        raise ArgumentError(
            "count_noise_multiplier is for counting the units, got num_units too: a declared number needs no noise."
        )
    if not privacy.enabled or privacy.num_units is not None or config.data.source in known_sources():
        return config, ()
    require_plan_that_fits_any(config)
    noise = privacy.count_noise_multiplier or UNITS_OF_NOISE / (privacy.target_epsilon or USUAL_TARGET)
    (normal,) = standard_normals(keys.derive("statistics", COUNT), 1)
    noisy = max(1, two_digits(max(1, round(store.num_units + noise * float(normal)))))
    # A rate above one would be refused: whether it is must not depend on the data either.
    noisy = max(noisy, math.ceil(privacy.expected_batch_size or 1))
    update = {"num_units": noisy, "count_noise_multiplier": noise}
    reason = f"counted with noise of about {noise:.0f}, which is charged; declare it to choose it"
    config = config.model_copy(update={"privacy": privacy.model_copy(update=update)})
    return config, (Choice("num_units", str(noisy), reason),)


def require_plan_that_fits_any(config: RunConfig) -> None:
    """Refuse, before anybody counts, a plan that would be refused for some numbers of units and not for others.

    A refused command charges nothing: what it says, and that it is refused, must not tell what was counted.
    """
    privacy, transfer = config.privacy, config.transfer
    if privacy.noise_multiplier is not None and privacy.target_epsilon is not None:
        raise ArgumentError(
            "noise_multiplier and target_epsilon together need num_units: whether the plan stays within the target "
            "would tell how many units were counted. Declare num_units, or leave one of the two open."
        )
    if transfer is not None and transfer.head_steps is not None and privacy.steps is None:
        raise ArgumentError(
            "head_steps needs steps where units are counted: how many are proposed depends on the count. Give steps, "
            "or declare num_units."
        )


def count_charges(config: RunConfig) -> tuple[tuple[Event, int], ...]:
    """What the number of units cost: nothing if it was declared."""
    privacy = config.privacy
    if not privacy.enabled or privacy.count_noise_multiplier is None:
        return ()
    noise = required(privacy.count_noise_multiplier, "count_noise_multiplier")
    return ((Event(sample_rate=1.0, noise_multiplier=noise, purpose=COUNT), 1),)
