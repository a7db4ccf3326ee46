"""Optimizer state divided among processes: the bits, the ledger and the checkpoints of one process."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpvision import Mechanism, PrivateRun, ShardedOptimizer, models
from dpvision.errors import ArgumentError, DPVisionError, PrivacyError
from dpvision.privacy.ledger import read_ledger
from dpvision.privacy.noise import noise_groups
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sharded_step import FollowingPrivatizer, owners_of
from dpvision.privacy.values import ClippedSum
from dpvision.release.verify import verify
from dpvision.storage.run_folder import RunFolder
from rank_processes import run_ranks, values_of

WIDE = 700
"""A hidden layer of 490,000 weights: more than one draw of noise holds, so that there is something to divide."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, WIDE), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3))


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn((40, 6), generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3


def mechanism(steps: int = 4, **more: Any) -> Mechanism:
    settings = {"num_units": 40, "expected_batch_size": 12.0, "clip_norm": 0.8, "noise_multiplier": 0.7, **more}
    return Mechanism(**settings, steps=steps, delta=1e-3)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def script(
    folder: Path, *, sharded: bool, make: Callable[[Any], Any] = adam, stop: int = 4, resume: bool = False
) -> Callable[[int], Any]:
    """A user's loop, as every process runs it; it stops after ``stop`` steps."""

    def run_it(_: int) -> dict[str, Any]:
        model = network()
        given: dict[str, Any] = {"checkpoint_every": 2}
        if sharded:
            optimizer: Any = ShardedOptimizer(make, schedule=halving)
        else:
            optimizer = make(model.parameters())
            given["scheduler"] = halving(optimizer)
        if resume:
            run = PrivateRun.resume(folder, model, optimizer, **given)
        else:
            run = PrivateRun(model, optimizer, mechanism(), folder, seed=5, **given)
        with run:
            for batch in run.batches(rows()):
                run.step(batch, cross_entropy, microbatch_size=3)
                if run.steps_taken == stop:
                    break
            epsilon = run.guarantee().epsilon
            if not run.steps_left:
                run.release()
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        held = 0 if run._followed is None else sum(map(_numbers, run._followed.optimizer._rule.state.values()))
        held += 0 if run._followed is not None else sum(map(_numbers, run._state.optimizer._rule.state.values()))
        return {"weights": weights.view(torch.int32).sum(dtype=torch.int64).item(), "epsilon": epsilon, "held": held}

    return run_it


def _numbers(state: dict[str, Any]) -> int:
    return sum(value.numel() for value in state.values() if isinstance(value, Tensor) and value.dim())


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "private" / "checkpoints").glob("*.safetensors"))


def results(folder: Path) -> list[bytes]:
    return [(folder / "release" / name).read_bytes() for name in ("weights.safetensors", "ledger.jsonl")]


@pytest.mark.parametrize("make", [adam, momentum, adagrad], ids=["Adam", "SGD", "Adagrad"])
def test_sharded_state_gives_the_bits_the_ledger_and_the_checkpoints_of_one_process(
    tmp_path: Path, make: Callable[[Any], Any]
) -> None:
    whole = values_of(run_ranks(1, script(tmp_path / "whole" / "run", sharded=False, make=make), tmp_path))[0]
    parts = values_of(run_ranks(2, script(tmp_path / "parts" / "run", sharded=True, make=make), tmp_path))
    assert [each["weights"] for each in parts] == [whole["weights"]] * 2
    assert [each["epsilon"] for each in parts] == [whole["epsilon"]] * 2
    assert sum(each["held"] for each in parts) == whole["held"], "no state is kept twice"
    assert max(each["held"] for each in parts) < whole["held"]
    folders = [tmp_path / name / "run" for name in ("whole", "parts")]
    assert results(folders[0]) == results(folders[1])
    saved = [RunFolder(folder).latest_checkpoint() for folder in folders]
    assert saved[0] is not None
    assert saved[1] is not None
    assert saved[0].tensors.keys() == saved[1].tensors.keys()
    assert all(torch.equal(saved[0].tensors[name], saved[1].tensors[name]) for name in saved[0].tensors)
    assert verify(folders[1]).ok


