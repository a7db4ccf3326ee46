"""The command line as a stranger uses it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from dicom_files import write_dicom
from dpvision.cli import app
from dpvision.release.verify import verify
from fixed_keys import numbered_secrets
from tiny_runs import synthetic_images, tiny_config, write_images

COMMANDS = ("train", "resume", "plan", "epsilon", "calibrate", "evaluate", "predict", "verify", "report", "check")
COMMANDS += ("models", "recipes", "reproduce", "sign", "keygen", "audit")


def dpvision(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(autouse=True)
def _same_secrets() -> Iterator[None]:
    """Of a few images or patients none might be held out."""
    with numbered_secrets("commands that train"):
        yield


@pytest.fixture
def class_folders(tmp_path: Path) -> Path:
    images, labels = synthetic_images(120)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = tmp_path / "scans" / f"class {label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.kron(image[0], np.ones((5, 4), np.uint8))).save(folder / f"{number}.png")
    return tmp_path / "scans"


@pytest.fixture
def tiny_run(tmp_path: Path) -> Path:
    config = tmp_path / "run.json"
    pictures = write_images(tmp_path / "pictures.npz")
    config.write_text(tiny_config(pictures).to_json())
    result = dpvision(*tiny_arguments(pictures), "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    return tmp_path / "run"


def tiny_arguments(pictures: Path) -> list[str]:
    text = f"train {pictures} --model linear --target-epsilon 4 --delta 1e-3 --steps 8 --expected-batch-size 20"
    return [*text.split(), "--learning-rate", "0.5", "--evaluations", "2"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = dpvision(command, "--help")
    assert result.exit_code == 0
    assert f"dpvision {command}" in result.output.replace("\n", " ")
    assert "Example" in result.output


def test_a_folder_of_class_folders_needs_nothing_but_a_target(class_folders: Path, tmp_path: Path) -> None:
    result = dpvision(
        "train", class_folders, "--target-epsilon", "3", "--steps", "5", "--json", "--output", tmp_path / "r"
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert 0 < figures["epsilon"] <= 3
    assert figures["delta"] < 1 / 108
    assert Path(figures["report"]).read_text().startswith("<!")
    assert verify(tmp_path / "r").ok
    for setting in ("model", "expected_batch_size", "delta", "optimizer", "clip_norm"):
        assert f"{setting} = " in result.stderr, "what was chosen must be said"
    assert "held out" in result.stderr


def test_a_named_test_folder_is_used_instead_of_a_held_out_part(class_folders: Path, tmp_path: Path) -> None:
    public = shutil.copytree(class_folders, tmp_path / "public")
    arguments = ("--target-epsilon", "3", "--steps", "3", "--test", public, "--output", tmp_path / "r")
    result = dpvision("train", class_folders, "--num-units", "119", *arguments)
    assert result.exit_code == 0, result.output
    assert "held out" not in result.stderr
    certificate = json.loads((tmp_path / "r" / "release" / "certificate.json").read_text())
    assert certificate["mechanism"]["num_units"] == 119


def test_a_run_can_be_evaluated_verified_reported_and_used(tiny_run: Path, class_folders: Path) -> None:
    evaluated = dpvision("evaluate", tiny_run, "--json")
    assert evaluated.exit_code == 0, evaluated.output
    figures = json.loads((tiny_run / "release" / "metrics.json").read_text())
    assert json.loads(evaluated.stdout)["accuracy"] == figures["final"]["accuracy"]
    assert dpvision("verify", tiny_run).exit_code == 0
    assert dpvision("report", tiny_run).exit_code == 0
    picture = next(class_folders.rglob("*.png"))
    predicted = dpvision("predict", tiny_run, picture, "--json")
    assert predicted.exit_code == 0, predicted.output
    (answer,) = json.loads(predicted.stdout)["predictions"]
    assert len(answer["probabilities"]) == len(json.loads(predicted.stdout)["class_names"])
    assert sum(answer["probabilities"]) == pytest.approx(1, abs=1e-5)  # float32
    assert answer["probability"] == max(answer["probabilities"])
    table = tiny_run.parent / "probabilities.csv"
    assert dpvision("predict", tiny_run, picture, "--csv", table).exit_code == 0
    head, row = (line.split(",") for line in table.read_text().splitlines())
    assert head == ["image", "class", *json.loads(predicted.stdout)["class_names"]]
    assert [float(value) for value in row[2:]] == answer["probabilities"]
    assert 1 / 3 <= answer["probability"] <= 1


def test_a_tampered_run_is_named_with_exit_code_1(tiny_run: Path) -> None:
    path = tiny_run / "release" / "certificate.json"
    path.write_text(path.read_text().replace('"epsilon": ', '"epsilon": 0.0001, "was": ', 1))
    result = dpvision("verify", tiny_run)
    assert result.exit_code == 1
    assert "certificate" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        "train",
        "train nowhere --target-epsilon 3",
        "train digits",
        "train digits --target-epsilon nan",
        "train digits --target-epsilon -1",
        "train digits --target-epsilon 3 --delta 2",
        "train digits --target-epsilon 3 --expected-batch-size 99999",
        "train digits --target-epsilon 3 --model nonsense",
        "train digits --target-epsilon 3 --model linear --option nonsense=1",
        "train digits --target-epsilon 3 --option novalue",
        "train digits --target-epsilon 3 --normalisation published --noise-multiplier 0.01",
        "train digits --target-epsilon 3 --clip-norm 1e308",
        "train digits --target-epsilon 3 --clip-norm 1e-300",
        "train digits --target-epsilon 3 --microbatch-size 100000000000000000000",
        "train --recipe nonsense",
        "train --config nowhere.toml",
        "resume nowhere",
        "evaluate nowhere",
        "predict nowhere picture.png",
        "report nowhere",
        "verify nowhere",
        "check nonsense",
        "check nowhere.py:make",
    ],
)
def test_nonsense_is_one_line_exit_code_2_and_nothing_written(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = dpvision(*arguments.split())
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_a_corrupt_picture_is_named_and_stops_the_run_or_is_skipped_and_counted(
    class_folders: Path, tmp_path: Path
) -> None:
    bad = class_folders / "class 0" / "bad.png"
    bad.write_bytes(b"\x89PNG nonsense")
    arguments = ("train", class_folders, "--target-epsilon", "3", "--steps", "2", "--output", tmp_path / "r")
    refused = dpvision(*arguments)
    assert refused.exit_code == 2
    assert "bad.png" in refused.stderr
    assert not (tmp_path / "r").exists()
    (class_folders / "class of none").mkdir()
    skipped = dpvision(*arguments, "--skip-bad")
    assert skipped.exit_code == 0, skipped.output
    assert "skipped 1" in skipped.stderr
    assert "no images of class of none: an empty folder is a class too." in " ".join(skipped.stderr.split())


def test_check_names_the_module_that_mixes_pictures(tmp_path: Path) -> None:
    code = "from torch import nn\n\n\ndef make():\n    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()\n"
    code += "    return nn.Sequential(*layers, nn.Linear(3600, 10))\n"
    (tmp_path / "mine.py").write_text(code)
    result = dpvision("check", f"{tmp_path / 'mine.py'}:make", "--json")
    assert result.exit_code == 1
    findings = json.loads(result.stdout)["findings"]
    assert any(finding["fatal"] and finding["module"].startswith("1") for finding in findings)
    (change,) = json.loads(result.stdout)["make_private_ready"]
    assert "GroupNorm" in change
    assert dpvision("check", "resnet9").exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_cleanly_and_the_run_can_go_on(tmp_path: Path, number: signal.Signals) -> None:
    pictures = write_images(tmp_path / "pictures.npz")
    long = [part if part != "8" else "4000" for part in tiny_arguments(pictures)]
    command = [sys.executable, "-m", "dpvision", *long, "--unsafe-seed", "1", "--output", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        ledger = tmp_path / "run" / "release" / "ledger.jsonl"
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not (ledger.exists() and ledger.read_bytes().count(b"\n") > 30):
            time.sleep(0.02)
        os.kill(process.pid, number)
        _, errors = process.communicate()
        assert process.returncode == 130, errors
    assert "dpvision resume" in errors
    assert verify(tmp_path / "run").ok
    charged = json.loads((tmp_path / "run" / "release" / "certificate.json").read_text())["steps_taken"]
    assert 20 <= charged < 4000


def test_a_reader_that_has_seen_enough_ends_a_list_without_a_word() -> None:
    command = [sys.executable, "-m", "dpvision", "recipes"]
    reader, writer = os.pipe()
    os.close(reader)  # before the command begins: it might be done before a later end is noticed
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1  # not 2: nothing was wrong with what was asked


@pytest.mark.parametrize("arguments", ["epsilon --steps abc", "nonsense", "train --target-epsilon", "epsilon --nope 3"])
def test_a_bad_flag_is_one_line_and_exit_code_2(arguments: str) -> None:
    command = [sys.executable, "-m", "dpvision", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, dpvision, dpvision.cli; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- the inputs people have

TINY = ("--model", "linear", "--image-size", "8", "--steps", "6", "--expected-batch-size", "6", "--threads", "1")


def test_a_run_from_dicom_protects_patients_and_says_what_has_no_epsilon(tmp_path: Path) -> None:
    pytest.importorskip("pydicom", reason="DICOM is an optional extra")
    for number in range(48):
        pixels = np.random.default_rng(number).integers(0, 1000, (8, 8)).astype(np.uint16) + 2000 * (number % 2)
        place = tmp_path / "scans" / ("well", "ill")[number % 2] / f"IM{number:04}"
        write_dicom(place, pixels, patient=f"P{number // 3}", RescaleSlope=1, RescaleIntercept=-1024)
    source, run = tmp_path / "scans", tmp_path / "run"
    flags = ("--target-epsilon", "8", "--num-units", "14", "--delta", "0.01", "--window", "-1024", "2000")
    trained = dpvision("train", source, *flags, *TINY, "--output", run, "--holdout", "0.3", "--anyway", "--json")
    assert trained.exit_code == 0, trained.output
    assert verify(run).ok
    page = (run / "release" / "certificate.md").read_text()
    first_screen = "\n".join(page.splitlines()[:15])
    assert "of one patient" in first_screen
    assert "**No epsilon for the test images:** 30% of the units, held out of training by a keyed draw" in first_screen
    released = "".join(path.read_text(errors="replace") for path in (run / "release").iterdir())
    assert "declared public: this run" not in page
    assert "IM0001" not in released
    assert '"P1"' not in released
    predicted = dpvision("predict", run, source / "ill" / "IM0001", "--json")
    assert json.loads(predicted.stdout)["predictions"][0]["class"] in ("well", "ill")
    assert dpvision("evaluate", run, "--test", source).exit_code == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("file,who\na.png,p1", "no column for the label"),
        ("file,label\na.png,well\nb.png,ill\nz.png,ill", "names 1 image missing below"),
        ("file,label\na.png,well", "has no row for 1 image"),
        ("file,label\na.png,well\nb.png,ill\nb.png,ill", "names 1 image in more than one row"),
        ("file,label,patient\na.png,well,p1\nb.png,ill,p1", "all 2 images have the same owner, p1"),
        ("file,label\na.png,well\n../b.png,ill", "names 1 file outside"),
        ("file,label\na.png,well\nb.png,rare", "labels that are no class: rare"),
    ],
)
def test_a_mistake_in_a_manifest_is_one_line_and_nothing_is_written(tmp_path: Path, rows: str, message: str) -> None:
    for name in ("a.png", "b.png"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / name)
    (tmp_path / "labels.csv").write_text(rows)
    run = tmp_path / "run"
    flags = ("--classes", "well,ill", "--target-epsilon", "8", "--num-units", "14", *TINY, "--output", run, "--anyway")
    result = dpvision("train", tmp_path / "labels.csv", *flags)
    assert result.exit_code == 2
    assert [line for line in result.output.splitlines() if "error:" in line] != []
    assert message in " ".join(result.output.split())
    assert not run.exists()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun with one process and --rdzv-id=tuesday, after a membership change: that counts as no restart."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "tuesday"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")


@pytest.mark.usefixtures("job")
def test_a_job_that_starts_again_continues_its_own_run(tmp_path: Path) -> None:
    command = [*tiny_arguments(write_images(tmp_path / "images.npz")), "--output", tmp_path / "run"]
    assert dpvision(*command).exit_code == 0
    weights = (tmp_path / "run/release/weights.safetensors").read_bytes()
    (tmp_path / "run/release/manifest.json").unlink()  # it was killed before the end
    again = dpvision(*command)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "run/release/weights.safetensors").read_bytes() == weights
    assert verify(tmp_path / "run").ok


@pytest.mark.usefixtures("job")
def test_a_job_does_not_continue_a_run_with_other_settings_or_of_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*tiny_arguments(write_images(tmp_path / "images.npz")), "--output", tmp_path / "run"]
    assert dpvision(*command).exit_code == 0
    other = dpvision(*command, "--clip-norm", "0.5")
    assert other.exit_code == 2
    assert "holds a run of this job with other settings" in other.output
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "wednesday")
    assert "must be a new or an empty folder" in dpvision(*command).output
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.delenv("RANK")
    assert "must be a new or an empty folder" in dpvision(*command).output


@pytest.mark.parametrize("command", ["tune digits --budget 3", "audit RUN", "plan --num-units 100 --target-epsilon 3"])
def test_commands_that_share_no_work_are_refused_under_torchrun(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = dpvision(*command.split())
    assert result.exit_code == 2
    assert "runs in one process, and there are 2: start it without torchrun" in result.output
