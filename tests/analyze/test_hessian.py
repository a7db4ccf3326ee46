"""Matrix-free Hessian values against those of the whole matrix, on a small network in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpvision.analyze import HessianProduct, hutchinson_trace, lanczos_density, largest_eigenvalues
from dpvision.errors import ArgumentError


def row_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Mish(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    ).double()


@pytest.fixture(scope="module")
def small() -> tuple[HessianProduct, Tensor]:
    """A network of 75 parameters, and its whole Hessian by ``torch.func``."""
    model, generator = small_network(), torch.Generator().manual_seed(1)
    inputs = torch.randn(70, 1, 6, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (70,), generator=generator)
    product = HessianProduct(model, row_loss, inputs, targets)

    def mean_loss(flat: Tensor) -> Tensor:
        return row_loss(functional_call(model, product.as_parameters(flat), (inputs,)), targets).mean()

    flat = torch.cat([value.flatten() for value in product.parameters.values()])
    return product, torch.autograd.functional.hessian(mean_loss, flat)


def test_a_product_is_that_of_the_whole_matrix_over_several_batches(small: tuple[HessianProduct, Tensor]) -> None:
    product, whole = small
    vector = product.random_vector(torch.Generator().manual_seed(2))
    torch.testing.assert_close(product(vector), whole @ vector, rtol=1e-9, atol=1e-11)


def test_power_iteration_finds_the_eigenvalues_of_largest_magnitude(small: tuple[HessianProduct, Tensor]) -> None:
    product, whole = small
    exact = sorted(torch.linalg.eigvalsh(whole).tolist(), key=abs, reverse=True)
    found = largest_eigenvalues(
        product, count=4, iterations=3000, tolerance=1e-12, generator=torch.Generator().manual_seed(3)
    )
    # Neighbouring magnitudes converge slowly, so the comparison is looser than the tolerance.
    assert found.values == pytest.approx(exact[:4], rel=1e-4)
    assert max(found.residuals) < 1e-2
    gram = found.vectors_KD @ found.vectors_KD.T
    torch.testing.assert_close(gram, torch.eye(4, dtype=torch.float64), atol=1e-10, rtol=0)


def test_as_many_lanczos_steps_as_parameters_give_the_whole_spectrum(small: tuple[HessianProduct, Tensor]) -> None:
    product, whole = small
    exact = torch.linalg.eigvalsh(whole)
    found = lanczos_density(product, steps=product.size, generator=torch.Generator().manual_seed(4))
    assert found.values[0] == pytest.approx(float(exact[0]), rel=1e-6)
    assert found.values[-1] == pytest.approx(float(exact[-1]), rel=1e-6)
    assert found.weights.sum() == pytest.approx(1.0)
    # The weighted mean of Ritz values is a probe of the trace, exact for the start's own quadratic form.
    assert found.negative <= int((exact < 1e-8).sum())


def test_eigenvalues_of_both_signs_are_counted(small: tuple[HessianProduct, Tensor]) -> None:
    product, whole = small
    negative = int((torch.linalg.eigvalsh(whole) < -1e-6).sum())
    found = lanczos_density(product, steps=product.size, generator=torch.Generator().manual_seed(5))
    assert negative > 0
    assert int((found.values < -1e-6).sum()) == pytest.approx(negative, abs=2)


def test_the_trace_is_within_five_standard_errors(small: tuple[HessianProduct, Tensor]) -> None:
    product, whole = small  # false alarms: about 6e-7 for a normal mean of 400 probes
    found = hutchinson_trace(product, probes=400, tolerance=0.0, generator=torch.Generator().manual_seed(6))
    assert found.probes == 400
    assert abs(found.trace - float(whole.trace())) < 5 * found.standard_error


def test_a_quadratic_has_the_curvature_that_was_put_into_it() -> None:
    scales = torch.tensor([5.0, -3.0, 1.0, 0.5], dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double()

    def quadratic(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0].square() * targets / 2

    product = HessianProduct(model, quadratic, torch.eye(4, dtype=torch.float64), 4 * scales)
    found = largest_eigenvalues(
        product, count=4, iterations=500, tolerance=1e-14, generator=torch.Generator().manual_seed(0)
    )
    assert found.values == pytest.approx([5, -3, 1, 0.5], rel=1e-5)
    assert found.negative == 1
    assert found.condition_number == pytest.approx(10, rel=1e-4)


def test_an_impossible_request_is_refused_in_one_line(small: tuple[HessianProduct, Tensor]) -> None:
    with pytest.raises(ArgumentError, match="count must be at most 75 parameters"):
        largest_eigenvalues(small[0], count=76, generator=torch.Generator())
    with pytest.raises(ArgumentError, match="at least one image"):
        HessianProduct(small_network(), row_loss, torch.zeros(0, 1, 6, 6), torch.zeros(0))
