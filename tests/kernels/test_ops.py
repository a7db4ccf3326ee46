"""Every kernel against its equivalent in plain PyTorch, and what holds for all kernels alike.

One table of cases: each is a kernel, arguments for it, and the same computation in float64. The other files of this
folder test what is particular to a subject.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from dpvision import kernels
from dpvision.errors import ArgumentError
from dpvision.kernels import conv_gradients, norm_act, ops, scatter, unit_sums, winograd
from dpvision.kernels.channels_last import laid_out
from dpvision.kernels.ops import PROTOTYPES, Kernel
from dpvision.models.scattering import Scattering

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=f"no native kernels: {kernels.reason()}")
ROWS = 5  # differs from every other size below, so that rows can be told from everything else
SEED = 11


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def image(rows: int, channels: int, height: int = 6, width: int = 7) -> Tensor:
    return laid_out(normal(rows, channels, height, width))


def factors(rows: int) -> Tensor:
    return torch.rand(rows, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A kernel, arguments for a number of rows, and the same in plain operations of float64."""

    kernel: Kernel[..., Any]
    make: Callable[[int], list[Any]]
    plain: Callable[..., Any]
    settings: Callable[[int], dict[str, Any]] = field(default=lambda _: {})
    per_row: bool = True  # outputs have rows, each of which depends on its own row alone
    no_rows: bool = True  # whether there may be none
    many: int = ROWS  # rows from which on several threads work

    def run(self, arguments: list[Any], rows: int = ROWS) -> list[Tensor]:
        return list(flat(self.kernel(*arguments, **self.settings(rows))))


