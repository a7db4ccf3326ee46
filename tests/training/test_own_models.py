"""A user's own model and loss through the whole path: train, verify, evaluate, predict, resume; and every refusal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner, Result

from dpvision.cli import app
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.inference.load import load_model
from dpvision.own_code import read_source
from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.release.verify import verify
from dpvision.storage.files import json_bytes
from dpvision.training import resume_training, train
from tiny_masks import tiny_mask_config, write_discs
from tiny_runs import CLASSES, SIDE, StopAfter, interrupt_run, synthetic_images, tiny_config, write_images

MODEL = """
import torch
from torch import nn

from parts import Block


def make(num_classes, in_channels, image_size):
    print("made by the user")
    net = nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), Block(), nn.Flatten())
    net.append(nn.Linear(4 * image_size**2, num_classes))
    net[0].weight.requires_grad_(False)
    return net


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def two_classes():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))


def other_size():
    return nn.Sequential(nn.Flatten(), nn.Linear(100, 3))


def pair():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(64, 3)

        def forward(self, x):
            return self.last(x.flatten(1)), x

    return Pair()


def changed():
    return small(), ["a change"]


def mixing():
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))


def frozen():
    return small().requires_grad_(False)


def number():
    return 3


def raises():
    raise KeyError("gone")


def maps(num_classes):
    return nn.Conv2d(1, num_classes, 3, padding=1)
"""
PARTS = """
from torch import nn


class Block(nn.Module):
    def forward(self, x):
        return x.tanh()
"""
LOSS = """
from torch.nn import functional as F


