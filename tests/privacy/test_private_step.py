"""One private step: only Poisson draws are charged, and the charge comes before the noise."""

from __future__ import annotations

from pathlib import Path

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
from dpvision.privacy.private_step import Budget, BudgetSpent, private_step, step_event
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import Sampling

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


def take(budget: Budget, optimizer: Optimizer, model: nn.Module, *, step: int, poisson: bool = True) -> None:
    inputs, targets = torch.ones(3, 4), torch.tensor([0, 1, 0])
    batch = (PoissonRows if poisson else Rows)(inputs, targets, 1)
    private_step(
        model,
        row_losses,
        batch,
        optimizer=optimizer,
        budget=budget,
        keys=Keys.from_seed(1, "test"),
        step=step,
        performance=Performance(),
    )


def test_a_step_charges_moves_the_weights_and_stops_at_the_budget(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", HEADER)
    model, budget = nn.Linear(4, 2), Budget(MECHANISM, ledger)
    optimizer = Optimizer(model, settings=OptimizerSettings(learning_rate=0.5), total_steps=2, private=True)
    for step in range(2):
        before = model.weight.detach().clone()
        take(budget, optimizer, model, step=step)
        assert not torch.equal(before, model.weight)
        assert budget.spent == step + 1
    after = model.weight.detach().clone()
    with pytest.raises(BudgetSpent, match="2 of 2"):
        take(budget, optimizer, model, step=2)
    assert torch.equal(after, model.weight)


def test_rows_without_a_sampler_are_never_charged_or_released(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", HEADER)
    model, budget = nn.Linear(4, 2), Budget(MECHANISM, ledger)
    optimizer = Optimizer(model, settings=OptimizerSettings(learning_rate=0.5), total_steps=2, private=True)
    with pytest.raises(PrivacyError, match="must be poisson, got by hand"):
        take(budget, optimizer, model, step=0, poisson=False)
    assert budget.spent == optimizer.steps_taken == 0


def test_the_charge_is_on_disk_before_noise_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", HEADER)
    model, budget = nn.Linear(4, 2), Budget(MECHANISM, ledger)
    optimizer = Optimizer(model, settings=OptimizerSettings(learning_rate=0.5), total_steps=2, private=True)

    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(module, "privatize", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        take(budget, optimizer, model, step=0)
    assert Ledger.open(tmp_path / "ledger.jsonl").has_charge(step=0)
