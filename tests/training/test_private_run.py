"""``PrivateRun``: a user's own loop is private, and every misuse is refused before anything is released."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import dpvision
from dpvision.cli import app
from dpvision.errors import ArgumentError, DPVisionError, PrivacyError, TamperError
from dpvision.privacy import private_step as stepping
from dpvision.privacy.ledger import Ledger, charges_of, read_ledger
from dpvision.privacy.private_step import BudgetSpent
from dpvision.release.verify import verify
from dpvision.training.private_run import PrivateRun, count_units

X, Y = torch.randn(60, 4, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 2


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def mechanism(**changes: Any) -> dpvision.Mechanism:
    values = {"target_epsilon": 3.0, "delta": 1e-3, "num_units": 60, "expected_batch_size": 20, "steps": 3}
    return dpvision.Mechanism.calibrated(**{**values, "clip_norm": 0.5, **changes})


def parts(rule: Any = torch.optim.SGD) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, rule(model.parameters(), lr=0.1)


def start(
    path: Path, *, rule: Any = torch.optim.SGD, seed: int | None = None, **changes: Any
) -> tuple[PrivateRun, nn.Linear, Any]:
    model, optimizer = parts(rule)
    return PrivateRun(model, optimizer, mechanism(**changes), path, seed=seed), model, optimizer


def charges(path: Path) -> int:
    return sum(count for _, count in charges_of(read_ledger(path / "release" / "ledger.jsonl")))


def finish(run: PrivateRun, *, steps: int | None = None) -> None:
    for batch in run.batches((X, Y)):
        run.step(batch, losses)
        if run.steps_taken == steps:
            break


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
    assert "epsilon" in str(run.guarantee())
    result = run.release({"accuracy": 0.5}, evaluated_on="synthetic rows", data_name="rows")
    assert (result.outcome, result.run) == ("finished", tmp_path / "run")
    assert result.certificate["epsilon"] == run.epsilon_spent == result.figures()["epsilon"]
    assert result.figures()["accuracy"] == 0.5
    assert verify(tmp_path / "run").problems == ()
    with pytest.raises(PrivacyError, match="released"):
        run.step(batch, losses)


def test_leaving_the_loop_early_charges_the_steps_taken(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    finish(run, steps=1)
    assert run.release().outcome == "stopped"
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


class Rows(torch.utils.data.Dataset[Any]):
    """Remembers which rows were read."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> Any:
        self.seen.add(row)
        return X[row], int(Y[row])


def test_a_dataset_is_read_for_drawn_rows_only_and_an_empty_draw_is_a_step(tmp_path: Path) -> None:
    rows = Rows()
    run, *_ = start(tmp_path / "run", expected_batch_size=0.05, target_epsilon=0.05)
    for batch in run.batches(rows):
        assert "sensitive" in repr(batch)
        run.step(batch, losses)
    assert len(rows.seen) < 10  # of 60; 0.15 are expected, more than 9 with a chance below 1e-14
    assert charges(tmp_path / "run") == 3


@pytest.mark.parametrize("declared", [30, 60, 90])
def test_the_rate_is_that_of_the_declared_number_whatever_the_data_holds(tmp_path: Path, declared: int) -> None:
    run, *_ = start(tmp_path / "run", num_units=declared)
    assert next(run.batches((X, Y))).sampling.sample_rate == 20 / declared
    finish(run)
    assert run.release().certificate["mechanism"]["num_units"] == declared
    assert verify(tmp_path / "run").ok


# Misuse


def test_misuse_is_refused_and_charges_nothing(tmp_path: Path) -> None:
    run, model, optimizer = start(tmp_path / "run")
    other, *_ = start(tmp_path / "other")
    batches = run.batches((X, Y))
    batch = next(batches)
    with pytest.raises(PrivacyError, match="not drawn by"):
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


