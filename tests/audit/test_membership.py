"""Membership inference on finished runs, and what the command does with its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dpvision.audit import (
    AUDIT_FILE,
    attach_audits,
    check_mechanism,
    loss_attack,
    mechanism_document,
    membership_document,
    shadow_attack,
    sides_of,
    subject_of_run,
)
from dpvision.cli import app
from dpvision.errors import ArgumentError
from dpvision.inference.load import load_model
from dpvision.privacy.randomness import Keys
from dpvision.release.verify import verify
from dpvision.training import train
from fixed_keys import numbered_secrets
from tiny_runs import CLASSES, SIDE, tiny_config


def dpvision(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def noise_file(path: Path) -> Path:
    """Pictures without any pattern: whatever a model knows of them, it has learned by heart."""
    generator = np.random.default_rng(0)
    arrays = {}
    for name, count in (("train", 60), ("test", 60)):
        arrays[f"x_{name}"] = generator.integers(0, 256, size=(count, 1, SIDE, SIDE), dtype=np.uint8)
        arrays[f"y_{name}"] = np.arange(count) % CLASSES
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def private_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("private")
    # The key hangs on the data's path too, so that no two runs of this test draw the same noise: much of it.
    config = tiny_config(noise_file(folder / "noise.npz"), privacy={"noise_multiplier": 8.0})
    train(config, run=folder / "run", seed=1)
    return folder / "run"


@pytest.fixture(scope="module")
def ordinary_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ordinary")
    privacy = {"enabled": False, "noise_multiplier": None, "delta": None, "clip_norm": None, "steps": 60}
    config = tiny_config(noise_file(folder / "noise.npz"), privacy=privacy, checkpoint_every=60)
    train(config, run=folder / "run", seed=1)
    return folder / "run"


def attacked(run: Path) -> Any:
    released = load_model(run)
    return loss_attack(released, sides_of(run, released, members=None, others=None))


def test_a_model_that_learned_by_heart_gives_its_members_away(ordinary_run: Path) -> None:
    found = attacked(ordinary_run)
    assert found.whole.area_low > 0.7
    assert (found.whole.members, found.whole.others) == (60, 60)
    assert set(found.by_class) == {"0", "1", "2"}


def test_a_private_model_gives_little_away(private_run: Path) -> None:
    assert attacked(private_run).whole.area_low < 0.7  # 0.43 ± 0.05 over 40 runs; 0.81 ± 0.01 without privacy


def test_members_and_others_that_are_named_are_read_from_there(ordinary_run: Path) -> None:
    released = load_model(ordinary_run)
    file = str(ordinary_run.parent / "noise.npz")
    sides = sides_of(ordinary_run, released, members=file, others=file)
    assert loss_attack(released, sides).whole.area == 0.5  # the same pictures on both sides


def test_shadows_attack_better_than_guessing_and_leave_nothing_behind(ordinary_run: Path) -> None:
    released = load_model(ordinary_run)
    sides = sides_of(ordinary_run, released, members=None, others=None)
    before = sorted(ordinary_run.rglob("*"))
    heard: list[str] = []
    found = shadow_attack(ordinary_run, sides, shadows=4, private=False, keys=Keys.from_seed(0), say=heard.append)
    assert found.whole.area_low > 0.6
    assert heard[-1] == "shadow 4 of 4"
    assert sorted(ordinary_run.rglob("*")) == before


def test_an_odd_number_of_shadows_is_refused(private_run: Path) -> None:
    released = load_model(private_run)
    with pytest.raises(ArgumentError, match="even"):
        shadow_attack(private_run, sides_of(private_run, released, members=None, others=None), shadows=3)


def test_the_command_keeps_attack_figures_in_private_and_the_release_as_it_was(private_run: Path) -> None:
    before = {p: p.read_bytes() for p in (private_run / "release").rglob("*") if p.is_file()}
    result = dpvision("audit", private_run, "--json")
    assert result.exit_code == 0, result.output
    (document,) = json.loads(result.stdout)["audits"]
    assert document["attacks"][0]["members"] == 60
    assert 0.1 < document["most_true_positives"]["0.1"] <= 1
    assert "don't publish" in document["does_not_show"]
    assert "don't publish" in result.stderr
    assert json.loads((private_run / "private" / "unsafe_membership.json").read_text()) == document
    assert {p: p.read_bytes() for p in (private_run / "release").rglob("*") if p.is_file()} == before


def test_attack_figures_can_not_be_attached_to_a_release(private_run: Path) -> None:
    document = membership_document([attacked(private_run)], load_model(private_run).certificate)
    with pytest.raises(ArgumentError, match="not for release"):
        attach_audits(private_run, [document])
    assert not (private_run / "release" / AUDIT_FILE).exists()


def test_audits_on_made_up_pictures_are_attached_and_verified(private_run: Path) -> None:
    subject = subject_of_run(private_run)
    checks = check_mechanism(subject, keys=Keys.from_seed(0), draws=2000, pairs=1)
    attach_audits(private_run, [mechanism_document(subject, checks)])
    # An audit of correct code is suspicious once in a thousand times.
    with numbered_secrets("audits on made-up pictures"):
        result = dpvision("audit", private_run, "--canaries", "60")
    assert result.exit_code == 0, result.output
    assert "could have been refuted" in result.stdout
    file = private_run / "release" / AUDIT_FILE
    kinds = [audit["kind"] for audit in json.loads(file.read_text())["audits"]]
    assert kinds == ["mechanism", "canaries, white box"]
    certificate = json.loads((private_run / "release" / "certificate.json").read_text())
    assert [attachment["name"] for attachment in certificate["attachments"]] == [AUDIT_FILE]
    assert not verify(private_run).problems
    file.write_text(file.read_text().replace('"passed": true', '"passed": false'))
    assert any(AUDIT_FILE in str(problem) for problem in verify(private_run).problems)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name one of"),
        (("--model", "linear"), "say what to audit"),
        (("--model", "linear", "--recipe", "demo", "--mechanism"), "name one of"),
        (("--model", "no-such", "--mechanism"), "catalogue"),
        (("--recipe", "demo", "--option", "a=1", "--mechanism"), "belongs to --model"),
        (("no-such-folder",), "run folder"),
        (("some-run", "--mechanism", "--members", "x"), "belong to the attack"),
        (("some-run", "--black-box"), "--black-box needs --canaries"),
        (("some-run", "--mechanism", "--confidence", "0.9"), "--confidence needs --canaries"),
        (("some-run", "--mechanism", "--epsilons", "8"), "--epsilons needs --reconstruction"),
        (("some-run", "--ordinary-shadows"), "--ordinary-shadows needs --shadows"),
        (("--reconstruction", "digits", "--shadows", "3"), "leave out --shadows"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    result = dpvision("audit", *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
