"""``check_model`` names what would make a privacy claim false, on the user's own model, all at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import grads_reference as reference
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum
from dpvision.gradients.plan import check_model, require_private_ready
from grads_support import cross_entropy, relative_error


class CentredByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class GhostStatistics(nn.Module):
    """Normalises groups of two rows, so that changing one row disturbs only its neighbour."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.unflatten(0, (-1, 2)) if x.shape[0] % 2 == 0 else x[:, None]
        return (pairs - 0.5 * pairs.mean(1, keepdim=True)).flatten(0, 1)


class SortedBySize(nn.Module):
    """Rows come out in another order: each unit gets somebody else's features."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(1).argsort()]


class HiddenBehindZero(nn.Module):
    """Batch statistics in a branch whose gain starts at zero: they show only after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * (x - x.mean(0))


class Counting(nn.Module):
    """Stores a running mean of what it sees, without using it."""

    def __init__(self, assign: bool) -> None:
        super().__init__()
        self.assign = assign
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.assign:
            self.mean = 0.9 * self.mean + x.detach().mean(0)
        else:
            self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        return x


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def around(layer: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), layer, nn.Tanh(), nn.Linear(4, 5))


def rows(count: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, generator=generator), torch.randint(0, 5, (count,), generator=generator)


MIXING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "batch norm without affine": lambda: nn.BatchNorm1d(4, affine=False),
    "batch norm without statistics": lambda: nn.BatchNorm1d(4, affine=False, track_running_stats=False),
    "frozen batch norm in train mode": lambda: frozen(nn.BatchNorm1d(4)),
    "batch norm in evaluation without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(),
    "centred by hand": CentredByHand,
    "statistics of pairs": GhostStatistics,
    "sorted rows": SortedBySize,
    "nested": lambda: nn.Sequential(nn.Identity(), nn.Sequential(CentredByHand())),
    "with dropout": lambda: nn.Sequential(nn.Dropout(0.3), CentredByHand()),
    "softmax over rows": lambda: nn.Softmax(0),
}


@pytest.mark.parametrize("rows_per_unit", [1, 2])
@pytest.mark.parametrize("name", MIXING)
def test_a_module_that_mixes_units_is_refused_by_name(name: str, rows_per_unit: int) -> None:
    if name == "statistics of pairs" and rows_per_unit == 2:
        pytest.skip("pairs of rows are units here: mixing inside a unit is its own affair")
    layer = MIXING[name]()
    model = around(layer)
    culprit = [module for module in layer.modules() if not list(module.children())][-1]
    label = next(f"{path} ({type(part).__name__})" for path, part in model.named_modules() if part is culprit)
    findings = check_model(model, cross_entropy, *rows(8), rows_per_unit=rows_per_unit)
    assert any(f.fatal and f.module == label and "mixes units" in f.problem for f in findings)
    with pytest.raises(PrivacyError) as refusal:
        require_private_ready(model, cross_entropy, *rows(8), rows_per_unit=rows_per_unit)
    assert label in str(refusal.value)
    with pytest.raises(PrivacyError):
        clipped_sum(model, cross_entropy, *rows(8), clip_norm=1.0, rows_per_unit=rows_per_unit)


def test_mixing_inside_one_unit_is_allowed() -> None:
    model = around(GhostStatistics())
    assert not [f for f in check_model(model, cross_entropy, *rows(8), rows_per_unit=2) if f.fatal]


def test_mixing_that_a_zero_gain_still_hides_is_refused() -> None:
    model = around(HiddenBehindZero())
    (finding,) = check_model(model, cross_entropy, *rows())
    assert finding.fatal
    assert finding.module == "1 (HiddenBehindZero)"
    with pytest.raises(PrivacyError, match=r"1 \(HiddenBehindZero\): mixes units"):
        clipped_sum(model, cross_entropy, *rows(), clip_norm=1.0)