def test_a_batch_of_an_earlier_call_of_batches_is_refused(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    batch = next(run.batches((X, Y)))
    run.batches((X, 1 - Y))
    with pytest.raises(PrivacyError, match="last call of"):
        run.step(batch, losses)


def replace_a_parameter(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.detach().clone())


def add_a_module(model: nn.Linear) -> None:
    model.add_module("more", nn.Tanh())


def add_a_parameter(model: nn.Linear) -> None:
    model.register_parameter("more", nn.Parameter(torch.zeros(1), requires_grad=False))


def remove_a_parameter(model: nn.Linear) -> None:
    model.bias = None


@pytest.mark.parametrize("change", [replace_a_parameter, add_a_module, add_a_parameter, remove_a_parameter])
def test_a_changed_model_is_neither_trained_nor_released(tmp_path: Path, change: Any) -> None:
    run, model, _ = start(tmp_path / "run")
    batches = run.batches((X, Y))
    run.step(next(batches), losses)
    change(model)
    with pytest.raises(PrivacyError, match=r"changed|moved by other means"):
        run.step(next(batches), losses)
    with pytest.raises(PrivacyError, match=r"changed|moved by other means"):
        run.release()
    assert charges(tmp_path / "run") == 1


def test_a_state_of_the_optimizer_that_was_written_outside_is_refused(tmp_path: Path) -> None:
    run, model, optimizer = start(tmp_path / "run", rule=torch.optim.Adam)
    batches = run.batches((X, Y))
    run.step(next(batches), losses)
    run.step(next(batches), losses)
    optimizer.state[model.weight]["exp_avg"].add_(1.0)
    for use in (lambda: run.step(next(batches), losses), run.release, run.state_dict):
        with pytest.raises(PrivacyError, match=r"optimizer's state was changed .* exp_avg"):
            use()
    assert charges(tmp_path / "run") == 2


def test_a_run_can_not_be_copied_or_pickled(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PrivacyError, match="copied or pickled"):
            copied(run)
    finish(run)


def test_threads_take_their_steps_one_after_the_other(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    batch, refusals = next(run.batches((X, Y))), list[str]()

    def step() -> None:
        try:
            run.step(batch, losses)
        except PrivacyError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=step) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (run.steps_taken, charges(tmp_path / "run")) == (1, 1)
    assert [("each is taken once" in refusal) for refusal in refusals] == [True, True]
    finish(run)


def test_a_step_inside_of_a_step_is_refused_and_charges_nothing(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    batch = next(run.batches((X, Y)))

    def again(outputs: Tensor, targets: Tensor) -> Tensor:
        run.step(batch, losses)
        return losses(outputs, targets)

    with pytest.raises(PrivacyError, match="inside of another"):
        run.step(batch, again)
    assert charges(tmp_path / "run") == 0
    run.step(batch, losses)


@pytest.mark.parametrize(
    "idle",
    [lambda o, t: losses(o, t).detach(), lambda o, t: torch.zeros(len(o)), lambda o, t: t],
)
def test_losses_without_a_real_gradient_are_refused_before_the_charge(tmp_path: Path, idle: Any) -> None:
    run, *_ = start(tmp_path / "run")
    with pytest.raises(ArgumentError, match="noise alone"):
        run.step(next(run.batches((X, Y))), idle)
    assert charges(tmp_path / "run") == 0


class SharpnessAware(torch.optim.SGD):
    """Needs a gradient at a second point, as SAM does."""

    def first_step(self) -> None:
        """Climb."""

    def second_step(self) -> None:
        """Descend."""


def test_optimizers_that_read_the_data_again_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    for rule, word in ((torch.optim.LBFGS, "closure"), (SharpnessAware, "second point")):
        with pytest.raises(ArgumentError, match=word):
            PrivateRun(model, rule(model.parameters()), mechanism(), tmp_path / "a")  # type: ignore[call-arg]
    assert not (tmp_path / "a").exists()


def test_data_loaders_and_optimizers_of_other_models_are_refused(tmp_path: Path) -> None:
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    foreign = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ArgumentError, match="not the model's"):
        PrivateRun(model, foreign, mechanism(), tmp_path / "a")
    foreign.step()  # no hook is left on an optimizer that was refused
    run, *_ = start(tmp_path / "b")
    with pytest.raises(ArgumentError, match="DataLoader"):
        run.batches(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y)))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"model": print}, "torch.nn.Module, got builtin"),
        ({"model": nn.Linear(4, 2, device="meta")}, "weight is on the meta device"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"seed": "one"}, "seed must be a whole number"),
        ({"callback": 3}, "RunCallback, got int"),
    ],
    ids=str,
)
def test_arguments_of_other_kinds_are_named(tmp_path: Path, arguments: Any, named: str) -> None:
    given = {"model": nn.Linear(6, 2), **arguments}
    parameters = given["model"].parameters() if isinstance(given["model"], nn.Module) else [nn.Parameter(X[0])]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(ArgumentError, match=named):
        dpvision.PrivateRun(given.pop("model"), optimizer, mechanism(), tmp_path / "run", **given)


