"""A large tensor is watched by sums over its words with secret keys: every change of it must show."""

from __future__ import annotations

import pytest
import torch
from test_optimizer_integrity import EDITS
from torch import nn

from dpvision.errors import PrivacyError
from dpvision.privacy import optimizer as optimizer_file
from dpvision.privacy import optimizer as watch
from dpvision.privacy.optimizer import fingerprint
from optim_cases import OPTIMIZERS, Net, OptimizerSettings, assert_equal_bits, door, private_grad, weights

SIZES = [0, 1, 5, 4095, 4096, 4097, 64 * 4096, 65 * 4096 + 3]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64]


def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(1, 100, (count,), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_tensors_have_equal_fingerprints_and_a_changed_word_shows_in_its_own_run(
    count: int, dtype: torch.dtype
) -> None:
    x = numbers(count, dtype)
    before = fingerprint(x)
    assert torch.equal(before, fingerprint(x.clone()))
    for place in sorted({0, count // 2, count - 1} if count else {}):
        y = x.clone()
        y[place] += 1
        assert int((fingerprint(y) != before).sum()) == 1


def test_one_flipped_bit_always_shows() -> None:
    words = numbers(3 * 4096 + 7).view(torch.int32)
    before = fingerprint(words)
    for bit in range(32):
        flipped = words.clone()
        flipped[5000] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert not torch.equal(fingerprint(flipped), before)


def test_pairs_of_sign_flips_swaps_and_runs_that_change_places_show() -> None:
    x = torch.randn(3 * 4096, generator=torch.Generator().manual_seed(0))
    before = fingerprint(x)
    for some in ([1, 3], [1, 4096 + 1], [0, 1, 2, 3], list(range(4096)), list(range(0, 3 * 4096, 2))):
        flipped = x.clone()
        flipped[some] *= -1
        assert not torch.equal(fingerprint(flipped), before)
    swapped = x.clone()
    swapped[[0, 5]] = swapped[[5, 0]]
    assert not torch.equal(fingerprint(swapped), before)
    rolled = x.roll(4096)
    assert not torch.equal(fingerprint(rolled), before)


def test_negative_zero_differs_from_zero_and_nan_equals_itself() -> None:
    x = torch.zeros(5000)
    x[7] = torch.nan
    before = fingerprint(x)
    assert torch.equal(fingerprint(x.clone()), before)
    x[9] = -0.0
    assert not torch.equal(fingerprint(x), before)


def test_the_order_is_that_of_the_entries_whatever_the_layout() -> None:
    x = torch.randn(8, 5, 16, 16)
    assert torch.equal(fingerprint(x), fingerprint(x.to(memory_format=torch.channels_last)))


@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_a_large_parameter_are_named_as_those_of_a_small_one(
    edit: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_LARGE", 1)
    model = Net()
    optimizer = door(model)
    optimizer.step(private_grad(model, 0))
    optimizer.check_untouched()
    assert callable(edit)
    edit(model)
    with pytest.raises(PrivacyError, match=r"moved by other means than an optimizer step: .*first\.weight"):
        optimizer.check_untouched()
    with pytest.raises(PrivacyError, match="moved by other means"):
        optimizer.state()


def test_a_large_parameter_is_not_copied() -> None:
    layer = nn.Linear(1024, 512)
    watched = watch.TamperGuard(layer, buffers=True)
    kept = {name: left.nbytes for name, left in watched._left.items()}
    assert kept["weight"] < layer.weight.nbytes / 100
    assert kept["bias"] == layer.bias.nbytes


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=lambda one: "-".join(map(str, one.values())))
def test_parameters_moved_in_parts_end_where_they_end_at_once(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for at_once in (1 << 24, 17, 1):
        monkeypatch.setattr(optimizer_file, "_NUMBERS_AT_ONCE", at_once)
        model = Net()
        optimizer = door(model, settings=OptimizerSettings.model_validate({"learning_rate": 0.1, **settings}))
        for step in range(3):
            optimizer.step(private_grad(model, step))
        ends.append(weights(model))
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_equal_bits(ends[0], ends[1])
    assert_equal_bits(ends[0], ends[2])
