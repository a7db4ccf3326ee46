"""Defaults for settings that the user left open.

They are decided from public facts only: declared sizes, never pixels or labels. The number of units is declared,
published, or counted with noise before these rules see it.

Linear heads on frozen features are the default for most data, and their rules are derived. With features of length √D,
batch B, T steps, noise multiplier σ, clip norm C and rate η, logits move by at most τ = η·C·√D·T, and the noise that
all steps together put on one of them is τ/S, where S = B·√T/σ is the *signal* of the plan. The rate follows from τ
(``training_time``): small enough that the noise on a logit is at most κ (``logit_noise``). How strongly features are
decorrelated follows from S too (``whitening_ridge``). The constants were fitted on public datasets
(docs/decisions/0011-defaults-for-own-images.md); docs/evidence/rules-of-thumb.md gives the reason for each rule,
docs/evidence/defaults.md what the rules reach on data that were kept out of the fit.

Networks that the user names, own ones and those of the catalogue, have a rule for any architecture (``network_rate``):
with a clip norm below the length of nearly every gradient, every unit moves the weights equally far, and the rate is
the one at which the noise of all steps together has the same size on each weight, whatever the plan is
(docs/decisions/0018-defaults-for-own-models.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from dpvision.accounting import propose_delta, steps_for_epochs
from dpvision.config import LARGEST, AveragingSettings, ModelConfig, OptimizerSettings, PrivacyConfig, RunConfig
from dpvision.errors import ArgumentError
from dpvision.models import catalogue, efficientnet, entry, scattering
from dpvision.own_code import is_own

SMALL_MODELS = frozenset({"shoefit_cnn", "linear", "scatter_linear"})
DEFAULT_IMAGE_SIZE = 32
DEFAULT_MASK_SIZE = 128
PRETRAINED_IMAGE_SIZE = 224
MASK_WIDTH, MASK_PASSES = 8, 10
MOST_PROPOSED_STEPS = 10_000
HEAD_STEPS = 60
"""Steps of a linear head. Every unit is in every step, so the noise on the weights does not depend on their number."""
HEAD_POOL, MOST_REGIONS, FULL_RESOLUTION = 4, 8, 10_000.0
"""Regions along a side, weak signal and strong; from which signal on it is strong."""
HEAD_CLIP, OFFSET_CLIP = 0.1, 0.5
"""Clip norm over √D. A gradient is about 0.7·√D long at the start: with a seventh of that every unit counts the same
until it is clearly on its side, which takes less noise for the same growth of a logit, and rare classes count more."""
LOGIT_NOISE, NOISE_PER_FURTHER_CLASS, MOST_LOGIT_NOISE = 0.7, 0.069, 1.25
NOISE_OF_TWO_CLASSES, MOST_NOISE_OF_TWO_CLASSES = 0.6, 1.2
SHIFTED_SIGNAL = 420.0
"""Two classes without pretrained weights: of a signal, so much goes without longer training. It is less than what suits
test images like the training images; see decision 0011 on shifts."""
TIME_PER_CLASS, TIME_OF_TWO_CLASSES, PRETRAINED_TIME_PER_CLASS = 20.0, 150.0, 8.0
"""Least rate times steps, in units of one clipped gradient on a row of length one: below, unequal classes decide."""
OFFSET_SIGNAL, MOST_OFFSET, LAST_OFFSET_SIGNAL = 200.0, 1.73, 2000.0
"""Two classes on pretrained features: a constant feature in training, over √D: √(signal / 200), at most √3. It learns
how frequent the classes are, so that a short training learns what differs between them. It takes its part of a
clipped gradient, which a weak signal lacks; a signal above 2,000 learns both without it. See decision 0011."""
OFFSET_NOISE, OFFSET_TIME = 0.15, 80.0
"""κ with such a feature, and the most rate times steps: enough, and longer training has no gain."""
WAVELET_OFFSET, FIRST_OFFSET_SIGNAL, LAST_WAVELET_SIGNAL = 0.55, 280.0, 1500.0
"""Two classes on wavelet features: the constant feature, and the signals that have it. A weaker signal learns too
little beside it; a stronger one learns long enough without. See decision 0011."""
WAVELET_OFFSET_NOISE, WAVELET_OFFSET_TIME = 0.57, 300.0
"""κ and the most rate times steps of these."""
RIDGE_AT, LEAST_RIDGE, MOST_RIDGE = 1000.0, 0.3, 10.0
PUBLIC_TIME = 60.0
"""Rate times steps for each class, over the squared length of a row, without privacy."""
OTHER_HEAD_CLIP, OTHER_HEAD_RATE = 0.1, 4.0
NETWORK_CLIP = 0.1
"""Clip norm of a network. Gradients of the fit's networks are 5 to 33 long at the start: all are clipped, so that
neither the architecture's scale nor the share of rows that it has learned changes what a step can move."""
WEIGHT_NOISE = 0.1
"""Standard deviation of the noise on a weight after all steps of a network's training, see ``network_rate``."""
FEWEST_STEPS, FEWEST_NETWORK_STEPS = 50, 80
"""With so few units that 50 steps would be 40 passes or less, curved losses gain from more and shorter steps."""
RESIDUAL_UNITS = 10_000
"""From this number of units on, residual networks of the catalogue keep NAdam, clip norm 1.5 and a rate of 0.001, with
which they were tuned on whole datasets."""
PRETRAINED_FEATURES = {"efficientnet_lite0": 1280}
USUAL_RATES = {"sgd": 1.0, "nadam": 1e-3, "adam": 1e-3, "adamw": 1e-3, "rmsprop": 1e-3}
"""Rates of update rules that are not the default's, where none is given."""
USUAL_EPSILON = 8.0
"""Stands for the target where only a noise multiplier is given."""
_PATHS = 81


