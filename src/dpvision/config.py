"""The settings of a run: the one place where a setting is declared.

A field gives the TOML key, the flag of ``dpvision train``, its help text, its default, its entry in the reference and
the wording of its errors. ``RunConfig`` is the whole run; each of its sections is a class of this file. A field that is
None has not been chosen yet: ``training.prepare`` fills it in before any privacy budget is spent.

The module does not import torch, so that a command line can be checked at once. The name of a field is part of the
configuration's digest, so it does not change.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar, final, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dpvision.errors import ArgumentError, brief, validation_message
from dpvision.own_code import is_own
from dpvision.privacy.mechanism import Adjacency, Clipping, Mechanism, OrdinarySampling

Task = Literal["classification", "segmentation"]
Precision = Literal["float32", "bfloat16"]
LossName = Literal["cross_entropy", "dice", "dice_cross_entropy", "binary_cross_entropy"]
KNOWN_DATASETS: Final = ("digits", "mnist", "fashionmnist", "cifar10", "cifar100")
"""Names of data sources that are not paths."""
_PATHS = ("source", "test", "masks", "test_masks", "unit_csv", "findings", "test_findings", "image_folder")
"""Fields of ``DataConfig`` that may be paths."""
Option = bool | int | float | str
T = TypeVar("T")
"""Problems of a configuration that one message names."""
_MECHANISM_FIELDS = ("num_units", "expected_batch_size", "clip_norm", "noise_multiplier", "steps", "privacy_unit")
_MECHANISM_CHOICES = ("adjacency", "clipping", "unit_norm")  # never open: each has a default

# More is a mistake, and far more would not fit into a float32.
LARGEST = 1e6
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, strict=True)]
AtLeastOne = Annotated[int, Field(ge=1, strict=True)]

Panel = Literal["first", "data", "privacy", "model", "optimisation", "augmentation", "transfer", "output"]


@final
@dataclass(frozen=True)
class Flag:
    """How a field appears on the command line, where that does not follow from its name and its section.

    Attributes:
        name: the flag, such as ``--views``; an upper-case word is a positional argument; "" means no flag.
        panel: the group of the help page, where it differs from that of the section.
    """

    name: str | None = None
    panel: Panel | None = None


NO_FLAG: Final = Flag("")
FIRST: Final = Flag(panel="first")


class Settings(BaseModel):
    """A frozen section that refuses unknown keys: a typo is an error, not a default."""

    panel: ClassVar[Panel] = "output"
    """The group of the help page in which the flags of the section appear."""
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def _refuse_unused(self, *, kind: str, uses: Mapping[str, set[str]], label: str = "") -> None:
        """Refuse every field that differs from its default although ``kind`` does not use it.

        By value, not by whether it was given: settings that are read back from their own JSON must pass.
        """
        fields = type(self).model_fields
        unused = sorted(set[str]().union(*uses.values()) - uses[kind])
        changed = [f"{name}={getattr(self, name)}" for name in unused if getattr(self, name) != fields[name].default]
        if changed:
            raise ValueError(f"{label}{kind} does not use {', '.join(changed)}. Leave it out, or choose another kind.")


class DataConfig(Settings):
    """Data: where the images come from, and what a privacy unit is."""

    panel: ClassVar[Panel] = "data"
    source: Annotated[str, Flag("SOURCE", panel="first")]
    """Images to train on: a folder (class folders, or images with a table), a table of files and labels (.csv, .jsonl,
    .parquet), an .npz file, or mnist, fashionmnist, cifar10, cifar100, digits."""
    test: str | None = None
    """Public test set, in the form of SOURCE. Default: a part of SOURCE is held out."""
    data_dir: str | None = None
    """Folder that holds the known datasets."""
    image_size: int | None = Field(default=None, ge=4, le=1024)
    """Shorter side after resizing, in pixels (4 to 1024); then cropped square."""
    channels: Literal[1, 3] | None = None
    """Channels of an image, grey or colour. Default: colour for folders of classes, else the file's own."""
    skip_bad: bool = False
    """Skip and count images that can't be read."""
    holdout_fraction: Annotated[float, Flag("--holdout")] = Field(default=0.1, gt=0, lt=1)
    """Share of the units that is held out as the test split, between 0 and 1."""
    validation: bool = False
    """Hold units out of the training images and measure on them, although there is a test set, which is not read."""
    normalisation: Literal["auto", "published", "fixed", "none", "released"] = "auto"
    """Source of the pixel mean and std; released means estimated with noise, and charged."""
    statistics_noise_multiplier: float = Field(default=8.0, gt=0)
    """Noise multiplier of the pixel statistics, with --normalisation released."""
    mean: Annotated[tuple[float, ...] | None, NO_FLAG] = None
    """Mean of each channel, in [0, 1]. Written by the run."""
    std: Annotated[tuple[float, ...] | None, NO_FLAG] = None
    """Standard deviation of each channel. Written by the run."""
    masks: Annotated[str | None, Flag("MASKS", panel="first")] = None
    """With --task segmentation: the masks, a folder or file beside that of the images."""
    test_masks: str | None = None
    """Masks of the public test set."""
    file_column: str | None = None
    """Column of a table that names the image files. Default: file, file_name, path, image or image_id."""
    label_column: str | None = None
    """Column of a table that names the class. Default: label, class, target, diagnosis or dx."""
    split_column: str | None = None
    """Column of a table that says train, test or val. Default: split, set or partition, if there is one."""
    image_folder: str | None = None
    """Folder in which the files of a table lie. Default: that of the table."""
    classes: str | None = None
    """Names of all classes, separated by commas: required for a table, so that private labels do not decide them."""
    public_classes: bool = False
    """Read the classes off the labels of a table, and declare them public."""
    frames: Literal["auto", "all", "first"] = "auto"
    """Frames of a DICOM file and pages of a TIFF; auto takes all where their owner is known. all takes the slices of
    volumes in an .npz file too, along --volume-axis."""
    findings: str | None = None
    """Multi-label targets: a CSV with the column file and one column per finding (1, 0, -1 or empty: unknown). For an
    .npz file whose labels are (N, findings): that file again."""
    findings_columns: str | None = None
    """Columns of --findings to use, separated by commas. Default: all but those of file and unit. Of an .npz file: the
    names of all."""
    test_findings: str | None = None
    """Findings of the public test set. Default: --findings."""
    mask_classes: Literal["merged", "classes"] = "merged"
    """Whether any value but 0 is foreground (merged), or each value is a class."""
    volume_axis: Literal[0, 1, 2] = 2
    """Axis along which volumes are cut into slices."""
    window: tuple[float, float] | None = None
    """Intensities from LOW to HIGH are used; others are clamped."""
    only_foreground: bool = False
    """Leave out images whose mask is empty."""
    unit_column: str | None = None
    """Array of the .npz file, or column of the table or of --unit-csv, that names the owner of a row. Default for a
    table: patient, patient_id, subject and the like, if there is one."""
    unit_csv: str | None = None
    """CSV or Parquet file with the columns file and unit."""
    unit_folder_level: int | None = Field(default=None, ge=1)
    """Folder level that names the owner: 1 is the class folder, 2 the folder in it."""
    unit_pattern: Annotated[str | None, FIRST] = None
    """Regular expression with one group: the group names the owner (a patient, say) of a file."""
    units: Literal["auto", "rows", "owners"] = "auto"
    """What a privacy unit is; auto means owners where they are known, else rows."""
    rows_per_unit: int | None = Field(default=None, ge=1, le=10_000)
    """Most rows of one unit that enter a step (1 to 10000)."""
    public_data: bool = False
    """Declare the training images public: then the result of --baseline is part of the release."""

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        named = (self.unit_column or self.unit_csv, self.unit_folder_level, self.unit_pattern)
        if sum(each is not None for each in named) > 1:
            raise ValueError(
                "unit_folder_level, unit_pattern, and unit_column or unit_csv exclude each other: choose one"
            )
        if self.unit_pattern is not None and _groups(self.unit_pattern) != 1:
            raise ValueError(f"unit_pattern must be a regular expression with one group, got {self.unit_pattern!r}")
        if self.validation and self.test is not None:
            raise ValueError("validation measures on held-out training images: leave test out, or validation")
        if self.findings is None and (self.findings_columns is not None or self.test_findings is not None):
            raise ValueError("findings_columns and test_findings need findings")
        names = self.class_list
        if names is not None and (len(names) < 2 or len(set(names)) < len(names) or "" in names):
            raise ValueError(f"classes must be two or more different names, separated by commas, got {self.classes!r}")
        if names is not None and (self.public_classes or self.findings is not None):
            raise ValueError("classes excludes public_classes and findings: leave one of them out")
        if self.window is not None and not self.window[0] < self.window[1]:
            raise ValueError(f"window must be two numbers, the lower one first, got {self.window}")
        return self

    @property
    def class_list(self) -> tuple[str, ...] | None:
        """The declared classes, in the order of their numbers."""
        return None if self.classes is None else tuple(each.strip() for each in self.classes.split(","))

    @property
    def finding_list(self) -> tuple[str, ...] | None:
        """The named findings, in the order of their numbers."""
        names = tuple(each.strip() for each in (self.findings_columns or "").split(","))
        return tuple(filter(None, names)) or None

    @property
    def name(self) -> str:
        """The dataset's name without its path."""
        return Path(self.source).name or self.source


