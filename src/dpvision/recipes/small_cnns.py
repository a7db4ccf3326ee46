"""Published settings for small CNNs: TF-Privacy's tutorial, Handcrafted-DP (Tramèr & Boneh), Dörmann et al. 2021."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dpvision.config import ModelConfig, RunConfig
from dpvision.optim import OptimizerSettings
from dpvision.recipes.datasets import CIFAR10, FASHION, MNIST, Dataset, reduced
from dpvision.recipes.recipe import Recipe, changed

_PLD: Final = "noise is calibrated by PLD; the source's epsilon is by RDP"
# Rate, clip norm, epochs, epsilon, accuracy.
_TUTORIAL: Final = ((0.25, 1.5, 15, 1.19, 95.0), (0.15, 1.0, 60, 3.01, 96.6), (0.25, 1.5, 45, 7.1, 97.0))
# Batch, rate, epochs, accuracy at epsilon 3.
_END_TO_END: Final = {"mnist": (512, 0.5, 40, 98.1), "fashion": (2048, 4.0, 40, 86.0), "cifar10": (1024, 1.0, 30, 59.2)}
# Epsilon → sample rate, epochs, rate, momentum, clip norm, accuracy.
_Doermann = tuple[float, int, float, float, float, float | None]
_DOERMANN: Final[dict[str, dict[float, _Doermann]]] = {
    "mnist": {
        1: (0.1427, 40, 6.939, 0.4253, 0.2901, None),
        2: (0.1427, 60, 1.798, 0.7161, 0.5757, None),
        2.93: (0.1665, 40, 10.244, 0.5784, 0.4196, None),
    },
    "fashion": {
        1: (0.1427, 40, 4.069, 0.5764, 0.5716, None),
        2: (0.1665, 80, 5.706, 0.4277, 0.6457, None),
        2.7: (0.1665, 60, 9.493, 0.5946, 0.474, None),
    },
    "cifar10": {
        1.93: (0.1666, 40, 1.601, 0.5992, 1.253, 58.6),
        4.21: (0.2, 100, 3.692, 0.6442, 0.6533, 66.2),
        7.42: (0.1666, 100, 7.101, 0.4433, 0.4434, 70.1),
    },
}
_SETS: Final = {each.name: each for each in (MNIST, FASHION, CIFAR10)}


def small_cnn_recipes() -> Iterator[Recipe]:
    """All of them."""
    for rate, clip_norm, epochs, epsilon, accuracy in _TUTORIAL:
        yield _tutorial(rate, clip_norm, epochs=epochs, epsilon=epsilon, accuracy=accuracy)
    for name in _END_TO_END:
        yield _end_to_end(_SETS[name])
    for name, by_epsilon in _DOERMANN.items():
        for epsilon, values in by_epsilon.items():
            yield _doermann(_SETS[name], epsilon, values)


def _cpu(config: RunConfig, dataset: Dataset) -> tuple[RunConfig, str]:
    """Small grey pictures need no reduction; CIFAR gets fewer passes."""
    if dataset is not CIFAR10:
        return changed(config, name=f"{config.name}-cpu"), "nothing: the whole setting takes minutes on two cores"
    return reduced(config, batch=1024, steps=150, image_size=16), "16 px, batch 1024, 3 passes"


def _tutorial(rate: float, clip_norm: float, *, epochs: int, epsilon: float, accuracy: float) -> Recipe:
    batch = 256
    config = RunConfig(
        name=f"mnist-tutorial-eps{epsilon:g}",
        data=MNIST.data(normalisation="none"),
        model=ModelConfig(name="shoefit_cnn", options={"activation": "relu"}),
        privacy=MNIST.private(
            epsilon=epsilon, batch=batch, steps=MNIST.steps(batch=batch, epochs=epochs), clip_norm=clip_norm
        ),
        optimizer=OptimizerSettings(name="sgd", learning_rate=rate),
    )
    cpu, reduction = _cpu(config, MNIST)
    return Recipe(
        config=config,
        source="TF-Privacy tutorial",
        summary=f"mnist, CNN, ReLU, {epochs} epochs of batch 256",
        accuracy=accuracy,
        differs=(_PLD, "Poisson sampling; the tutorial shuffles"),
        cpu=cpu,
        reduction=reduction,
    )


def _end_to_end(dataset: Dataset) -> Recipe:
    batch, rate, epochs, accuracy = _END_TO_END[dataset.name]
    grey = dataset is not CIFAR10
    config = RunConfig(
        name=f"{dataset.name}-handcrafted-eps3",
        data=dataset.data(**({"normalisation": "none"} if grey else {})),
        model=ModelConfig(name="shoefit_cnn" if grey else "tempered_cnn", options={"activation": "tanh"}),
        privacy=dataset.private(epsilon=3, batch=batch, steps=dataset.steps(batch=batch, epochs=epochs), clip_norm=0.1),
        optimizer=OptimizerSettings(name="sgd", learning_rate=rate, momentum=0.9),
    )
    cpu, reduction = _cpu(config, dataset)
    differs = ("the source pads the first convolution by 2",) if grey else ("CIFAR's own constants, not ImageNet's",)
    return Recipe(
        config=config,
        source="Handcrafted-DP",
        summary=f"{dataset.name}, CNN, tanh, end to end",
        accuracy=accuracy,
        differs=(_PLD, *differs),
        cpu=cpu,
        reduction=reduction,
    )


def _doermann(dataset: Dataset, epsilon: float, values: _Doermann) -> Recipe:
    sample_rate, epochs, rate, momentum, clip_norm, accuracy = values
    config = RunConfig(
        name=f"{dataset.name}-doermann-eps{epsilon:g}",
        data=dataset.data(),
        model=ModelConfig(
            name="tempered_cnn" if dataset is CIFAR10 else "doermann_cnn", options={"activation": "tanh"}
        ),
        privacy=dataset.private(
            epsilon=epsilon,
            batch=round(sample_rate * dataset.num_units, 3),
            steps=round(epochs / sample_rate),
            clip_norm=clip_norm,
        ),
        optimizer=OptimizerSettings(name="sgd", learning_rate=rate, momentum=momentum),
    )
    cpu, reduction = _cpu(config, dataset)
    return Recipe(
        config=config,
        source="Dörmann et al.",
        summary=f"{dataset.name}, CNN, tanh, a sixth of the data in every step",
        accuracy=accuracy,
        figure="" if accuracy else "not at hand",
        differs=(_PLD,),
        cpu=cpu,
        reduction=reduction,
    )