@final
@dataclass(frozen=True, kw_only=True)
class Facts:
    """Public facts about the training data.

    Attributes:
        num_units: size of a published dataset; used only where no number is declared or counted.
        num_classes: declared public.
        image_shape: (channels, height, width), declared public.
        pretrained: whether a head is trained on the features of installed pretrained weights (1280 of them).
    """

    num_units: int
    num_classes: int
    image_shape: tuple[int, int, int]
    pretrained: bool = False


@final
@dataclass(frozen=True)
class Choice:
    """One open setting, the value chosen for it, and the reason."""

    setting: str
    value: str
    reason: str


def fill_open_settings(config: RunConfig, facts: Facts) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Fill in every open setting but the noise multiplier. What is given stays, and changes nothing else.

    Args:
        config: the configuration, with units named and counted.
        facts: public facts about the data.

    Returns:
        The filled configuration, and what was chosen.

    Raises:
        ArgumentError: the model does not suit the task.
    """
    choices: list[Choice] = []
    privacy = config.privacy
    updates: dict[str, object] = {}

    def choose(setting: str, value: object, reason: str) -> None:
        updates[setting] = value
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        choices.append(Choice(setting, shown, reason))

    num_units = units_for_defaults(privacy, facts)
    if privacy.num_units is None:
        choose("num_units", num_units, "the size of a published dataset, or of one without privacy, to two digits")
    if privacy.delta is None and privacy.enabled:
        # A number that was counted with noise may be far too small: delta goes by how many there could be.
        most = num_units + math.ceil(3 * (privacy.count_noise_multiplier or 0.0))
        choose("delta", propose_delta(most), "a power of ten clearly below 1 / num_units")
    delta = privacy.delta or propose_delta(num_units)
    masks = config.task == "segmentation"
    budget = full_signal(num_units, epsilon=privacy.target_epsilon or USUAL_EPSILON, delta=delta)
    model = config.model or (propose_mask_model() if masks else propose_model(facts, signal=budget))
    require_fitting_model(model, masks=masks)
    model = fit_model(model, facts)
    head = head_features(model, facts, config)
    if config.model is None and head is not None:
        model, chosen = _with_offset(model, config, facts)
        choices.extend(chosen)
    offset = float(model.options.get("offset", 0.0))
    small = head is not None or model.name in SMALL_MODELS
    # A head on features whose length is not known: a small clip norm and a large rate.
    other_head = head is None and config.transfer is not None and config.transfer.trained == "head"
    # Weights that were trained before keep their usual small steps: noise of 0.1 on each would undo them.
    from_scratch = head is None and config.transfer is None and not masks
    network = from_scratch and has_network_rule(model.name, num_units, privacy)
    batch = privacy.expected_batch_size
    if batch is None and head is not None:
        batch = float(num_units)
        choose("expected_batch_size", batch, "every unit in every step: the least noise for a linear head")
    elif batch is None:
        batch = float(propose_mask_batch(num_units) if masks else propose_batch(num_units, small=small))
        choose("expected_batch_size", batch, "large batches win at a fixed epsilon")
    steps = privacy.steps
    if steps is None and privacy.epochs is not None:
        steps = min(
            steps_for_epochs(privacy.epochs, num_units=num_units, expected_batch_size=batch), _most_steps(config)
        )
        updates["epochs"] = None
        choose("steps", steps, f"{privacy.epochs:g} passes over {num_units} units")
    elif steps is None:
        passes = MASK_PASSES if masks else 40
        epsilon = privacy.target_epsilon or USUAL_EPSILON
        fewest = FEWEST_NETWORK_STEPS if network else FEWEST_STEPS
        steps = HEAD_STEPS
        if head is None:
            steps = propose_steps(num_units, batch, epsilon, passes=passes, fewest=fewest)
        choose("steps", steps, f"{steps * batch / num_units:.0f} passes")
    clip_norm = privacy.clip_norm
    if clip_norm is None and privacy.enabled:
        usual_clip = OTHER_HEAD_CLIP if other_head else 1.0 if masks else 0.5 if small else 1.5
        clip_norm = usual_clip
        own = is_own(model.name)
        reason = "usual; not tuned for your model" if own else "the value that works for this family of models"
        if head is not None:
            clip_norm = head_clip_norm(head, pretrained=config.transfer is not None, offset=offset)
            reason = f"follows from the length of a gradient on {head} features"
        if network:
            clip_norm, reason = NETWORK_CLIP, "shorter than nearly every gradient: every unit counts the same"
        choose("clip_norm", clip_norm, reason)
    if config.model is None:
        reason = "enough units" if not (small or masks) else "few parameters suit few units"
        text = model.name + "".join(
            f", {name} {value}" for name, value in model.options.items() if name not in ("image_size", "offset")
        )
        choices.insert(0, Choice("model", text, reason))
    plan = HeadPlan(
        features=head or 1,
        classes=facts.num_classes,
        batch=batch,
        steps=steps,
        clip_norm=clip_norm or 1.0,
        delta=delta,
        pretrained=config.transfer is not None,
        offset=offset,
    )
    proposed = propose_optimizer(model.name) if head is None else _head_optimizer(config, plan, num_units)
    if other_head:
        rate = OTHER_HEAD_RATE * (1.0 if privacy.enabled else OTHER_HEAD_CLIP)
        proposed = OptimizerSettings(name="sgd", learning_rate=rate, momentum=0.9)
    elif network:
        proposed = _network_optimizer(privacy, plan, num_units)
    optimizer = merge_optimizer(config.optimizer, proposed)
    if optimizer != config.optimizer:
        text = f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, momentum {optimizer.momentum:g}"
        reason = "usual; not tuned for your model" if is_own(model.name) else "tuned for this family on public data"
        if head is not None:
            reason = "from the plan: bounds the noise on logits"
        elif network and optimizer.learning_rate == proposed.learning_rate:
            reason = f"from the plan: the noise of all steps on a weight is {WEIGHT_NOISE:g}, whatever the network"
        choices.append(Choice("optimizer", text, reason))
    loss = config.loss or ("dice_cross_entropy" if masks else "cross_entropy")
    if config.loss is None and masks:
        choices.append(Choice("loss", loss, "Dice sees small organs, cross-entropy has a gradient everywhere"))
    averaging = merge_averaging(config.averaging, head=head is not None)
    if averaging != config.averaging:
        text = averaging.kind + (f", decay {averaging.decay:g}" if averaging.kind == "ema" else "")
        choices.append(Choice("averaging", text, "averages noise away and costs no epsilon"))
    filled = config.model_copy(
        update={
            "privacy": privacy.model_copy(update=updates),
            "model": model,
            "optimizer": optimizer,
            "averaging": averaging,
            "loss": loss,
        }
    )
    return filled, tuple(choices)


# ---- Overrides: what is given stays, the rest is the default's


def merge_optimizer(given: OptimizerSettings | None, proposed: OptimizerSettings) -> OptimizerSettings:
    """Join given settings with the default's: a rate alone changes the rate alone.

    A rule other than the default's brings torch's own defaults and its usual rate. So does a setting that the default's
    rule does not have, such as a momentum for nadam: it means a rule that has it. Nothing is refused here, because
    which rule is the default may depend on a noisy count.
    """
    if given is None:
        return proposed
    fields = {name: getattr(given, name) for name in given.model_fields_set if getattr(given, name) is not None}
    name = fields.get("name", proposed.name)
    if "name" not in fields and not given.fits(name):
        name = next(each for each in USUAL_RATES if given.fits(each))
    base = proposed.model_dump(exclude_unset=True) if name == proposed.name else {"learning_rate": USUAL_RATES[name]}
    return OptimizerSettings.model_validate({**base, **fields, "name": name})


def merge_averaging(given: AveragingSettings, *, head: bool) -> AveragingSettings:
    """Return the given average, or the default's: none for a linear head, whose weights forget nothing."""
    if given.model_fields_set or head:
        return given
    return AveragingSettings(kind="ema", decay=0.95)


