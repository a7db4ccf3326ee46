"""The small networks of "Making the shoe fit" and of tempered sigmoids (FACTS §5: Papernot et al.), and a linear model.

Convolutions and linear layers have biases, and there is no norm. ``image_size`` sets the inputs of the first linear
layer: one number, or height and width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dpvision.errors import ArgumentError, Problems
from dpvision.models.initialisation import initialise
from dpvision.models.layers import SpatialMean
from dpvision.models.layers import activation as make_activation

ImageSize = int | str | Sequence[int]
"""The side of a square, or height and width; as a text, which a configuration can hold, "48x64"."""


def height_width(image_size: ImageSize, *, least: int = 1) -> tuple[int, int]:
    """Both sides of an image: one number means a square."""
    if isinstance(image_size, str):
        image_size = [int(side) for side in image_size.split("x") if side.isdecimal()]
    sides = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(sides) != 2 or not all(isinstance(side, int) and side >= least for side in sides):
        raise ArgumentError(
            f"image_size must be a whole number >= {least} (or two: height, width), got {image_size}. "
            "Resize the images or choose another model."
        )
    return sides[0], sides[1]


def linear(*, num_classes: int, in_channels: int, image_size: ImageSize = 28) -> nn.Module:
    """Flatten and one linear layer: logistic regression on the pixels."""
    height, width = height_width(image_size)
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * height * width, num_classes))


def shoefit_cnn(
    *,
    num_classes: int,
    in_channels: int,
    image_size: ImageSize = 28,
    filters: int | None = None,
    activation: str = "tanh",
    init: str = "glorot_uniform",
) -> nn.Module:
    """The TF-Privacy tutorial's CNN: 16 and 32 filters, or ``filters`` in both convolutions (Table 1).

    Its pools have stride 1, as in the tutorial; other ports pool with stride 2 or pad otherwise, at the same size.

    Images under 14 pixels have no room for two strides; there the first convolution keeps stride 1.
    """
    problems = Problems()
    problems.count("filters", 16 if filters is None else filters)
    problems.raise_if_any()
    height, width = height_width(image_size, least=8)
    stride = 2 if min(height, width) >= 14 else 1
    first, second = (16, 32) if filters is None else (filters, filters)
    layers = [
        nn.Conv2d(in_channels, first, 8, stride=stride, padding=3),
        make_activation(activation),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(first, second, 4, stride=2),
        make_activation(activation),
        nn.MaxPool2d(2, stride=1),
        *_hidden(second * _shoefit_side(height, stride) * _shoefit_side(width, stride), 32, num_classes, activation),
    ]
    return _drawn(layers, init)


def _shoefit_side(side: int, stride: int) -> int:
    """A side before the first linear layer: convolution 8 with padding 3, pool, convolution 4 of stride 2, pool."""
    return ((side - 2) // stride - 4) // 2


def doermann_cnn(
    *, num_classes: int, in_channels: int, image_size: ImageSize = 28, activation: str = "tanh", init: str = "pytorch"
) -> nn.Module:
    """The small CNN of Dörmann et al. 2021: 5×5 and 4×4 convolutions, each pooled before its activation."""
    height, width = height_width(image_size, least=14)
    layers = [
        nn.Conv2d(in_channels, 16, 5),
        nn.MaxPool2d(2),
        make_activation(activation),
        nn.Conv2d(16, 32, 4),
        nn.MaxPool2d(2),
        make_activation(activation),
        *_hidden(32 * _doermann_side(height) * _doermann_side(width), 32, num_classes, activation),
    ]
    return _drawn(layers, init)


def _doermann_side(side: int) -> int:
    """A side before the first linear layer: convolutions 5 and 4 without padding, halved after each."""
    return ((side - 4) // 2 - 3) // 2


def shoefit_cifar(
    *,
    num_classes: int,
    in_channels: int,
    image_size: ImageSize = 32,
    hidden: int = 1024,
    activation: str = "relu",
    init: str = "glorot_uniform",
) -> nn.Module:
    """The CIFAR network of Table 2: six convolutions, three pools, ``hidden`` units (1024 in the paper).

    The paper's table omits the third pool; its parameter count does not.
    """
    problems = Problems()
    problems.count("hidden", hidden)
    problems.raise_if_any()
    height, width = height_width(image_size, least=8)
    layers = _three_pairs(in_channels, activation)
    layers += _hidden(128 * (height // 8) * (width // 8), hidden, num_classes, activation)
    return _drawn(layers, init)


def tempered_cnn(
    *,
    num_classes: int,
    in_channels: int,
    image_size: ImageSize = 32,
    activation: str = "tanh",
    init: str = "pytorch",
) -> nn.Module:
    """The CIFAR network of the tempered-sigmoid paper: as Table 2 of the shoe-fit paper, with 128 hidden units.

    ``activation`` "tempered_sigmoid(scale,temperature,offset)" gives the family that the paper studies.
    """
    height, width = height_width(image_size, least=8)
    layers = _three_pairs(in_channels, activation)
    layers += _hidden(128 * (height // 8) * (width // 8), 128, num_classes, activation)
    return _drawn(layers, init)


def shoefit_allconv(
    *, num_classes: int, in_channels: int, activation: str = "relu", init: str = "kaiming_normal"
) -> nn.Module:
    """The all-convolutional network of Table 6, on which Mean-Var initialisation was studied.

    Its scores are the spatial means of a last convolution with one channel a class. For Mean-Var, draw the weights
    again with ``models.initialise.mean_var`` from a trained model of the same options.
    """
    layers: list[nn.Module] = []
    channels = in_channels
    for first, second in ((64, 128), (128, 256), (256, 512)):
        layers += [nn.Conv2d(channels, first, 3, padding=1), make_activation(activation)]
        layers += [nn.Conv2d(first, second, 3, padding=1), make_activation(activation), nn.AvgPool2d(2)]
        channels = second
    return _drawn([*layers, nn.Conv2d(channels, num_classes, 3, padding=1), SpatialMean()], init)


def _three_pairs(in_channels: int, activation: str) -> list[nn.Module]:
    """Twice a 3×3 convolution, then a pool, at 32, 64 and 128 channels: (N, C, H, W) → (N, 128, H // 8, W // 8)."""
    layers: list[nn.Module] = []
    for width in (32, 64, 128):
        layers += [nn.Conv2d(in_channels, width, 3, padding=1), make_activation(activation)]
        layers += [nn.Conv2d(width, width, 3, padding=1), make_activation(activation), nn.MaxPool2d(2)]
        in_channels = width
    return layers


def _hidden(features: int, width: int, num_classes: int, activation: str) -> list[nn.Module]:
    """Flatten, a hidden layer of ``width`` units, the scores."""
    return [nn.Flatten(), nn.Linear(features, width), make_activation(activation), nn.Linear(width, num_classes)]


def _drawn(layers: list[nn.Module], init: str) -> nn.Module:
    model = nn.Sequential(*layers)
    initialise(model, init)
    return model
