"""Making the shoe fit (Papernot et al. 2019): tanh CNNs, capacity, tuning, last-layer transfer, Mean-Var.

Figures 1, 2 and 5 and Table 5 train a small CNN on MNIST and FashionMNIST. On CIFAR-10 the last layer is trained after
CIFAR-100 at five budgets, and Figure 4 compares initialisations. Hyper-parameters that the source found by a search on
the data are not covered by epsilon, which the certificate of each run says. All settings on small grey images take
minutes on two cores, so their reduced versions are (nearly) complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from dpvision.config import DataConfig, OptimizerSettings, RunConfig, ScheduleSettings, TransferConfig, ViewsConfig
from dpvision.papers.recipe import NOT_RUN, Recipe, changed, whole
from dpvision.papers.recipe_data import CIFAR10, CIFAR100, FASHION, MNIST, SUBSETS, ema, reduced, sgd, subset_source

SOURCE: Final = "Making the shoe fit"
CAPACITIES: Final = (4, 8, 15, 31, 64)
# Table 5, FashionMNIST: (optimizer, batch, epochs) → rate and accuracy in private, rate and accuracy without privacy.
TABLE5: Final[dict[tuple[str, int, int], tuple[float, float, float, float]]] = {
    ("sgd", 256, 40): (0.332, 86.1, 0.107, 90.3),
    ("sgd", 1024, 7): (4.46, 85.1, 0.368, 86.3),
    ("adam", 256, 40): (1.32e-3, 86.0, 1.06e-3, 90.5),
    ("adam", 1024, 7): (7.08e-3, 85.1, 4.32e-3, 88.7),
}
FACTORS: Final = (0.3, 1.0, 3.0)
# Figure 2: accuracy, and what we reached.
_MNIST: Final = {"tanh": (98.1, "98.28 ± 0.17 % (n = 4)"), "relu": (96.6, "97.41 ± 0.06 % (n = 3)")}
_FASHION: Final = {"tanh": (86.1, "86.65 ± 0.12 % (n = 3)"), "relu": (81.9, NOT_RUN)}
_ALL_OF_IT: Final = "nothing: the whole setting takes minutes on two cores"
_BUDGET: Final = "noise is calibrated by PLD over 60,000 images; the source's epsilon follows from 1.1, RDP and 50,000"


def shoefit_recipes() -> Iterator[Recipe]:
    """Yield Figures 1, 2 and 5, and Table 5."""
    yield from (_mnist(activation) for activation in _MNIST)
    yield from (_fashion(activation) for activation in _FASHION)
    for filters in CAPACITIES:
        yield from (_capacity(filters, private=private) for private in (True, False))
    for row in TABLE5:
        yield from (_table5(row, private=private) for private in (True, False))
    for optimizer in ("sgd", "adam"):
        yield from (_table5((optimizer, 1024, 7), factor=factor) for factor in FACTORS if factor != 1)


def _mnist(activation: str) -> Recipe:
    """MNIST at epsilon 2.93: large batch, raw pixels in [0, 1]."""
    accuracy, ours = _MNIST[activation]
    config = MNIST.config(
        f"mnist-shoefit-{activation}",
        "shoefit_cnn",
        {"activation": activation},
        data=MNIST.data(normalisation="none"),
        privacy=MNIST.budget(2.93, batch=6000, steps=400, clip_norm=0.5),
        optimizer=sgd(4.0, 0.7),
    )
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"mnist, CNN, {activation} (Figure 2)",
        accuracy=accuracy,
        ours=ours,
        differs=("batch 6000, momentum 0.7 and clip norm 0.5; the source took small batches",),
        cpu=whole(config),
        reduction=_ALL_OF_IT,
    )


def _fashion(activation: str) -> Recipe:
    """FashionMNIST at epsilon 2.7, with averaged weights."""
    accuracy, ours = _FASHION[activation]
    config = FASHION.config(
        f"fashion-shoefit-{activation}",
        "shoefit_cnn",
        {"activation": activation},
        privacy=FASHION.budget(2.7, batch=2048, steps=1172, clip_norm=0.1),
        optimizer=sgd(4.0, 0.9),
        averaging=ema(0.99),
    )
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"fashion, CNN, {activation} (Figure 2)",
        accuracy=accuracy,
        figure="85.5 before tuning" if activation == "tanh" else "",
        ours=ours,
        differs=("batch 2048, momentum 0.9, clip norm 0.1 and averaging; the source took batch 256 and none of these",),
        cpu=whole(config),
        reduction=_ALL_OF_IT,
    )


def capacity_name(filters: int, *, private: bool) -> str:
    """Return the recipe of Figure 1 with this many filters."""
    return f"mnist-shoefit-filters{filters}{'' if private else '-no-privacy'}"


def _capacity(filters: int, *, private: bool) -> Recipe:
    """Figure 1: ``filters`` in both convolutions, at a fixed budget and without one."""
    config = MNIST.config(
        capacity_name(filters, private=private),
        "shoefit_cnn",
        {"filters": filters, "activation": "relu"},
        data=MNIST.data(normalisation="none"),
        privacy=MNIST.budget(1.69 if private else None, batch=100, steps=MNIST.steps(batch=100, epochs=40)),
        optimizer=sgd(0.15),
    )
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"mnist, CNN with {filters} filters{'' if private else ', no privacy'} (Figure 1)",
        figure="in private the curve peaks near 15 filters, without privacy it rises",
        differs=(*((_BUDGET,) if private else ()), "that the figure shows MNIST and ReLU is assumed"),
        cpu=changed(reduced(config, batch=2048, steps=300), optimizer={"learning_rate": 2.0 if private else 0.3}),
        reduction="batch 2048, 300 steps (10 passes), rate 2 (0.3 without privacy)",
    )


def table5_name(optimizer: str, batch: int, *, private: bool, factor: float = 1.0) -> str:
    """Return the recipe of a row of Table 5; ``factor`` multiplies its rate (Figure 5)."""
    times = "" if factor == 1 else f"-rate-x{factor:g}"
    return f"fashion-shoefit-{optimizer}-{batch}{times}{'' if private else '-no-privacy'}"


def _table5(row: tuple[Any, int, int], *, private: bool = True, factor: float = 1.0) -> Recipe:
    """Table 5: SGD and Adam, long and short, each with a rate tuned for it."""
    optimizer, batch, epochs = row
    rate, accuracy = TABLE5[row][:2] if private else TABLE5[row][2:]
    steps = FASHION.steps(batch=batch, epochs=epochs)
    config = FASHION.config(
        table5_name(optimizer, batch, private=private, factor=factor),
        "shoefit_cnn",
        {"activation": "tanh"},
        privacy=FASHION.budget(2.7 if private else None, batch=batch, steps=steps),
        optimizer=OptimizerSettings(name=optimizer, learning_rate=factor * rate),
        evaluations=5,
    )
    words = f"{optimizer}, batch {batch}, {epochs} epochs" + ("" if factor == 1 else f", {factor:g} times the rate")
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"fashion, CNN, {words}{'' if private else ', no privacy'}",
        accuracy=accuracy if factor == 1 else None,
        figure="" if factor == 1 else "Figure 5's values are not available",
        differs=(_BUDGET, "clip norm 1, as in the source's other experiments") if private else (),
        cpu=whole(config),
        reduction=_ALL_OF_IT,
    )


# Epochs → epsilon, and the mean accuracy of each source of weights.
LADDER: Final = {10: 0.32, 50: 0.73, 100: 1.04, 200: 1.48, 400: 2.12}
FIGURES: Final = {
    "min10": {10: 44.8, 50: 49.6, 100: 51.0, 200: 52.8, 400: 53.7},
    "half50": {10: 39.4, 50: 51.4, 100: 54.7, 200: 56.8, 400: 59.0},
    "max100": {10: 57.0, 50: 66.2, 100: 68.4, 200: 69.7, 400: 71.0},
}
BEST: Final = {10: 59.1, 50: 67.2, 100: 69.5, 200: 70.6, 400: 72.1}
# Accuracy on the source's own test images, and words.
_SOURCES: Final = {
    "min10": (81.0, "10 random classes of CIFAR-100 (Min-rand-10)"),
    "half50": (62.1, "50 random classes of CIFAR-100 merged into 10 (Half-rand-50)"),
    "max100": (54.9, "all of CIFAR-100 (Max-100)"),
}
_PUBLIC: Final = "CIFAR-100 is declared public"
_UNKNOWN: Final = "batch, rate and epochs are not in the source"
_ADAM: Final = OptimizerSettings(name="adam", learning_rate=1e-3)


def shoefit_cifar_recipes() -> Iterator[Recipe]:
    """Yield Table 2's network without privacy, the three sources of weights at five budgets, and Figure 4."""
    plain = CIFAR10.config(
        "cifar10-shoefit-no-privacy",
        "shoefit_cifar",
        privacy=CIFAR10.budget(None, batch=128, steps=CIFAR10.steps(batch=128, epochs=50)),
        optimizer=_ADAM,
    )
    yield Recipe(
        config=plain,
        source=SOURCE,
        summary="cifar10, the CNN of Table 2, no privacy",
        accuracy=84.2,
        differs=(_UNKNOWN,),
        cpu=reduced(plain, batch=128, steps=1200),
        reduction="3 passes",
    )
    for kind in FIGURES:
        yield _pretraining(kind)
        yield from (_fine_tuning(kind, epochs) for epochs in LADDER)
    yield from _mean_var()


