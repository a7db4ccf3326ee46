"""Exports: the outputs of the model, in a file without private facts, from a release that verifies, or nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors import safe_open
from typer.testing import CliRunner, Result

import dpvision
from dpvision import models
from dpvision.cli import app
from dpvision.errors import ArgumentError, DPVisionError, PrivacyError, TamperError
from dpvision.exports import formats
from dpvision.exports.formats import converted
from dpvision.storage.files import sha256_of
from dpvision.training import train
from released_models import released_model
from tiny_masks import tiny_mask_config, write_discs
from tiny_runs import SIDE, tiny_config, write_images

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

FACTS = {"format": "a test"}
WHITENED = {"name": "scatter_linear", "options": {"image_size": SIDE, "standardise": "whitened", "pool": 2}}
OWN = """
from torch import nn

def make(num_classes, image_size):
    print("executed")
    return nn.Sequential(nn.Flatten(), nn.Linear(image_size**2, num_classes))  # my secret design
"""
# Blocks imports as if neither package were there, then runs a script.
WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs: a linear model, the model of the default run, an own model."""
    root = tmp_path_factory.mktemp("runs")
    images = write_images(root / "images.npz")
    train(tiny_config(images), run=root / "linear")
    train(tiny_config(images, model=WHITENED), run=root / "whitened")
    (root / "own.py").write_text(OWN)
    train(tiny_config(images, model={"name": f"{root / 'own.py'}:make", "options": None}), run=root / "own")
    return root


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of segmentation."""
    root = tmp_path_factory.mktemp("masks")
    train(tiny_mask_config(write_discs(root / "discs.npz"), evaluations=1), run=root / "run")
    return root / "run"


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """A linear run that a test may damage."""
    return Path(shutil.copytree(runs / "linear", tmp_path / "run"))


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["export", *(str(each) for each in arguments)])


def run_without(blocked: set[str], code: str, folder: Path) -> str:
    script = WITHOUT.format(blocked=blocked) + code
    (folder / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Every model of the catalogue

SMALL: list[tuple[str, dict[str, Any]]] = [
    ("shoefit_cnn", {"side": 8}),
    ("unet9", {"side": 16, "width": 2}),
]
# Networks without normalisation take any image size: small images save time and memory, and the graph is the same.
LARGER: list[tuple[str, dict[str, Any]]] = [
    *((entry.name, {"side": 32} if entry.name.startswith("nf") else {}) for entry in models.catalogue()),
    ("scatter_linear", {"standardise": "whitened", "pool": 4}),
    ("scatter_linear", {"standardise": "whitened", "pool": 3, "side": 28}),
    ("scatter_linear", {"standardise": "whitened", "pool": 7, "side": 64}),
    ("scatter_linear", {"fine": True}),
    ("scatter_linear", {"standardise": "constants", "constants": "cifar100"}),
    ("scatter_cnn", {"norm_groups": 4, "layer_norm": True}),
    ("efficientnet_lite0", {"side": 32, "resize_to": 112}),
    ("vgg16_conv3", {"side": 8, "resize_to": 12}),
]


@pytest.mark.parametrize(("name", "options"), SMALL, ids=[name for name, _ in SMALL])
def test_a_small_model_of_a_family_gives_the_same_outputs_in_onnxruntime(name: str, options: dict[str, Any]) -> None:
    _, difference = converted(released_model(name, **options), to="onnx", facts=FACTS)
    assert difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "torch-export", "safetensors"])
@pytest.mark.parametrize(("name", "options"), LARGER, ids=[f"{name}-{len(options)}" for name, options in LARGER])
def test_every_model_of_the_catalogue_exports(name: str, options: dict[str, Any], to: Any) -> None:
    _, difference = converted(released_model(name, **options), to=to, facts=FACTS)
    assert difference < 1e-4


def test_an_export_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    released = released_model("linear", side=8)
    traced = formats._traced

    def slightly_wrong(graph: Any, *rest: Any) -> Any:
        with torch.no_grad():
            next(graph.parameters()).mul_(1.002)
        return traced(graph, *rest)

    monkeypatch.setattr(formats, "_traced", slightly_wrong)
    with pytest.raises(DPVisionError, match="does not give the model's outputs: probabilities differ by"):
        converted(released, to="torch-export", facts=FACTS)


# The default run, without dpvision and without torch


def run_snippet(run: Path, folder: Path) -> tuple[list[str], np.ndarray]:
    """Export, then execute the code of the card without dpvision and torch; the classes and numbers that it prints."""
    card = (run / "release" / "model_card.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(snippet.splitlines()) <= 9
    assert dpvision.export(run, output=folder / "model.onnx").largest_difference < 1e-5
    noise = np.random.default_rng(3).integers(0, 256, size=(40, 30), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "image.png")
    exact = "import numpy, sys\nnumpy.set_printoptions(precision=9, threshold=sys.maxsize)\n"
    shown = run_without({"dpvision", "torch"}, exact + snippet, folder)
    classes, _, numbers = shown.partition("]")
    return json.loads(f"{classes}]"), np.array([float(n) for n in re.findall(r"[\d.]+(?:e-?\d+)?", numbers)])


def test_the_snippet_of_the_card_runs_without_dpvision_and_torch(runs: Path, tmp_path: Path) -> None:
    classes, numbers = run_snippet(runs / "whitened", tmp_path)
    expected = dpvision.load(runs / "whitened").predict(tmp_path / "image.png")
    assert classes == list(expected.class_names)
    assert np.abs(numbers - expected.probabilities[0]).max() < 1e-4


@pytest.mark.slow
def test_the_snippet_of_a_segmentation_gives_the_mask(masks: Path, tmp_path: Path) -> None:
    classes, numbers = run_snippet(masks, tmp_path)
    fitted = ImageOps.fit(Image.open(tmp_path / "image.png"), (16, 16), Image.Resampling.BILINEAR)
    expected = dpvision.load(masks).predict(np.asarray(fitted)).masks[0]
    assert classes == ["background", "foreground"]
    assert np.array_equal(numbers.reshape(16, 16), expected)


@pytest.mark.slow
def test_a_torch_export_runs_without_dpvision(runs: Path, tmp_path: Path) -> None:
    dpvision.export(runs / "linear", to="torch-export", output=tmp_path / "model.pt2")
    code = (
        "import torch, json\nprogram = torch.export.load('model.pt2', extra_files=(files := {'dpvision.json': ''}))\n"
        "probabilities, logits = program.module()(torch.zeros(5, 1, 8, 8, dtype=torch.uint8))\n"
        "print(probabilities.shape, json.loads(files['dpvision.json'])['classes'])"
    )
    assert run_without({"dpvision"}, code, tmp_path) == 'torch.Size([5, 3]) ["0", "1", "2"]\n'


def test_safetensors_hold_the_fixed_features_and_the_facts(runs: Path, tmp_path: Path) -> None:
    made = dpvision.export(runs / "whitened", to="safetensors", output=tmp_path / "model.safetensors")
    released = dpvision.load(runs / "whitened")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names, metadata = set(file.keys()), file.metadata()
    assert names > set(released.model.state_dict())
    assert any(name.endswith("whitening_CPP") for name in names)
    assert json.loads(metadata["dpvision"]) == dict(made.facts)


# What the file says, and what it must not say


def test_an_onnx_file_says_its_guarantee_its_classes_and_its_release(runs: Path, tmp_path: Path) -> None:
    made = dpvision.export(runs / "linear", output=tmp_path / "model.onnx")
    again = dpvision.export(runs / "linear", output=tmp_path / "again.onnx")
    assert made.path.read_bytes() == again.path.read_bytes()
    session = onnxruntime.InferenceSession(made.path)
    facts = session.get_modelmeta().custom_metadata_map
    certificate = json.loads((runs / "linear" / "release" / "certificate.json").read_text())
    assert float(facts["epsilon"]) == certificate["epsilon"]
    assert float(facts["delta"]) == certificate["delta"]
    assert facts["weights_sha256"] == certificate["weights_sha256"]
    assert facts["release_sha256"] == sha256_of(runs / "linear" / "release" / "manifest.json")
    assert json.loads(facts["classes"]) == ["0", "1", "2"]
    assert "not_for_release" not in facts
    assert [(each.name, each.type, each.shape[1:]) for each in session.get_inputs()] == [
        ("images", "tensor(uint8)", [1, 8, 8])
    ]
    for count in (1, 2, 7):
        probabilities, _ = session.run(None, {"images": np.zeros((count, 1, 8, 8), dtype=np.uint8)})
        assert probabilities.shape == (count, 3)


PUBLIC_FACTS = {
    "format",
    "task",
    "model",
    "classes",
    "image_shape",
    "preprocessing",
    "normalisation",
    "probabilities",
    "epsilon",
    "delta",
    "adjacency",
    "privacy_unit",
    "release_sha256",
    "weights_sha256",
    "dpvision",
}


@pytest.mark.parametrize("to", ["onnx", "torch-export", "safetensors"])
def test_an_export_holds_no_counts_keys_paths_or_source_code(runs: Path, tmp_path: Path, to: Any) -> None:
    made = dpvision.export(runs / "own", to=to, output=tmp_path / "model", model=f"{runs / 'own.py'}:make")
    assert set(made.facts) == PUBLIC_FACTS
    content = made.path.read_bytes()
    key = json.loads((runs / "own" / "private" / "key.json").read_text())
    secrets = [value for value in key.values() if isinstance(value, str) and len(value) >= 16]
    assert secrets
    unwanted = ["num_units", "my secret design", "executed", str(runs), "images.npz", "stack_trace", "site-packages"]
    for text in [*unwanted, *secrets]:
        assert text.encode() not in content, text


def test_a_run_that_must_not_be_released_says_so_in_its_export(runs: Path, tmp_path: Path) -> None:
    train(tiny_config(runs / "images.npz"), run=tmp_path / "seeded", seed=3)
    made = command(tmp_path / "seeded", "--to", "safetensors", "--output", tmp_path / "a.safetensors")
    assert made.exit_code == 0, made.output
    assert "Not for release: " in made.stdout
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert json.loads(json.loads(file.metadata()["dpvision"])["not_for_release"])


# Refusals: one line, and nothing is written


def flip_weights(release: Path) -> None:
    content = bytearray((release / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (release / "weights.safetensors").write_bytes(bytes(content))


def claim_less(release: Path) -> None:
    text = (release / "certificate.json").read_text()
    (release / "certificate.json").write_text(re.sub(r'"epsilon": [\d.]+', '"epsilon": 0.1', text, count=1))


def rename_class(release: Path) -> None:
    text = (release / "certificate.json").read_text()
    (release / "certificate.json").write_text(
        text.replace('"class_names": [\n      "0"', '"class_names": [\n      "x"')
    )


def drop_ledger(release: Path) -> None:
    (release / "ledger.jsonl").unlink()


@pytest.mark.parametrize("damage", [flip_weights, claim_less, rename_class, drop_ledger])
@pytest.mark.parametrize("to", ["onnx", "safetensors"])
def test_a_release_that_does_not_verify_is_not_exported(
    run: Path, tmp_path: Path, damage: Callable[[Path], None], to: Any
) -> None:
    damage(run / "release")
    with pytest.raises(TamperError, match="is not a release that can be relied on"):
        dpvision.export(run, to=to, output=tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("to", ["torch-export", "safetensors"])
def test_nothing_is_left_behind_where_the_comparison_fails(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    monkeypatch.setattr(formats, "_distance", lambda *_: float("nan"))
    with pytest.raises(DPVisionError, match="Nothing was written"):
        dpvision.export(runs / "linear", to=to, output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_own_code_is_named_again_and_compared_before_it_runs(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ArgumentError, match="own code, and a run folder holds none"):
        dpvision.export(runs / "own", to="torch-export", output=tmp_path / "model")
    (tmp_path / "own.py").write_text(OWN.replace("# my", "# another"))
    with pytest.raises(PrivacyError, match="is not the source that was meant"):
        dpvision.export(runs / "own", to="torch-export", output=tmp_path / "model", model=f"{tmp_path / 'own.py'}:make")
    assert "executed" not in capsys.readouterr().out
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "onxx"], "Did you mean onnx?"),
        (["--to", "monai-bundle"], "a MONAI bundle is for segmentation"),
        (["--output", "RUN/model.onnx"], "--output must lie outside the run's own folder"),
        (["--output", "RUN/release/model.onnx"], "--output must lie outside the run's own folder"),
        (["--output", "taken"], "taken exists already. Choose another --output, or replace it with --force."),
        (["--output", "folder", "--force"], "folder exists already. Choose another --output."),
        (["--model", "own.py:make"], "which is not own code"),
    ],
)
def test_a_wrong_call_is_one_line_and_writes_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = command(run, *(each.replace("RUN", "run") for each in arguments))
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "taken").read_text() == "mine"


def test_force_replaces_a_file_and_the_default_name_is_the_runs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("run.safetensors").write_text("old")
    done = command(tmp_path / "run", "--to", "safetensors", "--force", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["export"] == "run.safetensors"
    copied = shutil.copytree(run / "release", tmp_path / "a copy of the release")
    assert command(copied, "--to", "safetensors").exit_code == 0
    assert Path("a copy of the release.safetensors").read_bytes() == Path("run.safetensors").read_bytes()


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxscript" else find_spec(name))
    done = command(run, "--output", tmp_path / "model.onnx")
    assert done.exit_code == 2
    assert (
        "an ONNX export needs onnxscript, not installed here: pip install -c constraints.txt '.[export]'" in done.stderr
    )
    assert command(run, "--to", "safetensors", "--output", tmp_path / "model.safetensors").exit_code == 0
