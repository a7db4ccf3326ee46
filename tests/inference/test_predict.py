"""Masks of a released model: right, at the picture's own size, inside their folder, all of them or none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner, Result

from bright_model import bright_model
from dpvision.cli import app
from dpvision.data.splits import load_splits
from dpvision.errors import DPVisionError
from dpvision.inference.predict import at_own_size, write_masks
from dpvision.privacy.randomness import Keys
from dpvision.release.report import write_report
from dpvision.release.statements import SHOWN_IMAGES
from dpvision.release.verify import verify
from dpvision.storage.run_folder import EXAMPLES, parse_examples
from dpvision.training import train
from tiny_masks import discs, tiny_mask_config, write_discs


def dpvision(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def save_picture(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


def bright_square(height: int = 48, width: int = 48) -> np.ndarray:
    pixels = np.zeros((height, width), dtype=np.uint8)
    pixels[height // 3 : 2 * height // 3, width // 3 : 2 * width // 3] = 255
    return pixels


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(1, 12))
def test_a_mask_gets_the_size_of_its_picture_and_no_other_classes(h: int, w: int, rows: int, columns: int) -> None:
    small = np.random.default_rng(h * w).integers(0, 3, size=(rows, columns), dtype=np.uint8)
    large = at_own_size(small, h, w)
    assert large.shape == (h, w)
    assert large.dtype == np.uint8
    assert set(np.unique(large)) <= {0, *np.unique(small)}


@pytest.mark.parametrize("factor", [1, 2, 5])
def test_each_pixel_of_a_mask_becomes_a_block(factor: int) -> None:
    small = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert np.array_equal(at_own_size(small, 3 * factor, 4 * factor), np.kron(small, np.ones((factor, factor))))


def test_what_the_model_did_not_see_is_background() -> None:
    large = at_own_size(np.ones((4, 4), dtype=np.uint8), 10, 30)
    assert large[:, 10:20].all()
    assert not large[:, :10].any()
    assert not large[:, 20:].any()


@pytest.mark.parametrize(("height", "width"), [(48, 48), (96, 96), (48, 80)])
def test_a_picture_gives_a_black_and_white_mask_of_its_own_size(tmp_path: Path, height: int, width: int) -> None:
    pixels = np.zeros((height, width))
    pixels[:, width // 2 :] = 255
    picture = save_picture(tmp_path / "scan.png", pixels)
    (file,), skipped = write_masks(bright_model(), [picture], tmp_path / "out")
    assert skipped == []
    mask = np.asarray(Image.open(tmp_path / "out" / "scan_mask.png"))
    assert mask.shape == (height, width)
    seen = slice((width - height) // 2, (width + height) // 2)
    assert np.array_equal(mask[:, seen], pixels[:, seen])
    assert file.shares == {"class 1": pytest.approx((mask > 0).mean())}


def test_more_classes_are_written_as_their_numbers(tmp_path: Path) -> None:
    pixels = np.repeat(np.array([[20] * 4 + [110] * 8 + [240] * 4]), 16, axis=0)
    (file,), _ = write_masks(bright_model(classes=3), [save_picture(tmp_path / "a.png", pixels)], tmp_path / "out")
    assert np.unique(np.asarray(Image.open(file.path))).tolist() == [0, 1, 2]
    assert file.shares == {"class 1": 0.5, "class 2": 0.25}


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_volume_gives_a_volume_of_the_same_shape_and_place(tmp_path: Path, suffix: str) -> None:
    nibabel = pytest.importorskip("nibabel")
    affine = np.diag([-0.8, 1.5, 3.0, 1.0])
    affine[:3, 3] = 10, -20, 30
    voxels = np.zeros((32, 5, 32), dtype=np.int16)  # slices lie along axis 1
    for number in range(5):
        voxels[4 * number : 4 * number + 8, number, 8:16] = 90
    nibabel.save(nibabel.Nifti1Image(voxels, affine), tmp_path / f"scan{suffix}")
    (file,), _ = write_masks(bright_model(), [tmp_path / f"scan{suffix}"], tmp_path / "out")
    mask = nibabel.load(tmp_path / "out" / f"scan_mask{suffix}")
    assert np.array_equal(mask.affine, nibabel.load(tmp_path / f"scan{suffix}").affine)
    assert mask.get_data_dtype() == np.uint8
    assert np.array_equal(np.asarray(mask.dataobj), voxels > 0)
    assert file.shares["class 1"] == pytest.approx((voxels > 0).mean())


def test_the_same_volume_gives_the_same_bytes_and_keeps_no_texts_of_its_header(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    image = nibabel.Nifti1Image(np.full((16, 3, 16), 90, np.int16), np.eye(4))
    image.header["descrip"] = b"Jane Doe"
    nibabel.save(image, tmp_path / "scan.nii.gz")
    contents = [write_masks(bright_model(), [tmp_path / "scan.nii.gz"], tmp_path / out)[0][0].content for out in "ab"]
    assert contents[0] == contents[1]
    assert bytes(nibabel.load(tmp_path / "a" / "scan_mask.nii.gz").header["descrip"].tobytes()).strip(b"\0") == b""


def test_a_window_may_be_named_for_volumes(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(np.full((16, 3, 16), 90, np.int16), np.eye(4)), tmp_path / "scan.nii")
    found = {}
    for window in ((0.0, 100.0), (0.0, 1000.0)):
        model = bright_model().with_window(window)
        (file,), _ = write_masks(model, [tmp_path / "scan.nii"], tmp_path / "out", force=True)
        found[window] = file.shares["class 1"]
    assert found == {(0.0, 100.0): 1.0, (0.0, 1000.0): 0.0}
    with pytest.raises(DPVisionError, match="window must be"):
        write_masks(bright_model().with_window((5.0, 5.0)), [tmp_path / "scan.nii"], tmp_path / "out", force=True)


def test_folders_keep_their_shape_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    for name in ("in/a/1.png", "in/b/1.png", "in/2.png", "in/.3.png"):
        save_picture(tmp_path / name, bright_square())
    (tmp_path / "in" / "notes.txt").write_text("no picture")
    write_masks(bright_model(), [tmp_path / "in"], tmp_path / "out")
    assert files_below(tmp_path / "out") == ["2_mask.png", "a/1_mask.png", "b/1_mask.png"]


def test_nothing_is_replaced_unless_asked(tmp_path: Path) -> None:
    pictures = [save_picture(tmp_path / f"{number}.png", bright_square()) for number in range(2)]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "1_mask.png").write_bytes(b"somebody's work")
    with pytest.raises(DPVisionError, match=r"exist already.*--force"):
        write_masks(bright_model(), pictures, tmp_path / "out")
    assert files_below(tmp_path / "out") == ["1_mask.png"]
    assert (tmp_path / "out" / "1_mask.png").read_bytes() == b"somebody's work"
    write_masks(bright_model(), pictures, tmp_path / "out", force=True)
    assert np.asarray(Image.open(tmp_path / "out" / "1_mask.png")).max() == 255


def test_one_bad_picture_and_nothing_is_written(tmp_path: Path) -> None:
    good = save_picture(tmp_path / "good.png", bright_square())
    bad = tmp_path / "bad.png"
    bad.write_bytes(good.read_bytes()[:60])
    volume = tmp_path / "bad.nii.gz"
    volume.write_bytes(b"\x1f\x8b nothing")
    with pytest.raises(DPVisionError, match=r"2 of 3 files can't be read.*bad.png.*Nothing was written"):
        write_masks(bright_model(), [good, bad, volume], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    files, skipped = write_masks(bright_model(), [good, bad, volume], tmp_path / "out", skip_bad=True)
    assert [file.path.name for file in files] == ["good_mask.png"]
    assert [Path(name).name for name, _ in skipped] == ["bad.png", "bad.nii.gz"]
    assert files_below(tmp_path / "out") == ["good_mask.png"]


def test_two_masks_of_one_name_are_refused(tmp_path: Path) -> None:
    twins = [save_picture(tmp_path / folder / "1.png", bright_square()) for folder in "ab"]
    with pytest.raises(DPVisionError, match=r"would both give 1_mask.png"):
        write_masks(bright_model(), twins, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_link_leads_out_of_the_folder(tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "sub" / "1.png", bright_square())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sub").symlink_to(elsewhere)
    with pytest.raises(DPVisionError, match=r"leads out of"):
        write_masks(bright_model(), [tmp_path / "in"], tmp_path / "out", force=True)
    target = tmp_path / "kept.txt"
    target.write_text("kept")
    (tmp_path / "out" / "2_mask.png").symlink_to(target)
    write_masks(bright_model(), [save_picture(tmp_path / "2.png", bright_square())], tmp_path / "out", force=True)
    assert target.read_text() == "kept"
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("given", ["absent.png", "empty-folder", "out-is-a-file"])
def test_what_can_not_be_done_is_one_line(tmp_path: Path, given: str) -> None:
    (tmp_path / "empty-folder").mkdir()
    save_picture(tmp_path / "1.png", bright_square())
    (tmp_path / "file").write_text("")
    source, folder = (tmp_path / "1.png", "file") if given == "out-is-a-file" else (tmp_path / given, "out")
    with pytest.raises(DPVisionError) as caught:
        write_masks(bright_model(), [source], tmp_path / folder)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run on discs with a public test set; runs and data are only read."""
    folder = tmp_path_factory.mktemp("masks")
    source = write_discs(folder / "discs.npz", test_patients=6)
    train(tiny_mask_config(source, data={"test": str(source)}), run=folder / "run")
    return folder / "run"