def _pretrain_name(kind: str) -> str:
    return f"cifar100-shoefit-pretrain-{kind}"


def _pretraining(kind: str) -> Recipe:
    """The CNN of Table 2 on CIFAR-100 or a part of it, without privacy; reduced: a third of the passes."""
    subset = SUBSETS.get(kind)
    units = CIFAR100.num_units if subset is None else subset.num_rows
    plan = CIFAR100.budget(None, batch=128, steps=round(50 * units / 128))
    accuracy, words = _SOURCES[kind]
    config = CIFAR100.config(
        _pretrain_name(kind),
        "shoefit_cifar",
        data=CIFAR100.data() if subset is None else DataConfig(source=subset_source(kind)),
        privacy=plan.model_copy(update={"num_units": units}),
        optimizer=_ADAM,
    )
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"pre-training on {words}, no privacy",
        accuracy=accuracy,
        figure="on the source's own test images",
        differs=(_UNKNOWN, _PUBLIC),
        cpu=changed(
            reduced(config, batch=256, steps=round(16 * units / 256)),
            views=ViewsConfig(count=1, crop_padding=4, padding="reflect", flip=0.5),
            schedule=ScheduleSettings(kind="cosine"),
            averaging=ema(0.998),
        ),
        reduction="16 passes with batch 256, cosine schedule, averaged weights, crops and mirror images",
    )