def _groups(pattern: str) -> int:
    """Count the groups of a regular expression; -1 if it is not one."""
    try:
        return re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError):
        return -1


@final
class ViewsConfig(Settings):
    """Augmentation: views of every drawn image, averaged before the unit is clipped.

    Nothing here is learned from data, so augmentation costs no epsilon.
    """

    panel: ClassVar[Panel] = "augmentation"
    count: Annotated[int, Flag("--views")] = Field(default=1, ge=1, le=64)
    """Augmented views of an image (1 to 64), averaged before clipping."""
    crop_padding: int = Field(default=0, ge=0, le=64)
    """Pixels added on every side before a random crop (0 to 64)."""
    padding: Literal["reflect", "symmetric", "zeros"] = "reflect"
    """Padding: mirrored without or with the edge pixel, or black."""
    flip: float = Field(default=0.0, ge=0, le=1)
    """Probability that a view is mirrored, 0 to 1."""
    rotation: float = Field(default=0.0, ge=0, le=180)
    """Largest rotation of a view, 0 to 180 degrees."""
    erasing: float = Field(default=0.0, ge=0, le=1)
    """Probability that a rectangle of a view is erased, 0 to 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.count > 1 and not self.random:
            raise ValueError(
                f"{self.count} views of an image would be equal: give crop_padding, flip, rotation or erasing too"
            )
        return self

    @property
    def random(self) -> bool:
        """Whether a view can differ from its image."""
        return self.crop_padding > 0 or self.flip > 0 or self.rotation > 0 or self.erasing > 0


@final
class ModelConfig(Settings):
    """Model: a registered name and its options, or the user's own code."""

    panel: ClassVar[Panel] = "model"
    name: Annotated[str, Flag("--model", panel="first")]
    """Model: a name that `dpvision models` lists, or FILE.py:FUNCTION of your own. Default: chosen from the task, the
    number of units and the images' shape."""
    options: Annotated[dict[str, Option], Flag("--option")] = {}
    """Option of the model, as name=value. May be repeated."""
    sha256: Annotated[str | None, NO_FLAG] = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the source of an own model. Written by the run if left out."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.options and is_own(self.name):
            raise ValueError("options are for models of the catalogue: set them in your own function")
        if self.sha256 is not None and not is_own(self.name):
            raise ValueError("sha256 is for an own model, FILE.py:FUNCTION")
        return self


