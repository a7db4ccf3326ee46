"""Models and losses that could make the clipped sum depend on one unit by more than its own clipped gradient.

Every case must be refused, or its sum must be exact and separable (``separability_oracle`` decides). Some are honest code
in a form that is hard to follow; they stand beside a hostile twin of the same form.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import os
import random
import sys
import time
import types
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from clean_models import NamedResult, Result, StandardisedConv, TinyViT, dice_of_each_image, masks
from model_cases import CLASSES, CLEANUP, SIDE, Case, Own, cross_entropy, images, tokens, vectors

HOSTILE: list[Case] = []
"""The table."""

WIDTH = 6


def hostile(name: str, why: str, **facts: bool) -> Callable[[Callable[[], Own]], Callable[[], Own]]:
    """Enter a function that builds a model into the table."""

    def enter(make: Callable[[], Own]) -> Callable[[], Own]:
        HOSTILE.append(Case(name, why, make, **facts))
        return make

    return enter


class Mix(Protocol):
    """What is done between two layers; it may also return how to undo it after the second one."""

    def __call__(self, x: Tensor, /) -> Any: ...


class Sandwich(nn.Module):
    """A layer, something done to its outputs, a second layer, that undone, and a head."""

    def __init__(self, mix: Mix | None = None, *, conv: bool = False) -> None:
        super().__init__()
        if mix is not None:
            self.mix = mix
        if conv:
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))
        else:
            self.first, self.second, self.head = (nn.Linear(WIDTH, size) for size in (WIDTH, WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(torch.tanh(self.first(x)))
        y, undo = mixed if isinstance(mixed, tuple) else (mixed, lambda y: y)
        return self.head(undo(torch.tanh(self.second(y))))


def linear_own(model: nn.Module, **facts: Any) -> Own:
    """Give a model vectors and cross-entropy."""
    return Own(model, facts.pop("loss_fn", cross_entropy), vectors, **facts)


def conv_own(model: nn.Module, **facts: Any) -> Own:
    """Give a model images and cross-entropy."""
    return Own(model, facts.pop("loss_fn", cross_entropy), images, **facts)


def mixes(name: str, why: str, mix: Mix, *, conv: bool | None = False, **facts: bool) -> None:
    """Enter a sandwich with this in the middle: of linear layers, of convolutions, or both (None)."""
    for is_conv in (False, True) if conv is None else (conv,):
        own = conv_own if is_conv else linear_own
        kind = ", convolutions" if is_conv else ""

        def make(own: Any = own, is_conv: bool = is_conv) -> Own:
            return own(Sandwich(mix, conv=is_conv))

        HOSTILE.append(Case(name + kind, why, make, **facts))


def by(order: Callable[[Tensor], Tensor]) -> Mix:
    """Reorder rows by an index, and put them back after the layer."""

    def mix(x: Tensor) -> Any:
        index = order(x)
        return x[index], lambda y: y[index.argsort()]

    return mix


# ------------------------------------------------------------------------------ rows moved, and put back after the layer
WRONG_ROW = "the outputs are separable, but the layer sees each unit at another unit's place"

mixes("rows flipped and put back", WRONG_ROW, lambda x: (x.flip(0), lambda y: y.flip(0)), conv=None)
mixes("rows rolled and put back", WRONG_ROW, lambda x: (x.roll(1, 0), lambda y: y.roll(-1, 0)), conv=None)
mixes("rows sorted and put back", WRONG_ROW, by(lambda x: x.flatten(1).sum(1).argsort()), conv=None)
mixes("rows reversed by an index", WRONG_ROW, by(lambda x: torch.arange(x.shape[0] - 1, -1, -1)))
mixes("rows shuffled and put back", WRONG_ROW, by(lambda x: torch.randperm(x.shape[0])), random=True)
mixes("rows by index_select", WRONG_ROW, lambda x: x.index_select(0, torch.arange(x.shape[0]).flip(0)))
mixes("rows by gather", WRONG_ROW, lambda x: x.gather(0, torch.arange(x.shape[0]).flip(0)[:, None].expand_as(x)))
mixes("every column sorted", "order statistics of the batch", lambda x: x.sort(dim=0).values)
mixes("columns sorted and put back", WRONG_ROW, lambda x: _sorted_columns(x))
mixes("rows by take_along_dim", WRONG_ROW, lambda x: x.take_along_dim(x.argsort(0), 0))
mixes("rows by take", "flat indices know no rows", lambda x: x.take(torch.arange(x.numel()).flip(0).view_as(x)))
mixes("rows by a permutation matrix", WRONG_ROW, lambda x: _by_matrix(x))
mixes("rows by einsum", "the rows are summed over", lambda x: torch.einsum("nm,mc->nc", torch.eye(x.shape[0]).flip(0), x))
mixes("rows by cat", "the last row moves to the front", lambda x: torch.cat([x[-1:], x[:-1]]), conv=None)
mixes("rows by stack and unbind", "a list of rows in another order", lambda x: torch.stack(x.unbind(0)[::-1]))
mixes("rows by split", "a list of pieces in another order", lambda x: torch.cat(x.split(1)[::-1]))
mixes("rows by padding", "padded at one end and cut at the other", lambda x: F.pad(x, (0, 0, 1, 0))[:-1])
mixes("rows by negative dimension", "dimension -2 of a matrix is the rows", lambda x: x.flip(-2))
mixes("rows by slices", "every row gets its neighbour's value", lambda x: x + torch.cat([x[1:], x[:1]]).detach())
mixes("rows by index_put", "written to another row", lambda x: x.index_put((torch.arange(x.shape[0]).flip(0),), x))
mixes("rows by scatter", "scattered along the rows", lambda x: x.scatter(0, x.argsort(0), x))
mixes("rows by index_add", "added to the row before", lambda x: x.index_add(0, torch.arange(x.shape[0]).roll(1), x))
mixes("rows as an embedding table", "row i looks row n-i up", lambda x: F.embedding(torch.arange(x.shape[0]).flip(0), x))
mixes("rows repeated and cut", "row i gets row i/2", lambda x: x.repeat_interleave(2, 0)[: x.shape[0]])
mixes("rows tiled and cut", "shifted through a repetition", lambda x: x.repeat(2, 1)[1 : x.shape[0] + 1])
mixes("first row for all", "an expanded row", lambda x: x[:1].expand_as(x))
mixes("first row added to all", "broadcasting over rows", lambda x: x + x[0])
mixes("last row added to all", "broadcasting over rows", lambda x: x + x.select(0, -1).detach())


def _sorted_columns(x: Tensor) -> Any:
    values, order = x.sort(dim=0)
    return values, lambda y: y.gather(0, order.argsort(0))


def _by_matrix(x: Tensor) -> Any:
    swap = torch.eye(x.shape[0], dtype=x.dtype).flip(0)
    return swap @ x, lambda y: swap.t() @ y


# -------------------------------------------------------------------------------------------------------- views of rows
FOLDED = "a view takes entries of one row for entries of another"

mixes("view with the rows inside", FOLDED, lambda x: x.reshape(x.shape[1], -1).t())
mixes("pairs of rows folded", FOLDED, lambda x: _pairs(x))
mixes("rows folded into two", FOLDED, lambda x: torch.cat([x, x[: x.shape[0] % 2]]).view(2, -1).sum(0).view(-1, 6).mean(0) + x)
mixes("transposed twice around a flip", FOLDED, lambda x: x.t().flip(-1).t())
mixes("batch in the channel axis", FOLDED, lambda x: x.transpose(0, 1).flip(1).transpose(0, 1), conv=True)
mixes("rows and channels exchanged by reshape", FOLDED, lambda x: x.reshape(4, -1, SIDE, SIDE).transpose(0, 1), conv=True)
mixes("flattened and convolved", FOLDED, lambda x: F.conv1d(x.reshape(1, 1, -1), torch.ones(1, 1, 3), padding=1).view_as(x))
mixes("pooled along the rows", FOLDED, lambda x: F.avg_pool1d(x.t(), 3, 1, 1).t())
mixes("max-pooled along the rows", FOLDED, lambda x: F.max_pool1d(x.t()[None], 3, 1, 1)[0].t())
mixes("pooled as a volume", FOLDED, lambda x: F.avg_pool3d(x.transpose(0, 1)[None], (3, 1, 1), 1, (1, 0, 0))[0].transpose(0, 1), conv=True)
mixes("unfolded along the rows", FOLDED, lambda x: torch.cat([x, x[:1]]).unfold(0, 2, 1).sum(-1))
mixes("as_strided with stride zero", FOLDED, lambda x: x.contiguous().as_strided(x.shape, (0, 1)))
mixes("as_strided over rows", FOLDED, lambda x: torch.cat([x, x]).as_strided(x.shape, (x.shape[1], 1), x.shape[1]))
mixes("interpolated along the rows", FOLDED, lambda x: F.interpolate(x.t()[None], size=2 * x.shape[0], mode="linear")[0, :, ::2].t())
mixes("shifted by a view", FOLDED, lambda x: torch.cat([x.flatten()[3:], x.flatten()[:3]]).view_as(x))
mixes("bytes in another row", FOLDED, lambda x: x.detach().contiguous().view(torch.int32).roll(1, 0).view(torch.float32) + x)
mixes("rows as groups of a convolution", "honest: one group per row", lambda x: _row_groups(x), conv=True)
mixes("local response over rows", "the rows lie in the channel axis", lambda x: F.local_response_norm(x.transpose(0, 1), 3).transpose(0, 1), conv=True)
mixes("swin windows that cross rows", "rows folded into windows in the wrong order", lambda x: x.permute(2, 0, 3, 1).reshape(-1, 4, SIDE, SIDE), conv=True)
mixes("moved to the end and cumulated", FOLDED, lambda x: x.movedim(0, -1).cumsum(-1).movedim(-1, 0), conv=None)


def _pairs(x: Tensor) -> Tensor:
    even = torch.cat([x, x[: x.shape[0] % 2]])
    return even.view(-1, 2, x.shape[1]).flip(1).reshape(even.shape)[: x.shape[0]]


def _row_groups(x: Tensor) -> Tensor:
    n = x.shape[0]
    weight = torch.ones(4, 4, 1, 1).repeat(n, 1, 1, 1)
    return F.conv2d(x.reshape(1, n * 4, SIDE, SIDE), weight, groups=n).view_as(x)


# --------------------------------------------------------------------------------------------- statistics of the batch
STATISTIC = "every row depends on a statistic of all rows"

mixes("batch mean", STATISTIC, lambda x: x - x.mean(0), conv=None)
mixes("batch mean without gradient", STATISTIC, lambda x: x - x.mean(0).detach())
mixes("batch maximum", STATISTIC, lambda x: x / x.max(), conv=None)
mixes("batch maximum of every column", STATISTIC, lambda x: x / x.abs().amax(0, keepdim=True))
mixes("batch standard deviation", STATISTIC, lambda x: x / (x.std(0, unbiased=False) + 0.1))
mixes("batch variance with the mean", STATISTIC, lambda x: x / (torch.var_mean(x, 0, correction=0)[0] + 0.1))
mixes("batch norm of everything", STATISTIC, lambda x: x / x.norm(), conv=None)
mixes("logsumexp over rows", STATISTIC, lambda x: x - x.logsumexp(0))
mixes("softmax over rows", STATISTIC, lambda x: x.softmax(0), conv=None)
mixes("softmax over dimension -2", STATISTIC, lambda x: F.softmax(x, dim=-2))
mixes("softmax without a dimension", "for three dimensions the default is dimension 0", lambda x: F.softmax(x.unsqueeze(2))[..., 0])
mixes("normalised over rows", STATISTIC, lambda x: F.normalize(x, dim=0))
mixes("layer norm over the batch axis", STATISTIC, lambda x: F.layer_norm(x.t(), (x.shape[0],)).t())
mixes("layer norm over everything", STATISTIC, lambda x: F.layer_norm(x, tuple(x.shape)), conv=None)
mixes("median", STATISTIC, lambda x: x - x.median())
mixes("quantile of every column", STATISTIC, lambda x: x - x.quantile(0.5, dim=0))
mixes("running sum and its difference", "undone, but the layer sees sums of rows", lambda x: (x.cumsum(0), lambda y: torch.cat([y[:1], y.diff(dim=0)])))
mixes("running maximum", STATISTIC, lambda x: x.cummax(0).values)
mixes("product of rows", STATISTIC, lambda x: x + x.prod(0))
mixes("rank in the batch", STATISTIC, lambda x: x * x.argsort(0).argsort(0))
mixes("batch histogram", STATISTIC, lambda x: x * torch.histc(x.detach(), 5, -1, 1)[0])
mixes("count of large entries", STATISTIC, lambda x: x * (x.detach() > 0.5).sum())
mixes("any row", STATISTIC, lambda x: torch.where((x > 0.99).any(), -x, x))
mixes("renorm along columns", "renorm of dimension 1 takes norms over rows", lambda x: x.renorm(2, 1, 0.5))
mixes("covariance", STATISTIC, lambda x: x @ (x.t() @ x))
mixes("distances between rows", STATISTIC, lambda x: torch.cdist(x, x).softmax(1) @ x)
mixes("attention over the batch", STATISTIC, lambda x: (x @ x.t()).softmax(1) @ x)
mixes("fused attention over the batch", "two dimensions are a sequence without a batch", lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0])
mixes("tensordot of rows", STATISTIC, lambda x: torch.tensordot(x, x, ([1], [1])).tanh() @ x)
mixes("kernel made from the batch", "the filter is a sum over rows", lambda x: F.conv2d(x, x.sum(0, keepdim=True).expand(4, -1, -1, -1)[..., :3, :3], padding=1), conv=True)
mixes("Fourier transform over rows", "frequencies of the batch", lambda x: torch.fft.fft(x, dim=0).real, conv=None)
mixes("Fourier transform of all dimensions", "frequencies of the batch", lambda x: torch.fft.fftn(x).abs())
mixes("scale of fake quantization", "the scale is the batch maximum", lambda x: x / x.abs().max() * 127)
mixes("singular vectors", "directions of the whole batch", lambda x: x @ torch.linalg.svd(x, full_matrices=False).Vh.t().detach())
mixes("whitened", "the inverse root of the batch's covariance", lambda x: torch.linalg.solve(x.t() @ x + torch.eye(6), x.t()).t())
mixes("nonzero rows only", "how many rows there are depends on data", lambda x: x * torch.nonzero(x.sum(1) > 0).shape[0])
mixes("rows selected by a mask", "the kept rows move up", lambda x: torch.cat([x[x.sum(1) > 0], x[x.sum(1) <= 0]]))
mixes("unique entries", "their number depends on all rows", lambda x: x * x.round().unique().numel())
mixes("sparse round trip", "the pattern of the batch", lambda x: torch.sparse.mm(torch.eye(x.shape[0]).flip(0).to_sparse(), x))

# -------------------------------------------------------------------------------------- dependence on place and number
PLACE = "adding a unit moves the others to another place or number"

mixes("weights by place", PLACE, lambda x: x * torch.arange(1, x.shape[0] + 1)[:, None])
mixes("weights by a line over the batch", PLACE, lambda x: x * torch.linspace(0.1, 1, x.shape[0])[:, None])
mixes("divided by the number of rows", PLACE, lambda x: x / x.shape[0])
mixes("first row set to zero", PLACE, lambda x: torch.cat([torch.zeros_like(x[:1]), x[1:]]))
mixes("every other row negated", PLACE, lambda x: x * (1 - 2 * (torch.arange(x.shape[0]) % 2))[:, None])
mixes("triangular mask over rows", PLACE, lambda x: torch.ones(x.shape[0], x.shape[0]).tril() @ x)
mixes("identity matrix times rows", "honest, but a general matrix over rows", lambda x: torch.eye(x.shape[0]) @ x)

# ------------------------------------------------------------------------------------------------ branches on all rows
BRANCH = "which branch is taken depends on all rows, or on their number"


def _if(condition: Callable[[Tensor], Any], then: Mix = lambda x: x.flip(0) + x) -> Mix:
    return lambda x: then(x) if condition(x) else x


def _from(k: int) -> Mix:
    return _if(lambda x: x.shape[0] >= k)


for _k in (2, 3, 4, 5, 6, 8, 9, 16, 17, 32, 33):
    mixes(f"mixing from {_k} rows on", BRANCH, _from(_k))
mixes("mixing from 5 rows on, by len", BRANCH, _if(lambda x: len(x) >= 5))
mixes("mixing from 5 rows on, by size", BRANCH, _if(lambda x: x.size(0) > 4))
mixes("mixing from 5 rows on, by numel", BRANCH, _if(lambda x: x.numel() >= 30))
mixes("mixing from 5 rows on, by a tensor", BRANCH, _if(lambda x: torch.tensor(x.shape[0]) >= 5))
mixes("mixing from 5 rows on, by bytes", BRANCH, _if(lambda x: x.nbytes >= 120))
mixes("mixing from 5 rows on, by slicing", BRANCH, lambda x: torch.cat([x[:4], x[4:].flip(0)]))
mixes("mixing from 5 rows on, by an exponent", BRANCH, lambda x: x + x.flip(0) * min(1, x.shape[0] // 5))
mixes("mixing from 5 rows on, by a loop", BRANCH, lambda x: functools.reduce(lambda y, _: y.roll(1, 0), range(5, x.shape[0]), x))
mixes("mixing of even batches", BRANCH, _if(lambda x: x.shape[0] % 2 == 0))
mixes("mixing of one size", BRANCH, _if(lambda x: x.shape[0] == 17))
mixes("mixing of a set of sizes", BRANCH, _if(lambda x: x.shape[0] in {3, 5, 8, 64}))
mixes("mixing where the size cannot be compared", "falls back when the size is no plain number", lambda x: _typed(x))

mixes("branch on the maximum", BRANCH, _if(lambda x: x.max() > 0.95, lambda x: x / 255), conv=None)
mixes("branch on the maximum by item", BRANCH, _if(lambda x: x.max().item() > 0.95, lambda x: x / 255))
mixes("branch on any", BRANCH, _if(lambda x: (x > 0.95).any(), lambda x: x / 255))
mixes("branch on a list", BRANCH, _if(lambda x: max(x.flatten().tolist()) > 0.95, lambda x: x / 255))
mixes("branch without a branch", BRANCH, lambda x: torch.where(x.max() > 0.95, x / 255, x))
mixes("branch as an index", BRANCH, lambda x: torch.stack([x, x / 255])[(x.max() > 0.95).long()])
mixes("branch as a factor", BRANCH, lambda x: x * (x.max() < 0.95))
mixes("branch of torch.cond", BRANCH, lambda x: torch.cond(x.max() > 0.95, lambda x: x / 255, lambda x: x.clone(), (x,)))
mixes("branch that hides an error", BRANCH, lambda x: _tried(x))
mixes("branch on equality of tensors", BRANCH, _if(lambda x: torch.equal(x, x.clamp(max=0.95)), lambda x: x / 255))
mixes("branch on allclose", BRANCH, _if(lambda x: torch.allclose(x, x.clamp(max=0.95)), lambda x: x / 255))
mixes("branch on numpy", BRANCH, _if(lambda x: x.detach().numpy().max() > 0.95, lambda x: x / 255))
mixes("through numpy", "numpy is outside of every trace", lambda x: x - torch.from_numpy(x.detach().numpy().mean(0)))


def _typed(x: Tensor) -> Tensor:
    return x + x.flip(0) if type(x.shape[0]) is int else x


def _tried(x: Tensor) -> Tensor:
    try:
        return x / 255 if x.max() > 0.95 else x
    except Exception:  # noqa: BLE001 - what a tracer raises is swallowed
        return x


class ScaledImages(nn.Module):
    """``if x.max() > 1.5: x = x / 255``, as it stands in many repositories."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Sandwich(lambda x: x, conv=True)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 1.5:
            x = x / 255
        return self.body(x)


