"""The model card: what a hub reads, what a person reads, and nothing that a name could smuggle in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import report_fixtures
from dpvision.data.images import decode
from dpvision.release.model_card import known_model_cards, model_card
from unusual_images import write_unusual_images

CONFIG: dict[str, Any] = {"name": "digits", "task": "classification", "model": {"name": "shoefit_cnn"}}
METRICS: dict[str, Any] = {"final": {"accuracy": 0.9817, "loss": 0.07, "evaluated_on": "mnist test"}}


def card(certificate: dict[str, Any] | None = None, **changes: Any) -> str:
    parts = {"metrics": METRICS, "config": CONFIG, **changes}
    return model_card(certificate or report_fixtures.certificate(data={"source": "mnist"}), **parts)


def front_matter(text: str) -> list[str]:
    start, front, _ = text.split("---\n", 2)
    assert start == ""
    return front.splitlines()


def test_the_front_matter_has_what_a_hub_asks_for() -> None:
    front = front_matter(card())
    for line in (
        "license: unknown",
        "library_name: dpvision",
        "pipeline_tag: image-classification",
        "- differential-privacy",
        '- "mnist"',
        "- accuracy",
        "model-index:",
        '- name: "digits"',
        "      value: 0.9817",
        "      value: 2.924371",
    ):
        assert line in front, line


def test_the_card_says_use_figures_privacy_and_limits() -> None:
    text = card()
    certificate = report_fixtures.certificate()
    for phrase in ("## Intended use", "0.9817", "mnist test", "Epsilon 2.925 at delta 1e-05", "not covered", "verify"):
        assert phrase in text.replace("Not covered", "not covered") or phrase == "not covered"
    for limit in certificate["not_covered"]:
        assert limit.replace("_", "\\_") in text


def test_a_run_that_must_not_be_released_says_so_first() -> None:
    text = card(report_fixtures.certificate(for_release=False, stamps=["a reason"], data={"source": "mnist"}))
    assert "**Not for release:** a reason." in text
    assert "- not-for-release" in front_matter(text)
    assert "must not be given away" in text


def test_a_run_without_privacy_or_figures_has_a_card_too() -> None:
    bare = report_fixtures.certificate(
        epsilon=None, epsilon_rdp=None, delta=None, curve=[], gaussian_dp=None, attack_success=[], deployment={}
    )
    text = card(bare, metrics={"final": None}, config={})
    assert "None: parts of the training data may be read off this model." in text
    assert "None were measured." in text
    assert not any(line.startswith("model-index") for line in front_matter(text))


def test_segmentation_shows_its_own_figures_and_both_units() -> None:
    other = {"unit": "an owner of at most 9 slices", "epsilon": 31.0, "delta": 1e-5, "why": "by PLD"}
    text = card(
        report_fixtures.certificate(other_units=[other], data={"source": "liver"}),
        metrics={"final": {"dice": 0.8, "iou": 0.7}},
        config={**CONFIG, "task": "segmentation"},
    )
    assert "pipeline_tag: image-segmentation" in front_matter(text)
    assert "- dice" in front_matter(text)
    assert "For an owner of at most 9 slices: epsilon 31." in text


@pytest.mark.parametrize("name", ['x"\nlicense: mit', "<script>alert(1)</script>", "---", "a\x1b[31m", "- a: b", "`|`"])
def test_a_hostile_name_stays_a_name(name: str) -> None:
    plain, text = card(), card(report_fixtures.certificate(data={"source": name}), config={**CONFIG, "name": name})
    assert len(front_matter(text)) == len(front_matter(plain))
    assert "license: mit" not in front_matter(text)
    assert "<script>" not in text.split("---\n", 2)[2]
    assert "\x1b" not in text


SHAPED = {"source": "mnist", "image_shape": [3, 32, 48], "class_names": ["a", "b"]}


def test_the_card_shows_how_to_use_an_export_without_dpvision() -> None:
    text = card(report_fixtures.certificate(data=SHAPED))
    assert "## Use it without dpvision" in text
    assert 'convert("RGB"), (48, 32), ' in text  # Pillow takes the width first
    assert "reshape(1, 32, 48, 3)" in text
    masks = card(report_fixtures.certificate(data=SHAPED), config={**CONFIG, "task": "segmentation"})
    assert "[0].argmax(0))" in masks
    own = card(report_fixtures.certificate(data=SHAPED), config={**CONFIG, "model": {"name": "my.py:make"}})
    assert "--to onnx --output model.onnx --model my.py:make" in own


@pytest.mark.parametrize("shape", [None, [3, 32], [2, 8, 8], [1, 8, "`x`"], [1, 0, 8], [True, 8, 8]])
def test_a_model_that_can_not_be_exported_shows_no_such_lines(shape: Any) -> None:
    certificate = report_fixtures.certificate(data={**SHAPED, "image_shape": shape or []})
    assert "without dpvision" not in card(certificate)
    assert "without dpvision" not in card(
        report_fixtures.certificate(data=SHAPED), config={**CONFIG, "task": "own loop"}
    )


def test_the_card_of_an_older_release_is_known_too() -> None:
    certificate = report_fixtures.certificate(data=SHAPED)
    new, short, old = known_model_cards(certificate, metrics=METRICS, config=CONFIG)
    assert new == card(certificate)
    before, _, rest = new.partition("## Use it without dpvision")
    assert old == before + rest[rest.index("## Figures") :]
    assert 'ImageOps.fit(Image.open("image.png").convert("RGB"), (48, 32), Image.Resampling.BILINEAR)' in short
    assert len(short) < len(new)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("window", [None, (-160.0, 2400.0)])
def test_the_lines_of_the_card_prepare_images_as_predict_does(
    tmp_path: Path, channels: int, window: tuple[float, float] | None
) -> None:
    certificate = report_fixtures.certificate(data={**SHAPED, "image_shape": [channels, 12, 9]})
    data = {"data": {"source": "scans", "window": None if window is None else list(window)}}
    text = card(certificate, config={**CONFIG, **data})
    block = text.partition("```python\n")[2].partition("```")[0]
    lines = [line for line in block.splitlines() if not line.startswith(("session", "print", "import"))]
    for path in write_unusual_images(tmp_path):
        if window is not None and path.name != "sixteen.png":
            continue  # refused by predict: a window is for 16 bits
        names: dict[str, Any] = {"np": np}
        exec("\n".join(lines).replace('"image.png"', repr(str(path))), names)  # noqa: S102 - our own lines
        expected = decode(path, image_shape=(channels, 12, 9), window=window)
        np.testing.assert_array_equal(names["pixels"][0], expected, err_msg=path.name)