def test_four_processes_of_which_one_owns_nothing_give_the_same_bits(tmp_path: Path) -> None:
    found = [
        values_of(run_ranks(size, script(tmp_path / str(size) / "run", sharded=True), tmp_path)) for size in (1, 4)
    ]
    assert len(set(owners_of(network(), 4).values())) == 3
    assert {each["weights"] for values in found for each in values} == {found[0][0]["weights"]}


def test_a_run_is_resumed_with_another_number_of_processes(tmp_path: Path) -> None:
    """A resumed run has other noise, so that equality is of two resumes from one seed."""
    ended = []
    for name, sizes, kinds in (("one", (1, 1), (False, False)), ("several", (2, 3), (True, True))):
        folder = tmp_path / name / "run"
        values_of(run_ranks(sizes[0], script(folder, sharded=kinds[0], stop=2), tmp_path))
        values_of(run_ranks(sizes[1], script(folder, sharded=kinds[1], resume=True), tmp_path))
        assert verify(folder).ok
        ended.append(results(folder))
    assert ended[0] == ended[1]


def test_a_release_before_the_end_and_a_metric_are_collective_checkpoints(tmp_path: Path) -> None:
    def early(_: int) -> int:
        model = network()
        run = PrivateRun(model, ShardedOptimizer(adam), mechanism(), tmp_path / "run", seed=5, checkpoint_every=100)
        batch = next(run.batches(rows()))
        run.step(batch, cross_entropy, microbatch_size=3)
        run.save()
        run.record({"accuracy": 0.5}, measured_on="public rows")
        run.release()
        return run.steps_taken

    assert values_of(run_ranks(2, early, tmp_path)) == [1, 1]
    saved = RunFolder(tmp_path / "run").latest_checkpoint()
    assert saved is not None
    assert sum(name.endswith("exp_avg") for name in saved.tensors) == 6
    assert verify(tmp_path / "run").ok


def test_a_failure_after_the_charge_ends_the_run_for_all_and_is_charged_once(tmp_path: Path) -> None:
    def failing(rank: int) -> None:
        model = network()
        run = PrivateRun(model, ShardedOptimizer(adam), mechanism(), tmp_path / "run", seed=5)
        batch = next(run.batches(rows()))
        if rank == 1:
            run._followed.optimizer._rule.step = lambda: (_ for _ in ()).throw(RuntimeError("no memory"))  # type: ignore[union-attr]
        with pytest.raises(Exception, match="no memory"):
            run.step(batch, cross_entropy, microbatch_size=3)
        with pytest.raises(PrivacyError, match="interrupted after its charge"):
            run.step(batch, cross_entropy, microbatch_size=3)

    values_of(run_ranks(2, failing, tmp_path))
    charges = [entry for entry in read_ledger(tmp_path / "run" / "release" / "ledger.jsonl") if entry.kind == "charge"]
    assert len(charges) == 1


def test_no_process_draws_noise_for_a_step_that_rank_0_could_not_charge(tmp_path: Path) -> None:
    import dpvision.privacy.sharded_step as module

    def refused(rank: int) -> list[Any]:
        model, drawn = network(), []
        run = PrivateRun(model, ShardedOptimizer(adam), mechanism(), tmp_path / "run", seed=5)
        batch = next(run.batches(rows()))
        module.noisy_mean = lambda *given, **more: drawn.append(1)  # type: ignore[assignment]
        if rank == 0:
            run._state.privatizer.charge = lambda *_, **__: (_ for _ in ()).throw(OSError("the disk is full"))  # type: ignore[method-assign]
        with pytest.raises(Exception, match="the disk is full"):
            run.step(batch, cross_entropy, microbatch_size=3)
        return drawn

    assert values_of(run_ranks(2, refused, tmp_path)) == [[], []]


