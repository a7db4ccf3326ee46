"""Normalisation layers: the normalised input times the output gradient, added up over all positions of a unit.

Shapes: N rows, U units, C channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dpvision.gradients.layer_gradient import LayerGradient, MaterialisedGradient, sum_by_unit, sum_over_space
from dpvision.gradients.rules.rule import LayerCall, register

InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


def group_norm(call: LayerCall) -> dict[str, LayerGradient]:
    """Statistics over the groups of one row."""
    module = call.module
    if not isinstance(module, nn.GroupNorm):
        raise TypeError(f"not a GroupNorm: {type(module).__name__}")
    return _channels_first(call, F.group_norm(call.x, module.num_groups, eps=module.eps))


def instance_norm(call: LayerCall) -> dict[str, LayerGradient]:
    """Statistics over the space of one channel of one row."""
    module = call.module
    if not isinstance(module, InstanceNorm):
        raise TypeError(f"not an InstanceNorm: {type(module).__name__}")
    return _channels_first(call, F.instance_norm(call.x, eps=module.eps))


def layer_norm(call: LayerCall) -> dict[str, LayerGradient]:
    """Statistics over the last dimensions of each position."""
    module = call.module
    if not isinstance(module, nn.LayerNorm):
        raise TypeError(f"not a LayerNorm: {type(module).__name__}")
    shape = list(module.normalized_shape)
    return _features_last(call, F.layer_norm(call.x, shape, eps=module.eps), len(shape))


def rms_norm(call: LayerCall) -> dict[str, LayerGradient]:
    """Root mean square over the last dimensions of each position."""
    module = call.module
    if not isinstance(module, nn.RMSNorm):
        raise TypeError(f"not an RMSNorm: {type(module).__name__}")
    shape = list(module.normalized_shape)
    return _features_last(call, F.rms_norm(call.x, shape, eps=module.eps), len(shape))


def _channels_first(call: LayerCall, normalised: Tensor) -> dict[str, LayerGradient]:
    layer_gradients: dict[str, LayerGradient] = {}
    if "weight" in call.wanted:
        layer_gradients["weight"] = MaterialisedGradient(sum_by_unit(sum_over_space(normalised * call.dy), call.units))
    if "bias" in call.wanted:
        layer_gradients["bias"] = MaterialisedGradient(sum_by_unit(sum_over_space(call.dy), call.units))
    return layer_gradients


def _features_last(call: LayerCall, normalised: Tensor, features: int) -> dict[str, LayerGradient]:
    shape = call.x.shape[-features:]
    layer_gradients: dict[str, LayerGradient] = {}
    if "weight" in call.wanted:
        layer_gradients["weight"] = MaterialisedGradient((normalised * call.dy).reshape(call.units, -1, *shape).sum(1))
    if "bias" in call.wanted:
        layer_gradients["bias"] = MaterialisedGradient(call.dy.reshape(call.units, -1, *shape).sum(1))
    return layer_gradients


def _has_no_statistics(module: nn.Module) -> bool:
    return not getattr(module, "track_running_stats", True)


register(nn.GroupNorm, rule=group_norm)
register(nn.LayerNorm, rule=layer_norm)
register(nn.RMSNorm, rule=rms_norm, parameters=("weight",))
register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, rule=instance_norm, applies=_has_no_statistics)
