"""Every rule against the float64 loop over single units. A new layer is one line in LAYERS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import grads_reference as reference
from dpvision.gradients.clipped_sum import clipped_sum
from dpvision.gradients.layer_gradient import LayerGradient, MaterialisedGradient, sum_of_squares
from dpvision.gradients.rules import LayerCall, convolution, register, rule_for
from dpvision.gradients.rules.convolution import ConvolutionGradient
from dpvision.models.layers import OffsetLinear, ScalarGain, WSConv2d
from grads_support import relative_error, wavy_loss


@dataclass(frozen=True)
class Layer:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    two_ways: bool = False  # norms by Gram matrices or by forming the gradient: both are tried
    indices: int = 0  # inputs are indices below this number
    rule: bool = True


def near_constant_filters() -> nn.Module:
    """A standardised convolution with a filter below and a filter far below the floor of its variance."""
    layer = WSConv2d(2, 4, 3)
    with torch.no_grad():
        layer.weight[1].mul_(1e-3)
        layer.weight[2].zero_()
    return layer


class Doubled(nn.Linear):
    """Overrides its parent's forward: the parent's rule must not be used."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Affine(nn.Module):
    """Parameters outside of any layer, one of them broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3, 1))
        self.shift = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) + self.shift


def conv2d(*args: int, **options: object) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(*args, **options)  # type: ignore[arg-type]


LAYERS = {
    "linear": Layer(lambda: nn.Linear(5, 4), (5,), True),
    "linear without bias": Layer(lambda: nn.Linear(5, 4, bias=False), (5,), True),
    "linear over positions": Layer(lambda: nn.Linear(5, 4), (3, 5), True),
    "linear over two kinds of positions": Layer(lambda: nn.Linear(5, 4), (2, 3, 5), True),
    "conv1d": Layer(lambda: nn.Conv1d(3, 4, 3), (3, 9), True),
    "conv1d strided, dilated, padded, grouped": Layer(
        lambda: nn.Conv1d(4, 6, 3, stride=2, dilation=2, padding=3, groups=2), (4, 11), True
    ),
    "conv2d": Layer(conv2d(2, 4, 3), (2, 6, 5), True),
    "conv2d without bias": Layer(conv2d(2, 4, 3, bias=False), (2, 6, 5), True),
    "conv2d 1x1": Layer(conv2d(3, 4, 1), (3, 4, 4), True),
    "conv2d strided with a rim": Layer(conv2d(2, 4, 3, stride=2), (2, 8, 8), True),
    "conv2d padded": Layer(conv2d(2, 4, 3, padding=1), (2, 5, 5), True),
    "conv2d padded unevenly": Layer(conv2d(2, 4, (3, 2), padding=(0, 1), stride=(1, 2)), (2, 5, 6), True),
    "conv2d same": Layer(conv2d(2, 4, 3, padding="same"), (2, 5, 4), True),
    "conv2d same, even kernel": Layer(conv2d(2, 4, (2, 4), padding="same", dilation=(1, 3)), (2, 6, 7), True),
    "conv2d valid": Layer(conv2d(2, 4, 3, padding="valid"), (2, 5, 4), True),
    "conv2d reflect": Layer(conv2d(2, 4, 3, padding=2, padding_mode="reflect"), (2, 5, 5), True),
    "conv2d replicate": Layer(conv2d(2, 4, 3, padding=(1, 2), padding_mode="replicate"), (2, 5, 5), True),
    "conv2d circular same": Layer(conv2d(2, 4, 4, padding="same", padding_mode="circular"), (2, 5, 5), True),
    "conv2d dilated": Layer(conv2d(2, 4, 2, dilation=(2, 3)), (2, 6, 7), True),
    "conv2d grouped": Layer(conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 5), True),
    "conv2d depthwise": Layer(conv2d(3, 6, 3, groups=3, stride=2, padding=1), (3, 6, 6), True),
    "conv2d one position": Layer(conv2d(2, 4, 3), (2, 3, 3), True),
    "conv3d": Layer(lambda: nn.Conv3d(2, 3, (2, 3, 1), padding=(1, 0, 0), stride=(1, 2, 1)), (2, 4, 5, 3), True),
    "conv3d replicate grouped": Layer(
        lambda: nn.Conv3d(2, 4, 2, padding=1, padding_mode="replicate", groups=2, dilation=2), (2, 4, 4, 4), True
    ),
    "transposed conv2d": Layer(lambda: nn.ConvTranspose2d(3, 4, 3), (3, 4, 4), True),
    "transposed conv2d strided, padded, grouped": Layer(
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (4, 3, 4), True
    ),
    "transposed conv2d dilated, output padding beyond stride": Layer(
        lambda: nn.ConvTranspose2d(2, 3, 2, stride=2, dilation=3, output_padding=2, bias=False), (2, 3, 3), True
    ),
    "group norm": Layer(lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "group norm without space": Layer(lambda: nn.GroupNorm(2, 6), (6,)),
    "layer norm": Layer(lambda: nn.LayerNorm(5), (3, 5)),
    "layer norm over two dimensions": Layer(lambda: nn.LayerNorm((3, 5)), (2, 3, 5)),
    "layer norm without bias": Layer(lambda: nn.LayerNorm(5, bias=False), (5,)),
    "instance norm 1d": Layer(lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
    "instance norm 2d": Layer(lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
    "instance norm 3d": Layer(lambda: nn.InstanceNorm3d(3, affine=True), (3, 2, 3, 2)),
    "rms norm": Layer(lambda: nn.RMSNorm(5), (3, 5)),
    "rms norm with eps over two dimensions": Layer(lambda: nn.RMSNorm((3, 5), eps=1e-3), (3, 5)),
    "embedding": Layer(lambda: nn.Embedding(6, 3), (4,), True, indices=6),
    "embedding with padding": Layer(lambda: nn.Embedding(4, 3, padding_idx=1), (2, 3), True, indices=4),
    "prelu": Layer(nn.PReLU, (3, 4)),
    "prelu per channel": Layer(lambda: nn.PReLU(3), (3, 4, 2)),
    "scalar gain": Layer(lambda: ScalarGain(0.7), (3, 4)),
    "offset linear": Layer(lambda: OffsetLinear(5, 3, length=7.0), (5,)),
    "offset linear with positions": Layer(lambda: OffsetLinear(5, 3, length=0.5), (4, 5), True),
    "offset linear in evaluation mode": Layer(lambda: OffsetLinear(5, 3, length=7.0).eval(), (5,)),
    "offset linear that keeps a share": Layer(lambda: OffsetLinear(5, 3, length=7.0, kept=0.3).eval(), (5,)),
    "standardised conv": Layer(lambda: WSConv2d(2, 4, 3), (2, 6, 6), True),
    "standardised conv strided, grouped": Layer(lambda: WSConv2d(4, 6, 3, stride=2, groups=2), (4, 6, 6), True),
    "standardised conv without gain and bias": Layer(lambda: WSConv2d(2, 4, 3, padding=0, affine=()), (2, 6, 5), True),
    "standardised conv at its floor": Layer(near_constant_filters, (2, 6, 6), True),
    "overridden forward (fallback)": Layer(lambda: Doubled(5, 4), (5,), rule=False),
    "bare parameters (fallback)": Layer(Affine, (3, 4), rule=False),
    "transposed conv1d (fallback)": Layer(lambda: nn.ConvTranspose1d(3, 2, 3, stride=2), (3, 5), rule=False),
    "local response of bilinear form (fallback)": Layer(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Softmax(1), Doubled(4, 3)), (2, 3)
    ),
}
PATHS = ("ghost", "formed")
CASES = [(name, path) for name, layer in LAYERS.items() for path in (PATHS if layer.two_ways else ("auto",))]


def rows_for(layer: Layer, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    targets = torch.rand(rows, generator=generator, dtype=dtype)
    if layer.indices:
        return torch.randint(layer.indices, (rows, *layer.shape), generator=generator), targets
    return torch.randn(rows, *layer.shape, generator=generator, dtype=dtype), targets


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def choose(path: str) -> None:
        if path != "auto":
            for module in ("convolution", "linear", "embedding"):
                monkeypatch.setattr(f"dpvision.gradients.rules.{module}.ghost_pays", lambda **_: path == "ghost")

    return choose


# torch says so once about its own layer, for an even kernel with padding "same".
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("rows_per_unit", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=["f64", "f32"])
@pytest.mark.parametrize(("name", "path"), CASES)
def test_every_rule_agrees_with_the_loop_over_single_units(
    name: str, path: str, dtype: torch.dtype, tolerance: float, rows_per_unit: int, force: Callable[[str], None]
) -> None:
    force(path)
    layer = LAYERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = layer.make().to(dtype)
    for units in (0, 1, 2, 7):
        inputs, targets = rows_for(layer, units * rows_per_unit, dtype)
        alone = reference.unit_gradients_by_loop(model, wavy_loss, inputs, targets, rows_per_unit=rows_per_unit)
        zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for clip_norm in (0.05, 1e6):
            found = clipped_sum(model, wavy_loss, inputs, targets, clip_norm=clip_norm, rows_per_unit=rows_per_unit)
            true = reference.clip_and_add(alone, zeros, clip_norm=clip_norm)
            # Rounding: 1e-10 leaves room for sums over thousands of terms; 1e-4 for their float32 counterparts.
            assert relative_error(found.gradients, true.gradients) <= tolerance
            assert all(gradient.dtype == dtype for gradient in found.gradients.values())


@pytest.mark.parametrize("pictures", [1, 2, 1000])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_sums_by_products_do_not_depend_on_how_many_pictures_are_taken_at_a_time(
    pictures: int, groups: int, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(5, 4, side, side, generator=generator) for side in (9, 3))
    if channels_last:
        x, dy = (each.to(memory_format=torch.channels_last) for each in (x, dy))
    weight = torch.zeros(4, 4 // groups, 3, 3)
    geometry = convolution.Correlation(weight, (3, 3), (2, 2), (2, 2), groups)
    monkeypatch.setattr(convolution, "_WINDOW_NUMBERS", pictures * 9 * 36)
    found = geometry.from_order(convolution._sum_by_products(x, dy, geometry), channels_inside=channels_last)
    step = (2, 2), (0, 0), (2, 2), False, (0, 0), groups
    _, true, _ = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), weight.double(), None, *step, (False, True, False)
    )
    torch.testing.assert_close(found.double(), true, rtol=1e-4, atol=1e-5)
    empty = convolution._sum_by_products(x[:0], dy[:0], geometry)
    assert torch.equal(empty, torch.zeros_like(empty))


@pytest.mark.parametrize("wrong_unit", [0, 1])
def test_a_formed_gradient_that_is_longer_than_its_norm_says_is_not_used(
    wrong_unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof must look at what a step adds up, which norms may have formed."""
    right = ConvolutionGradient.formed

    def too_long(share: ConvolutionGradient) -> Tensor:
        is_new = share._formed_UOD is None
        formed_UOD = right(share)
        if is_new:
            share._squares_U = sum_of_squares(formed_UOD)
            formed_UOD[wrong_unit % formed_UOD.shape[0]] *= 10
        return formed_UOD

    monkeypatch.setattr(ConvolutionGradient, "formed", too_long)
    model = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 64, 2))
    inputs, targets = torch.randn(2, 3, 8, 8), torch.rand(2)
    found = clipped_sum(model, wavy_loss, inputs, targets, clip_norm=0.1)
    true = reference.clipped_sum_by_loop(model, wavy_loss, inputs, targets, clip_norm=0.1)
    assert relative_error(found.gradients, true.gradients) < 1e-4