def _most_steps(config: RunConfig) -> int:
    """A limit where units are counted: what a plan may cost must have known limits whatever the count is."""
    return MOST_PROPOSED_STEPS if config.privacy.count_noise_multiplier is not None else 10**9


# ---- Linear heads


@final
@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """What the rate of a linear head or of a network follows from; ``features`` and ``offset`` are a head's alone."""

    features: int
    classes: int
    batch: float
    steps: int
    clip_norm: float
    delta: float
    pretrained: bool = False
    offset: float = 0.0


def full_signal(num_units: int, *, epsilon: float, delta: float) -> float:
    """The signal of a plan in which every unit is in every step: units over the noise of one release at the target.

    Both directions of adding and removing a unit give the same value for a Gaussian release, so this is num_units · μ
    for the μ-Gaussian-DP curve through (epsilon, delta). An approximation of what the accountant allows, from public
    numbers; it decides defaults, and no guarantee.
    """
    return num_units * gaussian_mu(epsilon, delta)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The μ of Gaussian DP that has this epsilon at this delta, by bisection (Dong, Roth and Su 2022, cor. 2.13)."""
    low, high = 0.0, 1.0

    def spent(mu: float) -> float:
        first = math.erfc((epsilon / mu - mu / 2) / math.sqrt(2)) / 2
        tail = math.erfc((epsilon / mu + mu / 2) / math.sqrt(2)) / 2
        return first - (math.exp(epsilon + math.log(tail)) if tail > 0 else 0.0)

    while high < 1e6 and spent(high) < delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) < delta else (low, middle)
    return low or 1e-6


def plan_signal(num_units: int, *, batch: float, steps: int, noise_multiplier: float) -> float:
    """The signal of a plan: ``batch · √steps / noise_multiplier``, at most what the whole data give.

    One unit's clipped gradients over all steps, times the number of units, over the noise of the sum of all steps.
    """
    return min(batch, float(num_units)) * math.sqrt(steps) / noise_multiplier


def estimated_noise(num_units: int, *, batch: float, steps: int, mu: float) -> float:
    """The noise multiplier that spends μ-Gaussian DP in a plan, by the central limit theorem (Bu et al. 2020)."""
    rate = min(1.0, batch / num_units)
    if rate >= 1:
        return math.sqrt(steps) / mu
    return 1 / math.sqrt(math.log1p(mu**2 / (rate**2 * steps)))


def logit_noise(classes: int, *, pretrained: bool = False, offset: float = 0.0) -> float:
    """κ: the noise on a logit that a plan may spend, for a strong signal.

    A class has a K-th of the units, so that its logit needs a larger rate to grow as large, and more classes need
    finer differences; above 1.25 the noise itself decides between classes. A model of two classes has a threshold,
    which longer training fits to the training images: it is trained for less, because a shift in new images moves it.
    """
    if offset:
        return OFFSET_NOISE if pretrained else WAVELET_OFFSET_NOISE
    if classes <= 2 and not pretrained:
        return NOISE_OF_TWO_CLASSES
    return min(LOGIT_NOISE + NOISE_PER_FURTHER_CLASS * max(0, classes - 2), MOST_LOGIT_NOISE)


def training_time(classes: int, *, signal: float, pretrained: bool = False, offset: float = 0.0) -> float:
    """τ: rate times steps, in units of one clipped gradient on a row of length one.

    What ``logit_noise`` allows, and at least so much that the mean of all images, which says nothing about classes, has
    been learned. Pretrained features separate classes sooner. With an ``offset`` nothing has to be learned first, and
    where the signal is weak, a short training keeps to the more frequent class instead of to noise.
    """
    if offset:
        time = logit_noise(classes, pretrained=pretrained, offset=offset) * signal
        return min(time, OFFSET_TIME) if pretrained else min(max(TIME_OF_TWO_CLASSES, time), WAVELET_OFFSET_TIME)
    least = max(2, classes) * (PRETRAINED_TIME_PER_CLASS if pretrained else TIME_PER_CLASS)
    most, kept_back = MOST_LOGIT_NOISE, 0.0
    if classes <= 2 and not pretrained:
        least, most, kept_back = TIME_OF_TWO_CLASSES, MOST_NOISE_OF_TWO_CLASSES, SHIFTED_SIGNAL
    noise = logit_noise(classes, pretrained=pretrained)
    return min(max(least, noise * (signal - kept_back)), most * signal)


def whitening_ridge(signal: float) -> float:
    """How strongly paths are decorrelated: fully where the signal is strong, hardly where rare paths are noise."""
    return float(f"{min(MOST_RIDGE, max(LEAST_RIDGE, RIDGE_AT / signal)):.2g}")


def head_features(model: ModelConfig, facts: Facts, config: RunConfig) -> int | None:
    """The number of features under a linear head whose backbone is frozen; None for every other model."""
    channels, height, width = facts.image_shape
    if config.transfer is not None:
        return PRETRAINED_FEATURES.get(model.name) if config.transfer.trained == "head" else None
    if model.name == "scatter_linear" and not model.options.get("fine"):
        pool = model.options.get("pool") if model.options.get("standardise") == "whitened" else None
        regions = int(pool) ** 2 if pool else (height // 4) * (width // 4)
        return channels * _PATHS * regions
    return None


def head_clip_norm(features: int, *, pretrained: bool = False, offset: float = 0.0) -> float:
    """The clip norm of a linear head on rows of length √features, to two digits."""
    share = OFFSET_CLIP if offset and pretrained else HEAD_CLIP
    return float(f"{share * math.sqrt(features):.2g}")


def head_offset(classes: int, *, signal: float, pretrained: bool) -> float:
    """The constant feature of a private head of two classes in training, over √D, to two digits; 0 for none."""
    if classes != 2:
        return 0.0
    if not pretrained:
        return WAVELET_OFFSET if FIRST_OFFSET_SIGNAL <= signal <= LAST_WAVELET_SIGNAL else 0.0
    if signal > LAST_OFFSET_SIGNAL:
        return 0.0
    return float(f"{min(MOST_OFFSET, math.sqrt(signal / OFFSET_SIGNAL)):.2g}")


def add_offset(config: RunConfig, facts: Facts) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Give the private head of two classes on pretrained features its constant feature, see ``head_offset``.

    Args:
        config: with a model that the defaults chose, and units counted.
        facts: public facts about the data.

    Returns:
        The configuration and the choice.
    """
    model = config.model
    if model is None or config.transfer is None or head_features(model, facts, config) is None:
        return config, ()
    model, chosen = _with_offset(model, config, facts)
    return config.model_copy(update={"model": model}), chosen


