"""The report of a run: true, readable, harmless, and made from public files only."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save
from typer.testing import CliRunner

import report_fixtures as fixtures
from dpvision.accounting import Profile, guarantee, true_positive_bound
from dpvision.errors import ArgumentError, DPVisionError
from dpvision.privacy.mechanism import Adjacency, Event
from dpvision.release import report
from dpvision.release.build import proved_profile
from dpvision.release.charts import PREDICTION, TRUTH
from dpvision.release.report import SPACE, figures_of, summary_lines, verdicts_of, visible, write_report
from dpvision.release.run_facts import checked_certificate
from dpvision.release.statements import HELD_OUT, TEST_SPLIT
from dpvision.storage.run_folder import EXAMPLES, examples_bytes, parse_examples
from report_fixtures import example
from report_page import Page

GOLDEN = Path(__file__).with_name("report_golden.txt")
LOADING = {"script", "link", "iframe", "object", "embed", "base", "form", "a"}


def page_of(folder: Path, **files: dict[str, Any] | None) -> Page:
    return Page(write_report(fixtures.write_run(folder, **files)).read_text())


def mask_page(folder: Path, **files: Any) -> Page:
    return Page(write_report(fixtures.write_mask_run(folder, **files)).read_text())


def sources(page: Page) -> list[str]:
    return [value for tag, name, value in page.attributes if tag == "img" and name == "src"]


def test_the_text_of_the_page_is_the_golden_one(tmp_path: Path) -> None:
    """If it differs on purpose, read the difference and write the new text to report_golden.txt."""
    pieces = page_of(tmp_path / "run").pieces
    text = "\n".join(line for line in (re.sub(r"\s+", " ", piece).strip() for piece in pieces) if line) + "\n"
    assert text == GOLDEN.read_text()


def test_the_page_shows_everything_that_an_auditor_needs(tmp_path: Path) -> None:
    certificate = fixtures.certificate()
    text = page_of(tmp_path / "run", certificate=certificate).text
    for value in (certificate["ledger"]["head"], certificate["weights_sha256"], certificate["config_sha256"]):
        assert value in text
    assert all(report.sentence(entry["what"]) in text and entry["how"] in text for entry in certificate["declared"])
    assert all(report.sentence(entry) in text for entry in certificate["not_covered"])


def test_the_page_is_complete_in_itself_and_runs_nothing(tmp_path: Path) -> None:
    for source in (
        write_report(fixtures.write_run(tmp_path / "run")).read_text(),
        write_report(fixtures.write_mask_run(tmp_path / "masks", examples=[example()])).read_text(),
    ):
        page = Page(source)
        assert not LOADING & set(page.tags)
        assert not [a for a in page.attributes if a[1] in {"srcset", "action"} or a[1].startswith("on")]
        assert all(value.startswith("#") for _, name, value in page.attributes if name == "href")
        assert all(source.startswith("data:image/png;base64,") for source in sources(page))
        assert not [a for a in page.attributes if a[1] == "src" and a[0] != "img"]
        assert "url(" not in source
        assert "@import" not in source
        assert "http" not in source.replace("http-equiv", "")
        policies = [value for tag, name, value in page.attributes if tag == "meta" and name == "content"]
        assert any("default-src 'none'; img-src data:;" in value for value in policies)


def test_equal_files_give_equal_bytes(tmp_path: Path) -> None:
    for write in (fixtures.write_run, lambda folder: fixtures.write_mask_run(folder, examples=[example()])):
        first, second = (write_report(write(tmp_path / name / "run")).read_bytes() for name in "ab")
        assert first == second


def test_only_public_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fixtures.write_run(tmp_path / "run")
    (run / "private" / "key.json").write_text("SECRET-KEY")
    (run / "private" / "unsafe_metrics.json").write_text('{"train_accuracy": 0.123456}')
    opened: set[str] = set()
    real_open = io.open

    def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened.add(str(file))
        return real_open(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", watched)
    source = write_report(run, output=tmp_path / "page.html").read_text()
    monkeypatch.undo()
    inside = {Path(name).relative_to(run).as_posix() for name in opened if name.startswith(str(run))}
    assert inside == {"release/certificate.json", "release/metrics.json", "release/config.json"}
    assert "SECRET-KEY" not in source
    assert "123456" not in source


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><svg onload=alert(1)>",
    "&lt;b&gt; &amp;",
    "\u202egnp.exe",
    "\x00\x1b[31mred",
    "{{ 7 * 7 }}{% raise %}",
    "x" * 9000,
)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path, name: str) -> None:
    plain_tags = set(page_of(tmp_path / "plain").tags)
    metrics = fixtures.metrics()
    metrics["final"] |= {"per_class": {name: 0.5, "b": 0.9}, "per_class_count": {name: 10, "b": 10}}
    metrics["final"]["evaluated_on"] = name
    certificate = fixtures.certificate(
        privacy_unit=name,
        declared=[{"what": name, "how": name}],
        not_covered=[name],
        stamps=[name],
        for_release=False,
        data={name: {name: name}},
        software={name: name},
    )
    config = fixtures.config(name=name, model={"name": name}, data={"source": name})
    page = page_of(tmp_path / "run", certificate=certificate, metrics=metrics, config=config)
    assert set(page.tags) <= plain_tags
    assert not [attribute for attribute in page.attributes if attribute[1].startswith("on") or attribute[1] == "src"]
    assert visible(name)[:200] in page.text
    assert "\u202e" not in page.text
    assert "\x1b" not in page.text


@given(st.text())
def test_no_text_escapes_its_element(text: str) -> None:
    template = report.environment().from_string('<p><b title="{{ text }}">{{ text }}</b>{{ text }}</p>')
    page = Page(template.render(text=text))
    assert page.tags == ["p", "b"]
    assert {name for _, name, _ in page.attributes} == {"title"}
    assert "".join(page.pieces) == 2 * visible(text)


@pytest.mark.parametrize("owner", [*HOSTILE[:2], "\x1b[31m\u202e", None])
def test_hostile_owners_are_shown_and_do_nothing(tmp_path: Path, owner: str | None) -> None:
    metrics = fixtures.mask_metrics(per_patient={str(owner): 0.5, "b": 0.7})
    page = mask_page(tmp_path / "run", examples=[example(owner=owner)], metrics=metrics)
    assert len(sources(page)) == 1
    assert "script" not in page.tags
    assert not [attribute for attribute in page.attributes if attribute[1].startswith("on")]
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text


def test_a_run_that_is_not_for_release_is_stamped_with_its_reasons(tmp_path: Path) -> None:
    reasons = ["hand-seeded key", "somebody moved a weight"]
    page = page_of(tmp_path / "run", certificate=fixtures.certificate(for_release=False, stamps=reasons))
    assert page.text.index("Not for release") < page.text.index("accuracy at")
    assert all(reason in page.text for reason in reasons)
    assert "What is guaranteed" not in page.text
    assert "NOT FOR RELEASE:" in page.text  # the window's title


@pytest.mark.parametrize(
    "changes",
    [
        {"for_release": True, "stamps": ["a reason"]},
        {"for_release": False, "stamps": []},
        {"for_release": True, "stamps": [], "epsilon": None},
    ],
)
def test_in_doubt_a_run_is_stamped(tmp_path: Path, changes: dict[str, Any]) -> None:
    text = page_of(tmp_path / "run", certificate=fixtures.certificate(**changes)).text
    assert "Not for release" in text


def test_a_good_run_has_no_stamp(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run").text
    assert "ot for release" not in text
    assert "NOT FOR RELEASE" not in text


def test_a_run_without_privacy_claims_nothing(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run", certificate=fixtures.without_privacy()).text
    assert "98.14 % accuracy without privacy" in text
    assert "trained without privacy: no guarantee" in text
    assert "ε =" not in text
    assert "Members recognised" not in text


def test_missing_metrics_and_settings_leave_a_page_that_says_so(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run", metrics=None, config=None).text
    assert "No accuracy is stated" in text
    assert "ε = 2.93, δ = 10−5" in text
    unfinished = {"curve": [], "final": {"evaluated_on": "digits", "weights": "raw"}, "train_seconds": 0.0}
    assert "No accuracy is stated" in page_of(tmp_path / "other", metrics=unfinished).text


def test_the_worst_class_comes_first_and_is_marked(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    assert "Worst is 9 with 96.9 %, best is 1 with 99.4 %: 2.4 percentage points apart." in page.text.replace(
        SPACE, " "
    )
    kinds = [value for _, name, value in page.attributes if name == "class" and value in {"bar", "bar worst"}]
    assert kinds == ["bar worst"] + ["bar"] * 9


def test_many_classes_are_folded_and_none_is_lost(tmp_path: Path) -> None:
    metrics = fixtures.metrics()
    metrics["final"]["per_class"] = {f"class-{index:03}": index / 200 for index in range(200)} | {"nobody": None}
    metrics["final"]["per_class_count"] = {f"class-{index:03}": 50 for index in range(200)} | {"nobody": 0}
    text = page_of(tmp_path / "run", metrics=metrics).text
    assert "180 classes in between" in text
    assert all(text.count(f"class-{index:03}") >= 1 for index in range(200))
    assert "No test images: nobody." in text


def test_the_report_becomes_part_of_the_release(tmp_path: Path) -> None:
    run = fixtures.write_run(tmp_path / "run")
    path = write_report(run)
    assert path == run / "release" / "report.html"
    assert "report.html" in json.loads((run / "release" / "manifest.json").read_text())


def test_a_received_release_is_left_as_it_is(tmp_path: Path) -> None:
    run = fixtures.write_run(tmp_path / "run")
    (run / "private").rmdir()
    before = {path.name: path.read_bytes() for path in (run / "release").iterdir()}
    with pytest.raises(DPVisionError, match="--output"):
        write_report(run)
    assert write_report(run, output=tmp_path / "page.html").is_file()
    assert {path.name: path.read_bytes() for path in (run / "release").iterdir()} == before


@pytest.mark.parametrize("kind", ["image", "pipe", "device"])
def test_a_page_replaces_nothing_but_a_page(tmp_path: Path, kind: str) -> None:
    run = fixtures.write_run(tmp_path / "run")
    place = Path("/dev/never-made") if kind == "device" else tmp_path / "place"
    if kind == "image":
        place.write_bytes(b"\x89PNG\r\n")
    elif kind == "pipe":
        os.mkfifo(place)
    with pytest.raises(ArgumentError, match="no page of HTML" if kind == "image" else "a device or a pipe"):
        write_report(run, output=place)
    assert not place.exists() or not place.is_file() or place.read_bytes() == b"\x89PNG\r\n"
    page = tmp_path / "page.html"
    assert write_report(run, output=page) == write_report(run, output=page)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("certificate", b"{"),
        ("certificate", b"[]"),
        ("certificate", b"\xff\xfe\x00"),
        ("certificate", b"[" * 100_000),
        ("certificate", b'{"format": 2}'),
        ("certificate", json.dumps(fixtures.certificate(epsilon=-1.0)).encode()),
        ("certificate", json.dumps(fixtures.certificate(epsilon=math.nan)).encode()),
        ("certificate", json.dumps(fixtures.certificate(for_release="yes")).encode()),
        ("certificate", json.dumps(fixtures.certificate(charged="everything")).encode()),
        ("certificate", json.dumps(fixtures.certificate(privacy_unit="\ud800")).encode()),
        ("metrics", json.dumps({"final": {"accuracy": 7}}).encode()),
        ("metrics", json.dumps({"curve": [{"step": 1}]}).encode()),
        *(
            ("metrics", json.dumps(fixtures.mask_metrics(**changes)).encode())
            for changes in ({"dice": 1.5}, {"dice": None}, {"per_class": {"a": "half"}}, {"per_patient": [1]})
        ),
        ("config", b"nonsense"),
    ],
)
def test_a_broken_file_is_one_line_and_leaves_nothing_behind(tmp_path: Path, name: str, content: bytes) -> None:
    run = fixtures.write_run(tmp_path / "run")
    (run / "release" / f"{name}.json").write_bytes(content)
    with pytest.raises(DPVisionError) as caught:
        write_report(run)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (run / "release" / "report.html").exists()


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", Path(__file__)):
        with pytest.raises(DPVisionError, match="is not a finished run"):
            write_report(path)


def test_bounds_are_rounded_up_and_never_down() -> None:
    assert report.epsilon_text(2.93) == "2.93"
    assert report.epsilon_text(2.9300001) == "2.94"
    assert report.epsilon_text(0.0) == "0.000"
    assert report.bound_percent(0.05401) == f"5.5{SPACE}%"
    assert report.bound_percent(0.99999) == f"100{SPACE}%"
    assert report.power(1e-5) == report.power(9.99e-6) == "10<sup>−5</sup>"
    assert report.power(3.11e-6) == "3.2 · 10<sup>−6</sup>"


@given(st.floats(min_value=0, max_value=50), st.floats(min_value=1e-12, max_value=0.5))
def test_shown_epsilon_and_delta_are_never_below_the_true_ones(epsilon: float, delta: float) -> None:
    assert float(report.epsilon_text(epsilon)) >= epsilon
    factor, exponent = re.fullmatch(r"(?:(.+) · )?10<sup>−(\d+)</sup>", report.power(delta)).groups()
    assert float(f"{factor or 1}e-{exponent}") >= delta


def bound(**changes: Any) -> float:
    profile = proved_profile(checked_certificate(fixtures.certificate(**changes)))
    return true_positive_bound(profile, false_positive_rate=0.01)


def test_the_bound_on_attacks_is_the_one_that_the_certificate_states() -> None:
    stated = fixtures.certificate()["attack_success"][1]
    assert stated["false_positive_rate"] == 0.01
    assert bound() == pytest.approx(stated["true_positive_rate"], rel=1e-4)


def test_charges_sharpen_the_bound_only_when_they_give_the_stated_epsilon() -> None:
    pairs = [(point["epsilon"], point["delta"]) for point in fixtures.certificate()["curve"]]
    stated_only = true_positive_bound(Profile.from_pairs(pairs), false_positive_rate=0.01)
    assert bound(charged=[]) == stated_only
    few = [{"purpose": "training step", "sample_rate": 0.1, "noise_multiplier": 2.997, "count": 4}]
    assert bound(charged=few) == stated_only
    absurd = [{"purpose": "training step", "sample_rate": 1.0, "noise_multiplier": 1e-200, "count": 4}]
    assert bound(charged=absurd) == stated_only


def test_the_bound_knows_which_data_are_neighbours() -> None:
    """Replacing a unit moves a sum by twice as much as removing it, so an attacker is left with more."""
    charges = [(Event(sample_rate=0.1, noise_multiplier=2.997), 400)]

    def of(adjacency: Adjacency) -> float:
        epsilon = guarantee(charges, delta=1e-5, adjacency=adjacency).epsilon
        return bound(adjacency=adjacency, epsilon=epsilon, curve=[])

    assert of("replace_one") > 1.5 * of("add_remove")


def test_a_delta_that_says_nothing_is_called_out(tmp_path: Path) -> None:
    large = fixtures.certificate(delta=1e-4, curve=[])
    assert "Delta is not below 1/60,000" in page_of(tmp_path / "run", certificate=large).text
    assert "Delta is not below" not in page_of(tmp_path / "good").text


def test_an_epsilon_that_excludes_nothing_is_called_so(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run", certificate=fixtures.certificate(epsilon=12.0, epsilon_rdp=13.0, curve=[])).text
    assert "“weak to none”" in text
    assert "excludes hardly any attack" in text


@pytest.mark.parametrize(
    ("adjacency", "phrase"),
    [
        ("add_remove", "with and without this patient"),
        ("replace_one", "with this patient and with any other patient in its place"),
        ("zero_out", "with this patient and with its contribution left out"),
    ],
)
def test_unit_and_adjacency_are_put_into_words(tmp_path: Path, adjacency: str, phrase: str) -> None:
    certificate = fixtures.certificate(privacy_unit="patient", adjacency=adjacency)
    text = page_of(tmp_path / "run", certificate=certificate).text
    assert phrase in text
    assert "each patient with all of its images" in text
    assert "each image" not in text


def test_a_slice_is_not_sold_as_a_patient(tmp_path: Path) -> None:
    text = mask_page(tmp_path / "slice", certificate=fixtures.mask_certificate(unit="slice")).text
    assert "each single slice" in text
    assert "not for one patient" in text
    whole = mask_page(tmp_path / "patient").text
    assert "each patient with all of its images" in whole
    assert "not for one patient" not in whole


def test_figures_for_other_units_stand_beside_the_guarantee(tmp_path: Path) -> None:
    others = [
        {"unit": "owner of at most 40 slices", "epsilon": 31.01001, "delta": 1e-5, "why": "a mixture of Gaussians"},
        {"unit": "owner of more", "epsilon": None, "delta": 1e-5, "why": "there is no end"},
    ]
    text = mask_page(tmp_path / "run", certificate=fixtures.mask_certificate(unit="slice", other_units=others)).text
    assert "Owner of at most 40 slices: ε = 31.02, δ = 10−5" in text
    assert "a mixture of Gaussians" in text
    assert "Owner of more: nothing is proved" in text


def test_the_page_says_dice_and_what_a_constant_mask_would_reach(tmp_path: Path) -> None:
    text = mask_page(tmp_path / "run").text
    assert "71.2 % Dice at ε = 2.93, δ = 10−5" in text
    assert "Dice over epsilon" in text
    assert "Dice, mean over patients71.3 %" in text
    assert "constant mask 53.1 %" in text
    assert "accuracy" not in text.lower().replace("pixel accuracy", "")
    assert "Dice" not in page_of(tmp_path / "classes").text


def test_patients_are_bars_worst_first_with_the_baseline_as_a_line(tmp_path: Path) -> None:
    page = mask_page(tmp_path / "run")
    assert page.text.index("p2") < page.text.index("p1") < page.text.index("p3")
    lines = [value for _, name, value in page.attributes if name == "class" and value == "constant"]
    assert len(lines) == len(fixtures.PATIENTS)


def test_several_classes_have_bars_of_their_own(tmp_path: Path) -> None:
    classes = {"liver": {"dice": 0.9, "iou": 0.8}, "tumour": {"dice": 0.3, "iou": 0.2}}
    text = mask_page(tmp_path / "run", metrics=fixtures.mask_metrics(per_class=classes)).text
    assert "Dice of each class" in text
    assert text.index("tumour") < text.index("liver 90.0")


def test_unknown_patients_leave_their_part_out(tmp_path: Path) -> None:
    changes = dict.fromkeys(("dice_per_patient", "iou_per_patient", "per_patient", "baseline_dice_per_patient"))
    text = mask_page(tmp_path / "run", metrics=fixtures.mask_metrics(**changes)).text
    assert "71.2 % Dice" in text
    assert "Dice of each patient" not in text
    assert "mean over patients" not in text


def test_examples_are_shown_by_rank_with_legend_and_dice(tmp_path: Path) -> None:
    ranks = [("best", 0.95), ("median", 0.7), ("worst", 0.04)]
    shown = [example(rank=rank, dice=dice) for rank, dice in ranks for _ in range(2)]
    page = mask_page(tmp_path / "run", examples=shown)
    assert len(sources(page)) == 6
    image = Image.open(io.BytesIO(base64.b64decode(sources(page)[0].partition(",")[2])))
    assert image.format == "PNG"
    places = [page.text.index(f"{rank} by Dice") for rank in ("Best", "Median", "Worst")]
    assert places == sorted(places)
    assert page.text.count("Dice 4.0 % · patient p1") == 2
    assert "truth: the mask that came with the image" in page.text
    labels = [value for tag, name, value in page.attributes if tag == "img" and name == "alt"]
    assert all("truth and prediction" in label for label in labels)


def test_the_style_sheet_knows_the_colours_of_the_drawing(tmp_path: Path) -> None:
    source = write_report(fixtures.write_mask_run(tmp_path / "run", examples=[example()])).read_text()
    for name, colour in (("truth", TRUTH), ("found", PREDICTION)):
        (rule,) = re.findall(rf"\.swatch\.{name}\{{([^}}]*)\}}", source)
        assert "#{:02x}{:02x}{:02x}".format(*colour) in rule


def test_without_the_declaration_no_image_is_even_opened(tmp_path: Path) -> None:
    run = fixtures.write_mask_run(tmp_path / "run", certificate=fixtures.mask_certificate(public=False))
    (run / "release" / EXAMPLES).write_bytes(b"would be refused if it were read")
    page = Page(write_report(run).read_text())
    assert sources(page) == []
    assert "No image is shown" in page.text
    assert "--test" in page.text


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
    run = fixtures.write_mask_run(tmp_path / "run")
    (run / "release" / EXAMPLES).write_bytes(content)
    with pytest.raises(DPVisionError) as caught:
        write_report(run)
    assert EXAMPLES in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (run / "release" / "report.html").exists()


def test_the_terminal_gets_accuracy_epsilon_delta_and_their_meaning() -> None:
    assert summary_lines(fixtures.certificate(), fixtures.metrics()) == [
        "accuracy  98.14 %  (the test split of mnist, 10,000 images, raw weights)",
        "worst     96.9 %  (class 9)",
        "epsilon   2.93  (proved upper bound, one example added or removed)",
        "delta     1e-05",
        "meaning   an attack that wrongly accuses 1 % of non-members finds at most 5.2 % of the images",
        "guarantee in order:  yes",
        "better than chance:  yes (98.14 %, 95 % interval 97.9 to 98.4 %; always 1: 11.35 %)",
    ]


def test_the_terminal_hears_of_missing_privacy_and_hostile_names() -> None:
    metrics = fixtures.metrics()
    metrics["final"]["per_class"] = {"\x1b[31m": 0.1, "b": 0.2}
    lines = summary_lines(fixtures.without_privacy(), metrics)
    assert "\\x1b" in lines[1]
    assert lines[2:4] == ["epsilon   none: trained without privacy, no guarantee", "guarantee in order:  no"]
    assert lines[-1:] == [
        "NOT FOR RELEASE: trained without privacy: no guarantee",
    ]
    assert summary_lines(fixtures.certificate(), None)[0] == "accuracy  not measured: no public test data"


def run_command(*arguments: str) -> Any:
    from dpvision.cli import app

    return CliRunner().invoke(app, ["report", *arguments])


def test_the_command_writes_the_page_and_prints_its_place(tmp_path: Path) -> None:
    run = fixtures.write_run(tmp_path / "run")
    done = run_command(str(run))
    assert done.exit_code == 0
    assert str(run / "release" / "report.html") in done.stdout
    done = run_command(str(run), "--output", str(tmp_path / "page.html"), "--json")
    figures = json.loads(done.stdout)
    assert figures["report"] == str(tmp_path / "page.html")
    assert figures["epsilon"] == fixtures.certificate()["epsilon"]
    assert figures == {"report": figures["report"], **figures_of(run)}


def test_the_command_ends_with_one_line_and_code_2_for_no_run(tmp_path: Path) -> None:
    done = run_command(str(tmp_path))
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_the_terminal_gets_dice_patients_and_baseline(tmp_path: Path) -> None:
    lines = summary_lines(fixtures.mask_certificate(), fixtures.mask_metrics())
    assert lines[:4] == [
        "dice      71.2 %  (liver test, declared public, 123 images, averaged weights)",
        "patients  71.3 %  (Dice of each patient, averaged)",
        "worst     43.0 %  (Dice of one patient)",
        "baseline  53.1 %  (Dice of the best constant mask)",
    ]
    figures = figures_of(fixtures.write_mask_run(tmp_path / "run"))
    assert (figures["dice"], figures["dice_per_patient"], figures["baseline_dice"]) == (0.7123, 0.7133, 0.5312)


def test_a_falling_curve_and_a_useless_model_are_named_on_page_and_terminal(tmp_path: Path) -> None:
    metrics = fixtures.metrics()
    metrics["curve"] = [
        {"step": 100, "epsilon": 0.9, "accuracy": 0.827},
        {"step": 400, "epsilon": 2.9, "accuracy": 0.48},
    ]
    metrics["final"] = {"accuracy": 0.48, "per_class": {"a": 0.4, "b": 0.56}, "per_class_count": {"a": 100, "b": 100}}
    text = page_of(tmp_path / "run", metrics=metrics).text
    lines = summary_lines(fixtures.certificate(), metrics)
    fall = "ccuracy was 82.7 % at epsilon 0.90 and ended at 48.0 %: lower --learning-rate, or train for fewer steps. A"
    assert fall in text.replace("\u00a0", " ")
    assert any(fall in line for line in lines)
    assert "Guarantee in order: yes" in text
    assert "Better than chance: no" in text
    assert "better than chance:  no (48.0 %, 95 % interval 41.2 to 54.9 %; always a: 50.0 %)" in lines
    found = verdicts_of(fixtures.certificate(), metrics)
    assert (found["guarantee_in_order"], found["better_than_chance"]) == (True, "no")


def test_another_threshold_is_named_for_two_classes_where_it_gains() -> None:
    point = {"rule": "youden", "positive": "b", "threshold": 0.7, "fitted_on": 100, "reported_on": 100}
    point |= {"sensitivity": 0.89, "specificity": 0.85}
    final = {"accuracy": 0.78, "balanced_accuracy": 0.78, "auc": 0.95, "operating_point": point}
    final |= {"per_class": {"a": 0.6, "b": 0.96}, "per_class_count": {"a": 150, "b": 150}}
    final["intervals"] = {"auc": [0.92, 0.97], "accuracy": [0.73, 0.82]}

    def note(**changed: Any) -> str:
        metrics = {**fixtures.metrics(), "curve": [], "final": {**final, **changed}}
        return " ".join(line for line in summary_lines(fixtures.certificate(), metrics) if line.startswith("note:"))

    assert "another threshold gives better answers, see dpvision evaluate --operating-point" in note()
    assert not note(balanced_accuracy=0.86)
    assert not note(intervals={"auc": [0.5, 0.97]})
    assert "another threshold may give" in note(
        accuracy=0.5, intervals={"auc": [0.6, 0.97], "accuracy": [0.4, 0.6]}, operating_point=None
    )
    assert not note(per_class={"a": 0.6, "b": 0.9, "c": 0.8}, per_class_count={"a": 150, "b": 150, "c": 100})


def test_a_model_no_better_than_chance_is_not_called_calibrated(tmp_path: Path) -> None:
    metrics = fixtures.metrics()
    metrics["final"] = {"accuracy": 0.48, "per_class": {"a": 0.4, "b": 0.56}, "per_class_count": {"a": 100, "b": 100}}
    assert "it is no better than always a" in page_of(tmp_path / "run", metrics=metrics).text


def test_dice_below_a_constant_mask_is_no_better_than_chance(tmp_path: Path) -> None:
    metrics = fixtures.mask_metrics(dice=0.26, baseline_dice=0.39)
    assert "Better than chance: no" in mask_page(tmp_path / "no", metrics=metrics).text
    metrics = fixtures.mask_metrics(intervals={"dice": [0.52, 0.8]})
    assert "Better than chance: cannot tell" in mask_page(tmp_path / "open", metrics=metrics).text
    metrics = fixtures.mask_metrics(intervals={"dice": [0.6, 0.8]})
    assert "Better than chance: yes" in mask_page(tmp_path / "yes", metrics=metrics).text


def test_a_non_private_baseline_is_shown_where_there_is_one(tmp_path: Path) -> None:
    metrics = fixtures.metrics(baseline={"accuracy": 0.991, "what": "the same model without noise"})
    text = page_of(tmp_path / "run", metrics=metrics).text
    assert "without privacy: the same model without noise" in text
    assert "99.10 %" in text.partition("What is guaranteed")[0]


def test_the_first_screen_says_how_far_single_answers_can_be_trusted(tmp_path: Path) -> None:
    def side(gap: float) -> dict[str, float]:
        return {"loss": 0.5, "overconfidence": gap}

    for gap, words in ((0.22, "too sure"), (-0.2, "not sure enough"), (0.03, "well calibrated")):
        heat = {"value": 4.6, "before": side(gap), "after": side(0.01), "fitted_on": 200, "reported_on": 200}
        values = fixtures.metrics()
        values["final"]["temperature"] = heat
        text = page_of(tmp_path / words, metrics=values).text
        assert "Can I trust it?" in text
        assert words in text.partition("What is guaranteed")[0]


def test_metrics_on_held_out_images_are_not_called_free_of_privacy_cost(tmp_path: Path) -> None:
    values = fixtures.certificate()
    how = f"10% of the units, {HELD_OUT}"
    values["declared"] = [*values["declared"], {"what": TEST_SPLIT, "how": how}]
    text = page_of(tmp_path / "run", certificate=values).text
    assert "no epsilon covers them" in text
    assert "cost no privacy" not in text
