"""SmoothNets (Remerscheid et al. 2022): the wide, shallow, dense network, its baselines and its components."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from dpvision.config import ModelConfig, OptimizerSettings, Option, ScheduleSettings
from dpvision.papers.recipe import Recipe, changed
from dpvision.papers.recipe_data import CIFAR10, IMAGENETTE, Dataset, reduced, sgd

SOURCE: Final = "SmoothNet"
EPSILON: Final = 7.0
# Accuracy at epsilon 7 on CIFAR-10 and ImageNette; ResNet-9 is not in the paper.
FIGURES: Final[dict[str, tuple[float | None, float | None]]] = {
    "smoothnet": (73.5, 69.7),
    "resnet18": (59.8, 59.9),
    "resnet34": (57.7, 58.7),
    "densenet121": (65.4, 65.1),
    "efficientnet_b0": (54.1, 60.5),
    "resnet9": (None, None),
}
# One change each to the paper's network.
COMPONENTS: Final[dict[str, dict[str, Option]]] = {
    "whole": {},
    "residual": {"connections": "residual"},
    "no-connections": {"connections": "none"},
    "average-pool": {"pooling": "average"},
    "no-pool": {"pooling": "none"},
    "no-norm": {"norm": "none"},
    "relu": {"activation": "relu"},
    "tanh": {"activation": "tanh"},
    "mish": {"activation": "mish"},
    "narrow": {"width": 4.0},
    "shallow": {"depth": 3.0},
    "deep": {"depth": 8.0},
}
_DIFFERS: Final = (
    "ours: last step, test set, all training images; the source: best model on a fifth that was kept for validation",
    "the source searched clip norms in [0.1, 20] and 90, 120 or 180 epochs and does not say which won: 10 and 90 here",
    "noise is calibrated by PLD",
)
# As many private steps with batch 256 at 32 px as one core takes in about 200 s.
_CPU_STEPS: Final = {
    "smoothnet": 20,
    "resnet18": 40,
    "resnet34": 20,
    "densenet121": 80,
    "efficientnet_b0": 80,
    "resnet9": 80,
}
_CPU_TRAINING: Final[dict[str, Any]] = {
    "optimizer": {"name": "nadam", "learning_rate": 1e-3, "momentum": 0.0, "weight_decay": None},
    "schedule": {"kind": "constant", "every_steps": None, "factor": 0.1},
    "privacy": {"clip_norm": 1.5},
}


def smoothnet_recipes() -> Iterator[Recipe]:
    """Yield Table 2 and the study of components."""
    for dataset in (CIFAR10, IMAGENETTE):
        yield from (_benchmark(dataset, model) for model in FIGURES)
    yield from (_component(name) for name in COMPONENTS)


def _benchmark(dataset: Dataset, model: str) -> Recipe:
    """Table 2. The reduced version has one optimizer for all models: too few steps for the paper's small rate."""
    epoch = dataset.steps(batch=256, epochs=1)
    small = dataset is not CIFAR10
    config = dataset.config(
        f"{dataset.name}-{model}-smoothnets-eps7",
        model,
        data=dataset.data(**({"image_size": 224} if small else {})),
        privacy=dataset.budget(EPSILON, batch=256, steps=90 * epoch, clip_norm=10.0),
        optimizer=OptimizerSettings(name="sgd", learning_rate=0.002, momentum=0.9, weight_decay=2e-4),
        schedule=ScheduleSettings(kind="step", every_steps=5 * epoch, factor=0.9),
    )
    accuracy = FIGURES[model][small]
    less = reduced(config, batch=256, steps=_CPU_STEPS[model], image_size=32, small=dataset if small else None)
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"{dataset.name}, {model} in the SmoothNet benchmark",
        accuracy=accuracy,
        figure="validation, best of 15 runs of a search" if accuracy else "not in the paper: for comparison",
        differs=(*_DIFFERS, *(["resized to 224 and cropped, not to 256 first"] if small else [])),
        needs=dataset.needs,
        cpu=changed(less, **_CPU_TRAINING, evaluations=1),
        reduction="32 px, batch 256, NAdam, clip 1.5, as many steps as give every network the same computing time",
    )


def component_name(component: str) -> str:
    """Return the recipe that changes this part of SmoothNet."""
    return f"cifar10-smoothnet-part-{component}-eps7"


def _component(component: str) -> Recipe:
    epoch = CIFAR10.steps(batch=128, epochs=1)
    options: dict[str, Option] = {"init": "pytorch", **COMPONENTS[component]}
    config = CIFAR10.config(
        component_name(component),
        "smoothnet",
        options,
        privacy=CIFAR10.budget(EPSILON, batch=128, steps=15 * epoch),
        optimizer=sgd(0.1),
        schedule=ScheduleSettings(kind="step", every_steps=epoch, factor=0.7),
    )
    narrow = {**options, "width": float(options.get("width", 8.0)) / 4}
    less = reduced(config, batch=512, steps=150, image_size=16)
    return Recipe(
        config=config,
        source=SOURCE,
        summary=f"cifar10, SmoothNet, components: {component.replace('-', ' ')}",
        figure="the study's results are not available",
        differs=(
            "the source searched clip norms in [0.1, 10] and trained 15 or 30 epochs: 1 and 15 here, at epsilon 7",
            "ours: last step, test set",
        ),
        cpu=changed(less, **_CPU_TRAINING, model=ModelConfig(name="smoothnet", options=narrow)),
        reduction="a quarter of the width, 16 px, 77,000 images, NAdam, clip 1.5",
    )