def test_a_layer_that_is_frozen_on_the_way_is_refused_before_the_charge(tmp_path: Path) -> None:
    """Other owners would follow, whose optimizers do not hold what they own."""

    def freezing(_: int) -> int:
        model: Any = network()
        run = PrivateRun(model, ShardedOptimizer(momentum), mechanism(), tmp_path / "run", seed=5)
        batch = next(run.batches(rows()))
        model[3].requires_grad_(False)
        with pytest.raises(DPVisionError, match="can't be frozen or unfrozen"):
            run.step(batch, cross_entropy, microbatch_size=3)
        model[3].requires_grad_(True)
        run.step(batch, cross_entropy, microbatch_size=3)
        return run.steps_taken

    assert values_of(run_ranks(2, freezing, tmp_path)) == [1, 1]


def test_a_part_of_a_step_is_released_once() -> None:
    plan = mechanism()
    privatizer = FollowingPrivatizer(plan, Keys.from_seed(0), first=2)
    total = {"a": torch.zeros(3, dtype=torch.float64)}
    privatizer.release(ClippedSum(total, 0.8), step=2, sizes={"a": 3})
    for step in (2, 1, 4):
        with pytest.raises(PrivacyError, match="released once"):
            privatizer.release(ClippedSum(total, 0.8), step=step, sizes={"a": 3})


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_parameters_that_share_a_draw_of_noise_have_one_owner(ranks: int) -> None:
    model = models.create("resnet18", num_classes=10, in_channels=3, seed=0)
    owners = owners_of(model, ranks)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert owners.keys() == sizes.keys()
    for names in noise_groups(sizes):
        assert len({owners[name] for name in names}) == 1
    loads = [sum(sizes[name] for name, owner in owners.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.SGD([*p, {"params": [nn.Parameter(torch.zeros(1))]}], lr=0.1), "one group"),
        (type("Own", (torch.optim.SGD,), {"__module__": "own"}), "one of torch.optim"),
    ],
)
def test_optimizers_that_may_look_at_other_parameters_are_refused(
    tmp_path: Path, make: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        PrivateRun(network(), ShardedOptimizer(make), mechanism(), tmp_path / "run")


def test_a_schedule_that_follows_a_metric_and_a_second_schedule_are_refused(tmp_path: Path) -> None:
    plateau = ShardedOptimizer(adam, schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ArgumentError, match="can't follow a metric"):
        PrivateRun(network(), plateau, mechanism(), tmp_path / "one")
    with pytest.raises(ArgumentError, match="its own argument schedule"):
        PrivateRun(network(), ShardedOptimizer(adam), mechanism(), tmp_path / "two", scheduler=halving)


@pytest.mark.slow
def test_nfnet_f0_takes_a_step_with_half_of_the_state_in_each_process(tmp_path: Path) -> None:
    def take(_: int) -> list[int]:
        model = models.create("nfnet_f0", num_classes=10, in_channels=3, seed=0)
        run = PrivateRun(
            model,
            ShardedOptimizer(adam),
            mechanism(1, num_units=2, expected_batch_size=1.9),
            tmp_path / "run",
            seed=5,
        )
        data = torch.rand((2, 3, 32, 32), generator=torch.Generator().manual_seed(0)), torch.arange(2)
        for batch in run.batches(data):
            run.step(batch, cross_entropy, microbatch_size=1)
        moved = run._state.optimizer if run._followed is None else run._followed.optimizer
        state = 4 * sum(map(_numbers, moved._rule.state.values()))
        return [state, sum(p.numel() for p in model.parameters()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]

    first, second = values_of(run_ranks(2, take, tmp_path))
    whole = 8 * first[1]
    assert first[0] + second[0] == pytest.approx(whole, rel=1e-3)
    assert max(first[0], second[0]) < 0.52 * whole
    print(first, second)
