"""The loss of an Opacus loop is proved row by row, or the step is refused and nothing is charged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpvision.compat import PrivacyEngine
from dpvision.errors import PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
ROWS, CLASSES, BATCH = 24, 3, 12


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 4, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


class Script:
    """The objects of a small script; every row is drawn in every step, with little noise, if ``exact``."""

    def __init__(
        self, folder: Path, *, exact: bool = False, steps: int = 6, clip_norm: float = 0.1, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        loader = DataLoader(TensorDataset(*data()), batch_size=ROWS if exact else BATCH)
        self.engine = PrivacyEngine(folder=folder / "run", seed=3)
        noise = 1e-6 if exact else 1.0
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=self.model, optimizer=optimizer, data_loader=loader, noise_multiplier=noise, max_grad_norm=clip_norm,
            steps=steps, target_delta=1e-3, **options,
        )  # fmt: skip

    def step(self, loss_fn: Loss) -> Tensor:
        """Take one step in Opacus's way and return its loss."""
        x, y = next(iter(self.loader))
        self.optimizer.zero_grad()
        loss = loss_fn(self.model, x, y)
        loss.backward()
        self.optimizer.step()
        return loss


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def scaled_in_place(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, targets)
    loss.mul_(3)
    return loss


def distilled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs, teacher = model(x), copy.deepcopy(model)
    with torch.no_grad():
        goal = teacher(x) + 1
    return F.cross_entropy(outputs, y) + F.mse_loss(outputs, goal)


# Losses that are means or sums over rows, each beside its loss per row.
SEPARABLE: dict[str, tuple[Loss, Callable[[Any, Any], Tensor]]] = {
    "criterion": (lambda m, x, y: nn.CrossEntropyLoss()(m(x), y), lambda o, y: F.cross_entropy(o, y, reduction="none")),
    "label smoothing": (
        lambda m, x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(m(x), y),
        lambda o, y: F.cross_entropy(o, y, reduction="none", label_smoothing=0.1),
    ),
    "mean squared error over 3 outputs": (
        lambda m, x, y: nn.MSELoss()(m(x), F.one_hot(y, CLASSES).float()),
        lambda o, y: (o - F.one_hot(y, CLASSES)).square().mean(1),
    ),
    "sum over the public batch size": (
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / len(x),
        lambda o, y: F.cross_entropy(o, y, reduction="none"),
    ),
    "two terms with constants": (
        lambda m, x, y: 0.5 * F.cross_entropy(m(x), y) + m(x).square().mean() / 4 + 7,
        lambda o, y: 0.5 * F.cross_entropy(o, y, reduction="none") + o.square().mean(1) / 4,
    ),
    "a loss that is added to in place": (
        lambda m, x, y: added_in_place(m(x), y),
        lambda o, y: F.cross_entropy(o, y, reduction="none") + 0.1 * o.abs().sum(1) / 3,
    ),
    "a loss that is scaled in place without a new name": (
        lambda m, x, y: scaled_in_place(m(x), y),
        lambda o, y: 3 * F.cross_entropy(o, y, reduction="none"),
    ),
    "a copy of the model that is called without gradients": (
        distilled,
        lambda o, y: F.cross_entropy(o, y, reduction="none") + (o - o.detach() - 1).square().mean(1),
    ),
    "a view and a cast of the inputs": (
        lambda m, x, y: F.cross_entropy(m(x.view(x.size(0), 2, 2).flatten(1).float().to("cpu")), y),
        lambda o, y: F.cross_entropy(o, y, reduction="none"),
    ),
    "weights of classes, per row": (
        lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") * torch.tensor([1.0, 2.0, 3.0])[y]).mean(),
        lambda o, y: F.cross_entropy(o, y, reduction="none") * torch.tensor([1.0, 2.0, 3.0])[y],
    ),
    "minus one": (
        lambda m, x, y: 1 - m(x).log_softmax(1).gather(1, y[:, None]).mean(),
        lambda o, y: -o.log_softmax(1).gather(1, y[:, None])[:, 0],
    ),
}


def added_in_place(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, targets)
    loss += 0.1 * outputs.abs().mean()
    return loss


@pytest.mark.parametrize("clip_norm", [0.1, 50.0])  # all are clipped, and none: the second shows a wrong scale
@pytest.mark.parametrize("name", SEPARABLE)
def test_a_separable_loss_gives_the_clipped_gradients_of_its_rows(tmp_path: Path, name: str, clip_norm: float) -> None:
    loss, per_row = SEPARABLE[name]
    script = Script(tmp_path, exact=True, clip_norm=clip_norm)
    before, reference = [p.detach().clone() for p in script.model.parameters()], copy.deepcopy(script.model)
    expected = clipped_sum(reference, per_row, *data(), clip_norm=clip_norm)
    script.step(loss)
    for parameter, old, total in zip(script.model.parameters(), before, expected.gradients.values(), strict=True):
        torch.testing.assert_close((old - parameter.detach()) / 0.5 * ROWS, total, atol=1e-3, rtol=1e-3)


def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = F.normalize(model(x), dim=1)
    return F.cross_entropy(outputs @ outputs.T, y)


