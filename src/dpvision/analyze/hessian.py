"""The Hessian of a loss without ever building it: eigenvalues, trace and spectral density by Hessian-vector products.

Power iteration with deflation gives the eigenvalues of largest magnitude, Hutchinson's estimator the trace, and
Lanczos' method the spectral density (as PyHessian, Yao et al. 2019, which ScaleNorm's paper used). Everything is a
function of the images that the loss is taken over, without noise.

Shapes: D parameters, K eigenvalues, M Lanczos steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from dpvision.errors import ArgumentError, Problems
from dpvision.models.losses import RowLoss

BATCH = 64


@final
class HessianProduct:
    """Multiplies vectors by the Hessian of a model's mean loss over fixed images.

    Args:
        model: the network, in the mode that it is in; its trainable parameters are the variables.
        loss: one loss per row.
        inputs: normalised images.
        targets: their targets.

    Raises:
        ArgumentError: there are no images, or nothing is trainable.
    """

    def __init__(self, model: nn.Module, loss: RowLoss, inputs: Tensor, targets: Tensor) -> None:
        self._model, self._loss = model, loss
        self._inputs, self._targets = inputs, targets
        self.parameters = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
        if not len(inputs) or not self.parameters:
            raise ArgumentError("a Hessian needs at least one image and one trainable parameter.")
        self.size = sum(value.numel() for value in self.parameters.values())
        self.products = 0

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return next(iter(self.parameters.values())).dtype

    def __call__(self, vector_D: Tensor) -> Tensor:
        """Return the Hessian times a vector, by two backward passes over each batch of images."""
        self.products += 1
        total_D = torch.zeros_like(vector_D)
        for inputs, targets in zip(self._inputs.split(BATCH), self._targets.split(BATCH), strict=True):
            variables = {name: value.clone().requires_grad_() for name, value in self.parameters.items()}
            losses = self._loss(functional_call(self._model, variables, (inputs,)), targets)
            values = tuple(variables.values())
            gradients = torch.autograd.grad(
                losses.sum() / len(self._inputs), values, create_graph=True, materialize_grads=True
            )
            flat_D = torch.cat([gradient.flatten() for gradient in gradients])
            if not flat_D.requires_grad:
                continue  # a loss that is linear in the parameters
            products = torch.autograd.grad(flat_D @ vector_D, values, materialize_grads=True)
            total_D += torch.cat([each.flatten() for each in products])
        return total_D

    def random_vector(self, generator: torch.Generator) -> Tensor:
        """Return random signs: a probe of Hutchinson's estimator and a start of the iterations."""
        signs_D = torch.randint(0, 2, (self.size,), generator=generator) * 2 - 1
        return signs_D.to(self.dtype)

    def as_parameters(self, vector_D: Tensor) -> dict[str, Tensor]:
        """Return a vector in the shapes of the parameters."""
        parts = vector_D.split([value.numel() for value in self.parameters.values()])
        return {name: part.view_as(value) for (name, value), part in zip(self.parameters.items(), parts, strict=True)}


