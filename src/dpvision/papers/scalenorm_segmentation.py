"""UNet-9 and LinkNet-9 on liver CT, with and without ScaleNorm (Klause's thesis, Table 6.1), and patients as units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from dpvision.config import (
    AveragingSettings,
    ModelConfig,
    OptimizerSettings,
    PrivacyConfig,
    RunConfig,
    ScheduleSettings,
)
from dpvision.papers import recipe_data
from dpvision.papers.recipe import Recipe, changed

SOURCE: Final = "ScaleNorm, Table 6.1"
PATIENTS: Final = "ours: patients as units"
GROUPS: Final = (8, 16, 32)
# Dice × 100 at 8, 16 and 32 groups, by network, epsilon and whether there is ScaleNorm.
FIGURES: Final[dict[tuple[str, float, bool], tuple[float, float, float]]] = {
    ("unet9", 3, False): (81.2, 81.3, 81.0),
    ("unet9", 3, True): (81.4, 81.3, 81.1),
    ("linknet9", 3, False): (82.1, 82.1, 81.5),
    ("linknet9", 3, True): (82.1, 82.2, 80.6),
    ("linknet9", 0.5, False): (74.5, 73.1, 71.8),
    ("linknet9", 0.5, True): (73.5, 72.8, 71.2),
}
NETWORKS: Final = ("unet9", "linknet9")
PATIENT_EPSILON: Final = 8
BATCH, EPOCHS, CLIP_NORM = 32, 10, 1.5
_FIGURE: Final = "Dice × 100: mean of 3, best epoch on the test part, over batches of 16 slices"
_DIFFERS: Final = (
    "the source's Dice loss is one number for the batch, so that clipping bounds nobody's influence and its epsilon is "
    "not proved; ours is the mean over rows of each row's Dice",
    "the source's slices were cut and windowed by a script that is not published; ours are windowed to -150..200",
    "the source's test volumes have no public labels; ours holds out a fifth of the patients",
    "learning rate 5e-4 as in the source's code (its text says 1e-3); its plateau rule, fed with a rising score, "
    "halves the rate about every 5 epochs, and ours does so without looking",
    "ours is the Dice of the last step, averaged over slices; the source's the best epoch's",
)
_HEAD: Final = "free scores at the end (head=conv) instead of norm and Mish"
_ENDS: Final = f"{_HEAD}, Dice and cross-entropy"
_REDUCTION: Final = f"1,699 slices of 26 patients at 32 px, width 8, {_ENDS}, batch 256, 200 steps"
_PATIENT_REDUCTION: Final = (
    f"26 patients in every step with up to 4 random slices, 32 px, width 4, one group, {_ENDS}, 150 steps, "
    "cosine schedule"
)


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run. ``epsilon`` None is the same without privacy."""

    network: str
    scale_norm: bool
    epsilon: float | None = None
    groups: int = 8
    patients: bool = False

    @property
    def name(self) -> str:
        """Dataset, model, unit, epsilon, and the groups where they are not as usual."""
        budget = "noprivacy" if self.epsilon is None else f"eps{self.epsilon:g}"
        parts = ["liver", f"{'scale' * self.scale_norm}{self.network}", *(["patient"] * self.patients), budget]
        return "-".join([*parts, *([] if self.groups == 8 else [f"groups{self.groups}"])])

    def config(self) -> RunConfig:
        """The run at the thesis's scale."""
        steps = round(recipe_data.SLICES / BATCH * EPOCHS)
        # Eight slices of a patient are eight times a slice's work.
        plan: dict[str, Any] = {
            "num_units": recipe_data.SLICES,
            "expected_batch_size": BATCH,
            "steps": steps,
            "delta": 1e-5,
        }
        if self.patients:
            plan = {"num_units": recipe_data.PATIENTS, "expected_batch_size": 21, "steps": 200, "delta": 1e-3}
        return RunConfig(
            name=self.name,
            task="segmentation",
            loss="dice",
            data=recipe_data.whole_set(units="owners", rows_per_unit=8)
            if self.patients
            else recipe_data.whole_set(units="rows"),
            model=self._model(head="conv" if self.patients else "unit"),
            privacy=self._privacy(plan),
            optimizer=OptimizerSettings(name="nadam", learning_rate=1e-3 if self.patients else 5e-4),
            schedule=ScheduleSettings()
            if self.patients
            else ScheduleSettings(kind="step", every_steps=steps // 2, factor=0.5),
            evaluations=EPOCHS,
        )

    def cpu(self) -> RunConfig:
        """The run for two cores."""
        plan: dict[str, Any] = {
            "num_units": recipe_data.SMALL_SLICES,
            "expected_batch_size": 256,
            "steps": 200,
            "delta": 1e-5,
        }
        data, width, groups, rate = recipe_data.small_set(units="rows"), 8, self.groups, 4e-3
        if self.patients:
            # With 26 units the noise of every weight counts: few weights, all patients in every step, a large rate.
            batch = recipe_data.SMALL_PATIENTS
            plan = {"num_units": batch, "expected_batch_size": batch, "steps": 150, "delta": 1e-3}
            # One group: with eight, each of the first layers' few channels would lose its own brightness.
            data, width, groups, rate = recipe_data.small_set(units="owners", rows_per_unit=4), 4, 1, 1e-2
        return changed(
            self.config(),
            name=f"{self.name}-cpu",
            data=data.model_dump(),
            loss="dice_cross_entropy",
            model=self._model(head="conv", width=width, groups=groups),
            privacy=self._privacy({**plan, "clip_norm": 1.0}),
            optimizer=OptimizerSettings(name="nadam", learning_rate=rate),
            schedule=ScheduleSettings(kind="cosine") if self.patients else ScheduleSettings(),
            averaging=AveragingSettings(kind="ema", decay=0.95 if self.patients else 0.9),
        )

    def recipe(self, dice: float | None, figure: str = _FIGURE) -> Recipe:
        """The recipe with the thesis's figure."""
        what = "with ScaleNorm" if self.scale_norm else "without ScaleNorm"
        unit = "patients as units" if self.patients else "slices as units"
        differs = (_HEAD, "the thesis has no run that protects patients") if self.patients else _DIFFERS
        return Recipe(
            config=self.config(),
            source=PATIENTS if self.patients else SOURCE,
            summary=f"liver CT, {self.network} {what}, {unit}",
            accuracy=dice,
            figure=figure,
            differs=differs,
            needs=recipe_data.NEEDS,
            cpu=self.cpu(),
            reduction=_PATIENT_REDUCTION if self.patients else _REDUCTION,
        )

    def _model(self, **options: Any) -> ModelConfig:
        return ModelConfig(
            name=f"{'scale' * self.scale_norm}{self.network}", options={"groups": self.groups, **options}
        )

    def _privacy(self, plan: dict[str, Any]) -> PrivacyConfig:
        if self.epsilon is None:
            public = {name: value for name, value in plan.items() if name not in ("delta", "clip_norm")}
            return PrivacyConfig(enabled=False, **public)
        return PrivacyConfig(target_epsilon=self.epsilon, **{"clip_norm": CLIP_NORM, **plan})


def table_settings() -> Iterator[tuple[Setting, float]]:
    """The thesis's Table 6.1, with its figures."""
    for (network, epsilon, scale_norm), figures in FIGURES.items():
        for groups, dice in zip(GROUPS, figures, strict=True):
            yield Setting(network=network, epsilon=epsilon, scale_norm=scale_norm, groups=groups), dice


def patient_settings() -> Iterator[Setting]:
    """Patients as units, and the same networks without privacy."""
    for network in NETWORKS:
        for scale_norm in (False, True):
            yield Setting(network=network, epsilon=PATIENT_EPSILON, scale_norm=scale_norm, patients=True)


def ordinary_settings() -> Iterator[Setting]:
    """The twins without privacy: what the same steps reach when nobody is protected."""
    for network in NETWORKS:
        for scale_norm in (False, True):
            yield Setting(network=network, scale_norm=scale_norm)


def segmentation_recipes() -> Iterator[Recipe]:
    """Every setting on liver CT."""
    for setting, dice in table_settings():
        yield setting.recipe(dice)
    for setting in patient_settings():
        yield setting.recipe(None, "no such run in the thesis")
    for setting in ordinary_settings():
        yield setting.recipe(None, "the thesis has none without privacy")
