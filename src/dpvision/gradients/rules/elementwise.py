"""Layers whose parameter multiplies its input: learned slopes and scalar gains."""

from __future__ import annotations

from torch import nn

from dpvision.gradients.layer_gradient import LayerGradient, MaterialisedGradient, sum_by_unit, sum_over_space
from dpvision.gradients.rules.rule import LayerCall, register
from dpvision.models.layers import ScalarGain


def prelu(call: LayerCall) -> dict[str, LayerGradient]:
    """Return the gradient of one slope, or one per channel: the negative part of the input times ``dy``."""
    product = call.dy * call.x.clamp(max=0)
    if call.layer(nn.PReLU).num_parameters == 1:
        return {"weight": MaterialisedGradient(product.reshape(call.units, -1).sum(1, keepdim=True))}
    return {"weight": MaterialisedGradient(sum_by_unit(sum_over_space(product), call.units))}


def scalar_gain(call: LayerCall) -> dict[str, LayerGradient]:
    """Return the gradient of one number that scales everything."""
    return {"gain": MaterialisedGradient((call.dy * call.x).reshape(call.units, -1).sum(1))}


register(nn.PReLU, rule=prelu, parameters=("weight",))
register(ScalarGain, rule=scalar_gain, parameters=("gain",))
