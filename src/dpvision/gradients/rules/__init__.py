"""One small rule per layer family: from a layer's input and output gradient to per-unit parameter gradients."""

from __future__ import annotations

from dpvision.gradients.rules import convolution, elementwise, embedding, linear, norm_layers, weight_standardisation
from dpvision.gradients.rules.rule import LayerCall, Rule, register, rule_for

__all__ = [
    "LayerCall",
    "Rule",
    "convolution",
    "elementwise",
    "embedding",
    "linear",
    "norm_layers",
    "register",
    "rule_for",
    "weight_standardisation",
]