@final
@dataclass(frozen=True, kw_only=True)
class Eigenvalues:
    """Eigenvalues of largest magnitude, in the order in which power iteration found them.

    Attributes:
        values: the eigenvalues, with their signs.
        residuals: ``‖Hv − λv‖ / |λ|`` of each.
        iterations: iterations that each took.
        vectors_KD: unit vectors, one row each.
    """

    values: tuple[float, ...]
    residuals: tuple[float, ...]
    iterations: tuple[int, ...]
    vectors_KD: Tensor

    @property
    def condition_number(self) -> float:
        """The largest magnitude over the smallest of the values that were computed; infinite if one is zero."""
        sizes = [abs(value) for value in self.values]
        return max(sizes) / min(sizes) if min(sizes) > 0 else math.inf

    @property
    def negative(self) -> int:
        """How many of the computed values are negative."""
        return sum(value < 0 for value in self.values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without the vectors."""
        condition = self.condition_number
        return {
            "computed": len(self.values),
            "values": list(self.values),
            "residuals": list(self.residuals),
            "iterations": list(self.iterations),
            "negative": self.negative,
            "condition_number": condition if math.isfinite(condition) else None,
        }


def largest_eigenvalues(
    product: HessianProduct,
    *,
    count: int,
    iterations: int = 100,
    tolerance: float = 1e-3,
    generator: torch.Generator,
) -> Eigenvalues:
    """Find the eigenvalues of largest magnitude by power iteration with deflation.

    Args:
        product: the Hessian.
        count: how many eigenvalues, at least 1 and at most the number of parameters.
        iterations: most iterations for each.
        tolerance: relative change of the eigenvalue below which an iteration stops.
        generator: draws the starts.

    Returns:
        The eigenvalues with their residuals: a large one says that the iteration had not converged.

    Raises:
        ArgumentError: an argument breaks its rule.
    """
    problems = Problems()
    problems.count("count", count)
    problems.count("iterations", iterations)
    problems.require(tolerance > 0, f"tolerance must be above 0, got {tolerance}.")
    problems.require(count <= product.size, f"count must be at most {product.size} parameters, got {count}.")
    problems.raise_if_any()
    basis_KD = torch.empty(0, product.size, dtype=product.dtype)
    values: list[float] = []
    residuals: list[float] = []
    taken: list[int] = []
    for _ in range(count):
        vector_D = _orthogonal_unit(product.random_vector(generator), basis_KD)
        value, steps, image_D = 0.0, 0, vector_D
        for steps in range(1, iterations + 1):
            image_D = _without(product(vector_D), basis_KD)
            before, value = value, float(vector_D @ image_D)
            norm = float(image_D.norm())
            if norm == 0 or (steps > 1 and abs(value - before) <= tolerance * abs(value)):
                break
            vector_D = _orthogonal_unit(image_D, basis_KD)
        # A check by the whole Hessian: deflation must not hide what is left.
        whole_D = product(vector_D)
        value = float(vector_D @ whole_D)
        residual = float((whole_D - value * vector_D).norm())
        values.append(value)
        residuals.append(residual / abs(value) if value else residual)
        taken.append(steps)
        basis_KD = torch.cat([basis_KD, vector_D[None]])
    return Eigenvalues(values=tuple(values), residuals=tuple(residuals), iterations=tuple(taken), vectors_KD=basis_KD)


def _without(vector_D: Tensor, basis_KD: Tensor) -> Tensor:
    """Remove the parts along orthonormal rows."""
    return vector_D - basis_KD.T @ (basis_KD @ vector_D) if len(basis_KD) else vector_D


def _orthogonal_unit(vector_D: Tensor, basis_KD: Tensor) -> Tensor:
    """Remove the parts along orthonormal rows, twice against rounding, and scale to length one."""
    vector_D = _without(_without(vector_D, basis_KD), basis_KD)
    return vector_D / vector_D.norm().clamp(min=torch.finfo(vector_D.dtype).tiny)


@final
@dataclass(frozen=True, kw_only=True)
class TraceEstimate:
    """Hutchinson's estimate of a trace: its mean over probes and the standard error of that mean."""

    trace: float
    standard_error: float
    probes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "standard_error": self.standard_error if self.probes > 1 else None}