def test_a_model_of_inference_tensors_is_refused(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Linear(6, 2)
    with pytest.raises(ArgumentError, match=r"weight is made in torch\.inference_mode"):
        dpvision.PrivateRun(model, torch.optim.SGD(model.parameters(), lr=0.1), mechanism(), tmp_path / "run")


@pytest.mark.parametrize("size", ["x", None, 1.5, 2**21])
def test_a_wrong_size_of_micro_batches_or_views_is_named(tmp_path: Path, size: Any) -> None:
    run, *_ = start(tmp_path / "run")
    batch = next(run.batches((X, Y)))
    with pytest.raises(ArgumentError, match="views_per_unit"):
        run.batches((X, Y), views_per_unit=size)
    if size is not None:
        with pytest.raises(ArgumentError, match="microbatch_size"):
            run.step(batch, losses, microbatch_size=size)


def test_settings_may_change_between_steps_but_not_the_parameters(tmp_path: Path) -> None:
    run, model, optimizer = start(tmp_path / "run")
    batches = run.batches((X, Y))
    optimizer.param_groups[0]["lr"] = 0.0
    before = model.weight.detach().clone()
    run.step(next(batches), losses)
    assert torch.equal(before, model.weight)
    batch = next(batches)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ArgumentError, match="not the model's"):
        run.step(batch, losses)
    assert charges(tmp_path / "run") == 1


def test_a_refused_folder_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("mine")
    model, optimizer = parts()
    with pytest.raises(ArgumentError, match="empty folder"):
        PrivateRun(model, optimizer, mechanism(), tmp_path / "run")
    optimizer.step()


def test_frozen_parameters_stay_and_may_change_between_steps(tmp_path: Path) -> None:
    run, model, _ = start(tmp_path / "run")
    for batch in run.batches((X, Y)):
        model.bias.requires_grad_(batch.step != 1)
        before = model.bias.detach().clone()
        run.step(batch, losses)
        assert torch.equal(before, model.bias) == (batch.step == 1)
    run.release()
    assert verify(tmp_path / "run").ok


def test_half_precision_is_refused_where_it_is_trained(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
    with pytest.raises(ArgumentError, match=r"0\.weight is torch\.bfloat16\. Call model\.float\(\)"):
        PrivateRun(model, torch.optim.SGD(model.parameters(), lr=0.1), mechanism(), tmp_path / "run")


# Schedules


def test_schedules_are_stepped_by_the_run_and_by_nothing_else(tmp_path: Path) -> None:
    model, optimizer = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run = PrivateRun(model, optimizer, mechanism(), tmp_path / "run", scheduler=schedule)
    batches = run.batches((X, Y))
    run.step(next(batches), losses)
    assert optimizer.param_groups[0]["lr"] == 0.05
    batch = next(batches)
    schedule.step()
    with pytest.raises(PrivacyError, match="stepped outside"):
        run.step(batch, losses)
    other = torch.optim.lr_scheduler.StepLR(parts()[1], 1)
    for wrong, word in ((other, "another optimizer"), (object(), "torch.optim.lr_scheduler")):
        with pytest.raises(ArgumentError, match=word):
            PrivateRun(*parts(), mechanism(), tmp_path / "other", scheduler=wrong)


def test_a_plateau_schedule_follows_a_metric_that_is_declared_public(tmp_path: Path) -> None:
    model, optimizer = parts()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    run = PrivateRun(model, optimizer, mechanism(), tmp_path / "run", scheduler=plateau)
    batches = run.batches((X, Y))
    for value in (1.0, 2.0):
        run.step(next(batches), losses)
        run.report_public_metric(value, measured_on="public scans")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    batch = next(batches)
    plateau.step(0.3)
    with pytest.raises(PrivacyError, match="report_public_metric"):
        run.step(batch, losses)
    without, *_ = start(tmp_path / "without")
    with pytest.raises(ArgumentError, match="has none"):
        without.report_public_metric(1.0, measured_on="public scans")
    notes = [
        e.payload["how"] for e in read_ledger(tmp_path / "run" / "release" / "ledger.jsonl") if e.kind == "declare"
    ]
    assert "follows a metric on public scans, which is declared public" in notes


# What surrounds a step


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
)
def test_a_step_is_the_same_inside_autocast_and_without_gradients(tmp_path: Path, around: Any) -> None:
    weights = []
    for name, context in (("plain", contextlib.nullcontext), ("inside", around)):
        run, model, _ = start(tmp_path / name, seed=7)
        with context():
            finish(run)
        weights.append(model.weight.detach().clone())
        assert run.release().certificate["steps_taken"] == 3
    assert torch.equal(*weights)


