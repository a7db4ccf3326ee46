"""Unlocking accuracy through scale (De et al. 2022): WRN on CIFAR-10, NF networks on ImageNet, fine-tuning; and TAN.

Large batches, weight standardisation, augmentation multiplicity and averaged weights. The versions for two cores have a
quarter of the width, at 16 pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from dpvision.config import (
    AveragingSettings,
    OptimizerSettings,
    Option,
    RunConfig,
    ScheduleSettings,
    TransferConfig,
    ViewsConfig,
)
from dpvision.papers.recipe import Recipe, changed
from dpvision.papers.recipe_data import CIFAR10, IMAGENET, IMAGENET32, PLACES, Dataset, ema, reduced, sgd

SOURCE: Final = "De et al."
# Epsilon: updates and test accuracy, median of five. Only 81.4 could be checked; the others are unchecked.
WRN: Final[dict[str, dict[float, tuple[int, float]]]] = {
    "wrn16_4": {1: (875, 56.8), 2: (1125, 64.9), 3: (1593, 69.2), 4: (1687, 71.9), 6: (1843, 77.0), 8: (2468, 79.5)},
    "wrn40_4": {1: (906, 56.4), 2: (1156, 65.9), 3: (1656, 70.7), 4: (1765, 73.5), 6: (2007, 78.8), 8: (2000, 81.4)},
}
# The ladder at epsilon 8: what each rung adds to the one before, validation accuracy after it and its standard
# deviation, training accuracy and its standard deviation.
LADDER: Final[tuple[tuple[str, float, float, float, float], ...]] = (
    ("none", 50.8, 0.7, 51.2, 0.7),
    ("group-norm", 66.3, 0.6, 67.9, 0.3),
    ("batch", 70.0, 0.6, 73.4, 0.9),
    ("standardised", 71.2, 1.0, 74.7, 1.3),
    ("views", 78.4, 0.9, 79.4, 0.9),
    ("ema", 79.7, 0.2, 81.5, 0.2),
)
LADDER_MODELS: Final = ("wrn40_4", "wrn16_4")  # the slides', and the one that others read into the same table
# Median test accuracy and its standard deviation.
FINE_TUNING: Final = {
    "head": {1: (93.1, 0.03), 2: (93.6, 0.05), 4: (94.0, 0.08), 8: (94.2, 0.07)},
    "all": {1: (94.8, 0.08), 2: (95.4, 0.15), 4: (96.1, 0.06), 8: (96.6, 0.08)},
}
# Other works on the slides of CIFAR-10: epsilon, accuracy.
OTHER_FINE_TUNING: Final = (("Yu et al. 2021", 1.0, 94.3), ("Yu et al. 2021", 2.0, 94.8), ("Tramèr & Boneh", 2.0, 92.7))
OTHER_FROM_SCRATCH: Final = (("Papernot et al. 2021", 7.53, 66.2), ("Tramèr & Boneh 2021", 3.0, 69.3))
# After JFT: dataset, model, trained part, epsilon, top-1, top-5, words. Epsilon None is without privacy.
_NFNET: Final[dict[float | None, tuple[float, float]]] = {
    0.1: (77.6, 93.0),
    0.5: (83.8, 96.7),
    1: (84.4, 96.6),
    2: (85.6, 97.5),
    4: (86.0, 97.4),
    8: (86.7, 98.0),
    None: (88.5, 98.7),
}
JftRow = tuple[Dataset, str, str, float | None, float | None, float | None, str]
_IN_A_FIGURE: Final = "a point of a figure, whose values are not in the text"
JFT_RESNETS: Final = ("nf_resnet50", "nf_resnet101", "nf_resnet152", "nf_resnet200")
JFT: Final[tuple[JftRow, ...]] = (
    *((IMAGENET, "nfnet_f3", "head", epsilon, *both, "JFT-4B") for epsilon, both in _NFNET.items()),
    *((IMAGENET, model, part, 8, None, None, _IN_A_FIGURE) for model in JFT_RESNETS for part in ("head", "all")),
    (PLACES, "nf_resnet50", "head", 8, 54.4, 84.4, "JFT-300M"),
    (PLACES, "nf_resnet50", "all", 8, 55.1, 84.6, "JFT-300M"),
    (PLACES, "nf_resnet50", "head", None, 54.3, 85.2, "JFT-300M"),
    (PLACES, "nf_resnet50", "all", None, 57.0, 87.1, "JFT-300M"),
)
# The figures on noise, batch and compute: WRN-16-4 at epsilon 8.
COMPUTE_BATCHES: Final = (1024, 4096, 16_384)
COMPUTE_EPOCHS: Final = (25, 50, 100, 200, 400)
RATE_BATCHES: Final = (256, 1024, 4096, 16_384)
SEARCHED_RATES: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
_EMA: Final = ema(0.9999)
_PLD: Final = "noise is calibrated by PLD: about 7 % less of it than by the source's RDP"
_SAMPLING: Final = "Poisson sampling; the source shuffles and accounts as if it sampled"
_SMALL: Final = "WRN-16-1 with 4 groups, 16 px, one pass"
_DELTA: Final = "the printed delta of 1e-6 is above 1 / num_units: it should be smaller"
_DEEP: Final = "WRN-40-1 with 4 groups, 16 px, one pass"
_LADDER_NOTES: Final[dict[str, tuple[str, ...]]] = {
    "wrn40_4": ("the batch of every rung but the first two is 4096",),
    "wrn16_4": ("the slides have WRN-40-4 at every rung; the ScaleNorm paper reads WRN-16-4 into the same table",),
}
IMAGENET32_NAME: Final = "imagenet32-wrn28_10-pretrain"
_WHAT: Final = {"head": "classifier only", "all": "all layers"}


def _views(count: int) -> ViewsConfig:
    return ViewsConfig(count=count, crop_padding=4, padding="symmetric", flip=0.5)


def scale_recipes() -> Iterator[Recipe]:
    """Yield the settings of the slides and of the paper's tables behind them, and TAN's."""
    for model, by_epsilon in WRN.items():
        for epsilon, (steps, accuracy) in by_epsilon.items():
            yield _from_scratch(model, epsilon, steps=steps, accuracy=accuracy)
    for model in LADDER_MODELS:
        yield from (_rung(rung, model) for rung in range(len(LADDER)))
    yield from _more_views()
    yield from (_compute(batch, epochs) for batch in COMPUTE_BATCHES for epochs in COMPUTE_EPOCHS)
    yield from (_rate(batch, rate) for batch in RATE_BATCHES for rate in SEARCHED_RATES)
    yield _tan_cifar()
    yield from _imagenet()
    yield _imagenet32()
    for trained, figures in FINE_TUNING.items():
        for epsilon, (accuracy, std) in figures.items():
            yield replace(_fine_tuning(trained, epsilon), accuracy=accuracy, also={"std": std})
    for row in JFT:
        yield _jft(*row)


def _words(model: str) -> str:
    return f"WRN-{model[3:].replace('_', '-')}"


def _from_scratch(model: str, epsilon: float, *, steps: int, accuracy: float) -> Recipe:
    batch, count = (4096, 16) if model == "wrn16_4" else (16_384, 32)
    config = CIFAR10.config(
        f"cifar10-{model}-eps{epsilon:g}",
        model,
        views=_views(count),
        privacy=CIFAR10.budget(epsilon, batch=batch, steps=steps, unit_norm=True),
        optimizer=sgd(2.0 if epsilon < 4 else 4.0),
        averaging=_EMA,
    )
    recalled = "" if (model, epsilon) == ("wrn40_4", 8) else ", not checked against the paper"
    cpu = changed(_small(config), views=_views(4)) if model == "wrn16_4" else None
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"cifar10, {_words(model)}, batch {batch:,}, {count} views",
        accuracy=accuracy,
        figure=f"test, median of 5{recalled}",
        differs=(
            _PLD,
            _SAMPLING,
            "the rate is known at epsilon 1 (2) and 8 (4) of WRN-16-4 alone: below 4 we take 2, else 4",
        ),
        cpu=cpu,
        reduction="" if cpu is None else f"{_SMALL}, batch 512, rate 2, 4 views",
    )


def _small(config: RunConfig) -> RunConfig:
    """Reduce to one pass with batch 512 and rate 2: noise over batch is as in the paper at epsilon 1."""
    return changed(_narrow(config, batch=512), optimizer={"learning_rate": 2.0})


def _narrow(config: RunConfig, *, batch: int) -> RunConfig:
    """Reduce to one pass at 16 px through a network of a quarter of the width, with as many channels in a group."""
    options = {} if config.model is None else config.model.options
    model = {"options": {**options, "width": 1, "groups": 4}}
    return changed(reduced(config, batch=batch, steps=51_200 // batch, image_size=16), model=model)


def ladder_name(rung: int, model: str = "wrn40_4") -> str:
    """Return the recipe of that rung, counted from zero."""
    return f"cifar10-{model}-ladder{rung}-{LADDER[rung][0]}-eps8"


def _rung(rung: int, model: str) -> Recipe:
    """Everything up to ``rung``: 0 nothing, then GroupNorm, batch 4096, weight standardisation, views, averaging."""
    name, accuracy, std, training, training_std = LADDER[rung]
    no_norm: dict[str, Option] = {"norm": "none"} if rung < 1 else {}
    batch = 256 if rung < 2 else 4096
    config = CIFAR10.config(
        ladder_name(rung, model),
        model,
        {"weight_standardised": rung >= 3, **no_norm},
        views=_views(16) if rung >= 4 else ViewsConfig(),
        privacy=CIFAR10.budget(8, batch=batch, steps=2468 * 4096 // batch, unit_norm=True),
        optimizer=sgd(0.5 if rung < 2 else 4.0),
        averaging=_EMA if rung >= 5 else AveragingSettings(),
    )
    cpu = _narrow(config, batch=128) if rung < 2 else _small(config)
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"cifar10, {_words(model)}, the ladder: {name.replace('-', ' ')}",
        accuracy=accuracy,
        figure="validation, rates tuned at every rung",
        also={"std": std, "training": training, "training std": training_std},
        differs=(
            _PLD,
            _SAMPLING,
            *_LADDER_NOTES[model],
            "test set, all rungs at equal epochs; rates 0.5 (batch 256) and 4 (batch 4096)",
        ),
        cpu=changed(cpu, views=_views(4) if rung >= 4 else ViewsConfig()),
        reduction=f"{_SMALL if model == 'wrn16_4' else _DEEP}, batch 128 and then 512 at rate 2, 4 views",
    )


def compute_name(batch: int, epochs: int) -> str:
    """Return the recipe of a point of the figures on noise and compute."""
    return f"cifar10-wrn16_4-eps8-batch{batch}-epochs{epochs}"


def _compute(batch: int, epochs: int) -> Recipe:
    """Noise against compute: more epochs at one epsilon need more noise, and there is a best number of them."""
    base = _from_scratch("wrn16_4", 8, steps=CIFAR10.steps(batch=batch, epochs=epochs), accuracy=79.5)
    name = compute_name(batch, epochs)
    config = changed(base.config, name=name, privacy={"expected_batch_size": batch}, views=_views(4))
    steps = max(1, round(epochs / 100 * 51_200 / (batch / 8)))
    less = changed(_small(config), privacy={"expected_batch_size": batch / 8, "steps": steps}, views=ViewsConfig())
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"cifar10, WRN-16-4, batch {batch:,}, {epochs} epochs at epsilon 8",
        figure=_IN_A_FIGURE,
        differs=(_PLD, _SAMPLING, "model, batches, epochs and views of the figures are not in the text"),
        cpu=less,
        reduction="WRN-16-1 with 4 groups, 16 px, an eighth of the batch, a hundredth of the epochs, rate 2",
    )


def rate_name(batch: int, rate: float) -> str:
    """Return the recipe of a cell of the search over rates and batches."""
    return f"cifar10-wrn16_4-eps8-batch{batch}-rate{rate:g}"


def _rate(batch: int, rate: float) -> Recipe:
    """Where the best learning rate stops rising with the batch: the threshold of the slides."""
    base = _from_scratch("wrn16_4", 8, steps=CIFAR10.steps(batch=batch, epochs=50), accuracy=79.5)
    changes = {"privacy": {"expected_batch_size": batch}, "optimizer": {"learning_rate": rate}, "views": _views(4)}
    config = changed(base.config, name=rate_name(batch, rate), **changes)
    plan = {"expected_batch_size": batch / 8, "steps": round(51_200 / (batch / 8))}
    less = changed(_small(config), privacy=plan, optimizer={"learning_rate": rate}, views=ViewsConfig())
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"cifar10, WRN-16-4, batch {batch:,}, rate {rate:g} at epsilon 8",
        figure=_IN_A_FIGURE,
        differs=(_PLD, _SAMPLING, "model, batches, rates, 50 epochs and views are ours: the text has none of them"),
        cpu=less,
        reduction="WRN-16-1 with 4 groups, 16 px, one pass, an eighth of the batch",
    )


def _more_views() -> Iterator[Recipe]:
    """WRN-16-4 at epsilon 8 with other numbers of views than the paper's 16."""
    base = _from_scratch("wrn16_4", 8, steps=2468, accuracy=79.5)
    for count in (1, 4, 8):
        words = f"{count} view{'s' * (count > 1)}"
        config = changed(base.config, name=f"cifar10-wrn16_4-views{count}-eps8", views=_views(count))
        yield Recipe(
            config=config,
            source=SOURCE,
            summary=f"cifar10, WRN-16-4, {words}",
            figure="the paper's accuracy is for 16 views",
            differs=base.differs,
            cpu=changed(_small(config), views=_views(count)),
            reduction=f"{_SMALL}, batch 512, rate 2, {words}",
        )


