"""The page about a model that draws masks: its figures, its patients, and only such pictures as are public."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save

import report_fixtures as made_up
from dpvision.config import parse_config
from dpvision.data import store_of_arrays
from dpvision.errors import DPVisionError
from dpvision.release.report_overlays import PREDICTION, TRUTH, outline, overlay_png
from dpvision.release.report_page import write_report
from dpvision.release.report_terminal import figures_of, summary_lines
from dpvision.release.statements import SHOWN_PICTURES
from dpvision.storage.run_folder import EXAMPLES, Example, examples_bytes, parse_examples
from dpvision.training.trainer import choose_rows, example_file, may_show_pictures
from report_page import Page

PATIENTS = {"p1": 0.81, "p2": 0.43, "p3": 0.9}


def example(**changes: Any) -> Example:
    truth = np.zeros((16, 20), dtype=np.uint8)
    truth[4:12, 4:12] = 1
    values = {
        "rank": "best",
        "dice": 0.91,
        "owner": "p1",
        "image_CHW": np.full((1, 16, 20), 90, dtype=np.uint8),
        "truth_HW": truth,
        "predicted_HW": np.roll(truth, 2, axis=1),
    }
    return Example(**{**values, **changes})


def mask_metrics(**changes: Any) -> dict[str, Any]:
    """Figures as training writes them for masks."""
    final = {
        "task": "segmentation",
        "dice": 0.7123,
        "iou": 0.6011,
        "dice_per_patient": 0.7133,
        "iou_per_patient": 0.6022,
        "per_class": {"foreground": {"dice": 0.7123, "iou": 0.6011, "dice_per_patient": 0.7133}},
        "per_patient": PATIENTS,
        "pixel_accuracy": 0.94,
        "baseline_dice": 0.5312,
        "baseline_dice_per_patient": 0.5434,
        "loss": 0.9,
        "count": 123,
        "evaluated_on": "liver test, declared public",
        "weights": "averaged",
    }
    curve = [{"step": 10 * n, "epsilon": 0.7 * n, "dice": 0.1 + 0.15 * n, "loss": 1.0} for n in range(1, 5)]
    return {"task": "segmentation", "curve": curve, "final": final | changes}


def mask_certificate(*, public: bool = True, unit: str = "patient", **changes: Any) -> dict[str, Any]:
    declared = [{"what": SHOWN_PICTURES, "how": "named by the user"}] if public else []
    mechanism = made_up.certificate()["mechanism"] | {"privacy_unit": unit}
    return made_up.certificate(privacy_unit=unit, declared=declared, mechanism=mechanism) | changes


def mask_run(folder: Path, *, examples: list[Example] | None = None, **files: Any) -> Path:
    usual = {
        "certificate": mask_certificate(),
        "metrics": mask_metrics(),
        "config": made_up.config(task="segmentation"),
    }
    run = made_up.write_run(folder, **(usual | files))
    if examples is not None:
        (run / "release" / EXAMPLES).write_bytes(examples_bytes(examples))
    return run


def page_of(folder: Path, **files: Any) -> Page:
    return Page(write_report(mask_run(folder, **files)).read_text())


def sources(page: Page) -> list[str]:
    return [value for tag, name, value in page.attributes if tag == "img" and name == "src"]


def test_the_page_says_dice_and_what_one_mask_for_all_would_reach(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run").text
    assert "71.2 % Dice at ε = 2.93, δ = 10−5" in text
    assert "Dice over epsilon" in text
    assert "Dice, mean over patients71.3 %" in text
    assert "one mask for all 53.1 %" in text
    assert "accuracy" not in text.lower()


def test_patients_are_bars_worst_first_with_the_baseline_as_a_line(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    assert page.text.index("p2") < page.text.index("p1") < page.text.index("p3")
    lines = [value for _, name, value in page.attributes if name == "class" and value == "constant"]
    assert len(lines) == len(PATIENTS)


def test_several_classes_have_bars_of_their_own(tmp_path: Path) -> None:
    classes = {"liver": {"dice": 0.9, "iou": 0.8}, "tumour": {"dice": 0.3, "iou": 0.2}}
    text = page_of(tmp_path / "run", metrics=mask_metrics(per_class=classes)).text
    assert "Dice of each class" in text
    assert text.index("tumour") < text.index("liver90.0")


def test_examples_are_shown_by_rank_with_legend_and_dice(tmp_path: Path) -> None:
    ranks = [("best", 0.95), ("median", 0.7), ("worst", 0.04)]
    shown = [example(rank=rank, dice=dice) for rank, dice in ranks for _ in range(2)]
    page = page_of(tmp_path / "run", examples=shown)
    assert len(sources(page)) == 6
    places = [page.text.index(f"{rank} by Dice") for rank in ("Best", "Median", "Worst")]
    assert places == sorted(places)
    assert page.text.count("Dice 4.0 % · patient p1") == 2
    assert "truth: the mask that came with the picture" in page.text
    labels = [value for tag, name, value in page.attributes if tag == "img" and name == "alt"]
    assert all("truth and prediction" in label for label in labels)


def test_pictures_are_part_of_the_page_and_nothing_else_is_loaded(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", examples=[example()])
    (source,) = sources(page)
    assert source.startswith("data:image/png;base64,")
    picture = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
    assert picture.format == "PNG"
    policies = [value for tag, name, value in page.attributes if tag == "meta" and name == "content"]
    assert any("default-src 'none'; img-src data:;" in value for value in policies)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form", "a"} & set(page.tags)


def test_without_the_declaration_no_picture_is_even_opened(tmp_path: Path) -> None:
    run = mask_run(tmp_path / "run", certificate=mask_certificate(public=False))
    (run / "release" / EXAMPLES).write_bytes(b"would be refused if anybody read it")
    page = Page(write_report(run).read_text())
    assert sources(page) == []
    assert "No picture is shown" in page.text
    assert "--test" in page.text


def test_a_page_about_classes_of_pictures_says_nothing_of_masks(tmp_path: Path) -> None:
    page = Page(write_report(made_up.write_run(tmp_path / "run")).read_text())
    assert "Prediction and truth" not in page.text
    assert "Dice" not in page.text


@pytest.mark.parametrize(
    "owner", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "\x1b[31m\u202e", None]
)
def test_hostile_owners_are_shown_and_do_nothing(tmp_path: Path, owner: str | None) -> None:
    metrics = mask_metrics(per_patient={str(owner): 0.5, "b": 0.7})
    page = page_of(tmp_path / "run", examples=[example(owner=owner)], metrics=metrics)
    assert len(sources(page)) == 1
    assert "script" not in page.tags
    assert not [attribute for attribute in page.attributes if attribute[1].startswith("on")]
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text


def test_equal_examples_give_equal_bytes(tmp_path: Path) -> None:
    first, second = (write_report(mask_run(tmp_path / name / "run", examples=[example()])) for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_a_slice_is_not_sold_as_a_patient(tmp_path: Path) -> None:
    text = page_of(tmp_path / "slice", certificate=mask_certificate(unit="slice")).text
    assert "each single slice" in text
    assert "not for one patient" in text
    whole = page_of(tmp_path / "patient").text
    assert "each patient with all of its pictures" in whole
    assert "not for one patient" not in whole


def test_figures_for_other_units_stand_beside_the_guarantee(tmp_path: Path) -> None:
    others = [
        {"unit": "owner of at most 40 slices", "epsilon": 31.01001, "delta": 1e-5, "why": "a mixture of Gaussians"},
        {"unit": "owner of more", "epsilon": None, "delta": 1e-5, "why": "there is no end"},
    ]
    text = page_of(tmp_path / "run", certificate=mask_certificate(unit="slice", other_units=others)).text
    assert "Owner of at most 40 slices: ε = 31.02, δ = 10−5" in text
    assert "a mixture of Gaussians" in text
    assert "Owner of more: nothing is proved" in text


def test_the_terminal_gets_dice_patients_and_baseline(tmp_path: Path) -> None:
    lines = summary_lines(mask_certificate(), mask_metrics())
    assert lines[:4] == [
        "dice      71.2 %  (liver test, declared public, 123 pictures, averaged weights)",
        "patients  71.3 %  (Dice of each patient, averaged)",
        "worst     43.0 %  (Dice of one patient)",
        "baseline  53.1 %  (Dice of the best single mask for all)",
    ]
    figures = figures_of(mask_run(tmp_path / "run"))
    assert (figures["dice"], figures["dice_per_patient"], figures["baseline_dice"]) == (0.7123, 0.7133, 0.5312)


def test_unknown_patients_leave_their_part_out(tmp_path: Path) -> None:
    changes = dict.fromkeys(("dice_per_patient", "iou_per_patient", "per_patient", "baseline_dice_per_patient"))
    text = page_of(tmp_path / "run", metrics=mask_metrics(**changes)).text
    assert "71.2 % Dice" in text
    assert "Dice of each patient" not in text
    assert "mean over patients" not in text


@pytest.mark.parametrize("changes", [{"dice": 1.5}, {"dice": None}, {"per_class": {"a": 0.5}}, {"per_patient": [1]}])
def test_broken_figures_of_masks_are_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(DPVisionError) as caught:
        write_report(mask_run(tmp_path / "run", metrics=mask_metrics(**changes)))
    assert "metrics" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_outline_lies_on_both_sides_of_a_border() -> None:
    mask = np.zeros((5, 8), dtype=np.uint8)
    mask[:, 4:] = 1
    for radius in (1, 2):
        found = outline(mask, radius)
        assert found[:, 4 - radius : 4 + radius].all()
        assert found.sum() == 5 * 2 * radius
    assert not outline(np.ones((5, 5), dtype=np.uint8), 2).any()


def colours(content: bytes) -> set[tuple[int, ...]]:
    return set(map(tuple, np.asarray(Image.open(io.BytesIO(content))).reshape(-1, 3).tolist()))


def test_both_outlines_can_be_seen_even_where_they_agree() -> None:
    same = example(predicted_HW=example().truth_HW)
    assert {TRUTH, PREDICTION} <= colours(overlay_png(same))
    nothing = np.zeros((16, 20), dtype=np.uint8)
    assert PREDICTION not in colours(overlay_png(example(predicted_HW=nothing)))
    assert TRUTH not in colours(overlay_png(example(truth_HW=nothing)))


@pytest.mark.parametrize("shape", [(1, 7, 9), (3, 64, 64), (1, 500, 700), (1, 1, 900)])
def test_a_drawing_is_neither_tiny_nor_huge(shape: tuple[int, int, int]) -> None:
    pixels = np.zeros(shape[1:], dtype=np.uint8)
    drawn = Image.open(
        io.BytesIO(overlay_png(example(image_CHW=np.zeros(shape, np.uint8), truth_HW=pixels, predicted_HW=pixels)))
    )
    assert 168 < max(drawn.size) <= 336


@given(st.integers(1, 4), st.sampled_from([1, 3]), st.integers(1, 9), st.integers(1, 9), st.text(max_size=8))
def test_examples_survive_their_file(count: int, channels: int, height: int, width: int, owner: str) -> None:
    generator = np.random.default_rng(count)
    given_ = [
        example(
            dice=float(generator.random()),
            owner=owner if number else None,
            image_CHW=generator.integers(0, 256, (channels, height, width), dtype=np.uint8),
            truth_HW=generator.integers(0, 3, (height, width), dtype=np.uint8),
            predicted_HW=generator.integers(0, 3, (height, width), dtype=np.uint8),
        )
        for number in range(count)
    ]
    found = parse_examples(examples_bytes(given_), name="file")
    for before, after in zip(given_, found, strict=True):
        assert (before.rank, before.dice, before.owner) == (after.rank, after.dice, after.owner)
        for name in ("image_CHW", "truth_HW", "predicted_HW"):
            assert np.array_equal(getattr(before, name), getattr(after, name))


def altered(**parts: Any) -> bytes:
    """A whole safetensors file whose content is not what it should be."""
    one = example()
    arrays: dict[str, Any] = {
        "images": one.image_CHW[None],
        "truth": one.truth_HW[None],
        "predicted": one.predicted_HW[None],
    }
    words: Any = parts.pop("words", [{"rank": "best", "dice": 0.5, "owner": None}])
    tensors = {name: np.ascontiguousarray(value) for name, value in (arrays | parts).items()}
    return save(tensors, {"examples": json.dumps(words)})


BAD_EXAMPLES = {
    "no file": b"",
    "cut off": examples_bytes([example()])[:-9],
    "a header that lies": b"\xff" * 16,
    "no words": save({"images": np.zeros((1, 1, 2, 2), np.uint8)}),
    "other numbers": altered(images=np.zeros((1, 1, 16, 20), np.float32)),
    "other sizes": altered(truth=np.zeros((1, 16, 21), np.uint8)),
    "other channels": altered(images=np.zeros((1, 4, 16, 20), np.uint8)),
    "too few words": altered(words=[]),
    "an unknown rank": altered(words=[{"rank": "<b>", "dice": 0.5, "owner": None}]),
    "an impossible Dice": altered(words=[{"rank": "best", "dice": 7.0, "owner": None}]),
    "an owner that is no name": altered(words=[{"rank": "best", "dice": 0.5, "owner": 3}]),
    "words that are none": altered(words=7),
}


@pytest.mark.parametrize("content", BAD_EXAMPLES.values(), ids=BAD_EXAMPLES)
def test_a_broken_file_of_examples_is_one_line_and_no_page(tmp_path: Path, content: bytes) -> None:
    run = mask_run(tmp_path / "run")
    (run / "release" / EXAMPLES).write_bytes(content)
    with pytest.raises(DPVisionError) as caught:
        write_report(run)
    assert EXAMPLES in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (run / "release" / "report.html").exists()


def store_with(masks: np.ndarray, owners: list[str] | None = None) -> Any:
    return store_of_arrays(
        images=np.zeros((len(masks), 1, 4, 4), dtype=np.uint8),
        labels=masks,
        class_names=("background", "foreground"),
        name="made up",
        unit_names=owners,
        rows_are_units=True,
    )


def full_masks(count: int) -> np.ndarray:
    return np.ones((count, 4, 4), dtype=np.uint8)


def test_best_median_and_worst_are_what_they_say() -> None:
    dice = torch.linspace(0.1, 0.9, 21, dtype=torch.float64)
    chosen = choose_rows(dice, store_with(full_masks(21)))
    assert chosen == [
        *(("best", row) for row in (20, 19, 18)),
        *(("median", row) for row in (11, 10, 9)),
        *(("worst", row) for row in (0, 1, 2)),
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9])
def test_no_picture_is_chosen_twice(count: int) -> None:
    rows = [row for _, row in choose_rows(torch.rand(count, dtype=torch.float64), store_with(full_masks(count)))]
    assert len(rows) == len(set(rows)) == min(count, 3 * max(1, min(3, count // 3)))


def test_empty_masks_are_no_examples_while_there_are_others() -> None:
    masks = full_masks(9)
    masks[::2] = 0
    dice = torch.ones(9, dtype=torch.float64)
    assert all(masks[row].any() for _, row in choose_rows(dice, store_with(masks)))
    assert choose_rows(dice, store_with(np.zeros((9, 4, 4), dtype=np.uint8)))


def test_examples_come_from_different_patients_where_they_can() -> None:
    owners = [f"p{row // 10}" for row in range(40)]
    chosen = choose_rows(torch.linspace(1, 0, 40, dtype=torch.float64), store_with(full_masks(40), owners))
    assert len({owners[row] for rank, row in chosen if rank == "median"}) == 2
    best = [row for rank, row in chosen if rank == "best"]
    assert best[0] == 0


@pytest.mark.parametrize(
    ("task", "test", "shown"),
    [
        ("segmentation", "elsewhere.npz", True),
        ("segmentation", None, False),
        ("classification", "elsewhere.npz", False),
    ],
)
def test_pictures_are_shown_only_where_the_user_named_them(task: str, test: str | None, shown: bool) -> None:
    config = parse_config(
        {"task": task, "data": {"source": "scans", "test": test}, "privacy": {"noise_multiplier": 1.0}}
    )
    assert may_show_pictures(config) is shown


def test_held_out_patients_never_become_examples() -> None:
    config = parse_config(
        {
            "task": "segmentation",
            "data": {"source": "scans", "test": "elsewhere"},
            "privacy": {"noise_multiplier": 1.0},
        }
    )
    pictures = SimpleNamespace(test=store_with(full_masks(3)), held_out=True)
    session: Any = SimpleNamespace(config=config, pictures=pictures)
    assert example_file(session) is None


def test_the_style_sheet_knows_the_colours_of_the_drawing(tmp_path: Path) -> None:
    source = write_report(mask_run(tmp_path / "run", examples=[example()])).read_text()
    for name, colour in (("truth", TRUTH), ("found", PREDICTION)):
        (rule,) = re.findall(rf"\.swatch\.{name}\{{([^}}]*)\}}", source)
        assert "#{:02x}{:02x}{:02x}".format(*colour) in rule
