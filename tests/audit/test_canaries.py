"""Canaries and the mechanism test, through the step path that trains; breakages are planted from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpvision.audit import audit_with_canaries, canary_document, check_mechanism, config_of_model, subject_of_config
from dpvision.audit.audited_runs import AUDIT_STAMP, Subject, session_on, synthetic_images, synthetic_store
from dpvision.audit.canaries import WithCanaries, expected_mu, likelihood_scores
from dpvision.config import ViewsConfig
from dpvision.errors import ArgumentError
from dpvision.gradients.clipped_sum import clipped_sum
from dpvision.models.losses import classification_loss
from dpvision.privacy.ledger import read_ledger
from dpvision.privacy.mechanism import Event
from dpvision.privacy.randomness import Keys
from dpvision.release.statements import NOT_FOR_RELEASE
from dpvision.training.trainer import take_step
from tools import audit_table

CANARIES = 400


def subject(*, views: int = 1, steps: int = 50, **privacy: Any) -> Subject:
    config = config_of_model("linear", {})
    changed = config.privacy.model_copy(update={"steps": steps, **privacy})
    seen = ViewsConfig(count=views, flip=0.5) if views > 1 else ViewsConfig()
    return subject_of_config(config.model_copy(update={"privacy": changed, "views": seen}))


def test_a_clipped_canary_is_clip_norm_long_along_its_own_weight_and_other_rows_do_not_touch_it() -> None:
    torch.manual_seed(0)
    network = WithCanaries(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), 5)
    pictures = torch.randn(2, 1, 4, 4)
    canary = clipped_sum(network, classification_loss, pictures[:1], torch.tensor([3 + 2]), clip_norm=0.5)
    expected = torch.zeros(5, 1)
    expected[2] = -0.5
    assert torch.allclose(canary.gradients["canaries.weight"], expected, atol=1e-5)
    rest = [value.norm() for name, value in canary.gradients.items() if name != "canaries.weight"]
    assert max(rest) < 1e-5
    other = clipped_sum(network, classification_loss, pictures[1:], torch.tensor([1]), clip_norm=0.5)
    assert not other.gradients["canaries.weight"].any()
    assert other.gradients["network.1.weight"].any()


def test_the_value_of_a_canary_weight_changes_nobodys_loss() -> None:
    network = WithCanaries(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), 5)
    pictures = torch.randn(2, 1, 4, 4)
    before = network(pictures)
    nn.init.normal_(network.canaries.weight)
    assert torch.equal(network(pictures), before)


def test_a_correct_run_is_neither_refuted_nor_suspicious() -> None:
    found = audit_with_canaries(subject(), canaries=CANARIES, keys=Keys.from_seed(1))
    assert not found.refuted
    assert not found.suspicious
    assert 0 < found.bound.epsilon_lower < found.epsilon_claimed  # it does see the canaries
    assert found.epsilon_claimed == pytest.approx(subject().epsilon)
    document = canary_document(subject(), found)
    assert document["passed"]
    assert "could have been refuted" in document["shows"]
    assert "not a bound" in document["estimate_shows"]


@pytest.mark.parametrize("name", ["no noise", "q = 1, charged q"])
def test_a_gross_breakage_is_refuted_in_one_run(name: str) -> None:
    (case,) = (case for case in audit_table.CASES if case.name == name)
    # Less is claimed than in the table, because fewer canaries refute less.
    with case.breakage():
        found = audit_with_canaries(subject(noise_multiplier=2.0), canaries=CANARIES, keys=Keys.from_seed(2))
    assert found.refuted
    assert not canary_document(subject(), found)["passed"]


def test_twice_the_rate_is_seen_by_the_estimate_though_the_bound_can_not() -> None:
    with audit_table.drawn_too_often(lambda rate: 2 * rate):
        found = audit_with_canaries(subject(noise_multiplier=2.0), canaries=CANARIES, keys=Keys.from_seed(3))
    assert found.suspicious
    assert not found.refuted


def test_pictures_as_canaries_give_a_bound_too() -> None:
    found = audit_with_canaries(subject(steps=5), canaries=60, sight="black", keys=Keys.from_seed(4))
    assert found.sight == "black"
    assert found.bound.epsilon_lower < found.epsilon_claimed


def test_too_few_canaries_are_refused() -> None:
    with pytest.raises(ArgumentError, match="canaries"):
        audit_with_canaries(subject(), canaries=10)


def test_the_score_is_the_log_likelihood_ratio_of_the_claimed_mechanism() -> None:
    event = Event(sample_rate=0.2, noise_multiplier=2.0)
    for value in (-1.0, 0.0, 3.0):
        density = [np.exp(-((value - mean) ** 2) / 8) for mean in (0.0, 1.0)]
        ratio = 0.8 + 0.2 * density[1] / density[0]
        assert likelihood_scores(np.array([[value]]), event)[0] == pytest.approx(np.log(ratio))


def test_the_expected_distance_is_that_of_simulated_steps() -> None:
    event = Event(sample_rate=0.3, noise_multiplier=1.2)
    generator = np.random.default_rng(0)
    noise = 1.2 * generator.normal(size=(2, 20, 20_000))
    joins = generator.random((20, 20_000)) < 0.3
    absent, present = likelihood_scores(noise[0], event), likelihood_scores(noise[1] + joins, event)
    seen = (present.mean() - absent.mean()) / np.sqrt((present.var() + absent.var()) / 2)
    assert expected_mu([(event, 20)]) == pytest.approx(seen, abs=0.04)  # four standard errors
    assert expected_mu([(Event(sample_rate=1.0, noise_multiplier=2.0), 16)]) == pytest.approx(2.0)  # √16 / 2
    assert expected_mu([]) == 0


def test_an_audit_run_is_stamped_and_leaves_nothing_behind(tmp_path: Path) -> None:
    settings = subject(steps=3)
    store = synthetic_store(settings.config, synthetic_images(20, settings.image_shape, seed=0), num_classes=10)
    with session_on(settings.config, store, keys=Keys.from_seed(0), parent=tmp_path) as session:
        take_step(session)
        notes = [entry.payload for entry in read_ledger(session.folder.ledger_path) if entry.kind == "declare"]
        assert {"what": NOT_FOR_RELEASE, "how": AUDIT_STAMP} in notes
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def failed_checks(settings: Subject) -> list[str]:
    checks = check_mechanism(settings, keys=Keys.from_seed(5), draws=4000, pairs=1)
    return [check.name for check in checks if not check.passed]


def test_the_mechanism_test_finds_nothing_in_correct_code() -> None:
    assert failed_checks(subject()) == []


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("noise ÷ √2", "noise scale"),
        ("sensitivity × 10", "sensitivity, as configured"),
        ("q × 2", "sampling rate"),
        ("steps × 2", "charges"),
        ("4 views clipped one by one", "sensitivity, four views of an image"),
    ],
)
def test_the_mechanism_test_names_what_is_broken(name: str, check: str) -> None:
    (case,) = (case for case in audit_table.CASES if case.name == name)
    with case.breakage():
        assert check in failed_checks(subject())


def test_a_clip_norm_that_nobody_reaches_is_lowered_until_the_test_shows_something() -> None:
    assert failed_checks(subject(clip_norm=1e4)) == []
    with audit_table.clip_ignored():
        assert "sensitivity, as configured" in failed_checks(subject(clip_norm=1e4))


def test_settings_without_privacy_have_nothing_to_test() -> None:
    config = config_of_model("linear", {})
    ordinary = config.privacy.model_copy(update={"enabled": False})
    with pytest.raises(ArgumentError, match="no privacy"):
        subject_of_config(config.model_copy(update={"privacy": ordinary}))
