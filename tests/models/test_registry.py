"""Every model of the catalogue: its size, its passes, its file, and that no row sees another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dpvision import models
from dpvision.errors import ArgumentError
from dpvision.models.registry import _checked

NAMES = [entry.name for entry in models.catalogue()]
# A real pass of these takes seconds or gigabytes: the fast suite runs them on the meta device.
BIG = {"wrn28_10", "wrn40_4", "nfnet_f0", "nfnet_f3", "resnet34", "resnet50"}
BIG |= {f"nf_resnet{depth}" for depth in (50, 101, 152, 200)}
BIG |= {"scaleresnet50"}
SMALL = [name for name in NAMES if name not in BIG]
# Pixels where the papers used a model, beside the entry's own.
MORE_SIZES = {
    "resnet9": (64, 160),
    "scaleresnet9": (64, 160),
    "smoothnet": (224,),
    "resnet18": (224,),
    "densenet121": (32,),
    "efficientnet_b0": (32,),
    "resnet34": (32,),
}
SIZES = [(name, size) for name in NAMES for size in (models.entry(name).image_size, *MORE_SIZES.get(name, ()))]

# FACTS.md §0, all rows: (name, options, parameters).
LEDGER = [
    ("resnet9", {}, 2_447_946),
    ("scaleresnet9", {}, 2_448_714),
    ("resnet9", {"num_classes": 100}, 2_540_196),
    ("scaleresnet9", {"num_classes": 100}, 2_540_964),
    ("resnet9", {"num_classes": 200}, 2_642_696),
    ("scaleresnet9", {"num_classes": 200}, 2_643_464),
    ("resnet9", {"large_images": True}, 2_743_370),
    ("scaleresnet9", {"large_images": True}, 2_744_138),
    ("resnet50", {}, 23_528_522),
    ("resnet50", {"norm": "layer"}, 23_528_522),
    ("resnet50", {"norm": "instance"}, 23_528_522),
    ("scaleresnet50", {}, 23_558_730),
    ("unet9", {"in_channels": 1, "num_classes": 1}, 12_470_338),
    ("scaleunet9", {"in_channels": 1, "num_classes": 1}, 12_474_178),
    ("linknet9", {"in_channels": 1, "num_classes": 1}, 7_233_410),
    ("scalelinknet9", {"in_channels": 1, "num_classes": 1}, 7_235_714),
    ("smoothnet", {}, 3_391_853),
    ("resnet18", {}, 11_173_962),
    ("resnet18", {"stem": "large"}, 11_181_642),
    ("resnet34", {}, 21_289_802),
    ("densenet121", {}, 6_964_106),
    ("efficientnet_b0", {}, 4_020_358),
    ("shoefit_cnn", {"in_channels": 1}, 26_010),
    ("shoefit_cnn", {"in_channels": 1, "filters": 15}, 12_632),
    ("shoefit_cnn", {"in_channels": 1, "filters": 16}, 13_706),
    ("shoefit_cnn", {"in_channels": 1, "filters": 31}, 33_656),
    ("shoefit_cifar", {}, 2_395_434),
    ("shoefit_allconv", {}, 2_334_730),
    ("tempered_cnn", {}, 550_570),
    ("scatter_linear", {}, 155_530),
    ("scatter_linear", {"in_channels": 1, "image_size": 28}, 39_700),
    ("scatter_linear", {"in_channels": 1, "image_size": 28, "fine": True}, 57_340),
    ("scatter_linear", {"fine": True}, 224_650),
    ("scatter_cnn", {}, 187_210),
    ("scatter_cnn", {"in_channels": 1, "image_size": 28}, 33_066),
    ("doermann_cnn", {"in_channels": 1}, 25_386),
    ("wrn16_4", {}, 2_753_818),
    ("wrn16_4", {"weight_standardised": False}, 2_751_562),
    ("wrn16_4", {"layout": "plain"}, 2_748_890),
    ("scalewrn16_4", {"layout": "plain"}, 2_750_682),
    ("wrn40_4", {}, 8_961_306),
    ("wrn28_10", {}, 36_500_378),
    ("nf_resnet50", {"num_classes": 1000}, 25_557_048),
    ("nf_resnet200", {"num_classes": 1000}, 64_673_898),
    # Not of the fact sheet: counted once, by hand where that is possible.
    ("nf_resnet101", {"num_classes": 1000}, 44_549_193),
    ("nf_resnet152", {"num_classes": 1000}, 60_192_858),
    ("resnet9", {"order": "act_norm"}, 2_447_946),
    ("unet9", {"order": "act_norm", "in_channels": 1, "num_classes": 1}, 12_470_338),
    ("linknet9", {"order": "act_norm", "in_channels": 1, "num_classes": 1}, 7_233_410),
    ("resnet9", {"norm": "frozen"}, 2_447_946 - 2 * (64 + 3 * 128 + 4 * 256)),
    ("shoefit_cifar", {"hidden": 10_240}, 2_395_434 + 9 * 1024 * (2048 + 1 + 10)),
    # One norm of C + 32 channels after each layer: the mean of a block's first and last, times its layers.
    (
        "densenet121",
        {"scale_norm": True},
        6_964_106 + 6 * (96 + 256) + 12 * (160 + 512) + 24 * (288 + 1024) + 16 * (544 + 1024),
    ),
    ("densenet121", {"init": "xavier_uniform"}, 6_964_106),
    ("nfnet_f3", {"num_classes": 1000}, 254_924_200),
    ("nfnet_f0", {"num_classes": 1000}, 71_489_284),
]


def default_model(name: str, *, size: int | None = None, seed: int = 0) -> nn.Module:
    entry = models.entry(name)
    options = {"image_size": size} if size is not None and "image_size" in entry.options else {}
    return models.create(name, num_classes=entry.num_classes, in_channels=entry.in_channels, seed=seed, **options)


def images(name: str, *, rows: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, models.entry(name).in_channels, size, size, generator=generator)


def expected_shape(name: str, rows: int, size: int) -> tuple[int, ...]:
    entry = models.entry(name)
    maps = (size, size) if entry.family == "segmentation" else ()
    return (rows, entry.num_classes, *maps)


@pytest.mark.parametrize(("name", "options", "parameters"), LEDGER)
def test_parameters_are_those_of_the_fact_sheet(name: str, options: dict, parameters: int) -> None:
    assert models.count_parameters(name, **options) == parameters


def test_the_seed_papers_figure_counts_the_running_statistics_of_batch_norm() -> None:
    model = models.create("wrn16_4", layout="plain", norm="batch", seed=0)
    statistics = sum(
        buffer.numel() for name, buffer in model.named_buffers() if not name.endswith("num_batches_tracked")
    )
    assert sum(parameter.numel() for parameter in model.parameters()) + statistics == 2_752_506


def check_passes(model: nn.Module, name: str, size: int) -> None:
    """Forward and backward: right shape, finite, every parameter reached; row 1 changes nothing in row 0."""
    x = images(name, rows=2, size=size)
    y = model(x)
    assert tuple(y.shape) == expected_shape(name, 2, size)
    assert torch.isfinite(y).all()
    y.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    x[1] = x[1].flip(-1) * 3 + 1
    with torch.no_grad():
        # Other rows may change the order of float additions in a library's kernels, but nothing more.
        torch.testing.assert_close(model(x)[0], y[0].detach(), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())


@pytest.mark.parametrize("name", SMALL)
def test_passes_are_finite_and_rows_do_not_mix(name: str) -> None:
    size = min(models.entry(name).image_size, 32)
    check_passes(default_model(name, size=size), name, size)


def test_the_check_of_passes_notices_batch_norm() -> None:
    with pytest.raises(AssertionError):
        check_passes(models.create("resnet9", norm="batch", seed=0), "resnet9", 32)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_passes_at_the_papers_sizes(name: str, size: int) -> None:
    check_passes(default_model(name, size=size), name, size)


def on_meta(name: str, **options: object) -> nn.Module:
    entry = models.entry(name)
    build = _checked(name, num_classes=entry.num_classes, in_channels=entry.in_channels, options=options)
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_an_entry_states_its_parameters_and_shapes_are_right_at_the_papers_sizes(name: str, size: int) -> None:
    entry = models.entry(name)
    model = on_meta(name, **({"image_size": size} if "image_size" in entry.options else {})).to("meta")
    if size == entry.image_size:
        assert sum(parameter.numel() for parameter in model.parameters()) == entry.parameters
    with torch.no_grad():
        y = model(torch.empty(2, entry.in_channels, size, size, device="meta"))
    assert tuple(y.shape) == expected_shape(name, 2, size)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in BIG else ()) for name in NAMES])
def test_a_safetensors_file_brings_a_model_back(name: str, tmp_path: Path) -> None:
    model, other = default_model(name), on_meta(name)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"), assign=True)
    assert other.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["shoefit_cnn", "scaleresnet9", "wrn16_4", "smoothnet", "efficientnet_b0"])
def test_a_seed_gives_the_same_weights_and_leaves_the_global_generator_alone(name: str) -> None:
    state = torch.get_rng_state()
    first, second, third = (models.create(name, seed=seed).state_dict() for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], third[key]) for key in first)


def test_without_a_seed_weights_are_fresh() -> None:
    state = torch.get_rng_state()
    first, second = models.create("linear"), models.create("linear")
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first.state_dict()["1.weight"], second.state_dict()["1.weight"])


def test_an_unknown_option_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ArgumentError, match=r"resnet9 has no option grups\. Allowed options: groups, norm, activation"):
        models.create("resnet9", grups=4)


def test_a_fixed_option_of_a_variant_is_not_an_option() -> None:
    with pytest.raises(ArgumentError, match="has no option scale_norm"):
        models.create("scaleresnet9", scale_norm=False)


def test_an_unknown_name_is_refused_with_close_ones() -> None:
    with pytest.raises(ArgumentError, match="Did you mean resnet9"):
        models.create("resnet_9")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet9", {"num_classes": 0}),
        ("resnet9", {"in_channels": 0}),
        ("resnet9", {"activation": "swish2"}),
        ("resnet9", {"groups": 24}),
        ("resnet9", {"groups": (8, 8)}),
        ("resnet9", {"norm": "bath"}),
        ("resnet9", {"order": "act_first"}),
        ("linknet9", {"order": "act_first"}),
        ("resnet18", {"init": "zeros"}),
        ("densenet121", {"init": "zeros"}),
        ("efficientnet_b0", {"init": "selu_xavier"}),
        ("shoefit_cifar", {"hidden": 0}),
        ("shoefit_cnn", {"image_size": 7}),
        ("shoefit_cnn", {"image_size": "big"}),
        ("shoefit_cnn", {"init": "zeros"}),
        ("shoefit_cnn", {"filters": 0}),
        ("tempered_cnn", {"activation": "tempered_sigmoid(1,2)"}),
        ("tempered_cnn", {"activation": "tempered_sigmoid(1,2,x)"}),
        ("wrn16_4", {"layout": "tan"}),
        ("wrn16_4", {"order": "conv_first"}),
        ("wrn16_4", {"layout": "plain", "weight_standardised": True}),
        ("resnet18", {"stem": "tiny"}),
        ("smoothnet", {"connections": "all"}),
        ("smoothnet", {"scale_norm": True}),
        ("smoothnet", {"width": 0.01}),
        ("unet9", {"head": "none"}),
        ("scatter_linear", {"groups": 10}),
        ("scatter_linear", {"constants": "cifar100"}),
        ("scatter_linear", {"standardise": "constants", "constants": ([0.0] * 243, [0.0] * 243)}),
        ("scatter_linear", {"image_size": 4}),
        ("scatter_linear", {"standardise": "batch"}),
        ("scatter_linear", {"standardise": "none", "fine": True}),
        ("resnet9", {"groups": "8,8"}),
        ("resnet9", {"groups": "8,8,x,8"}),
        ("resnet9", {"groups": 8.5}),
        ("smoothnet", {"depth": float("nan")}),
        ("smoothnet", {"width": "wide"}),
        ("nf_resnet50", {"stochastic_depth": 1.0}),
        ("nfnet_f0", {"dropout": -0.1}),
    ],
)
def test_nonsense_is_refused_in_one_line(name: str, options: dict) -> None:
    with pytest.raises(ArgumentError) as caught:
        models.create(name, **options)
    assert "\n" not in str(caught.value)


def test_entries_have_unique_names_and_say_what_they_are_for() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(entry.purpose and entry.paper and entry.family for entry in models.catalogue())


@pytest.mark.parametrize("size", [8, 13, 14, 28, 33, (20, 31)])
def test_the_shoefit_network_fits_other_sizes(size: int | tuple[int, int]) -> None:
    height, width = (size, size) if isinstance(size, int) else size
    model = models.create("shoefit_cnn", image_size=size, in_channels=1, seed=0)
    assert model(torch.zeros(2, 1, height, width)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet9", "scaleresnet9", "wrn16_4", "smoothnet", "scatter_linear", "scatter_cnn"])
def test_small_images_of_eight_pixels_pass(name: str) -> None:
    options = {"image_size": 8} if "image_size" in models.entry(name).options else {}
    assert models.create(name, in_channels=1, seed=0, **options)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def test_the_page_of_models_names_every_model_with_its_size() -> None:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for entry in models.catalogue():
        assert any(f"`{entry.name}`" in line and f"{entry.parameters:,}" in line for line in table), entry.name
