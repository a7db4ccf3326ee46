"""One private step: only Poisson draws are charged, and the charge comes before the noise."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dpvision.config import OptimizerSettings, Performance
from dpvision.errors import PrivacyError
from dpvision.gradients.clipped_sum import Rows
from dpvision.privacy import private_step as module
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import Event, Mechanism
from dpvision.privacy.optimizer import Optimizer
from dpvision.privacy.private_step import BudgetSpent, Privatizer, private_step, step_event
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import Sampling
from dpvision.privacy.values import ClippedSum

MECHANISM = Mechanism(num_units=100, expected_batch_size=10.5, clip_norm=0.3, noise_multiplier=1.7, steps=2)
HEADER = {
    "run_id": "run",
    "privacy_unit": "example",
    "adjacency": "add_remove",
    "num_units": 100,
    "delta": 1e-5,
    "steps": 2,
}


class PoissonRows(Rows):
    """Rows that say how they were drawn."""

    @property
    def sampling(self) -> Sampling:
        return Sampling("poisson", MECHANISM.sample_rate)


def row_losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_a_poisson_draw_at_the_mechanisms_rate_costs_its_step_event() -> None:
    event = step_event(Sampling("poisson", 0.105), MECHANISM)
    assert event == Event(sample_rate=0.105, noise_multiplier=1.7)


@pytest.mark.parametrize("method", ["fixed size", "shuffled", "by hand", ""])
def test_a_foreign_sampler_is_refused_with_a_reason(method: str) -> None:
    with pytest.raises(PrivacyError, match="must be poisson"):
        step_event(Sampling(method, 0.105), MECHANISM)


@pytest.mark.parametrize("rate", [0.105 * 1.15, 0.1, 0.11])
def test_a_draw_at_another_rate_is_refused(rate: float) -> None:
    with pytest.raises(PrivacyError, match="sample_rate"):
        step_event(Sampling("poisson", rate), MECHANISM)


def take(privatizer: Privatizer, optimizer: Optimizer, model: nn.Module, *, step: int, poisson: bool = True) -> None:
    inputs, targets = torch.ones(3, 4), torch.tensor([0, 1, 0])
    batch = (PoissonRows if poisson else Rows)(inputs, targets, 1)
    private_step(
        model,
        row_losses,
        batch,
        optimizer=optimizer,
        privatizer=privatizer,
        step=step,
        performance=Performance(),
    )


def test_a_step_charges_moves_the_weights_and_stops_at_the_budget(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", HEADER)
    model, privatizer = nn.Linear(4, 2), Privatizer(MECHANISM, ledger)
    optimizer = Optimizer(model, settings=OptimizerSettings(learning_rate=0.5), total_steps=2, private=True)
    for step in range(2):
        before = model.weight.detach().clone()
        take(privatizer, optimizer, model, step=step)
        assert not torch.equal(before, model.weight)
        assert privatizer.spent == step + 1
    after = model.weight.detach().clone()
    with pytest.raises(BudgetSpent, match="2 of 2"):
        take(privatizer, optimizer, model, step=2)
    assert torch.equal(after, model.weight)


def test_rows_without_a_sampler_are_never_charged_or_released(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", HEADER)
    model, privatizer = nn.Linear(4, 2), Privatizer(MECHANISM, ledger)
    optimizer = Optimizer(model, settings=OptimizerSettings(learning_rate=0.5), total_steps=2, private=True)
    with pytest.raises(PrivacyError, match="must be poisson, got by hand"):
        take(privatizer, optimizer, model, step=0, poisson=False)
    assert privatizer.spent == optimizer.steps_taken == 0


def test_the_charge_is_on_disk_before_noise_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", HEADER)
    model, privatizer = nn.Linear(4, 2), Privatizer(MECHANISM, ledger)
    optimizer = Optimizer(model, settings=OptimizerSettings(learning_rate=0.5), total_steps=2, private=True)

    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(module, "noisy_mean", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        take(privatizer, optimizer, model, step=0)
    assert Ledger.open(tmp_path / "ledger.jsonl").has_charge(step=0)


POISSON = Sampling("poisson", MECHANISM.sample_rate)


def zeros() -> ClippedSum:
    return ClippedSum({"w": torch.zeros(3)}, MECHANISM.clip_norm)


def test_a_step_is_charged_first_and_released_once(tmp_path: Path) -> None:
    privatizer = Privatizer(MECHANISM, Ledger.create(tmp_path / "ledger.jsonl", HEADER))
    with pytest.raises(PrivacyError, match="not charged"):
        privatizer.release(zeros(), step=0)
    privatizer.charge(POISSON, step=0)
    privatizer.release(zeros(), step=0)
    with pytest.raises(PrivacyError, match="released once"):
        privatizer.release(zeros(), step=0)
    with pytest.raises(PrivacyError, match="charged before"):
        privatizer.charge(POISSON, step=0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copy_of_a_privatizer_can_release_a_step_again(tmp_path: Path, copied: Any) -> None:
    privatizer = Privatizer(MECHANISM, Ledger.create(tmp_path / "ledger.jsonl", HEADER))
    privatizer.charge(POISSON, step=0)
    with pytest.raises(PrivacyError, match="copied or pickled"):
        copied(privatizer)
    privatizer.release(zeros(), step=0)


def test_another_privatizer_of_the_same_keys_cannot_release_the_step_again(tmp_path: Path) -> None:
    keys = Keys.from_seed(1, "test")
    first = Privatizer(MECHANISM, Ledger.create(tmp_path / "ledger.jsonl", HEADER), keys=keys)
    first.charge(POISSON, step=0)
    first.release(zeros(), step=0)
    again = Privatizer(MECHANISM, Ledger.open(tmp_path / "ledger.jsonl"), keys=keys)
    with pytest.raises(PrivacyError, match="charged before"):
        again.charge(POISSON, step=0)
    again.charge(POISSON, step=1)


def test_a_step_that_failed_after_its_charge_is_not_released_again(tmp_path: Path) -> None:
    privatizer = Privatizer(MECHANISM, Ledger.create(tmp_path / "ledger.jsonl", HEADER))
    privatizer.charge(POISSON, step=0)
    with pytest.raises(PrivacyError, match="clipped to"):
        privatizer.release(ClippedSum({"w": torch.zeros(3)}, 9.0), step=0)
    with pytest.raises(PrivacyError, match="released once"):
        privatizer.release(zeros(), step=0)


def test_a_replay_needs_given_keys_and_releases_the_same_bits(tmp_path: Path) -> None:
    keys = Keys.from_seed(1, "test")
    first = Privatizer(MECHANISM, Ledger.create(tmp_path / "ledger.jsonl", HEADER), keys=keys)
    first.charge(POISSON, step=0)
    one = first.release(zeros(), step=0)
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    with pytest.raises(PrivacyError, match="charged before"):
        Privatizer(MECHANISM, ledger, replays=True).charge(POISSON, step=0)  # other keys: not a replay
    replay = Privatizer(MECHANISM, ledger, keys=keys, replays=True)
    replay.charge(POISSON, step=0)
    assert torch.equal(one.gradients["w"], replay.release(zeros(), step=0).gradients["w"])
    with pytest.raises(PrivacyError, match="charged before"):
        replay.charge(POISSON, step=0)
    assert replay.spent == 1
