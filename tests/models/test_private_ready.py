"""A user's own model made ready: what changes, what stays, and what the changed model computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from dpvision import models
from dpvision.errors import ArgumentError
from dpvision.models import initialisation


class BasicBlock(nn.Module):
    """Written in the manner of torchvision: one in-place ReLU called twice, an in-place addition."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class UsersResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(16, 16), BasicBlock(16, 16))
        shortcut = nn.Sequential(nn.Conv2d(16, 24, 1, 2, bias=False), nn.BatchNorm2d(24))
        self.layer2 = nn.Sequential(BasicBlock(16, 24, 2, shortcut))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def users_model() -> UsersResNet:
    """Trained a little, so that affine weights and running statistics are not at their start."""
    with initialisation.seeded(0):
        model = UsersResNet()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.uniform_(module.bias, -0.5, 0.5)
        with torch.no_grad():
            model(torch.randn(8, 3, 16, 16))
    return model


def images(rows: int = 4) -> Tensor:
    return torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def rows_mix(model: nn.Module) -> bool:
    x = images()
    other = torch.cat((x[:1], 3 * x[1:] + 1))
    with torch.no_grad():
        return not torch.allclose(model(x)[0], model(other)[0], atol=1e-5)


def test_the_users_model_mixes_rows_and_its_ready_copy_does_not() -> None:
    model = users_model()
    ready, _ = models.make_private_ready(model)
    assert rows_mix(copy.deepcopy(model))
    assert not rows_mix(ready)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in ready.modules())


@pytest.mark.parametrize("options", [{}, {"batch_norm": "frozen"}, {"scale_norm": True, "example": images()}])
def test_the_input_model_is_left_untouched(options: dict) -> None:
    model = users_model().train()
    model.layer1.eval()
    twin = copy.deepcopy(model)
    ready, _ = models.make_private_ready(model, **options)
    with torch.no_grad():
        for parameter in ready.parameters():
            parameter.add_(1)
    assert str(model) == str(twin)
    assert [m.training for m in model.modules()] == [m.training for m in twin.modules()]
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in twin.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_batch_norm_becomes_group_norm_with_its_affine_weights() -> None:
    model = users_model()
    ready, changes = models.make_private_ready(model, groups=8)
    assert isinstance(ready.layer2[0].bn1, nn.GroupNorm)
    assert ready.layer2[0].bn1.num_groups == 8
    names = {name for name, _ in model.named_parameters()}
    assert {name for name, _ in ready.named_parameters()} == names
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in ready.named_parameters())
    change = next(change for change in changes if change.module == "layer2.0.downsample.1")
    assert str(change) == (
        "layer2.0.downsample.1: BatchNorm2d → GroupNorm(8 groups, 24 channels) "
        "(BatchNorm mixes the units of a batch, so no unit's influence is bounded)"
    )
    assert sum("BatchNorm" in change.what for change in changes) == 8


def test_a_frozen_copy_computes_what_the_model_computes_in_evaluation() -> None:
    model = users_model()
    ready, changes = models.make_private_ready(model, batch_norm="frozen")
    with torch.no_grad():
        torch.testing.assert_close(ready.train()(images()), model.eval()(images()), rtol=1e-4, atol=1e-5)
    assert not rows_mix(ready)
    assert all(not name.startswith("bn1") for name, _ in ready.named_parameters())
    assert any("FrozenBatchNorm" in change.what for change in changes)


def test_in_place_activations_become_ordinary_ones() -> None:
    ready, changes = models.make_private_ready(users_model())
    assert not any(getattr(module, "inplace", False) for module in ready.modules())
    assert [change.module for change in changes if "inplace" in change.what] == [
        "relu",
        "layer1.0.relu",
        "layer1.1.relu",
        "layer2.0.relu",
    ]