@pytest.mark.parametrize("assign", [False, True], ids=["in place", "assigned"])
def test_a_buffer_that_a_step_moves_is_named(assign: bool) -> None:
    model = around(Counting(assign))
    (finding,) = check_model(model, cross_entropy, *rows())
    assert finding.fatal
    assert finding.module == "1 (Counting)"
    assert "mean" in finding.problem
    assert not model[1].mean.any()
    with pytest.raises(PrivacyError, match=r"1 \(Counting\): a forward pass moves mean"):
        clipped_sum(model, cross_entropy, *rows(), clip_norm=1.0)
    assert not model[1].mean.any()


def test_a_buffer_that_only_some_rows_move_is_still_noticed() -> None:
    class Peak(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("peak", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if float(x.detach().abs().max()) > 50:
                self.peak.fill_(1.0)
            return x

    model, (inputs, targets) = around(Peak()), rows()
    clipped_sum(model, cross_entropy, inputs, targets, clip_norm=1.0)
    with pytest.raises(PrivacyError, match=r"1 \(Peak\): a forward pass moves peak"):
        clipped_sum(model, cross_entropy, inputs * 1000, targets, clip_norm=1.0)


def test_all_batch_norms_and_all_moving_buffers_are_named_at_once() -> None:
    model = nn.Sequential(around(nn.BatchNorm1d(4)), nn.BatchNorm1d(5), Counting(False))
    model[2].mean = torch.zeros(5)
    with pytest.raises(PrivacyError) as refusal:
        require_private_ready(model, cross_entropy, *rows())
    for part in ("0.1 (BatchNorm1d)", "1 (BatchNorm1d)", "2 (Counting)", "running_var", "mixes units"):
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_batch_norm_in_evaluation_mode_is_allowed() -> None:
    assert not [f for f in check_model(around(nn.BatchNorm1d(4).eval()), cross_entropy, *rows()) if f.fatal]


def dice_over_the_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    chosen = outputs.softmax(1).gather(1, targets[:, None])[:, 0]
    return (1 - 2 * chosen.sum() / (1 + chosen.sum())).expand(targets.shape[0])


@pytest.mark.parametrize(
    "loss_fn",
    [
        dice_over_the_batch,
        nn.functional.cross_entropy,
        lambda outputs, targets: cross_entropy(outputs, targets) / cross_entropy(outputs, targets).sum(),
        lambda outputs, targets: cross_entropy(outputs - outputs.mean(0), targets),
    ],
    ids=["batch dice", "mean", "share of the batch's loss", "centred outputs"],
)
def test_a_loss_that_does_not_split_into_units_is_refused(loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = around(nn.Identity())
    (finding,) = check_model(model, loss_fn, *rows())
    assert finding.fatal
    assert finding.module == "loss_fn"
    with pytest.raises((PrivacyError, ArgumentError), match="loss_fn"):
        clipped_sum(model, loss_fn, *rows(), clip_norm=1.0)


def test_a_mean_loss_over_one_single_row_is_still_refused() -> None:
    inputs, targets = rows(1)
    with pytest.raises(ArgumentError, match="loss_fn must return one loss per row"):
        clipped_sum(around(nn.Identity()), nn.functional.cross_entropy, inputs, targets, clip_norm=1.0)


class WrongBackward(torch.autograd.Function):
    """Forward treats each row by itself, backward mixes them."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + gradient.mean(0)


class Sneaky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return WrongBackward.apply(x)


def test_where_only_the_way_back_mixes_units_the_gradients_are_still_those_of_single_units() -> None:
    model = around(Sneaky()).double()
    inputs, targets = rows()
    assert not check_model(model, cross_entropy, inputs.double(), targets)
    found = clipped_sum(model, cross_entropy, inputs.double(), targets, clip_norm=0.1).gradients
    true = reference.clipped_sum_by_loop(model, cross_entropy, inputs.double(), targets, clip_norm=0.1).gradients
    assert relative_error(found, true) < 1e-10


def test_a_model_whose_weights_have_odd_strides_is_examined_like_any_other() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 3)).to(memory_format=torch.channels_last)
    inputs, targets = torch.randn(5, 3, 4, 4), torch.arange(5) % 3
    found = clipped_sum(model, cross_entropy, inputs, targets, clip_norm=0.1).gradients
    true = reference.clipped_sum_by_loop(
        model.double(), cross_entropy, inputs.double(), targets, clip_norm=0.1
    ).gradients
    assert relative_error(found, true) < 1e-4


class DropsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.5, training=self.training)


def test_dropout_is_allowed_outside_and_refused_inside_a_module_without_a_rule() -> None:
    assert not [f for f in check_model(around(nn.Dropout(0.5)), cross_entropy, *rows()) if f.fatal]
    (finding,) = check_model(around(DropsInside()), cross_entropy, *rows())
    assert finding.fatal
    assert "1 (DropsInside) draws random numbers" in finding.problem
    assert not check_model(around(DropsInside()).eval(), cross_entropy, *rows())
    with pytest.raises(PrivacyError, match=r"1 \(DropsInside\) draws random numbers"):
        clipped_sum(around(DropsInside()), cross_entropy, *rows(), clip_norm=1.0)


def test_an_embedding_that_rewrites_its_weight_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, max_norm=0.1), nn.Flatten(), nn.Linear(6, 5))
    before = model[0].weight.detach().clone()
    inputs = torch.tensor([[0, 1], [2, 3], [1, 1]])
    findings = check_model(model, cross_entropy, inputs, torch.tensor([0, 1, 2]))
    assert any(f.fatal and f.module == "0 (Embedding)" and "weight" in f.problem for f in findings)
    assert torch.equal(before, model[0].weight)


def test_frozen_and_unused_parameters_are_listed_and_not_fatal() -> None:
    model = around(nn.Identity())
    model[0].weight.requires_grad_(False)
    model[1].extra = nn.Linear(2, 2)
    findings = require_private_ready(model, cross_entropy, *rows())
    assert {(f.module, f.fatal) for f in findings} == {("0 (Linear)", False), ("1.extra (Linear)", False)}
    text = " ".join(map(str, findings))
    for part in ("frozen, stays as it is: weight", "1.extra.weight", "1.extra.bias", "zero gradient"):
        assert part in text


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(PrivacyError, match="no trainable parameter"):
        require_private_ready(frozen(around(nn.Identity())), cross_entropy, *rows())


def test_outputs_that_are_not_finite_are_reported() -> None:
    model = around(nn.Identity())
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    (finding,) = check_model(model, cross_entropy, *rows())
    assert finding.fatal
    assert "not finite" in finding.problem


def test_rows_that_the_model_can_not_take_are_reported_not_thrown() -> None:
    (finding,) = check_model(around(nn.Identity()), cross_entropy, torch.randn(4, 7), torch.zeros(4).long())
    assert finding.fatal
    assert "can't be run on these rows" in finding.problem
    with pytest.raises(ArgumentError, match="at least one unit"):
        check_model(around(nn.Identity()), cross_entropy, *rows(0))


@pytest.mark.parametrize("count", [1, 2, 5, 64])
def test_any_number_of_rows_will_do(count: int) -> None:
    assert not check_model(around(nn.GroupNorm(2, 4)), cross_entropy, *rows(count))
    assert check_model(around(CentredByHand()), cross_entropy, *rows(count))


def test_a_model_that_can_not_be_copied_is_checked_as_it_is() -> None:
    model = around(nn.Identity())
    model.leftover = model(rows()[0])  # a tensor with a graph can't be copied
    assert not check_model(model, cross_entropy, *rows())


def test_findings_read_as_sentences() -> None:
    (finding,) = [f for f in check_model(around(CentredByHand()), cross_entropy, *rows()) if f.fatal]
    assert str(finding) == (
        "1 (CentredByHand): mixes units: one unit's output depends on another unit's input. "
        "Replace it by a module that treats each row by itself, such as GroupNorm for BatchNorm."
    )


def test_modules_with_the_same_problem_are_named_together() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(PrivacyError) as refused:
        require_private_ready(model, cross_entropy, torch.randn(4, 1, 4, 4), torch.zeros(4).long())
    assert str(refused.value).count("mixes units") == 1
    assert "0 (BatchNorm2d), 1 (BatchNorm2d): a forward pass moves" in str(refused.value)
    assert "make_private_ready" in str(refused.value)
