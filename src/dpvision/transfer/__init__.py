"""Weights from elsewhere: read without executing anything, fitted by name, and which of them learn."""

from __future__ import annotations

from dpvision.transfer.fit import draw_mean_var, fit
from dpvision.transfer.known import KNOWN_WEIGHTS, KnownWeights, find_known, known_by_hash
from dpvision.transfer.trained import head_of, trained_names
from dpvision.transfer.weights import read_weights

__all__ = [
    "KNOWN_WEIGHTS",
    "KnownWeights",
    "draw_mean_var",
    "find_known",
    "fit",
    "head_of",
    "known_by_hash",
    "read_weights",
    "trained_names",
]
