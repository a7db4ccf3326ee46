"""Rows that are moved, folded into views, or normalised by statistics of their batch, between two layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hostile_table import FOLDED, PLACE, STATISTIC, WRONG_ROW, Mix, mixes
from model_cases import SIDE


def by(order: Callable[[Tensor], Tensor]) -> Mix:
    """Reorder rows by an index, and put them back after the layer."""

    def mix(x: Tensor) -> Any:
        index = order(x)
        return x[index], lambda y: y[index.argsort()]

    return mix


# ----------------------------------------------------------------------------- rows moved, and put back after the layer


def _sorted_columns(x: Tensor) -> Any:
    values, order = x.sort(dim=0)
    return values, lambda y: y.gather(0, order.argsort(0))


def _by_matrix(x: Tensor) -> Any:
    swap = torch.eye(x.shape[0], dtype=x.dtype).flip(0)
    return swap @ x, lambda y: swap.t() @ y


mixes("rows flipped and put back", WRONG_ROW, lambda x: (x.flip(0), lambda y: y.flip(0)), conv=None)
mixes("rows rolled and put back", WRONG_ROW, lambda x: (x.roll(1, 0), lambda y: y.roll(-1, 0)), conv=None)
mixes("rows sorted and put back", WRONG_ROW, by(lambda x: x.flatten(1).sum(1).argsort()), conv=None)
mixes("rows reversed by an index", WRONG_ROW, by(lambda x: torch.arange(x.shape[0] - 1, -1, -1)))
mixes("rows shuffled and put back", WRONG_ROW, by(lambda x: torch.randperm(x.shape[0])), random=True)
mixes("rows by index_select", WRONG_ROW, lambda x: x.index_select(0, torch.arange(x.shape[0]).flip(0)))
mixes("rows by gather", WRONG_ROW, lambda x: x.gather(0, torch.arange(x.shape[0]).flip(0)[:, None].expand_as(x)))
mixes("every column sorted", "order statistics of the batch", lambda x: x.sort(dim=0).values)
mixes("columns sorted and put back", WRONG_ROW, _sorted_columns)
mixes("rows by take_along_dim", WRONG_ROW, lambda x: x.take_along_dim(x.argsort(0), 0))
mixes("rows by take", "flat indices know no rows", lambda x: x.take(torch.arange(x.numel()).flip(0).view_as(x)))
mixes("rows by a permutation matrix", WRONG_ROW, _by_matrix)
mixes(
    "rows by einsum", "the rows are summed over", lambda x: torch.einsum("nm,mc->nc", torch.eye(x.shape[0]).flip(0), x)
)
mixes("rows by cat", "the last row moves to the front", lambda x: torch.cat([x[-1:], x[:-1]]), conv=None)
mixes("rows by stack and unbind", "a list of rows in another order", lambda x: torch.stack(x.unbind(0)[::-1]))
mixes("rows by split", "a list of pieces in another order", lambda x: torch.cat(x.split(1)[::-1]))
mixes("rows by padding", "padded at one end and cut at the other", lambda x: F.pad(x, (0, 0, 1, 0))[:-1])
mixes("rows by negative dimension", "dimension -2 of a matrix is the rows", lambda x: x.flip(-2))
mixes("rows by slices", "every row gets its neighbour's value", lambda x: x + torch.cat([x[1:], x[:1]]).detach())
mixes("rows by index_put", "written to another row", lambda x: x.index_put((torch.arange(x.shape[0]).flip(0),), x))
mixes("rows by scatter", "scattered along the rows", lambda x: x.scatter(0, x.argsort(0), x))
mixes("rows by index_add", "added to the row before", lambda x: x.index_add(0, torch.arange(x.shape[0]).roll(1), x))
mixes(
    "rows as an embedding table", "row i looks row n-i up", lambda x: F.embedding(torch.arange(x.shape[0]).flip(0), x)
)
mixes("rows repeated and cut", "row i gets row i/2", lambda x: x.repeat_interleave(2, 0)[: x.shape[0]])
mixes("rows tiled and cut", "shifted through a repetition", lambda x: x.repeat(2, 1)[1 : x.shape[0] + 1])
mixes("first row for all", "an expanded row", lambda x: x[:1].expand_as(x))
mixes("first row added to all", "broadcasting over rows", lambda x: x + x[0])
mixes("last row added to all", "broadcasting over rows", lambda x: x + x.select(0, -1).detach())


# -------------------------------------------------------------------------------------------------------- views of rows


def _pairs(x: Tensor) -> Tensor:
    even = torch.cat([x, x[: x.shape[0] % 2]])
    return even.view(-1, 2, x.shape[1]).flip(1).reshape(even.shape)[: x.shape[0]]


def _row_groups(x: Tensor) -> Tensor:
    n = x.shape[0]
    weight = torch.ones(4, 4, 1, 1).repeat(n, 1, 1, 1)
    return F.conv2d(x.reshape(1, n * 4, SIDE, SIDE), weight, groups=n).view_as(x)


mixes("view with the rows inside", FOLDED, lambda x: x.reshape(x.shape[1], -1).t())
mixes("pairs of rows folded", FOLDED, _pairs)
mixes(
    "rows folded into two",
    FOLDED,
    lambda x: torch.cat([x, x[: x.shape[0] % 2]]).view(2, -1).sum(0).view(-1, 6).mean(0) + x,
)
mixes("transposed twice around a flip", FOLDED, lambda x: x.t().flip(-1).t())
mixes("batch in the channel axis", FOLDED, lambda x: x.transpose(0, 1).flip(1).transpose(0, 1), conv=True)
mixes(
    "rows and channels exchanged by reshape", FOLDED, lambda x: x.reshape(4, -1, SIDE, SIDE).transpose(0, 1), conv=True
)
mixes(
    "flattened and convolved",
    FOLDED,
    lambda x: F.conv1d(x.reshape(1, 1, -1), torch.ones(1, 1, 3), padding=1).view_as(x),
)
mixes("pooled along the rows", FOLDED, lambda x: F.avg_pool1d(x.t(), 3, 1, 1).t())
mixes("max-pooled along the rows", FOLDED, lambda x: F.max_pool1d(x.t()[None], 3, 1, 1)[0].t())
mixes(
    "pooled as a volume",
    FOLDED,
    lambda x: F.avg_pool3d(torch.cat([x, x[:1]]).transpose(0, 1)[None], (2, 1, 1), 1)[0].transpose(0, 1),
    conv=True,
)
mixes("unfolded along the rows", FOLDED, lambda x: torch.cat([x, x[:1]]).unfold(0, 2, 1).sum(-1))
mixes("as_strided with stride zero", FOLDED, lambda x: x.contiguous().as_strided(x.shape, (0, 1)))
mixes("as_strided over rows", FOLDED, lambda x: torch.cat([x, x]).as_strided(x.shape, (x.shape[1], 1), x.shape[1]))
mixes(
    "interpolated along the rows",
    FOLDED,
    lambda x: F.interpolate(x.t()[None], size=2 * x.shape[0], mode="linear")[0, :, ::2].t(),
)
mixes("shifted by a view", FOLDED, lambda x: torch.cat([x.flatten()[3:], x.flatten()[:3]]).view_as(x))
mixes(
    "bytes in another row",
    FOLDED,
    lambda x: x.detach().contiguous().view(torch.int32).roll(1, 0).view(torch.float32) + x,
)
mixes("rows as groups of a convolution", "honest: one group per row", _row_groups, conv=True)
mixes(
    "local response over rows",
    "the rows lie in the channel axis",
    lambda x: F.local_response_norm(x.transpose(0, 1), 3, alpha=1.0).transpose(0, 1),
    conv=True,
)
mixes(
    "swin windows that cross rows",
    "rows folded into windows in the wrong order",
    lambda x: x.permute(2, 0, 3, 1).reshape(-1, 4, SIDE, SIDE),
    conv=True,
)
mixes("moved to the end and cumulated", FOLDED, lambda x: x.movedim(0, -1).cumsum(-1).movedim(-1, 0), conv=None)


# ---------------------------------------------------------------------------------------------- statistics of the batch

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
mixes(
    "softmax without a dimension",
    "for three dimensions the default is dimension 0",
    lambda x: F.softmax(x.unsqueeze(2))[..., 0],
)
mixes("normalised over rows", STATISTIC, lambda x: F.normalize(x, dim=0))
mixes("layer norm over the batch axis", STATISTIC, lambda x: F.layer_norm(x.t(), (x.shape[0],)).t())
mixes("layer norm over everything", STATISTIC, lambda x: F.layer_norm(x, tuple(x.shape)), conv=None)
mixes("median", STATISTIC, lambda x: x - x.median())
mixes("quantile of every column", STATISTIC, lambda x: x - x.quantile(0.5, dim=0))
mixes(
    "running sum and its difference",
    "undone, but the layer sees sums of rows",
    lambda x: (x.cumsum(0), lambda y: torch.cat([y[:1], y.diff(dim=0)])),
)
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
mixes(
    "fused attention over the batch",
    "two dimensions are a sequence without a batch",
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
)
mixes("tensordot of rows", STATISTIC, lambda x: torch.tensordot(x, x, ([1], [1])).tanh() @ x)
mixes(
    "kernel made from the batch",
    "the filter is a sum over rows",
    lambda x: F.conv2d(x, x.sum(0, keepdim=True).expand(4, -1, -1, -1)[..., :3, :3], padding=1),
    conv=True,
)
mixes("Fourier transform over rows", "frequencies of the batch", lambda x: torch.fft.fft(x, dim=0).real, conv=None)
mixes("Fourier transform of all dimensions", "frequencies of the batch", lambda x: torch.fft.fftn(x).abs())
mixes("scale of fake quantization", "the scale is the batch maximum", lambda x: x / x.abs().max() * 127)
mixes("singular vectors", "directions of the whole batch", lambda x: x @ torch.linalg.svd(x).Vh.t().detach())
mixes(
    "whitened",
    "the inverse root of the batch's covariance",
    lambda x: torch.linalg.solve(x.t() @ x + torch.eye(6), x.t()).t(),
)
mixes(
    "nonzero rows only", "how many rows there are depends on data", lambda x: x * torch.nonzero(x.sum(1) > 0).shape[0]
)
mixes("rows selected by a mask", "the kept rows move up", lambda x: torch.cat([x[x.sum(1) > 0], x[x.sum(1) <= 0]]))
mixes("unique entries", "their number depends on all rows", lambda x: x * x.round().unique().numel())
mixes(
    "sparse round trip",
    "the pattern of the batch",
    lambda x: torch.sparse.mm(torch.eye(x.shape[0]).flip(0).to_sparse(), x),
)

# --------------------------------------------------------------------------------------- dependence on place and number

mixes("weights by place", PLACE, lambda x: x * torch.arange(1, x.shape[0] + 1)[:, None])
mixes("weights by a line over the batch", PLACE, lambda x: x * torch.linspace(0.1, 1, x.shape[0])[:, None])
mixes("divided by the number of rows", PLACE, lambda x: x / x.shape[0])
mixes("first row set to zero", PLACE, lambda x: torch.cat([torch.zeros_like(x[:1]), x[1:]]))
mixes("every other row negated", PLACE, lambda x: x * (1 - 2 * (torch.arange(x.shape[0]) % 2))[:, None])
mixes("triangular mask over rows", PLACE, lambda x: torch.ones(x.shape[0], x.shape[0]).tril() @ x)
mixes("identity matrix times rows", "honest, but a general matrix over rows", lambda x: torch.eye(x.shape[0]) @ x)