def _tan_cifar() -> Recipe:
    """The setting of the TAN code: De et al.'s without weight standardisation."""
    config = CIFAR10.config(
        "cifar10-wrn16_4-tan-eps8",
        "wrn16_4",
        {"weight_standardised": False},
        views=ViewsConfig(count=16, crop_padding=4, padding="reflect", flip=0.5),
        privacy=CIFAR10.budget(8, batch=4096, steps=2500, unit_norm=True),
        optimizer=sgd(4.0),
        averaging=_EMA,
    )
    return Recipe(
        config=config,
        source="TAN",
        summary="cifar10, WRN-16-4 without weight standardisation, 16 views",
        figure="none available",
        differs=(_PLD,),
    )


def _imagenet() -> Iterator[Recipe]:
    """NF-ResNet-50 on ImageNet, with the paper's settings and with TAN's."""
    crops = "crops from a padded 224-px image, not from one of 268 px"
    config = IMAGENET.config(
        "imagenet-nf_resnet50-eps8",
        "nf_resnet50",
        views=ViewsConfig(count=4, crop_padding=22, padding="reflect", flip=0.5),
        privacy=IMAGENET.budget(8, batch=16_384, steps=71_589, delta=8e-7, unit_norm=True),
        optimizer=sgd(4.0),
        averaging=ema(0.99999),
    )
    yield Recipe(
        config=config,
        source=SOURCE,
        summary="imagenet, NF-ResNet-50, batch 16,384, 4 views",
        accuracy=32.4,
        figure="top-1",
        top5=55.8,
        differs=(_PLD, _SAMPLING, crops),
        needs=IMAGENET.needs,
    )
    yield Recipe(
        config=changed(
            config,
            name="imagenet-nf_resnet50-tan-eps8",
            views={"count": 8},
            privacy={"expected_batch_size": 32_768, "steps": 18_000},
            optimizer={"learning_rate": 32.0},
        ),
        source="TAN",
        summary="imagenet, NF-ResNet-50, batch 32,768, 8 views, settings searched at batch 256",
        figure="9 points above De et al.'s 32.4 %",
        differs=(_PLD, crops),
        needs=IMAGENET.needs,
    )
    plan = {"target_epsilon": 13.2, "delta": 1e-6, "steps": IMAGENET.steps(batch=16_384, epochs=70)}
    views = {"count": 1, "crop_padding": 0, "flip": 0.5}
    yield Recipe(
        config=changed(
            config,
            name="imagenet-resnet18-kurakin-eps13.2",
            model={"name": "resnet18", "options": {"stem": "large"}},
            views=views,
            privacy={**plan, "clip_norm": 1.0},
            averaging=AveragingSettings(),
        ),
        source="Kurakin et al.",
        summary="imagenet, ResNet-18, the earlier result that the slides compare with",
        accuracy=6.9,
        figure="top-1",
        differs=(
            _PLD,
            "only model, epsilon and delta are in the slides: batch 16,384, 70 epochs and rate 4 are ours",
            _DELTA,
        ),
        needs=IMAGENET.needs,
    )


