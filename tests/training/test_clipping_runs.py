"""The style of clipping and the unit norm through a mechanism, a release and a whole run."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from dpvision.config import parse_config
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum_of_batch
from dpvision.privacy.ledger import read_ledger
from dpvision.privacy.mechanism import CLIPPINGS, Clipping, Mechanism
from dpvision.privacy.noise import noisy_mean
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import ClippedSum
from dpvision.release.build import build_certificate
from dpvision.release.verify import verify
from dpvision.training import resume_training, train
from frozen_runs import EXTRA_IMAGES, released_files, run_frozen
from grads_support import distance, total_norm
from tiny_runs import interrupt_run, tiny_config, write_images

NEW: tuple[Clipping, ...] = ("automatic", "per_layer")
MECHANISM = Mechanism(num_units=600, expected_batch_size=20.5, clip_norm=0.37, noise_multiplier=1.1, steps=10)


def test_mechanism_and_configuration_know_the_same_styles() -> None:
    assert get_args(Clipping) == CLIPPINGS
    assert (MECHANISM.clipping, MECHANISM.unit_norm, MECHANISM.divisor) == ("flat", False, 20.5)
    for clipping in CLIPPINGS:
        privacy = {"noise_multiplier": 1.0, "delta": 1e-5, "num_units": 100, "expected_batch_size": 10.0, "steps": 2}
        privacy |= {"clip_norm": 0.5, "privacy_unit": "example", "clipping": clipping, "unit_norm": True}
        mechanism = parse_config({"data": {"source": "digits"}, "privacy": privacy}).mechanism
        assert (mechanism.clipping, mechanism.unit_norm, mechanism.divisor) == (clipping, True, 5.0)
        assert Mechanism.from_dict(json.loads(json.dumps(mechanism.to_dict()))) == mechanism


@pytest.mark.parametrize("wrong", [{"clipping": "none"}, {"clipping": None}, {"unit_norm": 1}, {"unit_norm": "yes"}])
def test_a_mechanism_refuses_what_is_no_style(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(wrong))} must be"):
        dataclasses.replace(MECHANISM, **wrong)


def test_a_mechanism_of_older_days_is_flat() -> None:
    old = {name: value for name, value in MECHANISM.to_dict().items() if name not in ("clipping", "unit_norm")}
    assert Mechanism.from_dict(old) == MECHANISM


def test_neither_style_nor_divisor_changes_what_a_step_costs_or_how_loud_its_noise_is() -> None:
    for clipping in CLIPPINGS:
        other = dataclasses.replace(MECHANISM, clipping=clipping, unit_norm=True)
        assert other.step_event == MECHANISM.step_event
        assert other.noise_stddev == MECHANISM.noise_stddev


def released(mechanism: Mechanism, sums: Tensor) -> np.ndarray[Any, Any]:
    clipped = ClippedSum({"w": sums}, mechanism.clip_norm)
    return noisy_mean(clipped, mechanism, Keys.from_seed(3), step=0).gradients["w"].numpy()


def test_unit_norm_divides_sum_and_noise_by_the_clip_norm_and_nothing_else() -> None:
    sums = torch.randn(1000, dtype=torch.float64)
    unit = dataclasses.replace(MECHANISM, unit_norm=True)
    np.testing.assert_allclose(released(unit, sums), released(MECHANISM, sums) / 0.37, rtol=1e-14)
    # Noise alone: stddev sigma / batch within 0.5 %, 7 standard errors of 10⁶ draws.
    noise = released(unit, torch.zeros(1_000_000, dtype=torch.float64))
    assert math.sqrt(np.mean(noise**2)) == pytest.approx(1.1 / 20.5, rel=0.005)


def test_with_unit_norm_a_clipped_unit_moves_the_mean_alike_under_every_clip_norm() -> None:
    direction = torch.randn(500, dtype=torch.float64)
    direction /= direction.norm()
    means = []
    for clip_norm in (0.01, 1.0, 30.0):
        mechanism = dataclasses.replace(MECHANISM, clip_norm=clip_norm, unit_norm=True)
        means.append(released(mechanism, clip_norm * direction))
    # The grid is a power of two, so noise is rounded a little differently: to 2⁻³⁰ of it.
    np.testing.assert_allclose(means[0], means[1], atol=1e-9)
    np.testing.assert_allclose(means[2], means[1], atol=1e-9)


# ---- through a whole run


@pytest.mark.parametrize("clipping", NEW)
def test_a_run_carries_its_style_into_ledger_certificate_and_verification(tmp_path: Path, clipping: Clipping) -> None:
    pictures = write_images(tmp_path / "pictures.npz")
    config = tiny_config(pictures, privacy={"clipping": clipping, "unit_norm": True})
    result = train(config, run=tmp_path / "run", seed=1)
    header = read_ledger(tmp_path / "run" / "release" / "ledger.jsonl")[0].payload
    assert (header["clipping"], header["unit_norm"]) == (clipping, True)
    assert result.certificate["mechanism"]["clipping"] == clipping
    assert result.certificate["mechanism"]["unit_norm"] is True
    assert verify(tmp_path / "run").ok
    path = tmp_path / "run" / "release" / "certificate.json"
    path.write_text(path.read_text().replace(f'"clipping": "{clipping}"', '"clipping": "flat"'))
    problems = verify(tmp_path / "run").problems
    assert any("opened for: clipping differ" in problem for problem in problems)


@pytest.mark.parametrize("clipping", NEW)
def test_neighbouring_runs_differ_in_the_clipped_sum_by_at_most_clip_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clipping: Clipping
) -> None:
    style = {"privacy": {"clipping": clipping, "unit_norm": True}}
    one, _, run = run_frozen(tmp_path / "a", monkeypatch, None, **style)
    other, _, other_run = run_frozen(tmp_path / "b", monkeypatch, EXTRA_IMAGES["extreme"], **style)
    moved = [distance(a, b) for a, b in zip(one.sums, other.sums, strict=True)]
    assert 0.1 < max(moved) <= 0.7 * (1 + 1e-5)
    assert released_files(run) == released_files(other_run)


def test_the_style_reaches_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very sums of a run: automatic clipping stretches short gradients to nearly the clip norm."""
    lengths: dict[Clipping, float] = {}
    asked: list[Clipping] = []

    def watched(clipped: ClippedSum, mechanism: Mechanism, keys: Keys, **more: Any) -> Any:
        lengths.setdefault(mechanism.clipping, total_norm(clipped.gradients))
        return noisy_mean(clipped, mechanism, keys, **more)

    def watched_sum(*arguments: Any, clipping: Clipping, **others: Any) -> ClippedSum:
        asked.append(clipping)
        return clipped_sum_of_batch(*arguments, clipping=clipping, **others)

    monkeypatch.setattr("dpvision.privacy.private_step.noisy_mean", watched)
    monkeypatch.setattr("dpvision.privacy.private_step.clipped_sum_of_batch", watched_sum)
    pictures = write_images(tmp_path / "pictures.npz")
    for clipping in CLIPPINGS:
        privacy = {"clipping": clipping, "clip_norm": 1e3, "expected_batch_size": 60.0, "steps": 1}
        train(tiny_config(pictures, privacy=privacy), run=tmp_path / clipping, seed=1)
    assert lengths["automatic"] > 10 * lengths["flat"] > 0
    assert asked == list(CLIPPINGS)


def test_a_run_with_another_style_is_not_resumed_as_the_same(tmp_path: Path) -> None:
    pictures = write_images(tmp_path / "pictures.npz")
    interrupt_run(tmp_path / "run", tiny_config(pictures), after=5, seed=1)
    path = next((tmp_path / "run" / "private").glob("config*.json"))
    path.write_text(path.read_text().replace('"clipping": "flat"', '"clipping": "automatic"'))
    with pytest.raises(PrivacyError, match=r"plan of this run changed since it began \(clipping\)"):
        resume_training(tmp_path / "run", allow_fork=True)


def test_a_certificate_of_another_style_than_the_ledgers_is_not_made(tmp_path: Path) -> None:
    pictures = write_images(tmp_path / "pictures.npz")
    result = train(tiny_config(pictures), run=tmp_path / "run", seed=1)
    ledger = read_ledger(tmp_path / "run" / "release" / "ledger.jsonl")
    mechanism = dataclasses.replace(Mechanism.from_dict(result.certificate["mechanism"]), unit_norm=True)
    with pytest.raises(PrivacyError, match="unit_norm differ"):
        build_certificate(ledger=ledger, mechanism=mechanism, hand_seeded=True, release=cast("Any", None))
