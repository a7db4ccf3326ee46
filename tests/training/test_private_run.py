"""``PrivateRun``: a user's own loop is private, and every misuse is refused before anything is released."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpvision
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.release.verify import verify
from dpvision.training.private_run import PrivateRun

SOURCE = Path(dpvision.__file__).parent
X, Y = torch.randn(60, 4, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 2


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def mechanism(**changes: Any) -> dpvision.Mechanism:
    values = {"target_epsilon": 3.0, "delta": 1e-3, "num_units": 60, "expected_batch_size": 20, "steps": 3}
    return dpvision.Mechanism.calibrated(**{**values, "clip_norm": 0.5, **changes})


def start(path: Path, *, rule: Any = torch.optim.SGD, **changes: Any) -> tuple[PrivateRun, nn.Module, Any]:
    model = nn.Linear(4, 2)
    optimizer = rule(model.parameters(), lr=0.1)
    return PrivateRun(model, optimizer, mechanism(**changes), path), model, optimizer


def charges(path: Path) -> int:
    return sum(count for _, count in charges_of(read_ledger(path / "release" / "ledger.jsonl")))


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RAdam])
def test_any_torch_optimizer_trains_and_the_release_verifies(tmp_path: Path, rule: Any) -> None:
    run, model, run_optimizer = start(tmp_path / "run", rule=rule)
    before = model.weight.detach().clone()
    assert run.epsilon_spent == 0
    for batch in run.batches((X, Y)):
        run.step(batch, losses)
        assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(before, model.weight)
    if run_optimizer.state and rule is not torch.optim.SGD:
        with pytest.raises(ArgumentError, match="taken steps"):
            PrivateRun(model, run_optimizer, mechanism(), tmp_path / "again")
    assert 2.9 < run.epsilon_spent <= 3.0
    run.release({"accuracy": 0.5}, evaluated_on="synthetic rows")
    assert verify(tmp_path / "run").problems == ()
    with pytest.raises(PrivacyError, match="released"):
        run.step(batch, losses)


def test_leaving_the_loop_early_charges_the_steps_taken(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    for batch in run.batches((X, Y)):
        run.step(batch, losses)
        break
    run.release()
    assert charges(tmp_path / "run") == 1
    assert verify(tmp_path / "run").ok


def test_patients_are_drawn_and_clipped_as_units(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run", num_units=20, expected_batch_size=8, privacy_unit="patient")
    for batch in run.batches((X, Y), units=[f"p{row // 3}" for row in range(60)], rows_per_unit=2):
        run.step(batch, losses)
    run.release()
    assert verify(tmp_path / "run").ok
    other, *_ = start(tmp_path / "other")
    with pytest.raises(ArgumentError, match="privacy_unit"):
        other.batches((X, Y), units=[0] * 60)


def test_a_dataset_is_read_for_drawn_rows_only_and_an_empty_draw_is_a_step(tmp_path: Path) -> None:
    seen: set[int] = set()

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, row: int) -> Any:
            seen.add(row)
            return X[row], int(Y[row])

    run, *_ = start(tmp_path / "run", expected_batch_size=0.05, target_epsilon=0.05)
    for batch in run.batches(Rows()):
        assert "sensitive" in repr(batch)
        run.step(batch, losses)
    assert len(seen) < 10  # of 60; 0.15 are expected, more than 9 with a chance below 1e-14
    assert charges(tmp_path / "run") == 3


def test_misuse_is_refused_and_charges_nothing(tmp_path: Path) -> None:
    run, model, optimizer = start(tmp_path / "run")
    other, *_ = start(tmp_path / "other")
    batches = run.batches((X, Y))
    batch = next(batches)
    with pytest.raises(PrivacyError, match="not drawn by this run"):
        run.step(next(other.batches((X, Y))), losses)
    with pytest.raises(PrivacyError, match="outside"):
        optimizer.step()
    model(X).sum().backward()
    with pytest.raises(PrivacyError, match="grad is set"):
        run.step(batch, losses)
    model.zero_grad()
    assert charges(tmp_path / "run") == 0
    run.step(batch, losses)
    with pytest.raises(PrivacyError, match="taken once"):
        run.step(batch, losses)
    batch = next(batches)
    with torch.no_grad():
        model.weight += 1
    with pytest.raises(PrivacyError, match="moved by other means"):
        run.step(batch, losses)
    with pytest.raises(PrivacyError, match="moved by other means"):
        run.release()
    assert charges(tmp_path / "run") == 1


def test_a_batch_that_is_passed_over_ends_the_loop(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    batches = run.batches((X, Y))
    next(batches)
    with pytest.raises(PrivacyError, match="every batch"):
        next(batches)


def test_closures_private_plateaus_and_data_loaders_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(ArgumentError, match="closure"):
        PrivateRun(model, torch.optim.LBFGS(model.parameters()), mechanism(), tmp_path / "a")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
    with pytest.raises(ArgumentError, match="public_metric"):
        PrivateRun(model, sgd, mechanism(), tmp_path / "a", scheduler=plateau)
    run, *_ = start(tmp_path / "b")
    with pytest.raises(ArgumentError, match="DataLoader"):
        run.batches(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y)))


def test_frozen_parameters_stay_and_may_change_between_steps(tmp_path: Path) -> None:
    run, model, _ = start(tmp_path / "run")
    for batch in run.batches((X, Y)):
        model.bias.requires_grad_(batch.step != 1)
        before = model.bias.detach().clone()
        run.step(batch, losses)
        assert torch.equal(before, model.bias) == (batch.step == 1)
    run.release()
    assert verify(tmp_path / "run").ok


def test_only_the_package_privacy_clips_charges_steps_and_draws_their_noise() -> None:
    callers: dict[str, set[str]] = {"clipped_sum_of_batch": set(), "noisy_mean": set(), "PROOF_OF_NOISE": set()}
    for path in SOURCE.rglob("*.py"):
        names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        for name in callers:
            if name in names:
                callers[name].add(path.relative_to(SOURCE).as_posix())
    assert callers["noisy_mean"] == {"privacy/private_step.py"}
    audit = {"audit/mechanism_check.py"}  # attacks the step with sums of synthetic images, and releases none
    assert callers["clipped_sum_of_batch"] - audit == {"privacy/private_step.py", "gradients/clipped_sum.py"}
    assert callers["PROOF_OF_NOISE"] == {"privacy/noise.py", "privacy/values.py"}