def _with_offset(model: ModelConfig, config: RunConfig, facts: Facts) -> tuple[ModelConfig, tuple[Choice, ...]]:
    """The model with the ``head_offset`` of its plan; without, for another loss and where the run is not private."""
    privacy, pretrained = config.privacy, config.transfer is not None
    scores = config.task == "classification" and config.data.findings is None
    if not (privacy.enabled and scores and config.loss in (None, "cross_entropy")):
        return model, ()
    num_units = units_for_defaults(privacy, facts)
    delta = privacy.delta or propose_delta(num_units)
    signal = full_signal(num_units, epsilon=privacy.target_epsilon or USUAL_EPSILON, delta=delta)
    offset = head_offset(facts.num_classes, signal=signal, pretrained=pretrained)
    if not offset:
        return model, ()
    kept = efficientnet.KEPT_OFFSET if pretrained else scattering.KEPT_OFFSET
    reason = f"a constant feature learns how frequent the two classes are; predictions keep {kept:g} of it"
    model = model.model_copy(update={"options": {**model.options, "offset": offset}})
    return model, (Choice("offset", f"{offset:g}", reason),)


def head_rate(plan: HeadPlan, *, signal: float) -> float:
    """The rate of a linear head: ``training_time`` / (C·√D·T), to two digits."""
    time = training_time(plan.classes, signal=signal, pretrained=plan.pretrained, offset=plan.offset)
    return float(f"{time / (plan.clip_norm * math.sqrt(plan.features) * plan.steps):.2g}")


