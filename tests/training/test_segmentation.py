"""Segmentation from pictures and masks to a certificate: patients as units, slices as units, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from dpvision import models
from dpvision.cli import app
from dpvision.config import Performance, parse_config
from dpvision.data import ImageBatches, ImageStore, fixed_normalisation, store_of_arrays
from dpvision.data.splits import limit_rows, load_splits
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum_of_batch
from dpvision.models.losses import loss_for
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.randomness import Keys
from dpvision.release.verify import verify
from dpvision.storage.run_folder import RunFolder
from dpvision.training import resume_training, train
from dpvision.training.defaults import Facts, fill_open_settings
from dpvision.training.prepare import name_units
from dpvision.training.start import start_run
from tiny_masks import SIDE, discs, tiny_mask_config, write_discs
from tiny_runs import interrupt_run

NAMES = ("background", "foreground")


@pytest.fixture
def slices(tmp_path: Path) -> Path:
    return write_discs(tmp_path / "slices.npz")


def released(run: Path, name: str) -> bytes:
    return (run / "release" / name).read_bytes()


# ---- a whole run


def test_a_private_run_over_patients_trains_resumes_bit_for_bit_and_verifies(tmp_path: Path, slices: Path) -> None:
    config = tiny_mask_config(slices)
    whole = train(config, run=tmp_path / "whole", seed=3)
    interrupt_run(tmp_path / "cut", config, after=3)
    assert resume_training(tmp_path / "cut").outcome == "finished"
    assert released(tmp_path / "cut", "weights.safetensors") == released(tmp_path / "whole", "weights.safetensors")
    assert released(tmp_path / "cut", "ledger.jsonl") == released(tmp_path / "whole", "ledger.jsonl")
    assert verify(tmp_path / "whole").ok

    assert whole.certificate["privacy_unit"] == "patient"
    assert whole.metrics["task"] == "segmentation"
    final = json.loads(released(tmp_path / "whole", "metrics.json"))["final"]
    assert 0 <= final["dice"] <= 1
    assert 0 < final["baseline_dice"] < 1
    # The test part came with the data, and nobody named it as public: patients have numbers, not their names.
    assert set(final["per_patient"]) == {"1", "2", "3", "4"}
    curve = whole.metrics["curve"][-1]
    assert set(curve) == {"step", "epsilon", "dice", "iou", "dice_per_patient", "loss", "raw"}
    assert whole.figures()["dice"] == final["dice"]
    resolved = parse_config(released(tmp_path / "whole", "config.json").decode())
    assert resolved.loss == "dice_cross_entropy"
    assert resolved.data.rows_per_unit == 4


def test_a_fork_can_not_change_who_is_protected(tmp_path: Path, slices: Path) -> None:
    interrupt_run(tmp_path / "run", tiny_mask_config(slices), after=3)
    with RunFolder.open(tmp_path / "run") as folder:
        config = parse_config(folder.read_whole_config())
        data = config.data.model_copy(update={"units": "rows"})
        folder.write_whole_config(config.model_copy(update={"data": data}).to_json())
    with pytest.raises(PrivacyError, match="units"):
        resume_training(tmp_path / "run", allow_fork=True)


def test_an_ordinary_run_learns_discs(tmp_path: Path, slices: Path) -> None:
    """The same path without noise: it must beat the best constant mask."""
    config = tiny_mask_config(
        slices, privacy={"enabled": False, "steps": 40, "expected_batch_size": 10.0}, data={"units": "rows"}
    )
    final = train(config, run=tmp_path / "run", seed=1).metrics["final"]
    assert final["dice"] > final["baseline_dice"] + 0.1


def test_slices_as_units_say_what_they_do_not_protect_and_bounded_owners_get_a_figure(
    tmp_path: Path, slices: Path
) -> None:
    config = tiny_mask_config(
        slices, data={"units": "rows"}, privacy={"num_units": 20, "most_rows_per_owner": 2, "steps": 2}
    )
    owners = list(load_splits(config, Keys.from_seed(0)).train.owners or ())
    assert max(owners.count(owner) for owner in set(owners)) == 2
    certificate = train(config, run=tmp_path / "run", seed=1).certificate
    assert certificate["privacy_unit"] == "slice"
    assert any("owns several slices" in text for text in certificate["not_covered"])
    declared = {item["what"]: item["how"] for item in certificate["declared"]}
    assert "column patient" in declared["privacy units"]
    assert declared["rows of an owner"].startswith("at most 2")
    (other,) = certificate["other_units"]
    assert other["epsilon"] > certificate["epsilon"]
    assert verify(tmp_path / "run").ok


@pytest.mark.slow
def test_several_classes_have_a_map_each_and_names_of_held_out_patients_stay_at_home(tmp_path: Path) -> None:
    images, masks = discs(40, classes=2)
    owners = np.array([f"Mustermann-{row // 2}" for row in range(40)])
    np.savez(tmp_path / "slices.npz", images=images, masks=masks, patient=owners)
    data = {"holdout_fraction": 0.4, "mask_classes": "classes"}
    config = tiny_mask_config(tmp_path / "slices.npz", data=data, privacy={"num_units": 12, "steps": 2})
    final = train(config, run=tmp_path / "run", seed=1).metrics["final"]
    assert len(final["per_class"]) == 2
    assert list(final["per_patient"]) == [str(place) for place in range(1, len(final["per_patient"]) + 1)]
    for file in (tmp_path / "run" / "release").iterdir():
        assert b"Mustermann" not in file.read_bytes(), file.name


# ---- one patient's influence, through the real draws and the real loss


def patients_store(slices_of: list[int], *, blind: bool = False) -> ImageStore:
    """So many slices of each patient; what a patient's slices show does not depend on the others."""
    parts = [discs(count, seed=patient) for patient, count in enumerate(slices_of)]
    images, masks = (np.concatenate(each) for each in zip(*parts, strict=True))
    last = np.repeat(np.arange(len(slices_of)), slices_of) == len(slices_of) - 1
    if blind:  # the last patient is as unlike the others as can be
        images[last], masks[last] = 255, 0
    owners = [str(patient) for patient, count in enumerate(slices_of) for _ in range(count)]
    return store_of_arrays(images=images[:, None], labels=masks, class_names=NAMES, name="slices", unit_names=owners)


