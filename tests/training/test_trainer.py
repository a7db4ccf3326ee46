"""The whole path: wall, resume, forks, weights moved by hand, ordinary training, interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpvision.privacy.private_step as step_module
from dpvision.accounting import mechanism_guarantee
from dpvision.data import load
from dpvision.errors import ArgumentError, DPVisionError, PrivacyError
from dpvision.inference import evaluate
from dpvision.inference.load import load_model
from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.private_step import BudgetSpent
from dpvision.privacy.randomness import Keys
from dpvision.release.report import write_report
from dpvision.release.verify import verify
from dpvision.storage.run_folder import RunFolder
from dpvision.training import resume_training, train
from dpvision.training.resume import resume_run
from dpvision.training.run_fingerprint import bound_keys
from dpvision.training.start import start_run
from dpvision.training.trainer import take_step
from dpvision.training.write_release import write_release
from tiny_runs import SIDE, interrupt_run, synthetic_images, tiny_config, write_images


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures.npz")


def ledger_of(run: Path) -> bytes:
    return (run / "release" / "ledger.jsonl").read_bytes()


def weights_of(run: Path) -> bytes:
    return (run / "release" / "weights.safetensors").read_bytes()


def training_charges(run: Path) -> int:
    return sum(count for _, count in charges_of(read_ledger(run / "release" / "ledger.jsonl")))


def test_the_certificate_of_a_run_is_what_the_accountant_says_of_its_mechanism(tmp_path: Path, pictures: Path) -> None:
    config = tiny_config(pictures)
    result = train(config, run=tmp_path / "run")
    assert result.outcome == "finished"
    assert result.certificate["for_release"]
    mechanism = Mechanism.from_dict(result.certificate["mechanism"])
    assert mechanism.noise_multiplier == 1.3
    assert mechanism.sample_rate == 20 / 60
    expected = mechanism_guarantee(mechanism, delta=1e-3)
    assert result.certificate["epsilon"] == pytest.approx(expected.epsilon, rel=1e-9)
    assert verify(tmp_path / "run").ok


def test_two_runs_from_os_entropy_share_no_noise(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise: list[torch.Tensor] = []
    original = step_module.noisy_mean

    def watched(clipped: Any, mechanism: Any, keys: Any, **more: Any) -> Any:
        zeros = type(clipped)({n: torch.zeros_like(g) for n, g in clipped.gradients.items()}, clipped.clip_norm)
        noise.append(torch.cat([g.flatten() for g in original(zeros, mechanism, keys, **more).gradients.values()]))
        return original(clipped, mechanism, keys, **more)

    monkeypatch.setattr(step_module, "noisy_mean", watched)
    for name in ("a", "b"):
        train(tiny_config(pictures), run=tmp_path / name)
    draws = torch.stack(noise)
    assert len(draws) == 24
    correlations = torch.corrcoef(draws) - torch.eye(24)
    # 195 coordinates: 6.5 standard errors of a correlation, over 276 pairs: false alarm below 1e-7.
    assert correlations.abs().max() < 6.5 / 195**0.5


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
    interrupt_run(tmp_path / "cut", config, after=after)
    assert resume_training(tmp_path / "cut").outcome == "finished"
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    assert ledger_of(tmp_path / "cut") == ledger_of(tmp_path / "whole")
    assert verify(tmp_path / "cut").ok


def test_the_charge_is_on_disk_before_the_noise_is_drawn(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = step_module.noisy_mean, []

    def watched(*arguments: Any, step: int, **more: Any) -> Any:
        seen.append((step, training_charges(tmp_path / "run")))
        return original(*arguments, step=step, **more)

    monkeypatch.setattr(step_module, "noisy_mean", watched)
    train(tiny_config(pictures), run=tmp_path / "run")
    assert seen == [(step, step + 1) for step in range(12)]


def test_one_more_step_than_planned_is_refused_and_moves_nothing(tmp_path: Path, pictures: Path) -> None:
    session, _ = start_run(tiny_config(pictures), tmp_path / "run", seed=3, device="cpu")
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
    assert resume_training(tmp_path / "run").outcome == "finished"
    assert (weights_of(tmp_path / "run"), ledger_of(tmp_path / "run")) == before


def edit_config(run: Path, section: str, **changes: Any) -> None:
    path = run / "private" / "config.json"
    values = json.loads(path.read_text())
    values[section] |= changes
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    "change", [{"steps": 500}, {"noise_multiplier": 20.0}, {"delta": 0.3}, {"num_units": 61}, {"target_epsilon": 90.0}]
)
def test_a_changed_plan_is_refused_on_resume_even_with_fork(
    tmp_path: Path, pictures: Path, change: dict[str, float]
) -> None:
    interrupt_run(tmp_path / "run", tiny_config(pictures), after=7)
    edit_config(tmp_path / "run", "privacy", **change)
    with pytest.raises(PrivacyError, match=next(iter(change))):
        resume_training(tmp_path / "run", allow_fork=True)
    assert training_charges(tmp_path / "run") == 7


def test_other_constants_for_the_pixels_are_another_configuration(tmp_path: Path, pictures: Path) -> None:
    interrupt_run(tmp_path / "run", tiny_config(pictures), after=7)
    edit_config(tmp_path / "run", "data", mean=[0.1])
    with pytest.raises(PrivacyError, match="pixels"):
        resume_training(tmp_path / "run")


def test_a_changed_setting_is_another_configuration_and_needs_a_fork(tmp_path: Path, pictures: Path) -> None:
    interrupt_run(tmp_path / "run", tiny_config(pictures), after=7)
    edit_config(tmp_path / "run", "optimizer", learning_rate=0.25)
    with pytest.raises(PrivacyError, match="config"):
        resume_training(tmp_path / "run")
    resume_training(tmp_path / "run", allow_fork=True)
    assert training_charges(tmp_path / "run") == 12


def test_declarations_of_changed_settings_are_added_after_a_fork(tmp_path: Path, pictures: Path) -> None:
    interrupt_run(tmp_path / "run", tiny_config(pictures), after=7)
    edit_config(tmp_path / "run", "views", flip=0.5)
    made = resume_training(tmp_path / "run", allow_fork=True).certificate
    assert "augmented views" in [item["what"] for item in made["declared"]]
    assert verify(tmp_path / "run").ok


def test_every_fork_has_its_own_key_even_under_the_same_facts() -> None:
    keys, facts = Keys.from_seed(1), {"run": "a", "data": "b"}
    assert bound_keys(keys, facts, 0).derive("noise", 0) != bound_keys(keys, facts, 1).derive("noise", 0)
    assert bound_keys(keys, facts, 0) == bound_keys(keys, dict(reversed(facts.items())), 0)


def test_losing_checkpoints_from_before_a_fork_is_one_more_fork(tmp_path: Path, pictures: Path) -> None:
    """Fork at step 8, then lose that checkpoint: steps 4 to 7 are taken again with other noise, and charged again."""
    config = tiny_config(pictures, privacy={"steps": 40})
    interrupt_run(tmp_path / "run", config, after=9)
    edit_config(tmp_path / "run", "optimizer", learning_rate=0.25)
    resume_run(tmp_path / "run", allow_fork=True, device="cpu")[0].folder.close()
    newest = sorted((tmp_path / "run" / "private" / "checkpoints").glob("step-00000008-*"))
    assert newest
    for path in newest:
        path.write_bytes(b"damaged")
    assert resume_training(tmp_path / "run").outcome == "budget_spent"
    entries = read_ledger(tmp_path / "run" / "release" / "ledger.jsonl")
    assert [e.payload["step"] for e in entries if e.kind == "fork"] == [8, 4]
    assert training_charges(tmp_path / "run") == 40


def test_the_key_of_another_run_is_refused(tmp_path: Path, pictures: Path) -> None:
    interrupt_run(tmp_path / "run", tiny_config(pictures), after=7)
    train(tiny_config(pictures), run=tmp_path / "other", seed=4)
    key = (tmp_path / "other" / "private" / "key.json").read_bytes()
    (tmp_path / "run" / "private" / "key.json").write_bytes(key)
    with pytest.raises(PrivacyError, match="run_id"):
        resume_training(tmp_path / "run", allow_fork=True)


def test_a_run_that_released_statistics_and_died_says_what_it_spent(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def power_cut(*arguments: Any, **keywords: Any) -> Any:
        raise ConnectionAbortedError

    monkeypatch.setattr("dpvision.training.start.Session", power_cut)
    config = tiny_config(pictures, data={"normalisation": "released"})
    with pytest.raises(ConnectionAbortedError):
        train(config, run=tmp_path / "run", seed=3)
    with pytest.raises(DPVisionError, match="did spend 1 × normalisation statistics"):
        resume_training(tmp_path / "run")


def test_random_layers_draw_the_same_when_a_step_is_replayed(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_dropout(*arguments: Any, **keywords: Any) -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 3))

    monkeypatch.setattr("dpvision.training.stages.models.create", with_dropout)
    train(tiny_config(pictures), run=tmp_path / "whole", seed=3)
    interrupt_run(tmp_path / "cut", tiny_config(pictures), after=7)
    with torch.random.fork_rng():
        torch.manual_seed(99)  # another process finds torch's global generator in another state
        resume_training(tmp_path / "cut")
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")


def test_a_word_for_a_person_needs_ids_of_persons(tmp_path: Path, pictures: Path) -> None:
    with pytest.raises(ArgumentError, match="Say who owns"):
        train(tiny_config(pictures, privacy={"privacy_unit": "patient"}), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_plan_that_the_certificate_could_not_state_is_refused_before_it_is_spent(
    tmp_path: Path, pictures: Path
) -> None:
    with pytest.raises(ArgumentError, match="replace_one"):
        train(tiny_config(pictures, privacy={"adjacency": "replace_one"}), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_release_names_files_and_not_where_they_lie(tmp_path: Path, pictures: Path) -> None:
    train(tiny_config(pictures), run=tmp_path / "run")
    for path in (tmp_path / "run" / "release").rglob("*"):
        assert str(tmp_path).encode() not in path.read_bytes(), path.name


def held_out_run(tmp_path: Path) -> tuple[Path, Path]:
    """A run on a folder of class folders without a test set."""
    from PIL import Image

    folder = tmp_path / "scans"
    for number, image in enumerate(synthetic_images(80)[0]):
        (folder / str(number % 3)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(folder / str(number % 3) / f"m{number:03}.png")
    config = tiny_config(folder, data={"image_size": 8, "channels": 1}, privacy={"num_units": 70})
    interrupt_run(tmp_path / "run", config, after=7)
    Image.fromarray(synthetic_images(1)[0][0][0]).save(folder / "0" / "a-new-one.png")
    return folder, tmp_path / "run"


def test_a_new_picture_moves_no_other_between_training_and_the_held_out_part(tmp_path: Path) -> None:
    _, run = held_out_run(tmp_path)
    session, _ = resume_run(run, allow_fork=True, device="cpu")
    tested_now = set(session.splits.test.row_names)
    keys = session.folder.load_key()
    from dpvision.data.splits import holdout_keys

    (tmp_path / "scans" / "0" / "a-new-one.png").unlink()
    from dpvision.data.splits import load_splits

    tested_before = set(load_splits(session.config, holdout_keys(keys.keys, keys.run_id)).test.row_names)
    assert tested_now - {"0/a-new-one.png"} == tested_before
    session.folder.close()


def test_a_test_split_that_changed_is_not_evaluated_on(tmp_path: Path, pictures: Path) -> None:
    from dpvision.errors import DataError
    from dpvision.inference.load import load_model, load_test_images

    train(tiny_config(pictures), run=tmp_path / "run")
    write_images(pictures, test=31)
    with pytest.raises(DataError, match="not what it was"):
        load_test_images(tmp_path / "run", load_model(tmp_path / "run"), test=None, test_masks=None, data_dir=None)


def test_a_changed_picture_gives_other_noise_and_is_charged_again(tmp_path: Path, pictures: Path) -> None:
    config = tiny_config(pictures)
    interrupt_run(tmp_path / "run", config, after=7)
    charged = training_charges(tmp_path / "run")
    write_images(pictures, extra=synthetic_images(1)[0][0])
    with pytest.raises(PrivacyError, match="data"):
        resume_training(tmp_path / "run")
    result = resume_training(tmp_path / "run", allow_fork=True)
    assert result.outcome == "budget_spent", "the repeated steps were charged, so the plan can't be completed"
    assert training_charges(tmp_path / "run") == 12
    entries = read_ledger(tmp_path / "run" / "release" / "ledger.jsonl")
    repeated = [e for e in entries if e.kind == "charge" and e.payload["fork"] == 1]
    assert charged == 7
    assert repeated[0].payload["step"] == 4  # the last checkpoint
    assert verify(tmp_path / "run").ok


def test_a_fork_shares_no_noise_with_the_run_it_left(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, noise = step_module.noisy_mean, {}

    def watched(clipped: Any, mechanism: Any, keys: Any, **more: Any) -> Any:
        exact = {n: g.double() / mechanism.expected_batch_size for n, g in clipped.gradients.items()}
        private = original(clipped, mechanism, keys, **more)
        drawn = {n: g.double() - exact[n] for n, g in private.gradients.items()}
        noise.setdefault(more["step"], []).append(drawn)
        return private

    monkeypatch.setattr(step_module, "noisy_mean", watched)
    interrupt_run(tmp_path / "run", tiny_config(pictures), after=7)
    write_images(pictures, extra=synthetic_images(1)[0][0])
    resume_training(tmp_path / "run", allow_fork=True)
    twice = [draws for draws in noise.values() if len(draws) == 2]
    assert len(twice) == 3
    # Equal noise differs by the rounding of float32, which is below 2e-7 here. Independent noise, of standard deviation
    # 0.05, comes as near in three of 192 weights or of three biases with a chance below 1e-10.
    for one, other in twice:
        assert all(int(((one[n] - other[n]).abs() < 2e-7).sum()) < 3 for n in one)


def test_another_number_of_threads_is_a_fork(tmp_path: Path, pictures: Path) -> None:
    threads = torch.get_num_threads()
    interrupt_run(tmp_path / "run", tiny_config(pictures), after=7)
    try:
        torch.set_num_threads(threads + 1)
        resume_training(tmp_path / "run")
    finally:
        torch.set_num_threads(threads)
    entries = read_ledger(tmp_path / "run" / "release" / "ledger.jsonl")
    assert [e.payload["reason"] for e in entries if e.kind == "fork"] == ["changed: threads"]
    assert training_charges(tmp_path / "run") == 12


def test_a_weight_moved_by_hand_gets_no_certificate(tmp_path: Path, pictures: Path) -> None:
    session, _ = start_run(tiny_config(pictures), tmp_path / "run", seed=3, device="cpu")
    take_step(session)
    next(session.model.parameters()).data[0, 0] += 1e-3
    with pytest.raises(PrivacyError):
        write_release(session, outcome="stopped")
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
    session, _ = start_run(config, tmp_path / "run", seed=3, device="cpu")
    import copy

    twin = copy.deepcopy(session.model)
    images, labels = synthetic_images(60)
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


def test_the_certificate_names_the_owner_of_several_rows_as_the_unit(tmp_path: Path) -> None:
    images, labels = synthetic_images(60)
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
        resume_run(tmp_path, allow_fork=False, device="cpu")


def test_feature_constants_are_declared_and_never_those_of_the_private_pictures(tmp_path: Path) -> None:
    pictures = write_images(tmp_path / "cifar100-half.npz")
    options = {"image_size": SIDE, "standardise": "constants", "constants": "cifar100"}
    changes = {"model": {"name": "scatter_linear", "options": options}, "data": {"channels": 3}}
    with pytest.raises(ArgumentError, match="constants must come from other images"):
        train(tiny_config(pictures, **changes), run=tmp_path / "run", seed=1)
    assert not (tmp_path / "run").exists()
    other = pictures.rename(tmp_path / "scans.npz")
    result = train(tiny_config(other, **changes), run=tmp_path / "run", seed=1)
    declared = {item["what"]: item["how"] for item in result.certificate["declared"]}
    assert declared["feature constants"] == "computed from cifar100, which is declared public"


def test_figures_of_raw_weights_stand_beside_those_of_averaged_ones(tmp_path: Path, pictures: Path) -> None:
    averaged = train(tiny_config(pictures), run=tmp_path / "averaged", seed=3)
    with RunFolder.open(tmp_path / "averaged") as folder:
        checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None
    raw = {name.removeprefix("model/"): v for name, v in checkpoint.tensors.items() if name.startswith("model/")}
    released, test = load_model(tmp_path / "averaged"), load(pictures).test
    assert test is not None
    assert averaged.metrics["final"]["weights"] == "averaged"
    measured = evaluate(released.model, test, released.normalisation, parameters=raw)
    assert averaged.figures()["raw_weights"]["accuracy"] == measured.accuracy
    assert write_report(tmp_path / "averaged").is_file()
    plain = train(tiny_config(pictures, averaging={"kind": "none", "decay": None}), run=tmp_path / "raw", seed=3)
    assert "raw_weights" not in plain.figures()
