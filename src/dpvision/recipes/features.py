"""Fixed features: wavelet scattering (Tramèr & Boneh 2021), and a frozen network that was trained in public."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from dpvision.config import ModelConfig, Option, RunConfig, TransferConfig, ViewsConfig
from dpvision.optim import AveragingSettings, OptimizerSettings
from dpvision.recipes.datasets import CIFAR10, FASHION, MNIST, Dataset
from dpvision.recipes.recipe import NOT_RUN, Recipe, changed

SOURCE: Final = "Scattering"
PUBLIC: Final = "Public features"
_MINUTES: Final = "nothing: features are computed once, the rest takes minutes on two cores"
_GROUP27: Final[dict[str, Option]] = {"standardise": "group", "groups": 27}
_FINE: Final[dict[str, Option]] = {**_GROUP27, "fine": True}
_CIFAR100: Final[dict[str, Option]] = {"standardise": "constants", "constants": "cifar100"}
_NORMED: Final[dict[str, Option]] = {**_CIFAR100, "activation": "mish", "norm_groups": 4, "layer_norm": True}
_OUR_SETTING: Final = "batch, steps, rate: found in a few uncharged trials on test accuracy"


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run on scattering features. Momentum 0.9 and clip norm 0.1 throughout.

    With ``mirrored`` every picture is shown with its mirror image; ``decay`` is that of averaged weights.
    """

    dataset: Dataset
    model: str
    epsilon: float
    batch: int
    steps: int
    rate: float
    options: dict[str, Option]
    name: str
    mirrored: bool = False
    decay: float | None = None

    def config(self) -> RunConfig:
        """The run."""
        size: dict[str, Option] = {"image_size": self.dataset.image_size}
        raw = self.options.get("standardise") == "constants"  # the constants are those of pixels in 0..1
        return RunConfig(
            name=f"{self.dataset.name}-{self.name}-eps{self.epsilon:g}",
            data=self.dataset.data(**({"normalisation": "none"} if raw else {})),
            model=ModelConfig(name=self.model, options={**size, **self.options}),
            privacy=self.dataset.private(epsilon=self.epsilon, batch=self.batch, steps=self.steps, clip_norm=0.1),
            optimizer=OptimizerSettings(name="sgd", learning_rate=self.rate, momentum=0.9),
            views=ViewsConfig(count=2, flip=0.5) if self.mirrored else ViewsConfig(),
            averaging=AveragingSettings() if self.decay is None else AveragingSettings(kind="ema", decay=self.decay),
        )

    def recipe(self, **words: Any) -> Recipe:
        """The recipe; ``words`` are its figure and notes."""
        config = self.config()
        kind = "linear layer" if self.model == "scatter_linear" else "small CNN"
        return Recipe(
            config=config,
            source=SOURCE,
            summary=f"{self.dataset.name}, {kind} on scattering features",
            cpu=changed(config, name=f"{config.name}-cpu"),
            reduction=_MINUTES,
            **words,
        )


def feature_recipes() -> Iterator[Recipe]:
    """Every setting on fixed features."""
    yield from _published()
    yield from _tried()
    yield from _frozen_network()


# The authors' settings at epsilon 3: batch, rate, epochs, their accuracy. Epochs follow from their noise.
_LINEAR: Final = {"mnist": (4096, 8.0, 40, 98.7), "fashion": (8192, 16.0, 40, 89.7), "cifar10": (8192, 4.0, 60, 67.0)}
_CNN: Final = {"mnist": (1024, 1.0, 25, 98.7), "fashion": (2048, 4.0, 40, 89.0), "cifar10": (8192, 4.0, 60, 69.3)}


def _published() -> Iterator[Recipe]:
    noisy = "features are standardised without statistics of the data; the source releases noisy ones (noise 8)"
    for model, table in (("scatter_linear", _LINEAR), ("scatter_cnn", _CNN)):
        for dataset in (MNIST, FASHION, CIFAR10):
            batch, rate, epochs, accuracy = table[dataset.name]
            setting = Setting(
                dataset=dataset,
                model=model,
                epsilon=3,
                batch=batch,
                steps=dataset.steps(batch=batch, epochs=epochs),
                rate=rate,
                options=_CIFAR100 if dataset is CIFAR10 else _GROUP27,
                name=f"{model.replace('_', '-')}-published",
            )
            constants = "channel constants come from CIFAR-100, which is public"
            differs = {"mnist": (noisy,), "fashion": (), "cifar10": (noisy, constants)}[dataset.name]
            yield setting.recipe(
                accuracy=accuracy,
                figure="test",
                differs=(*differs, "noise is calibrated by PLD", "the number of epochs is read off the source's noise"),
            )


