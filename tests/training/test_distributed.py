"""Several processes: the same bits, one charge, one noise; a process that differs, hangs or dies stops the run."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpvision import Mechanism, PrivateRun, ShardedOptimizer, models
from dpvision.errors import DPVisionError
from dpvision.gradients import clipped_sum as clipped_sum_module
from dpvision.gradients.partial_sums import SumTree
from dpvision.privacy.ledger import read_ledger
from dpvision.ranks import Ranks
from dpvision.release.verify import verify
from dpvision.storage.run_folder import RunFolder
from dpvision.training import resume_training, train
from dpvision.training.follower import Follower
from rank_processes import run_ranks, values_of
from tiny_runs import tiny_config, write_images

SIZES = (1, 2, 4)
NUMBERS = 20_000
"""Weights whose noise is measured: their variance has a standard deviation of 1 %, so that 6 % is a 6-sigma event."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 36, 3))


def residual_network() -> nn.Module:
    return models.create("scaleresnet9", num_classes=3, in_channels=1, seed=0)


def rows(count: int = 40, side: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn((count, 1, side, side), generator=generator)
    return inputs, torch.arange(count) % 3


def digest(model: nn.Module) -> str:
    content = hashlib.sha256()
    for value in model.state_dict().values():
        content.update(value.contiguous().numpy().data)
    return content.hexdigest()


def mechanism(steps: int = 3, batch: float = 24.0, units: int = 40, **more: Any) -> Mechanism:
    return Mechanism(
        num_units=units,
        expected_batch_size=batch,
        clip_norm=0.8,
        noise_multiplier=0.7,
        steps=steps,
        delta=1e-3,
        **more,
    )


def own_loop(
    folder: Path,
    make: Callable[[], nn.Module] = small_cnn,
    plan: Mechanism | None = None,
    *,
    side: int = 8,
    units: list[int] | None = None,
) -> Callable[[int], Any]:
    """The user's script, as every process runs it."""

    def script(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)  # rank 0's initial weights count
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
        with PrivateRun(model, optimizer, plan or mechanism(), folder, seed=5) as run:
            given = {} if units is None else {"units": units, "rows_per_unit": 2}
            for batch in run.batches(rows(side=side), **given):
                run.step(batch, cross_entropy, microbatch_size=3)
            spent = run.guarantee().epsilon
            result = run.release()
        return {"weights": digest(model), "epsilon": spent, "certificate": result.certificate["weights_sha256"]}

    return script


def charged(folder: Path) -> int:
    return sum(entry.kind == "charge" for entry in read_ledger(folder / "release" / "ledger.jsonl"))


@pytest.mark.parametrize(
    ("make", "side", "units"),
    [(small_cnn, 8, None), (residual_network, 16, None), (small_cnn, 8, [row // 3 for row in range(40)])],
    ids=["cnn with dropout", "scaleresnet9", "units of several rows"],
)
def test_an_own_loop_has_the_same_bits_for_one_two_and_four_processes(
    tmp_path: Path, make: Callable[[], nn.Module], side: int, units: list[int] | None
) -> None:
    plan = mechanism(steps=1, batch=12.0) if side == 16 else mechanism()
    plan = plan if units is None else mechanism(units=14, batch=8.0, privacy_unit="patient")
    found = {}
    for size in SIZES:
        folder = tmp_path / str(size) / "run"  # its name is part of the release
        values = values_of(run_ranks(size, own_loop(folder, make, plan, side=side, units=units), tmp_path))
        assert all(value == values[0] for value in values)
        found[size] = (values[0]["weights"], (folder / "release" / "ledger.jsonl").read_bytes())
        assert verify(folder).ok
    assert found[1] == found[2] == found[4]


@pytest.mark.parametrize("changes", [{}, {"views": {"count": 2, "flip": 0.5, "crop_padding": 1}}], ids=["", "views"])
def test_train_has_the_same_bits_for_one_two_and_three_processes(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny_config(write_images(tmp_path / "images.npz"), performance={"microbatch_size": 2}, **changes)
    found = []
    for size in (1, 2, 3):
        run = tmp_path / str(size)
        values_of(run_ranks(size, lambda _, run=run: train(config, run=run, seed=3).outcome, tmp_path))
        found.append([(run / "release" / name).read_bytes() for name in ("weights.safetensors", "ledger.jsonl")])
        found[-1].append((run / "release" / "metrics.json").read_bytes())
    assert found[0] == found[1] == found[2]


def test_one_process_without_torchrun_gives_these_bits_if_told_the_partial_sums(tmp_path: Path) -> None:
    source = write_images(tmp_path / "images.npz")
    config = tiny_config(source, performance={"microbatch_size": 2, "partial_sums": 8})
    train(config, run=tmp_path / "alone", seed=3)
    values_of(run_ranks(2, lambda _: train(config, run=tmp_path / "two", seed=3).outcome, tmp_path))
    alone, two = (tmp_path / name / "release" / "weights.safetensors" for name in ("alone", "two"))
    assert alone.read_bytes() == two.read_bytes()


def variances(folder: Path, plan: Mechanism, *, size: int, broken: bool = False) -> list[float]:
    """The variance of weights after a step on data without a gradient: noise alone, as every process has it."""

    def script(rank: int) -> float:
        if broken and rank:
            _send_with_noise(plan)
        model = nn.Linear(NUMBERS, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run = PrivateRun(model, optimizer, plan, folder / "run")
        for batch in run.batches((torch.zeros(40, NUMBERS), torch.zeros(40))):
            run.step(batch, lambda outputs, targets: (outputs[:, 0] - targets).square(), microbatch_size=2)
        run.close()
        return float(model.weight.detach().double().var())

    return values_of(run_ranks(size, script, folder))


def _send_with_noise(plan: Mechanism) -> None:
    """Let this process add the noise of a step to what it sends, once."""
    real, noise = clipped_sum_module.send_branches, [torch.randn(1, NUMBERS).double() * plan.noise_stddev]

    def noisy(tree: SumTree, ranks: Ranks) -> None:
        for branch in tree.branches:
            if branch.sums is not None and noise:
                branch.sums["weight"].add_(noise.pop())
        real(tree, ranks)

    clipped_sum_module.send_branches = noisy


@pytest.mark.parametrize("size", [1, 4])
def test_the_variance_of_the_noise_does_not_grow_with_processes(tmp_path: Path, size: int) -> None:
    plan = mechanism(steps=1, batch=16.0)
    expected = (plan.noise_stddev / plan.divisor) ** 2
    for variance in variances(tmp_path, plan, size=size):
        assert variance == pytest.approx(expected, rel=0.06)


def test_a_noise_that_grows_with_processes_is_rejected(tmp_path: Path) -> None:
    """Noise of two processes: its standard deviation is √2 times as large, which the test above does not take."""
    plan = mechanism(steps=1, batch=16.0)
    expected = 2 * (plan.noise_stddev / plan.divisor) ** 2
    for variance in variances(tmp_path, plan, size=2, broken=True):
        assert variance == pytest.approx(expected, rel=0.06)


def test_empty_draws_are_steps_of_noise_for_every_process(tmp_path: Path) -> None:
    plan = mechanism(steps=4, batch=0.01)
    alone, two = (
        values_of(run_ranks(size, own_loop(tmp_path / str(size) / "run", plan=plan), tmp_path))[0] for size in (1, 2)
    )
    assert alone == two
    assert charged(tmp_path / "2" / "run") == 4


def test_more_processes_than_micro_batches_is_no_problem(tmp_path: Path) -> None:
    plan = mechanism(steps=2, batch=2.0)
    alone, four = (
        values_of(run_ranks(size, own_loop(tmp_path / str(size) / "run", plan=plan), tmp_path))[0] for size in (1, 4)
    )
    assert alone == four


def test_a_process_with_other_data_stops_all_before_anything_is_written(tmp_path: Path) -> None:
    sources = [write_images(tmp_path / "a.npz"), write_images(tmp_path / "b.npz", train=61)]
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, source in zip(folders, sources, strict=True):
        folder.mkdir()
        source.rename(folder / "images.npz")

    def script(rank: int) -> None:
        os.chdir(folders[rank])
        train(tiny_config(Path("images.npz")), run=tmp_path / "run", seed=3)

    first, second = run_ranks(2, script, tmp_path)
    assert "rank 1 of 2: data differ from rank 0" in (first.error or "")
    assert "data differ from rank 0" in (second.error or "")
    assert not (tmp_path / "run").exists()


def test_a_process_with_other_settings_stops_all(tmp_path: Path) -> None:
    source = write_images(tmp_path / "images.npz")
    configs = [tiny_config(source), tiny_config(source, privacy={"clip_norm": 0.71})]
    ended = run_ranks(2, lambda rank: train(configs[rank], run=tmp_path / "run").outcome, tmp_path)
    assert all("settings differ from rank 0" in (each.error or "") for each in ended)
    assert not (tmp_path / "run").exists()


def test_other_rows_in_an_own_loop_stop_all_processes(tmp_path: Path) -> None:
    def script(rank: int) -> None:
        model = small_cnn()
        run = PrivateRun(model, torch.optim.SGD(model.parameters(), lr=0.1), mechanism(), tmp_path / "run")
        inputs, targets = rows()
        run.batches((inputs + rank, targets))

    assert all("data differ from rank 0" in (each.error or "") for each in run_ranks(2, script, tmp_path))


def test_weights_that_differ_between_processes_are_not_summed(tmp_path: Path) -> None:
    def script(rank: int) -> None:
        model = small_cnn()
        run = PrivateRun(model, torch.optim.SGD(model.parameters(), lr=0.1), mechanism(), tmp_path / "run")
        for batch in run.batches(rows()):
            if rank == 1:
                with torch.no_grad():
                    model[0].weight.add_(1.0)
            run.step(batch, cross_entropy, microbatch_size=3)

    ended = run_ranks(2, script, tmp_path)
    assert all("does not agree with rank 0" in (each.error or "") for each in ended)
    assert charged(tmp_path / "run") == 0


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("frozen_by", [0, 1])
def test_a_layer_that_one_process_alone_freezes_stops_the_step(tmp_path: Path, frozen_by: int, sharded: bool) -> None:
    """Its sums have fewer numbers than are expected: what was in memory would take the place of the others."""

    def script(rank: int) -> None:
        model = small_cnn()
        parameters = [*model.parameters()]
        optimizer: Any = torch.optim.SGD(parameters, lr=0.1)
        if sharded:
            optimizer = ShardedOptimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        run = PrivateRun(model, optimizer, mechanism(), tmp_path / "run")
        for batch in run.batches(rows()):
            for parameter in parameters[:2]:
                parameter.requires_grad_(rank != frozen_by)
            run.step(batch, cross_entropy, microbatch_size=3)

    ended = run_ranks(2, script, tmp_path)
    expected = "can't be frozen" if sharded and frozen_by == 0 else "what is trained"
    assert all(expected in (each.error or "") for each in ended)
    assert charged(tmp_path / "run") == 0


def test_an_error_in_one_process_is_raised_in_all_charges_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    class Flaky(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.rows, self.fails = rows(), False

        def __len__(self) -> int:
            return 40

        def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
            if self.fails:
                raise ValueError("this disk is broken")
            return self.rows[0][row], self.rows[1][row]

    def script(rank: int) -> list[Any]:
        model, dataset = small_cnn(), Flaky()
        run = PrivateRun(model, torch.optim.SGD(model.parameters(), lr=0.1), mechanism(), tmp_path / "run")
        batch = next(run.batches(dataset))
        dataset.fails = rank == 1
        with pytest.raises((ValueError, DPVisionError), match="this disk is broken"):
            run.step(batch, cross_entropy, microbatch_size=3)
        before, dataset.fails = run.steps_taken, False
        run.step(batch, cross_entropy, microbatch_size=3)
        run.close()
        return [before, run.steps_taken, digest(model)]

    first, second = values_of(run_ranks(2, script, tmp_path))
    assert first == second
    assert first[:2] == [0, 1]
    assert charged(tmp_path / "run") == 1


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_stops_the_run_and_a_resume_equals_the_run_left_alone(tmp_path: Path, lost: int) -> None:
    config = tiny_config(write_images(tmp_path / "images.npz"), performance={"microbatch_size": 2, "partial_sums": 8})
    train(config, run=tmp_path / "alone", seed=3)

    def script(rank: int) -> str:
        if rank == lost:
            _die_in_step(rank, 6)
        return train(config, run=tmp_path / "run", seed=3).outcome

    began = time.monotonic()
    ended = run_ranks(2, script, tmp_path)
    assert ended[lost].value is None
    assert ended[lost].code == 9
    assert "lost contact" in (ended[1 - lost].error or "")
    assert time.monotonic() - began < 60, "a closed connection is noticed at once"
    assert charged(tmp_path / "run") == (6 if lost else 7)  # of a lost share nothing is charged
    values_of(run_ranks(3, lambda _: resume_training(tmp_path / "run").outcome, tmp_path))
    for name in ("weights.safetensors", "ledger.jsonl"):
        assert (tmp_path / "alone/release" / name).read_bytes() == (tmp_path / "run/release" / name).read_bytes()


def _die_in_step(rank: int, step: int) -> None:
    """End this process in a step: rank 0 after its charge, the others before their share."""
    import dpvision.privacy.private_step as step_module

    if rank == 0:
        real = step_module.noisy_mean

        def dying(*given: Any, step: int, **more: Any) -> Any:
            return os._exit(9) if step == last else real(*given, step=step, **more)

        last, step_module.noisy_mean = step, dying
        return
    real_step = Follower._step

    def dying_step(self: Follower, message: Any) -> None:
        if message["step"] == step:
            os._exit(9)
        real_step(self, message)

    Follower._step = dying_step  # type: ignore[method-assign]


def test_a_process_that_hangs_stops_the_run_within_the_timeout(tmp_path: Path) -> None:
    config = tiny_config(write_images(tmp_path / "images.npz"), performance={"microbatch_size": 2})

    given_up = tmp_path / "rank 0 has given up"

    def hang(self: Follower, message: Any) -> None:
        began = time.monotonic()
        while not given_up.exists() and time.monotonic() - began < 300:
            time.sleep(0.1)

    def script(rank: int) -> float:
        if rank == 1:
            Follower._step = hang  # type: ignore[method-assign]
        began = time.monotonic()
        with pytest.raises(DPVisionError, match="did not answer within 15 s"):
            train(config, run=tmp_path / "run", seed=3)
        given_up.touch()
        return time.monotonic() - began

    first, _ = run_ranks(2, script, tmp_path, timeout=15.0)
    assert first.error is None
    assert first.value < 250, "it waited for the process that hangs, not for the timeout"
    assert charged(tmp_path / "run") == 0


def test_rank_0_alone_has_the_folder_and_a_second_rank_0_is_refused(tmp_path: Path) -> None:
    config = tiny_config(write_images(tmp_path / "images.npz"), performance={"partial_sums": 8})
    train(config, run=tmp_path / "run", seed=3)
    with RunFolder.open(tmp_path / "run") as held:
        held.lock()
        next((tmp_path / "run/release").glob("manifest.json")).unlink()  # there is something to do
        ended = run_ranks(2, lambda _: resume_training(tmp_path / "run").outcome, tmp_path)
    assert all("is in use by process" in (each.error or "") for each in ended)


def test_features_of_a_frozen_backbone_are_shared_and_have_the_same_bits(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (50, 1, 16, 16), dtype=np.uint8)
    labels = np.arange(50) % 3
    np.savez(tmp_path / "images.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    config = tiny_config(
        tmp_path / "images.npz",
        model={"name": "scatter_linear", "options": {"image_size": 16}},
        performance={"microbatch_size": 2},
        privacy={"steps": 3},
        averaging={"kind": "none", "decay": None},
    )
    found = []
    for size in (1, 2):
        run = tmp_path / str(size)
        values_of(run_ranks(size, lambda _, run=run: train(config, run=run, seed=3).outcome, tmp_path))
        found.append((run / "release" / "weights.safetensors").read_bytes())
    assert found[0] == found[1]


class Listed(torch.utils.data.Dataset[Any]):
    """Rows in the order in which a process listed them, from the end where ``turned``."""

    def __init__(self, *, turned: bool) -> None:
        self.turned, self._rows = turned, rows()

    def __len__(self) -> int:
        return len(self._rows[1])

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._rows
        place = len(self) - 1 - row if self.turned else row
        return inputs[place], targets[place]


@pytest.mark.parametrize("later", [False, True], ids=["from the beginning", "after they were compared"])
def test_a_dataset_that_is_listed_in_another_order_elsewhere_is_refused(tmp_path: Path, later: bool) -> None:
    """Otherwise a unit that is row 0 here and row 39 there would be clipped and added twice."""

    def script(rank: int) -> None:
        model = small_cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        listed = Listed(turned=rank == 1 and not later)
        with PrivateRun(model, optimizer, mechanism(), tmp_path / "run", seed=5) as run:
            for batch in run.batches(listed):
                listed.turned = rank == 1
                run.step(batch, cross_entropy, microbatch_size=3)

    for each in run_ranks(2, script, tmp_path):
        assert "on the draw, the weights" in str(each.error) if later else "data differ" in str(each.error)
    assert charged(tmp_path / "run") == 0