def test_one_patient_with_any_number_of_slices_moves_the_sum_by_at_most_clip_norm() -> None:
    clip_norm, loss = 0.05, loss_for("segmentation", "dice_cross_entropy", 2)
    mechanism = Mechanism(
        num_units=6, expected_batch_size=6.0, clip_norm=clip_norm, noise_multiplier=1.0, steps=3, privacy_unit="patient"
    )
    model = models.create("unet9", num_classes=1, in_channels=1, seed=0, width=2, head="conv")

    def clipped(store: ImageStore) -> Tensor:
        draws = ImageBatches(
            mechanism=mechanism,
            store=store,
            normalisation=fixed_normalisation(1),
            keys=Keys.from_seed(5),
            rows_per_unit=3,
        )
        found = clipped_sum_of_batch(model, loss, draws.batch(1), clip_norm=clip_norm, performance=Performance())
        return torch.cat([value.flatten() for value in found.gradients.values()])

    without = clipped(patients_store([2, 1, 4]))
    assert float(without.norm()) > clip_norm  # patients are clipped here, and each gives its share
    for count in (1, 3, 40):
        for blind in (False, True):
            moved = float((clipped(patients_store([2, 1, 4, count], blind=blind)) - without).norm())
            assert 0 < moved <= clip_norm * (1 + 1e-5)


# ---- units and their rows


def words_of(store: ImageStore, **changes: Any) -> tuple[str | None, int | None]:
    config = name_units(tiny_mask_config(Path("slices.npz"), **changes), store)
    return config.privacy.privacy_unit, config.data.rows_per_unit


def test_units_are_patients_where_they_are_known_and_slices_only_when_asked() -> None:
    store = patients_store([2, 3])
    assert words_of(store) == ("patient", 4)
    assert words_of(store, data={"units": "rows"}) == ("slice", 1)
    assert words_of(store, data={"rows_per_unit": 2}, privacy={"privacy_unit": "animal"}) == ("animal", 2)
    assert words_of(replace(store, owners=None)) == ("example", 1)
    for changes in (
        {"data": {"units": "rows"}, "privacy": {"privacy_unit": "patient"}},
        {"privacy": {"privacy_unit": "slice"}},
    ):
        with pytest.raises(ArgumentError, match="privacy_unit"):
            words_of(store, **changes)


def slice_store(slices_of: list[int]) -> ImageStore:
    store = patients_store(slices_of)
    return replace(store, unit_of_row=torch.arange(store.num_rows))


