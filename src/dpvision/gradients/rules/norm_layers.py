"""Normalisation layers: the normalised input times the output gradient, added up over all positions of a unit.

Shapes: N rows, U units, C channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from dpvision.gradients.layer_gradient import LayerGradient, MaterialisedGradient, sum_by_unit, sum_over_space
from dpvision.gradients.rules.rule import LayerCall, register


def group_norm(call: LayerCall) -> dict[str, LayerGradient]:
    """Return gradients for statistics over the groups of one row."""
    module = call.layer(nn.GroupNorm)
    return _channels_first(call, F.group_norm(call.x, module.num_groups, eps=module.eps))


def instance_norm(call: LayerCall) -> dict[str, LayerGradient]:
    """Return gradients for statistics over the space of one channel of one row."""
    return _channels_first(call, F.instance_norm(call.x, eps=call.layer(_InstanceNorm).eps))


def layer_norm(call: LayerCall) -> dict[str, LayerGradient]:
    """Return gradients for statistics over the last dimensions of each position."""
    module = call.layer(nn.LayerNorm)
    shape = list(module.normalized_shape)
    return _features_last(call, F.layer_norm(call.x, shape, eps=module.eps), len(shape))


def rms_norm(call: LayerCall) -> dict[str, LayerGradient]:
    """Return gradients for the root mean square over the last dimensions of each position."""
    module = call.layer(nn.RMSNorm)
    shape = list(module.normalized_shape)
    return _features_last(call, F.rms_norm(call.x, shape, eps=module.eps), len(shape))


def _channels_first(call: LayerCall, normalised: Tensor) -> dict[str, LayerGradient]:
    """Return weight and bias gradients of a layer with one of each per channel."""

    def by_channel(product: Tensor) -> LayerGradient:
        return MaterialisedGradient(sum_by_unit(sum_over_space(product), call.units))

    return call.only_wanted(
        {"weight": lambda: by_channel(normalised * call.dy), "bias": lambda: by_channel(call.dy)},
    )


def _features_last(call: LayerCall, normalised: Tensor, features: int) -> dict[str, LayerGradient]:
    """Return weight and bias gradients of a layer with one of each per entry of the last dimensions."""

    def by_feature(product: Tensor) -> LayerGradient:
        return MaterialisedGradient(product.reshape(call.units, -1, *call.x.shape[-features:]).sum(1))

    return call.only_wanted(
        {"weight": lambda: by_feature(normalised * call.dy), "bias": lambda: by_feature(call.dy)},
    )


def _has_no_statistics(module: nn.Module) -> bool:
    return not getattr(module, "track_running_stats", True)


register(nn.GroupNorm, rule=group_norm)
register(nn.LayerNorm, rule=layer_norm)
register(nn.RMSNorm, rule=rms_norm, parameters=("weight",))
register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, rule=instance_norm, applies=_has_no_statistics)
