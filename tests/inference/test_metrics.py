"""Figures on public pictures, and that measuring leaves no trace in the model."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpvision.data.normalisation import Normalisation
from dpvision.data.store import ImageStore, store_of_arrays
from dpvision.errors import ArgumentError, DataError
from dpvision.inference import Metrics, evaluate, metrics_of, predict_probabilities
from dpvision.inference.predict import BATCH_SIZE, outputs_of

PLAIN = Normalisation(mean=(0.0,), std=(1.0,), source="fixed")


class ReadsItsPixels(nn.Module):
    """Outputs the first pixels, times 255 and a gain: a picture is its own row of logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * 255 * x.flatten(1)[:, : self.classes]


class Frail(nn.Module):
    """A model with everything that evaluation could disturb: dropout, running statistics, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.frozen = nn.BatchNorm2d(1).eval()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.frozen(self.norm(x))).flatten(1))


def store_of_logits(logits: list[list[int]], labels: list[int], names: list[str] | None = None) -> ImageStore:
    classes = len(logits[0])
    images = np.zeros((len(logits), 1, 4, 4), dtype=np.uint8)
    images.reshape(len(logits), 16)[:, :classes] = logits
    class_names = names or [f"class {index}" for index in range(classes)]
    return store_of_arrays(images=images, labels=np.array(labels), class_names=class_names, name="made up")


def random_store(rows: int = 37, classes: int = 3) -> ImageStore:
    random = np.random.default_rng(7)
    return store_of_arrays(
        images=random.integers(0, 256, (rows, 1, 4, 4)).astype(np.uint8),
        labels=random.integers(0, classes, rows),
        class_names=[str(index) for index in range(classes)],
        name="random",
    )


def test_accuracy_loss_and_classes_are_what_a_hand_computes() -> None:
    store = store_of_logits([[2, 0, 0], [0, 2, 0], [2, 0, 0], [0, 0, 2]], [0, 1, 1, 2], ["cat", "dog", "owl"])
    metrics = evaluate(ReadsItsPixels(3), store, PLAIN)
    right, wrong = math.log(math.exp(2) + 2) - 2, math.log(math.exp(2) + 2)
    assert metrics.accuracy == 0.75
    assert metrics.per_class == {"cat": 1.0, "dog": 0.5, "owl": 1.0}
    assert metrics.per_class_count == {"cat": 1, "dog": 2, "owl": 1}
    assert metrics.count == 4
    # The pixels pass through float32 (x / 255 * 255), hence 1e-6.
    assert metrics.loss == pytest.approx((3 * right + wrong) / 4, rel=1e-6)


def test_calibration_error_is_the_gap_between_confidence_and_accuracy() -> None:
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    metrics = metrics_of(logits, torch.tensor([0, 1, 0, 0]), ("a", "b"))
    sure = math.exp(2) / (math.exp(2) + 1)
    # One bin holds two answers at confidence `sure` (half right), another two at 0.5 (a tie goes to the first: right).
    assert metrics.calibration == pytest.approx((2 * abs(sure - 0.5) + 2 * 0.5) / 4)


def test_a_perfectly_sure_and_right_model_has_no_calibration_error() -> None:
    metrics = metrics_of(torch.eye(7) * 1e4, torch.arange(7), tuple("abcdefg"))
    assert metrics.accuracy == metrics.top5 == 1.0
    assert metrics.calibration == pytest.approx(0.0, abs=1e-12)


def test_top5_counts_the_first_five_and_is_absent_below_six_classes() -> None:
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1]] * 2)
    assert metrics_of(logits, torch.tensor([4, 5]), tuple("abcdef")).top5 == 0.5
    assert metrics_of(logits[:, :5], torch.tensor([4, 3]), tuple("abcde")).top5 is None


def test_a_class_without_pictures_has_no_accuracy() -> None:
    metrics = metrics_of(torch.eye(3)[:2], torch.tensor([0, 1]), ("seen", "also seen", "absent"))
    assert metrics.per_class["absent"] is None
    assert metrics.per_class_count["absent"] == 0
    assert metrics.accuracy == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_outputs_that_are_not_numbers_count_as_sure_and_wrong(bad: float) -> None:
    logits = torch.tensor([[bad, 0.0], [0.0, 1.0]])  # argmax of the first row would be class 0, its label
    metrics = metrics_of(logits, torch.tensor([0, 1]), ("a", "b"))
    assert metrics.accuracy == 0.5
    assert 354 < metrics.loss < 355  # half of 708.4
    assert metrics.calibration > 0.5
    json.dumps(metrics.to_dict(), allow_nan=False)


@pytest.mark.parametrize("batch_size", [1, 5, 37, 1024])
def test_the_batch_size_does_not_change_the_outputs(batch_size: int) -> None:
    torch.manual_seed(1)
    model, images = Frail(), random_store().images
    whole, parts = (
        torch.cat(list(outputs_of(model, images, PLAIN.apply, batch_size=size))) for size in (BATCH_SIZE, batch_size)
    )
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)  # float32 sums in another order


def test_the_model_is_left_exactly_as_it_was() -> None:
    model = Frail().train()
    model.frozen.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    evaluate(model, random_store(), PLAIN, parameters={"head.bias": torch.ones(3)})
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert modes["frozen"] is False
    assert modes["drop"] is True
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_modes_come_back_even_when_the_model_fails() -> None:
    model = Frail().train()
    three_channels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(RuntimeError):
        predict_probabilities(model, three_channels, Normalisation(mean=(0.0,) * 3, std=(1.0,) * 3, source="fixed"))
    assert model.drop.training


def test_dropout_is_off_while_measuring() -> None:
    model, store = Frail().train(), random_store()
    assert torch.equal(
        predict_probabilities(model, store.images, PLAIN), predict_probabilities(model, store.images, PLAIN)
    )


def test_given_parameters_are_used_instead_of_the_models_own() -> None:
    store = store_of_logits([[2, 0], [0, 2]], [0, 1])
    model = ReadsItsPixels(2)
    assert evaluate(model, store, PLAIN).accuracy == 1.0
    assert evaluate(model, store, PLAIN, parameters={"gain": torch.tensor(-1.0)}).accuracy == 0.0
    assert model.gain.item() == 1.0


def test_unknown_parameter_names_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"module\.gain"):
        evaluate(ReadsItsPixels(2), store_of_logits([[1, 0]], [0]), PLAIN, parameters={"module.gain": torch.ones(())})


def test_predict_gives_probabilities_per_picture() -> None:
    probabilities = predict_probabilities(
        ReadsItsPixels(3), store_of_logits([[0, 0, 0], [9, 0, 0]], [0, 0]).images, PLAIN
    )
    assert probabilities.shape == (2, 3)
    assert probabilities.dtype == torch.float32
    assert not probabilities.requires_grad
    assert probabilities[0].tolist() == pytest.approx([1 / 3] * 3)
    assert probabilities.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])


def test_normalisation_is_applied() -> None:
    half = Normalisation(mean=(0.5,), std=(0.25,), source="fixed")
    images = torch.full((1, 1, 1, 2), 255, dtype=torch.uint8)
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x.flatten(1)

    predict_probabilities(Spy(), images, half)
    assert seen[0].dtype == torch.float32
    assert seen[0].flatten().tolist() == pytest.approx([2.0, 2.0])


def test_no_pictures_and_wrong_class_counts_are_clear_errors() -> None:
    with pytest.raises(DataError, match="at least one image"):
        metrics_of(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), ("a", "b"))
    with pytest.raises(DataError, match="one column a class"):
        evaluate(ReadsItsPixels(3), store_of_logits([[1, 0]], [0]), PLAIN)
    with pytest.raises(DataError, match="must differ"):
        metrics_of(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), ("a", "a"))


def test_to_dict_is_plain_json() -> None:
    metrics = evaluate(ReadsItsPixels(2), store_of_logits([[1, 0], [0, 1]], [0, 1]), PLAIN)
    written = json.loads(json.dumps(metrics.to_dict(), allow_nan=False))
    fields = {field.name for field in dataclasses.fields(Metrics)} - {"scored"}
    assert Metrics(**{name: written[name] for name in fields}) == metrics
    assert written["chance"]["accuracy"] == 0.5
