"""Draws for tests: at a rate of twenty declared units, whatever the store holds."""

from __future__ import annotations

from dpvision.data import ImageBatches, ImageStore, Normalisation, ViewsConfig
from dpvision.data.augmentation import NO_AUGMENTATION
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.randomness import Keys


def draws_at_rate(
    store: ImageStore,
    views: ViewsConfig = NO_AUGMENTATION,
    *,
    keys: Keys,
    normalisation: Normalisation,
    rate: float = 1.0,
    rows_per_unit: int = 1,
) -> ImageBatches:
    """The draws of a store at a rate."""
    return ImageBatches(
        mechanism=Mechanism(num_units=20, expected_batch_size=20 * rate, clip_norm=1.0, noise_multiplier=1.0, steps=10),
        store=store,
        normalisation=normalisation,
        keys=keys,
        rows_per_unit=rows_per_unit,
        views=views,
    )