def _head_optimizer(config: RunConfig, plan: HeadPlan, num_units: int) -> OptimizerSettings:
    """Plain SGD: neither momentum nor averages change what noise does to a linear head."""
    privacy = config.privacy
    if not privacy.enabled:
        rate = float(f"{PUBLIC_TIME * plan.classes / (plan.steps * plan.features):.2g}")
        return OptimizerSettings(name="sgd", learning_rate=rate, momentum=0.0)
    return _plain_sgd(head_rate(plan, signal=_signal_of(privacy, plan, num_units)))


def _plain_sgd(rate: float) -> OptimizerSettings:
    """SGD without momentum, at a rate that a configuration can hold."""
    return OptimizerSettings(name="sgd", learning_rate=min(LARGEST, max(1e-6, rate)), momentum=0.0)


def _signal_of(privacy: PrivacyConfig, plan: HeadPlan, num_units: int) -> float:
    """The signal of a plan whose noise may still be open."""
    noise = privacy.noise_multiplier
    if noise is None:
        mu = gaussian_mu(privacy.target_epsilon or USUAL_EPSILON, plan.delta)
        noise = estimated_noise(num_units, batch=plan.batch, steps=plan.steps, mu=mu)
    return plan_signal(num_units, batch=plan.batch, steps=plan.steps, noise_multiplier=noise)