@final
class PriorRelease(Settings):
    """The earlier run whose release gave the initial weights, as its certificate states it. Written by the run."""

    run_id: str
    """Identifier of the earlier run."""
    data: tuple[str, ...]
    """Names of its data: more than one if a fork changed them."""
    privacy_unit: str
    """What it protected."""
    adjacency: Adjacency | None = None
    """Its adjacency; None without privacy."""
    epsilon: float | None = None
    """Its epsilon; None without privacy."""
    delta: float | None = None
    """Its delta; None without privacy."""
    stamps: tuple[str, ...] = ()
    """Reasons why it is not for release."""
    began_elsewhere: bool = False
    """Whether it had initial weights itself."""
    transfer: TransferConfig | None = None
    """Which ones, and so on."""


@final
class TransferConfig(Settings):
    """Transfer: where the initial weights come from, and which parameters are trained."""

    panel: ClassVar[Panel] = "transfer"
    weights: Annotated[str, Flag("--transfer-weights")]
    """Initial weights: a .safetensors, .npz or torch state file, the folder of a run, or a known name."""
    rename: Annotated[dict[str, str], NO_FLAG] = {}
    """Prefixes of parameter names in the file, and the model's own prefixes."""
    trained: Literal["head", "last", "all", "head_then_all"] = "head"
    """Parameters that are trained; last takes --stages, head_then_all --head-steps."""
    stages: int | None = Field(default=None, ge=1)
    """Number of final stages to train, including the head (with --trained last)."""
    head_steps: int | None = Field(default=None, ge=1)
    """Steps for the head alone (with --trained head_then_all)."""
    source: Annotated[str | None, Flag("--transfer-source")] = None
    """Data that the weights were trained on: declared public in the certificate."""
    licence: str | None = None
    """Licence of the weights, for the certificate."""
    initialisation: Literal["weights", "mean_var"] = "weights"
    """Use the weights, or draw each layer with their mean and variance (mean_var)."""
    draw: int | None = Field(default=None, ge=0, lt=2**31)
    """With mean_var: number of the draw, so that runs can have the same one. Default: drawn from the run's key."""
    sha256: Annotated[str | None, NO_FLAG] = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the file. Written by the run if left out."""
    prior: Annotated[PriorRelease | None, NO_FLAG] = None
    """The earlier run that released the weights. Written by the run."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.stages is not None) != (self.trained == "last"):
            raise ValueError("stages must be given with trained=last, and only there")
        if (self.head_steps is not None) != (self.trained == "head_then_all"):
            raise ValueError("head_steps must be given with trained=head_then_all, and only there")
        if self.initialisation == "mean_var" and self.trained != "all":
            raise ValueError("initialisation=mean_var draws every layer again, so it needs trained=all")
        if self.draw is not None and self.initialisation != "mean_var":
            raise ValueError("draw numbers the draws of initialisation=mean_var, and is for that alone")
        return self