@hostile("images scaled if one is bright", "one bright image darkens all others")
def scaled_images() -> Own:
    return conv_own(ScaledImages())


# ----------------------------------------------------------------------------------- who is asking: honest while watched
WATCHED = "honest in a trial, different in a step"

mixes("mixing with gradients only", WATCHED, _if(lambda x: torch.is_grad_enabled()))
mixes("mixing where gradients are required", WATCHED, _if(lambda x: x.requires_grad))
mixes("mixing outside of a compiler", WATCHED, _if(lambda x: not torch.compiler.is_compiling()))
mixes("mixing outside of an export", WATCHED, _if(lambda x: not torch.compiler.is_exporting()))
mixes("mixing of ordinary tensors", WATCHED, _if(lambda x: type(x) is Tensor))
mixes("mixing in float32", WATCHED, _if(lambda x: x.dtype == torch.float32))
mixes("mixing if not contiguous", WATCHED, _if(lambda x: not x.is_contiguous()), conv=True)
mixes("mixing by the caller's name", WATCHED, _if(lambda x: any("export" in f.filename for f in inspect.stack(0))))
mixes("mixing by depth of the stack", WATCHED, _if(lambda x: sys._getframe(8).f_lineno % 2 == 0))


class InTraining(Sandwich):
    def mix(self, x: Tensor) -> Tensor:
        return x + x.flip(0) if self.training else x


