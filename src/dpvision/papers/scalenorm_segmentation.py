"""UNet-9 and LinkNet-9 on liver CT, with and without ScaleNorm (Klause's thesis, Table 6.1), and patients as units.

Table 6.1 has slices as privacy units. The patient settings and the settings without privacy are ours. The reduced
versions run on a small public liver set (``recipe_data.small_set``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, final

from dpvision.config import ModelConfig, OptimizerSettings, PrivacyConfig, RunConfig, ScheduleSettings
from dpvision.papers import recipe_data
from dpvision.papers.recipe import Recipe, changed

SOURCE: Final = "ScaleNorm, Table 6.1"
PATIENTS: Final = "ours: patients as units"
GROUPS: Final = (8, 16, 32)
# Dice × 100 at 8, 16 and 32 groups, by network, epsilon and whether there is ScaleNorm: mean of three.
FIGURES: Final[dict[tuple[str, float, bool], tuple[float, float, float]]] = {
    ("unet9", 3, False): (81.2, 81.3, 81.0),
    ("unet9", 3, True): (81.4, 81.3, 81.1),
    ("linknet9", 3, False): (82.1, 82.1, 81.5),
    ("linknet9", 3, True): (82.1, 82.2, 80.6),
    ("linknet9", 0.5, False): (74.5, 73.1, 71.8),
    ("linknet9", 0.5, True): (73.5, 72.8, 71.2),
}
MEDIANS: Final[dict[tuple[str, float, bool], tuple[float, float, float]]] = {
    ("unet9", 3, False): (81.1, 81.2, 81.0),
    ("unet9", 3, True): (81.4, 81.4, 81.1),
    ("linknet9", 3, False): (82.2, 82.3, 81.6),
    ("linknet9", 3, True): (82.1, 82.4, 80.6),
    ("linknet9", 0.5, False): (74.9, 72.9, 71.9),
    ("linknet9", 0.5, True): (73.8, 72.4, 71.0),
}
BATCH, EPOCHS, CLIP_NORM = 32, 10, 1.5
_FIGURE: Final = "Dice × 100: mean of 3, best epoch on the test part, over batches of 16 slices"
_RATE: Final = (
    "learning rate 5e-4 as in the source's code (its text says 1e-3); its plateau rule, fed with a rising score, "
    "halves the rate about every 5 epochs, and ours does so without looking"
)
_TEXT: Final = "learning rate and schedule are those of the source's text; its code has 5e-4 and another rule"
_DIFFERS: Final = (
    "the source's Dice loss is one number for the batch, so clipping bounds no unit's influence and its epsilon is "
    "not proved; ours is the mean over rows of each row's Dice",
    "the source's slices were cut and windowed by a script that is not published; ours are windowed to -150..200",
    "the source's test volumes have no public labels; ours holds out a fifth of the patients",
    _RATE,
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
    """One run. ``epsilon`` None is the same without privacy.

    ``as_text`` takes the learning rate and the schedule of the thesis's text instead of its code's.
    """

    network: str
    scale_norm: bool
    epsilon: float | None = None
    groups: int = 8
    patients: bool = False
    as_text: bool = False

    @property
    def name(self) -> str:
        """Dataset, model, unit, epsilon, and the groups where they are not as usual."""
        budget = "noprivacy" if self.epsilon is None else f"eps{self.epsilon:g}"
        parts = ["liver", f"{'scale' * self.scale_norm}{self.network}", *(["patient"] * self.patients), budget]
        parts += [] if self.groups == 8 else [f"groups{self.groups}"]
        return "-".join([*parts, *(["text"] if self.as_text else [])])

    @property
    def norm(self) -> str:
        """The normalisation after each residual addition, for tables."""
        return "ScaleNorm" if self.scale_norm else "none"

    def config(self) -> RunConfig:
        """Return the run at the thesis's scale."""
        steps = round(recipe_data.SLICES / BATCH * EPOCHS)
        schedule = ScheduleSettings(kind="step", every_steps=steps // 2, factor=0.5)
        data, rate, head = recipe_data.whole_set(units="rows"), 5e-4, "unit"
        if self.as_text:
            rate, schedule = 1e-3, ScheduleSettings(kind="plateau", factor=0.5, patience=4, public_metric=True)
        privacy = self._privacy(recipe_data.SLICES, BATCH, steps)
        if self.patients:  # eight slices of a patient are eight times a slice's work
            data, rate, head = recipe_data.whole_set(units="owners", rows_per_unit=8), 1e-3, "conv"
            privacy, schedule = self._privacy(recipe_data.PATIENTS, 21, 200), ScheduleSettings()
        return RunConfig(
            name=self.name,
            task="segmentation",
            loss="dice",
            data=data,
            model=self._model(head=head),
            privacy=privacy,
            optimizer=OptimizerSettings(name="nadam", learning_rate=rate),
            schedule=schedule,
            evaluations=EPOCHS,
        )

    def cpu(self) -> RunConfig:
        """Return the run for two cores."""
        data, rate, decay = recipe_data.small_set(units="rows"), 4e-3, 0.9
        model, schedule = self._model(head="conv", width=8), ScheduleSettings()
        privacy = self._privacy(recipe_data.SMALL_SLICES, 256, 200, clip_norm=1.0)
        if self.patients:
            # With 26 units the noise of every weight counts: few weights, all patients in every step, a large rate.
            # One group: with eight, each of the first layers' few channels would lose its own brightness.
            data, rate, decay = recipe_data.small_set(units="owners", rows_per_unit=4), 1e-2, 0.95
            model, schedule = self._model(head="conv", width=4, groups=1), ScheduleSettings(kind="cosine")
            privacy = self._privacy(recipe_data.SMALL_PATIENTS, recipe_data.SMALL_PATIENTS, 150, clip_norm=1.0)
        return changed(
            self.config(),
            name=f"{self.name}-cpu",
            data=data.model_dump(),
            loss="dice_cross_entropy",
            model=model,
            privacy=privacy,
            optimizer=OptimizerSettings(name="nadam", learning_rate=rate),
            schedule=schedule,
            averaging=recipe_data.ema(decay),
        )

    def recipe(self, dice: float | None, figure: str = _FIGURE, *, median: float | None = None) -> Recipe:
        """Return the recipe with the thesis's Dice."""
        what = "with ScaleNorm" if self.scale_norm else "without ScaleNorm"
        unit = "patients as units" if self.patients else "slices as units"
        differs = (_HEAD, "the thesis has no run that protects patients") if self.patients else _DIFFERS
        differs = tuple(_TEXT if self.as_text and text == _RATE else text for text in differs)
        return Recipe(
            config=self.config(),
            source=PATIENTS if self.patients else SOURCE,
            summary=f"liver CT, {self.network} {what}, {unit}",
            accuracy=dice,
            figure=figure,
            also={} if median is None else {"median": median},
            differs=differs,
            needs=recipe_data.NEEDS,
            cpu=self.cpu(),
            reduction=_PATIENT_REDUCTION if self.patients else _REDUCTION,
        )

    def _model(self, **options: Any) -> ModelConfig:
        return ModelConfig(
            name=f"{'scale' * self.scale_norm}{self.network}", options={"groups": self.groups, **options}
        )

    def _privacy(self, units: int, batch: int, steps: int, clip_norm: float = CLIP_NORM) -> PrivacyConfig:
        plan: dict[str, Any] = {"num_units": units, "expected_batch_size": batch, "steps": steps}
        if self.epsilon is None:
            return PrivacyConfig(enabled=False, **plan)
        delta = 1e-3 if self.patients else 1e-5
        return PrivacyConfig(target_epsilon=self.epsilon, clip_norm=clip_norm, delta=delta, **plan)


TABLE: Final = tuple(
    (Setting(network=network, epsilon=epsilon, scale_norm=scale_norm, groups=groups), dice)
    for (network, epsilon, scale_norm), figures in FIGURES.items()
    for groups, dice in zip(GROUPS, figures, strict=True)
)
"""The thesis's Table 6.1, with its values."""
_NETWORKS: Final = tuple((network, scale_norm) for network in ("unet9", "linknet9") for scale_norm in (False, True))
PATIENT_SETTINGS: Final = tuple(
    Setting(network=network, epsilon=8, scale_norm=scale_norm, patients=True) for network, scale_norm in _NETWORKS
)
AS_TEXT: Final = tuple(
    (replace(setting, as_text=True), dice) for setting, dice in TABLE if (setting.epsilon, setting.groups) == (3, 8)
)
"""The table's runs with 8 groups at epsilon 3, by the thesis's text."""
ORDINARY_SETTINGS: Final = tuple(Setting(network=network, scale_norm=scale_norm) for network, scale_norm in _NETWORKS)
"""The non-private baselines of the same networks."""


def segmentation_recipes() -> Iterator[Recipe]:
    """Yield every setting on liver CT."""
    medians = [median for medians in MEDIANS.values() for median in medians]
    yield from (s.recipe(dice, median=median) for (s, dice), median in zip(TABLE, medians, strict=True))
    yield from (setting.recipe(dice) for setting, dice in AS_TEXT)
    yield from (setting.recipe(None, "no such run in the thesis") for setting in PATIENT_SETTINGS)
    yield from (setting.recipe(None, "the thesis has none without privacy") for setting in ORDINARY_SETTINGS)