def fine_tuning_name(kind: str, epochs: int) -> str:
    """Return the recipe that trains the last layer on CIFAR-10 for this many epochs."""
    return f"cifar10-shoefit-from-{kind}-eps{LADDER[epochs]:g}"


def _fine_tuning(kind: str, epochs: int) -> Recipe:
    """The last layer on CIFAR-10, everything before it frozen."""
    before, steps = _pretrain_name(kind), CIFAR10.steps(batch=2000, epochs=epochs)
    config = CIFAR10.config(
        fine_tuning_name(kind, epochs),
        "shoefit_cifar",
        transfer=TransferConfig(weights=f"runs/{before}-1", trained="head", source="CIFAR-100", licence="none stated"),
        privacy=CIFAR10.budget(LADDER[epochs], batch=2000, steps=steps, clip_norm=0.1),
        optimizer=sgd(1.0, 0.9),
        evaluations=5,
    )
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"cifar10, last layer after {_SOURCES[kind][1]}, {epochs} epochs",
        accuracy=FIGURES[kind][epochs],
        figure=f"mean; best {BEST[epochs]:g}" if kind == "max100" else "mean",
        differs=(
            "batch and rate are not in the source: 2000 and 1 (momentum 0.9, clip norm 0.1)",
            "noise is calibrated by PLD",
            _PUBLIC,
        ),
        after=before,
        cpu=changed(reduced(config, batch=8192, steps=200), optimizer={"learning_rate": 4.0}),
        reduction="batch 8192, 200 steps, rate 4, at the same epsilon",
    )


def _mean_var() -> Iterator[Recipe]:
    """Figure 4: a run without noise, then two with noise 0.5, from He's initialisation and from the first's moments."""
    batch, steps = 256, CIFAR10.steps(batch=256, epochs=33)
    first = CIFAR10.config(
        "cifar10-allconv-no-privacy",
        "shoefit_allconv",
        privacy=CIFAR10.budget(None, batch=batch, steps=steps),
        optimizer=sgd(0.05, 0.9),
        evaluations=5,
    )
    private = CIFAR10.budget(1.0, batch=batch, steps=steps).model_dump()
    noise = {**private, "target_epsilon": None, "noise_multiplier": 0.5}
    he = changed(first, name="cifar10-allconv-he", privacy=noise, optimizer={"momentum": 0.0})
    moments = TransferConfig(
        weights=f"runs/{first.name}-1",
        trained="all",
        initialisation="mean_var",
        source="cifar10",
        licence="none stated",
    )
    mean_var = changed(he, name="cifar10-allconv-meanvar", transfer=moments)
    network, unknown = "cifar10, all-convolutional network", "batch 256 and the rate are not in the source"
    rows: tuple[tuple[RunConfig, str, float | None, str, tuple[str, ...]], ...] = (
        (
            first,
            "the source of Mean-Var's moments",
            None,
            "not printed",
            ("no privacy at all: the source's noise of 0.001 guarantees nothing either",),
        ),
        (he, "noise 0.5, He's initialisation (Figure 4)", 37.0, "at epoch 33", ()),
        (
            mean_var,
            "noise 0.5, Mean-Var initialisation (Figure 4)",
            44.0,
            "the best of 10 draws: 7 points above He's",
            ("the moments come from the same images, without privacy",),
        ),
    )
    for config, words, accuracy, figure, differs in rows:
        yield Recipe(
            config=config,
            source=SOURCE,
            summary=f"{network}, {words}",
            accuracy=accuracy,
            figure=figure,
            differs=(unknown, *differs),
            after=first.name if config is mean_var else None,
            cpu=reduced(config, batch=512, steps=150, image_size=16),
            reduction="16 px, batch 512, 150 steps",
        )