def relative_to_the_largest(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    return F.cross_entropy(outputs / outputs.max(), y)


def squared(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = plain(model, x, y)
    return loss * loss


def weighted_by_its_own_value(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = plain(model, x, y)
    return loss * loss.detach()


def mean_detached(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    return F.cross_entropy(outputs - outputs.detach().mean(0), y)


def spread(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x, y) + model(x).var(0).sum()


def mixed_up(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, 0.5 * x + 0.5 * x.flip(0), y)


def rolled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x, y.roll(1, 0))


def sorted_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none").sort().values.mean()


def hardest_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none").topk(4).values.mean()


def masked_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mask = (y > 0).float()
    return (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()


def weights_of_the_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))(model(x), y)


def weighted_squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    return F.mse_loss(outputs, F.one_hot(y, CLASSES).float(), weight=x[:, :CLASSES].abs())


def an_object_as_argument(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.triplet_margin_with_distance_loss(
        model(x), model(-x), model(2 * x), distance_function=lambda a, b: (a - b).square().sum(1)
    )


def other_parameters(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    return plain(model, x, y) + torch.func.functional_call(model, zeros, (x,)).mean()


def half_of_the_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[: len(x) // 2], y[: len(y) // 2])


def one_row_more_than_the_others(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x, y) + model(x)[0].sum()


def divided_by_a_private_count(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum") / (y > 0).sum()


def vmapped(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.func.vmap(lambda row: 2 * row)(model(x)), y)


def logarithm_of_a_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x, y).log()


def a_branch_on_values(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = plain(model, x, y)
    return loss * 2 if loss > 1 else loss


def a_number_that_was_read(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = plain(model, x, y)
    return loss * loss.item()


def a_tensor_that_was_read(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none").mean() * torch.tensor(x.numpy().max())


def a_value_copied_into_a_buffer(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    kept = torch.zeros(())
    kept += x.max()
    return plain(model, x, y) * kept


def rows_one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = [F.cross_entropy(o[None], t[None]) for o, t in zip(model(x), y, strict=True)]
    return torch.stack(losses).mean()


def an_output_edited_in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    outputs[0] = outputs[1]
    return F.cross_entropy(outputs, y)


def an_output_scaled_in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).mul_(2), y)


def a_view_edited_in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    outputs[0, 0].add_(1.0)
    return F.cross_entropy(outputs, y)


def a_loss_edited_under_its_view(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = plain(model, x, y)
    view = loss.view(1)
    loss.mul_(2)
    return view


def a_copy_with_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(copy.deepcopy(model), x, y)


def an_output_that_a_hook_kept(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    kept: list[Tensor] = []
    parts: Any = model
    with parts[1].register_forward_hook(lambda *given: kept.append(given[2])):
        loss = plain(model, x, y)
    return loss + kept[0].square().mean()


def a_penalty_on_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x, y) + sum(p.square().sum() for p in model.parameters())


def a_part_of_the_model(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    parts: Any = model
    return F.cross_entropy(parts[2](parts[1](parts[0](x))), y)


def no_model(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return x.square().mean()


def a_loss_per_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def one_class_only(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[y == 0], y[y == 0])


def a_number_per_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (F.cross_entropy(model(x), y, reduction="none") * torch.arange(len(x))).mean()


MIXES = "mixes units|not proved"
HOSTILE: dict[Loss, str] = {
    contrastive: MIXES,
    relative_to_the_largest: MIXES,
    squared: "no row has a loss of its own",
    weighted_by_its_own_value: "no row has a loss of its own",
    mean_detached: MIXES,
    spread: "rows do not stay apart",
    mixed_up: MIXES,
    rolled: MIXES,
    sorted_rows: MIXES,
    hardest_rows: "rows do not stay apart",
    masked_mean: "no row has a loss of its own",
    weights_of_the_batch: "divides by a sum over all rows",
    weighted_squares: "divides by a sum over all rows",
    an_object_as_argument: "is given a function, an object that can change",
    other_parameters: "other parameters than its own",
    half_of_the_rows: "batches of different sizes differently|can't be traced",
    one_row_more_than_the_others: "rows do not stay apart",
    divided_by_a_private_count: "no row has a loss of its own",
    vmapped: "can't be recorded",
    logarithm_of_a_mean: "no row has a loss of its own",
    a_branch_on_values: "a value was read",
    a_number_that_was_read: "a value was read",
    a_tensor_that_was_read: "a value was read",
    a_value_copied_into_a_buffer: "a value was read",
    rows_one_by_one: "a value was read",
    an_output_edited_in_place: "writes into a tensor",
    an_output_scaled_in_place: "writes into a tensor",
    a_view_edited_in_place: "writes into a tensor",
    a_loss_edited_under_its_view: "writes into a tensor",
    a_copy_with_gradients: "trainable tensor outside",
    an_output_that_a_hook_kept: "Return it from the model's forward",
    a_penalty_on_weights: "trainable tensor outside",
    a_part_of_the_model: "trainable tensor outside",
    no_model: "it does not use model",
    a_loss_per_row: "Reduce it",
    one_class_only: "a value was read",
    a_number_per_place: "rows do not stay apart",
}


@pytest.mark.parametrize("loss", HOSTILE, ids=lambda loss: loss.__name__)
def test_a_loss_that_mixes_rows_is_refused_and_nothing_is_charged(tmp_path: Path, loss: Loss) -> None:
    script = Script(tmp_path)
    before = [p.detach().clone() for p in script.model.parameters()]
    with pytest.raises(PrivacyError, match=HOSTILE[loss]):
        script.step(loss)
    assert script.engine.get_epsilon(1e-3) == 0
    assert all(map(torch.equal, before, script.model.parameters()))