# ---- Networks of any architecture


def has_network_rule(model: str, num_units: int, privacy: PrivacyConfig) -> bool:
    """Whether a network is trained by ``network_rate``.

    In private runs: every own model, the small networks of the catalogue, and its other networks on few units. Not
    those on wavelet features, which are scaled otherwise.
    """
    if not privacy.enabled or model.startswith("scatter"):
        return False
    return is_own(model) or model in SMALL_MODELS or num_units < RESIDUAL_UNITS


def network_rate(*, signal: float, clip_norm: float, steps: int) -> float:
    """The rate of a network's training: ``WEIGHT_NOISE · signal / (C·T)``, to two digits.

    With plain SGD, the noise of all steps on one weight has the standard deviation η·C·σ·√T/B = η·C·T/S. Where every
    gradient is clipped, the weights move by at most η·C·T = ``WEIGHT_NOISE`` · S. So the number of parameters and the
    length of a gradient do not enter; what suits one architecture is close to what suits another.
    """
    return float(f"{WEIGHT_NOISE * signal / (clip_norm * steps):.2g}")


def _network_optimizer(privacy: PrivacyConfig, plan: HeadPlan, num_units: int) -> OptimizerSettings:
    """Plain SGD: under noise, Adam's steps are those of SGD with another rate, and momentum changed nothing."""
    signal = _signal_of(privacy, plan, num_units)
    return _plain_sgd(network_rate(signal=signal, clip_norm=plan.clip_norm, steps=plan.steps))