@hostile("mixing in training mode only", WATCHED)
def mixing_in_training() -> Own:
    return linear_own(InTraining())


# ------------------------------------------------------------------------------------------------- randomness and time
COIN = "mixing with probability 0.3: a trial sees the other branch"


def _mixup(x: Tensor) -> Tensor:
    return 0.6 * x + 0.4 * x.roll(1, 0)


mixes("mixup by Python's coin", COIN, _if(lambda x: random.random() < 0.3, _mixup), conv=None, random=True, refused=True)
mixes("mixup by numpy's coin", COIN, _if(lambda x: np.random.rand() < 0.3, _mixup), random=True, refused=True)
mixes("mixup by torch's coin", COIN, _if(lambda x: torch.rand(()).item() < 0.3, _mixup), random=True, refused=True)
mixes("mixup by torch's coin as a tensor", COIN, _if(lambda x: torch.rand(()) < 0.3, _mixup), random=True, refused=True)
mixes("mixup with a random share", COIN, lambda x: x + (torch.rand(()) < 0.3) * (x.roll(1, 0) - x), random=True)
mixes("mixup with a random partner", COIN, lambda x: 0.7 * x + 0.3 * x[torch.randperm(x.shape[0])], conv=None, random=True)
mixes("mixup by a generator of its own", COIN, _if(lambda x: _RNG.random() < 0.3, _mixup), random=True, refused=True)
mixes("mixup by numpy's new generator", COIN, _if(lambda x: _NUMPY_RNG.random() < 0.3, _mixup), random=True, refused=True)
mixes("mixup by the system's entropy", COIN, _if(lambda x: os.urandom(1)[0] < 77, _mixup), random=True, refused=True)
mixes("mixup by a beta distribution", COIN, lambda x: _beta_mixup(x), random=True)
mixes("mixup by a shuffled list", COIN, lambda x: x + 0.3 * x[random.sample(range(x.shape[0]), x.shape[0])], random=True, refused=True)
mixes("mixup by the clock", COIN, _if(lambda x: time.time() % 1 < 0.3, _mixup), random=True, refused=True)
mixes("mixup by the processor's clock", COIN, _if(lambda x: time.perf_counter_ns() % 10 < 3, _mixup), random=True, refused=True)
mixes("mixup by the date", COIN, _if(lambda x: datetime.datetime.now().microsecond % 10 < 3, _mixup), random=True)
mixes("mixup by an address", COIN, _if(lambda x: id(x) // 64 % 10 < 3, _mixup), random=True)
mixes("mixup by a tensor's address", COIN, _if(lambda x: x.data_ptr() // 64 % 10 < 3, _mixup), random=True)
mixes("scaled by Python's coin", "separable, but frozen by a trace", lambda x: x * random.random(), random=True, refused=True)
mixes("scaled by numpy's coin", "separable, but frozen by a trace", lambda x: x * np.random.rand(), random=True, refused=True)
mixes("batch-mean dropout", "dropped entries become the batch's mean", lambda x: _mean_dropout(x), conv=None, random=True)
mixes("dropout of the batch by its mean", "the rate is a statistic", lambda x: x * torch.bernoulli(x.mean(0).sigmoid()), random=True)
mixes("one mask for all rows", "honest: the same mask for every row", lambda x: x * (torch.rand(1, 6) < 0.5), random=True)
mixes("seeded by the data", "the next draw tells what the data was", lambda x: _seeded(x), random=True)

_RNG, _NUMPY_RNG = random.Random(0), np.random.default_rng(0)


def _beta_mixup(x: Tensor) -> Tensor:
    share = torch.distributions.Beta(0.3, 0.3).sample()
    return share * x + (1 - share) * x.flip(0)


def _mean_dropout(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) < 0.3, x.mean(0, keepdim=True), x)


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(int(x.detach().sum() * 1000))
    return x * torch.rand_like(x)


# ------------------------------------------------------------------------------------ state from one call to the next
STATE = "one call's rows are carried into the next"


class Remembers(Sandwich):
    """Subtracts what it kept of the batch before, if there is any, and keeps a mean of this one."""

    kept: Any = None

    def mix(self, x: Tensor) -> Tensor:
        before = self.load()
        self.save(x.mean(0, keepdim=True).detach())
        return x if before is None else x - 3 * before

    def load(self) -> Tensor | None:
        return self.kept

    def save(self, mean: Tensor) -> None:
        self.kept = mean


class InList(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def load(self) -> Tensor | None:
        return self.kept[-1] if self.kept else None

    def save(self, mean: Tensor) -> None:
        self.kept.append(mean)


class InDict(InList):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {}

    def load(self) -> Tensor | None:
        return self.kept.get("mean")

    def save(self, mean: Tensor) -> None:
        self.kept["mean"] = mean


class InObject(Remembers):
    """In an object of one's own, a level deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = types.SimpleNamespace(inner=types.SimpleNamespace(kept=None))

    def load(self) -> Tensor | None:
        return self.memory.inner.kept

    def save(self, mean: Tensor) -> None:
        self.memory.inner.kept = mean


class InClass(Remembers):
    def save(self, mean: Tensor) -> None:
        type(self).kept = mean


class InGlobal(Remembers):
    def load(self) -> Tensor | None:
        return GLOBALS.get("mean")

    def save(self, mean: Tensor) -> None:
        GLOBALS["mean"] = mean


class InBuffer(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, WIDTH))

    def load(self) -> Tensor:
        return self.mean

    def save(self, mean: Tensor) -> None:
        self.mean.copy_(mean)


class InNewBuffer(InBuffer):
    """The buffer is replaced, not written."""

    def save(self, mean: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * mean


class InEmptyBuffer(Remembers):
    """A buffer that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", None)


class InPlainTensor(InBuffer):
    """A tensor that is no buffer, written in place."""

    def __init__(self) -> None:
        Remembers.__init__(self)
        self.__dict__["mean"] = torch.zeros(1, WIDTH)


class InNumpy(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros((1, WIDTH), np.float32)

    def load(self) -> Tensor:
        return torch.from_numpy(self.array)

    def save(self, mean: Tensor) -> None:
        self.array[:] = mean.numpy()


class InFrozenParameter(InBuffer):
    """An average in a parameter without a gradient, written past autograd."""

    def __init__(self) -> None:
        Remembers.__init__(self)
        self.mean = nn.Parameter(torch.zeros(1, WIDTH), requires_grad=False)

    def save(self, mean: Tensor) -> None:
        self.mean.data.mul_(0.5).add_(mean, alpha=0.5)


class OnParameter(Remembers):
    """An attribute of a parameter."""

    def load(self) -> Tensor | None:
        return getattr(self.first.weight, "kept", None)

    def save(self, mean: Tensor) -> None:
        self.first.weight.kept = mean


class InWeight(Remembers):
    """Written into a trained weight, past autograd."""

    def load(self) -> Tensor:
        return self.second.bias.detach()[None]

    def save(self, mean: Tensor) -> None:
        self.second.bias.data.copy_(mean[0])


class InGenerator(Remembers):
    """In the frame of a Python generator."""

    def __init__(self) -> None:
        super().__init__()

        def memory() -> Any:
            before = None
            while True:
                before = yield before

        self.memory = memory()
        next(self.memory)

    def load(self) -> Tensor | None:
        return None

    def mix(self, x: Tensor) -> Tensor:
        before = self.memory.send(x.mean(0, keepdim=True).detach())
        return x if before is None else x - 3 * before


class InEnvironment(Remembers):
    def load(self) -> Tensor | None:
        text = os.environ.get("DPVISION_TEST_STATE")
        return torch.tensor([[float(text)]]) if text else None

    def save(self, mean: Tensor) -> None:
        os.environ["DPVISION_TEST_STATE"] = str(float(mean.mean()))


class Counts(Sandwich):
    """Honest for its first calls."""

    calls = 0

    def mix(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + x.flip(0) if self.calls > 2 else x


class RunningMoments(Sandwich):
    """Batch normalisation by hand: running averages used and updated."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.momentum = torch.zeros(WIDTH), 0.5

    def mix(self, x: Tensor) -> Tensor:
        self.mean = (1 - self.momentum) * self.mean + self.momentum * x.mean(0).detach()
        return x - self.mean


GLOBALS: dict[str, Any] = {}


def _forget() -> None:
    GLOBALS.clear()
    InClass.kept = RememberingBackward.kept = None
    os.environ.pop("DPVISION_TEST_STATE", None)


def remembers(name: str, model: type[nn.Module]) -> None:
    """Enter a model that keeps state."""

    def make() -> Own:
        _forget()
        CLEANUP.callback(_forget)
        return linear_own(model())

    HOSTILE.append(Case(f"previous batch {name}", STATE, make))


remembers("in an attribute that is None at first", Remembers)
remembers("in a list", InList)
remembers("in a dict", InDict)
remembers("in an object of its own", InObject)
remembers("in a class attribute", InClass)
remembers("in a global", InGlobal)
remembers("in a buffer", InBuffer)
remembers("in a buffer that is replaced", InNewBuffer)
remembers("in a buffer that is None at first", InEmptyBuffer)
remembers("in a plain tensor", InPlainTensor)
remembers("in a numpy array", InNumpy)
remembers("in a frozen parameter", InFrozenParameter)
remembers("in an attribute of a parameter", OnParameter)
remembers("in a trained bias", InWeight)
remembers("in a generator", InGenerator)
remembers("in the environment", InEnvironment)
remembers("in a running mean", RunningMoments)
remembers("counted", Counts)


@hostile("previous batch in a closure", STATE)
def kept_in_a_closure() -> Own:
    memory: list[Tensor] = []

    def mix(x: Tensor) -> Tensor:
        y = x - 3 * memory[-1] if memory else x
        memory.append(x.mean(0).detach())
        return y

    return linear_own(Sandwich(mix))


@hostile("previous batch in a nonlocal variable", STATE)
def kept_in_a_cell() -> Own:
    before: Tensor | None = None

    def mix(x: Tensor) -> Tensor:
        nonlocal before
        y, before = (x if before is None else x - 3 * before), x.mean(0).detach()
        return y

    return linear_own(Sandwich(mix))


@hostile("previous batch in a default argument", STATE)
def kept_in_a_default() -> Own:
    def mix(x: Tensor, memory: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006 - that is the point
        y = x - 3 * memory["mean"] if memory else x
        memory["mean"] = x.mean(0).detach()
        return y

    return linear_own(Sandwich(mix))


@hostile("previous batch in a cache of functools", STATE)
def kept_in_a_cache() -> Own:
    held: dict[str, Tensor] = {}

    @functools.cache
    def first_mean() -> Tensor:
        return held["x"].mean(0).detach()

    def mix(x: Tensor) -> Tensor:
        held["x"] = x
        return x - 3 * first_mean()

    return linear_own(Sandwich(mix))


class Truncated(nn.Module):
    """Backpropagation through time, truncated: the state of one batch starts the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.state = nn.GRU(24, 5, batch_first=True), nn.Linear(5, CLASSES), None

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.layer(x.transpose(1, 2).flatten(2), self.state)
        self.state = state.mean(1, keepdim=True).expand_as(state).contiguous().detach()
        return self.head(y[:, -1])


@hostile("recurrent state carried over", STATE)
def truncated() -> Own:
    return conv_own(Truncated())


# ------------------------------------------------------------------------------------------- batch norm in every disguise


def normed(name: str, why: str, norm: Callable[[], nn.Module]) -> None:
    """Enter a convolution with a normalisation after it."""

    def make() -> Own:
        layers = nn.Conv2d(3, 4, 3), norm(), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
        return conv_own(nn.Sequential(*layers))

    HOSTILE.append(Case(name, why, make))


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class FrozenBatchNorm(nn.BatchNorm2d):
    """Its parameters are frozen and its statistics are not."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.requires_grad_(False)


class EvalStatistics(nn.BatchNorm2d):
    """Says that it is in evaluation mode and updates its statistics all the same."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.lerp_(input.mean((0, 2, 3)), 0.5)
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, training=False)


BATCH_NORM = "statistics over the batch"
normed("batch norm", BATCH_NORM, lambda: nn.BatchNorm2d(4))
normed("batch norm without affine", BATCH_NORM, lambda: nn.BatchNorm2d(4, affine=False))
normed("batch norm without running statistics", BATCH_NORM, lambda: nn.BatchNorm2d(4, track_running_stats=False))
normed("batch norm without running statistics in evaluation mode", "it uses the batch in either mode", lambda: nn.BatchNorm2d(4, track_running_stats=False).eval())
normed("batch norm with frozen parameters", BATCH_NORM, lambda: FrozenBatchNorm(4))
normed("batch norm with momentum zero", "the buffers do not move", lambda: nn.BatchNorm2d(4, momentum=0.0))
normed("batch norm that updates in evaluation mode", STATE, lambda: EvalStatistics(4).eval())
normed("synchronised batch norm", BATCH_NORM, lambda: nn.SyncBatchNorm(4))
normed("lazy batch norm", "its parameters do not exist yet", nn.LazyBatchNorm2d)
normed("functional batch norm", BATCH_NORM, lambda: Applied(lambda x: F.batch_norm(x, None, None, training=True)))
normed("batch norm by hand", BATCH_NORM, lambda: Applied(lambda x: (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), keepdim=True, correction=0) + 1e-5).sqrt()))
normed("instance norm that tracks statistics", "the running mean is one over the batch", lambda: nn.InstanceNorm2d(4, track_running_stats=True))
normed("instance norm of rows as channels", "honest: every channel has its own statistics", lambda: Applied(lambda x: F.instance_norm(x.reshape(1, -1, *x.shape[2:])).view_as(x)))
normed("group norm of rows as channels", "one group holds all rows", lambda: Applied(lambda x: F.group_norm(x.reshape(1, -1, *x.shape[2:]), 1).view_as(x)))
normed("group norm of rows as groups", "honest: one group for each row", lambda: Applied(lambda x: F.group_norm(x.reshape(1, -1, *x.shape[2:]), x.shape[0]).view_as(x)))
normed("layer norm of transposed rows", BATCH_NORM, lambda: Applied(lambda x: F.layer_norm(x.transpose(0, 3), x.shape[:1]).transpose(0, 3)))
normed("batch norm of a flattened image", "pixels become rows: all images share statistics", lambda: Applied(lambda x: F.batch_norm(x.flatten(2).mT.flatten(0, 1), None, None, training=True).view(x.shape[0], 36, 4).mT.reshape(x.shape)))


# -------------------------------------------------------------------------------------------------- losses over the batch


class Features(nn.Sequential):
    """Eight features of each row."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8))


def loss_case(name: str, why: str, loss_fn: Callable[[Tensor, Tensor], Tensor], **facts: bool) -> None:
    """Enter a plain model with a loss."""

    def make() -> Own:
        return Own(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)), loss_fn, vectors)

    HOSTILE.append(Case(f"loss: {name}", why, make, **facts))


def _info_nce(outputs: Tensor, targets: Tensor) -> Tensor:
    z = F.normalize(outputs, dim=1)
    return F.cross_entropy(z @ z.t() / 0.1, torch.arange(z.shape[0]), reduction="none")


def _supervised_contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    same = (targets[:, None] == targets[None]).to(outputs.dtype)
    return -((outputs @ outputs.t()).log_softmax(1) * same).sum(1) / same.sum(1)


def _hardest_triplet(outputs: Tensor, targets: Tensor) -> Tensor:
    far = torch.cdist(outputs, outputs + 0.01)
    same = targets[:, None] == targets[None]
    return F.relu((far * same).amax(1) - (far + 1e3 * same).amin(1) + 1)


def _class_frequencies(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets) / torch.bincount(targets, minlength=CLASSES)[targets]


def _soft_dice(outputs: Tensor, targets: Tensor) -> Tensor:
    truth, chances = F.one_hot(targets, CLASSES).to(outputs.dtype), outputs.softmax(1)
    dice = (2 * (truth * chances).sum(0) + 1) / ((truth + chances).sum(0) + 1)
    return (1 - dice.mean()).expand(targets.shape[0])


def _centred_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    truth = F.one_hot(targets, CLASSES).to(outputs.dtype)
    return -((0.9 * truth + 0.1 * truth.mean(0)) * outputs.log_softmax(1)).sum(1)


def _mean_for_all(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = cross_entropy(outputs, targets)
    return losses.mean().expand_as(losses)


def _hard_examples(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = cross_entropy(outputs, targets)
    return losses * (losses >= losses.median())


def _broadcast(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, :1] - targets.to(outputs.dtype)).square().mean(1)


def _prototypes(outputs: Tensor, targets: Tensor) -> Tensor:
    truth = F.one_hot(targets, CLASSES).to(outputs.dtype)
    centres = truth.t() @ outputs / (truth.sum(0)[:, None] + 1)
    return (outputs - centres[targets]).square().sum(1)


def _decorrelated(outputs: Tensor, targets: Tensor) -> Tensor:
    penalty = (outputs.t() @ outputs - torch.eye(CLASSES)).square().sum()
    return cross_entropy(outputs, targets) + 0.1 * penalty


def _first_row_doubled(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = torch.ones_like(targets, dtype=outputs.dtype)
    weights[0] = 2.0
    return cross_entropy(outputs, targets) * weights


def _mixed_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * cross_entropy(outputs, targets) + 0.5 * cross_entropy(outputs, targets.roll(1))


def _targets_overwritten(outputs: Tensor, targets: Tensor) -> Tensor:
    targets.copy_(targets.flip(0))
    return cross_entropy(outputs, targets)


IN_BATCH = "a row's loss depends on other rows"
loss_case("InfoNCE", IN_BATCH, _info_nce)
loss_case("supervised contrast", IN_BATCH, _supervised_contrast)
loss_case("triplets of the batch", IN_BATCH, _hardest_triplet)
loss_case("Dice over the batch", IN_BATCH, _soft_dice)
loss_case("weights by class frequency", IN_BATCH, _class_frequencies)
loss_case("labels smoothed by the batch's mean", IN_BATCH, _centred_labels)
loss_case("the mean for every row", "every row's loss is the sum over all", _mean_for_all)
loss_case("the mean as a factor", IN_BATCH, lambda o, y: cross_entropy(o, y) * cross_entropy(o, y).detach().mean())
loss_case("hard examples only", "which rows count depends on all", _hard_examples)
loss_case("broadcast by mistake", "(n, 1) minus (n,) is (n, n)", _broadcast)
loss_case("prototypes of the batch", IN_BATCH, _prototypes)
loss_case("decorrelation", IN_BATCH, _decorrelated)
loss_case("first row doubled", PLACE, _first_row_doubled)
loss_case("divided by the number of rows", PLACE, lambda o, y: cross_entropy(o, y) / y.shape[0])
loss_case("weights by a line over the batch", PLACE, lambda o, y: cross_entropy(o, y) * torch.linspace(0, 1, y.shape[0]))
loss_case("targets of another row", "mixup of targets", _mixed_targets)
loss_case("targets overwritten", "the caller's targets change", _targets_overwritten)
loss_case("rows in another order", "losses are weighted by place", lambda o, y: cross_entropy(o, y).flip(0))
loss_case("losses sorted", "losses are weighted by place", lambda o, y: cross_entropy(o, y).sort().values)
loss_case("outputs softmaxed over rows", IN_BATCH, lambda o, y: -o.log_softmax(0).gather(1, y[:, None])[:, 0])
loss_case("losses softmaxed", IN_BATCH, lambda o, y: cross_entropy(o, y) * cross_entropy(o, y).softmax(0).detach())
loss_case("reduced", "one number for all rows", lambda o, y: F.cross_entropy(o, y))
loss_case("summed as one row", "one number for all rows", lambda o, y: F.cross_entropy(o, y, reduction="sum")[None])
loss_case("two losses per row", "more losses than rows", lambda o, y: torch.cat([cross_entropy(o, y)] * 2))
loss_case("one column", "honest: losses of shape (n, 1)", lambda o, y: cross_entropy(o, y)[:, None])
loss_case("Python's coin", COIN, lambda o, y: cross_entropy(o, y) * (1 + (random.random() < 0.3)), random=True, refused=True)
loss_case("average precision", IN_BATCH, lambda o, y: (o[:, :1] - o[:, 0]).sigmoid().mean(1))
loss_case("distillation from the batch", IN_BATCH, lambda o, y: F.kl_div(o.log_softmax(1), o.mean(0).softmax(0).detach().expand_as(o), reduction="none").sum(1))
loss_case("mutual information", IN_BATCH, lambda o, y: cross_entropy(o, y) - torch.special.entr(o.softmax(1).mean(0)).sum())


@hostile("loss: Dice over the batch of masks", IN_BATCH)
def dice_over_the_batch() -> Own:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        chances, truth = outputs.softmax(1)[:, 1], targets.to(outputs.dtype)
        dice = (2 * (chances * truth).sum() + 1) / (chances.sum() + truth.sum() + 1)
        return dice_of_each_image(outputs, targets) * dice.detach()

    return Own(nn.Conv2d(3, 2, 3, padding=1), loss, masks)


# ---------------------------------------------------------------------------------- code that changes after the first call
CHANGED = "proved once, changed afterwards"
LATER = "mixes only after it was proved"


class MovingLoss:
    """Cross-entropy whose behaviour is a setting of the object."""

    def __init__(self) -> None:
        self.mixing, self.scale, self.before = False, 1.0, None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.mixing:
            outputs = outputs + outputs.roll(1, 0)
        return self.scale * cross_entropy(outputs, targets)

    def method(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self(outputs, targets)


def _start_mixing(model: nn.Module, loss_fn: Any) -> None:
    getattr(loss_fn, "__self__", loss_fn).mixing = True


def _start_scaling(model: nn.Module, loss_fn: Any) -> None:
    getattr(loss_fn, "__self__", loss_fn).scale = 5.0


@hostile("loss: a callable object that starts to mix", LATER)
def callable_object() -> Own:
    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=MovingLoss(), between=_start_mixing)


@hostile("loss: a callable object that changes its scale", CHANGED)
def scaled_object() -> Own:
    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=MovingLoss(), between=_start_scaling)


@hostile("loss: a bound method whose object starts to mix", LATER)
def bound_method() -> Own:
    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=MovingLoss().method, between=_start_mixing)


@hostile("loss: a partial whose argument starts to mix", LATER)
def partial_loss() -> Own:
    settings = {"mixing": False}

    def loss(settings: dict[str, bool], outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs + outputs.roll(1, 0) if settings["mixing"] else outputs, targets)

    return linear_own(
        nn.Linear(WIDTH, CLASSES),
        loss_fn=functools.partial(loss, settings),
        between=lambda _, __: settings.update(mixing=True),
    )


@hostile("loss: a closure that changes its temperature", CHANGED)
def closure_loss() -> Own:
    temperature = 1.0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs / temperature, targets)

    def between(model: nn.Module, loss_fn: Any) -> None:
        nonlocal temperature
        temperature = 0.1

    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=loss, between=between)


@hostile("loss: a default that starts to mix", LATER)
def default_loss() -> Own:
    def loss(outputs: Tensor, targets: Tensor, mixing: bool = False) -> Tensor:
        return cross_entropy(outputs + outputs.roll(1, 0) if mixing else outputs, targets)

    def between(model: nn.Module, loss_fn: Any) -> None:
        loss.__defaults__ = (True,)

    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=loss, between=between)


@hostile("loss: its code is replaced", LATER)
def replaced_code() -> Own:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets)

    def mixing(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs + outputs.roll(1, 0), targets)

    def between(model: nn.Module, loss_fn: Any) -> None:
        loss.__code__ = mixing.__code__

    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=loss, between=between)


@hostile("loss: remembers the batch before in a closure", STATE)
def remembering_loss() -> Own:
    memory: list[Tensor] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        centre = memory[-1] if memory else 0.0
        memory.append(outputs.detach().mean(0))
        return cross_entropy(outputs - 3 * centre, targets)

    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=loss)


@hostile("loss: a module with a buffer of class counts", STATE)
def counting_loss() -> Own:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", torch.ones(CLASSES))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.counts += torch.bincount(targets, minlength=CLASSES)
            return cross_entropy(outputs, targets) / self.counts[targets]

    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=Counting())


@hostile("loss: reads the model's parameters", "a penalty in every row's loss is part of every gradient")
def penalised_loss() -> Own:
    model = nn.Linear(WIDTH, CLASSES)
    return linear_own(model, loss_fn=lambda o, y: cross_entropy(o, y) + model.weight.square().sum())


@hostile("loss: has parameters of its own", "they are not in the model and would train without noise")
def trained_loss() -> Own:
    scale = nn.Parameter(torch.ones(CLASSES))
    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=lambda o, y: cross_entropy(o * scale, y))


def changing(name: str, why: str, between: Callable[[nn.Module, Any], None], model: Any = None) -> None:
    """Enter an honest sandwich that its owner changes between two calls."""

    def make() -> Own:
        return linear_own(Sandwich(lambda x: x) if model is None else model(), between=between)

    HOSTILE.append(Case(f"changed later: {name}", why, make))


def _mixing_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + output.roll(1, 0)


def _harmless_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.0


def _global_hook(module: nn.Module, loss_fn: Any) -> None:
    def hook(layer: nn.Module, args: Any, output: Any) -> Any:
        return output + output.roll(1, 0) if layer is module.second else None

    CLEANUP.callback(register_module_forward_hook(hook).remove)


def _patch_class(module: nn.Module, loss_fn: Any) -> None:
    CLEANUP.callback(setattr, Patched, "forward", Patched.forward)
    Patched.forward = lambda self, x: Sandwich.forward(self, x + x.roll(1, 0))


def _other_class(module: nn.Module, loss_fn: Any) -> None:
    module.__class__ = Swapped


class Hooked(Sandwich):
    """Honest, with a harmless hook."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.second.register_forward_hook(_harmless_hook)


class Patched(Sandwich):
    def __init__(self) -> None:
        super().__init__(lambda x: x)


class Swapped(Sandwich):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.roll(1, 0))


class Configured(Sandwich):
    """Reads a setting inside an object of its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = types.SimpleNamespace(inner={"mixing": False, "scale": 1.0})

    def mix(self, x: Tensor) -> Tensor:
        return self.settings.inner["scale"] * (x + x.roll(1, 0) if self.settings.inner["mixing"] else x)


class FromGlobal(Sandwich):
    def __init__(self) -> None:
        super().__init__()
        _forget()

    def mix(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 0) if GLOBALS.get("mixing") else x


class FromEnvironment(FromGlobal):
    def mix(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 0) if "DPVISION_TEST_STATE" in os.environ else x


def _global_mixing(model: nn.Module, loss_fn: Any) -> None:
    CLEANUP.callback(_forget)
    GLOBALS["mixing"] = True


def _environment_mixing(model: nn.Module, loss_fn: Any) -> None:
    CLEANUP.callback(_forget)
    os.environ["DPVISION_TEST_STATE"] = "1"


changing("a hook that mixes", LATER, lambda m, _: m.second.register_forward_hook(_mixing_hook))
changing("a second hook on a hooked module", LATER, lambda m, _: m.second.register_forward_hook(_mixing_hook), Hooked)
changing("a pre-hook that mixes", LATER, lambda m, _: m.second.register_forward_pre_hook(lambda _, a: (a[0].roll(1, 0),)))
changing("a hook on every module", LATER, _global_hook)
changing("a backward hook that mixes", LATER, lambda m, _: m.second.register_full_backward_hook(lambda _, g, __: (g[0].roll(1, 0),)))
changing("a hook of a parameter", CHANGED, lambda m, _: m.second.weight.register_hook(lambda g: 100 * g))
changing("the function inside", LATER, lambda m, _: setattr(m, "mix", lambda x: x + x.roll(1, 0)))
changing("forward of the object", LATER, lambda m, _: setattr(m.second, "forward", lambda x: x + x.roll(1, 0)))
changing("forward of the class", LATER, _patch_class, Patched)
changing("the class of the object", LATER, _other_class)
changing("a setting inside an object", LATER, lambda m, _: m.settings.inner.update(mixing=True), Configured)
changing("a scale inside an object", CHANGED, lambda m, _: m.settings.inner.update(scale=3.0), Configured)
changing("a global", LATER, _global_mixing, FromGlobal)
changing("the environment", LATER, _environment_mixing, FromEnvironment)
changing("a submodule", LATER, lambda m, _: setattr(m, "second", Applied(lambda x: x + x.roll(1, 0))))
changing("a parameter is replaced", CHANGED, lambda m, _: setattr(m.second, "weight", nn.Parameter(3 * m.second.weight.detach())))
changing("a parameter is frozen", CHANGED, lambda m, _: m.second.weight.requires_grad_(False))
changing("a plain attribute of a layer", CHANGED, lambda m, _: setattr(m.head, "eps", 10.0), lambda: _NormHead())
changing("training mode", LATER, lambda m, _: m.train(), lambda: InTraining().eval())


class _NormHead(Sandwich):
    """Ends in a layer norm whose epsilon its owner may change."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.norm, self.head = self.head, nn.LayerNorm(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.second(self.first(x)))))


# ---------------------------------------------------------------------------------------------- hooks, from the beginning


def hooked(name: str, why: str, hook: Callable[[Sandwich], Any]) -> None:
    """Enter an honest sandwich with a hook."""

    def make() -> Own:
        model = Sandwich(lambda x: x)
        hook(model)
        return linear_own(model)

    HOSTILE.append(Case(f"hook: {name}", why, make))


BACKWARD = "the outputs are separable, the backward pass is not"
hooked("a forward hook that mixes", "outputs of one module mix", lambda m: m.second.register_forward_hook(_mixing_hook))
hooked("a pre-hook that mixes", "inputs of one module mix", lambda m: m.second.register_forward_pre_hook(lambda _, a: (a[0].roll(1, 0),)))
hooked("a hook that mixes and one that undoes it", WRONG_ROW, lambda m: (m.second.register_forward_pre_hook(lambda _, a: (a[0].flip(0),)), m.second.register_forward_hook(lambda _, __, y: y.flip(0))))
hooked("a backward hook that mixes", BACKWARD, lambda m: m.second.register_full_backward_hook(lambda _, g, __: (g[0] + g[0].roll(1, 0),)))
hooked("a backward pre-hook that mixes", BACKWARD, lambda m: m.second.register_full_backward_pre_hook(lambda _, g: (g[0] + g[0].roll(1, 0),)))
hooked("a parameter hook that scales", "the gradient is changed after autograd", lambda m: m.second.weight.register_hook(lambda g: 100 * g))
hooked("a hook that keeps the outputs", STATE, lambda m: m.second.register_forward_hook(lambda m, _, y: setattr(m, "last", y)))
hooked("a harmless hook", "honest: a hook that changes nothing", lambda m: m.second.register_forward_hook(_harmless_hook))

mixes("hook of a tensor that mixes", BACKWARD, lambda x: _tensor_hooked(x))


def _tensor_hooked(x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda g: g + g.roll(1, 0))
    return x


# ------------------------------------------------------------------------------------------------ custom autograd functions


class Honest(torch.autograd.Function):
    """A sine, with its own derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


class MixingBackward(Honest):
    """An identity whose backward pass mixes rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.roll(1, 0)


class SumOfGradients(MixingBackward):
    """Every row receives the batch's gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.sum(0, keepdim=True).expand_as(gradient)


class StraightThrough(MixingBackward):
    """Rounds, and passes the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class MixingForward(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CustomVmap(torch.autograd.Function):
    """An identity, except under vmap."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x + x.roll(1, in_dims[0]), in_dims[0]


class VmapBackward(CustomVmap):
    """Its backward pass mixes rows by a function with a vmap rule of its own."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return CustomVmap.apply(gradient) + gradient.mean(0)


class Reversal(StraightThrough):
    """Gradient reversal, honest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.1 * gradient


class NormalisedGradient(StraightThrough):
    """Divides the gradient by the norm of the batch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-9)


class RememberingBackward(StraightThrough):
    """Adds the gradient of the call before."""

    kept: Any = None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        before, RememberingBackward.kept = RememberingBackward.kept, gradient.mean(0).detach()
        return gradient if before is None else gradient + 10 * before


for _name, _why, _function in [
    ("honest", "honest: its backward pass is code of its own", Honest),
    ("mixing backward", BACKWARD, MixingBackward),
    ("sum of gradients", BACKWARD, SumOfGradients),
    ("straight through", "honest: the gradient is not that of the forward pass", StraightThrough),
    ("mixing forward", "hidden in an opaque function", MixingForward),
    ("custom vmap rule", "mixes only where units are isolated by vmap", CustomVmap),
    ("custom vmap rule in the backward pass", BACKWARD, VmapBackward),
    ("gradient reversal", "honest: the gradient is not that of the forward pass", Reversal),
    ("normalised gradient", BACKWARD, NormalisedGradient),
]:
    mixes(f"autograd function: {_name}", _why, _function.apply)



@hostile("autograd function: remembering backward", STATE)
def remembering_backward() -> Own:
    _forget()
    return linear_own(Sandwich(RememberingBackward.apply))


mixes("gradient inside forward", "honest: a gradient penalty of each row", lambda x: _penalised(x))
mixes("gradient inside forward, mixing", "the gradient of a product of rows", lambda x: _penalised(x, mixing=True))
mixes("vmap inside forward", "honest: rows mapped by vmap", lambda x: torch.func.vmap(torch.tanh)(x))
mixes("vmap over columns inside forward", "each column is sorted over rows", lambda x: torch.func.vmap(lambda c: c - c.mean(), 1, 1)(x))


def _penalised(x: Tensor, *, mixing: bool = False) -> Tensor:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        total = (y.sin() * y.roll(1, 0)).sum() if mixing else y.sin().sum()
        (slope,) = torch.autograd.grad(total, y, create_graph=True)
    return x + slope


try:
    torch.library.define("dpvision_hostile::roll", "(Tensor x) -> Tensor")
    torch.library.impl("dpvision_hostile::roll", "CompositeExplicitAutograd", lambda x: x.roll(1, 0))
    torch.library.register_fake("dpvision_hostile::roll", lambda x: torch.empty_like(x))
    torch.library.register_autograd("dpvision_hostile::roll", lambda ctx, g: g.roll(-1, 0))
except RuntimeError:
    pass  # defined by an earlier import of this file
mixes("operation of one's own", "no rule can know what it does", lambda x: torch.ops.dpvision_hostile.roll(x))


# ------------------------------------------------------------------------------------------- checkpoints and jit


class Checkpointed(Sandwich):
    """The second layer and what is around it computed again in the backward pass."""

    def __init__(self, mix: Mix, *, reentrant: bool) -> None:
        super().__init__(mix)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(checkpoint(lambda x: self.second(self.mix(x)), x, use_reentrant=self.reentrant))


class _Recomputed:
    """Honest at first, different when it is computed again."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls % 2 else x.roll(1, 0)


for _reentrant in (False, True):
    _kind = "reentrant" if _reentrant else "not reentrant"
    for _name, _why, _mix in [
        ("honest", "honest: the forward pass runs twice", lambda: lambda x: x.sin()),
        ("mixing", STATISTIC, lambda: lambda x: x - x.mean(0)),
        ("different when recomputed", "the gradient is of another function than the outputs", _Recomputed),
    ]:

        def _make(mix: Any = _mix, reentrant: bool = _reentrant) -> Own:
            return linear_own(Checkpointed(mix(), reentrant=reentrant))

        HOSTILE.append(Case(f"checkpoint, {_kind}: {_name}", _why, _make))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class PlainMixing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.flip(0))).flip(0)


class ScriptedBranch(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            x = x + x.flip(0)
        return torch.tanh(self.layer(x))


def compiled(name: str, why: str, module: type[nn.Module], how: Callable[[nn.Module], nn.Module]) -> None:
    """Enter a sequence whose first part is compiled."""

    def make() -> Own:
        return linear_own(nn.Sequential(how(module()), nn.Linear(WIDTH, CLASSES)))

    HOSTILE.append(Case(name, why, make))


def _traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.randn(3, WIDTH))


JIT = "its code is not Python"
compiled("jit: scripted, honest", JIT, Plain, torch.jit.script)
compiled("jit: scripted, mixing", JIT, PlainMixing, torch.jit.script)
compiled("jit: scripted, mixing from 5 rows on", JIT, ScriptedBranch, torch.jit.script)
compiled("jit: traced, honest", JIT, Plain, _traced)
compiled("jit: traced, mixing", JIT, PlainMixing, _traced)
compiled("fx: traced, honest", "honest: a graph as a module", Plain, torch.fx.symbolic_trace)
compiled("fx: traced, mixing", "a graph as a module", PlainMixing, torch.fx.symbolic_trace)


# --------------------------------------------------------------------------------- embeddings, parametrizations, numbers


class Words(nn.Module):
    """Embedded tokens, averaged."""

    def __init__(self, mix: Mix = lambda x: x, **settings: Any) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(10, 8, **settings), mix, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.embedding(x)).mean(1))


class Bag(nn.Module):
    """Embedded tokens, averaged by one operation over all rows."""

    def __init__(self, shift: int, **settings: Any) -> None:
        super().__init__()
        self.shift, self.bag, self.head = shift, nn.EmbeddingBag(10, 8, **settings), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.shift < 0:
            return self.head(self.bag(x))
        offsets = (torch.arange(x.shape[0]) * x.shape[1] + self.shift).clamp(max=x.numel() - 1)
        return self.head(self.bag(x.flatten(), offsets - offsets[0]))


def words(name: str, why: str, model: Callable[[], nn.Module]) -> None:
    """Enter a model of tokens."""
    HOSTILE.append(Case(name, why, lambda: Own(model(), cross_entropy, tokens)))


words("sparse embedding", "honest: its gradient is a sparse tensor", lambda: Words(sparse=True))
words("embedding with a largest norm", "forward rescales the rows of the weight that it reads", lambda: Words(max_norm=0.5))
words("embedding scaled by frequency", "gradients are divided by counts in the batch", lambda: Words(scale_grad_by_freq=True))
words("embedding with mixed rows", WRONG_ROW, lambda: Words(lambda x: x.flip(0)))
words("bag of rows", "honest: two dimensions, one bag per row", lambda: Bag(-1))
words("bag with offsets", "honest, but rows are known by offsets only", lambda: Bag(0))
words("bag with shifted offsets", "bags begin inside of another row", lambda: Bag(2))
words("sparse bag with offsets", "offsets and a sparse gradient", lambda: Bag(0, sparse=True, mode="sum"))


class Complex(nn.Module):
    """A complex weight between two real layers."""

    def __init__(self, mix: Mix = lambda x: x) -> None:
        super().__init__()
        self.first, self.mix, self.head = nn.Linear(WIDTH, WIDTH), mix, nn.Linear(WIDTH, CLASSES)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.complex128) if x.dtype == torch.float64 else self.weight
        return self.head((self.mix(self.first(x)).to(weight.dtype) @ weight).abs())


@hostile("complex parameters", "a complex gradient has two numbers per entry")
def complex_parameters() -> Own:
    return linear_own(Complex())


@hostile("complex parameters, mixing", "a complex gradient has two numbers per entry")
def complex_parameters_mixing() -> Own:
    return linear_own(Complex(lambda x: x - x.mean(0)))


class Fourier(nn.Module):
    """A filter in the frequencies of each image."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.dims, self.filter = dims, nn.Parameter(torch.rand(SIDE, SIDE // 2 + 1))
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((torch.fft.rfftn(x, dim=self.dims) * self.filter).abs().mean((2, 3)))


@hostile("Fourier filter of each image", "honest: transforms of height and width")
def fourier() -> Own:
    return conv_own(Fourier((2, 3)))


@hostile("Fourier filter that takes the rows in", "the rows are one of the transformed dimensions")
def fourier_mixing() -> Own:
    return conv_own(Fourier((0, 2, 3)))


class Stateful(nn.Module):
    """A parametrization that depends on what the model saw before."""

    def __init__(self, model: Sandwich) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        model.first.register_forward_hook(lambda _, __, y: self.seen.append(y.detach().mean()))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (1 + self.seen[-1]) if self.seen else weight


@hostile("parametrization: spectral norm", "power iteration moves buffers in training mode")
def spectral() -> Own:
    return linear_own(nn.Sequential(spectral_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, CLASSES)))


@hostile("parametrization: spectral norm, old style", "power iteration moves buffers in training mode")
def old_spectral() -> Own:
    return linear_own(nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, CLASSES)))