def without_test_part(path: Path) -> Path:
    """The same file with training data alone."""
    arrays = {name: array for name, array in np.load(path).items() if not name.startswith("test_")}
    np.savez(path, **arrays)
    return path


def test_the_command_writes_masks_and_prints_shares(run: Path, tmp_path: Path) -> None:
    picture = save_picture(tmp_path / "a\x1b[31m.png", discs(1)[0][0])
    done = dpvision("predict", run, picture, "--output", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    (answer,) = json.loads(done.stdout)["masks"]
    assert Path(answer["mask"]).is_file()
    assert answer["shares"].keys() == {"foreground"}
    again = dpvision("predict", run, picture, "--output", tmp_path / "out")
    assert again.exit_code == 2
    assert "exist already" in again.stderr
    forced = dpvision("predict", run, picture, "--output", tmp_path / "out", "--force")
    assert forced.exit_code == 0
    assert "\x1b" not in forced.stdout + again.stderr
    assert "foreground" in forced.stdout


def test_a_model_that_draws_masks_needs_a_folder(run: Path, tmp_path: Path) -> None:
    picture = save_picture(tmp_path / "a.png", bright_square())
    done = dpvision("predict", run, picture)
    assert done.exit_code == 2
    assert "--output" in done.stderr
    assert files_below(tmp_path) == ["a.png"]


def test_evaluation_gives_the_figures_of_the_release(run: Path) -> None:
    released: dict[str, Any] = json.loads((run / "release" / "metrics.json").read_text())["final"]
    own = json.loads(dpvision("evaluate", run, "--json").stdout)
    named = json.loads(dpvision("evaluate", run, "--test", run.parent / "discs.npz", "--json").stdout)
    for name in ("dice", "iou", "dice_per_patient", "per_patient", "baseline_dice"):
        assert own[name] == released[name] == named[name]
    words = dpvision("evaluate", run).stdout
    assert f"{released['dice']:.2%}" in words
    assert "patients" in words


def test_evaluation_on_other_pictures_and_masks(run: Path, tmp_path: Path) -> None:
    images, masks = discs(4, seed=5)
    for number, (image, mask) in enumerate(zip(images, masks, strict=True)):
        save_picture(tmp_path / "scans" / f"{number}.png", image)
        save_picture(tmp_path / "masks" / f"{number}.png", mask * 255)
    done = dpvision("evaluate", run, "--test", tmp_path / "scans", "--test-masks", tmp_path / "masks", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["count"] == 4
    alone = dpvision("evaluate", run, "--test-masks", tmp_path / "masks")
    assert alone.exit_code == 2
    assert "--test" in alone.stderr


def test_a_named_test_set_gives_examples_that_are_declared_and_verified(run: Path) -> None:
    manifest = json.loads((run / "release" / "manifest.json").read_text())
    assert EXAMPLES in manifest
    certificate = json.loads((run / "release" / "certificate.json").read_text())
    assert SHOWN_IMAGES in {entry["what"] for entry in certificate["declared"]}
    shown = parse_examples((run / "release" / EXAMPLES).read_bytes(), name=EXAMPLES)
    public = np.load(run.parent / "discs.npz")["test_images"]
    assert {each.rank for each in shown} == {"best", "median", "worst"}
    assert all((each.image_CHW[0] == public).all((1, 2)).any() for each in shown)
    assert verify(run).ok
    assert write_report(run).read_text().count("<img ") == len(shown)
    assert verify(run).ok


def test_held_out_patients_are_figures_and_no_pictures(tmp_path: Path) -> None:
    source = without_test_part(write_discs(tmp_path / "discs.npz", patients=20))
    config = tiny_mask_config(source, data={"holdout_fraction": 0.4}, privacy={"steps": 1}, evaluations=1)
    train(config, run=tmp_path / "run", seed=1)  # of 20 patients none might be held out
    assert not (tmp_path / "run" / "release" / EXAMPLES).exists()
    page = write_report(tmp_path / "run").read_text()
    assert "<img " not in page
    assert "No image is shown" in page


@pytest.mark.parametrize("other_name", ["discs.npz", "./sub/../discs.npz"])
def test_private_pictures_are_not_taken_for_public_ones(tmp_path: Path, other_name: str) -> None:
    (tmp_path / "sub").mkdir()
    source = without_test_part(write_discs(tmp_path / "discs.npz"))
    with pytest.raises(DPVisionError, match="other images than the private ones"):
        train(tiny_mask_config(source, data={"test": str(tmp_path / other_name)}), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_test_part_of_the_same_file_may_be_named(tmp_path: Path) -> None:
    source = write_discs(tmp_path / "discs.npz")
    config = tiny_mask_config(source, data={"test": str(source)})
    pictures = load_splits(config, Keys.from_seed(0))
    assert np.array_equal(pictures.test.images[:, 0].numpy(), np.load(source)["test_images"])
    assert not pictures.held_out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(DPVisionError, match=r"can't write"):
        write_masks(bright_model(), [save_picture(tmp_path / "1.png", bright_square())], tmp_path / "out")
