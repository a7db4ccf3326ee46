"""``dpvision check`` and ``dpvision models`` as a stranger uses them: own files, nonsense, and the catalogue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dpvision import models
from dpvision.cli import app

# A ResNet in the manner of torchvision: BatchNorm, one in-place ReLU called twice, an in-place addition.
RESNET = '''
import torch
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        same = stride == 1 and inplanes == planes
        project = nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
        self.downsample = None if same else nn.Sequential(*project)

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class Centred(nn.Module):
    """Subtracts the mean of the batch by hand."""

    def forward(self, x):
        return x - x.mean(0)


def make():
    print("made")
    return ResNet()


def ready():
    from dpvision.models import make_private_ready
    return make_private_ready(ResNet())[0]


def hidden():
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), Centred(), nn.Flatten(), nn.Linear(3072, 10))


def five():
    return ResNet(5)


def grey():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def maps():
    return nn.Sequential(nn.Conv2d(3, 10, 3, padding=1), nn.GroupNorm(1, 10))


def two():
    class Two(ResNet):
        def forward(self, x):
            return super().forward(x), x

    return Two()


def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))


def number():
    return 3


def leaves():
    raise SystemExit(3)
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(RESNET)
    return tmp_path / "mine.py"


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def test_a_torchvision_style_resnet_is_refused_with_what_would_mend_it(own: Path) -> None:
    result = check(f"{own}:make")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    # Nine norms and five activations, but what is the same is said once.
    assert len(lines) == 7
    assert lines[0].startswith("problem: bn1 (BatchNorm2d), layer1.0.bn1 (BatchNorm2d)")
    assert "moves running_mean" in lines[0]
    assert "mixes units" in lines[1]
    assert "GroupNorm" in lines[1]
    assert lines[2].endswith("is NOT ready for private training")
    assert lines[3] == "model, changes = dpvision.models.make_private_ready(model) would make it ready:"
    assert "BatchNorm2d → GroupNorm(8 groups, 8 channels)" in lines[4]
    assert "ReLU(inplace=True) → inplace=False" in lines[6]


def test_json_names_every_module_and_nothing_of_the_users_prints_gets_into_it(own: Path) -> None:
    result = check(f"{own}:make", "--json")
    told = json.loads(result.stdout)
    assert "made" in result.stderr
    mixing = [finding["module"] for finding in told["findings"] if "mixes" in finding["problem"]]
    assert len(mixing) == 10
    assert not told["ready"]
    assert len(told["make_private_ready"]) == 15


def test_the_mended_resnet_is_ready(own: Path) -> None:
    result = check(f"{own}:ready")
    assert result.exit_code == 0
    proof, ready = result.stdout.splitlines()
    assert proof.startswith("note: the model: no row influences another: proved by following ")
    assert ready == f"{own}:ready is ready for private training"


def test_what_mending_modules_would_leave_is_said(own: Path) -> None:
    result = check(f"{own}:hidden")
    assert result.exit_code == 1
    assert "would help, but not be enough:" in result.stdout
    after = result.stdout.split("What would stay:")[1]
    assert "2 (Centred): mixes units" in after
    assert json.loads(check(f"{own}:hidden", "--json").stdout)["make_private_ready"] is None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("five", "returns 5 scores for an image, but there are 10 classes. Change its last layer"),
        ("grey", "can't be run on float32 images of 3×32×32"),
        ("two", "returns a tuple, not a tensor of scores"),
    ],
)
def test_a_model_that_gives_no_scores_for_such_pictures_says_why(own: Path, function: str, words: str) -> None:
    result = check(f"{own}:{function}")
    assert result.exit_code == 1
    assert words in result.stdout
    assert "NOT ready" in result.stdout


def test_flags_fit_the_pictures_to_the_model(own: Path) -> None:
    assert check(f"{own}:grey", "--in-channels", "1", "--image-size", "28").exit_code == 0
    assert check(f"{own}:maps").exit_code == 0


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (":lazy", "run the model once before you return it"),
        (":number", "must give a torch.nn.Module, got int"),
        (":leaves", "SystemExit: 3"),
        (":nothing", "has no 'nothing'. It has: BasicBlock, ResNet, Centred, make"),
        (":BasicBlock", "but it needs inplanes, planes"),
        (":", "must name a function of the file"),
        ("", "must name a function of the file"),
    ],
)
def test_what_is_no_model_is_one_line_and_exit_code_2(own: Path, function: str, words: str) -> None:
    result = check(f"{own}{function}")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_may_import_its_neighbour_and_define_dataclasses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("CLASSES = 10\n")
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
    code += "from torch import nn\nfrom neighbour_of_mine import CLASSES\n\n\n"
    code += "@dataclass\nclass Size:\n    side: ClassVar[int] = 32\n\n\n"
    code += "def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * Size.side**2, CLASSES))\n"
    (tmp_path / "mine.py").write_text(code)
    assert check(f"{tmp_path / 'mine.py'}:make").exit_code == 0
    (tmp_path / "module_of_mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert check("module_of_mine:make").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        "linear",
        "shoefit_cnn",
        "doermann_cnn --image-size 14",
        "tempered_cnn",
        "scaleresnet9 --image-size 8 --option groups=8,8,16,16",
        "wrn16_4 --image-size 8",
        "smoothnet --option width=1.0",
        "scatter_cnn --in-channels 1 --image-size 28",
        pytest.param("resnet18", marks=pytest.mark.slow),
        pytest.param("densenet121", marks=pytest.mark.slow),
        pytest.param("efficientnet_b0", marks=pytest.mark.slow),
        pytest.param("nf_resnet50", marks=pytest.mark.slow),
        pytest.param("unet9", marks=pytest.mark.slow),
        pytest.param("scalelinknet9", marks=pytest.mark.slow),
    ],
)
def test_every_family_of_the_catalogue_is_ready_as_it_is(arguments: str) -> None:
    result = check(*arguments.split())
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{arguments.split()[0]} is ready for private training\n"


def test_a_model_of_the_catalogue_is_tried_on_its_own_pictures() -> None:
    told = json.loads(check("shoefit_cnn", "--json").stdout)
    assert (told["image_shape"], told["num_classes"]) == ([1, 28, 28], 10)
    told = json.loads(check("shoefit_cnn", "--json", "--image-size", "14", "--num-classes", "3").stdout)
    assert (told["image_shape"], told["num_classes"], told["ready"]) == ([1, 14, 14], 3, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("resnet_9", "Did you mean resnet9"),
        ("resnet9 --option grups=4", "has no option grups. Allowed options: groups"),
        ("resnet9 --option groups=24", "groups must divide"),
        ("resnet9 --in-channels 0", "--in-channels must be a whole number >= 1"),
        ("resnet9 --num-classes 0", "--num-classes must be a whole number >= 1"),
        ("mine.py:make --option groups=4", "--option is for registered models"),
    ],
)
def test_nonsense_about_the_catalogue_is_one_line(arguments: str, words: str) -> None:
    result = check(*arguments.split())
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_batch_norm_of_the_catalogue_is_refused() -> None:
    result = check("resnet9", "--option", "norm=batch", "--image-size", "8")
    assert result.exit_code == 1
    assert "mixes units" in result.stdout


def test_the_table_of_models_has_a_line_a_model() -> None:
    lines = CliRunner().invoke(app, ["models"]).stdout.splitlines()
    assert lines[0].split() == ["name", "parameters", "paper", "purpose"]
    for line, entry in zip(lines[1:], models.catalogue(), strict=True):
        assert line.split()[:2] == [entry.name, f"{entry.parameters:,}"]
        assert entry.paper in line
        assert line.rstrip().endswith(entry.purpose)


def test_models_as_json_have_their_options() -> None:
    told = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)["models"]
    assert [row["name"] for row in told] == [entry.name for entry in models.catalogue()]
    smoothnet = next(row for row in told if row["name"] == "smoothnet")
    assert smoothnet["parameters"] == 3_391_853
    assert smoothnet["options"]["width"] == 8.0
    assert "num_classes" not in smoothnet["options"]
