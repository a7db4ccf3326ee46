"""Images that are given in Python train as those of a file do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import dpvision
from dpvision.data import load
from dpvision.errors import DataError, PrivacyError
from dpvision.release.verify import verify
from dpvision.training import resume_training, train
from tiny_runs import StopAfter, synthetic_images, tiny_config, write_images

NAMES = np.array(["left", "middle", "right"])
IMAGES, LABELS = synthetic_images(60)
TEST = synthetic_images(30, seed=1)


def given(**more: Any) -> dict[str, Any]:
    return {"x_train": IMAGES, "y_train": LABELS, "x_test": TEST[0], "y_test": TEST[1], **more}


def named(tmp_path: Path, **changes: Any) -> dpvision.RunConfig:
    return tiny_config(Path("my scans"), **changes)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "release" / "weights.safetensors")


class Scans(torch.utils.data.Dataset[Any]):
    """As torchvision's datasets: PIL images, and the names of the classes."""

    classes = ("left", "middle", "right")

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        return Image.fromarray(IMAGES[row, 0]), int(LABELS[row])


def test_arrays_give_the_same_model_as_their_file_and_certify_their_name(tmp_path: Path) -> None:
    train(tiny_config(write_images(tmp_path / "images.npz")), run=tmp_path / "file", seed=1)
    for number, data in enumerate((given(), {k: torch.from_numpy(v) for k, v in given().items()})):
        run = tmp_path / f"given {number}"
        result = train(named(tmp_path), run=run, seed=1, data=data)
        assert result.certificate["data"]["source"] == "my scans"
        assert verify(run).problems == ()
        assert result.metrics["final"]["accuracy"] > 0.5
        # The keys are bound to the configuration, which names another source: other noise, the same shapes.
        assert weights(run).keys() == weights(tmp_path / "file").keys()


def test_a_dataset_with_named_classes_is_read_and_a_part_held_out(tmp_path: Path) -> None:
    # An empty part, which is refused, has a chance of 0.6 ** 60: below 1e-13.
    config = named(tmp_path, data={"holdout_fraction": 0.4})
    result = train(config, run=tmp_path / "run", data=Scans())
    assert result.certificate["data"]["class_names"] == ["left", "middle", "right"]
    assert verify(tmp_path / "run").ok


def test_owners_of_given_rows_are_units(tmp_path: Path) -> None:
    owners = np.arange(60) // 3
    config = named(tmp_path, data={"unit_column": "patient"}, privacy={"num_units": 20, "expected_batch_size": 8.0})
    result = train(config, run=tmp_path / "run", data=given(patient=owners))
    assert result.certificate["privacy_unit"] == "owner"


def test_a_run_on_given_data_resumes_with_the_same_data_exactly(tmp_path: Path) -> None:
    train(named(tmp_path), run=tmp_path / "whole", seed=3, data=given())
    for name in ("same", "other"):
        with pytest.raises(ConnectionAbortedError):
            train(named(tmp_path), run=tmp_path / name, seed=3, data=given(), callback=StopAfter(6))
    resume_training(tmp_path / "same", data=given())
    whole, again = weights(tmp_path / "whole"), weights(tmp_path / "same")
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    changed = IMAGES.copy()
    changed[0, 0, 0, 0] += 1
    with pytest.raises(PrivacyError, match="data of this run changed"):
        resume_training(tmp_path / "other", data=given(x_train=changed))
    with pytest.raises(DataError, match="my scans"):
        resume_training(tmp_path / "other")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((IMAGES, LABELS), "texts named class_names"),
        ("images.npz", "got str"),
        (7, "got int"),
        ([IMAGES[0], IMAGES[1]], "pair of an image and its label"),
        ([(IMAGES[0], 1), (IMAGES[0, :, 1:], 2)], "do not have the same shape"),
        ({"x_train": IMAGES}, "no array named"),
    ],
)
def test_other_data_is_refused_in_one_line(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        train(named(tmp_path), run=tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


def test_splits_of_another_source_are_not_given_as_data(tmp_path: Path) -> None:
    """A private .npz under the name of a public dataset would have that one's public test images and size."""
    splits = load(write_images(tmp_path / "images.npz"))
    with pytest.raises(DataError, match="name their source instead"):
        train(tiny_config(Path("digits")), run=tmp_path / "run", data=splits)
    assert not (tmp_path / "run").exists()


def test_given_data_is_not_called_like_another_source(tmp_path: Path) -> None:
    path = write_images(tmp_path / "images.npz")
    for name in (path, Path("mnist")):
        with pytest.raises(DataError, match="names another source"):
            train(tiny_config(name), run=tmp_path / "run", data=given(class_names=NAMES))