def _check_risk(text: str) -> None:
    """Refuse a limit on attacks that is not written as ``AttackRisk`` reads it."""
    from dpvision.accounting import AttackRisk

    try:
        AttackRisk.parse(text)
    except ArgumentError as error:
        raise ValueError(str(error)) from error


@final
class PrivacyConfig(Settings):
    """Privacy: the mechanism, as far as it has been chosen."""

    panel: ClassVar[Panel] = "privacy"
    enabled: Annotated[bool, Flag("--no-privacy")] = True
    """Ordinary training: no guarantee at all."""
    target_epsilon: Annotated[float | None, FIRST] = Field(default=None, gt=0)
    """Hard budget limit, > 0: no step crosses it."""
    target_risk: str | None = None
    """Limit on membership attacks, instead of --target-epsilon: tpr:LIMIT@FPR or advantage:LIMIT, for example
    tpr:0.05@0.01 (of the members at most 5 % are recognised where 1 % of the non-members are accused)."""
    delta: Annotated[float | None, FIRST] = Field(default=None, gt=0, lt=1)
    """Delta of the guarantee. Default: a power of ten below 1 / num_units."""
    noise_multiplier: float | None = Field(default=None, gt=0)
    """Noise stddev on the sum over clip_norm. Default: calibrated to target_epsilon."""
    expected_batch_size: float | None = Field(default=None, gt=0)
    """Mean number of units in a Poisson draw; the divisor of the sum."""
    steps: Annotated[int | None, FIRST] = Field(default=None, ge=1)
    """Noisy releases, empty draws included."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data, instead of --steps; the run converts them to steps."""
    clip_norm: float | None = Field(default=None, ge=1e-30, le=1e30)
    """L2 bound on the gradient of one unit."""
    clipping: Clipping = "flat"
    """How the gradient of a unit is clipped to clip_norm."""
    unit_norm: bool = False
    """Divide by clip_norm too, so that one learning rate fits every clip_norm."""
    num_units: int | None = Field(default=None, ge=1)
    """Number of privacy units, declared public. Default: counted with noise, charged."""
    count_noise_multiplier: float | None = Field(default=None, gt=0)
    """Noise multiplier of that count, > 0. Default: from target_epsilon."""
    accountant: Literal["pld", "rdp"] = "pld"
    """Accountant that calibrates the noise to target_epsilon: rdp adds a little more, as in most papers. The guarantee
    is the PLD bound with either."""
    most_rows_per_owner: int | None = Field(default=None, ge=1)
    """With --units rows: use at most this many rows of an owner, and bound their epsilon too."""
    privacy_unit: str | None = None
    """Word for what is protected: example, patient, user."""
    adjacency: Adjacency = "add_remove"
    """Which datasets are neighbours."""
    anyway: bool = False
    """Train although the forecast calls the plan hopeless."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target_risk is not None:
            _check_risk(self.target_risk)
        if self.enabled and self.target_epsilon is None and self.noise_multiplier is None and self.target_risk is None:
            raise ValueError("a private run needs target_epsilon, target_risk or noise_multiplier")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs exclude each other: give one of them")
        if self.accountant != "pld" and self.target_risk is not None:
            raise ValueError("accountant=rdp calibrates to target_epsilon: a target_risk has no value by RDP")
        return self


_OPTIMIZER_USES: Final[dict[str, set[str]]] = {
    "sgd": {"momentum", "nesterov"},
    "adam": {"betas", "eps"},
    "adamw": {"betas", "eps"},
    "nadam": {"betas", "eps", "momentum_decay"},
    "rmsprop": {"momentum", "eps", "smoothing", "centered"},
}


@final
class OptimizerSettings(Settings):
    """Optimisation: the update rule.

    What is left out is the default run's (training.defaults), or torch's for a rule that is not the default run's.
    """

    panel: ClassVar[Panel] = "optimisation"
    name: Annotated[Literal["sgd", "adam", "adamw", "nadam", "rmsprop"], Flag("--optimizer")] = "sgd"
    """Update rule."""
    learning_rate: Positive | None = None
    """Step size, > 0. Default: from the plan."""
    weight_decay: NotNegative | None = None
    """Weight decay, >= 0. Default: torch's (0.01 for adamw, else 0)."""
    momentum: BelowOne = 0.0
    """Momentum of sgd and rmsprop, 0 to 1."""
    nesterov: bool = False
    """Nesterov momentum, with sgd."""
    betas: Annotated[tuple[BelowOne, BelowOne], NO_FLAG] = (0.9, 0.999)
    """Decay of the first and second moments, with adam, adamw and nadam."""
    eps: Annotated[Positive, NO_FLAG] = 1e-8
    """Added to the denominator, with adam, adamw, nadam and rmsprop."""
    momentum_decay: Annotated[NotNegative, NO_FLAG] = 4e-3
    """Momentum decay of nadam."""
    smoothing: Annotated[BelowOne, NO_FLAG] = 0.99
    """Decay of the squares, with rmsprop."""
    centered: Annotated[bool, NO_FLAG] = False
    """Subtract the mean, with rmsprop."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._refuse_unused(kind=self.name, uses=_OPTIMIZER_USES)
        if self.nesterov and not self.momentum > 0:
            raise ValueError(f"nesterov needs momentum > 0, got {self.momentum}. Set momentum, such as 0.9.")
        return self

    def fits(self, name: str) -> bool:
        """Whether the update rule of that name has every setting that was given here."""
        ruled = set[str]().union(*_OPTIMIZER_USES.values())
        return (self.model_fields_set & ruled) <= _OPTIMIZER_USES[name]

    @property
    def effective_weight_decay(self) -> float:
        """The weight decay that is applied."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.01 if self.name == "adamw" else 0.0