def flat(value: Any) -> list[Tensor]:
    """All tensors in a tensor, a sequence or a dataclass."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = [getattr(value, each.name) for each in fields(value)]
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, (list, tuple)) else []


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: mapped(getattr(value, each.name), change) for each in fields(value)})
    return type(value)(mapped(item, change) for item in value) if isinstance(value, (list, tuple)) else value


# ---- the same in plain operations


def conv_gradient(
    x: Tensor, dy: Tensor, *, kernel: Any = 3, stride: Any = 1, groups: int = 1, padding: int = 0
) -> Tensor:
    """Every row's weight gradient (N, O, I, K, K)."""
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    weight = x.new_zeros(dy.shape[1], x.shape[1] // groups, *kernel).requires_grad_()
    found = []
    for one, gradient in zip(x, dy, strict=True):
        y = F.conv2d(one[None], weight, stride=stride, groups=groups, padding=padding)
        found.append(torch.autograd.grad(y, weight, gradient[None])[0])
    return torch.stack(found)


def plain_windows(x: Tensor, dy: Tensor, *, units: int, kernel: Any, stride: Any, groups: int = 1) -> Any:
    gradients = conv_gradient(x, dy, kernel=kernel, stride=stride, groups=groups).permute(0, 1, 3, 4, 2).flatten(2)
    gradients = gradients.unflatten(0, (units, -1)).sum(1)
    return gradients, gradients.square().sum((1, 2))


def plain_chain(x: Tensor, gamma: Tensor, beta: Tensor, chain: norm_act.Chain, residual: Tensor) -> Any:
    statistics = x.unflatten(1, (chain.groups, -1)).flatten(2)
    rstd = (statistics.var(2, correction=0) + chain.eps).rsqrt()
    y = F.mish(F.group_norm(x, chain.groups, gamma, beta, chain.eps))
    return F.max_pool2d(y, 2) + residual, statistics.mean(2), rstd


CHAIN = norm_act.Chain(4, 1e-5, "mish", norm_first=True, pool=True)


def backward_arguments(rows: int) -> list[Any]:
    x, gamma, beta = image(rows, 12), normal(12), normal(12)
    _, *statistics = norm_act.forward(x, gamma, beta, CHAIN)
    return [image(rows, 12, 3, 3), x, gamma, beta, tuple(statistics), CHAIN]


def plain_backward(dy: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, _: Any, chain: norm_act.Chain) -> Any:
    found = []
    for one, gradient in zip(x, dy, strict=True):
        leaves = [each.clone().requires_grad_() for each in (one[None], gamma, beta)]
        y = plain_chain(*leaves, chain, gradient.new_zeros(()))[0]
        found.append(torch.autograd.grad(y, leaves, gradient[None]))
    dx, dgamma, dbeta = zip(*found, strict=True)
    return torch.cat(dx), torch.stack(dgamma), torch.stack(dbeta)


def plain_pool(x: Tensor, window: int) -> Any:
    return F.max_pool2d(x, window, stride=1, padding=norm_act.POOL_PADDING[window])


def unpool_arguments(rows: int, window: int) -> list[Any]:
    y, index = norm_act.max_pool(image(rows, 9), window)
    return [torch.randn_like(y), index, window]


def plain_unpool(dy: Tensor, index: Tensor, window: int) -> Tensor:
    """Each output's gradient goes to the place in its window that the index names."""
    padding = norm_act.POOL_PADDING[window]
    height, width = (size + window - 1 for size in dy.shape[2:])
    dx = dy.new_zeros(*dy.shape[:2], height, width)
    for place in range(window**2):
        top, left = divmod(place, window)
        dx[:, :, top : top + dy.shape[2], left : left + dy.shape[3]] += dy * (index == place)
    return dx[:, :, padding : height - padding, padding : width - padding]


def plain_pull_back(e: Tensor, weight: Tensor, facts: tuple[Tensor, ...]) -> Tensor:
    mean, s, scale, live = (fact[:, None] for fact in facts)
    e_OD, z = e.flatten(1), (weight - mean) * s
    return ((e_OD - e_OD.mean(1, keepdim=True) - live * z * (z * e_OD).sum(1, keepdim=True)) * scale).view(e.shape)


def plain_moments(dy: Tensor, y: Tensor, box: Tensor) -> Tensor:
    return torch.stack([dy, dy * y, dy * box[:, None], (dy * y).abs()], 1).sum((3, 4))


def plain_filter_moments(e: Tensor, z: Tensor) -> Tensor:
    return torch.stack([e.square().sum(2), e.sum(2), (e * z).sum(2)], 1)


def gram(x: Tensor) -> Tensor:
    return torch.bmm(x.flatten(2).mT, x.flatten(2)).contiguous()


GRAM_PAIRS: dict[int, tuple[Tensor, Tensor]] = {}


def gram_arguments(rows: int) -> list[Any]:
    GRAM_PAIRS[rows] = x, dy = image(rows, 6), image(rows, 4)
    return [gram(x), gram(dy), 6, 7]


def plain_gram_norms(x_gram: Tensor, *_: Any) -> Tensor:
    x, dy = (each.double() for each in GRAM_PAIRS[len(x_gram)])
    return conv_gradient(x, dy, padding=1).square().sum((1, 2, 3, 4))


WEIGHT = torch.randn(18, 21, 3, 3, generator=torch.Generator().manual_seed(SEED))


def plain_convolution(x: Tensor, _: Any, bias: Tensor) -> Tensor:
    return F.conv2d(x, WEIGHT.double(), bias, padding=1)


def plain_unit_gradients(x: Tensor, dy: Tensor, z: Tensor, units: int) -> Any:
    gradient = conv_gradient(x, dy, padding=1).permute(0, 3, 4, 2, 1).unflatten(0, (units, -1)).sum(1)
    moments = [gradient.square(), gradient, gradient * z]
    return gradient, torch.stack([each.sum((1, 2, 3)) for each in moments], 1)


def plain_sum(total: Tensor, x: Tensor, dy: Tensor, factor: Tensor) -> Tensor:
    return total + torch.einsum("n,noikl->klio", factor, conv_gradient(x, dy, padding=1))


SCATTERING = Scattering((12, 16), scales=2, angles=3)


def scatter_arguments(rows: int) -> list[Any]:
    return [torch.rand(rows, 2, 12, 16), *map(list, SCATTERING.tables()), SCATTERING.padding]


def plain_scatter(x: Tensor, *_: Any) -> Tensor:
    return Scattering((12, 16), scales=2, angles=3).double()(x)


def clip_settings(_: int) -> dict[str, Any]:
    return {"below": 0.9, "added": 0.1, "most": 1.0, "least": 1e-9}


def plain_factors(
    norms_sq: list[Tensor], real: Tensor, *, below: float, added: float, most: float, least: float
) -> Tensor:
    factor = (below / (torch.stack(norms_sq).sum(0).sqrt() + added)).clamp(max=most)
    return torch.where(real.bool() & (factor >= least), factor, 0.0)


CASES = {
    "unit_squares": Case(unit_sums.unit_squares, lambda n: [normal(n, 37)], lambda x: x.square().sum(1), many=2000),
    "clip_factors": Case(
        unit_sums.clip_factors,
        lambda n: [[factors(n), 10 * factors(n)], torch.rand(n) < 0.7],
        plain_factors,
        clip_settings,
        per_row=False,
    ),
    "add_weighted": Case(
        unit_sums.add_weighted,
        lambda n: [normal(3, 40, dtype=torch.float64), normal(n, 3, 40), factors(n)],
        lambda total, parts, factor: total + torch.tensordot(factor, parts, dims=1),
        per_row=False,
        many=2000,
    ),
    "filter_order": Case(
        unit_sums._filter_order,
        lambda n: [normal(3, 3, n, 14, dtype=torch.float64)],
        lambda sums: sums.permute(3, 2, 0, 1),
        per_row=False,
    ),
    "narrow_linear": Case(
        unit_sums.narrow_linear,
        lambda n: [normal(n, 29), normal(3, 29), normal(3)],
        lambda x, weight, bias: (F.linear(x, weight, bias), x.square().sum(1)),
        many=7000,
    ),
    "outer_sum": Case(
        unit_sums.outer_sum,
        lambda n: [normal(n, 29), normal(n, 3), factors(n)],
        lambda a, g, factor: (g * factor[:, None]).mT @ a,
        per_row=False,
        many=7000,
    ),
    "window_gradients": Case(
        conv_gradients.window_gradients,
        lambda n: [image(n, 3, 8, 9), image(n, 7, 3, 4)],
        plain_windows,
        lambda n: {"units": n, "kernel": (4, 3), "stride": (2, 2)},
        no_rows=False,
    ),
    "depthwise_gradients": Case(
        conv_gradients.window_gradients,
        lambda n: [image(n, 11, 8, 9), image(n, 11, 3, 4)],
        plain_windows,
        lambda n: {"units": n, "kernel": (4, 3), "stride": (2, 2), "groups": 11},
        no_rows=False,
    ),
    "gram_norms_sq": Case(conv_gradients.gram_norms_sq, gram_arguments, plain_gram_norms),
    "channel_sums": Case(conv_gradients.channel_sums, lambda n: [image(n, 12)], lambda dy: dy.sum((2, 3))),
    "convolution_moments": Case(
        conv_gradients.convolution_moments,
        lambda n: [image(n, 12), image(n, 12), normal(n, 6, 7)],
        plain_moments,
    ),
    "filter_moments": Case(
        conv_gradients.filter_moments, lambda n: [normal(n, 4, 23), normal(4, 23)], plain_filter_moments, many=2000
    ),
    "pull_back": Case(
        conv_gradients.pull_back,
        lambda n: [normal(n, 4, 3, 3, dtype=torch.float64), normal(n, 36), tuple(normal(n) for _ in range(4))],
        plain_pull_back,
        many=2000,
    ),
    "norm_act_forward": Case(
        norm_act.forward,
        lambda n: [image(n, 12), normal(12), normal(12), CHAIN, image(n, 12, 3, 3)],
        plain_chain,
    ),
    "norm_act_backward": Case(norm_act.backward, backward_arguments, plain_backward),
    "max_pool_3": Case(norm_act.max_pool, lambda n: [image(n, 9), 3], plain_pool),
    "max_pool_2": Case(norm_act.max_pool, lambda n: [image(n, 9), 2], plain_pool),
    "max_pool_3_backward": Case(norm_act.max_pool_backward, lambda n: unpool_arguments(n, 3), plain_unpool),
    "max_pool_2_backward": Case(norm_act.max_pool_backward, lambda n: unpool_arguments(n, 2), plain_unpool),
    "tanh": Case(norm_act.tanh, lambda n: [image(n, 9)], torch.tanh, many=200),
    "winograd_convolve": Case(
        winograd.convolve,
        lambda n: [image(n, 21), winograd.transform(WEIGHT, backward=False), normal(18)],
        plain_convolution,
    ),
    "winograd_convolve_raw": Case(
        winograd.convolve,
        lambda n: [image(n, 21), winograd.RawFilters(WEIGHT, backward=False), normal(18)],
        plain_convolution,
    ),
    "winograd_unit_gradients": Case(
        winograd.unit_gradients,
        lambda n: [image(n, 21), image(n, 18), normal(3, 3, 21, 18), n],
        plain_unit_gradients,
    ),
    "winograd_add_gradient": Case(
        winograd.add_gradient,
        lambda n: [normal(3, 3, 21, 18, dtype=torch.float64), image(n, 21), image(n, 18), torch.rand(n)],
        plain_sum,
        per_row=False,
    ),
    "scatter": Case(scatter.scatter, scatter_arguments, plain_scatter),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_row_case = pytest.mark.parametrize(
    "case", [case for case in CASES.values() if case.per_row], ids=[name for name in CASES if CASES[name].per_row]
)


def arguments_of(case: Case, rows: int = ROWS) -> list[Any]:
    torch.manual_seed(SEED)
    return case.make(rows)


def bits(outputs: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(each.shape, each.stride(), each.dtype, each.contiguous().numpy().tobytes()) for each in outputs]


# ---- results


@needs_kernels
@each_case
@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_kernel_gives_what_plain_pytorch_gives(case: Case, rows: int) -> None:
    exact = mapped(arguments_of(case, rows), lambda x: x.double() if x.is_floating_point() else x.clone())
    wanted = flat(case.plain(*exact, **case.settings(rows)))
    arguments = arguments_of(case, rows)
    found = case.run(arguments, rows) or flat(arguments[0])  # or what was added to
    for got, right in zip(found, wanted, strict=False):  # plain pools give no index
        assert got.shape == right.shape
        # Float32 sums and Winograd's transforms lose a few bits; ten times that would be a wrong formula.
        assert float((got.double() - right).norm()) <= 1e-5 * float(right.norm())


@needs_kernels
@each_case
def test_no_bit_depends_on_the_number_of_threads(case: Case) -> None:
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        arguments = arguments_of(case, case.many)
        found.append(bits([*case.run(arguments, case.many), *flat(arguments)]))
    assert found[0] == found[1] == found[2]


@needs_kernels
@each_row_case
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_own_row(case: Case, bad: float) -> None:
    def spoilt(x: Tensor) -> Tensor:
        if x.shape[0] == ROWS and x.is_floating_point():
            x[1] = bad
        return x

    clean = case.run(arguments_of(case))
    hurt = case.run(mapped(arguments_of(case), spoilt))
    others = [0, 2, 3, 4]
    for before, after in zip(clean, hurt, strict=True):
        assert bits([after[others]]) == bits([before[others]])
    if math.isnan(bad):
        assert hurt[0][1].isnan().any(), "the row itself says so"


@needs_kernels
@each_row_case
def test_no_rows_give_no_rows(case: Case) -> None:
    assert case.kernel.takes(*arguments_of(case, 0), **case.settings(0)) == case.no_rows
    if case.no_rows:
        shapes = [(0, *each.shape[1:]) for each in case.run(arguments_of(case))]
        assert [each.shape for each in case.run(arguments_of(case, 0), 0)] == shapes


@needs_kernels
@each_case
@pytest.mark.parametrize("offset", [1, 2, 3, 16])
def test_memory_beside_a_tensor_is_neither_read_nor_written_whatever_its_alignment(case: Case, offset: int) -> None:
    walls: list[Tensor] = []

    def walled(x: Tensor) -> Tensor:
        wall = math.nan if x.is_floating_point() else 1
        memory = torch.full((offset + x.untyped_storage().nbytes() // x.element_size() + 64,), wall, dtype=x.dtype)
        inside = memory.as_strided(x.shape, x.stride(), offset).copy_(x)
        walls.extend((memory[:offset], memory[-64:]))
        return inside

    arguments, beside = arguments_of(case), mapped(arguments_of(case), walled)
    plain = bits(case.run(arguments)), bits(flat(arguments))
    assert (bits(case.run(beside)), bits(flat(beside))) == plain
    assert all(wall.isnan().all() if wall.is_floating_point() else wall.all() for wall in walls)


# ---- what is refused


class Subclass(Tensor):
    """Somebody's own kind of tensor."""


def fake(x: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(x)


UNREADABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "another type": lambda x: x.float() if x.dtype == torch.float64 else x.double(),
    "another device": lambda x: x.to("meta"),
    "a subclass": lambda x: x.as_subclass(Subclass),
    "without numbers": fake,
    "another dimension": lambda x: x[None],
}


@needs_kernels
@each_case
@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
def test_tensors_that_a_kernel_cannot_read_are_refused(case: Case, change: Callable[[Tensor], Tensor]) -> None:
    for place in range(len(flat(arguments_of(case)))):
        arguments, count = arguments_of(case), iter(range(99))
        wrong = mapped(arguments, lambda x, place=place, count=count: change(x) if next(count) == place else x)
        if change is UNREADABLE["another dimension"] and case.kernel in (norm_act.tanh, unit_sums.unit_squares):
            continue  # these take any
        assert not case.kernel.takes(*wrong, **case.settings(ROWS))
        assert case.kernel.attempt(*wrong, **case.settings(ROWS)) is None
        with pytest.raises(ArgumentError, match=rf"needs .*, got .*`{case.kernel.__name__}.takes` first"):  # type: ignore
            case.kernel(*wrong, **case.settings(ROWS))


@needs_kernels
@each_case
def test_a_kernel_takes_its_arguments_unless_kernels_are_switched_off(case: Case) -> None:
    arguments, settings = arguments_of(case), case.settings(ROWS)
    assert case.kernel.takes(*arguments, **settings)
    with kernels.switched_off():
        assert not case.kernel.takes(*arguments, **settings)
        assert case.kernel.attempt(*arguments, **settings) is None


@needs_kernels
@each_case
def test_a_graph_through_a_kernel_is_an_error_and_not_a_missing_gradient(case: Case) -> None:
    arguments = mapped(arguments_of(case), lambda x: x.requires_grad_() if x.is_floating_point() else x)
    if not any(tensor.requires_grad for tensor in flat(arguments)) or case.kernel is unit_sums.clip_factors:
        return  # factors are given as addresses of norms, which have no graph
    with pytest.raises(ArgumentError, match=r"records no gradients|images on the CPU"):
        case.kernel(*arguments, **case.settings(ROWS))


def test_errors_describe_tensors_without_their_values() -> None:
    with pytest.raises(ArgumentError, match=r"got float64 \(2, 3\) with strides \(3, 1\) on cpu\. ") as caught:
        unit_sums.unit_squares(torch.full((2, 3), 12345.0, dtype=torch.float64))
    assert "12345" not in str(caught.value)


# ---- the table of C functions


def declared() -> dict[str, ops.Prototype]:
    """The C functions as the sources declare them."""
    found = {}
    for source in (Path(ops.__file__).parent / "cpp").glob("*.cpp"):
        for kind, name, inside in re.findall(r'extern "C" (\w+) dpvision_(\w+)\(([^)]*)\)', source.read_text()):
            parameters = [part.strip() for part in inside.split(",")]
            assert parameters.pop().split()[0] == "int", "threads come last"
            kinds = ["p" if "*" in part else part.split()[0] for part in parameters]
            assert kinds == sorted(kinds, key=["int64_t", "double", "p"].index), "integers, doubles, pointers"
            counts = (kinds.count("int64_t"), kinds.count("double"), kinds.count("p"))
            found[name] = ops.Prototype(*counts, counts=kind == "int64_t")
    return found


def test_prototypes_are_those_of_the_sources() -> None:
    assert declared() == PROTOTYPES
