"""A script in Opacus's style runs after one changed import, and every misuse is refused before anything is released."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_recorded_step import CLASSES, ROWS, Script, data, plain
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import dpvision
from dpvision.accounting import mechanism_guarantee
from dpvision.compat import BatchMemoryManager, ModuleValidator, PrivacyEngine, UnsupportedModuleError
from dpvision.compat.recorded_step import RecordedTensor
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.private_step import BudgetSpent


def make(folder: Path, **options: Any) -> tuple[PrivacyEngine, Any, Any, Any]:
    """Make a private logistic regression; options replace the defaults."""
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES)
    parts = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "data_loader": DataLoader(TensorDataset(*data()), batch_size=8),
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.1,
        "epochs": 1,
        **options,
    }
    engine = PrivacyEngine(folder=folder / "run", seed=3)
    return engine, *engine.make_private(**{name: value for name, value in parts.items() if value is not None})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# The whole way


def test_a_script_trains_and_its_certificate_verifies(tmp_path: Path) -> None:
    engine, model, optimizer, loader = make(tmp_path, epochs=2, target_delta=1e-3)
    criterion, scheduler, seen = nn.CrossEntropyLoss(), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), []
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, targets)
            predicted = np.argmax(outputs.detach().cpu().numpy(), axis=1)
            loss.backward()
            optimizer.step()
            seen.append((loss.item(), float((predicted == targets.numpy()).mean())))
        scheduler.step()
    assert len(seen) == 6
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert list(model.state_dict()) == ["weight", "bias"]
    epsilon = engine.get_epsilon(1e-3)
    planned = mechanism_guarantee(engine.run.mechanism, delta=1e-3).epsilon
    assert epsilon == pytest.approx(planned)
    result = engine.release({"accuracy": 0.5}, evaluated_on="synthetic rows", data_name="synthetic")
    assert result.certificate["epsilon"] == pytest.approx(epsilon)
    assert dpvision.verify(tmp_path / "run").ok
    declared = {each["what"]: each["how"] for each in result.certificate["declared"]}
    assert "the model → cross_entropy" in declared["loss of the loop"]
    assert "declared public" in declared["number of units"]


def test_the_target_epsilon_is_kept_and_is_a_hard_limit(tmp_path: Path) -> None:
    model = nn.Linear(4, CLASSES)
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    engine = PrivacyEngine(accountant="rdp", secure_mode=True, folder=tmp_path / "run", seed=1)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters()), data_loader=loader, target_epsilon=4.0,
        target_delta=1e-3, epochs=1, max_grad_norm=1.0,
    )  # fmt: skip
    assert engine.get_epsilon(1e-3) == 0
    for inputs, targets in loader:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    assert 3.9 < engine.accountant.get_epsilon(delta=1e-3) <= 4.0
    with pytest.raises(BudgetSpent, match="End the loop here"):
        next(iter(loader))


def test_epsilon_is_at_most_that_of_opacus_at_the_same_sample_rate(tmp_path: Path) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    engine, model, optimizer, loader = make(tmp_path, epochs=4)
    for _ in range(4):
        for inputs, targets in loader:
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    for name in ("prv", "rdp"):
        theirs = accountants.create_accountant(mechanism=name)
        theirs.history = [(1.0, 8 / ROWS, 12)]
        assert engine.get_epsilon(1e-3) <= theirs.get_epsilon(delta=1e-3) + 1e-9


def test_a_rounded_sample_rate_is_printed_and_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, *_ = make(tmp_path, data_loader=DataLoader(TensorDataset(*data()), batch_size=7))
    assert engine._training.mechanism.sample_rate == 7 / ROWS
    printed = capsys.readouterr().out
    assert "sample rate 7/24 = 0.291667, expected batch 7" in printed
    assert "1/len(loader) = 1/4 = 0.25, expected batch 6.0" in printed
    make(tmp_path)
    assert not capsys.readouterr().out


def test_the_loop_never_sees_how_many_rows_were_drawn(tmp_path: Path) -> None:
    _, model, optimizer, loader = make(tmp_path, epochs=4)
    drawn = set()
    for _ in range(4):
        for inputs, targets in loader:
            assert (len(inputs), inputs.shape[0], targets.size(0), model(inputs).shape[0]) == (8, 8, 8, 8)
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            drawn.add(len(targets.numpy()))  # a value: the user's own responsibility
    assert len(drawn) > 2


def test_an_empty_draw_is_a_step_of_noise_that_is_charged(tmp_path: Path) -> None:
    rows = TensorDataset(torch.randn(1000, 4), torch.zeros(1000, dtype=torch.long))
    engine, model, optimizer, loader = make(tmp_path, data_loader=DataLoader(rows, batch_size=1), epochs=None, steps=6)
    sizes, before = [], weights(model)
    for inputs, targets in itertools.islice(loader, 6):
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        sizes.append(len(targets.numpy()))
        assert not torch.equal(before, weights(model))
        before = weights(model)
    assert 0 in sizes
    assert engine.run.steps_taken == 6


def test_a_value_that_is_read_is_that_of_the_drawn_rows(tmp_path: Path) -> None:
    _, model, optimizer, loader = make(tmp_path, epochs=2)
    for inputs, targets in loader:
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, targets)
        x, y = torch.tensor(inputs.numpy()), torch.tensor(targets.tolist())
        with torch.no_grad():
            expected = copy.deepcopy(model)(x)
        torch.testing.assert_close(torch.tensor(outputs.detach().numpy()), expected)
        correct = (outputs.argmax(1) == targets).sum().item()
        assert correct == int((expected.argmax(1) == y).sum())
        loss.backward()
        optimizer.step()  # the loss is that of the step, before the weights moved
        assert loss.item() == pytest.approx(float(F.cross_entropy(expected, y)), rel=1e-5)
        assert "private" in repr(loss)
        assert f"{loss:.1f}" == f"{loss.item():.1f}"


def test_the_memory_manager_takes_one_step_for_each_draw(tmp_path: Path) -> None:
    results = []
    for name, rows in (("whole", None), ("parts", 2)):
        engine, model, optimizer, loader = make(tmp_path / name, noise_multiplier=0.5)
        manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=rows or 99, optimizer=optimizer)
        with manager as memory_safe_loader:
            for inputs, targets in memory_safe_loader:
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert engine.run.steps_taken == len(loader) == 3
        results.append((weights(model), loss.item()))
    torch.testing.assert_close(results[0], results[1])


def test_a_loss_that_is_a_sum_takes_steps_that_are_not_divided(tmp_path: Path) -> None:
    def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="sum")

    moved = []
    for name, loss, options in (("mean", plain, {}), ("sum", summed, {"loss_reduction": "sum"})):
        script = Script(tmp_path / name, exact=True, **options)
        before = weights(script.model)
        script.step(loss)
        moved.append(weights(script.model) - before)
    torch.testing.assert_close(moved[1], ROWS * moved[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dict", "triple", "single"])
def test_batches_may_have_any_structure_of_tensors(tmp_path: Path, kind: str) -> None:
    x, y = data()
    items = {
        "dict": [{"image": a, "label": int(b)} for a, b in zip(x, y, strict=True)],
        "triple": [(a, b, i) for i, (a, b) in enumerate(zip(x, y, strict=True))],
        "single": list(x),
    }
    loader: Any = DataLoader(items[kind], batch_size=8)  # pyright: ignore[reportArgumentType]
    engine, model, optimizer, loader = make(tmp_path, data_loader=loader)
    for batch in loader:
        if kind == "dict":
            loss = F.cross_entropy(model(batch["image"]), batch["label"])
        elif kind == "triple":
            images, labels, _ = batch
            loss = F.cross_entropy(model(images), labels)
        else:
            loss = (model(batch) - batch[:, :CLASSES]).square().mean()
        loss.backward()
        optimizer.step()
    assert engine.run.steps_taken == 3


def test_the_model_stays_the_same_object_and_copies_are_ordinary(tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(4, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, private, *_ = make(tmp_path, module=model, optimizer=optimizer)
    assert private is model
    assert type(model).__name__ == "Sequential"
    assert isinstance(model, nn.Sequential)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert type(copied) is nn.Sequential
        torch.testing.assert_close(copied(data()[0]), model(data()[0]))


def test_ghost_mode_returns_the_criterion_too(tmp_path: Path) -> None:
    criterion = nn.CrossEntropyLoss()
    _, model, optimizer, same, loader = make(tmp_path, grad_sample_mode="ghost", criterion=criterion)
    assert same is criterion
    inputs, targets = next(iter(loader))
    criterion(model(inputs), targets).backward()
    optimizer.step()


def test_a_result_under_no_grad_is_a_constant_of_its_row(tmp_path: Path) -> None:
    def own_labels(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            guess = model(x).softmax(1)
        return F.cross_entropy(model(x), guess)

    script = Script(tmp_path, exact=True)
    before, reference = weights(script.model), copy.deepcopy(script.model)
    expected = dpvision.clipped_sum(
        reference, lambda o, y: F.cross_entropy(o, o.detach().softmax(1), reduction="none"), *data(), clip_norm=0.1
    )
    script.step(own_labels)
    total = torch.cat([value.flatten() for value in expected.gradients.values()])
    torch.testing.assert_close((before - weights(script.model)) / 0.5 * ROWS, total, atol=1e-4, rtol=1e-3)


# Checkpoints


def test_a_checkpoint_continues_the_run_with_all_its_charges(tmp_path: Path) -> None:
    engine, model, optimizer, loader = make(tmp_path, epochs=2, target_delta=1e-3)
    for inputs, targets in loader:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    path = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1})
    kept, spent = weights(model), engine.get_epsilon(1e-3)
    engine.run.close()

    again, model, optimizer, loader = make(tmp_path / "other", epochs=2, target_delta=1e-3)
    assert again.load_checkpoint(path=path, module=model, optimizer=optimizer)["epoch"] == 1
    assert torch.equal(weights(model), kept)
    assert again.get_epsilon(1e-3) == spent
    for inputs, targets in loader:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    assert again.run.folder == tmp_path / "run"
    assert again.get_epsilon(1e-3) > spent
    with pytest.raises(BudgetSpent):
        next(iter(loader))
    with pytest.raises(ArgumentError, match="the model and the optimizer that make_private returned"):
        again.load_checkpoint(path=path, module=nn.Linear(4, 3))
    torch.save({"module_state_dict": {}}, path)
    with pytest.raises(ArgumentError, match="no checkpoint"):
        again.load_checkpoint(path=path, module=model)


# Misuse


@pytest.mark.parametrize("number", range(4))
def test_the_loss_must_be_the_same_in_every_step(tmp_path: Path, number: int) -> None:
    script, kept = Script(tmp_path), torch.ones(())
    changes = (lambda loss: loss * 0.5, lambda loss: loss + loss, lambda loss: loss * kept, lambda loss: -loss)
    script.step(plain).item()
    with pytest.raises(PrivacyError, match="loss differs from the earlier ones'"):
        script.step(lambda m, x, y: changes[number](plain(m, x, y)))
    assert script.engine.run.steps_taken == 1


def test_a_constant_tensor_that_changes_is_refused(tmp_path: Path) -> None:
    script, scale = Script(tmp_path), torch.ones(())
    script.step(lambda m, x, y: plain(m, x, y) * scale).item()
    scale.mul_(2)
    with pytest.raises(PrivacyError, match="differs from the earlier ones' in mul"):
        script.step(lambda m, x, y: plain(m, x, y) * scale)


def test_losses_of_two_batches_can_not_be_added(tmp_path: Path) -> None:
    script, kept = Script(tmp_path), []

    def added(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = plain(m, x, y)
        kept.append(loss)
        return kept[0] + loss if len(kept) > 1 else loss

    script.step(added)
    with pytest.raises(PrivacyError, match="a tensor of an earlier batch"):
        script.step(added)


def test_an_output_of_an_earlier_step_can_not_be_used_again(tmp_path: Path) -> None:
    script, kept = Script(tmp_path), []

    def reusing(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        kept.append(m(x))
        return F.cross_entropy(kept[0], y)

    script.step(reusing)
    with pytest.raises(PrivacyError, match="a tensor of an earlier batch"):
        script.step(reusing)
    with pytest.raises(PrivacyError, match="belongs to an earlier batch"):
        kept[0].numpy()


@pytest.mark.parametrize("arguments", [{"retain_graph": True}, {"create_graph": True}, {"gradient": torch.ones(())}])
def test_backward_takes_no_arguments(tmp_path: Path, arguments: dict[str, Any]) -> None:
    script = Script(tmp_path)
    inputs, targets = next(iter(script.loader))
    with pytest.raises(PrivacyError, match="alone"):
        plain(script.model, inputs, targets).backward(**arguments)


def test_backward_and_step_come_once_for_each_batch(tmp_path: Path) -> None:
    script = Script(tmp_path)
    with pytest.raises(PrivacyError, match="needs a batch"):
        script.optimizer.step()
    inputs, targets = next(iter(script.loader))
    with pytest.raises(PrivacyError, match=r"needs loss.backward\(\) first"):
        script.optimizer.step()
    loss = plain(script.model, inputs, targets)
    loss.backward()
    with pytest.raises(PrivacyError, match="called twice"):
        loss.backward()
    script.optimizer.step()
    with pytest.raises(PrivacyError, match="no step yet"):
        script.optimizer.step()
    assert script.engine.run.steps_taken == 1


def test_a_batch_must_not_be_passed_over(tmp_path: Path) -> None:
    script = Script(tmp_path)
    next(iter(script.loader))
    with pytest.raises(PrivacyError, match="Call step for every batch"):
        next(iter(script.loader))


def test_zero_grad_between_backward_and_step_forgets_the_loss(tmp_path: Path) -> None:
    script = Script(tmp_path)
    inputs, targets = next(iter(script.loader))
    plain(script.model, inputs, targets).backward()
    script.optimizer.zero_grad()
    with pytest.raises(PrivacyError, match=r"needs loss.backward\(\) first"):
        script.optimizer.step()


def test_gradients_and_weights_changed_by_hand_are_refused(tmp_path: Path) -> None:
    script = Script(tmp_path)
    inputs, targets = next(iter(script.loader))
    plain(script.model, inputs, targets).backward()
    assert all(p.grad is None for p in script.model.parameters())
    script.model[0].weight.grad = torch.ones(5, 4)
    with pytest.raises(PrivacyError, match=r"\.grad is set"):
        script.optimizer.step()
    script.model[0].weight.grad = None
    with torch.no_grad():
        script.model[0].weight.add_(1)
    with pytest.raises(PrivacyError, match="moved by other means"):
        script.optimizer.step()
    with pytest.raises(PrivacyError, match="not private"):
        script.optimizer.original_optimizer.step()


def test_an_ordinary_backward_of_private_rows_is_noticed(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.step(plain)
    inputs, targets = next(iter(script.loader))
    plain(script.model, inputs, targets).backward()
    F.cross_entropy(script.model(data()[0]), data()[1]).backward()  # around the loader
    with pytest.raises(PrivacyError, match=r"\.grad is set"):
        script.optimizer.step()


class Straight(torch.autograd.Function):
    """A custom gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