def test_an_owner_gives_no_more_rows_than_declared_and_moves_nobody_elses() -> None:
    config = tiny_mask_config(Path("slices.npz"), data={"units": "rows"}, privacy={"most_rows_per_owner": 3})
    few = limit_rows(slice_store([2, 5]), config)
    many = limit_rows(slice_store([2, 5, 40]), config)
    assert list(few.owners or ()) == ["0"] * 2 + ["1"] * 3
    assert list(many.owners or ()) == ["0"] * 2 + ["1"] * 3 + ["2"] * 3
    assert torch.equal(many.images[: few.num_rows], few.images)
    assert many.num_units == many.num_rows == 8


@pytest.mark.parametrize("data", [{"units": "auto"}, {"units": "rows", "unit_column": None}])
def test_a_bound_on_the_rows_of_owners_needs_owners_who_are_not_the_units(
    tmp_path: Path, slices: Path, data: dict[str, Any]
) -> None:
    config = tiny_mask_config(slices, data=data, privacy={"most_rows_per_owner": 3})
    with pytest.raises(ArgumentError, match="most_rows_per_owner is for runs whose units are rows"):
        train(config, run=tmp_path / "run", seed=1)
    assert not (tmp_path / "run").exists()


# ---- what is refused, and what is chosen


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"data": {"source": "s", "masks": "m"}}, "task=segmentation"),
        ({"data": {"source": "s"}, "loss": "dice"}, "cross_entropy"),
        ({"data": {"source": "s"}, "task": "detection"}, "task"),
        ({"data": {"source": "s"}, "task": "segmentation", "transfer": {"weights": "w"}}, "all or last"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        parse_config({"privacy": {"target_epsilon": 1.0}, **values})


@pytest.mark.parametrize(("task", "model"), [("segmentation", "resnet9"), ("classification", "unet9")])
def test_a_model_of_the_other_task_is_refused_by_name(task: str, model: str) -> None:
    config = parse_config(
        {"task": task, "data": {"source": "s"}, "model": {"name": model}, "privacy": {"target_epsilon": 1.0}}
    )
    with pytest.raises(ArgumentError, match=f"one for {task}, got {model}"):
        fill_open_settings(config, Facts(num_units=100, num_classes=2, image_shape=(1, 32, 32)))


@pytest.mark.parametrize("num_units", [4, 26, 1700, 50_000])
def test_open_settings_of_segmentation_are_filled(num_units: int) -> None:
    config = parse_config({"task": "segmentation", "data": {"source": "s"}, "privacy": {"target_epsilon": 3.0}})
    filled, choices = fill_open_settings(config, Facts(num_units=num_units, num_classes=2, image_shape=(1, 64, 64)))
    assert filled.model is not None
    assert models.entry(filled.model.name).family == "segmentation"
    assert filled.loss == "dice_cross_entropy"
    assert filled.privacy.expected_batch_size is not None
    assert 0 < filled.privacy.expected_batch_size <= num_units / 2
    assert {"model", "loss", "expected_batch_size", "steps"} <= {choice.setting for choice in choices}


def test_pictures_that_can_not_be_halved_four_times_are_refused_before_anything_is_written(
    tmp_path: Path, slices: Path
) -> None:
    with pytest.raises(ArgumentError, match="multiples of 16"):
        start_run(tiny_mask_config(slices, data={"image_size": 20}), tmp_path / "run", seed=1, device="cpu")
    assert not (tmp_path / "run").exists()


def test_the_command_line_takes_pictures_and_masks(tmp_path: Path) -> None:
    images, masks = discs(12)
    for row in range(12):
        name = f"p{row // 2}_{row}.png"
        part = "test-" if row >= 8 else ""
        for folder, pixels in (("images", images[row]), ("masks", 255 * masks[row])):
            (tmp_path / f"{part}{folder}").mkdir(exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / f"{part}{folder}" / name)
    small = ["--model", "linknet9", "--option", "width=2", "--option", "head=conv", "--image-size", str(SIDE)]
    plan = ["--steps", "2", "--expected-batch-size", "3", "--evaluations", "1", "--unsafe-seed", "1", "--json"]
    places = [str(tmp_path / "images"), str(tmp_path / "masks"), "--unit-pattern", "^(p[0-9]+)_"]
    public = ["--test", str(tmp_path / "test-images"), "--test-masks", str(tmp_path / "test-masks")]
    command = ["train", "--task", "segmentation", *places, "--target-epsilon", "3", "--anyway", *small, *plan, *public]
    done = CliRunner().invoke(app, [*command, "--num-units", "4", "--output", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["privacy_unit"] == "patient"
    assert 0 <= figures["dice"] <= 1
