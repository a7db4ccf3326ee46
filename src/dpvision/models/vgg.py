"""The first seven convolutions of VGG16 (blocks 1 to 3), for weights that were trained in public; and a linear head.

Names are those of the published network (``features.N``). Inputs are normalised by ImageNet's mean and std.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from dpvision.errors import Problems
from dpvision.models.backbone import FeatureNorm, colour_front, draw, feature_norm_layer, resize

_BLOCKS = ((64, 64), (128, 128), (256, 256, 256))


def vgg16_conv3(
    *,
    num_classes: int,
    in_channels: int,
    resize_to: int = 0,
    pool_to: int = 2,
    feature_norm: FeatureNorm = "layer",
) -> nn.Module:
    """VGG16 up to its third pool, averaged to ``pool_to`` × ``pool_to`` places, standardised row by row, linear.

    Grey images (``in_channels=1``) are repeated to three channels.
    """
    problems = Problems()
    problems.count("pool_to", pool_to)
    problems.raise_if_any()
    layers: list[nn.Module] = []
    colour, channels = colour_front(in_channels)
    for block in _BLOCKS:
        for width in block:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    features = channels * pool_to**2
    model = nn.Sequential(
        OrderedDict[str, nn.Module](
            resize=resize(resize_to),
            colour=colour,
            features=nn.Sequential(*layers),
            pool=nn.AdaptiveAvgPool2d(pool_to),
            flatten=nn.Flatten(),
            feature_norm=feature_norm_layer(feature_norm, features),
            fc=nn.Linear(features, num_classes),
        )
    )
    draw(model)
    return model