def smooth(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def whole(outputs, targets):
    return F.cross_entropy(outputs, targets)


def mixing(outputs, targets):
    return F.cross_entropy(outputs - outputs.mean(0), targets, reduction="none")


def raises(outputs, targets):
    raise LookupError("no such table")
"""
PLAN = (
    "--num-units 60 --delta 1e-3 --target-epsilon 4 --steps 8 --expected-batch-size 20 --optimizer sgd "
    "--learning-rate 0.5"
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with images and the user's files."""
    write_images(tmp_path / "images.npz")
    for name, text in (("my_model", MODEL), ("parts", PARTS), ("my_loss", LOSS)):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def dpvision(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def own_config(place: Path, function: str = "small", **changes: Any) -> Any:
    model = {"name": f"{place / 'my_model.py'}:{function}"}
    # The options of the tiny linear model are not those of an own one.
    return tiny_config(place / "images.npz", **changes).model_copy(
        update={"model": tiny_config(place / "images.npz").model.model_copy(update={**model, "options": {}})}
    )


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "release" / "weights.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def steps_charged(run: Path) -> int:
    return sum(count for _, count in charges_of(read_ledger(run / "release" / "ledger.jsonl")))


def forks_of(run: Path) -> list[str]:
    """The reason of each fork in a run's ledger."""
    return [e.payload["reason"] for e in read_ledger(run / "release" / "ledger.jsonl") if e.kind == "fork"]


def test_an_own_model_and_loss_from_the_first_command_to_the_last(place: Path) -> None:
    run, model, loss = place / "run", f"{place / 'my_model.py'}:make", f"{place / 'my_loss.py'}:smooth"
    given = ("--model", model, "--loss", loss)
    trained = dpvision("train", place / "images.npz", *given, *PLAN.split(), "--output", run, "--json")
    assert trained.exit_code == 0, trained.output
    assert "made by the user" in trained.stderr
    assert json.loads(trained.stdout)["for_release"]
    assert dpvision("verify", run).exit_code == 0

    measured = dpvision("evaluate", run, "--model", model, "--json")
    assert measured.exit_code == 0, measured.output
    assert json.loads(measured.stdout)["accuracy"] == json.loads(trained.stdout)["accuracy"]
    images, _ = synthetic_images(3, seed=9)
    Image.fromarray(np.asarray(images[1, 0])).save(place / "new.png")
    predicted = dpvision("predict", run, place / "new.png", "--model", model, "--json")
    assert predicted.exit_code == 0, predicted.output
    [answer] = json.loads(predicted.stdout)["predictions"]
    # The network of the file, computed by hand: the noise is fresh, so which class is best differs from run to run.
    weights = weights_of(run)
    x = (torch.from_numpy(images[1:2]).double() / 255 - 0.5) / 0.5
    hidden = F.conv2d(x, weights["0.weight"].double(), weights["0.bias"].double(), padding=1).tanh().flatten(1)
    logits = hidden @ weights["3.weight"].double().T + weights["3.bias"].double()
    by_hand = logits.softmax(1)[0].tolist()
    assert answer["probabilities"] == pytest.approx(by_hand, abs=1e-5)
    assert answer["class"] == str(int(np.argmax(by_hand)))
    resumed = dpvision("resume", run, *given, "--json")
    assert resumed.exit_code == 0, resumed.output
    assert dpvision("verify", run).exit_code == 0

    # File name, function and hash are in the release; the path and the code are not.
    sha256 = read_source(place / "my_model.py").sha256
    declared = {d["what"]: d["how"] for d in json.loads((run / "release" / "certificate.json").read_text())["declared"]}
    assert declared["own model"].startswith(f"make in my_model.py, SHA-256 {sha256}; the initial weights that it makes")
    assert declared["own loss"] == f"smooth in my_loss.py, SHA-256 {read_source(place / 'my_loss.py').sha256}"
    card = (run / "release" / "model_card.md").read_text()
    assert sha256 in card
    assert "dpvision predict . IMAGES --model my_model.py:make" in card
    for file in (run / "release").iterdir():
        content = file.read_bytes()
        assert str(place).encode() not in content
        assert b"made by the user" not in content
    assert not list(run.rglob("*.py"))


def test_settings_of_a_file_may_name_own_code(place: Path) -> None:
    toml = f'loss = "{place / "my_loss.py"}:smooth"\n[model]\nname = "{place / "my_model.py"}:small"\n'
    (place / "run.toml").write_text(toml)
    result = dpvision(
        "train", place / "images.npz", "--config", place / "run.toml", *PLAN.split(), "--output", place / "run"
    )
    assert result.exit_code == 0, result.output
    config = json.loads((place / "run" / "release" / "config.json").read_text())
    assert (config["model"]["name"], config["loss"]) == ("my_model.py:small", "my_loss.py:smooth")


def test_a_hash_in_the_settings_is_compared_before_anything_is_executed(place: Path) -> None:
    model = own_config(place).model.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(PrivacyError, match="is not the source that was meant"):
        train(own_config(place).model_copy(update={"model": model}), run=place / "run")
    assert not (place / "run").exists()


REFUSED_MODELS = {
    "no_such_file.py:make": "there is no file no_such_file.py",
    "my_model.py:absent": "has no 'absent'. It has: Block, make",
    "my_model.py": "must name a function of the file",
    "my_model.py:number": "must give a torch.nn.Module, got int",
    "my_model.py:raises": "my_model.py:raises can't make a model: KeyError: 'gone'",
    "my_model.py:two_classes": "returns 2 scores for an image, but there are 3 classes",
    "my_model.py:other_size": "can't be run on float32 images of 1×8×8",
    "my_model.py:changed": "make_private_ready returns the model and a list of changes: return the first.",
    "needs.py:make": "No module named 'not_installed'. Install not_installed, or leave its import out.",
    "my_model.py:pair": "returns a tuple, not a tensor of scores",
    "my_model.py:maps": "returns shape (4, 3, 8, 8) for 4 images",
    "my_model.py:mixing": "mixes units",
    "my_model.py:frozen": "has no trainable parameter",
    "broken.py:make": "broken.py is not Python, line 1",
    "leaves.py:make": "can't import leaves.py: SystemExit: 3",
    "torch.nn:Linear": "there is no file torch.nn",
}


@pytest.mark.parametrize(("model", "words"), REFUSED_MODELS.items(), ids=REFUSED_MODELS)
def test_a_model_that_cannot_be_trained_is_one_line_and_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: str
) -> None:
    (place / "broken.py").write_text("def make(:\n")
    (place / "leaves.py").write_text("raise SystemExit(3)\n")
    (place / "needs.py").write_text("import not_installed\n")
    monkeypatch.chdir(place)
    result = dpvision("train", "images.npz", "--model", model, *PLAN.split(), "--output", "run")
    assert result.exit_code == 2, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert not (place / "run").exists()


REFUSED_LOSSES = {
    "my_loss.py:whole": "loss_fn",
    "my_loss.py:mixing": "mixes units",
    "my_loss.py:raises": "no such table",
    "my_loss.py:absent": "has no 'absent'",
    "absent.py:fn": "there is no file absent.py",
    "hinge": "dice_cross_entropy, binary_cross_entropy, or FILE.py:FUNCTION, got 'hinge'",
}


@pytest.mark.parametrize(("loss", "words"), REFUSED_LOSSES.items(), ids=REFUSED_LOSSES)
def test_a_loss_that_is_not_one_value_per_row_is_one_line_and_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, loss: str, words: str
) -> None:
    monkeypatch.chdir(place)
    result = dpvision("train", "images.npz", "--model", "linear", "--loss", loss, *PLAN.split(), "--output", "run")
    assert result.exit_code == 2, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert not (place / "run").exists()


