"""The files of a release against each other and the ledger, after every hash was made to fit (PITFALLS 29, 30)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpvision.release.certificate_page import render_certificate_page
from dpvision.release.model_card import model_card
from dpvision.release.verify import verify
from dpvision.storage.files import file_sha256, json_bytes
from dpvision.training import train
from forged_releases import commit_again, mend_hashes
from tiny_runs import tiny_config, write_images

Values = dict[str, Any]
Change = Callable[[Values], Any]
FORMAT_2 = Path(__file__).with_name("format_2")
WHERE_MU_ENDS = " Beyond that epsilon mu proves nothing: only the curve does."


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a declared number of units, and one whose units and pixels were counted with noise."""
    place = tmp_path_factory.mktemp("finished")
    source = write_images(place / "pictures.npz")
    train(tiny_config(source, privacy={"target_epsilon": 40.0}), run=place / "declared")
    counted = {"num_units": None, "noise_multiplier": None, "target_epsilon": 20.0}
    pixels = {"normalisation": "released", "statistics_noise_multiplier": 9.0}
    train(tiny_config(source, privacy=counted, data=pixels), run=place / "counted")
    return place


@pytest.fixture
def release(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished / "declared" / "release", tmp_path / "release"))


def load(release: Path, name: str) -> Values:
    return json.loads((release / name).read_bytes())


def forge(release: Path, name: str, change: Change, *, pages: bool = True, committed: bool = True) -> None:
    """Change a file to deceive: every hash fits it and, unless told not to, every page and the ledger's last entry."""
    values = load(release, name)
    change(values)
    (release / name).write_bytes(json_bytes(values))
    certificate = {**load(release, "certificate.json"), "config_sha256": file_sha256(release / "config.json")}
    (release / "certificate.json").write_bytes(json_bytes(certificate))
    if committed:
        commit_again(release)
    certificate = load(release, "certificate.json")
    if pages:
        card = model_card(certificate, metrics=load(release, "metrics.json"), config=load(release, "config.json"))
        (release / "certificate.md").write_text(render_certificate_page(certificate))
        (release / "model_card.md").write_text(card)
    mend_hashes(release)


def put(value: Any, *path: str | int) -> Change:
    def change(values: Any) -> None:
        for part in path[:-1]:
            values = values[part]
        values[path[-1]] = value

    return change


def the_problem(release: Path) -> str:
    (problem,) = verify(release).problems
    return problem


def test_an_untouched_release_is_in_order_and_so_is_one_that_was_only_written_anew(finished: Path) -> None:
    for name in ("declared", "counted"):
        assert verify(finished / name).problems == ()
        copy = Path(shutil.copytree(finished / name / "release", finished / f"{name}-anew"))
        forge(copy, "config.json", lambda values: None)
        assert verify(copy).problems == ()


@pytest.mark.parametrize("name", sorted(path.name for path in FORMAT_2.iterdir()))
def test_a_release_of_format_2_verifies_with_its_own_sentences(tmp_path: Path, name: str) -> None:
    """Written by version 0.1.0 before format 3: never write these files again."""
    release = Path(shutil.copytree(FORMAT_2 / name, tmp_path / name))
    assert load(release, "certificate.json")["format"] == 2
    assert verify(release).problems == ()
    forge(release, "certificate.json", put(3, "format"))
    text = "\n".join(verify(release).problems)
    assert "image shape" in text
    assert "LESS" not in text  # the bounds are the same in both formats


def test_a_page_of_format_2_from_before_it_said_where_mu_ends_is_right(tmp_path: Path) -> None:
    release = Path(shutil.copytree(FORMAT_2 / "patients-column", tmp_path / "release"))
    path = release / "certificate.md"
    assert path.read_text().count(WHERE_MU_ENDS) == 1
    path.write_text(path.read_text().replace(WHERE_MU_ENDS, ""))
    mend_hashes(release)
    assert verify(release).ok


def test_a_page_of_format_3_says_where_mu_ends(release: Path) -> None:
    path = release / "certificate.md"
    path.write_text(path.read_text().replace(WHERE_MU_ENDS, ""))
    mend_hashes(release)
    assert "certificate.md does not say" in the_problem(release)


OTHER_SETTINGS: Values = {
    "enabled": False,
    "privacy_unit": "patient",
    "adjacency": "replace_one",
    "num_units": 61,
    "delta": 1e-9,
    "expected_batch_size": 2.0,
    "clip_norm": 0.1,
    "clipping": "automatic",
    "unit_norm": 0,
    "noise_multiplier": 9.9,
    "steps": 13,
    "target_epsilon": None,
    "most_rows_per_owner": 3,
}


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_every_setting_that_the_ledger_holds_too_is_compared(release: Path, name: str) -> None:
    forge(release, "config.json", put(OTHER_SETTINGS[name], "privacy", name))
    assert the_problem(release).startswith(f"config: privacy.{name} is {OTHER_SETTINGS[name]}, the ledger's ")


def test_a_setting_that_was_taken_out_is_named(release: Path) -> None:
    forge(release, "config.json", lambda values: values["privacy"].pop("steps"))
    assert the_problem(release) == "config: privacy.steps is None, the ledger's 12."


def test_whose_data_and_which_units_are_compared_too(release: Path) -> None:
    forge(release, "config.json", put("owners", "data", "units"))
    assert the_problem(release) == "config: data.units is owners, the ledger's rows."
    forge(release, "config.json", put("rows", "data", "units"))
    forge(release, "config.json", put("holidays.npz", "data", "source"))
    assert the_problem(release) == "config: the data are holidays.npz, the ledger's ['pictures.npz']."
    forge(release, "config.json", lambda values: values.pop("data"))
    assert the_problem(release).endswith("config.json has no section data.")