def test_scale_norm_stands_between_the_addition_and_the_last_activation() -> None:
    ready, changes = models.make_private_ready(users_model(), scale_norm=True, example=images())
    added = [change.module for change in changes if "ScaleNorm" in change.why]
    assert added == ["layer1.0.scale_norm1", "layer1.1.scale_norm1", "layer2.0.scale_norm1"]
    block, x = ready.layer2[0], torch.randn(2, 16, 8, 8)
    branch = block.bn2(block.conv2(functional.relu(block.bn1(block.conv1(x)))))
    expected = functional.relu(block.scale_norm1(branch + block.downsample(x)))
    torch.testing.assert_close(block(x), expected)
    assert not rows_mix(ready)
    plain, _ = models.make_private_ready(users_model())
    assert {name for name, _ in ready.named_parameters()} == {name for name, _ in plain.named_parameters()} | {
        f"{name}.{kind}" for name in added for kind in ("weight", "bias")
    }


def test_scale_norm_reaches_models_that_add_in_their_own_forward() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.unused = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(2, 2)
            self.shift = nn.Parameter(torch.zeros(3, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.add(self.conv(x), x).add(self.shift) + 1

    ready, changes = models.make_private_ready(Adds(), scale_norm=True, example=images())
    assert isinstance(ready, fx.GraphModule)
    assert [change.module for change in changes] == ["scale_norm1"]
    y = ready(images()).detach()
    assert abs(y.mean().item() - 1) < 1e-3
    assert "unused.weight" in ready.state_dict()


def test_a_forward_that_cannot_be_traced_is_left_and_listed() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) + x if x.sum() > 0 else x

    model = nn.Sequential(Branching(), nn.Conv2d(3, 16, 3), BasicBlock(16, 16))
    ready, changes = models.make_private_ready(model, scale_norm=True, example=images())
    assert isinstance(ready[0], Branching)
    left = next(change for change in changes if change.module == "0")
    assert left.what == "left as it is, without ScaleNorm"
    assert "can't be traced" in left.why
    with pytest.raises(ArgumentError, match="found no residual addition"):
        models.make_private_ready(Branching(), scale_norm=True, example=images())


def test_a_norm_over_features_keeps_several_numbers_in_a_group() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.BatchNorm1d(32), nn.Linear(32, 2))
    ready, _ = models.make_private_ready(model)
    assert ready[2].num_groups == 1
    assert ready[2](torch.randn(4, 32)).std() > 0.5


def test_a_shared_norm_stays_shared() -> None:
    norm = nn.BatchNorm2d(3)
    ready, changes = models.make_private_ready(nn.Sequential(norm, nn.Conv2d(3, 3, 1), norm))
    assert ready[0] is ready[2]
    assert isinstance(ready[0], nn.GroupNorm)
    assert len(changes) == 1


def test_a_bare_batch_norm_and_other_kinds_are_replaced() -> None:
    assert isinstance(models.make_private_ready(nn.BatchNorm2d(4))[0], nn.GroupNorm)
    bare = models.make_private_ready(nn.Sequential(nn.SyncBatchNorm(4), nn.BatchNorm3d(4, affine=False)))[0]
    assert [layer.affine for layer in bare] == [True, False]


def test_instance_norm_loses_its_running_statistics() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.Conv2d(3, 2, 1))
    ready, changes = models.make_private_ready(model)
    assert not list(ready.buffers())
    assert changes[0].what == "running statistics removed"
    assert ready.eval()(images()).shape == (4, 2, 16, 16)


def test_a_ready_model_has_no_changes() -> None:
    for name in ("scaleresnet9", "wrn16_4"):
        ready, changes = models.make_private_ready(models.create(name, seed=0))
        assert changes == []
        assert ready(torch.zeros(1, 3, 16, 16)).shape == (1, 10)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.Conv2d(3, 3, 1), {"batch_norm": "drop"}, "batch_norm must be group or frozen"),
        (nn.Conv2d(3, 3, 1), {"groups": 0}, "groups must be a whole number"),
        (nn.Conv2d(3, 3, 1), {"scale_norm": True}, "scale_norm needs example"),
        (nn.BatchNorm2d(3, track_running_stats=False), {"batch_norm": "frozen"}, "no running statistics"),
    ],
)
def test_what_cannot_be_done_is_said(model: nn.Module, options: dict, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        models.make_private_ready(model, **options)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_norm_asks_for_a_first_run() -> None:
    with pytest.raises(ArgumentError, match="run the model once"):
        models.make_private_ready(nn.Sequential(nn.LazyBatchNorm2d()))