def test_a_gradient_that_does_not_reach_the_model_is_refused(tmp_path: Path) -> None:
    cases = (
        lambda m, x, y: F.cross_entropy(m(x).detach(), y),
        lambda m, x, y: F.cross_entropy(m(x).data, y),
        lambda m, x, y: F.cross_entropy(Straight.apply(m(x)), y),
    )
    for number, loss in enumerate(cases):
        with pytest.raises(PrivacyError, match="no gradient of the loss reaches the model"):
            Script(tmp_path / str(number)).step(loss)


class Branching(nn.Linear):
    """A model that looks at values."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input * 2 if input.max() > 1 else input)


def test_a_model_that_branches_on_values_is_refused(tmp_path: Path) -> None:
    model = Branching(4, CLASSES)
    parts = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    _, model, optimizer, loader = make(tmp_path, **parts)
    inputs, targets = next(iter(loader))
    with pytest.raises(PrivacyError, match="a value was read"):
        F.cross_entropy(model(inputs), targets).backward()
    with pytest.raises(PrivacyError, match=r"needs loss\.backward"):
        optimizer.step()


def test_functions_that_bypass_the_recording_are_refused(tmp_path: Path) -> None:
    script = Script(tmp_path)
    inputs, targets = next(iter(script.loader))
    outputs = script.model(inputs)
    assert isinstance(outputs, RecordedTensor)
    for use in (
        lambda: torch.autograd.grad(plain(script.model, inputs, targets), list(script.model.parameters())),
        lambda: outputs.register_hook(print),
        outputs.requires_grad_,
        lambda: copy.deepcopy(outputs),
        outputs.data_ptr,
        lambda: pickle.dumps(outputs),
        lambda: setattr(outputs, "data", torch.zeros(3)),
        lambda: torch.add(outputs, 1, out=outputs),
    ):
        with pytest.raises(PrivacyError):
            use()


def test_a_model_of_another_engine_is_refused(tmp_path: Path) -> None:
    one, two = Script(tmp_path / "1"), Script(tmp_path / "2")
    inputs, _ = next(iter(one.loader))
    with pytest.raises(PrivacyError, match="drawn for another model"):
        two.model(inputs)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"epochs": None}, ArgumentError, "epochs=, steps= or target_epsilon="),
        ({"poisson_sampling": False}, PrivacyError, "have no such epsilon"),
        ({"clipping": "adaptive"}, ArgumentError, "clipping must be"),
        ({"loss_reduction": "none"}, ArgumentError, "loss_reduction"),
        ({"max_grad_norm": [1.0, 2.0]}, ArgumentError, "one number"),
        ({"batch_first": False}, ArgumentError, "batch_first"),
        ({"noise_generator": torch.Generator()}, ArgumentError, "noise_generator"),
        ({"epoch": 3}, TypeError, "unexpected keyword"),
        ({"noise_multiplier": 0.0}, ArgumentError, "noise_multiplier"),
        ({"data_loader": DataLoader(TensorDataset(*data()), batch_size=None)}, ArgumentError, "batch_size"),
        (
            {"data_loader": DataLoader(TensorDataset(*data()), 8, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS))},
            PrivacyError,
            "WeightedRandomSampler",
        ),
        ({"data_loader": DataLoader(TensorDataset(*data()), 99, drop_last=True)}, ArgumentError, "no batches"),
        (
            {"data_loader": DataLoader(TensorDataset(*data()), 8, sampler=RandomSampler(range(ROWS), num_samples=8))},
            ArgumentError,
            f"takes 8 of {ROWS} examples per epoch",
        ),
        ({"module": nn.DataParallel(nn.Linear(4, 3))}, UnsupportedModuleError, "Give make_private the module inside"),
        ({"module": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))}, UnsupportedModuleError, "BatchNorm1d"),
    ],
)
def test_what_can_not_be_private_is_refused_at_once(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=re.escape(match)):
        make(tmp_path, **options)
    assert not (tmp_path / "run").exists()


def test_a_budget_decides_the_number_of_steps(tmp_path: Path) -> None:
    engine, *_ = make(tmp_path, epochs=None, target_epsilon=5.0, target_delta=1e-3)
    planned = engine._training.mechanism
    assert mechanism_guarantee(planned, delta=1e-3).epsilon <= 5.0
    more = dpvision.Mechanism.from_dict({**planned.to_dict(), "steps": planned.steps + 1})
    assert mechanism_guarantee(more, delta=1e-3).epsilon > 5.0


def test_what_only_opacus_s_optimizer_has_is_named(tmp_path: Path) -> None:
    _, _, optimizer, _ = make(tmp_path)
    with pytest.raises(AttributeError, match="no signal_skip_step: step clips"):
        optimizer.signal_skip_step(do_skip=True)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = optimizer.nonsense


def test_a_released_run_gives_no_more_batches(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.step(plain)
    script.engine.release()
    with pytest.raises(PrivacyError, match="the run was released"):
        next(iter(script.loader))


# ModuleValidator


def test_the_validator_finds_and_replaces_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    assert not ModuleValidator.is_valid(model)
    assert "(BatchNorm2d) mixes the rows" in str(ModuleValidator.validate(model)[0])
    with pytest.raises(UnsupportedModuleError):
        ModuleValidator.validate(model, strict=True)
    fixed: Any = ModuleValidator.fix(model)
    assert ModuleValidator.is_valid(fixed)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(PrivacyEngine.get_compatible_module(model), nn.Sequential)
    assert ModuleValidator.is_valid(ModuleValidator.fix_and_validate(model))
