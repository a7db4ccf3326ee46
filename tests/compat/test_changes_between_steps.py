"""What a loop has read can't come back: into a later loss, into the model, through a checkpoint or a second engine."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_recorded_step import CLASSES, ROWS, Script, data, plain
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpvision
from dpvision.compat import BatchMemoryManager, PrivacyEngine
from dpvision.errors import ArgumentError, PrivacyError

CHANGED = "the model was changed after private values were read"


class Settings(nn.Module):
    """A model with settings of several kinds that its forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, CLASSES), nn.Dropout(0.0)
        self.scale, self.held, self.tensor = 1.0, [1.0], torch.ones(())
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        scores = self.drop(self.layer(x)) * self.scale * self.held[0] * self.tensor
        return scores if self.kept is None else scores + self.kept


class Loop:
    """The objects of a script with a model of settings."""

    def __init__(self, folder: Path, model: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = model or Settings()
        self.engine = PrivacyEngine(folder=folder / "run", seed=3)
        parts = {
            "module": self.model,
            "optimizer": torch.optim.SGD(self.model.parameters(), lr=0.5),
            "data_loader": DataLoader(TensorDataset(*data()), batch_size=8),
            "noise_multiplier": 1.0,
            "max_grad_norm": 0.1,
            "steps": 6,
            "target_delta": 1e-3,
            **options,
        }
        _, self.optimizer, self.loader = self.engine.make_private(**parts)

    def step(self, *, before: Callable[[Tensor], None] | None = None) -> Tensor:
        """Take a step; ``before`` is called with the loss between backward and step."""
        x, y = next(iter(self.loader))
        self.optimizer.zero_grad()
        loss = plain(self.model, x, y)
        loss.backward()
        if before is not None:
            before(loss)
        self.optimizer.step()
        return loss


def set_scale(model: Any, value: float) -> None:
    model.scale = value


def set_list(model: Any, value: float) -> None:
    model.held[0] = value


def set_tensor(model: Any, value: float) -> None:
    model.tensor.fill_(value)


def replace_tensor(model: Any, value: float) -> None:
    model.kept = torch.tensor(value)


def set_dropout(model: Any, value: float) -> None:
    model.drop.p = min(0.9, value / 10)


def evaluate(model: Any, value: float) -> None:
    model.train(value < 0)


def freeze(model: Any, value: float) -> None:
    model.layer.bias.requires_grad_(value < 0)


def add_hook(model: Any, value: float) -> None:
    model.layer.register_forward_hook(lambda *given: given[2] * value)


CHANGES = (set_scale, set_list, set_tensor, replace_tensor, set_dropout, evaluate, freeze, add_hook)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_value_that_was_read_can_not_become_a_setting_of_the_model(tmp_path: Path, change: Any) -> None:
    loop = Loop(tmp_path)
    change(loop.model, loop.step().item())
    with pytest.raises(PrivacyError, match=CHANGED):
        loop.step()
    assert loop.engine.run.steps_taken == 1


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_that_holds_in_the_first_step_too(tmp_path: Path, change: Any) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(PrivacyError, match=CHANGED):
        loop.step(before=lambda loss: change(loop.model, loss.item()))
    assert loop.engine.get_epsilon(1e-3) == 0


def test_a_loss_that_is_read_late_counts_as_read(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    kept = loop.step()
    loop.step()
    loop.model.scale = kept.item()
    with pytest.raises(PrivacyError, match=CHANGED):
        loop.step()


def test_loss_and_model_may_change_while_nothing_was_read(tmp_path: Path) -> None:
    script = Script(tmp_path, exact=True)
    for weight in (1.0, 0.5, 0.25):
        before, reference = script.model[2].bias.detach().clone(), copy.deepcopy(script.model)
        script.step(lambda m, x, y, weight=weight: weight * plain(m, x, y))
        expected = dpvision.clipped_sum(
            reference, lambda o, y, w=weight: w * F.cross_entropy(o, y, reduction="none"), *data(), clip_norm=0.1
        )
        moved = (before - script.model[2].bias.detach()) / 0.5 * ROWS
        torch.testing.assert_close(moved, expected.gradients["2.bias"], atol=1e-4, rtol=1e-3)


def test_a_declared_change_is_in_the_certificate(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step().item()
    with pytest.raises(ArgumentError, match="needs the reason"):
        loop.engine.declare_change(" ")
    loop.engine.declare_change("dropout follows the epoch")
    loop.model.drop.p = 0.5
    loop.step().item()
    loop.model.drop.p = 0.6
    with pytest.raises(PrivacyError, match=CHANGED):
        loop.step()
    loop.model.drop.p = 0.5
    loop.optimizer.step()
    declared = {each["what"]: each["how"] for each in loop.engine.release().certificate["declared"]}
    assert "dropout follows the epoch" in declared["change of loss or model"]
    assert "has no epsilon" in declared["values read from private batches"]


def test_a_loop_that_reads_nothing_is_not_said_to_read(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    declared = {each["what"] for each in loop.engine.release().certificate["declared"]}
    assert "values read from private batches" not in declared


def test_an_array_that_changes_in_place_is_noticed(tmp_path: Path) -> None:
    script, order = Script(tmp_path), np.array([0, 1, 2])

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x)[:, order], y)

    script.step(loss).item()
    script.step(loss)
    order[:] = order[::-1].copy()
    with pytest.raises(PrivacyError, match="differs from the earlier ones' in __getitem__"):
        script.step(loss)


# Engines, copies, checkpoints


def test_an_engine_makes_one_run_whose_epsilon_it_knows(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    spent, model = loop.engine.get_epsilon(1e-3), nn.Linear(4, CLASSES)
    with pytest.raises(PrivacyError, match="called before on this engine"):
        loop.engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, steps=3,
            data_loader=DataLoader(TensorDataset(*data()), batch_size=8), max_grad_norm=1.0,
        )  # fmt: skip
    assert loop.engine.get_epsilon(1e-3) == spent > 0


def test_a_second_run_of_a_trained_model_says_so(tmp_path: Path) -> None:
    first = Loop(tmp_path / "first")
    first.step()
    first.engine.release()
    second = Loop(tmp_path / "second", first.model)
    second.step()
    declared = {each["what"]: each["how"] for each in second.engine.release().certificate["declared"]}
    assert "an earlier private run" in declared["initial weights"]


def test_optimizer_and_engine_can_not_be_copied(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    for use in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PrivacyError, match="can't be copied or pickled"):
            use(loop.optimizer)
    with pytest.raises(PrivacyError, match="can't be copied or pickled"):
        copy.deepcopy(loop.engine)
    loop.step()
    assert loop.engine.run.steps_taken == 2


def test_a_value_does_not_come_back_through_a_checkpoint(tmp_path: Path) -> None:
    script, path = Script(tmp_path), tmp_path / "checkpoint.pt"
    script.engine.save_checkpoint(path=path, module=script.model, optimizer=script.optimizer)
    inputs, _ = next(iter(script.loader))
    value = inputs.max().item()
    script.engine.load_checkpoint(path=path, module=script.model, optimizer=script.optimizer)
    with pytest.raises(PrivacyError, match="before this loss was used for the first time"):
        script.step(lambda m, x, y: value * plain(m, x, y))


def test_another_loss_after_a_checkpoint_is_refused(tmp_path: Path) -> None:
    script, path = Script(tmp_path / "1"), tmp_path / "checkpoint.pt"
    weight = torch.tensor([1.0, 0.5, 2.0])
    value = script.step(lambda m, x, y: plain(m, x * weight.repeat(2)[:4], y)).item()
    script.engine.save_checkpoint(path=path, module=script.model, optimizer=script.optimizer)
    script.engine.run.close()
    again = Script(tmp_path / "2")
    again.engine.load_checkpoint(path=path, module=again.model, optimizer=again.optimizer)
    with pytest.raises(PrivacyError, match="not the loss of the checkpoint"):
        again.step(lambda m, x, y: value * plain(m, x * weight.repeat(2)[:4], y))
    x, y = again.engine._training._draw.batch()  # pyright: ignore[reportOptionalMemberAccess]
    again.optimizer.zero_grad()
    plain(again.model, x * weight.repeat(2)[:4], y).backward()
    again.optimizer.step()
    assert again.engine.run.steps_taken == 2


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    loop, path = Loop(tmp_path / "1"), tmp_path / "checkpoint.pt"
    loop.step()
    loop.engine.save_checkpoint(path=path, module=loop.model, optimizer=loop.optimizer)
    loop.engine.run.close()
    rows = TensorDataset(torch.randn(100, 4), torch.zeros(100, dtype=torch.long))
    other = Loop(tmp_path / "2", data_loader=DataLoader(rows, batch_size=8))
    with pytest.raises(ArgumentError, match="is of 24 examples in batches of 8"):
        other.engine.load_checkpoint(path=path, module=other.model, optimizer=other.optimizer)


# Loops that go astray


def test_a_batch_that_was_passed_over_can_still_be_given_to_step(tmp_path: Path) -> None:
    script = Script(tmp_path)
    inputs, targets = next(iter(script.loader))
    for _ in range(2):
        with pytest.raises(PrivacyError, match="Call step for every batch"):
            next(iter(script.loader))
        plain(script.model, inputs, targets).backward()
        script.optimizer.step()
        inputs, targets = next(iter(script.loader))
    assert script.engine.run.steps_taken == 2


def test_gradients_can_not_be_accumulated_and_loaders_not_zipped(tmp_path: Path) -> None:
    script = Script(tmp_path)

    def accumulate() -> None:
        for inputs, targets in script.loader:
            (plain(script.model, inputs, targets) / 2).backward()

    with pytest.raises(PrivacyError, match=r"Call step for every batch. To accumulate gradients, give the DataLoader"):
        accumulate()
    with pytest.raises(PrivacyError, match="Call step for every batch"):
        list(zip(script.loader, script.loader, strict=True))
    assert script.engine.get_epsilon(1e-3) == 0


def test_a_memory_manager_that_is_interrupted_leaves_the_draw_whole(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    manager = BatchMemoryManager(data_loader=loop.loader, max_physical_batch_size=2, optimizer=loop.optimizer)

    def interrupted() -> None:
        with manager as loader:
            inputs, targets = next(iter(loader))
            plain(loop.model, inputs, targets).backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert loop.engine._training.microbatch_size is None
    loop.optimizer.step()
    assert loop.engine.run.steps_taken == 1


@pytest.mark.parametrize("rows", [1, 2, 3, 99])
def test_the_loss_is_that_of_the_drawn_rows_for_every_physical_size(tmp_path: Path, rows: int) -> None:
    loop = Loop(tmp_path)
    manager = BatchMemoryManager(data_loader=loop.loader, max_physical_batch_size=rows, optimizer=loop.optimizer)
    with manager as loader:
        inputs, targets = next(iter(loader))
        loss = plain(loop.model, inputs, targets)
        x, y = torch.tensor(inputs.numpy()), torch.tensor(targets.numpy())
        expected = F.cross_entropy(copy.deepcopy(loop.model)(x), y).item()
        loss.backward()
        loop.optimizer.step()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_second_optimizer_finds_no_gradient_and_its_steps_are_noticed(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    second = torch.optim.SGD(loop.model.parameters(), lr=1.0)
    loop.step(before=lambda _: second.step() and None)
    assert loop.engine.run.steps_taken == 1
    F.cross_entropy(loop.model(data()[0]), data()[1]).backward()
    second.step()
    with pytest.raises(PrivacyError, match="moved by other means"):
        loop.step()


def test_groups_with_learning_rates_of_their_own_divide_one_private_gradient(tmp_path: Path) -> None:
    moved = []
    for name, rates in (("same", (0.5, 0.5)), ("apart", (0.5, 1.5))):
        model = nn.Linear(4, CLASSES)
        with torch.no_grad():
            model.weight.fill_(0.1), model.bias.zero_()
        groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), rates, strict=True)]
        loop = Loop(tmp_path / name, model, optimizer=torch.optim.SGD(groups))
        loop.step()
        moved.append((model.weight.detach() - 0.1, model.bias.detach()))
    torch.testing.assert_close(moved[1][0], moved[0][0])
    torch.testing.assert_close(moved[1][1], 3 * moved[0][1])


def test_targets_that_are_ignored_contribute_zero(tmp_path: Path) -> None:
    script = Script(tmp_path, exact=True)
    before, reference = script.model[2].bias.detach().clone(), copy.deepcopy(script.model)
    script.step(lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=1))
    expected = dpvision.clipped_sum(
        reference, lambda o, y: F.cross_entropy(o, y, reduction="none", ignore_index=1), *data(), clip_norm=0.1
    )
    moved = (before - script.model[2].bias.detach()) / 0.5 * ROWS
    torch.testing.assert_close(moved, expected.gradients["2.bias"], atol=1e-4, rtol=1e-3)
