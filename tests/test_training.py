"""The whole path: wall, resume, forks, weights moved by hand, ordinary training, interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import made_up_pictures, tiny_config, write_pictures

import dpvision.training.loop as loop_module
from dpvision.accounting import mechanism_guarantee
from dpvision.checks import ArgumentError, DPVisionError, PrivacyError
from dpvision.ledger import charges_of, read_ledger
from dpvision.training import resume, train
from dpvision.training.budget import BudgetSpent
from dpvision.training.loop import take_step
from dpvision.training.release import write_release
from dpvision.training.start import begin, come_back
from dpvision.training.watch import Silence
from dpvision.verify import verify


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "pictures.npz")


def ledger_of(run: Path) -> bytes:
    return (run / "release" / "ledger.jsonl").read_bytes()


def weights_of(run: Path) -> bytes:
    return (run / "release" / "weights.safetensors").read_bytes()


def training_charges(run: Path) -> int:
    return sum(count for _, count in charges_of(read_ledger(run / "release" / "ledger.jsonl")))


class StopAfter(Silence):
    """A power cut after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        if done == self.steps:
            raise ConnectionAbortedError


def cut_off(run: Path, config: Any, *, after: int) -> None:
    with pytest.raises(ConnectionAbortedError):
        train(config, run=run, seed=3, watcher=StopAfter(after))


def test_the_certificate_of_a_run_is_what_the_accountant_says_of_its_mechanism(tmp_path: Path, pictures: Path) -> None:
    config = tiny_config(pictures)
    result = train(config, run=tmp_path / "run")
    assert result.finished
    assert result.certificate["for_release"]
    expected = mechanism_guarantee(config.mechanism, delta=1e-3)
    assert result.certificate["epsilon"] == pytest.approx(expected.epsilon, rel=1e-9)
    assert verify(tmp_path / "run").ok


def test_two_runs_from_os_entropy_share_no_noise(tmp_path: Path, pictures: Path) -> None:
    for name in ("a", "b"):
        train(tiny_config(pictures), run=tmp_path / name)
    assert weights_of(tmp_path / "a") != weights_of(tmp_path / "b")


def test_a_hand_seeded_run_is_repeatable_and_stamped_not_for_release(tmp_path: Path, pictures: Path) -> None:
    results = [train(tiny_config(pictures), run=tmp_path / name, seed=3) for name in ("a", "b")]
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")
    assert not results[0].certificate["for_release"]
    assert any("seed" in stamp for stamp in results[0].certificate["stamps"])


def test_the_secret_lies_in_private_only(tmp_path: Path, pictures: Path) -> None:
    train(tiny_config(pictures), run=tmp_path / "run")
    secret = json.loads((tmp_path / "run" / "private" / "key.json").read_text())["secret"]
    for path in (tmp_path / "run" / "release").rglob("*"):
        assert secret.encode() not in path.read_bytes()
        assert bytes.fromhex(secret) not in path.read_bytes()


@pytest.mark.parametrize("after", [1, 4, 7, 11])
def test_an_interrupted_run_equals_an_uninterrupted_run(tmp_path: Path, pictures: Path, after: int) -> None:
    config = tiny_config(pictures)
    train(config, run=tmp_path / "whole", seed=3)
    cut_off(tmp_path / "cut", config, after=after)
    assert resume(tmp_path / "cut").finished
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    assert ledger_of(tmp_path / "cut") == ledger_of(tmp_path / "whole")
    assert verify(tmp_path / "cut").ok


