"""Figures of masks: Dice and IoU by hand, empty masks, patients, the constant baseline, batches, broken outputs."""

from __future__ import annotations

import json
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpvision.data.normalisation import Normalisation
from dpvision.data.store import ImageStore, store_of_arrays
from dpvision.errors import DataError
from dpvision.inference import MaskMetrics, dice_of_images, evaluate_masks, mask_metrics, predict_masks
from dpvision.models.losses import loss_for

PLAIN = Normalisation(mean=(0.0,), std=(1.0,), source="fixed")
BINARY = ("background", "foreground")


class SeesBrightness(nn.Module):
    """Foreground where a pixel is bright: the picture is the prediction."""

    def __init__(self, *, classes: int = 2) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        if self.classes == 2:
            return self.gain * (x - 0.5)
        levels = torch.arange(self.classes, dtype=x.dtype)[:, None, None] / (self.classes - 1)
        return -self.gain * (x - levels).abs()


def store_of(
    predicted: Any, truth: Any, *, owners: list[str] | None = None, class_names: tuple[str, ...] = BINARY
) -> ImageStore:
    """Pictures that show what ``SeesBrightness`` shall predict."""
    levels = np.asarray(predicted) * (255 // (len(class_names) - 1))
    return store_of_arrays(
        images=levels[:, None].astype(np.uint8),
        labels=np.asarray(truth),
        class_names=class_names,
        name="slices",
        unit_names=owners,
        rows_are_units=True,
    )


FULL, EMPTY, LEFT, TOP = [[1, 1], [1, 1]], [[0, 0], [0, 0]], [[1, 0], [1, 0]], [[1, 1], [0, 0]]


def test_dice_and_iou_are_those_of_each_picture_averaged() -> None:
    metrics = evaluate_masks(SeesBrightness(), store_of([LEFT, FULL, TOP], [TOP, LEFT, TOP]), PLAIN)
    assert metrics.dice == pytest.approx((2 * 1 / 4 + 2 * 2 / 6 + 1) / 3)
    assert metrics.iou == pytest.approx((1 / 3 + 2 / 4 + 1) / 3)
    assert metrics.pixel_accuracy == pytest.approx((2 + 2 + 4) / 12)
    assert metrics.count == 3
    assert metrics.dice_per_patient is None
    assert metrics.per_patient is None


def test_nothing_there_and_nothing_predicted_is_right_by_definition() -> None:
    nothing = evaluate_masks(SeesBrightness(), store_of([EMPTY], [EMPTY]), PLAIN)
    something = evaluate_masks(SeesBrightness(), store_of([LEFT], [EMPTY]), PLAIN)
    assert (nothing.dice, nothing.iou) == (1.0, 1.0)
    assert (something.dice, something.iou) == (0.0, 0.0)


def test_a_patient_is_all_its_pixels_together() -> None:
    """A slice with little to see weighs little within its patient, and each patient weighs the same."""
    store = store_of([FULL, LEFT, EMPTY], [FULL, EMPTY, TOP], owners=["a", "a", "b"])
    metrics = evaluate_masks(SeesBrightness(), store, PLAIN)
    of_a = 2 * 4 / (6 + 4)
    assert metrics.per_patient == {"a": pytest.approx(of_a), "b": 0.0}
    assert metrics.dice_per_patient == pytest.approx(of_a / 2)
    assert metrics.iou_per_patient == pytest.approx((4 / 6) / 2)
    assert metrics.dice == pytest.approx((1 + 0 + 0) / 3)


def test_patients_without_names_have_numbers_best_first() -> None:
    store = store_of([EMPTY, FULL], [TOP, FULL], owners=["Mrs A", "Mr B"])
    metrics = evaluate_masks(SeesBrightness(), store, PLAIN, name_patients=False)
    assert metrics.per_patient == {"1": 1.0, "2": 0.0}
    assert "Mrs A" not in json.dumps(metrics.to_dict())


def test_each_class_but_the_background_has_its_own_figures() -> None:
    names = ("background", "liver", "tumour")
    store = store_of([[[1, 1], [2, 0]]], [[[1, 0], [2, 0]]], class_names=names, owners=["a"])
    metrics = evaluate_masks(SeesBrightness(classes=3), store, PLAIN)
    assert set(metrics.per_class) == {"liver", "tumour"}
    assert metrics.per_class["liver"]["dice"] == pytest.approx(2 / 3)
    assert metrics.per_class["tumour"] == dict.fromkeys(("dice", "iou", "dice_per_patient", "iou_per_patient"), 1.0)
    assert metrics.dice == pytest.approx((2 / 3 + 1) / 2)


@given(seed=st.integers(0, 30), classes=st.integers(2, 4), batch_size=st.integers(1, 9))
def test_figures_do_not_depend_on_the_batches_and_agree_with_plain_counting(
    seed: int, classes: int, batch_size: int
) -> None:
    generator = np.random.default_rng(seed)
    predicted, truth = generator.integers(0, classes, size=(2, 7, 4, 4))
    names = tuple(f"class {number}" for number in range(classes))
    store = store_of(predicted, truth, class_names=names, owners=[f"p{row % 3}" for row in range(7)])
    with mock.patch.object(mask_metrics, "IMAGES_WITH_MASKS", batch_size):
        metrics = evaluate_masks(SeesBrightness(classes=classes), store, PLAIN)
    by_hand = [
        [_dice(predicted[row] == number, truth[row] == number) for number in range(1, classes)] for row in range(7)
    ]
    assert metrics.dice == pytest.approx(np.mean(by_hand))
    of_patients = [
        [_dice(predicted[patient::3] == number, truth[patient::3] == number) for number in range(1, classes)]
        for patient in range(3)
    ]
    assert metrics.dice_per_patient == pytest.approx(np.mean(of_patients))
    each = dice_of_images(torch.from_numpy(predicted), torch.from_numpy(truth), classes)
    assert each.tolist() == pytest.approx(np.mean(by_hand, axis=1))


def _dice(found: np.ndarray, there: np.ndarray) -> float:
    total = found.sum() + there.sum()
    return 2 * (found & there).sum() / total if total else 1.0


def test_the_constant_baseline_is_the_best_cut_through_the_mean_mask() -> None:
    """Three masks agree on one pixel; a second one is in two of them. The best constant has both."""
    truth = [[[1, 1], [0, 0]], [[1, 1], [0, 0]], [[1, 0], [0, 0]]]
    metrics = evaluate_masks(SeesBrightness(), store_of(truth, truth, owners=["a", "a", "b"]), PLAIN)
    assert metrics.baseline_dice == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert metrics.baseline_dice_per_patient == pytest.approx((1 + 2 / 3) / 2)


def test_where_most_masks_are_empty_the_constant_is_empty_too() -> None:
    metrics = evaluate_masks(SeesBrightness(), store_of([EMPTY] * 4, [EMPTY, EMPTY, EMPTY, TOP]), PLAIN)
    assert metrics.baseline_dice == pytest.approx(3 / 4)


def test_no_constant_mask_beats_the_baseline_by_much_and_the_truth_beats_it() -> None:
    generator = np.random.default_rng(3)
    truth = (generator.random((40, 5, 5)) < np.linspace(0.05, 0.9, 25).reshape(5, 5)).astype(np.uint8)
    metrics = evaluate_masks(SeesBrightness(), store_of(truth, truth), PLAIN)
    tried = generator.integers(0, 2, size=(300, 5, 5))
    best = max(np.mean([_dice(mask == 1, row == 1) for row in truth]) for mask in tried)
    assert best <= metrics.baseline_dice < metrics.dice == 1.0


def test_the_loss_is_the_one_that_was_trained() -> None:
    store = store_of([LEFT, FULL], [TOP, FULL])
    loss = loss_for("segmentation", "dice", 2)
    scores = SeesBrightness()(PLAIN.apply(store.images)).detach()
    found = evaluate_masks(SeesBrightness(), store, PLAIN, loss=loss)
    assert found.loss == pytest.approx(float(loss(scores, store.labels.long()).mean()))


def test_a_picture_without_numbers_is_wrong_in_every_pixel() -> None:
    metrics = evaluate_masks(
        SeesBrightness(), store_of([EMPTY], [EMPTY]), PLAIN, parameters={"gain": torch.tensor(math.nan)}
    )
    assert metrics.dice == metrics.pixel_accuracy == 0.0
    assert math.isfinite(metrics.loss)
    json.dumps(metrics.to_dict(), allow_nan=False)


def test_other_parameters_are_used_and_the_model_is_left_as_it_was() -> None:
    model = SeesBrightness().train()
    store = store_of([LEFT], [LEFT])
    assert evaluate_masks(model, store, PLAIN).dice == 1.0
    assert evaluate_masks(model, store, PLAIN, parameters={"gain": torch.tensor(-1.0)}).dice == 0.0
    assert model.training


def test_predicted_masks_are_classes_in_bytes() -> None:
    store = store_of([LEFT, FULL, EMPTY], [LEFT, LEFT, LEFT])
    found = predict_masks(SeesBrightness(), store.images, PLAIN)
    assert found.dtype == torch.uint8
    assert found.tolist() == [LEFT, FULL, EMPTY]


def test_outputs_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match="3 maps"):
        evaluate_masks(SeesBrightness(), store_of([LEFT], [LEFT], class_names=("background", "a", "b")), PLAIN)


def test_the_names_of_the_figures_stay() -> None:
    metrics = evaluate_masks(SeesBrightness(), store_of([LEFT], [LEFT], owners=["a"]), PLAIN)
    assert isinstance(metrics, MaskMetrics)
    assert set(metrics.to_dict()) == {
        "task",
        "dice",
        "iou",
        "dice_per_patient",
        "iou_per_patient",
        "per_class",
        "per_patient",
        "pixel_accuracy",
        "baseline_dice",
        "baseline_dice_per_patient",
        "loss",
        "count",
        "intervals",
    }
    assert metrics.to_dict()["task"] == "segmentation"
