"""Layers: normalisation, embeddings, parametrizations, number types, attention, recurrence, in-place writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from clean_models import NamedResult, Result, StandardisedConv, TinyViT
from hostile_table import (
    BATCH_NORM,
    HOSTILE,
    INPLACE,
    SEQUENCE,
    STATE,
    STATISTIC,
    WIDTH,
    WRONG_ROW,
    Applied,
    Mix,
    Sandwich,
    conv_own,
    hostile,
    linear_own,
    mixes,
)
from model_cases import CLASSES, SIDE, Case, Own, cross_entropy, images, tokens, vectors

# ----------------------------------------------------------------------------------------- batch norm in every disguise


def normed(name: str, why: str, norm: Callable[[], nn.Module]) -> None:
    """Enter a convolution with a normalisation after it."""

    def make() -> Own:
        layers = nn.Conv2d(3, 4, 3), norm(), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
        return conv_own(nn.Sequential(*layers))

    HOSTILE.append(Case(name, why, make))


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


normed("batch norm", BATCH_NORM, lambda: nn.BatchNorm2d(4))
normed("batch norm without affine", BATCH_NORM, lambda: nn.BatchNorm2d(4, affine=False))
normed("batch norm without running statistics", BATCH_NORM, lambda: nn.BatchNorm2d(4, track_running_stats=False))
normed(
    "batch norm without running statistics in evaluation mode",
    "it uses the batch in either mode",
    lambda: nn.BatchNorm2d(4, track_running_stats=False).eval(),
)
normed("batch norm with frozen parameters", BATCH_NORM, lambda: FrozenBatchNorm(4))
normed("batch norm with momentum zero", "the buffers do not move", lambda: nn.BatchNorm2d(4, momentum=0.0))
normed("batch norm that updates in evaluation mode", STATE, lambda: EvalStatistics(4).eval())
normed(
    "batch norm of vectors",
    BATCH_NORM,
    lambda: nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(4), nn.Unflatten(2, (6, 6))),
)
normed("synchronised batch norm", BATCH_NORM, lambda: nn.SyncBatchNorm(4))
normed("lazy batch norm", "its parameters do not exist yet", nn.LazyBatchNorm2d)
normed("functional batch norm", BATCH_NORM, lambda: Applied(lambda x: F.batch_norm(x, None, None, training=True)))
normed(
    "batch norm by hand",
    BATCH_NORM,
    lambda: Applied(
        lambda x: (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), keepdim=True, correction=0) + 1e-5).sqrt()
    ),
)
normed(
    "instance norm that tracks statistics",
    "the running mean is one over the batch",
    lambda: nn.InstanceNorm2d(4, track_running_stats=True),
)
normed(
    "instance norm of rows as channels",
    "honest: every channel has its own statistics",
    lambda: Applied(lambda x: F.instance_norm(x.reshape(1, -1, *x.shape[2:])).view_as(x)),
)
normed(
    "group norm of rows as channels",
    "one group holds all rows",
    lambda: Applied(lambda x: F.group_norm(x.reshape(1, -1, *x.shape[2:]), 1).view_as(x)),
)
normed(
    "group norm of rows as groups",
    "honest: one group for each row",
    lambda: Applied(lambda x: F.group_norm(x.reshape(1, -1, *x.shape[2:]), x.shape[0]).view_as(x)),
)
normed(
    "layer norm of transposed rows",
    BATCH_NORM,
    lambda: Applied(lambda x: F.layer_norm(x.transpose(0, 3), x.shape[:1]).transpose(0, 3)),
)
normed(
    "batch norm of a flattened image",
    "pixels become rows: all images share statistics",
    lambda: Applied(
        lambda x: (
            F.batch_norm(x.flatten(2).mT.flatten(0, 1), None, None, training=True)
            .view(x.shape[0], 36, 4)
            .mT.reshape(x.shape)
        )
    ),
)


# -------------------------------------------------------------------------------- embeddings, parametrizations, numbers


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
        places = torch.arange(x.shape[0])
        return self.head(self.bag(x.flatten(), places * x.shape[1] + self.shift * (places > 0)))


def words(name: str, why: str, model: Callable[[], nn.Module]) -> None:
    """Enter a model of tokens."""
    HOSTILE.append(Case(name, why, lambda: Own(model(), cross_entropy, tokens)))


words("sparse embedding", "honest: its gradient is a sparse tensor", lambda: Words(sparse=True))
words(
    "embedding with a largest norm",
    "forward rescales the rows of the weight that it reads",
    lambda: Words(max_norm=0.5),
)
words(
    "embedding scaled by frequency",
    "gradients are divided by counts in the batch",
    lambda: Words(scale_grad_by_freq=True),
)
words("embedding with mixed rows", WRONG_ROW, lambda: Words(lambda x: x.flip(0)))
words("bag of rows", "honest: two dimensions, one bag per row", lambda: Bag(-1))
words("bag with offsets", "honest, but rows are known by offsets only", lambda: Bag(0))
words("bag with shifted offsets", "bags begin inside of another row", lambda: Bag(2))
words("sparse bag with offsets", "honest: offsets and a sparse gradient", lambda: Bag(0, sparse=True, mode="sum"))


class Complex(nn.Module):
    """A complex weight between two real layers."""

    def __init__(self, mix: Mix = lambda x: x) -> None:
        super().__init__()
        self.first, self.mix, self.head = nn.Linear(WIDTH, WIDTH), mix, nn.Linear(WIDTH, CLASSES)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.complex128) if x.dtype == torch.float64 else self.weight
        return self.head((self.mix(self.first(x)).to(weight.dtype) @ weight).abs())


@hostile("complex parameters", "honest: a complex gradient has two numbers per entry")
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

    why = "sums of 16-bit numbers lose what small units add"
    HOSTILE.append(Case(name, why if mix else f"honest: {why}", make, half=True))


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


# -------------------------------------------------------------------- attention and recurrence over the wrong dimension


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


# ------------------------------------------------------------------------------------ sharing, in-place writes, outputs


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


def _inplace(x: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    y = x.clone()
    write(y)
    return y


def _out(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    torch.cumsum(x.detach(), 0, out=result)
    return x + result


mixes("in-place sum of neighbours", INPLACE, lambda x: _inplace(x, lambda y: y[1:].add_(y[:-1].clone())))
mixes("in-place write of the first row", INPLACE, lambda x: _inplace(x, lambda y: y[1:].copy_(y[:1].expand_as(y[1:]))))
mixes("in-place on columns", "honest: a view of columns is scaled", lambda x: _inplace(x, lambda y: y[:, :2].mul_(2)))
mixes("in-place through a transposed view", INPLACE, lambda x: _inplace(x, lambda y: y.t().cumsum_(1)))
mixes(
    "in-place through a flat view",
    INPLACE,
    lambda x: _inplace(x, lambda y: y.view(-1)[1:].add_(y.view(-1)[:-1].clone())),
)
mixes("in-place through a list of rows", INPLACE, lambda x: _inplace(x, lambda y: y.unbind(0)[0].add_(y.sum(0))))
mixes("in-place swap of rows", INPLACE, lambda x: _inplace(x, lambda y: y.copy_(y.flip(0))))
mixes("in-place by index", INPLACE, lambda x: _inplace(x, lambda y: y.__setitem__(0, y.mean(0))))
mixes("in-place past autograd", INPLACE, lambda x: _inplace(x, lambda y: y.data.sub_(y.data.mean(0))))
mixes("out= argument", INPLACE, _out)


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
        return y * negatives.logsumexp(1, keepdim=True)


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
