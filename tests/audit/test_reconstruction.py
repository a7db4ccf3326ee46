"""Reconstruction of one unknown training image, with and without privacy, beside its bound."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dpvision.accounting import full_profile, true_positive_bound
from dpvision.analyze import write_chart
from dpvision.audit import (
    ReconstructionPlan,
    reconstruct,
    reconstruction_bound,
    reconstruction_chart,
    reconstruction_document,
)
from dpvision.audit.reconstruction import _config, _extracted, _public_images
from dpvision.cli import app
from dpvision.errors import ArgumentError
from dpvision.privacy.randomness import Keys

PLAN = ReconstructionPlan(source="digits", known=9, targets=4, candidates=20, fitted=150, shadows=3, steps=4)


def dpvision(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def found() -> tuple[Any, ...]:
    return reconstruct(PLAN, [None, 1.0], keys=Keys.from_seed(3))


def test_without_privacy_every_image_is_identified(found: tuple[Any, ...]) -> None:
    assert found[0].identified_by_features == 4
    assert found[0].bound is None
    assert sum(found[0].errors) < sum(found[0].prior_errors)


def test_with_privacy_the_image_is_hidden_within_the_bound(found: tuple[Any, ...]) -> None:
    private = found[1]
    assert private.noise_multiplier > 1
    assert 1 / 20 < private.bound < 0.5
    assert private.identified_by_features < 4
    assert sum(private.errors) > sum(found[0].errors)


def test_a_guess_from_noise_stays_near_the_mean_image(found: tuple[Any, ...]) -> None:
    """Shadow models tell the adversary how far noisy features can be trusted."""
    assert sum(found[1].errors) < 1.2 * sum(found[1].prior_errors)


def test_the_features_of_the_unknown_image_are_exact_after_one_step() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    image, trained = torch.randn(1, 6), nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    trained.load_state_dict(reference.state_dict())
    loss = nn.functional.cross_entropy(trained(image), torch.tensor([1]))
    loss.backward()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter -= 0.1 * (parameter.grad if parameter.grad is not None else 0)
    torch.testing.assert_close(_extracted(trained, reference), image[0], rtol=1e-4, atol=1e-4)


def test_the_bound_is_that_on_membership_at_the_guessers_rate() -> None:
    config = _config(PLAN, _public_images(PLAN, None), 3.0)
    mechanism = config.mechanism
    assert mechanism.sample_rate == 1
    profile = full_profile([(mechanism.step_event, mechanism.steps)], delta=PLAN.delta)
    assert reconstruction_bound(config, kappa=0.05) == true_positive_bound(profile, false_positive_rate=0.05)
    assert reconstruction_bound(config, kappa=0.05) < 0.05 * 2.72**3 + PLAN.delta  # the single pair is looser
    assert reconstruction_bound(config, kappa=1.0) == 1
    assert reconstruction_bound(config, kappa=0.01) < reconstruction_bound(config, kappa=0.05)


def test_private_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="needs a published dataset"):
        replace(PLAN, source=str(tmp_path))
    answer = dpvision("audit", "--reconstruction", tmp_path)
    assert answer.exit_code == 2
    assert answer.stderr.count("\n") == 1


def test_the_document_states_models_and_settings(found: tuple[Any, ...], tmp_path: Path) -> None:
    document = reconstruction_document(PLAN, found)
    assert document["settings"]["shadow_models"] == 3
    assert [each["models_trained"] for each in document["attacks_on_images"]] == [8, 8]
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    files = write_chart(tmp_path, reconstruction_chart(found))
    assert {path.suffix for path in files} == {".png", ".svg", ".csv", ".json"}


@pytest.mark.parametrize(
    "arguments",
    [("runs/x", "--reconstruction", "digits"), ("--reconstruction", "digits", "--mechanism")],
)
def test_reconstruction_takes_no_run_and_no_other_audit(arguments: tuple[str, ...]) -> None:
    answer = dpvision("audit", *arguments)
    assert answer.exit_code == 2
    assert "of its own" in answer.stderr


def test_epsilons_must_be_positive_numbers() -> None:
    for text in ("8,x", "8,-1", "nan"):
        assert dpvision("audit", "--reconstruction", "digits", "--epsilons", text).exit_code == 2
