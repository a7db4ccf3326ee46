"""Reconstruction of one training image by an informed adversary, and the bound that a guarantee puts on it.

The adversary (Balle, Cherubin, Hayes 2022) knows the algorithm, the initial weights and all training images but one,
and sees the trained weights. It trains a reference model on the images that it knows. What the unknown image added to
the first linear layer is a sum of outer products of that layer's errors and its input, so the image's features are

    features = dWᵀ db / ‖db‖²        with dW, db: trained minus reference weight and bias.

A ridge regression from features to pixels, fitted on other public images, gives the image. Some of these images play
the unknown one in shadow models; the ridge, and how far a guess goes from the mean image, are those with the smallest
error there. Balle et al. train a neural network on thousands of shadow models instead.

The bound (ReRo; Hayes, Mahloujifar, Balle 2023): if a guess without the model identifies the image among ``candidates``
with probability kappa, no attack on the model does with more than the trade-off function allows at false-positive rate
kappa. Images must be public: the attack shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor, nn

from dpvision import models
from dpvision.accounting import full_profile, true_positive_bound
from dpvision.analyze.figures import Chart
from dpvision.audit.audited_runs import PLAIN_RATE, session_on
from dpvision.audit.bounds import CONFIDENCE
from dpvision.config import DataConfig, ModelConfig, OptimizerSettings, Option, PrivacyConfig, RunConfig, parse_config
from dpvision.data import ImageStore, LoadOptions, fixed_normalisation, load
from dpvision.data.datasets import dataset_names
from dpvision.errors import ArgumentError, Problems
from dpvision.privacy.randomness import Keys
from dpvision.training.prepare import calibrate
from dpvision.training.trainer import take_step

MODEL: Final = "shoefit_cnn"
FILTERS: Final = 35
"""Filters of both convolutions: 54,752 parameters on CIFAR-10, the "55K" of Balle et al.'s Figure 1."""
_RIDGES: Final = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@final
@dataclass(frozen=True, kw_only=True)
class ReconstructionPlan:
    """An experiment on public images.

    Attributes:
        source: name of a published dataset; its test part is used.
        known: training images that the adversary knows.
        targets: unknown images, one training run each.
        candidates: images among which a reconstruction is to identify its target, the target included.
        fitted: further images on which the adversary fits its inversion.
        shadows: how many of these play the unknown image in a shadow model, with the noise of the setting.
        steps: full-batch steps of each run.
        learning_rate: of plain SGD.
        delta: of the guarantees.
    """

    source: str
    known: int = 49
    targets: int = 20
    candidates: int = 100
    fitted: int = 5000
    shadows: int = 20
    steps: int = 10
    learning_rate: float = PLAIN_RATE
    delta: float = 1e-3

    def __post_init__(self) -> None:
        problems = Problems()
        for name in ("known", "targets", "candidates", "fitted", "shadows", "steps"):
            problems.count(name, getattr(self, name))
        problems.require(self.shadows < self.fitted, "shadows must be fewer than fitted.")
        problems.require(self.targets <= self.candidates, "targets must be at most as many as candidates.")
        problems.require(
            self.source in dataset_names(),
            f"reconstruction shows images, so it needs a published dataset ({', '.join(dataset_names())}), got "
            f"{self.source!r}.",
        )
        problems.raise_if_any()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """What the adversary reached at one epsilon.

    Attributes:
        epsilon: of the runs under attack; None without privacy.
        noise_multiplier: of the runs; None without privacy.
        identified: targets whose reconstruction is nearest to them among all candidates, by the cosine of what their
            pixels are beyond the mean image.
        identified_by_features: the same by the cosine of features, which is the stronger attack.
        errors: mean squared error of each reconstruction, pixels from 0 to 1.
        prior_errors: those of the mean of the fitted images, a guess without the model.
        bound: most targets that any attack can identify, as a share; None without privacy.
        images: the reconstructions (targets, channels, height, width), pixels from 0 to 1.
        originals: the targets.
        models: trained models: one reference, the shadow models and one per target.
    """

    epsilon: float | None
    noise_multiplier: float | None
    identified: int
    identified_by_features: int
    errors: tuple[float, ...]
    prior_errors: tuple[float, ...]
    bound: float | None
    images: Tensor
    originals: Tensor
    models: int

    @property
    def targets(self) -> int:
        """How many images were attacked."""
        return len(self.errors)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without images."""
        interval = stats.binomtest(self.identified_by_features, self.targets).proportion_ci(CONFIDENCE)
        return {
            "epsilon": self.epsilon,
            "noise_multiplier": self.noise_multiplier,
            "targets": self.targets,
            "identified": self.identified / self.targets,
            "identified_by_features": self.identified_by_features / self.targets,
            "interval": [float(interval.low), float(interval.high)],
            "bound": self.bound,
            "mean_squared_error": float(np.mean(self.errors)),
            "prior_mean_squared_error": float(np.mean(self.prior_errors)),
            "better_than_prior": sum(a < b for a, b in zip(self.errors, self.prior_errors, strict=True)) / self.targets,
            "models_trained": self.models,
        }


def reconstruct(
    plan: ReconstructionPlan,
    epsilons: Sequence[float | None],
    *,
    keys: Keys | None = None,
    data_dir: str | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Reconstruction, ...]:
    """Attack runs without privacy and at some epsilons.

    Args:
        plan: the experiment.
        epsilons: target epsilons; None is a run without privacy.
        keys: source of the runs' noise; fresh keys by default.
        data_dir: folder that holds the dataset.
        say: receives a line of progress.

    Returns:
        One result for each epsilon, on the same targets.

    Raises:
        ArgumentError: the dataset is too small.
        DataError: it can't be read.
    """
    keys = keys or Keys.from_os_entropy()
    store = _public_images(plan, data_dir)
    results: list[Reconstruction] = []
    for number, epsilon in enumerate(epsilons):
        attack = _Attack(plan, store, _config(plan, store, epsilon), keys.bind("reconstruction", str(number)))
        results.append(attack.run())
        if say is not None:
            found = results[-1]
            name = "without privacy" if epsilon is None else f"epsilon {epsilon:g}"
            say(f"{name}: {found.identified_by_features} of {found.targets} identified")
    return tuple(results)


def _public_images(plan: ReconstructionPlan, data_dir: str | None) -> ImageStore:
    test = load(plan.source, LoadOptions(data_dir=data_dir)).test
    needed = plan.known + plan.candidates + plan.fitted
    if test is None or test.num_rows < needed:
        rows = 0 if test is None else test.num_rows
        raise ArgumentError(f"the attack needs {needed} public images, the test part of {plan.source} has {rows}.")
    return test.select_units(np.arange(needed))


def _config(plan: ReconstructionPlan, store: ImageStore, epsilon: float | None) -> RunConfig:
    """Full-batch training on the known images and one more: nothing about the draw is left to guess."""
    units = plan.known + 1
    options: dict[str, Option] = {"filters": FILTERS, "image_size": store.image_shape[1]}
    private: dict[str, Any] = {"target_epsilon": epsilon, "delta": plan.delta, "clip_norm": 1.0}
    privacy = PrivacyConfig(
        enabled=epsilon is not None,
        num_units=units,
        expected_batch_size=float(units),
        steps=plan.steps,
        anyway=True,
        privacy_unit="example",
        adjacency="add_remove",
        **(private if epsilon is not None else {}),
    )
    config = RunConfig(
        name="reconstruction",
        data=DataConfig(source=plan.source, normalisation="fixed", rows_per_unit=1),
        model=ModelConfig(name=MODEL, options=options),
        loss="cross_entropy",
        privacy=privacy,
        optimizer=OptimizerSettings(name="sgd", learning_rate=plan.learning_rate),
    )
    return config if epsilon is None else parse_config(calibrate(config).model_dump())


class _Attack:
    """One setting: a reference model, a model for each target, and what the adversary makes of them."""

    def __init__(self, plan: ReconstructionPlan, store: ImageStore, config: RunConfig, keys: Keys) -> None:
        self._plan, self._store, self._config, self._keys = plan, store, config, keys
        self._normalisation = fixed_normalisation(store.image_shape[0])
        ends = np.cumsum([plan.known, plan.candidates, plan.fitted])
        self._known = np.arange(ends[0])
        self._candidates, self._fitted = np.arange(ends[0], ends[1]), np.arange(ends[1], ends[2])

    def run(self) -> Reconstruction:
        # The reference is what the adversary can compute: it does not know the noise, so its own run has none.
        reference, plan = self._trained(self._known, self._keys.bind("reference"), noise=False), self._plan
        targets = self._candidates[: plan.targets]
        pixels_CD = self._pixels(self._candidates)
        candidates_CF = _features(reference, self._inputs(self._candidates))
        shadow_rows, fitted_rows = self._fitted[: plan.shadows], self._fitted[plan.shadows :]
        guess = _inversion(
            (_features(reference, self._inputs(fitted_rows)), self._pixels(fitted_rows)),
            (self._attacked(shadow_rows, reference, "shadow"), self._pixels(shadow_rows)),
        )
        seen_TF = self._attacked(targets, reference, "target")
        guesses_TD, mean_D = guess(seen_TF).clamp(0, 1), self._pixels(fitted_rows).mean(0)
        own, truth_TD = torch.arange(len(targets)), pixels_CD[: len(targets)]
        nearest_T = _cosines(guesses_TD - mean_D, pixels_CD - mean_D).argmax(1)
        cosines_TC = _cosines(seen_TF, candidates_CF)
        shape = (len(targets), *self._store.image_shape)
        privacy = self._config.privacy
        return Reconstruction(
            epsilon=privacy.target_epsilon if privacy.enabled else None,
            noise_multiplier=privacy.noise_multiplier if privacy.enabled else None,
            identified=int((nearest_T == own).sum()),
            identified_by_features=int((cosines_TC.argmax(1) == own).sum()),
            errors=tuple((guesses_TD - truth_TD).square().mean(1).tolist()),
            prior_errors=tuple((mean_D - truth_TD).square().mean(1).tolist()),
            bound=reconstruction_bound(self._config, kappa=1 / len(self._candidates)) if privacy.enabled else None,
            images=guesses_TD.view(shape),
            originals=truth_TD.view(shape),
            models=1 + plan.shadows + len(targets),
        )

    def _attacked(self, rows: np.ndarray, reference: nn.Module, name: str) -> Tensor:
        """Train a model with each row as the unknown image; returns the features that its weights show."""
        found = []
        for number, row in enumerate(rows):
            keys = self._keys.bind(name, str(number))
            found.append(_extracted(self._trained(np.append(self._known, row), keys, noise=True), reference))
        return torch.stack(found)

    def _trained(self, rows: np.ndarray, keys: Keys, *, noise: bool) -> nn.Module:
        """Train on some rows from the known initial weights, by the step of training itself."""
        config = self._config
        if config.privacy.enabled and not noise:
            config = _without_noise(config)
        chosen = required_model(config)
        model = models.create(
            chosen.name,
            num_classes=self._store.num_classes,
            in_channels=self._store.image_shape[0],
            seed=0,
            **chosen.options,
        )
        train = self._store.select_units(rows)
        with session_on(config, train, keys=keys, model=model, normalisation=self._normalisation) as session:
            while session.step < session.total_steps:
                take_step(session)
        return model.eval()

    def _inputs(self, rows: np.ndarray) -> Tensor:
        return self._normalisation.apply(self._store.images[torch.from_numpy(rows)])

    def _pixels(self, rows: np.ndarray) -> Tensor:
        return self._store.images[torch.from_numpy(rows)].flatten(1).float() / 255


def required_model(config: RunConfig) -> ModelConfig:
    """Return the configured model; ``ArgumentError`` if there is none."""
    if config.model is None:
        raise ArgumentError("name a model.")
    return config.model


def _without_noise(config: RunConfig) -> RunConfig:
    """The same clipping with next to no noise: what the adversary expects of a run."""
    privacy = config.privacy.model_copy(update={"target_epsilon": None, "noise_multiplier": 1e-6})
    return config.model_copy(update={"privacy": privacy})


def _first_linear(model: nn.Module) -> tuple[int, nn.Linear]:
    """The first linear layer of a sequence of layers, and its place."""
    for index, layer in enumerate(model.children()):
        if isinstance(layer, nn.Linear):
            return index, layer
    raise ArgumentError(f"{type(model).__name__} has no linear layer whose input could be extracted.")


def _features(model: nn.Module, inputs: Tensor) -> Tensor:
    """The input of the first linear layer for each image."""
    index, _ = _first_linear(model)
    body = nn.Sequential(*list(model.children())[:index])
    with torch.no_grad():
        return torch.cat([body(batch) for batch in inputs.split(256)])


def _extracted(trained: nn.Module, reference: nn.Module) -> Tensor:
    """The unknown image's features: the part of the weights' difference that goes with that of the biases."""
    (_, new), (_, old) = _first_linear(trained), _first_linear(reference)
    weight_OF, bias_O = new.weight.detach() - old.weight.detach(), new.bias.detach() - old.bias.detach()
    return bias_O @ weight_OF / bias_O.square().sum().clamp(min=1e-30)


def _cosines(guesses_TD: Tensor, candidates_CD: Tensor) -> Tensor:
    return nn.functional.normalize(guesses_TD, dim=1) @ nn.functional.normalize(candidates_CD, dim=1).T


def _inversion(clean: tuple[Tensor, Tensor], attacked: tuple[Tensor, Tensor]) -> Callable[[Tensor], Tensor]:
    """Ridge regression from features (and a constant) to what pixels are beyond their mean.

    Args:
        clean: features and pixels of the images that the regression is fitted on.
        attacked: features that shadow models show, and the pixels behind them. They decide about the ridge, and about
            the factor between 0 and 1 by which a guess leaves the mean: noisy features deserve a cautious guess.

    Returns:
        A function from features to pixels.
    """
    mean_D = clean[1].mean(0)
    inputs, outputs = _with_constant(clean[0]), (clean[1] - mean_D).double()
    truth = (attacked[1] - mean_D).double()

    def fitted(ridge: float) -> tuple[float, float, Tensor]:
        weights = _ridge(inputs, outputs, ridge)
        guesses = _with_constant(attacked[0]) @ weights
        factor = float(((guesses * truth).sum() / guesses.square().sum().clamp(min=1e-30)).clamp(0, 1))
        return float((factor * guesses - truth).square().mean()), factor, weights

    _, factor, weights = min(map(fitted, _RIDGES), key=lambda found: found[0])
    return lambda features: mean_D + (factor * (_with_constant(features) @ weights)).float()


def _with_constant(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones(len(features), 1)], dim=1).double()


def _ridge(inputs: Tensor, outputs: Tensor, ridge: float) -> Tensor:
    gram = inputs.T @ inputs
    penalty = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram + penalty, inputs.T @ outputs)


def reconstruction_bound(config: RunConfig, *, kappa: float) -> float:
    """Bound the probability with which any attack reconstructs a unit, given that of a guess without the model.

    A reconstruction that succeeds is a test for membership: on a model trained without the unit it succeeds with
    probability kappa at most, so with the unit it does with at most the true-positive rate that the run's whole privacy
    profile allows at false-positive rate kappa (Hayes, Mahloujifar, Balle 2023, theorem 2).

    Args:
        config: a private configuration with calibrated noise.
        kappa: probability of success of the best guess without the model, from 0 to 1.

    Returns:
        The bound, from 0 to 1.

    Guarantee: an upper bound for every attacker who knows all other units, for the planned number of steps.
    """
    mechanism, delta = config.mechanism, config.privacy.delta
    if delta is None:
        raise ArgumentError("delta must be set.")
    profile = full_profile([(mechanism.step_event, mechanism.steps)], delta=delta)
    return true_positive_bound(profile, false_positive_rate=kappa)


def reconstruction_document(plan: ReconstructionPlan, found: Sequence[Reconstruction]) -> dict[str, Any]:
    """Describe a reconstruction experiment. Contains nothing about private images.

    Args:
        plan: the experiment.
        found: its results.

    Returns:
        A document for the command line.
    """
    return {
        "kind": "reconstruction, informed adversary",
        "settings": {
            "data": f"test part of {plan.source}",
            "model": f"{MODEL}, filters={FILTERS}",
            "known_images": plan.known,
            "candidates": plan.candidates,
            "images_for_the_inversion": plan.fitted,
            "steps": plan.steps,
            "learning_rate": plan.learning_rate,
            "delta": plan.delta,
            "shadow_models": plan.shadows,
            "reference_models": 1,
        },
        "kappa": 1 / plan.candidates,
        "attacks_on_images": [each.to_dict() for each in found],
        "shows": "How much of one unknown training image the trained weights reveal to someone who knows all others.",
        "does_not_show": (
            "Other attacks may do better, up to the bound. The settings are small and favour the adversary: few "
            "training images, every one of them in every step."
        ),
    }


def reconstruction_chart(found: Sequence[Reconstruction], *, columns: int = 10) -> Chart:
    """Draw the unknown images above their reconstructions, one row for each epsilon.

    Args:
        found: results on the same targets.
        columns: most images to show.

    Returns:
        The figure, with the results as its numbers.
    """
    shown = min(columns, found[0].targets)
    rows = [("unknown image", found[0].originals), *((_label(each), each.images) for each in found)]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(rows), shown, squeeze=False)
        for line, (label, images) in zip(panels, rows, strict=True):
            for panel, image in zip(line, images[:shown], strict=True):
                panel.imshow(image.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
                panel.set(xticks=[], yticks=[])
                panel.grid(visible=False)
            line[0].set_ylabel(label, fontsize=7)

    return Chart(
        name="reconstruction",
        title="Reconstruction of one training image by an informed adversary",
        draw=draw,
        rows=[{key: value for key, value in each.to_dict().items() if key != "interval"} for each in found],
        values={"results": [each.to_dict() for each in found]},
        size=(1.0 * shown, 1.1 * len(rows) + 0.4),
    )


def _label(result: Reconstruction) -> str:
    return "no privacy" if result.epsilon is None else f"epsilon {result.epsilon:g}"