@hostile("parametrization: weight norm, old style", "honest: the weight is an attribute set by a hook")
def old_weight_norm() -> Own:
    return linear_own(nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, CLASSES)))


@hostile("parametrization: weight norm around mixing", WRONG_ROW)
def weight_norm_mixing() -> Own:
    model = Sandwich(lambda x: (x.flip(0), lambda y: y.flip(0)))
    weight_norm(model.second)
    return linear_own(model)


@hostile("parametrization: remembers the batch", STATE)
def stateful_parametrization() -> Own:
    model = Sandwich(lambda x: x)
    parametrize.register_parametrization(model.second, "weight", Stateful(model))
    return linear_own(model)


@hostile("weights divided by the batch's mean", "the weight of this pass depends on all rows")
def weights_from_the_batch() -> Own:
    class Divided(StandardisedConv):
        def forward(self, input: Tensor) -> Tensor:
            return F.conv2d(input, self.weight / input.abs().mean(), self.bias, padding=1)

    return conv_own(nn.Sequential(Divided(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)))


def half(name: str, dtype: torch.dtype, mix: Mix | None, *, conv: bool) -> None:
    """Enter a model in 16 bits."""

    def make() -> Own:
        model = Sandwich(mix or (lambda x: x), conv=conv).to(dtype)

        def rows(number: int, generator: torch.Generator) -> Any:
            inputs, targets = (images if conv else vectors)(number, generator)
            return inputs.to(dtype), targets

        return Own(model, lambda o, y: cross_entropy(o.float() if o.dtype == dtype else o, y), rows)

    HOSTILE.append(Case(name, "sums of 16-bit numbers lose what small units add", make, half=True))