def test_a_missing_file_is_reported_without_importing_torch(place: Path) -> None:
    import subprocess
    import sys

    command = ["train", str(place / "images.npz"), "--model", "absent.py:make", "--target-epsilon", "3"]
    code = f"import sys\nsys.argv = ['dpvision', *{command}]\nfrom dpvision.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit as done:\n    sys.exit(done.code if 'torch' not in sys.modules else 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "there is no file absent.py" in done.stderr


def test_a_release_with_an_own_model_asks_for_it_and_executes_nothing_unnamed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "my_model.py").write_text(f"open({str(place / 'executed')!r}, 'w').close()\n{MODEL}")
    train(own_config(place), run=place / "run")
    interrupt_run(place / "stopped", own_config(place), after=5)
    (place / "executed").unlink()
    monkeypatch.chdir(place)  # the file that the release names lies here
    Image.fromarray(np.zeros((SIDE, SIDE), np.uint8)).save(place / "new.png")
    for command in (("evaluate", "run"), ("predict", "run", "new.png"), ("resume", "stopped"), ("verify", "run")):
        result = dpvision(*command)
        assert result.exit_code == (0 if command[0] == "verify" else 2), result.output
        if command[0] != "verify":
            assert "name it again with --model my_model.py:small (SHA-256 " in result.stderr
    with pytest.raises(ArgumentError, match="name it again"):
        load_model(place / "run")
    assert not (place / "executed").exists()


def test_a_changed_source_is_refused_before_it_is_executed(place: Path) -> None:
    model = f"{place / 'my_model.py'}:small"
    train(own_config(place), run=place / "run")
    interrupt_run(place / "stopped", own_config(place), after=5)
    (place / "parts.py").write_text(f"open({str(place / 'executed')!r}, 'w').close()\n{PARTS}")
    Image.fromarray(np.zeros((SIDE, SIDE), np.uint8)).save(place / "new.png")
    for command in (("evaluate", "run"), ("predict", "run", place / "new.png"), ("resume", "stopped")):
        result = dpvision(command[0], place / command[1], *command[2:], "--model", model)
        assert result.exit_code == 2, result.output
        assert "my_model.py is not the source that was meant" in result.stderr
    assert not (place / "executed").exists()


def test_code_is_not_accepted_for_a_run_that_has_none(place: Path) -> None:
    train(tiny_config(place / "images.npz"), run=place / "run")
    interrupt_run(place / "stopped", tiny_config(place / "images.npz"), after=5)
    for command in (("evaluate", place / "run"), ("resume", place / "stopped")):
        result = dpvision(*command, "--model", f"{place / 'my_model.py'}:small")
        assert result.exit_code == 2
        assert "is linear, which is not own code. Leave --model out" in result.stderr


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(place: Path) -> None:
    loss = {"loss": f"{place / 'my_loss.py'}:smooth"}
    config = own_config(place, "make", **loss)
    train(config, run=place / "whole", seed=3)
    with pytest.raises(ConnectionAbortedError):
        train(config, run=place / "run", seed=3, callback=StopAfter(6))
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    for name in ("my_model.py", "parts.py", "my_loss.py"):
        shutil.move(place / name, elsewhere / name)
    result = resume_training(
        place / "run", model=f"{elsewhere / 'my_model.py'}:make", loss=f"{elsewhere / 'my_loss.py'}:smooth"
    )
    assert result.outcome == "finished"
    assert equal(weights_of(place / "run"), weights_of(place / "whole"))
    assert steps_charged(place / "run") == 12
    assert verify(place / "run").ok


