"""Making the shoe fit (Papernot et al. 2019) on CIFAR: transfer of the last layer, and Mean-Var initialisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dpvision.config import DataConfig, ModelConfig, RunConfig, TransferConfig, ViewsConfig
from dpvision.optim import AveragingSettings, OptimizerSettings, ScheduleSettings
from dpvision.recipes.datasets import CIFAR10, CIFAR100, reduced
from dpvision.recipes.recipe import Recipe, changed
from dpvision.recipes.shoefit import SOURCE
from dpvision.recipes.subsets import SUBSETS, subset_source

# Epochs → epsilon, and the mean accuracy of each source of weights.
LADDER: Final = {10: 0.32, 50: 0.73, 100: 1.04, 200: 1.48, 400: 2.12}
FIGURES: Final = {
    "min10": {10: 44.8, 50: 49.6, 100: 51.0, 200: 52.8, 400: 53.7},
    "half50": {10: 39.4, 50: 51.4, 100: 54.7, 200: 56.8, 400: 59.0},
    "max100": {10: 57.0, 50: 66.2, 100: 68.4, 200: 69.7, 400: 71.0},
}
BEST: Final = {10: 59.1, 50: 67.2, 100: 69.5, 200: 70.6, 400: 72.1}
SOURCE_ACCURACY: Final = {"min10": 81.0, "half50": 62.1, "max100": 54.9}
_WORDS: Final = {
    "min10": "10 random classes of CIFAR-100 (Min-rand-10)",
    "half50": "50 random classes of CIFAR-100 merged into 10 (Half-rand-50)",
    "max100": "all of CIFAR-100 (Max-100)",
}


def shoefit_cifar_recipes() -> Iterator[Recipe]:
    """Table 2's network without privacy, the three sources, five budgets each, and Figure 4."""
    yield _no_privacy()
    for kind in FIGURES:
        yield pretraining(kind)
        for epochs in LADDER:
            yield fine_tuning(kind, epochs)
    yield from mean_var_recipes()


def _pretrain_name(kind: str) -> str:
    return f"cifar100-shoefit-pretrain-{kind}"


def _no_privacy() -> Recipe:
    config = RunConfig(
        name="cifar10-shoefit-no-privacy",
        data=CIFAR10.data(),
        model=ModelConfig(name="shoefit_cifar"),
        privacy=CIFAR10.ordinary(batch=128, steps=CIFAR10.steps(batch=128, epochs=50)),
        optimizer=OptimizerSettings(name="adam", learning_rate=1e-3),
    )
    return Recipe(
        config=config,
        source=SOURCE,
        summary="cifar10, the CNN of Table 2, no privacy",
        accuracy=84.2,
        differs=("batch, rate and epochs are not in the source",),
        cpu=reduced(config, batch=128, steps=1200),
        reduction="3 passes",
    )


def pretraining(kind: str) -> Recipe:
    """The CNN of Table 2 on CIFAR-100 or a part of it, without privacy."""
    subset = SUBSETS.get(kind)
    units, batch = (CIFAR100.num_units if subset is None else subset.num_rows), 128
    data = CIFAR100.data() if subset is None else DataConfig(source=subset_source(kind))
    steps = round(50 * units / batch)
    config = RunConfig(
        name=_pretrain_name(kind),
        data=data,
        model=ModelConfig(name="shoefit_cifar"),
        privacy=CIFAR100.ordinary(batch=batch, steps=steps).model_copy(update={"num_units": units}),
        optimizer=OptimizerSettings(name="adam", learning_rate=1e-3),
    )
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"pre-training on {_WORDS[kind]}, no privacy",
        accuracy=SOURCE_ACCURACY[kind],
        figure="on the source's own test pictures",
        differs=("batch, rate and epochs are not in the source", "CIFAR-100 is declared public"),
        cpu=_short_pretraining(config, units),
        reduction="16 passes with batch 256, cosine schedule, averaged weights, crops and mirror images",
    )


def _short_pretraining(config: RunConfig, units: int) -> RunConfig:
    """A third of the passes, with what makes up for them."""
    batch = 256
    return changed(
        reduced(config, batch=batch, steps=round(16 * units / batch)),
        views=ViewsConfig(count=1, crop_padding=4, padding="reflect", flip=0.5),
        schedule=ScheduleSettings(kind="cosine"),
        averaging=AveragingSettings(kind="ema", decay=0.998),
    )


