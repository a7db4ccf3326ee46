"""The drawings of a report: outlines that can be seen, and charts that a page can contain."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from dpvision.accounting import privacy_profile
from dpvision.privacy.mechanism import Event
from dpvision.release.charts import PREDICTION, TRUTH, attack_chart, outline, overlay_png, score_chart
from report_fixtures import example
from report_page import Page


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


@pytest.mark.parametrize(
    "points", [[(0.0, 0.0)], [(2.9, 1.0)], [(1e-9 * step, 0.5) for step in range(3)], [(1.0, 0.9), (2.0, 0.1)]]
)
def test_one_point_a_flat_curve_and_a_curve_from_zero_can_be_drawn(points: list[tuple[float, float]]) -> None:
    drawn = score_chart(points, x_title="Steps", score_name="accuracy", final_label="end", baseline=0.5)
    page = Page(str(drawn))
    places = " ".join(value for _, name, value in page.attributes if name in {"d", "x", "y", "transform"})
    assert "nan" not in places
    assert "inf" not in places
    assert page.text.count("end") == page.text.count("constant mask 50.0 %") == 2  # for wide and narrow screens


def test_charts_refer_to_nothing_outside_and_to_no_part_of_each_other() -> None:
    profile = privacy_profile([(Event(sample_rate=0.1, noise_multiplier=3.0), 10)], delta=1e-5)
    charts = [
        str(attack_chart(profile, marked=[((0.01, 0.02), "2 %")])),
        str(score_chart([(1.0, 0.5), (2.0, 0.6)], x_title="Steps", score_name="Dice", final_label="end")),
    ]
    ids = []
    for drawn in charts:
        page = Page(drawn)
        assert not {"metadata", "style", "script", "image"} & set(page.tags)
        assert "http" not in drawn
        assert "url(" not in drawn
        assert not [tag for tag in page.tags if tag == "path" and "#0a0b" in drawn]  # every colour is a variable
        own = {value for _, name, value in page.attributes if name == "id"}
        assert {value.removeprefix("#") for _, name, value in page.attributes if name == "href"} <= own
        ids += [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
