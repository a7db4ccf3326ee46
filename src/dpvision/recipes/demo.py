"""A private run that needs no download: the handwritten digits that ship inside scikit-learn."""

from __future__ import annotations

from dpvision.config import DataConfig, ModelConfig, PrivacyConfig, RunConfig
from dpvision.optim import AveragingSettings, OptimizerSettings
from dpvision.recipes.recipe import Recipe, changed


def demo() -> Recipe:
    """1,437 digits of 8×8 pixels, enlarged to 16, at epsilon 3: a linear layer on fixed wavelet features.

    Command: ``make demo`` or ``dpvision train --recipe demo``.
    """
    config = RunConfig(
        name="demo",
        data=DataConfig(source="digits", image_size=16),
        model=ModelConfig(name="scatter_linear", options={"image_size": 16}),
        privacy=PrivacyConfig(
            target_epsilon=3.0, delta=1e-4, num_units=1437, expected_batch_size=720, steps=100, clip_norm=0.5
        ),
        optimizer=OptimizerSettings(name="sgd", learning_rate=2.0, momentum=0.7),
        averaging=AveragingSettings(kind="ema", decay=0.9),
    )
    return Recipe(
        config=config,
        source="Demonstration",
        summary="handwritten digits that ship inside scikit-learn; about two minutes",
        figure="none: a demonstration",
        ours="about 90 % at epsilon 3",
        cpu=changed(config, name="demo-cpu"),
        reduction="nothing",
    )
