"""Models and losses whose rows do not influence each other: every one must be accepted, and its sum exact.

Small enough that each step takes milliseconds; each is the idea of a known architecture, not a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from model_cases import CLASSES, SIDE, Case, Own, RowMaker, cross_entropy, images, tokens, vectors

CLEAN: list[Case] = []
"""The table."""


def clean(name: str, why: str, **facts: bool) -> Callable[[Callable[[], Own]], Callable[[], Own]]:
    """Enter a function that builds a model into the table."""

    def enter(make: Callable[[], Own]) -> Callable[[], Own]:
        CLEAN.append(Case(name, why, make, **facts))
        return make

    return enter


def classifier(*layers: nn.Module, rows: RowMaker = images) -> Own:
    """Return a sequence of layers with cross-entropy."""
    return Own(nn.Sequential(*layers), cross_entropy, rows)


class Pooled(nn.Sequential):
    """The usual end of a network for images."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


# ---------------------------------------------------------------------------------------------- convolutional networks


@clean("linear", "the smallest model that there is")
def linear() -> Own:
    return classifier(nn.Linear(6, CLASSES), rows=vectors)


@clean("cnn", "convolution, pooling, flatten, linear: the first model of every course")
def cnn() -> Own:
    return classifier(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.Tanh(), nn.Flatten(),
        nn.Linear(32, CLASSES),
    )  # fmt: skip


@clean("cnn with dropout", "dropout draws one mask for each entry of each row", random=True)
def cnn_with_dropout() -> Own:
    return classifier(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(216, CLASSES)
    )


@clean("cnn with alpha dropout", "dropout that also shifts and scales", random=True)
def cnn_with_alpha_dropout() -> Own:
    return classifier(nn.Conv2d(3, 6, 3), nn.SELU(), nn.AlphaDropout(0.3), Pooled(6))


@clean("activations", "every common activation, with and without parameters")
def activations() -> Own:
    return classifier(
        nn.Conv2d(3, 6, 3, padding=1), nn.PReLU(6), nn.GELU(), nn.SiLU(), nn.ELU(), nn.Softplus(), nn.Hardswish(),
        nn.LeakyReLU(0.1), nn.Mish(), nn.Sigmoid(), nn.GLU(dim=1), Pooled(3),
    )  # fmt: skip


@clean("in-place activations", "nn.ReLU(inplace=True) writes into its own input")
def inplace_activations() -> Own:
    return classifier(
        nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3), nn.Hardtanh(-1, 1, inplace=True), Pooled(6)
    )


@clean("convolutions of every kind", "strided, dilated, grouped, depthwise, reflected and circular padding, no bias")
def convolutions() -> Own:
    return classifier(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, padding_mode="reflect"), nn.ReLU(),
        nn.Conv2d(8, 4, 3, padding="same", padding_mode="circular"), Pooled(4),
    )  # fmt: skip


@clean("one and three dimensions", "signals and volumes besides images")
def one_and_three_dimensions() -> Own:
    return classifier(
        nn.Flatten(2), nn.Conv1d(3, 4, 5, padding=2), nn.ReLU(), nn.AvgPool1d(2), nn.Unflatten(1, (1, 4)),
        nn.Unflatten(3, (4, 8)), nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(), nn.ConvTranspose3d(3, 3, 2),
        nn.AdaptiveMaxPool3d(1), nn.Flatten(2), nn.ConvTranspose1d(3, 2, 4), nn.AdaptiveAvgPool1d(2), nn.Flatten(),
        nn.Linear(4, CLASSES),
    )  # fmt: skip


@clean("poolings", "adaptive, average, LP and max pooling, and local response normalisation over channels")
def poolings() -> Own:
    return classifier(
        nn.Conv2d(3, 6, 3, padding=1), nn.LocalResponseNorm(3), nn.AvgPool2d(2, ceil_mode=True), nn.ReLU(),
        nn.LPPool2d(2, 2), nn.Conv2d(6, 6, 1), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES),
    )  # fmt: skip


@clean("norms by row", "group, layer, instance and RMS normalisation take their statistics from one row")
def norms_by_row() -> Own:
    return classifier(
        nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.InstanceNorm2d(6, affine=True),
        nn.ReLU(), nn.Conv2d(6, 6, 3), nn.GroupNorm(1, 6), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 8),
        nn.RMSNorm(8), nn.Linear(8, CLASSES),
    )  # fmt: skip