@pytest.mark.parametrize("file", ["my_model.py", "parts.py", "my_loss.py"])
def test_other_code_resumes_as_a_fork_that_is_charged_and_declared(place: Path, file: str) -> None:
    config = own_config(place, loss=f"{place / 'my_loss.py'}:smooth")
    with pytest.raises(ConnectionAbortedError):
        train(config, run=place / "run", seed=3, callback=StopAfter(6))
    before = read_source(place / file).sha256
    (place / file).write_text((place / file).read_text() + "\n# another version\n")
    again: dict[str, Any] = {"model": f"{place / 'my_model.py'}:small", "loss": f"{place / 'my_loss.py'}:smooth"}
    with pytest.raises(PrivacyError, match="resume with --fork"):
        resume_training(place / "run", **again)
    # Two steps since the checkpoint are charged twice, so that the budget ends two steps early.
    assert resume_training(place / "run", allow_fork=True, **again).outcome == "budget_spent"
    assert steps_charged(place / "run") == 12
    found = verify(place / "run")
    assert found.ok, found.problems
    certificate = json.loads((place / "run" / "release" / "certificate.json").read_text())
    hows = [d["how"] for d in certificate["declared"] if d["what"] in ("own model", "own loss")]
    assert len(hows) == 3
    changed = place / ("my_loss.py" if file == "my_loss.py" else "my_model.py")
    assert any(read_source(changed).sha256 in how for how in hows)
    assert before != read_source(place / file).sha256
    # Once it is noted, the new code is the run's own: no further fork.
    resume_training(place / "run", **again)
    code = "loss code" if file == "my_loss.py" else "model code"
    assert forks_of(place / "run") == [f"changed: config, {code}"]


def test_other_behaviour_of_the_same_source_is_a_fork(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model imports from elsewhere is not hashed; the gradients of synthetic rows show that it changed."""
    (place / "parts.py").write_text(PARTS.replace("return x.tanh()", "return nn.functional.softsign(x)"))
    with pytest.raises(ConnectionAbortedError):
        train(own_config(place, "make"), run=place / "run", seed=3, callback=StopAfter(6))
    monkeypatch.setattr(nn.functional, "softsign", torch.sigmoid)
    assert resume_training(place / "run", model=f"{place / 'my_model.py'}:make").outcome == "budget_spent"
    assert forks_of(place / "run") == ["changed: own behaviour"]


def test_a_release_that_names_other_code_than_its_ledger_does_not_verify(place: Path) -> None:
    train(own_config(place), run=place / "run")
    path = place / "run" / "release" / "config.json"
    config = json.loads(path.read_text())
    config["model"]["sha256"] = "0" * 64
    path.write_bytes(json_bytes(config))
    assert any("names another model or loss of the user's own" in p for p in verify(place / "run").problems)


class Net(nn.Module):
    """A model of a script."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__()
        self.last = nn.Linear(SIDE * SIDE, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.flatten(1))


def row_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.multi_margin_loss(outputs, targets, reduction="none")


def open_config(place: Path) -> Any:
    """The tiny configuration without a model."""
    return tiny_config(place / "images.npz").model_copy(update={"model": None})


def test_python_takes_a_class_and_a_function_and_resumes_exactly(place: Path) -> None:
    config, own = open_config(place), {"model": Net, "loss": row_loss}
    train(config, run=place / "whole", seed=3, **own)
    with pytest.raises(ConnectionAbortedError):
        train(config, run=place / "run", seed=3, callback=StopAfter(6), **own)
    result = resume_training(place / "run", **own)
    assert equal(weights_of(place / "run"), weights_of(place / "whole"))
    assert equal(dict(result.model.state_dict()), weights_of(place / "run"))
    declared = {d["what"]: d["how"] for d in result.certificate["declared"]}
    sha256 = read_source(Path(__file__)).sha256
    assert declared["own model"].startswith(f"Net in test_own_models.py, SHA-256 {sha256}")
    released = load_model(place / "run", model=Net)
    assert equal(dict(released.model.state_dict()), weights_of(place / "run"))


def test_a_module_starts_from_its_own_weights_and_stays_as_it_is(place: Path) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = open_config(place)
    with pytest.raises(ConnectionAbortedError):
        train(config, run=place / "run", seed=3, model=model, callback=StopAfter(6))
    assert equal(dict(model.state_dict()), before)
    first = load_file(next((place / "run" / "private" / "checkpoints").glob("step-*0-*.safetensors")))
    assert torch.equal(first["model/last.weight"], before["last.weight"])
    # Nothing shows that a module is the one of before: repeated steps get other noise and are charged again.
    assert resume_training(place / "run", model=Net()).outcome == "budget_spent"
    assert forks_of(place / "run") == ["changed: own behaviour, own code"]
    twin = Net()
    twin.load_state_dict(model.state_dict())
    resume_training(place / "run", model=twin)
    assert forks_of(place / "run")[1] == "changed: own behaviour, own code"
    resume_training(place / "run", model=twin)
    assert forks_of(place / "run")[2] == "changed: own code"
    assert verify(place / "run").ok


def test_code_without_source_is_declared_as_not_hashed(place: Path) -> None:
    space: dict[str, Any] = {}
    exec("from torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n", space)  # noqa: S102
    result = train(open_config(place), run=place / "run", model=space["make"])
    declared = {d["what"]: d["how"] for d in result.certificate["declared"]}
    assert declared["own model"].startswith("make, given in Python, own code, not hashed")
    assert verify(place / "run").ok


def test_a_model_is_given_once(place: Path) -> None:
    with pytest.raises(ArgumentError, match="the model is given twice"):
        train(tiny_config(place / "images.npz"), run=place / "run", model=Net)
    with pytest.raises(ArgumentError, match="the loss is given twice"):
        train(own_config(place, loss="cross_entropy"), run=place / "run", loss=row_loss)


def test_initial_weights_are_drawn_from_the_key_and_frozen_ones_stay(place: Path) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(own_config(place, "make", averaging={"kind": "none", "decay": None}), run=place / name, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), state)
    a, b, c = (weights_of(place / name) for name in "abc")
    assert equal(a, b)
    assert not torch.equal(a["0.weight"], c["0.weight"])
    checkpoints = sorted((place / "a" / "private" / "checkpoints").glob("step-*.safetensors"))
    for checkpoint in checkpoints:
        stored = load_file(checkpoint)
        assert torch.equal(stored["model/0.weight"], a["0.weight"]), "a frozen parameter moved"
    assert not torch.equal(load_file(checkpoints[0])["model/3.weight"], load_file(checkpoints[-1])["model/3.weight"])