def hutchinson_trace(
    product: HessianProduct, *, probes: int, tolerance: float = 1e-3, generator: torch.Generator
) -> TraceEstimate:
    """Estimate the trace of the Hessian by random probes.

    Args:
        product: the Hessian.
        probes: most probes, at least 1.
        tolerance: relative change of the mean below which the estimate stops (PyHessian's rule); at least ten probes.
        generator: draws the probes.

    Returns:
        The mean over the probes, and its standard error.

    Raises:
        ArgumentError: an argument breaks its rule.
    """
    problems = Problems()
    problems.count("probes", probes)
    problems.require(tolerance >= 0, f"tolerance must be at least 0, got {tolerance}.")
    problems.raise_if_any()
    found: list[float] = []
    for _ in range(probes):
        vector_D = product.random_vector(generator)
        before = float(np.mean(found)) if found else math.inf
        found.append(float(vector_D @ product(vector_D)))
        now = float(np.mean(found))
        if len(found) >= 10 and abs(now - before) <= tolerance * (abs(before) + 1e-6):
            break
    error = float(np.std(found, ddof=1) / math.sqrt(len(found))) if len(found) > 1 else math.inf
    return TraceEstimate(trace=float(np.mean(found)), standard_error=error, probes=len(found))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SpectralDensity:
    """Ritz values of Lanczos' method with their weights: a quadrature of the spectral density.

    Attributes:
        values: Ritz values of all starts, ascending.
        weights: their weights, which sum to one.
        steps: Lanczos steps of each start.
        starts: random starts.
    """

    values: NDArray[np.float64]
    weights: NDArray[np.float64]
    steps: int
    starts: int

    @property
    def negative(self) -> int:
        """How many of the Ritz values are negative."""
        return int((self.values < 0).sum())

    @property
    def negative_share(self) -> float:
        """The estimated share of eigenvalues that are negative."""
        return float(self.weights[self.values < 0].sum())

    def density(self, points: NDArray[np.float64], *, width: float) -> NDArray[np.float64]:
        """Return the density at some points, smoothed by a normal of standard deviation ``width``."""
        distances = (points[:, None] - self.values[None]) / width
        return np.exp(-0.5 * distances**2) @ self.weights / (width * math.sqrt(2 * math.pi))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "steps": self.steps,
            "starts": self.starts,
            "smallest": float(self.values[0]),
            "largest": float(self.values[-1]),
            "negative_ritz_values": self.negative,
            "negative_share": self.negative_share,
            "ritz_values": self.values.tolist(),
            "weights": self.weights.tolist(),
        }


def lanczos_density(
    product: HessianProduct, *, steps: int, starts: int = 1, generator: torch.Generator
) -> SpectralDensity:
    """Estimate the spectral density by Lanczos' method with full re-orthogonalisation.

    Args:
        product: the Hessian.
        steps: Hessian-vector products of each start; at most the number of parameters is used.
        starts: random starts to average over.
        generator: draws the starts.

    Returns:
        Ritz values and weights. With as many steps as parameters they are the eigenvalues.

    Raises:
        ArgumentError: an argument breaks its rule.
    """
    problems = Problems()
    problems.count("steps", steps)
    problems.count("starts", starts)
    problems.raise_if_any()
    steps = min(steps, product.size)
    values: list[NDArray[np.float64]] = []
    weights: list[NDArray[np.float64]] = []
    for _ in range(starts):
        ritz, squared = _lanczos(product, product.random_vector(generator), steps)
        values.append(ritz)
        weights.append(squared / starts)
    together, all_weights = np.concatenate(values), np.concatenate(weights)
    order = np.argsort(together)
    return SpectralDensity(values=together[order], weights=all_weights[order], steps=steps, starts=starts)


def _lanczos(
    product: Callable[[Tensor], Tensor], start_D: Tensor, steps: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Eigenvalues of the tridiagonal matrix and the squares of its eigenvectors' first entries."""
    basis_MD = (start_D / start_D.norm())[None]
    diagonal: list[float] = []
    beside: list[float] = []
    for step in range(steps):
        image_D = product(basis_MD[-1])
        diagonal.append(float(basis_MD[-1] @ image_D))
        image_D = _without(_without(image_D, basis_MD), basis_MD)
        norm = float(image_D.norm())
        scale = max(map(abs, diagonal)) or 1.0
        if step + 1 == steps or norm <= 1e-6 * scale:  # the start lies in a space of fewer dimensions
            break
        beside.append(norm)
        basis_MD = torch.cat([basis_MD, (image_D / norm)[None]])
    matrix = np.diag(diagonal) + np.diag(beside[: len(diagonal) - 1], 1) + np.diag(beside[: len(diagonal) - 1], -1)
    values, vectors = np.linalg.eigh(matrix)
    return values, vectors[0] ** 2