@clean("frozen batch norm", "batch normalisation in evaluation mode uses stored statistics")
def frozen_batch_norm() -> Own:
    own = classifier(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), Pooled(6))
    own.model[1].eval()
    return own


class Residual(nn.Module):
    """Two convolutions with group normalisation, and a shortcut."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(2, after), nn.GroupNorm(2, after)])
        self.shortcut = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        y += self.shortcut(x)
        return F.relu(y)


@clean("resnet", "residual blocks with group normalisation")
def resnet() -> Own:
    return classifier(nn.Conv2d(3, 4, 3, padding=1), Residual(4, 4), Residual(4, 8, 2), Residual(8, 8), Pooled(8))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, 2), nn.Linear(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))[:, :, None, None]


@clean("squeeze and excitation", "an image's own mean scales its channels")
def squeeze_and_excitation() -> Own:
    return classifier(nn.Conv2d(3, 6, 3), SqueezeExcite(6), nn.Conv2d(6, 6, 3), SqueezeExcite(6), Pooled(6))


class Dense(nn.Module):
    """Every layer sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3 + 2 * i, 2, 3, padding=1) for i in range(3)])
        self.head = Pooled(9)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], dim=1)
        return self.head(F.avg_pool2d(x, 2))


@clean("densenet", "concatenation along the channels")
def densenet() -> Own:
    return Own(Dense(), cross_entropy, images)


class ConvNextBlock(nn.Module):
    """Depthwise convolution, then a perceptron in channels-last order, scaled per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.norm, self.up, self.down = nn.LayerNorm(channels), nn.Linear(channels, 12), nn.Linear(12, channels)
        self.scale = nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


@clean("convnext", "channels-last permutes and layer scale")
def convnext() -> Own:
    return classifier(nn.Conv2d(3, 6, 2, 2), ConvNextBlock(6), ConvNextBlock(6), Pooled(6))


class MobileBlock(nn.Module):
    """An inverted bottleneck with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 12, 1), nn.GroupNorm(3, 12), nn.ReLU6(), nn.Conv2d(12, 12, 3, 1, 1, groups=12),
            nn.Hardsigmoid(), nn.Conv2d(12, 4, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@clean("mobilenet", "inverted bottlenecks with clipped activations")
def mobilenet() -> Own:
    return classifier(nn.Conv2d(3, 4, 3, 2, 1), MobileBlock(), MobileBlock(), Pooled(4))


class Inception(nn.Module):
    """Parallel branches, split and joined along the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.three = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = Pooled(8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, dim=1)
        mixed = torch.stack([self.one(left), self.three(right)], dim=2).flatten(1, 2)  # channels shuffled
        return self.head(F.relu(mixed))


@clean("inception with channel shuffle", "chunks, stacks and flattens that leave the rows alone")
def inception() -> Own:
    return Own(Inception(), cross_entropy, images)


class StandardisedConv(nn.Conv2d):
    """Weight standardisation, written by hand."""

    def forward(self, input: Tensor) -> Tensor:
        mean, var = self.weight.mean((1, 2, 3), keepdim=True), self.weight.var((1, 2, 3), keepdim=True)
        return F.conv2d(input, (self.weight - mean) / (var + 1e-5).sqrt(), self.bias, padding=1)


@clean("weight standardisation", "the mean over dimension 0 of a weight is no mean over rows")
def weight_standardisation() -> Own:
    return classifier(StandardisedConv(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), StandardisedConv(6, 4, 3), Pooled(4))


@clean("weight norm", "the parametrization divides weights by their own norm")
def weight_normed() -> Own:
    return classifier(
        weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Flatten(), weight_norm(nn.Linear(144, CLASSES), dim=1)
    )


@clean("orthogonal parametrization", "a matrix exponential of the weight, the same for every row")
def orthogonal_weight() -> Own:
    return classifier(
        orthogonal(nn.Linear(6, 6), orthogonal_map="cayley"), nn.Tanh(), nn.Linear(6, CLASSES), rows=vectors
    )


class StochasticDepth(nn.Module):
    """Each row keeps its residual branch with its own coin."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1), Pooled(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = (torch.rand(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device) < 0.7) / 0.7
        return self.head(x + kept * self.branch(x))


@clean("stochastic depth", "one coin of torch for each row", random=True)
def stochastic_depth() -> Own:
    return Own(StochasticDepth(), cross_entropy, images)


class DropPath(StochasticDepth):
    """The same with an in-place Bernoulli draw, as the popular libraries write it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.7).div_(0.7)
        return self.head(x + kept * self.branch(x))


@clean("drop path", "an in-place Bernoulli draw for each row", random=True)
def drop_path() -> Own:
    return Own(DropPath(), cross_entropy, images)


class FlooredPath(StochasticDepth):
    """The same by rounding down, as in models of Hugging Face."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = 0.7 + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
        kept.floor_()
        return self.head(x + self.branch(x).div(0.7) * kept)


@clean("drop path by rounding", "a uniform draw for each row, rounded down in place", random=True)
def floored_path() -> Own:
    return Own(FlooredPath(), cross_entropy, images)


class Noisy(StochasticDepth):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x + 0.1 * torch.randn_like(x)))