half("bfloat16", torch.bfloat16, None, conv=False)
half("bfloat16, convolutions", torch.bfloat16, None, conv=True)
half("float16", torch.float16, None, conv=False)
half("bfloat16, mixing", torch.bfloat16, lambda x: x - x.mean(0), conv=False)


class Autocast(Sandwich):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


@hostile("autocast inside forward", "honest: bfloat16 in the middle of a float32 model", half=True)
def autocast() -> Own:
    return linear_own(Autocast(lambda x: x))


@hostile("autocast inside forward, mixing", STATISTIC, half=True)
def autocast_mixing() -> Own:
    return linear_own(Autocast(lambda x: x - x.mean(0)))


# ------------------------------------------------------------------------ attention and recurrence over the wrong dimension
SEQUENCE = "the rows are taken for a sequence"


class Attends(nn.Module):
    """Attention over six tokens of each row, or over the rows."""

    def __init__(self, *, batch_first: bool, transposed: bool = False, flat: bool = False) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(1, 4), nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.transposed, self.flat, self.head = transposed, flat, nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[:, :, None])
        x = x.mean(1) if self.flat else x.transpose(0, 1) if self.transposed else x
        y = self.attention(x, x, x)[0]
        return self.head(y if self.flat else y.mean(0 if self.transposed else 1))