def test_a_step_does_not_move_the_generators_of_the_loop(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    before = torch.get_rng_state()
    finish(run)
    assert torch.equal(before, torch.get_rng_state())


def test_an_error_of_the_loss_leaves_the_run_usable_and_charges_nothing(tmp_path: Path) -> None:
    run, model, _ = start(tmp_path / "run")

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise LookupError("no such table")

    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    for batch in run.batches((X, Y)):
        before = model.weight.detach().clone()
        for wrong, saying in ((broken, "no such table"), (mean, "one loss per row")):
            with pytest.raises(ArgumentError, match=saying):
                run.step(batch, wrong)
            assert charges(tmp_path / "run") == batch.step
            assert torch.equal(before, model.weight)
        run.step(batch, losses)
    assert charges(tmp_path / "run") == 3
    run.release()
    assert verify(tmp_path / "run").ok


@pytest.mark.parametrize("place", ["clipped_sum_of_batch", "noisy_mean"])
def test_an_interrupt_in_a_step_is_charged_once_it_is_past_the_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run, model, optimizer = start(tmp_path / "run", steps=4)
    finish(run, steps=1)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    batch = next(run.batches((X, Y)))
    with monkeypatch.context() as patch:
        patch.setattr(stepping, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step(batch, losses)
    if place == "clipped_sum_of_batch":
        assert charges(tmp_path / "run") == 1
        run.step(batch, losses)
        return
    assert charges(tmp_path / "run") == 2
    for call in (lambda: run.step(batch, losses), run.save, run.release):
        with pytest.raises(PrivacyError, match=r"interrupted after its charge .* PrivateRun\.resume"):
            call()
    again = PrivateRun.resume(tmp_path / "run", model, optimizer)
    assert (again.steps_taken, again.steps_left) == (1, 2)
    finish(again)
    assert again.release().outcome == "budget_spent"
    assert charges(tmp_path / "run") == 4
    assert verify(tmp_path / "run").ok


# Trees of rows


@dataclasses.dataclass
class Output:
    """What a model of its own class returns."""

    logits: Tensor
    hidden: Tensor | None = None


class Answer(OrderedDict[str, Tensor]):
    """Like a ModelOutput: a dict with attributes."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


class ByKeyword(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(4, 4), nn.Linear(4, 2), kind

    def forward(self, pixel_values: Tensor, scale: Tensor | None = None) -> Any:
        hidden = self.first(pixel_values).tanh()
        return self.kind(logits=self.last(hidden if scale is None else hidden * scale[:, None]))


def as_pair(logits: Tensor) -> tuple[Tensor, str]:
    return logits, "not a tensor"


def logits_of(outputs: Any) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs.logits


@pytest.mark.parametrize("kind", [Output, Answer, as_pair])
def test_inputs_by_keyword_and_outputs_of_any_class(tmp_path: Path, kind: Any) -> None:
    model = ByKeyword(kind)
    run = PrivateRun(model, torch.optim.SGD(model.parameters(), lr=0.1), mechanism(), tmp_path / "run")

    def loss(outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        return losses(logits_of(outputs), targets["labels"])

    rows = ({"pixel_values": X, "scale": torch.ones(60)}, {"labels": Y})
    before = model.first.weight.detach().clone()
    for batch in run.batches(rows):
        run.step(batch, loss)
    assert not torch.equal(before, model.first.weight)
    run.release()
    assert verify(tmp_path / "run").ok


# Resume


def resumed(path: Path, rule: Any = torch.optim.SGD, scheduler: Any = None) -> PrivateRun:
    model, optimizer = parts(rule)
    with torch.no_grad():
        model.weight += 1  # replaced by the checkpoint's
    return PrivateRun.resume(path, model, optimizer, scheduler=scheduler and scheduler(optimizer))


SCHEDULES: dict[str, Any] = {
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_run_has_the_weights_and_the_states_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    model, optimizer = parts(torch.optim.Adam)
    schedule = SCHEDULES[name](optimizer)
    run = PrivateRun(model, optimizer, mechanism(steps=6), tmp_path / "run", scheduler=schedule)
    finish(run, steps=3)
    run.close()
    with pytest.raises(PrivacyError, match="the run was closed"):
        run.save()
    again, rule = parts(torch.optim.Adam)
    other = SCHEDULES[name](rule)
    second = PrivateRun.resume(tmp_path / "run", again, rule, scheduler=other)
    assert (second.steps_taken, second.steps_left) == (3, 3)
    assert torch.equal(again.weight, model.weight)
    assert rule.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert torch.equal(rule.state[again.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert {**other.state_dict()} == {**schedule.state_dict()}
    finish(second)
    assert second.release().outcome == "finished"
    assert charges(tmp_path / "run") == 6
    assert verify(tmp_path / "run").ok


def test_steps_lost_after_the_checkpoint_are_charged_again_within_the_same_limit(tmp_path: Path) -> None:
    model, optimizer = parts()
    run = PrivateRun(model, optimizer, mechanism(steps=6), tmp_path / "run", checkpoint_every=100)
    finish(run, steps=2)
    run._state.folder.close()  # as a crash would leave it: two steps charged, the first checkpoint left
    again = resumed(tmp_path / "run")
    assert (again.steps_taken, again.steps_left) == (0, 4)
    assert again.epsilon_spent == run.epsilon_spent > 0
    assert "2 more charged" in repr(again)
    taken = [batch.step for batch in again.batches((X, Y)) if again.step(batch, losses) is None]
    assert taken == [0, 1, 2, 3]
    assert again.epsilon_spent <= 3.0
    assert again.release().outcome == "budget_spent"
    assert charges(tmp_path / "run") == 6
    assert verify(tmp_path / "run").ok
    forks = [e.payload for e in read_ledger(tmp_path / "run" / "release" / "ledger.jsonl") if e.kind == "fork"]
    assert [(fork["fork"], fork["step"]) for fork in forks] == [(1, 0)]


@pytest.mark.parametrize("seed", [None, 5])
def test_a_repeated_step_has_other_noise_and_another_draw(tmp_path: Path, seed: int | None) -> None:
    """Two releases of one step with equal noise would subtract to an exact gradient (PITFALLS 11, 28, 35)."""
    released: list[Tensor] = []
    drawn: list[list[int]] = []
    for life in range(3):
        model, optimizer = parts()
        if life == 0:
            run = PrivateRun(model, optimizer, mechanism(steps=9), tmp_path / "run", checkpoint_every=99, seed=seed)
        else:
            run = PrivateRun.resume(tmp_path / "run", model, optimizer, checkpoint_every=99)
        rows = Rows()
        for batch in run.batches(rows):
            run.step(batch, losses)
            break
        assert run.steps_taken == 1
        released.append(model.weight.detach().clone())
        drawn.append(sorted(rows.seen))
        run._state.folder.close()
    assert len({tuple(weight.flatten().tolist()) for weight in released}) == 3
    assert len({tuple(rows) for rows in drawn}) == 3  # equal by chance: 20 of 60 rows, far below 1e-12
    assert charges(tmp_path / "run") == 3


def test_the_secret_of_the_noise_is_in_no_file(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    finish(run)
    secret = run._state.keys.secret
    run.release()
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            assert secret not in file.read_bytes()
            assert secret.hex().encode() not in file.read_bytes()


def test_a_released_run_can_be_continued_and_released_again(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run", steps=4)
    finish(run, steps=2)
    first = run.release()
    assert first.outcome == "stopped"
    again = resumed(tmp_path / "run")
    assert verify(tmp_path / "run").ok  # nothing has grown yet
    finish(again, steps=3)
    assert not (tmp_path / "run" / "release" / "certificate.json").exists()
    second = again.release()
    assert second.certificate["epsilon"] > first.certificate["epsilon"]
    assert charges(tmp_path / "run") == 3
    assert verify(tmp_path / "run").ok


def test_a_finished_run_is_released_after_a_crash_without_another_step(tmp_path: Path) -> None:
    run, model, _ = start(tmp_path / "run")
    finish(run)
    run._state.folder.close()
    again = resumed(tmp_path / "run")
    assert (again.steps_taken, again.steps_left) == (3, 0)
    assert list(again.batches((X, Y))) == []
    again.release()
    assert torch.equal(again.model.weight, model.weight)
    assert charges(tmp_path / "run") == 3
    assert verify(tmp_path / "run").ok


def test_other_models_optimizers_and_runs_can_not_be_resumed(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run", rule=torch.optim.Adam)
    with pytest.raises(DPVisionError, match="in use"):
        resumed(tmp_path / "run", torch.optim.Adam)
    finish(run, steps=1)
    run.close()
    with pytest.raises(ArgumentError, match=r"the optimizer Adam .* got SGD"):
        resumed(tmp_path / "run")
    large = nn.Linear(5, 2)
    with pytest.raises(ArgumentError, match="not the one of the run"):
        PrivateRun.resume(tmp_path / "run", large, torch.optim.Adam(large.parameters()))
    with pytest.raises(ArgumentError, match="new or an empty folder"):
        start(tmp_path / "run")
    with pytest.raises(ArgumentError, match="no release"):
        resumed(tmp_path / "nothing")
    assert resumed(tmp_path / "run", torch.optim.Adam).steps_taken == 1


def started_or_resumed(path: Path, **changes: Any) -> PrivateRun:
    model, optimizer = parts()
    return PrivateRun.resume(path, model, optimizer, or_start=mechanism(**changes), checkpoint_every=1)


def test_a_script_that_is_started_again_continues_its_run(tmp_path: Path) -> None:
    first = started_or_resumed(tmp_path / "run")
    finish(first, steps=1)
    first.close()
    again = started_or_resumed(tmp_path / "run")
    assert again.steps_taken == 1
    finish(again)
    again.release()
    assert verify(tmp_path / "run").ok
    assert charges(tmp_path / "run") == 3


@pytest.mark.parametrize("changes", [{"target_epsilon": 1.0}, {"steps": 4}, {"delta": 1e-4}])
def test_a_script_that_asks_for_another_plan_does_not_continue_the_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    started_or_resumed(tmp_path / "run").close()
    with pytest.raises(ArgumentError, match=f"with another mechanism .*{next(iter(changes))}"):
        started_or_resumed(tmp_path / "run", **changes)
    assert started_or_resumed(tmp_path / "run").steps_left == 3


def test_a_script_that_counts_its_units_continues_its_run(tmp_path: Path) -> None:
    for before in range(2):
        units = count_units((X, Y), tmp_path / "run")
        run = started_or_resumed(tmp_path / "run", num_units=units, target_epsilon=30.0)
        assert run.steps_taken == before
        finish(run, steps=before + 1)
        run.close()


def test_a_start_that_was_lost_before_its_first_charge_starts_again(tmp_path: Path) -> None:
    run, _, _ = start(tmp_path / "run")
    run.close()
    for checkpoint in (tmp_path / "run/private/checkpoints").iterdir():
        checkpoint.unlink()
    with pytest.raises(DPVisionError, match="before its first checkpoint"):
        resumed(tmp_path / "run")
    assert started_or_resumed(tmp_path / "run").steps_left == 3


def test_what_a_lost_start_charged_is_not_removed(tmp_path: Path) -> None:
    run, _, _ = start(tmp_path / "run")
    finish(run, steps=1)
    run.close()
    for checkpoint in (tmp_path / "run/private/checkpoints").iterdir():
        checkpoint.unlink()
    with pytest.raises(ArgumentError, match="a new or an empty folder"):
        started_or_resumed(tmp_path / "run")
    assert charges(tmp_path / "run") == 1


def test_a_ledger_that_was_rolled_back_is_not_resumed(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    finish(run, steps=2)
    run.close()
    path = tmp_path / "run" / "release" / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(TamperError, match="rolled back"):
        resumed(tmp_path / "run")


def test_a_with_block_saves_what_an_error_would_lose(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run", steps=200)
    with contextlib.suppress(LookupError), run:
        finish(run, steps=3)
        raise LookupError
    assert resumed(tmp_path / "run").steps_taken == 3


def test_a_run_that_is_killed_anywhere_under_reports_nothing(tmp_path: Path) -> None:
    """kill -9 in every write and every release of a short run; after each, the ledger covers all noise drawn."""
    drawn, path, kills = tmp_path / "drawn", tmp_path / "run", 0
    while True:
        child = os.fork()
        if child == 0:
            _live(path, drawn, kill_at=3 + 4 * (kills % 5))
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
        kills += 1
        noises = drawn.read_text().splitlines() if drawn.exists() else []
        assert len(set(noises)) == len(noises), "noise was repeated"
        ledger = path / "release" / "ledger.jsonl"
        whole = ledger.read_bytes().rpartition(b"\n")[0].decode().splitlines() if ledger.exists() else []
        assert len(noises) <= sum('"kind":"charge"' in line for line in whole) <= 12
        assert kills < 40, "the run never ends"
    assert kills >= 3
    assert charges(path) == 12
    assert verify(path).ok


def _live(path: Path, drawn: Path, *, kill_at: int) -> None:
    """In a child: begin or resume, and die at the ``kill_at``-th write, draw of noise, or end of a step."""
    code = 1
    try:
        left = [kill_at]

        def tick() -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        real_mean, real_charge, real_replace = stepping.noisy_mean, Ledger.charge, os.replace

        def noisy(*arguments: Any, **more: Any) -> Any:
            grad = real_mean(*arguments, **more)
            with drawn.open("a") as file:
                file.write(f"{grad.gradients['weight'].tolist()}\n")  # one number of two might be equal by chance
            tick()
            return grad

        def charge(self: Ledger, *arguments: Any, **more: Any) -> None:
            tick()
            real_charge(self, *arguments, **more)
            tick()

        def replace(*arguments: Any, **more: Any) -> None:
            tick()
            real_replace(*arguments, **more)
            tick()

        stepping.noisy_mean, Ledger.charge, os.replace = noisy, charge, replace  # type: ignore[method-assign]
        model, optimizer = parts(torch.optim.Adam)
        if any((path / "private" / "checkpoints").glob("step-*")):
            run = PrivateRun.resume(path, model, optimizer, checkpoint_every=2)
        else:
            if path.exists():
                path.rename(path.with_name(f"lost-{os.getpid()}"))
                drawn.unlink(missing_ok=True)
            run = PrivateRun(model, optimizer, mechanism(steps=12), path, checkpoint_every=2)
        for batch in run.batches((X, Y)):
            run.step(batch, losses)
            tick()
        run.release()
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


# The number of units


def test_a_number_of_units_that_was_counted_is_charged(tmp_path: Path) -> None:
    path = tmp_path / "run"
    counted = count_units((X, Y), path, noise_multiplier=4.0)
    assert count_units((X[:5], Y[:5]), path) == counted  # one count for a run, whatever is asked again
    assert 60 - 8 * 4 < counted.num_units < 60 + 8 * 4
    run, *_ = start(path, num_units=counted)
    before = run.epsilon_spent
    assert before > 0
    finish(run)
    assert 2.9 < run.epsilon_spent <= 3.0
    certificate = run.release().certificate
    purposes = {event.purpose for event, _ in charges_of(read_ledger(path / "release" / "ledger.jsonl"))}
    assert purposes == {"number of units", "training step"}
    assert not any("num_units" in each["what"] for each in certificate["declared"])
    assert verify(path).problems == ()
    again = PrivateRun.resume(path, *parts())
    assert again.mechanism.count_noise_multiplier == 4.0


def test_a_count_is_of_units_and_differs_between_folders(tmp_path: Path) -> None:
    owners = [row // 10 for row in range(60)]
    found = {count_units((X, Y), tmp_path / f"{i}", units=owners, noise_multiplier=1e-3).num_units for i in range(3)}
    assert found == {6}
    noisy = {count_units((X, Y), tmp_path / f"n{i}", noise_multiplier=30.0).num_units for i in range(8)}
    assert len(noisy) > 1  # all equal with a chance below 1e-6


def test_a_count_pays_for_one_folder_only(tmp_path: Path) -> None:
    counted = count_units((X, Y), tmp_path / "run")
    with pytest.raises(ArgumentError, match="counted for another folder"):
        start(tmp_path / "other", num_units=counted)
    with pytest.raises(ArgumentError, match="holds a count"):
        start(tmp_path / "run", num_units=60)
    with pytest.raises(ArgumentError, match="noise_multiplier"):
        count_units((X, Y), tmp_path / "third", noise_multiplier=0.0)
    assert not (tmp_path / "other").exists()


# What a run says and leaves behind


def test_a_run_is_released_once_and_not_before_its_first_step(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    assert repr(run) == f"PrivateRun({tmp_path / 'run'}, step 0 of 3)"
    with pytest.raises(ArgumentError, match="no step was taken"):
        run.release()
    finish(run)
    with pytest.raises(ArgumentError, match="evaluated_on"):
        run.release({"accuracy": 0.5})
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        run.release({"accuracy": 97.0}, evaluated_on="public rows")
    with pytest.raises(ArgumentError, match="finite"):
        run.release({"loss": float("nan")}, evaluated_on="public rows")
    run.release()
    with pytest.raises(PrivacyError, match="has been released"):
        run.release()
    assert "released" in repr(run)
    assert {"model", "optimizer"} <= run.state_dict().keys()


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def test_every_loss_of_a_loop_is_declared_and_survives_a_crash(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    batches = run.batches((X, Y))
    for loss in (losses, smooth):
        run.step(next(batches), loss)
    run.close()
    certificate = resumed(tmp_path / "run").release().certificate
    declared = [each["how"] for each in certificate["declared"] if each["what"] == "own loss"]
    assert [how.split(",")[0] for how in declared] == [f"{f} in test_private_run.py" for f in ("losses", "smooth")]
    assert verify(tmp_path / "run").problems == ()


def test_the_seed_is_stamped_and_not_released(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run", seed=123456789)
    finish(run)
    assert not run.release().certificate["for_release"]
    for file in (tmp_path / "run" / "release").iterdir():
        assert b"123456789" not in file.read_bytes()


def test_no_more_steps_than_planned(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    draws = run.batches((X, Y))
    for batch in draws:
        run.step(batch, losses)
    late = type(batch)(run._state.draws, run._state.draws.batch(3), 3)  # type: ignore[union-attr]
    with pytest.raises(BudgetSpent):
        run.step(late, losses)
    assert charges(tmp_path / "run") == 3


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_commands_on_the_folder_of_an_own_loop(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    finish(run)
    run.release({"accuracy": 0.75}, evaluated_on="public rows")
    path = tmp_path / "run"
    for words in (("verify", path), ("report", path), ("verify", path)):
        result = command(*words)
        assert result.exit_code == 0, result.output
    assert "75" in (path / "release" / "report.html").read_text()
    (tmp_path / "image.png").write_bytes(b"")
    for words in (("resume", path), ("evaluate", path), ("predict", path, tmp_path / "image.png")):
        result = command(*words)
        assert result.exit_code == 2
        assert "trained in a loop of your own (PrivateRun)" in " ".join(result.stderr.split())
        assert "Traceback" not in result.output


def test_a_report_without_metrics_says_so(tmp_path: Path) -> None:
    run, *_ = start(tmp_path / "run")
    finish(run)
    run.release()
    assert command("report", tmp_path / "run").exit_code == 0
    assert command("verify", tmp_path / "run").exit_code == 0
    assert json.loads((tmp_path / "run" / "release" / "metrics.json").read_text())["final"] == {}


@pytest.fixture(autouse=True)
def _no_generator_is_left_seeded() -> Iterator[None]:
    yield
    torch.manual_seed(0)
