"""Architectures by name, the blocks that they are made of, and a user's own model made ready for private training."""

from __future__ import annotations

from dpvision.models.activations import ACTIVATIONS, TemperedSigmoid, activation
from dpvision.models.backbone import FrozenBatchNorm
from dpvision.models.catalogue import catalogue, count_parameters, create, entry
from dpvision.models.entries import Entry
from dpvision.models.layers import ScalarGain, WSConv2d
from dpvision.models.norms import NORMS, Norm
from dpvision.models.private_ready import Change, FrozenAffine, make_private_ready
from dpvision.models.scatter import channel_constants
from dpvision.models.scattering import Scattering
from dpvision.models.splitting import Split, split

__all__ = [
    "ACTIVATIONS",
    "NORMS",
    "Change",
    "Entry",
    "FrozenAffine",
    "FrozenBatchNorm",
    "Norm",
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
    "entry",
    "make_private_ready",
    "split",
]
