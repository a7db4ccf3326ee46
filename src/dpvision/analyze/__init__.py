"""Analyses of trained networks: activations, gradients, the Hessian and the loss surface, with figures and data.

``open_run`` loads a released model with public images, or with private ones on an unsafe request, and ``analyze_runs``
writes the figures of several runs together. ``Watch`` records values while a run trains. The functions below them take
any model and any images.
"""

from __future__ import annotations

from dpvision.analyze.activations import (
    Distribution,
    activation_distributions,
    activation_norms,
    first_activation,
)
from dpvision.analyze.analysed_run import AnalysedRun, open_run, unsafe_folder
from dpvision.analyze.analyses import ANALYSES, Effort, analyze_runs, parse_analyses
from dpvision.analyze.figures import Chart, Line, curve_chart, heat_map, write_chart
from dpvision.analyze.gradient_signal import GradientStatistics, LayerSignal, gradient_statistics
from dpvision.analyze.hessian import (
    Eigenvalues,
    HessianProduct,
    SpectralDensity,
    TraceEstimate,
    hutchinson_trace,
    lanczos_density,
    largest_eigenvalues,
)
from dpvision.analyze.joins import Join, Joins
from dpvision.analyze.loss_surface import LossSlice, loss_slice, random_direction
from dpvision.analyze.watch import Watch, read_watch

__all__ = [
    "ANALYSES",
    "AnalysedRun",
    "Chart",
    "Distribution",
    "Effort",
    "Eigenvalues",
    "GradientStatistics",
    "HessianProduct",
    "Join",
    "Joins",
    "LayerSignal",
    "Line",
    "LossSlice",
    "SpectralDensity",
    "TraceEstimate",
    "Watch",
    "activation_distributions",
    "activation_norms",
    "analyze_runs",
    "curve_chart",
    "first_activation",
    "gradient_statistics",
    "heat_map",
    "hutchinson_trace",
    "lanczos_density",
    "largest_eigenvalues",
    "loss_slice",
    "open_run",
    "parse_analyses",
    "random_direction",
    "read_watch",
    "unsafe_folder",
    "write_chart",
]