_SCHEDULE_USES: Final[dict[str, set[str]]] = {
    "constant": set(),
    "step": {"every_steps", "factor"},
    "cosine": {"final_fraction"},
    "plateau": {"factor", "patience", "goal", "public_metric"},
}


@final
class ScheduleSettings(Settings):
    """Optimisation: the learning rate over steps, as a multiple of the optimizer's ``learning_rate``.

    ``plateau`` multiplies by ``factor`` after more than ``patience`` reports in a row without improvement, which reads
    a metric: ``public_metric=True`` declares that it is computed on public data, and the certificate repeats it.
    """

    panel: ClassVar[Panel] = "optimisation"
    kind: Annotated[Literal["constant", "step", "cosine", "plateau"], Flag("--schedule")] = "constant"
    """Learning rate over steps."""
    warmup_steps: Count = 0
    """Steps of linear rise at the start, with any schedule."""
    every_steps: Annotated[AtLeastOne | None, Flag("--schedule-every-steps")] = None
    """Steps between two drops, with --schedule step."""
    factor: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), Flag("--schedule-factor")] = 0.1
    """Factor of a drop, between 0 and 1, with step and plateau."""
    final_fraction: Annotated[Share, Flag("--schedule-final-fraction")] = 0.0
    """Rate at the end over the rate at the start, 0 to 1, with cosine."""
    patience: Annotated[Count, NO_FLAG] = 10
    """Reports without improvement before a drop, with plateau."""
    goal: Annotated[Literal["max", "min"], NO_FLAG] = "min"
    """Whether a larger or a smaller metric is better, with plateau."""
    public_metric: Annotated[bool, NO_FLAG] = False
    """Declares that the metric is computed on public data only, with plateau."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._refuse_unused(kind=self.kind, uses=_SCHEDULE_USES)
        if self.kind == "step" and self.every_steps is None:
            raise ValueError("a step schedule needs every_steps, got none. Say after how many steps the rate drops.")
        if self.kind == "plateau" and not self.public_metric:
            raise ValueError(
                "a plateau schedule looks at a metric, which would leak if it came from private data. Set "
                "public_metric=true to declare that it is computed on public data, or choose cosine."
            )
        return self


_AVERAGING_USES: Final[dict[str, set[str]]] = {"none": set(), "ema": {"decay", "start_step"}, "polyak": {"start_step"}}


@final
class AveragingSettings(Settings):
    """Optimisation: averaged parameters beside the trained ones. Post-processing, so they cost no privacy.

    ``ema`` with De et al.'s warm-up: after update t (counted from ``start_step``) the average keeps the share
    ``min(decay, (1 + t) / (10 + t))`` of itself. ``polyak`` is the plain mean over all updates from ``start_step`` on.
    """

    panel: ClassVar[Panel] = "optimisation"
    kind: Annotated[Literal["none", "ema", "polyak"], Flag("--averaging")] = "none"
    """Average of the parameters over steps that is evaluated and released."""
    decay: Annotated[BelowOne, Flag("--averaging-decay")] = 0.9999
    """Share of itself that the average keeps in a step, 0 to 1, with ema."""
    start_step: Annotated[Count, Flag("--averaging-start-step")] = 0
    """First step that is averaged."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._refuse_unused(kind=self.kind, uses=_AVERAGING_USES, label="averaging ")
        return self