@pytest.mark.parametrize("wrong_unit", [0, 1])
def test_a_rule_that_is_wrong_for_one_unit_alone_is_not_used(wrong_unit: int) -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    def shift(call: LayerCall) -> dict[str, LayerGradient]:
        gradient = call.dy.clone()
        gradient[wrong_unit] *= 2
        return {"shift": MaterialisedGradient(gradient)}

    register(Shift, rule=shift, parameters=("shift",))
    model = nn.Sequential(Shift(), nn.Linear(5, 3))
    inputs, targets = torch.randn(2, 5), torch.rand(2)
    found = clipped_sum(model, wavy_loss, inputs, targets, clip_norm=0.1)
    true = reference.clipped_sum_by_loop(model, wavy_loss, inputs, targets, clip_norm=0.1)
    assert relative_error(found.gradients, true.gradients) < 1e-5


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_that_should_have_a_rule_has_one(name: str) -> None:
    layer = LAYERS[name]
    module = layer.make()
    if not isinstance(module, nn.Sequential):
        assert (rule_for(module) is not None) == layer.rule


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_the_three_routes_meet(name: str) -> None:
    layer = LAYERS[name]
    model = layer.make().double()
    inputs, targets = rows_for(layer, 6, torch.float64)
    routes = (clipped_sum, reference.clipped_sum_by_loop, reference.clipped_sum_by_func)
    found = [route(model, wavy_loss, inputs, targets, clip_norm=0.3, rows_per_unit=2).gradients for route in routes]
    assert relative_error(found[0], found[1]) < 1e-10
    assert relative_error(found[2], found[1]) < 1e-10


def test_a_rule_is_not_used_where_the_weight_is_computed_from_something_else() -> None:
    layer = nn.Linear(3, 2)
    assert rule_for(layer) is not None
    assert rule_for(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))) is None
    with pytest.warns(FutureWarning):
        legacy = nn.utils.weight_norm(nn.Linear(3, 2))
    assert rule_for(legacy) is None
    layer.forward = lambda x: 3 * x  # type: ignore[method-assign,assignment]
    assert rule_for(layer) is None


def test_side_effects_of_embeddings_have_no_rule() -> None:
    assert rule_for(nn.Embedding(5, 3, max_norm=1.0)) is None
    assert rule_for(nn.Embedding(5, 3, scale_grad_by_freq=True)) is None