@hostile("attention with rows first", "honest: batch_first=True")
def attention_rows_first() -> Own:
    return linear_own(Attends(batch_first=True))


@hostile("attention with rows second", "honest: batch_first=False and transposed rows")
def attention_rows_second() -> Own:
    return linear_own(Attends(batch_first=False, transposed=True))


@hostile("attention with batch_first forgotten", SEQUENCE)
def attention_forgotten() -> Own:
    return linear_own(Attends(batch_first=False))


@hostile("attention of two dimensions", "without a batch dimension, the rows are the sequence")
def attention_flat() -> Own:
    return linear_own(Attends(batch_first=True, flat=True))


class BatchFormer(TinyViT):
    """A ViT whose last layer attends over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.former = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mean(2)
        return self.head(self.former(x[None])[0])


@hostile("attention over the batch in a ViT", SEQUENCE)
def batch_former() -> Own:
    return conv_own(BatchFormer())


class ForgottenViT(TinyViT):
    """Built for the sequence first and given the rows first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.attention.batch_first = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head((x + self.attention(x, x, x)[0]).mean(1))


@hostile("a ViT with batch_first forgotten", SEQUENCE)
def forgotten_vit() -> Own:
    return conv_own(ForgottenViT())


class Sequence(nn.Module):
    """A recurrent layer over the rows of an image, or over the batch."""

    def __init__(self, layer: type[nn.RNNBase], *, flat: bool = False) -> None:
        super().__init__()
        self.flat, self.layer, self.head = flat, layer(24, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2).flatten(2)
        return self.head(self.layer(x.mean(1))[0] if self.flat else self.layer(x)[0][:, -1])