@final
class Performance(Settings):
    """Output and speed: how a step is computed. Nothing here changes a result beyond rounding."""

    microbatch_size: int | None = Field(default=None, ge=1, le=2**20)
    """Units computed at a time: memory and speed only. Default: from --memory-mib."""
    channels_last: Annotated[bool, Flag("--no-channels-last")] = True
    """Don't use the channels-last memory layout, which is faster on a CPU."""
    kernels: Literal["auto", "native", "compiled", "plain"] = "auto"
    """What computes: C++ (native), torch.compile (compiled) or PyTorch (plain); auto: native where available."""
    precision: Precision = "float32"
    """Precision of layers; bfloat16: autocast, for PyTorch's operations. Norms stay in float32, sums in float64."""
    memory_mib: int = Field(default=256, ge=1)
    """Memory that a micro-batch should stay near, in MiB; very small ones may take four times as much."""
    partial_sums: int | None = Field(default=None, ge=1, le=1024)
    """Partial sums of a step, a power of two: what processes share. Default: 8 under torchrun, 1 in one process."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.partial_sums is not None and self.partial_sums & (self.partial_sums - 1):
            raise ValueError(f"partial_sums must be a power of two, got {self.partial_sums}")
        if self.precision != "float32" and self.kernels in ("native", "compiled"):
            raise ValueError(f"precision={self.precision} is for PyTorch's operations: kernels must be auto or plain")
        return self

    def chosen_kernels(self) -> AbstractContextManager[None]:
        """Use native kernels inside the context, unless ``kernels`` excludes them."""
        from dpvision.kernels import switched_off

        return switched_off(when=self.kernels in ("plain", "compiled"))


@final
class RunConfig(Settings):
    """Everything that decides what a run computes, and nothing secret: it is part of the release."""

    # The name becomes the name of a folder.
    name: str = Field(default="run", pattern=r"^[^/\\\x00]{1,200}$")
    """Name of the run. Default: that of the data."""
    task: Annotated[Task, Flag(panel="model")] = "classification"
    """Whether an image has a class, or every pixel of it."""
    loss: Annotated[LossName | str | None, Flag(panel="model")] = None
    """Loss of a row, or FILE.py:FUNCTION of your own; dice and dice_cross_entropy are for segmentation."""
    loss_sha256: Annotated[str | None, NO_FLAG] = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the source of an own loss. Written by the run if left out."""
    data: DataConfig
    model: ModelConfig | None = None
    views: ViewsConfig = ViewsConfig()
    transfer: TransferConfig | None = None
    privacy: PrivacyConfig
    optimizer: OptimizerSettings | None = None
    schedule: ScheduleSettings = ScheduleSettings()
    averaging: AveragingSettings = AveragingSettings()
    pretrained: Annotated[bool, Flag("--no-pretrained", panel="transfer")] = True
    """Don't use the installed pretrained weights where the model is left open."""
    cache_features: Annotated[Literal["memory", "disk", "off"], Flag(panel="transfer")] = "memory"
    """Where the features of a frozen backbone are kept; off: computed in every step."""
    feature_precision: Annotated[Precision, Flag(panel="transfer")] = "float32"
    """Precision of those features; bfloat16 is faster where the processor has it."""
    evaluations: int = Field(default=10, ge=1)
    """Points of the curve on the public test set."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between two checkpoints."""
    baseline: bool = False
    """Train without privacy too, for comparison; see --public-data. Its result is released only for public images."""
    performance: Performance = Performance()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.pretrained and self.transfer is not None:
            raise ValueError("pretrained=false and transfer exclude each other: leave one of them out")
        if self.baseline and not self.privacy.enabled:
            raise ValueError("baseline is for a private run: with --no-privacy the run is itself without privacy")
        if self.loss_sha256 is not None and not is_own(self.loss):
            raise ValueError("loss_sha256 is for an own loss, FILE.py:FUNCTION")
        if self.loss is not None and self.loss not in get_args(LossName) and not is_own(self.loss):
            known = ", ".join(get_args(LossName))
            raise ValueError(f"loss must be one of {known}, or FILE.py:FUNCTION, got {brief(self.loss)!r}")
        findings = self.data.findings is not None
        if self.loss is not None and not is_own(self.loss) and findings != (self.loss == "binary_cross_entropy"):
            raise ValueError("loss must be binary_cross_entropy where images have findings, and only there")
        if findings and self.task == "segmentation":
            raise ValueError("findings are for task=classification, got segmentation")
        if self.task == "segmentation":
            if self.transfer is not None and self.transfer.trained not in ("all", "last"):
                raise ValueError("transfer.trained must be all or last for segmentation: its features are not kept")
            return self
        if self.data.masks is not None or self.data.test_masks is not None or self.data.only_foreground:
            raise ValueError("masks and only_foreground need task=segmentation")
        if self.loss not in (None, "cross_entropy", "binary_cross_entropy") and not is_own(self.loss):
            raise ValueError(f"loss must be cross_entropy for classification, got {self.loss}")
        return self

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of a resolved, private configuration.

        Raises:
            ArgumentError: the run is not private, or a field of the mechanism is still open.
        """
        if not self.privacy.enabled:
            raise ArgumentError("a run without privacy has no mechanism.")
        self._require_resolved(*_MECHANISM_FIELDS)
        return Mechanism(**self.privacy.model_dump(include={*_MECHANISM_FIELDS, *_MECHANISM_CHOICES}))

    @property
    def plan(self) -> Mechanism | OrdinarySampling:
        """What is drawn and how often, with privacy or without."""
        if self.privacy.enabled:
            return self.mechanism
        self._require_resolved("num_units", "expected_batch_size", "steps")
        return OrdinarySampling(**self.privacy.model_dump(include={"num_units", "expected_batch_size", "steps"}))

    def _require_resolved(self, *names: str) -> None:
        still_open = [name for name in names if getattr(self.privacy, name) is None]
        if still_open:
            raise ArgumentError(f"the configuration is not resolved: {', '.join(still_open)} still open.")

    def to_json(self) -> str:
        """Return canonical JSON: equal configurations give equal text."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"

    def digest(self) -> str:
        """Return the SHA-256 of what was configured, without the constants that the run itself released.

        A baseline beside the run does not count: it changes nothing of the private run.
        """
        configured = self.with_normalisation(None, None).model_copy(update={"baseline": False})
        return hashlib.sha256(configured.to_json().encode()).hexdigest()

    def public(self) -> RunConfig:
        """Return what is released of the configuration: names of files and folders without their paths.

        Nothing in it depends on whether a baseline was trained beside the run.
        """
        names = {name: Path(value).name for name in _PATHS if (value := getattr(self.data, name)) is not None}
        update: dict[str, Any] = {"baseline": False, "data": self.data.model_copy(update={**names, "data_dir": None})}
        if self.transfer is not None:
            update["transfer"] = self.transfer.model_copy(update={"weights": Path(self.transfer.weights).name})
        if self.model is not None and is_own(self.model.name):
            update["model"] = self.model.model_copy(update={"name": Path(self.model.name).name})
        if self.loss is not None and is_own(self.loss):
            update["loss"] = Path(self.loss).name
        return self.model_copy(update=update)

    def found_from(self, folders: Sequence[Path | None]) -> RunConfig:
        """Return the same configuration with relative paths of the data as they are in the first folder that has them.

        Args:
            folders: where to look, in this order; None is passed over.

        Returns:
            The configuration for reading the data, not for a digest. What is in none of the folders stays as it is.
        """

        def found(value: str) -> str:
            places = (folder / value for folder in folders if folder is not None)
            return next((str(place) for place in places if place.exists()), value)

        given = {name: getattr(self.data, name) for name in (*_PATHS, "data_dir")}
        moved = {name: found(v) for name, v in given.items() if v is not None and v not in KNOWN_DATASETS}
        return self.model_copy(update={"data": self.data.model_copy(update=moved)})

    @property
    def absent_data(self) -> tuple[str, ...]:
        """Files and folders of the data that are not there."""
        given = (getattr(self.data, name) for name in _PATHS)
        return tuple(each for each in given if each is not None and each not in KNOWN_DATASETS and not _exists(each))

    def with_normalisation(self, mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> RunConfig:
        """Return the same configuration with these pixel constants, one for each channel."""
        return self.model_copy(update={"data": self.data.model_copy(update={"mean": mean, "std": std})})


def _exists(path: str) -> bool:
    """Whether a path names anything; not if it can't be one."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def parse_config(values: dict[str, Any] | str | bytes) -> RunConfig:
    """Read a configuration.

    Args:
        values: nested plain values, or JSON text of at most what fits into memory.

    Returns:
        The validated configuration.

    Raises:
        ArgumentError: one line that names up to ten problems.
    """
    try:
        if isinstance(values, dict):
            problems = list(_undecodable(values))
            if problems:
                raise ArgumentError(" ".join(problems))
            return RunConfig.model_validate(values)
        return RunConfig.model_validate_json(values)
    except ValidationError as error:
        raise ArgumentError(validation_message(error)) from error


def _undecodable(values: Any, key: str = "") -> Iterator[str]:
    """Yield the keys of texts that no file can hold: of paths whose bytes are not UTF-8."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _undecodable(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, str) and not values.isascii() and any("\ud800" <= letter <= "\udfff" for letter in values):
        yield f"{key} must be text in UTF-8, got '{brief(values)}'. Rename the file or folder."


def required(value: T | None, name: str) -> T:
    """Return a setting that must have been filled in by now."""
    if value is None:
        raise ArgumentError(f"the configuration is not resolved: {name} is still open.")
    return value