def test_noise_on_counts_and_pixels_is_what_was_charged(finished: Path, release: Path) -> None:
    forge(release, "config.json", put("released", "data", "normalisation"))
    expected = "config: it has noise for the normalisation statistics, and the ledger does not charge that."
    assert the_problem(release) == expected
    counted = Path(shutil.copytree(finished / "counted" / "release", release.parent / "counted"))
    for change, words in (
        (put(90.0, "data", "statistics_noise_multiplier"), "is 90.0, the ledger charges 1 × normalisation statistics"),
        (put("fixed", "data", "normalisation"), "is None, the ledger charges 1 × normalisation statistics at noise 9"),
        (put(None, "privacy", "count_noise_multiplier"), "is None, the ledger charges 1 × number of units at noise"),
    ):
        kept = (counted / "config.json").read_bytes()
        forge(counted, "config.json", change)
        assert words in the_problem(counted)
        forge(counted, "config.json", lambda values, kept=kept: values.update(json.loads(kept)))
    assert verify(counted).ok


PAGE_LIES = {
    "certificate.md": ("**For release.**", "**For release, and approved.**"),
    "model_card.md": ("- differential-privacy", "- differential-privacy\n- approved"),
}


@pytest.mark.parametrize("name", PAGE_LIES)
def test_a_page_that_says_something_else_is_named(release: Path, name: str) -> None:
    old, new = PAGE_LIES[name]
    text = (release / name).read_text()
    assert old in text
    for changed in (text.replace(old, new), text + "\n", "", "\x00" * 9, text.replace("psilon 1", "psilon 0.1")):
        if changed == text:
            continue
        (release / name).write_text(changed)
        mend_hashes(release)
        assert f"{name} does not say what" in the_problem(release)


def test_figures_that_only_the_card_has_or_has_not_are_named(release: Path) -> None:
    forge(release, "metrics.json", put(0.99, "final", "top5"), pages=False)
    problems = verify(release).problems
    assert len(problems) == 2
    assert any("model_card.md does not say what" in problem for problem in problems)
    assert "metrics: final top5 is 0.99, the last point of the curve has None." in problems


METRIC_LIES: dict[str, tuple[Change, str]] = {
    "final accuracy": (put(0.999, "final", "accuracy"), "final accuracy is 0.999, the last point of the curve has"),
    "final loss": (put(0.001, "final", "loss"), "final loss is 0.001"),
    "last accuracy": (put(0.999, "curve", -1, "accuracy"), "the last point of the curve has 0.999"),
    "a class that is easy": (put(0.0, "final", "per_class", "0"), "that of the classes is"),
    "a class with fewer pictures": (put(3, "final", "per_class_count", "0"), "30 images are counted, 23 by"),
    "a class that nobody knows": (put(0.5, "final", "per_class", "secret"), "values of single classes are not"),
    "no figures": (put([], "final"), "final metrics are not an object"),
    "raw accuracy": (put({"accuracy": 0.1}, "final", "raw_weights"), "final raw_weights is"),
    "no raw figures": (lambda values: values["final"].pop("raw_weights"), "final raw_weights is None"),
    "cheap first point": (put(0.01, "curve", 0, "epsilon"), "epsilon after step 4 is 0.01, the ledger gives"),
    "cheap last point": (put(0.01, "curve", -1, "epsilon"), "epsilon after step 12 is 0.01, the ledger gives"),
    "dear point": (put(99.0, "curve", 1, "epsilon"), "epsilon after step 8 is 99"),
    "no epsilon": (put(None, "curve", 0, "epsilon"), "has epsilons if and only if the run is private"),
    "epsilon is gone": (lambda values: values["curve"][0].pop("epsilon"), "no epsilon or no step after -1"),
    "a word for epsilon": (put("small", "curve", 0, "epsilon"), "no epsilon or no step after -1"),
    "one step twice": (put(4, "curve", 1, "step"), "no epsilon or no step after 4"),
    "half a step": (put(4.5, "curve", 0, "step"), "no epsilon or no step after -1"),
    "more steps than were charged": (put(10**12, "curve", -1, "step"), "continues after the 12 steps that are charged"),
    "no curve": (put({}, "curve"), "the curve is not a list"),
    "no points": (put([3], "curve"), "no epsilon or no step after -1"),
    "another task": (put("segmentation", "task"), "the task is segmentation, the configuration's classification"),
}


@pytest.mark.parametrize("name", METRIC_LIES)
def test_figures_that_contradict_the_ledger_or_each_other_are_named(release: Path, name: str) -> None:
    change, words = METRIC_LIES[name]
    forge(release, "metrics.json", change)
    assert any(words in problem for problem in verify(release).problems)


def test_a_long_curve_is_checked_from_its_last_point_backwards(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpvision.release.verify.MOST_POINTS", 1)
    forge(release, "metrics.json", put(0.01, "curve", 0, "epsilon"))
    assert verify(release).ok  # known: between the points that are computed anew nobody looks
    forge(release, "metrics.json", put(0.01, "curve", -1, "epsilon"))
    assert "epsilon after step 12" in the_problem(release)


@pytest.mark.parametrize("name", ["config.json", "metrics.json"])
def test_a_key_that_is_there_twice_and_a_bottomless_file_are_named(release: Path, name: str) -> None:
    content = (release / name).read_bytes()
    for changed in (
        content.replace(b'  "task":', b'  "task": "none",\n  "task":', 1),
        b'{"a":' * 600 + b"1" + b"}" * 600,
        b'{"a":' * 90_000,
        b"",
        b"[]",
    ):
        assert changed != content
        (release / name).write_bytes(changed)
        mend_hashes(release)
        assert any(f"{name} is not" in problem or "JSON" in problem for problem in verify(release).problems)