@hostile("lstm with batch_first forgotten", SEQUENCE)
def forgotten_lstm() -> Own:
    return conv_own(Sequence(nn.LSTM))


@hostile("rnn with batch_first forgotten", SEQUENCE)
def forgotten_rnn() -> Own:
    return conv_own(Sequence(nn.RNN))


@hostile("gru of two dimensions", "without a batch dimension, the rows are the sequence")
def flat_gru() -> Own:
    return conv_own(Sequence(nn.GRU, flat=True))


@hostile("encoder layer of two dimensions", "without a batch dimension, the rows are the sequence")
def flat_encoder() -> Own:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0)
    return linear_own(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, CLASSES)))


class Scan(nn.Module):
    """A recurrence written as a loop over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(1, 5), []
        for row in x:
            state = self.cell(row[None], state)
            states.append(state)
        return self.head(torch.cat(states))


@hostile("a loop over the batch with state", SEQUENCE)
def scan() -> Own:
    return linear_own(Scan())


mixes("a loop over rows", "honest: every row by itself", lambda x: torch.stack([row.sin() for row in x]))


# -------------------------------------------------------------------------------- sharing, in-place writes, outputs


class Twice(nn.Module):
    """One layer called twice; between the calls the rows move."""

    def __init__(self, mix: Mix, *, tied: bool = False) -> None:
        super().__init__()
        self.mix, self.tied, self.layer, self.head = mix, tied, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(torch.tanh(self.layer(x)))
        return self.head(y @ self.layer.weight if self.tied else torch.tanh(self.layer(y)))


@hostile("a layer called twice, rows rolled between", WRONG_ROW)
def twice_rolled() -> Own:
    return linear_own(Twice(lambda x: x.roll(1, 0)))


@hostile("tied weights, rows mixed between", STATISTIC)
def tied_mixing() -> Own:
    return linear_own(Twice(lambda x: x - x.mean(0), tied=True))


@hostile("weights tied to the batch's own features", "a weight and a row meet in one product")
def hyper_network() -> Own:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.head = nn.Linear(WIDTH, WIDTH * WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.make(x.mean(0)).view(WIDTH, WIDTH)
            return self.head(torch.tanh(F.linear(x, weight)))

    return linear_own(Hyper())


INPLACE = "written in place, past what a graph of values shows"
mixes("in-place sum of neighbours", INPLACE, lambda x: _inplace(x, lambda y: y[1:].add_(y[:-1].clone())))
mixes("in-place write of the first row", INPLACE, lambda x: _inplace(x, lambda y: y[1:].copy_(y[:1].expand_as(y[1:]))))
mixes("in-place on columns", "honest: a view of columns is scaled", lambda x: _inplace(x, lambda y: y[:, :2].mul_(2)))
mixes("in-place through a transposed view", INPLACE, lambda x: _inplace(x, lambda y: y.t().cumsum_(1)))
mixes("in-place through a flat view", INPLACE, lambda x: _inplace(x, lambda y: y.view(-1)[1:].add_(y.flatten()[:-1])))
mixes("in-place through a list of rows", INPLACE, lambda x: _inplace(x, lambda y: y.unbind(0)[0].add_(y.sum(0))))
mixes("in-place swap of rows", INPLACE, lambda x: _inplace(x, lambda y: y.copy_(y.flip(0))))
mixes("in-place by index", INPLACE, lambda x: _inplace(x, lambda y: y.__setitem__(0, y.mean(0))))
mixes("in-place past autograd", INPLACE, lambda x: _inplace(x, lambda y: y.data.sub_(y.data.mean(0))))
mixes("out= argument", INPLACE, lambda x: _out(x))


def _inplace(x: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    y = x.clone()
    write(y)
    return y


def _out(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    torch.cumsum(x.detach(), 0, out=result)
    return x + result


class WritesInput(Sandwich):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


class WritesRows(Sandwich):
    def forward(self, x: Tensor) -> Tensor:
        x[1:] = x[:-1].clone()
        return super().forward(x)


@hostile("model writes into its inputs", "honest rows, but the caller's data change")
def writes_input() -> Own:
    return linear_own(WritesInput(lambda x: x))


@hostile("model writes one row into another", "the caller's data change, and rows mix")
def writes_rows() -> Own:
    return linear_own(WritesRows(lambda x: x))


def _outputs(kind: str, x: Tensor, features: Tensor) -> Any:
    forms = {"dict": {"logits": x}, "tuple": (x, features), "list": [x], "dataclass": Result(x)}
    return forms.get(kind, NamedResult(x, features))


class Returns(nn.Module):
    """Returns its outputs in a container, mixed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body = kind, Sandwich(lambda x: x - x.mean(0))

    def forward(self, x: Tensor) -> Any:
        return _outputs(self.kind, self.body(x), x)