def _imagenet32() -> Recipe:
    """Pre-training for CIFAR-10: WRN-28-10 on ImageNet at 32 pixels, without privacy."""
    config = IMAGENET32.config(
        IMAGENET32_NAME,
        "wrn28_10",
        views=ViewsConfig(count=1, crop_padding=4, padding="symmetric", flip=0.5),
        privacy=IMAGENET32.budget(None, batch=1024, steps=IMAGENET32.steps(batch=1024, epochs=40)),
        optimizer=OptimizerSettings(name="sgd", learning_rate=0.4, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=ScheduleSettings(kind="cosine", warmup_steps=1250),
        averaging=_EMA,
    )
    return Recipe(
        config=config,
        source=SOURCE,
        summary="pre-training of WRN-28-10 on ImageNet at 32 px, no privacy",
        figure="only what follows it is in the slides",
        differs=("batch, epochs, rate and schedule are not in the source", "ImageNet is declared public"),
        needs="a folder imagenet32 with train_data_batch_1.npz … and val_data.npz (downsampled ImageNet, 32 px)",
    )


def _fine_tuning(trained: Any, epsilon: float) -> Recipe:
    weights = "wrn28_10-imagenet32.safetensors"
    config = CIFAR10.config(
        f"cifar10-wrn28_10-{trained}-eps{epsilon:g}",
        "wrn28_10",
        views=_views(16),
        transfer=TransferConfig(
            weights=weights, trained=trained, source="ImageNet (ILSVRC2012) at 32 px", licence="research only"
        ),
        privacy=CIFAR10.budget(epsilon, batch=16_384, steps=250, unit_norm=True),
        optimizer=sgd(1.0),
        averaging=ema(0.9),
    )
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"cifar10 after ImageNet at 32 px, WRN-28-10, {_WHAT[trained]}",
        figure="test, median",
        differs=(_PLD, _SAMPLING, "batch, steps and rate are known at epsilon 1 (of CIFAR-100's configuration) alone"),
        needs=f"weights of WRN-28-10 trained on ImageNet at 32 px, {weights}, or --transfer-weights "
        f"runs/{IMAGENET32_NAME}-1 after recipe {IMAGENET32_NAME}",
    )