@clean("noise on the inputs", "a draw of its own for each entry", random=True)
def noisy() -> Own:
    return Own(Noisy(), cross_entropy, images)


class Coordinates(nn.Module):
    """Coordinate channels, made in forward and expanded to all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(5, 6, 3), Pooled(6)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        lines = torch.linspace(-1, 1, h, dtype=x.dtype), torch.linspace(-1, 1, w, dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(*lines, indexing="ij"))
        return self.head(F.relu(self.conv(torch.cat([x, grid.expand(n, 2, h, w)], 1))))


@clean("coordinate channels", "a constant grid expanded over the rows")
def coordinates() -> Own:
    return Own(Coordinates(), cross_entropy, images)


class Masked(nn.Module):
    """A mean over the bright pixels of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mask = x.amax(1, keepdim=True) > 0.5
        y = torch.where(mask, self.conv(x), 0.0).masked_fill(~mask, 0.0)
        return self.head(y.sum((2, 3)) / mask.sum((2, 3)).clamp(min=1))


@clean("masked mean", "where, masked_fill and a count of each row's own pixels")
def masked() -> Own:
    return Own(Masked(), cross_entropy, images)


class UnusedRange(Masked):
    """Makes a range over the rows and does not use it, as attention masks of Hugging Face do."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0])[:, None, None] + 1
        tokens = torch.arange(SIDE)[None, :, None]
        everywhere, _ = torch.broadcast_tensors(tokens >= 0, tokens != 1)
        del places
        return super().forward(x * everywhere)


@clean("a range over the rows that nothing uses", "dead code that looks at places")
def unused_range() -> Own:
    return Own(UnusedRange(), cross_entropy, images)


class OwnStatistics(nn.Module):
    """Every image is normalised by its own mean and deviation, and its own largest value."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), Pooled(6)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - x.mean((1, 2, 3), keepdim=True)) / (x.std((1, 2, 3), keepdim=True) + 1e-3)
        x = x / x.flatten(1).abs().max(1).values.view(-1, 1, 1, 1)
        return self.head(F.normalize(self.conv(x), dim=1))


@clean("own statistics", "mean, standard deviation, maximum and norm of each image by itself")
def own_statistics() -> Own:
    return Own(OwnStatistics(), cross_entropy, images)


# ------------------------------------------------------------------------------------------------- images from images


class TinyUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 2, 1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.norm(self.down(x)))
        deep = F.relu(self.deep(F.max_pool2d(skip, 2)))
        return self.out(torch.cat([skip, self.up(deep)], dim=1))


