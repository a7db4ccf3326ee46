"""The study of the defaults: its one-shot heads and its tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.own_data import one_shot
from benchmarks.own_data.__main__ import LOG
from benchmarks.own_data.forecast_curves import covered, curves, fit_curve
from benchmarks.own_data.heads import Head, HeadData, simulate
from benchmarks.own_data.page import merged, tables, write_page


def clusters(classes: int = 3, units: int = 200, width: int = 20) -> HeadData:
    """Rows around one centre per class, far from zero."""
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(classes, width, generator=generator) + 1
    labels = torch.arange(2 * units) % classes
    rows = centres[labels] + torch.randn(2 * units, width, generator=generator)
    return HeadData(rows[:units], labels[:units], rows[units:], labels[units:], classes)


@pytest.mark.parametrize("head", [one_shot.class_means, one_shot.least_squares])
def test_a_one_shot_head_learns_clusters_and_only_without_much_noise(head: Any) -> None:
    data = clusters()
    assert head(data, noise=0.1, seed=0) > 95
    assert head(data, noise=1e6, seed=0) < 70


def test_the_noise_of_least_squares_follows_the_joint_length_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(one_shot.math, "sqrt", lambda value: drawn.append(value) or value**0.5)
    data = clusters()
    one_shot.least_squares(data, noise=1.0, seed=0)
    rows = torch.cat((torch.nn.functional.normalize(data.train_x), torch.full((200, 1), one_shot.CONSTANT)), 1)
    gram = torch.einsum("ni,nj->nij", rows, rows).flatten(1)
    joint = (one_shot.GRAM_WEIGHT * gram).square().sum(1) + rows.square().sum(1)
    assert joint.max().item() == pytest.approx(drawn[0], rel=1e-5)


def test_an_offset_learns_how_frequent_classes_are_in_place_of_what_all_rows_share() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.cat((torch.zeros(240, dtype=torch.long), torch.ones(60, dtype=torch.long)))
    # Rows have a part in common, and the classes differ in another one. The test part is balanced.
    rows = torch.randn(300, 50, generator=generator) + 1
    rows[:, 0] += 6 * labels - 3
    data = HeadData(rows, labels, rows[180:], labels[180:], 2)
    plain, offset = (simulate(data, [Head(0.03, 1.0, 60, offset=size)], seeds=[0])[-1].mean() for size in (0.0, 4.0))
    assert plain < 55
    assert offset > 90


def row(**values: Any) -> dict[str, Any]:
    found = {"key": "a 300 1 own", "part": "kept_out", "source": "a", "num_units": 300, "epsilon": 1.0, "classes": 2}
    found |= {
        "pretrained": False,
        "majority": 50.0,
        "test_rows": 100,
        "curve": [60.0, 70.0],
        "falls": [0.0, 1.0, 0.5],
        "default": [69.0, 71.0, 70.0],
    }
    return found | values


def test_the_last_run_of_a_cell_counts_and_its_grid_stays() -> None:
    joined = merged([row(grid_best=[75.0, 75.0, 75.0]), row(default=[73.0, 73.0, 73.0])])
    assert len(joined) == 1
    text = tables(joined)
    assert "| 73.0 ± 0.0 | - | - | 75.0 ± 0.0 |" in text
    assert "2.0 points on average" in text


def test_one_table_has_pretrained_weights_and_the_better_one_shot_head_beside_the_default() -> None:
    pretrained = row(key="a 300 1 pretrained", pretrained=True, default=[80.0, 80.0, 80.0], baseline=90.0)
    heads = {"class_means": [55.0, 55.0, 55.0], "least_squares": [61.0, 61.0, 61.0]}
    text = tables(merged([row(), pretrained, {"key": "a 300 1 own one_shot", "of": "a 300 1 own", **heads}]))
    assert "| a (2) | 300 | 1 | 70.0 ± 1.0 | 80.0 ± 0.0 | 61.0 ± 0.0 | - | - | - | 90.0 | 50.0 |" in text
    assert text.count("| dataset") == 1


def test_a_cell_below_a_constant_prediction_and_falling_curves_are_named() -> None:
    text = tables([row(default=[30.0, 30.0, 30.0], falls=[0.0, 0.0, 6.0])])
    assert "below a constant prediction: a 300 1 own" in text
    assert "of a single run's curve: 2.0 and 6.0" in text


def test_the_page_follows_from_its_log(tmp_path: Path) -> None:
    """The committed table is what the committed rows give."""
    page = Path("docs/evidence/defaults.md")
    copy = tmp_path / "page.md"
    copy.write_text(page.read_text())
    write_page(LOG, copy)
    assert copy.read_text() == page.read_text()


@pytest.mark.parametrize("noise", [0.0, 20.0])
def test_training_in_the_span_of_the_rows_is_the_same_as_in_all_features(noise: float) -> None:
    data = clusters(units=30, width=100)
    head = Head(0.01, 5.0, 20, noise_multiplier=noise)
    seeds = range(1 if noise == 0 else 60)
    # An average, even one that forgets at once, takes the path through all features.
    fast, slow = (simulate(data, [each], seeds=seeds) for each in (head, replace(head, decay=1e-9)))
    assert fast.mean() > 40
    # 60 runs with a standard deviation of about 6 points: 1.1 points for a difference of means, times 4.
    assert fast.mean() == pytest.approx(slow.mean(), abs=1e-6 if noise == 0 else 4.4)
    assert fast.std() == pytest.approx(slow.std(), rel=0.5, abs=1e-6)


def test_a_forecast_curve_that_made_the_rows_is_found_again() -> None:
    def cell(signal: float, most: float, half: float) -> dict[str, Any]:
        accuracy = 50 + 50 * most * (signal / 2) / (signal / 2 + half)
        return row(signal=signal, default=[accuracy] * 3)

    signals = (20.0, 60.0, 200.0, 600.0, 2000.0)
    easy, hard = ([cell(signal, *curve) for signal in signals] for curve in ((0.9, 8.0), (0.4, 70.0)))
    assert fit_curve(easy, 0.9) == (0.9, 8.0)
    found = curves([*easy, *hard])
    assert found == {"EASY": (0.9, 8.0), "HARD": (0.4, 70.0)}
    assert covered([*easy, *hard], found) == 10
    with pytest.raises(ValueError, match="no rows"):
        fit_curve([], 0.5)
