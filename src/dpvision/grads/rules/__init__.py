"""One small rule per layer family: from a layer's input and output gradient to per-unit parameter gradients."""

from __future__ import annotations

from dpvision.grads.rules import conv, embedding, linear, norms, pointwise, standardised
from dpvision.grads.rules.registry import LayerCall, Rule, register, rule_for

__all__ = [
    "LayerCall",
    "Rule",
    "conv",
    "embedding",
    "linear",
    "norms",
    "pointwise",
    "register",
    "rule_for",
    "standardised",
]