def masks(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images and a class for each pixel."""
    inputs, _ = images(number, generator)
    return inputs, torch.randint(2, (number, SIDE, SIDE), generator=generator)


def loss_of_pixels(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none").mean((1, 2))


@clean("u-net", "transposed convolution and a skip connection, one class per pixel")
def unet() -> Own:
    return Own(TinyUNet(), loss_of_pixels, masks)


def dice_of_each_image(outputs: Tensor, targets: Tensor) -> Tensor:
    chances, truth = outputs.softmax(1)[:, 1].flatten(1), targets.flatten(1).to(outputs.dtype)
    return 1 - (2 * (chances * truth).sum(1) + 1) / (chances.sum(1) + truth.sum(1) + 1)


@clean("u-net with Dice of each image", "sums over one image's pixels only")
def unet_with_dice() -> Own:
    return Own(TinyUNet(), dice_of_each_image, masks)


class Upsampled(nn.Module):
    """Interpolation of several kinds and a pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.interpolate(x, scale_factor=0.5, mode="nearest")
        x = F.interpolate(self.second(x), size=(4, 4), mode="bilinear", align_corners=False)
        return self.out(F.pixel_shuffle(x, 2))


@clean("upsampling", "interpolation and pixel shuffle")
def upsampled() -> Own:
    return Own(Upsampled(), loss_of_pixels, masks)


class Autoencoder(nn.Module):
    """A variational one: returns a reconstruction and the parameters of its code."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(192, 6), nn.Linear(3, 192)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_var = self.encode(x.flatten(1)).chunk(2, 1)
        code = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        return {"image": self.decode(code).view_as(x), "mean": mean, "log_var": log_var}


def loss_of_autoencoder(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    mean, log_var = outputs["mean"], outputs["log_var"]
    divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)
    return F.mse_loss(outputs["image"], targets, reduction="none").flatten(1).sum(1) + divergence


@clean("variational autoencoder", "returns a dict and draws a code for each row", random=True)
def autoencoder() -> Own:
    return Own(Autoencoder(), loss_of_autoencoder, lambda n, g: (images(n, g)[0],) * 2)


# ---------------------------------------------------------------------------------------------- attention and mixers


class TinyViT(nn.Module):
    """A class token, learned positions, and PyTorch's own attention."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.norms = nn.ModuleList([nn.LayerNorm(8) for _ in range(3)])
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        y = self.norms[0](x)
        y = y if self.attention.batch_first else y.transpose(0, 1)
        y = self.attention(y, y, y, need_weights=False)[0]
        x = x + (y if self.attention.batch_first else y.transpose(0, 1))
        x = x + self.mlp(self.norms[1](x))
        return self.head(self.norms[2](x)[:, 0])


@clean("vit", "class token, positions and multi-head attention with rows first")
def vit() -> Own:
    return Own(TinyViT(), cross_entropy, images)


@clean("vit with the sequence first", "attention with the rows in dimension 1, as it is by default")
def vit_with_the_sequence_first() -> Own:
    return Own(TinyViT(batch_first=False), cross_entropy, images)


class HandAttention(nn.Module):
    """Attention as it is written by hand in most repositories."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused, self.embed = fused, nn.Linear(24, 8)
        self.qkv, self.out, self.head = nn.Linear(8, 24, bias=False), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.transpose(1, 2).flatten(2))  # image rows as tokens
        n, length, width = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v
        return self.head((x + self.out(y.transpose(1, 2).reshape(n, length, width))).mean(1))


@clean("attention by hand", "reshapes, permutes, unbind and matmul over heads")
def hand_attention() -> Own:
    return Own(HandAttention(fused=False), cross_entropy, images)


@clean("scaled dot product attention", "the fused operation of PyTorch")
def fused_attention() -> Own:
    return Own(HandAttention(fused=True), cross_entropy, images)


class EinsumAttention(HandAttention):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.transpose(1, 2).flatten(2))
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).unbind(2)
        weights = torch.einsum("nihd,njhd->nhij", q, k).softmax(-1)
        return self.head(torch.einsum("nhij,njhd->nihd", weights, v).flatten(2).mean(1))


@clean("attention by einsum", "the rows stay a free index of every einsum")
def einsum_attention() -> Own:
    return Own(EinsumAttention(fused=False), cross_entropy, images)


class Windows(nn.Module):
    """Attention inside windows that are folded into the batch dimension and unfolded again, shifted by a roll."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Conv2d(3, 8, 1), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1).roll((1, 1), dims=(1, 2))
        n, h, w, c = x.shape
        windows = x.view(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        windows = windows + self.attention(windows, windows, windows, need_weights=False)[0]
        x = windows.view(-1, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return self.head(x.roll((-1, -1), dims=(1, 2)).mean((1, 2)))


@clean("swin windows", "windows of an image folded into the batch dimension, each row's own")
def windows() -> Own:
    return Own(Windows(), cross_entropy, images)


class Mixer(nn.Module):
    """One perceptron over tokens, one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.tokens, self.channels = nn.Conv2d(3, 8, 2, 2), nn.Linear(16, 16), nn.Linear(8, 8)
        self.norms, self.head = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)]), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = x + self.tokens(self.norms[0](x).mT).mT
        return self.head((x + F.gelu(self.channels(self.norms[1](x)))).mean(1))


@clean("mlp-mixer", "linear layers across tokens by transposes")
def mixer() -> Own:
    return Own(Mixer(), cross_entropy, images)


class Transformer(nn.Module):
    """PyTorch's own encoder layer over embedded tokens, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.cat([torch.zeros_like(x[:, :1], dtype=torch.bool), x[:, 1:] == 0], dim=1)
        return self.head(self.layer(self.embedding(x), src_key_padding_mask=padding)[:, 0])


@clean("transformer over tokens", "embedding, padding mask and an encoder layer")
def transformer() -> Own:
    return Own(Transformer(), cross_entropy, tokens)


# --------------------------------------------------------------------------------------------------------- recurrent


class Recurrent(nn.Module):
    """A recurrent layer over the rows of an image."""

    def __init__(self, layer: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.layer = layer(24, 5, batch_first=True, **settings)
        self.head = nn.Linear(10 if self.layer.bidirectional else 5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.transpose(1, 2).flatten(2))[0][:, -1])


@clean("lstm over image rows", "the rows of an image are a sequence, its batch is not")
def lstm() -> Own:
    return Own(Recurrent(nn.LSTM), cross_entropy, images)


@clean("bidirectional gru", "two directions and two layers")
def gru() -> Own:
    return Own(Recurrent(nn.GRU, bidirectional=True, num_layers=2), cross_entropy, images)


class Cells(nn.Module):
    """A loop over a recurrent cell, its state started with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(24, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 5)
        for line in x.transpose(1, 2).flatten(2).unbind(1):
            state = self.cell(line, state)
        return self.head(state)


@clean("recurrent cell in a loop", "state that begins and ends inside one forward pass")
def cells() -> Own:
    return Own(Cells(), cross_entropy, images)


# ------------------------------------------------------------------------------------------ parameters used in odd ways


class Tied(nn.Module):
    """An autoencoder whose decoder is the transpose of its encoder, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.twice, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(torch.tanh(self.encode(x)))))
        return self.head(F.linear(x, self.encode.weight.t()))


@clean("tied weights and a layer called twice", "a unit's gradient adds several uses before it is clipped")
def tied() -> Own:
    return Own(Tied(), cross_entropy, vectors)


class Shared(nn.Module):
    """Two modules that hold one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


@clean("one parameter in two modules", "one gradient from two places")
def shared() -> Own:
    return Own(Shared(), cross_entropy, vectors)


class Siamese(nn.Module):
    """One backbone for two images of the same row, given as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.cosine_similarity(self.body(left), self.body(right))


def pairs(number: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Return two images per row and whether they belong together."""
    left, right = images(number, generator)[0], images(number, generator)[0]
    return {"left": left, "right": right}, torch.randint(2, (number,), generator=generator)


@clean("siamese network with inputs in a dict", "both images belong to the same row")
def siamese() -> Own:
    return Own(Siamese(), lambda out, y: F.mse_loss(out, y.to(out.dtype), reduction="none"), pairs)


class TwoHeads(nn.Module):
    """An image and numbers that describe it in, classes and a box out."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.facts = nn.Sequential(nn.Conv2d(3, 4, 3), Pooled(4)), nn.Linear(3, CLASSES)
        self.box = nn.Bilinear(CLASSES, CLASSES, 4)

    def forward(self, image: Tensor, facts: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.image(image), self.facts(facts)
        return a + b, self.box(a, b)


def loss_of_two_heads(outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    classes = F.cross_entropy(outputs[0], targets["class"], reduction="none", label_smoothing=0.1)
    return classes + F.smooth_l1_loss(outputs[1], targets["box"], reduction="none").sum(1)


def boxes(number: int, generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Return images with three facts, classes and boxes."""
    inputs, classes = images(number, generator)
    facts, box = torch.randn(number, 3, generator=generator), torch.rand(number, 4, generator=generator)
    return (inputs, facts), {"class": classes, "box": box}


@clean("two inputs and two outputs", "tuples in, tuples out, targets in a dict")
def two_heads() -> Own:
    return Own(TwoHeads(), loss_of_two_heads, boxes)


@dataclass
class Result:
    logits: Tensor


class NamedResult(NamedTuple):
    logits: Tensor
    features: Tensor


class Named(nn.Module):
    """Returns an object of its own class."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body, self.head = kind, nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Any:
        features = torch.tanh(self.body(x))
        logits = self.head(features)
        return Result(logits) if self.kind == "dataclass" else NamedResult(logits, features)


@clean("a dataclass as output", "outputs of the model's own class")
def dataclass_output() -> Own:
    return Own(Named("dataclass"), lambda out, y: cross_entropy(out.logits, y), vectors)


@clean("a named tuple as output", "outputs of the model's own class")
def named_tuple_output() -> Own:
    return Own(Named("tuple"), lambda out, y: cross_entropy(out.logits, y) + out.features.square().sum(1), vectors)


class Buffered(nn.Module):
    """Normalises by constants in buffers and has a frozen part and a part without use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1))
        self.frozen, self.unused = nn.Conv2d(3, 4, 3).requires_grad_(False), nn.Linear(2, 2)
        self.head, self.temperature = Pooled(4), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = F.relu(self.frozen(x - self.mean))
        return self.head(features) * self.temperature.exp()


@clean("buffers, a frozen part, an unused part and a scalar parameter", "all of them are common")
def buffered() -> Own:
    return Own(Buffered(), cross_entropy, images)


# ------------------------------------------------------------------------------------------------------------- losses


def loss_by_index(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.log_softmax(1)[torch.arange(len(targets)), targets]


def loss_by_index_of_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.log_softmax(1)[torch.arange(targets.shape[0], device=targets.device), targets]


def loss_by_gather(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.logsumexp(1) - outputs.gather(1, targets[:, None])[:, 0]


def loss_by_one_hot(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(F.one_hot(targets, CLASSES) * outputs.log_softmax(-1)).sum(-1)


def focal_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    plain = cross_entropy(outputs, targets)
    return (1 - torch.exp(-plain)) ** 2 * plain


def class_weighted_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=outputs.dtype)
    return cross_entropy(outputs, targets) * weights[targets]


def margin_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    true = outputs.gather(1, targets[:, None])
    others = outputs.scatter(1, targets[:, None], -1e4)
    return F.relu(1 - true + others).topk(2, dim=1).values.sum(1)


def soft_target_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.kl_div(outputs.log_softmax(1), targets, reduction="none").sum(1)


def soft_targets(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return images(number, generator)[0], torch.randn(number, CLASSES, generator=generator).softmax(1)


def multi_label_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)


def multi_label(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return images(number, generator)[0], torch.randint(2, (number, CLASSES), generator=generator).float()


def ordinal_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    steps = targets[:, None] > torch.arange(CLASSES)
    return -torch.where(steps, F.logsigmoid(outputs), F.logsigmoid(-outputs)).cumsum(1).mean(1)


def _with_loss(name: str, loss_fn: Any, rows: RowMaker, why: str) -> None:
    @clean(name, why)
    def make() -> Own:
        return Own(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Pooled(4)), loss_fn, rows)


_with_loss("loss by index", loss_by_index_of_shape, images, "outputs[arange, targets] reads each row's own target")
_with_loss("loss by index with len", loss_by_index, images, "len(x) is a plain number, unlike x.shape[0]")
_with_loss("loss by gather", loss_by_gather, images, "gather along the classes")
_with_loss("loss by one-hot", loss_by_one_hot, images, "targets as one-hot vectors")
_with_loss("focal loss", focal_loss, images, "a row's loss weighted by itself")
_with_loss("class weights", class_weighted_loss, images, "a table of constants read by each row's target")
_with_loss("margin loss", margin_loss, images, "scatter and top-k along the classes")
_with_loss("soft targets", soft_target_loss, soft_targets, "Kullback-Leibler divergence from soft targets")
_with_loss("several labels", multi_label_loss, multi_label, "binary cross-entropy of each label")
_with_loss("ordinal loss", ordinal_loss, images, "a comparison with a range of classes and a running sum over them")
_with_loss("loss of nn", nn.CrossEntropyLoss(reduction="none"), images, "a loss that is a module")
