"""What a unit is called where nobody said whose files they are, and private pictures that are named as public too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpvision.config import DataConfig, parse_config
from dpvision.data.splits import load_splits, require_test_part
from dpvision.errors import ArgumentError
from dpvision.privacy.ledger import Ledger, read_ledger
from dpvision.privacy.randomness import Keys
from dpvision.release.build import ReleaseFacts, build_certificate
from dpvision.training.declarations import note_declarations
from dpvision.training.prepare import Prepared, prepare
from dpvision.training.start import ledger_header

KEYS = Keys.from_seed(5)
GAP = "A patient with several volumes: each volume counts as a unit of its own."
SIDE, SLICES = 16, 3


# ---- volumes of nobody in particular


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    """Eight files of four patients: the pattern finds the patient, the file alone does not."""
    nibabel: Any = pytest.importorskip("nibabel", reason="NIfTI is an optional extra")
    generator = np.random.default_rng(0)
    for kind, most in (("images", 200), ("masks", 2)):
        (tmp_path / kind).mkdir()
        for number in range(8):
            values = generator.integers(0, most, (SIDE, SIDE, SLICES)).astype(np.int16)
            path = tmp_path / kind / f"p{number // 2}_scan{number}.nii"
            nibabel.Nifti1Image(values, np.eye(4)).to_filename(path)
    return tmp_path


def prepared(folder: Path, **changes: Any) -> Prepared:
    data = {"source": str(folder / "images"), "masks": str(folder / "masks"), "image_size": SIDE, "window": (0, 200)}
    data |= {"holdout_fraction": 0.5, **changes}
    privacy = {"target_epsilon": 8.0, "num_units": 4, "delta": 1e-2, "expected_batch_size": 3.0, "steps": 2}
    model = {"name": "unet9", "options": {"width": 2}}
    return prepare(parse_config({"task": "segmentation", "data": data, "model": model, "privacy": privacy}), KEYS)


def certificate_of(made: Prepared, path: Path) -> dict[str, Any]:
    ledger = Ledger.create(path, ledger_header(made.config, "r", hand_seeded=False))
    note_declarations(ledger, made.config, made.splits)
    facts = ReleaseFacts(weights_sha256="a" * 64, config_sha256="b" * 64, data={}, software={})
    mechanism = made.config.mechanism
    return build_certificate(ledger=read_ledger(path), mechanism=mechanism, hand_seeded=False, release=facts)


def test_files_without_ids_of_patients_are_volumes_and_the_gap_is_named(volumes: Path, tmp_path: Path) -> None:
    made = prepared(volumes)
    assert (made.config.privacy.privacy_unit, made.config.data.units) == ("volume", "owners")
    assert made.config.data.rows_per_unit == 4
    assert made.splits.train.num_units + made.splits.test.num_units == 8
    certificate = certificate_of(made, tmp_path / "ledger.jsonl")
    assert certificate["privacy_unit"] == "volume"
    assert GAP in certificate["not_covered"]
    assert {"what": "privacy units", "how": "the name of each volume"} in certificate["declared"]
    assert [other["unit"].split(",")[0] for other in certificate["other_units"]] == [
        "one image of a volume that has several"
    ]


def test_where_a_pattern_names_the_patient_the_unit_is_a_patient_and_owns_its_volumes(
    volumes: Path, tmp_path: Path
) -> None:
    made = prepared(volumes, unit_pattern=r"(p\d)_")
    assert made.config.privacy.privacy_unit == "patient"
    assert made.splits.train.num_units + made.splits.test.num_units == 4
    assert GAP not in certificate_of(made, tmp_path / "ledger.jsonl")["not_covered"]


def test_slices_of_volumes_are_called_slices(volumes: Path) -> None:
    made = prepared(volumes, units="rows")
    assert (made.config.privacy.privacy_unit, made.config.data.units) == ("slice", "rows")


# ---- private pictures that are named as public ones


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Pictures in class folders: scans alone, split with both parts, half with a training part only; and two files."""
    for folder in ("scans", "scans-too", "split/train", "split/test", "half/train", "around/inner"):
        for name in ("a", "b"):
            (tmp_path / folder / name).mkdir(parents=True)
            for number in range(3):
                Image.new("L", (8, 8), 40 * number).save(tmp_path / folder / name / f"{number}.png")
    (tmp_path / "link").symlink_to(tmp_path / "scans")
    (tmp_path / "archive.npz").write_bytes(b"")
    (tmp_path / "other.npz").write_bytes(b"")
    return tmp_path


def overlap(place: Path, source: str, test: str, *, has_one: bool = False) -> None:
    require_test_part(DataConfig(source=str(place / source), test=str(place / test)), has_one=has_one)


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("scans", "scans"),
        ("scans", "scans/../scans"),
        ("scans", "link"),
        ("link", "scans"),
        ("scans", "scans/a"),
        ("scans", "."),
        ("around/inner", "around"),
        ("split", "split/train"),
        ("split", "split/train/a"),
        ("half", "half"),
        ("half", "half/train"),
        ("half/train", "half"),
        ("archive.npz", "archive.npz"),
        ("archive.npz", "."),
    ],
)
def test_private_pictures_are_no_public_test_however_they_are_named(place: Path, source: str, test: str) -> None:
    with pytest.raises(ArgumentError, match="test must name other images than the private ones"):
        overlap(place, source, test)


@pytest.mark.parametrize(
    ("source", "test", "has_one"),
    [
        ("scans", "scans-too", False),
        ("scans", "split/test", False),
        ("split", "split", True),
        ("split", "split/test", True),
        ("split/train", "split", False),
        ("split/train", "split/test", False),
        ("scans", "split", False),
        ("archive.npz", "archive.npz", True),
        ("archive.npz", "other.npz", False),
    ],
)
def test_other_pictures_and_a_part_of_their_own_may_be_named(
    place: Path, source: str, test: str, has_one: bool
) -> None:
    overlap(place, source, test, has_one=has_one)


def test_known_names_are_no_folders(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    require_test_part(DataConfig(source="mnist", test="mnist"), has_one=True)
    require_test_part(DataConfig(source="scans", test="mnist"), has_one=False)


@pytest.mark.parametrize("test", ["scans", "scans/a", "link", "."])
def test_a_run_is_refused_before_anything_is_shown(place: Path, test: str) -> None:
    data = {"source": str(place / "scans"), "test": str(place / test), "image_size": 8}
    config = parse_config({"data": data, "privacy": {"target_epsilon": 3.0}})
    with pytest.raises(ArgumentError, match="other images than the private ones"):
        load_splits(config, KEYS)