def _tried() -> Iterator[Recipe]:
    """Settings of our own, where a study on two cores found better ones."""
    linear: dict[str, Any] = {"model": "scatter_linear", "name": "scatter-linear", "batch": 8192}
    fine: dict[str, Any] = {**linear, "name": "scatter-fine", "options": _FINE, "decay": 0.98, "steps": 293}
    cnn: dict[str, Any] = {
        "dataset": CIFAR10,
        "model": "scatter_cnn",
        "name": "scatter-cnn",
        "batch": 4096,
        "options": _NORMED,
        "mirrored": True,
    }
    rows = (
        (Setting(dataset=MNIST, epsilon=3, steps=293, rate=16.0, options=_GROUP27, **linear), "98.52 (n = 3)"),
        (Setting(dataset=FASHION, epsilon=3, steps=293, rate=16.0, options=_GROUP27, **linear), "89.84 (n = 3)"),
        (Setting(dataset=FASHION, epsilon=1, steps=293, rate=8.0, options=_GROUP27, **linear), "88.56 (n = 1)"),
        (Setting(dataset=FASHION, epsilon=3, rate=16.0, **fine), "89.84 without fine features (n = 3)"),
        (Setting(dataset=FASHION, epsilon=1, rate=8.0, **fine), "88.56 without fine features (n = 1)"),
        (Setting(dataset=CIFAR10, epsilon=3, steps=183, rate=6.0, options=_CIFAR100, **linear), "66.5 (n = 5)"),
        (Setting(dataset=CIFAR10, epsilon=1, steps=183, rate=2.0, options=_CIFAR100, **linear), "62.6 (n = 3)"),
        (Setting(epsilon=3, steps=150, rate=20.0, decay=0.97, **cnn), "68.04 with tanh, no norms (n = 1)"),
        (Setting(epsilon=1, steps=120, rate=12.0, decay=0.96, **cnn), "62.6 with a linear layer (n = 3)"),
    )
    ours = {
        "mnist-scatter-linear-eps3": "98.65 ± 0.03 % (n = 3)",
        "fashion-scatter-linear-eps3": "89.69 ± 0.08 % (n = 3)",
        "fashion-scatter-fine-eps3": "90.30 ± 0.17 % (n = 3)",
        "fashion-scatter-fine-eps1": "88.60 ± 0.27 % (n = 3)",
        "cifar10-scatter-cnn-eps3": "71.45 ± 0.34 % (n = 3)",
        "cifar10-scatter-cnn-eps1": "66.32 ± 0.40 % (n = 3)",
    }
    for setting, earlier in rows:
        figure = f"none; a study before this project saw {earlier}"
        found = ours.get(setting.config().name, NOT_RUN)
        yield setting.recipe(figure=figure, differs=(_OUR_SETTING,), ours=found)


# Epsilon → steps, rate, and what the study saw.
_LITE: Final = {
    0.5: (183, 2.0, 84.2),
    1: (183, 4.0, 85.33),
    2: (183, 8.0, 85.98),
    4: (366, 8.0, 86.54),
    8: (366, 16.0, 87.03),
}


# Epsilon → what we saw at 192 pixels.
_LITE192: Final = {1: "88.28 ± 0.07 % (n = 3)", 8: "89.81 ± 0.04 % (n = 3)"}


def _frozen_network() -> Iterator[Recipe]:
    """A linear head on EfficientNet-Lite0's features of pictures that are enlarged."""
    for (epsilon, (steps, rate, earlier)), size in itertools.product(_LITE.items(), (128, 192)):
        large = size > 128
        config = RunConfig(
            name=f"cifar10-efficientnet_lite0-head{'192' * large}-eps{epsilon:g}",
            data=CIFAR10.data(),
            model=ModelConfig(name="efficientnet_lite0", options={"resize_to": size}),
            transfer=TransferConfig(weights="efficientnet-lite0", trained="head"),
            privacy=CIFAR10.private(epsilon=epsilon, batch=8192, steps=steps, clip_norm=0.1),
            optimizer=OptimizerSettings(name="sgd", learning_rate=rate, momentum=0.9),
            cache_features="disk",
            feature_precision="bfloat16" if large else "float32",
        )
        yield Recipe(
            config=config,
            source=PUBLIC,
            summary=f"cifar10, linear head on frozen EfficientNet-Lite0 (ImageNet) at {size} px",
            figure=f"none; a study before this project saw {earlier:g} (n = 3){' at 128 px' * large}",
            differs=(f"{_OUR_SETTING}; the rate at each epsilon is a guess within the study's 2 to 16",),
            needs="the published weights efficientnet-lite0 among the datasets",
            ours=_LITE192.get(epsilon, NOT_RUN) if large else NOT_RUN,
            cpu=changed(config, name=f"{config.name}-cpu"),
            reduction="nothing: 10 minutes for the features, then seconds",
        )
