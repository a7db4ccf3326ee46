"""From summed gradients of standardised filters to those of the raw ones by a kernel: the plain way's, in place."""

# O filters, I channels, K kernel

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpvision import kernels
from dpvision.gradients.rules.weight_standardisation import Standardisation
from dpvision.kernels.pull_back import pull_back

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no native kernels: {kernels.reason()}")
SHAPES = [(1, 1, 1), (3, 8, 1), (7, 5, 3), (4, 1, 3), (2, 17, 5), (300, 64, 3), (0, 3, 3)]


def case(outputs: int, inputs: int, kernel: int, *, inside: bool) -> tuple[Standardisation, Tensor]:
    """Filters, one of them too small to count as varying, and a sum in the order of a weight or of windows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, kernel, kernel, generator=generator)
    weight[:1] *= 1e-6
    gain_O = torch.rand(outputs, generator=generator) + 0.5
    e = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    ordered = e.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if inside else e
    return Standardisation.from_layer(weight, gain_O, 1e-4), ordered


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inside", [False, True])
def test_the_kernel_gives_what_the_plain_way_gives_in_the_same_memory(
    shape: tuple[int, int, int], *, inside: bool
) -> None:
    facts, e = case(*shape, inside=inside)
    true = facts.pull_back(e.flatten(1)).view(e.shape)
    place = e.data_ptr()
    found = facts.pulled_back(e)
    assert found.is_contiguous()
    assert found.data_ptr() == place
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("inside", [False, True])
def test_it_agrees_with_autograd_in_float64(*, inside: bool) -> None:
    facts, e = case(6, 4, 3, inside=inside)
    raw = facts.weight_OD.double().requires_grad_()
    centred = raw - raw.mean(1, keepdim=True)
    s_O = centred.square().sum(1).clamp(min=1e-4).rsqrt()
    gain_O = (facts.scale_O / facts.s_O).double()
    (true,) = torch.autograd.grad(centred * (s_O * gain_O)[:, None], raw, e.flatten(1))
    torch.testing.assert_close(facts.pulled_back(e).flatten(1), true, rtol=1e-5, atol=1e-4)  # s is rounded to float32


def test_no_bit_depends_on_the_number_of_threads() -> None:
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        facts, e = case(130, 64, 3, inside=True)
        torch.set_num_threads(threads)
        found.append(facts.pulled_back(e))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_the_kernel_cannot_read_goes_the_plain_way() -> None:
    facts, e = case(6, 4, 3, inside=False)
    facts_O = (facts.mean_O, facts.s_O, facts.scale_O, facts.live_O)
    doubles = (facts.mean_O.double(), *facts_O[1:])
    assert pull_back(e.float(), facts.weight_OD, facts_O) is None
    assert pull_back(e.transpose(0, 1).contiguous().transpose(0, 1), facts.weight_OD, facts_O) is None
    assert pull_back(e, facts.weight_OD.double(), facts_O) is None
    assert pull_back(e, facts.weight_OD, doubles) is None
    assert pull_back(e.to("meta"), facts.weight_OD, facts_O) is None
    assert pull_back(e, facts.weight_OD[:, :9].contiguous(), facts_O) is None
    assert pull_back(e, facts.weight_OD, (facts.mean_O[:3], *facts_O[1:])) is None
    true = facts.pull_back(e.flatten(1)).view(e.shape)
    odd = e.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(facts.pulled_back(odd), true, rtol=1e-12, atol=1e-13)
    with kernels.switched_off():
        assert pull_back(e, facts.weight_OD, facts_O) is None
        torch.testing.assert_close(facts.pulled_back(e), true, rtol=1e-12, atol=1e-13)
