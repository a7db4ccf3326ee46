"""A released model from Python: load it, give it files, arrays or tensors, get every probability or masks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dpvision
from bright_model import bright_model
from dpvision.errors import DPVisionError
from dpvision.training import train
from released_models import released_model
from tiny_runs import SIDE, synthetic_images, tiny_config, write_images


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("load")
    train(tiny_config(write_images(root / "images.npz")), run=root / "run")
    return root / "run"


def test_files_arrays_and_tensors_give_the_same_probabilities(run: Path, tmp_path: Path) -> None:
    pixels, _ = synthetic_images(5, seed=2)
    files = [tmp_path / f"{number}.png" for number in range(5)]
    for path, image in zip(files, pixels, strict=True):
        Image.fromarray(image[0]).save(path)
    model = dpvision.load(run)
    expected = model.predict(files)
    assert expected.probabilities.shape == (5, 3)
    assert np.allclose(expected.probabilities.sum(1), 1)
    assert expected.classes == tuple(expected.class_names[row.argmax()] for row in expected.probabilities)
    assert expected.names == tuple(str(path) for path in files)
    ways: list[Any] = [
        tmp_path,
        [str(path) for path in files],
        pixels,
        pixels.transpose(0, 2, 3, 1),
        torch.from_numpy(pixels),
        [image[0] for image in pixels],
        [torch.from_numpy(image) for image in pixels],
        [Image.open(path) for path in files],
        pixels / 255,
        np.repeat(pixels, 3, axis=1),  # grey in colour
    ]
    for way in ways:
        assert np.abs(model.predict(way).probabilities - expected.probabilities).max() < 1e-6
    assert model.predict(pixels[0, 0]).names == ("0",)


def test_images_of_other_sizes_are_prepared_as_in_training(run: Path, tmp_path: Path) -> None:
    model = dpvision.load(run)
    large = np.kron(synthetic_images(1)[0][0, 0], np.ones((4, 4), dtype=np.uint8))  # every pixel a block
    Image.fromarray(large).save(tmp_path / "large.png")
    of_file = model.predict(tmp_path / "large.png").probabilities
    mixed = model.predict([large, np.zeros((SIDE, 2 * SIDE), dtype=np.uint8)])
    assert mixed.probabilities.shape == (2, 3)
    assert np.abs(mixed.probabilities[0] - of_file[0]).max() < 0.02  # Pillow and torch round differently


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "no images given"),
        (np.zeros((0, 1, SIDE, SIDE), dtype=np.uint8), "no images given"),
        (np.zeros(3), "images must be"),
        (np.full((1, SIDE, SIDE, 1), np.nan), r"must be numbers in 0\.\.1"),
        (np.full((1, SIDE, SIDE, 1), 7.0), r"must be numbers in 0\.\.1"),
        (np.zeros((1, 5, SIDE, SIDE), dtype=np.uint8), "images must be"),
        ([np.zeros((2, 1, SIDE, SIDE), dtype=np.uint8)] * 2, "each of several images must be"),
        (["a.png", np.zeros((SIDE, SIDE), dtype=np.uint8)], "files or arrays, not both"),
        ("not-there.png", "not-there.png does not exist"),
        (None, "images must be"),
    ],
)
def test_nonsense_is_refused_in_one_line(run: Path, images: Any, message: str) -> None:
    with pytest.raises(DPVisionError, match=message) as refusal:
        dpvision.load(run).predict(images)
    assert "\n" not in str(refusal.value)


def test_a_copy_of_the_release_under_any_name_is_enough(run: Path, tmp_path: Path) -> None:
    pixels, _ = synthetic_images(4)
    expected = dpvision.load(run).predict(pixels).probabilities
    for place in (run / "release", shutil.copytree(run / "release", tmp_path / "from the hub")):
        assert np.array_equal(dpvision.load(place).predict(pixels).probabilities, expected)


def test_findings_hold_each_by_itself() -> None:
    released = released_model("linear", side=8, findings=True)
    found = released.predict(np.random.default_rng(0).integers(0, 256, size=(6, 1, 8, 8), dtype=np.uint8))
    for present, text, row in zip(found.found, found.classes, found.probabilities, strict=True):
        assert present == tuple(name for name, p in zip(found.class_names, row, strict=True) if p >= 0.5)
        assert text == (", ".join(present) or "none")
    assert not np.allclose(found.probabilities.sum(1), 1)


def test_a_segmentation_model_gives_masks_at_the_size_of_each_image(tmp_path: Path) -> None:
    pixels = np.zeros((48, 96), dtype=np.uint8)
    pixels[:, 48:] = 255
    Image.fromarray(pixels).save(tmp_path / "scan.png")
    model = bright_model()
    for images in (tmp_path / "scan.png", [tmp_path / "scan.png"], pixels, [pixels]):
        found = model.predict(images)
        (mask,) = found.masks
        assert mask.shape == (48, 96)
        assert np.array_equal(mask[:, 24:72], pixels[:, 24:72] > 0)  # what the model saw: the square in the middle
        assert found.probabilities.shape == (0, 2)


def test_bad_files_are_named_or_skipped_when_asked(run: Path, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((SIDE, SIDE), dtype=np.uint8)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    for model in (dpvision.load(run), bright_model()):
        with pytest.raises(DPVisionError, match=r"1 of 2 .*bad\.png"):
            model.predict(tmp_path)
        found = model.predict(tmp_path, skip_bad=True)
        assert len(found.names) == 1
        assert found.skipped[0][0].endswith("bad.png")
