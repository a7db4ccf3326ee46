"""Defaults: what is chosen when the user leaves things open, and that what is given changes nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dpvision.accounting import calibrate_noise_multiplier, propose_delta
from dpvision.config import RunConfig, parse_config
from dpvision.models import OffsetLinear, create
from dpvision.training.defaults import (
    FEWEST_NETWORK_STEPS,
    HEAD_STEPS,
    MOST_LOGIT_NOISE,
    MOST_NOISE_OF_TWO_CLASSES,
    NETWORK_CLIP,
    RESIDUAL_UNITS,
    WEIGHT_NOISE,
    Facts,
    estimated_noise,
    fill_open_settings,
    full_signal,
    gaussian_mu,
    head_clip_norm,
    head_offset,
    logit_noise,
    training_time,
    two_digits,
    whitening_ridge,
)


def asked(*, optimizer: Any = None, model: Any = None, averaging: Any = None, **privacy: Any) -> RunConfig:
    sections = {"optimizer": optimizer, "model": model, "averaging": averaging}
    given = {name: value for name, value in sections.items() if value is not None}
    return parse_config({"data": {"source": "scans"}, "privacy": {"target_epsilon": 3.0, **privacy}, **given})


def facts(num_units: int, shape: tuple[int, int, int] = (3, 32, 32), num_classes: int = 10) -> Facts:
    return Facts(num_units=num_units, num_classes=num_classes, image_shape=shape)


def filled(config: RunConfig, known: Facts) -> RunConfig:
    return fill_open_settings(config, known)[0]


@pytest.mark.parametrize(
    ("num_units", "shape", "model"),
    [
        (300, (3, 32, 32), "scatter_linear"),
        (1500, (3, 33, 33), "shoefit_cnn"),
        (60_000, (1, 28, 28), "scatter_linear"),
        (50_000, (3, 32, 32), "scatter_linear"),
    ],
)
def test_the_model_follows_the_shape(num_units: int, shape: Any, model: str) -> None:
    config, choices = fill_open_settings(asked(), facts(num_units, shape))
    assert config.model is not None
    assert config.model.name == model
    assert choices[0].setting == "model"


@pytest.mark.parametrize("num_units", [3, 40, 1437, 20_000, 60_000, 1_300_000])
@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_nothing_but_the_noise_stays_open_and_the_rate_is_a_rate(num_units: int, num_classes: int) -> None:
    config, choices = fill_open_settings(asked(), facts(num_units, num_classes=num_classes))
    privacy = config.privacy
    assert privacy.num_units is not None
    assert privacy.expected_batch_size is not None
    assert 0 < privacy.expected_batch_size <= privacy.num_units
    assert privacy.delta is not None
    assert privacy.delta < 1 / privacy.num_units
    assert privacy.steps == HEAD_STEPS
    assert privacy.noise_multiplier is None
    assert config.optimizer is not None
    assert config.optimizer.learning_rate is not None
    assert {"num_units", "delta", "steps", "clip_norm", "optimizer"} <= {choice.setting for choice in choices}
    parse_config(config.model_dump())


def test_what_the_user_gave_is_kept() -> None:
    given = asked(delta=1e-6, num_units=999, expected_batch_size=10.0, steps=7, clip_norm=0.9)
    config, choices = fill_open_settings(given, facts(1500))
    assert config.privacy == given.privacy
    assert not {"delta", "num_units", "steps", "clip_norm"} & {choice.setting for choice in choices}


@pytest.mark.parametrize(
    ("count", "rounded"), [(1, 1), (99, 99), (1437, 1400), (1438, 1400), (60_000, 60_000), (996, 1000)]
)
def test_a_number_read_off_the_data_is_rounded_to_two_digits(count: int, rounded: int) -> None:
    assert two_digits(count) == rounded


# ---- The rules of linear heads


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (1, 1e-4), (3, 1e-4), (8, 1e-6), (50, 1e-3)])
def test_the_signal_is_what_the_accountant_allows_for_one_release(epsilon: float, delta: float) -> None:
    noise = calibrate_noise_multiplier(
        num_units=100, expected_batch_size=100, steps=1, target_epsilon=epsilon, delta=delta, refuse_little_noise=False
    )
    assert gaussian_mu(epsilon, delta) == pytest.approx(1 / noise, rel=2e-3)


@pytest.mark.parametrize("batch", [200, 1000])
def test_the_noise_of_a_plan_is_estimated_well_enough_for_a_rate(batch: float) -> None:
    delta = propose_delta(1000)
    noise = calibrate_noise_multiplier(
        num_units=1000, expected_batch_size=batch, steps=60, target_epsilon=3.0, delta=delta
    )
    estimate = estimated_noise(1000, batch=batch, steps=60, mu=gaussian_mu(3.0, delta))
    assert estimate == pytest.approx(noise, rel=0.15)  # a rate two digits long, on a plateau that is twice as wide


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("num_units", [50, 300, 1000, 10_000, 100_000])
@pytest.mark.parametrize("num_classes", [2, 10, 100])
def test_the_noise_on_a_logit_stays_below_its_bound(epsilon: float, num_units: int, num_classes: int) -> None:
    known = facts(num_units, num_classes=num_classes)
    config = filled(asked(target_epsilon=epsilon, num_units=num_units), known)
    assert config.optimizer is not None
    assert config.model is not None
    privacy, rate = config.privacy, config.optimizer.learning_rate
    assert rate is not None
    assert privacy.delta is not None
    assert privacy.clip_norm is not None
    assert privacy.steps is not None
    width = math.sqrt(3 * 81 * (int(config.model.options["pool"]) or 8) ** 2)
    signal = full_signal(num_units, epsilon=epsilon, delta=privacy.delta)
    most = MOST_NOISE_OF_TWO_CLASSES if num_classes == 2 else MOST_LOGIT_NOISE
    assert rate * privacy.clip_norm * width * privacy.steps / signal <= most * 1.06  # two digits of a rate


def test_rate_times_steps_rises_with_the_signal_and_with_the_classes() -> None:
    signals = [10.0, 100.0, 1000.0, 10_000.0]
    for classes in (2, 6, 10, 20):
        times = [training_time(classes, signal=signal) for signal in signals]
        assert times == sorted(times)
    assert [logit_noise(classes) for classes in (3, 6, 10)] == sorted(logit_noise(n) for n in (10, 6, 3))
    ridges = [whitening_ridge(signal) for signal in signals]
    assert ridges == sorted(ridges, reverse=True)


def test_two_classes_are_trained_longer_than_their_frequencies_take_to_learn() -> None:
    # With their small clip norm: below 80 the more frequent class decided in the fit, above 160 a shift in new images.
    assert [training_time(2, signal=signal) for signal in (130.0, 289.0, 625.0)] == [150.0, 150.0, 150.0]
    # Beyond: classes of unequal frequency need more (cats and dogs 70:30, 2,000 images).
    assert training_time(2, signal=1635.0) == pytest.approx(729.0)
    assert training_time(2, signal=670.0) == pytest.approx(150.0)
    assert training_time(2, signal=20.0) == pytest.approx(MOST_NOISE_OF_TWO_CLASSES * 20)


def test_pretrained_features_of_more_than_two_classes_have_the_noise_of_other_features() -> None:
    assert all(logit_noise(classes, pretrained=True) == logit_noise(classes) for classes in (3, 10, 20))
    assert not any(head_offset(classes, signal=1000.0, pretrained=True) for classes in (1, 3, 10))


def test_two_classes_on_pretrained_features_have_an_offset_and_a_time_that_follow_the_signal() -> None:
    offsets = [head_offset(2, signal=signal, pretrained=True) for signal in (50.0, 200.0, 450.0, 654.0, 2001.0)]
    assert offsets == [0.5, 1.0, 1.5, 1.7, 0.0]
    # 800 chest X-rays at epsilon 3; without the offset a model of two classes is trained as one of three.
    assert training_time(2, signal=654.0, pretrained=True, offset=1.7) == 80.0
    assert training_time(2, signal=654.0, pretrained=True) == pytest.approx(0.7 * 654)
    # A weak signal: little is learned, and the more frequent class is predicted rather than noise.
    assert training_time(2, signal=20.0, pretrained=True, offset=0.3) == pytest.approx(3.0)


def test_two_classes_on_wavelet_features_have_an_offset_where_the_signal_is_neither_weak_nor_strong() -> None:
    offsets = [head_offset(2, signal=signal, pretrained=False) for signal in (279.0, 280.0, 654.0, 1500.0, 1501.0)]
    assert offsets == [0.0, 0.55, 0.55, 0.55, 0.0]
    assert head_offset(3, signal=654.0, pretrained=False) == 0
    times = [training_time(2, signal=signal, offset=0.55) for signal in (200.0, 280.0, 400.0, 654.0, 1500.0)]
    assert times == pytest.approx([150.0, 159.6, 228.0, 300.0, 300.0])
    assert head_clip_norm(1600, offset=0.55) == head_clip_norm(1600) == 4.0
    assert head_clip_norm(1600, pretrained=True, offset=0.55) == 20.0


def test_the_default_model_of_two_classes_has_the_offset_and_keeps_a_share_of_it() -> None:
    private = filled(asked(num_units=800, target_epsilon=3.0), facts(800, num_classes=2))
    assert private.model is not None
    assert private.model.options["offset"] == 0.55
    name, options = private.model.name, private.model.options
    *_, head = create(name, num_classes=2, **options).children()
    assert isinstance(head, OffsetLinear)
    assert head.kept == 0.3
    assert head.length == pytest.approx(0.55 * head.in_features**0.5)
    # Not at a weak signal, for more classes, or for another loss; nor in a model that the user names.
    for config, found in (
        (asked(num_units=60, target_epsilon=1.0), facts(60, num_classes=2)),
        (asked(num_units=800, target_epsilon=3.0), facts(800, num_classes=3)),
        (asked(num_units=800).model_copy(update={"loss": "own:loss"}), facts(800, num_classes=2)),
        (
            asked(num_units=800, model={"name": "scatter_linear", "options": {"standardise": "whitened"}}),
            facts(800, num_classes=2),
        ),
    ):
        model = filled(config, found).model
        assert model is not None
        assert "offset" not in model.options


def test_logit_noise_of_three_and_more_classes_rises_evenly_up_to_its_limit() -> None:
    assert [round(logit_noise(classes), 2) for classes in (3, 4, 6, 10, 20)] == [
        0.77,
        0.84,
        0.98,
        MOST_LOGIT_NOISE,
        MOST_LOGIT_NOISE,
    ]


def test_the_defaults_are_the_same_whatever_the_rows_are() -> None:
    # Facts hold no labels, pixels or class counts; with a declared number, not even the number of rows enters.
    one, other = (filled(asked(num_units=1000), facts(rows)) for rows in (999, 1001))
    assert one == other


# ---- The rule of networks


OWN = {"name": "mine.py:make"}


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("num_units", [300, 1566, 20_000, 60_000])
@pytest.mark.parametrize("model", [OWN, {"name": "shoefit_cnn"}])
def test_the_noise_on_a_weight_is_the_same_for_every_plan(epsilon: float, num_units: int, model: Any) -> None:
    privacy = filled(asked(model=model, target_epsilon=epsilon, num_units=num_units), facts(num_units)).privacy
    optimizer = filled(asked(model=model, target_epsilon=epsilon, num_units=num_units), facts(num_units)).optimizer
    assert optimizer is not None
    assert (optimizer.name, optimizer.momentum, privacy.clip_norm) == ("sgd", 0.0, NETWORK_CLIP)
    assert optimizer.learning_rate is not None
    assert privacy.steps is not None
    assert privacy.steps >= FEWEST_NETWORK_STEPS
    assert privacy.expected_batch_size is not None
    assert privacy.delta is not None
    noise = calibrate_noise_multiplier(
        num_units=num_units,
        expected_batch_size=privacy.expected_batch_size,
        steps=privacy.steps,
        target_epsilon=epsilon,
        delta=privacy.delta,
    )
    one_step = optimizer.learning_rate * NETWORK_CLIP * noise / privacy.expected_batch_size
    # The noise is estimated (to 15 %, see above) and the rate has two digits.
    assert one_step * math.sqrt(privacy.steps) == pytest.approx(WEIGHT_NOISE, rel=0.2)


def test_a_given_clip_norm_or_batch_changes_the_rate_so_that_the_noise_stays() -> None:
    usual = filled(asked(model=OWN, clip_norm=0.1), facts(1000)).optimizer
    tenfold = filled(asked(model=OWN, clip_norm=1.0), facts(1000)).optimizer
    assert usual is not None
    assert tenfold is not None
    assert usual.learning_rate is not None
    assert tenfold.learning_rate == pytest.approx(usual.learning_rate / 10, rel=0.05)  # two digits


def test_residual_networks_have_the_rule_on_few_units_and_nadam_on_many() -> None:
    rules = {}
    for units in (RESIDUAL_UNITS - 1, RESIDUAL_UNITS):
        config = filled(asked(model={"name": "scaleresnet9"}, num_units=units), facts(units))
        assert config.optimizer is not None
        rules[units] = (config.optimizer.name, config.privacy.clip_norm)
    assert rules == {RESIDUAL_UNITS - 1: ("sgd", NETWORK_CLIP), RESIDUAL_UNITS: ("nadam", 1.5)}


@pytest.mark.parametrize(
    "sections",
    [
        {"task": "segmentation", "model": {"name": "scalelinknet9"}},
        {"task": "segmentation", "model": OWN},
        {"model": {"name": "scatter_cnn"}},
        {"model": {"name": "scaleresnet9"}, "transfer": {"weights": "public.safetensors", "trained": "all"}},
    ],
)
def test_masks_wavelets_and_trained_weights_keep_their_usual_settings(sections: dict[str, Any]) -> None:
    config = parse_config({"data": {"source": "scans"}, "privacy": {"target_epsilon": 3.0}, **sections})
    assert filled(config, facts(1000)).privacy.clip_norm in (1.0, 1.5)


def test_the_reasons_say_that_the_settings_of_an_own_model_follow_from_the_plan() -> None:
    choices = {choice.setting: choice for choice in fill_open_settings(asked(model=OWN), facts(1000))[1]}
    assert choices["optimizer"].reason.startswith("from the plan")
    assert not any("not tuned" in choice.reason for choice in choices.values())


# ---- Overrides


def changed(one: RunConfig, other: RunConfig) -> set[str]:
    """Dotted names of the settings that differ."""
    found = set()
    for section in ("privacy", "optimizer", "averaging", "schedule", "model", "views"):
        left, right = getattr(one, section).model_dump(), getattr(other, section).model_dump()
        found |= {f"{section}.{name}" for name in left if left[name] != right[name]}
    return found


@pytest.mark.parametrize(
    ("section", "setting", "value"),
    [
        ("optimizer", "learning_rate", 0.123),
        ("optimizer", "momentum", 0.9),
        ("optimizer", "weight_decay", 0.01),
        ("averaging", "kind", "polyak"),
    ],
)
@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 33, 33)])  # a linear head, a network
def test_an_override_changes_its_own_setting_alone(section: str, setting: str, value: Any, shape: Any) -> None:
    usual = filled(asked(), facts(1000, shape))
    given: dict[str, Any] = {section: {setting: value}}
    extra = {"averaging.decay"} if section == "averaging" and shape[1] == 33 else set[str]()  # polyak has no decay
    assert changed(usual, filled(asked(**given), facts(1000, shape))) == {f"{section}.{setting}"} | extra


def test_another_update_rule_has_its_own_usual_rate() -> None:
    config = filled(asked(optimizer={"name": "adam"}), facts(1000))
    assert config.optimizer is not None
    assert (config.optimizer.name, config.optimizer.learning_rate) == ("adam", 1e-3)
    residual = filled(asked(optimizer={"momentum": 0.9}, model={"name": "scaleresnet9"}), facts(20_000))
    assert residual.optimizer is not None
    assert (residual.optimizer.name, residual.optimizer.momentum) == ("sgd", 0.9)  # nadam has no such momentum


def test_averaging_can_be_switched_off_alone() -> None:
    assert filled(asked(), facts(1000, (3, 33, 33))).averaging.kind == "ema"
    assert filled(asked(averaging={"kind": "none"}), facts(1000, (3, 33, 33))).averaging.kind == "none"


def test_epochs_become_steps_and_are_not_kept_beside_them() -> None:
    config = filled(asked(epochs=10.0, expected_batch_size=100.0, num_units=1000), facts(1000))
    assert (config.privacy.steps, config.privacy.epochs) == (100, None)


def test_epochs_of_a_counted_number_have_a_limit() -> None:
    config = asked(epochs=1e6, expected_batch_size=1.0, num_units=1000, count_noise_multiplier=15.0)
    assert filled(config, facts(1000)).privacy.steps == 10_000