def fine_tuning_name(kind: str, epochs: int) -> str:
    """The recipe that trains the last layer on CIFAR-10 for so many epochs."""
    return f"cifar10-shoefit-from-{kind}-eps{LADDER[epochs]:g}"


def fine_tuning(kind: str, epochs: int) -> Recipe:
    """The last layer on CIFAR-10, everything before it frozen."""
    batch = 2000
    config = RunConfig(
        name=fine_tuning_name(kind, epochs),
        data=CIFAR10.data(),
        model=ModelConfig(name="shoefit_cifar"),
        transfer=TransferConfig(
            weights=f"runs/{_pretrain_name(kind)}-1", trained="head", source="CIFAR-100", licence="none stated"
        ),
        privacy=CIFAR10.private(
            epsilon=LADDER[epochs], batch=batch, steps=CIFAR10.steps(batch=batch, epochs=epochs), clip_norm=0.1
        ),
        optimizer=OptimizerSettings(name="sgd", learning_rate=1.0, momentum=0.9),
        evaluations=5,
    )
    cpu = changed(reduced(config, batch=8192, steps=200), optimizer={"learning_rate": 4.0})
    best = f"; best {BEST[epochs]:g}" if kind == "max100" else ""
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"cifar10, last layer after {_WORDS[kind]}, {epochs} epochs",
        accuracy=FIGURES[kind][epochs],
        figure=f"mean{best}",
        differs=(
            "batch and rate are not in the source: 2000 and 1 (momentum 0.9, clip norm 0.1)",
            "noise is calibrated by PLD",
            "CIFAR-100 is declared public",
        ),
        after=_pretrain_name(kind),
        cpu=cpu,
        reduction="batch 8192, 200 steps, rate 4, at the same epsilon",
    )


# ---- Figure 4: Mean-Var initialisation
_FIRST: Final = "cifar10-allconv-no-privacy"


def mean_var_recipes() -> Iterator[Recipe]:
    """A run almost without noise, and two with noise 0.5: from He's initialisation and from the first run's moments."""
    batch, epochs = 256, 33
    steps = CIFAR10.steps(batch=batch, epochs=epochs)
    private = CIFAR10.private(epsilon=1.0, batch=batch, steps=steps, clip_norm=1.0)
    first = RunConfig(
        name=_FIRST,
        data=CIFAR10.data(),
        model=ModelConfig(name="shoefit_allconv"),
        privacy=CIFAR10.ordinary(batch=batch, steps=steps),
        optimizer=OptimizerSettings(name="sgd", learning_rate=0.05, momentum=0.9),
        evaluations=5,
    )
    unknown = "batch 256 and the rate are not in the source"
    yield Recipe(
        config=first,
        source=SOURCE,
        summary="cifar10, all-convolutional network, the source of Mean-Var's moments",
        figure="not printed",
        differs=(unknown, "no privacy at all: the source's noise of 0.001 guarantees nothing either"),
        cpu=_small(first),
        reduction="16 px, batch 512, 150 steps",
    )
    fixed = {"target_epsilon": None, "noise_multiplier": 0.5}
    he = changed(
        first, name="cifar10-allconv-he", privacy={**private.model_dump(), **fixed}, optimizer={"momentum": 0.0}
    )
    transfer = TransferConfig(
        weights=f"runs/{_FIRST}-1", trained="all", initialisation="mean_var", source="cifar10", licence="none stated"
    )
    mean_var = changed(he, name="cifar10-allconv-meanvar", transfer=transfer)
    for config, accuracy, words in ((he, 37.0, "He's initialisation"), (mean_var, 44.0, "Mean-Var initialisation")):
        yield Recipe(
            config=config,
            source=SOURCE,
            summary=f"cifar10, all-convolutional network, noise 0.5, {words} (Figure 4)",
            accuracy=accuracy,
            figure="at epoch 33" if config is he else "the best of 10 draws: 7 points above He's",
            differs=(unknown,)
            if config is he
            else (unknown, "the moments come from the same pictures, without privacy"),
            after=None if config is he else _FIRST,
            cpu=_small(config),
            reduction="16 px, batch 512, 150 steps",
        )


def _small(config: RunConfig) -> RunConfig:
    return reduced(config, batch=512, steps=150, image_size=16)
