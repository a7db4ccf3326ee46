"""Architectures by name, the blocks that they are made of, and a user's own model made ready for private training."""

from __future__ import annotations

from dpvision.models.backbone import FrozenBatchNorm, Split, split
from dpvision.models.layers import (
    ACTIVATIONS,
    NORMS,
    Norm,
    OffsetLinear,
    ScalarGain,
    TemperedSigmoid,
    WSConv2d,
    activation,
)
from dpvision.models.private_ready import Change, make_private_ready, output_problem
from dpvision.models.registry import Entry, catalogue, count_parameters, create, create_own, entry
from dpvision.models.scattering import Scattering, channel_constants

__all__ = [
    "ACTIVATIONS",
    "NORMS",
    "Change",
    "Entry",
    "FrozenBatchNorm",
    "Norm",
    "OffsetLinear",
    "ScalarGain",
    "Scattering",
    "Split",
    "TemperedSigmoid",
    "WSConv2d",
    "activation",
    "catalogue",
    "channel_constants",
    "count_parameters",
    "create",
    "create_own",
    "entry",
    "make_private_ready",
    "output_problem",
    "split",
]