def test_the_charge_is_on_disk_before_the_noise_is_drawn(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = loop_module.privatize, []

    def watched(*arguments: Any, step: int) -> Any:
        seen.append((step, training_charges(tmp_path / "run")))
        return original(*arguments, step=step)

    monkeypatch.setattr(loop_module, "privatize", watched)
    train(tiny_config(pictures), run=tmp_path / "run")
    assert seen == [(step, step + 1) for step in range(12)]


def test_one_more_step_than_planned_is_refused_and_moves_nothing(tmp_path: Path, pictures: Path) -> None:
    session, _ = begin(tiny_config(pictures), tmp_path / "run", seed=3, device="cpu")
    for _ in range(12):
        take_step(session)
    before = {name: value.clone() for name, value in session.model.state_dict().items()}
    with pytest.raises(BudgetSpent, match="12 of 12"):
        take_step(session)
    assert training_charges(tmp_path / "run") == 12
    assert all(torch.equal(before[name], value) for name, value in session.model.state_dict().items())


def test_resuming_a_finished_run_takes_no_step(tmp_path: Path, pictures: Path) -> None:
    train(tiny_config(pictures), run=tmp_path / "run", seed=3)
    before = weights_of(tmp_path / "run"), ledger_of(tmp_path / "run")
    assert resume(tmp_path / "run").finished
    assert (weights_of(tmp_path / "run"), ledger_of(tmp_path / "run")) == before


def test_resuming_with_more_steps_written_into_the_config_is_refused(tmp_path: Path, pictures: Path) -> None:
    train(tiny_config(pictures), run=tmp_path / "run", seed=3)
    path = tmp_path / "run" / "release" / "config.json"
    values = json.loads(path.read_text())
    values["privacy"]["steps"] = 500
    path.write_text(json.dumps(values))
    with pytest.raises(PrivacyError, match="config"):
        resume(tmp_path / "run")


def test_a_changed_picture_gives_other_noise_and_is_charged_again(tmp_path: Path, pictures: Path) -> None:
    config = tiny_config(pictures)
    cut_off(tmp_path / "run", config, after=7)
    charged = training_charges(tmp_path / "run")
    write_pictures(pictures, extra=made_up_pictures(1)[0][0])
    with pytest.raises(PrivacyError, match="data"):
        resume(tmp_path / "run")
    result = resume(tmp_path / "run", allow_fork=True)
    assert not result.finished, "the repeated steps were charged, so the plan can't be completed"
    assert training_charges(tmp_path / "run") == 12
    entries = read_ledger(tmp_path / "run" / "release" / "ledger.jsonl")
    repeated = [e for e in entries if e.kind == "charge" and e.payload["fork"] == 1]
    assert charged == 7
    assert repeated[0].payload["step"] == 4  # the last checkpoint
    assert verify(tmp_path / "run").ok


def test_a_fork_shares_no_noise_with_the_run_it_left(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, noise = loop_module.privatize, {}

    def watched(clipped: Any, mechanism: Any, keys: Any, *, step: int) -> Any:
        private = original(clipped, mechanism, keys, step=step)
        name = "1.bias" if "1.bias" in private.gradients else next(iter(private.gradients))
        exact = clipped.gradients[name] / mechanism.expected_batch_size
        noise.setdefault(step, []).append((private.gradients[name] - exact).double())
        return private

    monkeypatch.setattr(loop_module, "privatize", watched)
    cut_off(tmp_path / "run", tiny_config(pictures), after=7)
    write_pictures(pictures, extra=made_up_pictures(1)[0][0])
    resume(tmp_path / "run", allow_fork=True)
    twice = [draws for draws in noise.values() if len(draws) == 2]
    assert len(twice) == 3
    for one, other in twice:
        assert not torch.isclose(one, other, rtol=1e-3, atol=0).any()


def test_another_number_of_threads_is_a_fork(tmp_path: Path, pictures: Path) -> None:
    threads = torch.get_num_threads()
    cut_off(tmp_path / "run", tiny_config(pictures), after=7)
    try:
        torch.set_num_threads(threads + 1)
        resume(tmp_path / "run")
    finally:
        torch.set_num_threads(threads)
    entries = read_ledger(tmp_path / "run" / "release" / "ledger.jsonl")
    assert [e.payload["reason"] for e in entries if e.kind == "fork"] == ["changed: threads"]
    assert training_charges(tmp_path / "run") == 12


def test_a_weight_moved_by_hand_gets_no_certificate(tmp_path: Path, pictures: Path) -> None:
    session, _ = begin(tiny_config(pictures), tmp_path / "run", seed=3, device="cpu")
    take_step(session)
    next(session.model.parameters()).data[0, 0] += 1e-3
    with pytest.raises(PrivacyError):
        write_release(session, finished=False)
    assert not (tmp_path / "run" / "release" / "certificate.json").exists()
    with pytest.raises(PrivacyError):
        take_step(session)


def test_a_released_statistic_is_charged_and_composes(tmp_path: Path, pictures: Path) -> None:
    plain = train(tiny_config(pictures), run=tmp_path / "plain")
    config = tiny_config(pictures, data={"normalisation": "released", "statistics_noise_multiplier": 4.0})
    result = train(config, run=tmp_path / "run")
    assert result.certificate["epsilon"] > plain.certificate["epsilon"]
    purposes = {part["purpose"]: part["count"] for part in result.certificate["charged"]}
    assert purposes == {"training step": 12, "normalisation statistics": 1}
    assert verify(tmp_path / "run").ok


def test_the_target_epsilon_is_never_crossed(tmp_path: Path, pictures: Path) -> None:
    asked = {"noise_multiplier": None, "target_epsilon": 2.0}
    result = train(tiny_config(pictures, privacy=asked), run=tmp_path / "run")
    assert 1.9 < result.certificate["epsilon"] <= 2.0
    with pytest.raises(ArgumentError, match="would spend"):
        train(tiny_config(pictures, privacy={"target_epsilon": 0.5}), run=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_an_ordinary_run_has_no_epsilon_and_says_so_everywhere(tmp_path: Path, pictures: Path) -> None:
    open_fields = {"enabled": False, "noise_multiplier": None, "clip_norm": None, "delta": None}
    result = train(tiny_config(pictures, privacy=open_fields), run=tmp_path / "run")
    assert result.certificate["epsilon"] is None
    assert not result.certificate["for_release"]
    assert "without privacy" in " ".join(result.certificate["stamps"])
    assert not result.certificate["charged"]
    assert result.metrics["final"]["accuracy"] > 0.6  # three classes, an easy stripe


def test_an_ordinary_run_equals_plain_sgd(tmp_path: Path, pictures: Path) -> None:
    """Full batch, no momentum: the released weights are those of a loop in plain torch."""
    whole = {"enabled": False, "noise_multiplier": None, "expected_batch_size": 60.0, "steps": 3}
    config = tiny_config(
        pictures,
        privacy=whole,
        optimizer={"momentum": 0.0},
        averaging={"kind": "none", "decay": None},
        data={"normalisation": "none"},
    )
    session, _ = begin(config, tmp_path / "run", seed=3, device="cpu")
    import copy

    twin = copy.deepcopy(session.model)
    images, labels = made_up_pictures(60)
    inputs, targets = torch.from_numpy(images).float() / 255, torch.from_numpy(labels).long()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(3):
        take_step(session)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(twin(inputs), targets).backward()
        optimizer.step()
    for one, other in zip(session.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_run_that_cannot_begin_leaves_nothing_behind(tmp_path: Path, pictures: Path) -> None:
    broken = tiny_config(pictures, model={"name": "linear", "options": {"image_size": 9}})
    with pytest.raises(DPVisionError):
        train(broken, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_unit_of_several_rows_is_clipped_once(tmp_path: Path) -> None:
    images, labels = made_up_pictures(60)
    owner = np.arange(60) // 3
    path = tmp_path / "owned.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels, patient=owner)
    config = tiny_config(
        path,
        data={"unit_column": "patient", "rows_per_unit": 3},
        privacy={"num_units": 20, "expected_batch_size": 8.0, "privacy_unit": "patient"},
    )
    result = train(config, run=tmp_path / "run")
    assert result.certificate["privacy_unit"] == "patient"
    assert result.certificate["mechanism"]["num_units"] == 20


def test_come_back_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DPVisionError, match="run"):
        come_back(tmp_path, allow_fork=False, device="cpu")