def test_features_of_an_own_frozen_backbone_are_not_kept(place: Path) -> None:
    """A few synthetic rows could not show that frozen layers of unknown code treat each row by itself."""
    (place / "my_model.py").write_text(
        MODEL.replace("net[0].weight.requires_grad_(False)", "net[0].requires_grad_(False)")
    )
    train(own_config(place, "make", views={"count": 1}), run=place / "run", seed=3)
    key = json.loads((place / "run" / "private" / "key.json").read_text())
    assert "features" not in key["bindings"][-1]


def test_the_users_own_loss_is_minimised(place: Path) -> None:
    """A loss without a gradient leaves the weights where they began, in a run without noise."""
    with (place / "my_loss.py").open("a") as file:
        file.write("\n\ndef flat(outputs, targets):\n    return 0 * outputs.sum(1)\n")
    changes: dict[str, Any] = {"privacy": {"enabled": False}, "averaging": {"kind": "none", "decay": None}}
    for name, moved in (("smooth", True), ("flat", False)):
        train(own_config(place, loss=f"{place / 'my_loss.py'}:{name}", **changes), run=place / name)
        first = load_file(min((place / name / "private" / "checkpoints").glob("step-*.safetensors")))
        last = weights_of(place / name)
        assert torch.equal(first["model/1.weight"], last["1.weight"]) is not moved


def test_an_own_model_predicts_masks(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(MODEL.replace("from parts import Block\n", "Block = nn.Tanh\n"))
    config = tiny_mask_config(
        write_discs(tmp_path / "discs.npz"), model={"name": f"{tmp_path / 'my_model.py'}:maps", "options": {}}
    )
    train(config, run=tmp_path / "run")
    assert verify(tmp_path / "run").ok
    result = dpvision("evaluate", tmp_path / "run", "--model", f"{tmp_path / 'my_model.py'}:maps", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["task"] == "segmentation"


def test_ordinary_training_takes_own_code_too(place: Path) -> None:
    config = own_config(place, loss=f"{place / 'my_loss.py'}:smooth", privacy={"enabled": False})
    train(config, run=place / "run")
    assert verify(place / "run").ok
