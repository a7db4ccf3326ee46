"""N and N + 1 units: everything public is the same bytes, and the clipped sum moves by at most one clip norm."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from dpvision.cli import app
from dpvision.config import Performance, parse_config
from dpvision.data import Normalisation, ViewsConfig, load
from dpvision.data.options import LoadOptions
from dpvision.models.losses import loss_for
from dpvision.privacy.clipping import Clipper
from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.privacy.randomness import Keys
from dpvision.release.statements import COUNTED_UNITS
from dpvision.release.verify import verify
from dpvision.training.prepare import count_charges, count_units
from tiny_runs import SIDE, synthetic_images, write_images
from tools.neighbours import ALLOWED, CHANNELS, CLASSES, Found, Setting, experiment, try_setting

EXTRA = np.full((1, SIDE, SIDE), 201, dtype=np.uint8)
GIVEN = ("--target-epsilon", 8, "--steps", 3, "--model", "linear", "--option", "image_size=8", "--unsafe-seed", 5)


# ---- the clipped sum


def test_random_neighbours_stay_within_the_sensitivity() -> None:
    found = experiment(pairs=40, seed=4, pairs_per_setting=8, say=lambda text: None)
    assert not found.failures
    assert found.pairs == 40
    assert found.joined >= 10
    assert 0.9 < found.farthest <= ALLOWED, "hardly anybody was clipped: this would show little"


@pytest.mark.slow
def test_many_random_neighbours_stay_within_the_sensitivity() -> None:
    found = experiment(pairs=3000, seed=5)
    assert not found.failures
    assert len(found.kinds) == 6, "every way of clipping, with and without native kernels"


def test_the_same_experiment_notices_a_clip_that_is_a_little_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Clipper.factors

    def longer(self: Clipper, *arguments: Any) -> Any:
        factors, *rest = real(self, *arguments)
        return {name: factor * (1 + 3e-5) for name, factor in factors.items()}, *rest

    monkeypatch.setattr(Clipper, "factors", longer)
    found, loss = Found(), loss_for("classification", "cross_entropy", CLASSES)
    setting = Setting(
        name="linear",
        network=nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * 8 * 8, CLASSES)),
        loss=loss,
        per_pixel=False,
        clip_norm=0.01,
        clipping="flat",
        rows_per_unit=1,
        views=ViewsConfig(),
        performance=Performance(),
        normalisation=Normalisation(mean=(0.5,) * CHANNELS, std=(0.3,) * CHANNELS, source="fixed"),
        sample_rate=1.0,
    )
    try_setting(setting, random.Random(0), found, pairs=5)
    assert len(found.failures) == 5
    assert found.farthest > ALLOWED


# ---- everything public


def as_npz(folder: Path, *, more: bool, test: bool = True) -> Path:
    folder.mkdir()
    path = write_images(folder / "scans.npz", extra=EXTRA if more else None)
    if not test:
        with np.load(path) as arrays:
            kept = {name: arrays[name] for name in ("x_train", "y_train")}
        np.savez(path, **kept, class_names=np.array(["0", "1", "2"]))
    return path


def as_folders(folder: Path, *, more: bool) -> Path:
    root = folder / "scans"
    for number, (image, label) in enumerate(zip(*synthetic_images(60), strict=True)):
        place = root / f"class{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(place / f"{number:03}.png")
    if more:  # in the middle of the sorted names
        Image.fromarray(EXTRA[0]).save(root / "class1" / "020b.png")
    return root


def as_patients(folder: Path, *, more: bool) -> Path:
    path = as_npz(folder, more=more)
    with np.load(path) as arrays:
        values = dict(arrays)
    owners = [f"p{row // 3}" for row in range(60)] + (["new"] if more else [])
    np.savez(path, **values, patient=np.array(owners), patient_test=np.array([f"t{row}" for row in range(30)]))
    return path


def trained(source: Path, run: Path, *more: object) -> tuple[int, dict[str, Any]]:
    """The exit code of the command, and everything public of the run that must not depend on one unit."""
    arguments = ["train", source, *GIVEN, *more, "--output", run, "--json"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    certificate = json.loads((run / "release" / "certificate.json").read_bytes())
    figures = json.loads(done.stdout)
    ledger = read_ledger(run / "release" / "ledger.jsonl")
    names = sorted(path.relative_to(run).as_posix() for path in run.rglob("*"))
    changing = {"ledger", "weights_sha256", "attachments"}
    return done.exit_code, {
        "files": [name.split("-")[0] + name.split("-")[1] if "step-" in name else name for name in names],
        "ledger": [
            (entry.kind, {name: value for name, value in entry.payload.items() if name not in changing})
            for entry in ledger
        ],
        "config": (run / "release" / "config.json").read_bytes().replace(str(source).encode(), b""),
        "certificate": {name: value for name, value in certificate.items() if name not in changing},
        "figures": {name: figures[name] for name in ("epsilon", "epsilon_rdp", "delta", "steps", "outcome")},
    }


def same_for_neighbours(tmp_path: Path, make: Any, *given: object, **options: Any) -> dict[str, Any]:
    found = [
        trained(make(tmp_path / name, more=more, **options), tmp_path / f"run {name}", *given)
        for name, more in (("n", False), ("n+1", True))
    ]
    (code, facts), (code_too, facts_too) = found
    assert code == code_too == 0
    for name in facts:
        assert facts[name] == facts_too[name], name
    return facts


def test_one_picture_more_changes_nothing_public_of_an_archive(tmp_path: Path) -> None:
    facts = same_for_neighbours(tmp_path, as_npz, "--num-units", 60, "--expected-batch-size", 20)
    assert facts["certificate"]["mechanism"]["num_units"] == 60
    assert sum(kind == "charge" for kind, _ in facts["ledger"]) == 3


def test_one_picture_more_changes_nothing_public_where_all_of_them_are_drawn(tmp_path: Path) -> None:
    facts = same_for_neighbours(tmp_path, as_npz, "--num-units", 60, "--expected-batch-size", 60)
    charges = [payload for kind, payload in facts["ledger"] if kind == "charge"]
    assert {payload["sample_rate"] for payload in charges} == {1.0}


def test_one_picture_more_changes_nothing_public_where_a_part_is_held_out(tmp_path: Path) -> None:
    same_for_neighbours(tmp_path, as_npz, "--num-units", 54, test=False)


def test_one_file_more_in_the_middle_of_a_folder_changes_nothing_public(tmp_path: Path) -> None:
    same_for_neighbours(tmp_path, as_folders, "--num-units", 54, "--image-size", 8)


def test_one_patient_more_changes_nothing_public(tmp_path: Path) -> None:
    given = ("--num-units", 20, "--unit-column", "patient", "--privacy-unit", "patient", "--rows-per-unit", 2)
    facts = same_for_neighbours(tmp_path, as_patients, *given)
    assert facts["certificate"]["privacy_unit"] == "patient"


# ---- a number of units that nobody declared


def test_a_number_of_units_that_nobody_declared_is_counted_with_noise_and_charged(tmp_path: Path) -> None:
    _, facts = trained(as_npz(tmp_path / "n", more=False), tmp_path / "run")
    (kind, header), (first_kind, first), *_ = facts["ledger"]
    assert (kind, first_kind) == ("header", "charge"), "the header gives the number away: its charge comes with it"
    assert first == {"fork": 0, "step": 0, "purpose": COUNTED_UNITS, "sample_rate": 1.0, "noise_multiplier": 45 / 8}
    assert header["num_units"] == facts["certificate"]["mechanism"]["num_units"]
    charged = {item["purpose"]: item for item in facts["certificate"]["charged"]}
    assert charged[COUNTED_UNITS]["count"] == 1
    assert facts["certificate"]["epsilon"] <= 8
    assert verify(tmp_path / "run").ok


def counted(source: Path, seed: int, **privacy: Any) -> Any:
    store = load(str(source), LoadOptions()).train
    config = parse_config({"data": {"source": str(source)}, "privacy": {"target_epsilon": 3.0, **privacy}})
    return count_units(config, store, Keys.from_seed(seed))


def test_the_noise_on_the_count_is_the_one_that_is_charged(tmp_path: Path) -> None:
    path = as_npz(tmp_path / "n", more=False)
    store = load(str(path), LoadOptions()).train
    config = parse_config(
        {"data": {"source": str(path)}, "privacy": {"target_epsilon": 3.0, "count_noise_multiplier": 7.0}}
    )
    found = [count_units(config, store, Keys.from_seed(seed))[0].privacy.num_units for seed in range(3000)]
    off = np.array(found, dtype=np.float64) - 60
    # 60 of 99 is rounded to whole numbers only; above 99 two digits are kept, 5.6 deviations away.
    assert abs(off.mean()) < 5 * 7 / math.sqrt(3000)
    assert abs(off.std() / 7 - 1) < 5 / math.sqrt(6000)  # 6.5 %, false alarm 6e-7
    ((event, count),) = count_charges(count_units(config, store, Keys.from_seed(0))[0])
    assert (event.noise_multiplier, event.sample_rate, count) == (7.0, 1.0, 1)


def test_a_declared_number_a_published_dataset_and_a_run_without_privacy_are_not_counted(tmp_path: Path) -> None:
    path = as_npz(tmp_path / "n", more=False)
    for privacy in ({"num_units": 77}, {"enabled": False, "num_units": None}):
        config, choices = counted(path, 0, **privacy)
        assert config.privacy.num_units == privacy["num_units"]
        assert not choices
        assert not count_charges(config)
    published = parse_config({"data": {"source": "digits"}, "privacy": {"target_epsilon": 3.0}})
    config, _ = count_units(published, load(str(path), LoadOptions()).train, Keys.from_seed(0))
    assert config.privacy.num_units is None


def test_a_count_is_never_below_the_batch_that_was_asked_for(tmp_path: Path) -> None:
    path = as_npz(tmp_path / "n", more=False)
    found = {counted(path, seed, expected_batch_size=58.5)[0].privacy.num_units for seed in range(40)}
    assert min(found) == 59, "some counts came out smaller, and were raised to the batch"
    assert len(found) > 5


def test_a_count_noise_for_a_declared_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a declared number needs no noise"):
        counted(as_npz(tmp_path / "n", more=False), 0, num_units=60, count_noise_multiplier=5.0)


def test_the_ledger_of_a_counted_run_is_charged_even_if_the_run_dies_at_once(tmp_path: Path) -> None:
    """Header and charge are one write: there is no moment at which only the number is on disk."""
    _, _ = trained(as_npz(tmp_path / "n", more=False), tmp_path / "run")
    content = (tmp_path / "run" / "release" / "ledger.jsonl").read_bytes()
    first_two = tmp_path / "first.jsonl"
    first_two.write_bytes(b"".join(content.splitlines(keepends=True)[:2]))
    ((event, count),) = charges_of(read_ledger(first_two))
    assert (event.purpose, count) == (COUNTED_UNITS, 1)