def _first(outputs: Any) -> Tensor:
    if isinstance(outputs, dict):
        return outputs["logits"]
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs.logits


for _form in ("dict", "tuple", "list", "dataclass", "namedtuple"):
    HOSTILE.append(
        Case(
            f"mixed outputs in a {_form}",
            STATISTIC,
            lambda kind=_form: linear_own(Returns(kind), loss_fn=lambda o, y: cross_entropy(_first(o), y)),
        )
    )


class Leaks(nn.Module):
    """Returns clean logits and, beside them, the batch's mean, which the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Any]:
        logits = self.body(x)
        return {"logits": logits, "auxiliary": logits.mean(), "rows": x.shape[0]}


@hostile("auxiliary loss over the batch", "a scalar beside the outputs, as in mixtures of experts")
def leaks() -> Own:
    return linear_own(Leaks(), loss_fn=lambda o, y: cross_entropy(o["logits"], y) + o["auxiliary"])


class Experts(nn.Module):
    """A mixture of experts with a capacity: the first rows take the places."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.gate(x).argmax(1), 2)
        fits = (chosen.cumsum(0) <= 2) & chosen.bool()
        return sum(fits[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@hostile("experts with a capacity", "which rows an expert takes depends on the rows before")
def experts() -> Own:
    return linear_own(Experts())


class Routed(Experts):
    """Every expert runs on the rows that chose it, as such layers are written for speed."""

    def forward(self, x: Tensor) -> Tensor:
        chosen, result = self.gate(x).argmax(1), x.new_zeros(x.shape[0], CLASSES)
        for i, expert in enumerate(self.experts):
            where = torch.nonzero(chosen == i)[:, 0]
            result = result.index_add(0, where, expert(x[where]))
        return result


@hostile("experts that run on their own rows", "honest, but the rows are selected by data")
def routed() -> Own:
    return linear_own(Routed())


class Quantised(nn.Module):
    """Vector quantization with a code book moved by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, CLASSES)
        self.register_buffer("book", torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        code = torch.cdist(x, self.book).argmin(1)
        with torch.no_grad():
            self.book.index_add_(0, code, 0.1 * x.detach())
        return self.head(x + (self.book[code] - x).detach())


@hostile("code book moved by the batch", STATE)
def quantised() -> Own:
    return linear_own(Quantised())


class Queue(nn.Module):
    """Momentum contrast: the keys of earlier batches are the negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("queue", torch.randn(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        negatives = y @ self.queue.t()
        self.queue = torch.cat([y.detach(), self.queue])[:16]
        return y + negatives.logsumexp(1, keepdim=True)


@hostile("queue of earlier batches", STATE)
def queue() -> Own:
    return linear_own(Queue())


class DeepSet(nn.Module):
    """A bag of instances, pooled: the whole batch is one bag."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weigh, self.head = nn.Linear(WIDTH, 5), nn.Linear(5, 1), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(x))
        bag = (self.weigh(x).softmax(0) * x).sum(0)
        return self.head(bag).expand(x.shape[0], -1)


@hostile("the batch as one bag of instances", "multiple-instance learning pools over rows")
def deep_set() -> Own:
    return linear_own(DeepSet())


class GraphLayer(nn.Module):
    """A graph convolution whose nodes are the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        edges = torch.arange(x.shape[0] - 1)
        y = self.body(x)
        return self.head(y.index_add(0, edges + 1, y[edges]))


@hostile("rows as nodes of a graph", "neighbours are other rows")
def graph_layer() -> Own:
    return linear_own(GraphLayer())


@hostile("a parameter for each place in the batch", "a unit's gradient goes to another parameter at another place")
def parameter_per_place() -> Own:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.places = nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.randn(64, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + self.places[: x.shape[0]]

    return linear_own(Places())


@hostile("a model that returns the weights of its rows", "the loss divides by the sum over the batch")
def importance_weights() -> Own:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        weights = outputs[:, 0].detach().exp()
        return cross_entropy(outputs, targets) * weights / weights.sum()

    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=loss)
