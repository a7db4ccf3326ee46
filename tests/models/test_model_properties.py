"""What the papers claim of their architectures, as properties of the networks built here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from dpvision import models
from dpvision.models import initialisation
from dpvision.models.layers import WSConv2d
from dpvision.models.nfnet import F0, NFBlock, nf_resnet, nfnet
from dpvision.models.resnet import ResNet9
from dpvision.models.smoothnet import Stage
from dpvision.models.wrn import WideBlock


@contextmanager
def outputs_of(model: nn.Module, wanted: type | str) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """(input, output) of every module of a type, or whose name ends so, in the order of calls."""
    seen: list[tuple[Tensor, Tensor]] = []
    chosen = [
        module
        for name, module in model.named_modules()
        if (name.rsplit(".", 1)[-1].startswith(wanted) if isinstance(wanted, str) else isinstance(module, wanted))
    ]
    handles = [m.register_forward_hook(lambda _, x, y: seen.append((x[0].detach(), y.detach()))) for m in chosen]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


SCALED = [
    ("scaleresnet9", "resnet9", {}, (4, 3, 32, 32), "scale_norm", 2),
    ("scaleresnet50", "resnet50", {}, (2, 3, 64, 64), "scale_norm", 16),
    ("scalewrn16_4", "wrn16_4", {}, (4, 3, 32, 32), "scale_norm", 6),
    ("scalewrn16_4", "wrn16_4", {"layout": "plain"}, (4, 3, 32, 32), "scale_norm", 6),
    ("scaleunet9", "unet9", {}, (2, 3, 32, 32), "scale_norm", 4),
    ("scaleunet9", "unet9", {}, (2, 3, 32, 32), "join_norm", 2),
    ("scalelinknet9", "linknet9", {}, (2, 3, 32, 32), "join_norm", 2),
    ("scalelinknet9", "linknet9", {"order": "act_norm"}, (2, 3, 32, 32), "join_norm", 2),
]


@pytest.mark.parametrize(("name", "twin", "options", "shape", "place", "count"), SCALED)
def test_activations_are_centred_and_scaled_after_scale_norm_and_not_without(
    name: str, twin: str, options: dict, shape: tuple[int, ...], place: str, count: int
) -> None:
    deviations = []
    for which in (name, twin):
        model = models.create(which, seed=0, **options)
        with torch.no_grad(), outputs_of(model, place) as seen:
            model(noise(*shape))
        assert len(seen) == count
        deviations.append([max(abs(y.mean().item()), abs(y.std().item() - 1)) for _, y in seen])
    with_scale_norm, without = deviations
    # GroupNorm is exact up to its eps and the difference between biased and unbiased deviations.
    assert max(with_scale_norm) < 0.02
    assert max(without) > 0.2


def test_weight_standardised_networks_use_filters_of_zero_mean() -> None:
    model = models.create("wrn16_4", seed=0)
    convs = [module for module in model.modules() if isinstance(module, WSConv2d)]
    assert len(convs) == 16
    for conv in convs:
        filters = conv.standardised_weight().flatten(1)
        assert filters.mean(1).abs().max() < 1e-6
        torch.testing.assert_close(filters.norm(dim=1), torch.ones(conv.out_channels))


@pytest.mark.parametrize("depth", [50, 101, 152, 200])
def test_nf_resnets_know_the_variance_of_their_signal(depth: int) -> None:
    with torch.device("meta"):
        blocks = [m for m in nf_resnet(num_classes=10, in_channels=3, depth=depth).modules() if isinstance(m, NFBlock)]
    betas = [block.before[1].factor for block in blocks]
    if depth == 50:  # FACTS §7
        first = [1, 0.9806, 0.9623, 0.9449, 0.9806, 0.9623, 0.9449]
        rest = [0.9285, 0.9806, 0.9623, 0.9449, 0.9285, 0.9129, 0.8980, 0.9806, 0.9623]
        assert betas == pytest.approx([*first, *rest], abs=5e-5)
    assert len(betas) == {50: 16, 101: 33, 152: 50, 200: 66}[depth]


@pytest.mark.parametrize("make", [nf_resnet, nfnet])
def test_nf_blocks_keep_unit_variance_at_initialisation(make: Callable[..., nn.Module]) -> None:
    kind = {"depth": 50} if make is nf_resnet else {"size": F0}
    with initialisation.seeded(0):
        model = make(num_classes=10, in_channels=3, skip_gain=1.0, **kind)
    for block in [m for m in model.modules() if isinstance(m, NFBlock)]:
        variance = 1 / block.before[1].factor ** 2
        channels = next(m.in_channels for m in block.branch.modules() if isinstance(m, WSConv2d))
        with torch.no_grad(), outputs_of(block, "branch") as seen:
            y = block(noise(1, channels, 16, 16) * math.sqrt(variance))
        # Zero padding takes up to a quarter of the variance where two strides leave 8 pixels; a wrong gamma, beta or
        # fan-in would be a factor of two or more. Average-pooled shortcuts expect neighbours that are alike: not noise.
        assert seen[0][0].var().item() == pytest.approx(1, rel=0.05)
        assert seen[0][1].var().item() == pytest.approx(1, rel=0.3)
        if block.shortcut is None:
            assert y.var().item() == pytest.approx(variance + 0.2**2, rel=0.05)
        elif isinstance(block.shortcut, WSConv2d):
            assert y.var().item() == pytest.approx(1 + 0.2**2, rel=0.05)


def test_the_order_of_a_unit_is_that_of_the_code_or_of_the_appendix() -> None:
    for name in ("scaleresnet9", "scaleunet9", "scalelinknet9"):
        for order, expected in (("norm_act", ["Conv2d", "GroupNorm", "Mish"]), ("act_norm", ["Conv2d", "Mish"])):
            model = models.create(name, seed=0, order=order)
            units = [m for m in model.modules() if isinstance(m, nn.Sequential) and isinstance(m[0], nn.Conv2d)]
            assert len(units) >= 8
            for unit in units:
                kinds = [type(layer).__name__ for layer in unit]
                assert kinds[: len(expected)] == expected
                assert kinds.count("GroupNorm") == 1


def test_scale_norm_of_densenet_normalises_every_concatenation() -> None:
    model = models.create("densenet121", seed=0, scale_norm=True)
    with torch.no_grad(), outputs_of(model, "scale_norm") as seen:
        model(noise(2, 3, 64, 64))
    assert len(seen) == 58
    # The last block sees 2 × 2 pixels: the eps of GroupNorm counts where values hardly vary.
    assert all(abs(y.mean().item()) < 0.02 and abs(y.std().item() - 1) < 0.05 for _, y in seen)


@pytest.mark.parametrize("name", ["resnet9", "scaleresnet9", "resnet18", "scaleresnet50", "wrn16_4", "linknet9"])
def test_frozen_batch_norm_is_batch_norm_in_evaluation(name: str) -> None:
    trained = models.create(name, seed=0, norm="batch")
    images = noise(4, 3, 32, 32)
    with torch.no_grad():
        for _ in range(3):
            trained(images)  # moves the running statistics
    frozen = models.create(name, seed=1, norm="frozen")
    state = trained.state_dict()
    frozen.load_state_dict({name: state[name] for name in frozen.state_dict()})
    with torch.no_grad():
        torch.testing.assert_close(frozen.train()(images), trained.eval()(images))


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "densenet121", "efficientnet_b0"])
def test_xavier_weights_have_xavier_s_variance(name: str) -> None:
    model = models.create(name, seed=0, init="xavier_uniform")
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.weight.numel() > 30_000]
    assert convs
    for conv in convs:
        fan_in, fan_out = (size * conv.weight[0, 0].numel() for size in conv.weight.shape[1::-1])
        # A uniform variance's relative error is 2 / sqrt(5 n) or 0.5 % at 30,000 weights: six of them.
        assert conv.weight.var().item() == pytest.approx(2 / (fan_in + fan_out), rel=0.03)


def test_group_counts_go_by_stage_in_resnet9() -> None:
    model = models.create("scaleresnet9", groups=(1, 2, 4, 8), seed=0)
    counts = {
        stage: [m.num_groups for m in getattr(model, stage).modules() if isinstance(m, nn.GroupNorm)]
        for stage in ("conv1", "conv2", "res1", "conv3", "conv4", "res2")
    }
    assert counts == {"conv1": [1], "conv2": [1], "res1": [2] * 3, "conv3": [4], "conv4": [4], "res2": [8] * 3}


@pytest.mark.parametrize("name", ["resnet50", "scaleresnet50"])
def test_group_counts_go_by_stage_in_resnet50(name: str) -> None:
    with torch.device("meta"):
        body = models.entry(name).build(num_classes=10, in_channels=3, groups="1,2,4,8")[0]
    found = [{m.num_groups for m in part.modules() if isinstance(m, nn.GroupNorm)} for part in body]
    assert found == [{1}, {1}, {2}, {4}, {8}]


def test_one_number_of_groups_is_clamped_to_the_channels() -> None:
    model = models.create("resnet9", groups=2048, seed=0)
    assert all(m.num_groups == m.num_channels for m in model.modules() if isinstance(m, nn.GroupNorm))


def test_a_unit_of_resnet9_is_convolution_then_norm_then_activation() -> None:
    model = models.create("resnet9", seed=0)
    assert isinstance(model, ResNet9)
    assert [type(layer) for layer in model.conv2] == [nn.Conv2d, nn.GroupNorm, nn.Mish, nn.MaxPool2d]
    assert model.conv2[0].bias is None


@pytest.mark.parametrize("size", [32, 64, 160])
def test_resnet9_always_classifies_1024_features(size: int) -> None:
    model = models.create("resnet9", seed=0).to("meta")
    with outputs_of(model, "pool") as seen:
        model(torch.empty(1, 3, size, size, device="meta"))
    assert seen[0][1].shape == (1, 1024)


def test_the_wide_resnet_of_de_et_al_activates_before_it_normalises() -> None:
    blocks = [m for m in models.create("wrn16_4", seed=0).modules() if isinstance(m, WideBlock)]
    assert [type(layer) for layer in blocks[0].before] == [nn.ReLU, nn.GroupNorm]
    assert [block.skip is not None for block in blocks] == [True, False] * 3
    assert all((block.skip is None) == (block.skip_before is None) for block in blocks)
    plain = [m for m in models.create("wrn16_4", layout="plain", seed=0).modules() if isinstance(m, WideBlock)]
    assert [type(layer) for layer in plain[0].before] == [nn.GroupNorm, nn.ReLU]
    assert all(block.skip_before is None for block in plain)


def test_layer_orders_of_a_wide_resnet_are_switches() -> None:
    model = models.create("wrn16_4", order="act_norm", skip_order="norm_act", seed=0)
    block = next(m for m in model.modules() if isinstance(m, WideBlock))
    assert [type(layer) for layer in block.before] == [nn.ReLU, nn.GroupNorm]
    assert block.skip_before is not None
    assert [type(layer) for layer in block.skip_before] == [nn.GroupNorm, nn.ReLU]


def test_skip_init_makes_every_identity_block_the_identity() -> None:
    model = models.create("wrn16_4", skip_init=True, seed=0)
    with torch.no_grad(), outputs_of(model, WideBlock) as seen:
        model(noise(1, 3, 32, 32))
    assert all(torch.equal(x, y) for x, y in seen[1::2])


def test_smoothnet_is_as_wide_as_the_paper_says() -> None:
    model = models.create("smoothnet", seed=0)
    stages = [m for m in model.modules() if isinstance(m, Stage)]
    inputs = [[block[0].in_channels for block in stage.blocks] for stage in stages]
    assert inputs == [[3, 67, 131, 195, 259], [161, 289, 417, 545, 673]]
    with torch.no_grad(), outputs_of(model, Stage) as seen:
        model(noise(1, 3, 32, 32))
    assert [y.shape[1] for _, y in seen] == [323, 801]
    # Xavier-uniform with gain 3/4 over the first hidden layer.
    assert model[7].weight.abs().max().item() == pytest.approx(0.75 * math.sqrt(6 / (2048 + 256)), rel=1e-3)


@pytest.mark.parametrize("connections", ["dense", "residual", "none"])
@pytest.mark.parametrize("pooling", ["max", "average", "none"])
def test_smoothnets_parts_are_switches(connections: str, pooling: str) -> None:
    options = {"connections": connections, "pooling": pooling, "width": 1.0, "depth": 3.0}
    for norm, activation in (("group", "selu"), ("layer", "relu"), ("none", "tanh")):
        model = models.create("smoothnet", norm=norm, activation=activation, seed=0, **options)
        assert model(noise(2, 3, 16, 16)).shape == (2, 10)


def test_residual_connections_of_smoothnet_add_and_can_be_normalised() -> None:
    options = {"connections": "residual", "width": 1.0, "depth": 3.0}
    plain, scaled = (models.create("smoothnet", scale_norm=on, seed=0, **options) for on in (False, True))
    extra = sum(p.numel() for p in scaled.parameters()) - sum(p.numel() for p in plain.parameters())
    assert extra == 2 * 2 * (8 + 16)
    for model, normalised in ((plain, False), (scaled, True)):
        with torch.no_grad(), outputs_of(model, Stage) as seen:
            model(noise(2, 3, 16, 16))
        assert all((abs(y.std().item() - 1) < 0.02) == normalised for _, y in seen)


def test_the_heads_of_segmentation_networks_differ_in_their_floor() -> None:
    x = noise(2, 1, 32, 32)
    with torch.no_grad():
        bounded = models.create("unet9", in_channels=1, num_classes=1, seed=0)(x)
        free = models.create("unet9", in_channels=1, num_classes=1, head="conv", seed=0)
        free.head.bias.fill_(-5)
        assert bounded.min() >= -0.31
        assert free(x).min() < -1


def test_the_first_stage_of_resnet50_can_keep_relu_as_in_the_thesis() -> None:
    body = models.create("resnet50", activation="mish", stage1_activation="relu", seed=0)[0]
    kinds = [{type(m) for m in part.modules() if isinstance(m, nn.ReLU | nn.Mish)} for part in body]
    assert kinds == [{nn.Mish}, {nn.ReLU}, {nn.Mish}, {nn.Mish}, {nn.Mish}]