def jft_name(dataset: str, model: str, trained: str, epsilon: float | None) -> str:
    """Return the recipe of a row after JFT."""
    return f"{dataset}-{model}-jft-{trained}-{'no-privacy' if epsilon is None else f'eps{epsilon:g}'}"


def _jft(
    dataset: Dataset,
    model: str,
    trained: Any,
    epsilon: float | None,
    accuracy: float | None,
    top5: float | None,
    figure: str,
) -> Recipe:
    """Fine-tuning after JFT, at batch 2^18."""
    steps, delta = dataset.steps(batch=2**18, epochs=800), 8e-7 if dataset is IMAGENET else 5e-7
    config = dataset.config(
        jft_name(dataset.name, model, trained, epsilon),
        model,
        data=dataset.data(image_size=416 if model == "nfnet_f3" else dataset.image_size),
        transfer=TransferConfig(
            weights=f"{model}-jft.safetensors", trained=trained, source="JFT", licence="not public"
        ),
        privacy=dataset.budget(epsilon, batch=2**18, steps=steps, delta=delta, unit_norm=True),
        optimizer=sgd(1.0),
    )
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"{dataset.name} after JFT, {model}, {_WHAT[trained]}{', no privacy' if epsilon is None else ''}",
        accuracy=accuracy,
        figure=figure,
        top5=top5,
        differs=(
            *((_PLD,) if epsilon is not None else ()),
            "batch 2^18 and 800 epochs are NF-ResNet-200's at epsilon 8; the others' are not available",
        ),
        needs=f"{dataset.source} and weights pre-trained on JFT, which is not public: --transfer-weights FILE",
    )