def units_for_defaults(privacy: PrivacyConfig, facts: Facts) -> int:
    """The declared or counted number of units, or the size of a published dataset to two digits."""
    return privacy.num_units or two_digits(facts.num_units)


def two_digits(count: int) -> int:
    """Round to two significant digits."""
    power = 10 ** max(0, len(str(count)) - 2)
    return max(1, round(count / power) * power)


def propose_model(facts: Facts, *, signal: float) -> ModelConfig:
    """A linear layer on fixed wavelet features, as strongly decorrelated as the signal allows; else a tanh CNN."""
    _, height, width = facts.image_shape
    if height % 4 == 0 and width % 4 == 0 and min(height, width) >= 8:
        positions = min(height, width) // 4
        strong = MOST_REGIONS if positions > MOST_REGIONS else 0
        pool = strong if signal >= FULL_RESOLUTION else min(HEAD_POOL, positions)
        options = {"standardise": "whitened", "pool": pool, "ridge": whitening_ridge(signal)}
        return ModelConfig(name="scatter_linear", options=options)
    return ModelConfig(name="shoefit_cnn", options={"activation": "tanh"})


def propose_mask_model() -> ModelConfig:
    """A narrow ScaleLinkNet-9 with a convolutional head: the cheapest of the family, and no worse."""
    return ModelConfig(name="scalelinknet9", options={"width": MASK_WIDTH, "head": "conv"})


def require_fitting_model(model: ModelConfig, *, masks: bool) -> None:
    """Refuse a model that does not suit the task: segmentation needs one map per class, classification one score.

    The outputs of an own model show it, once they are computed.
    """
    if not is_own(model.name) and (entry(model.name).family == "segmentation") != masks:
        fitting = [found.name for found in catalogue() if (found.family == "segmentation") == masks]
        task = "segmentation" if masks else "classification"
        raise ArgumentError(f"model must be one for {task}, got {model.name}. There are: {', '.join(fitting)}.")


def fit_model(model: ModelConfig, facts: Facts) -> ModelConfig:
    """Set the input size of models that need one."""
    if not is_own(model.name) and "image_size" in entry(model.name).options and "image_size" not in model.options:
        _, height, width = facts.image_shape
        size = height if height == width else f"{height}x{width}"
        return model.model_copy(update={"options": {**model.options, "image_size": size}})
    return model


def propose_batch(num_units: int, *, small: bool) -> int:
    """A tenth of the data and at least 512 for small models; 1024 to 4096 for large ones. Never above half."""
    wanted = max(512, num_units // 10) if small else min(4096, max(1024, num_units // 24))
    return max(1, min(wanted, num_units // 2))


def propose_mask_batch(num_units: int) -> int:
    """A quarter of the units, at most 512: images with masks are few and large."""
    return max(1, min(512, num_units // 4))


def propose_steps(
    num_units: int, batch: float, target_epsilon: float, *, passes: int = 40, fewest: int = FEWEST_STEPS
) -> int:
    """``passes`` passes at epsilon 3, fewer below, more above; ``fewest`` to 2000 steps."""
    scaled = passes * min(2.0, max(0.25, (target_epsilon / 3) ** 0.5))
    return max(fewest, min(2000, round(scaled * num_units / batch)))


def propose_optimizer(model: str) -> OptimizerSettings:
    """What is not from the plan: runs without privacy, masks, other heads and residual networks on many units."""
    if not is_own(model) and entry(model).family == "segmentation":
        return OptimizerSettings(name="nadam", learning_rate=2e-3)
    if model.startswith("scatter"):
        return OptimizerSettings(name="sgd", learning_rate=0.5, momentum=0.7)
    if model in SMALL_MODELS:
        return OptimizerSettings(name="sgd", learning_rate=4.0, momentum=0.7)
    return OptimizerSettings(name="nadam", learning_rate=1e-3)
