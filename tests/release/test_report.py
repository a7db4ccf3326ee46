"""The page about a run: true, readable, harmless, and made from public files alone."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import report_fixtures as made_up
from dpvision.accounting import Profile, guarantee, true_positive_bound
from dpvision.errors import DPVisionError
from dpvision.privacy.mechanism import Adjacency, Event
from dpvision.release import report_words
from dpvision.release.report_axes import ticks
from dpvision.release.report_facts import checked_certificate
from dpvision.release.report_markup import element, visible
from dpvision.release.report_page import write_report
from dpvision.release.report_terminal import figures_of, summary_lines
from dpvision.release.report_words import SPACE
from dpvision.release.statements import proved_profile
from report_page import Page


def page_of(folder: Path, **files: dict[str, Any] | None) -> Page:
    return Page(write_report(made_up.write_run(folder, **files)).read_text())


def test_the_page_says_accuracy_epsilon_delta_and_unit(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run").text
    assert "98.14 % accuracy at ε = 2.93, δ = 10−5" in text
    assert "each picture" in text
    assert "60,000 pictures in the training data" in text
    assert "by RDP, as most papers count, 3.19" in text


def test_the_page_shows_everything_that_an_auditor_needs(tmp_path: Path) -> None:
    certificate = made_up.certificate()
    text = page_of(tmp_path / "run", certificate=certificate).text
    for value in (certificate["ledger"]["head"], certificate["weights_sha256"], certificate["config_sha256"]):
        assert value in text
    assert "dpvision verify certificate.json" in text
    assert "Training step" in text
    assert all(
        report_words.sentence(entry["what"]) in text and entry["how"] in text for entry in certificate["declared"]
    )
    assert all(report_words.sentence(entry) in text for entry in certificate["not_covered"])
    assert "dp-accounting" in text
    assert "optimizer.learning_rate" in text


def test_the_page_is_complete_in_itself_and_runs_nothing(tmp_path: Path) -> None:
    source = write_report(made_up.write_run(tmp_path / "run")).read_text()
    page = Page(source)
    assert not {"script", "link", "iframe", "object", "embed", "img", "base", "form", "a"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] in {"src", "href", "srcset", "action"} or a[1].startswith("on")]
    assert "url(" not in source
    assert "@import" not in source
    assert "http" not in source.replace("http-equiv", "")
    policies = [value for tag, name, value in page.attributes if tag == "meta" and name == "content"]
    assert any("default-src 'none'" in value for value in policies)


def test_equal_files_give_equal_bytes(tmp_path: Path) -> None:
    first = write_report(made_up.write_run(tmp_path / "a" / "run")).read_bytes()
    assert write_report(made_up.write_run(tmp_path / "b" / "run")).read_bytes() == first


def test_only_public_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_up.write_run(tmp_path / "run")
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
    "x" * 9000,
)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path, name: str) -> None:
    plain_tags = set(page_of(tmp_path / "plain").tags)
    metrics = made_up.metrics()
    metrics["final"] |= {"per_class": {name: 0.5, "b": 0.9}, "per_class_count": {name: 10, "b": 10}}
    metrics["final"]["evaluated_on"] = name
    certificate = made_up.certificate(
        privacy_unit=name,
        declared=[{"what": name, "how": name}],
        not_covered=[name],
        stamps=[name],
        for_release=False,
        data={name: {name: name}},
        software={name: name},
    )
    config = made_up.config(name=name, model={"name": name}, data={"source": name})
    page = page_of(tmp_path / "run", certificate=certificate, metrics=metrics, config=config)
    assert set(page.tags) <= plain_tags
    assert not [attribute for attribute in page.attributes if attribute[1].startswith("on") or attribute[1] == "src"]
    assert visible(name)[:200] in page.text
    assert "\u202e" not in page.text
    assert "\x1b" not in page.text


@given(st.text())
def test_no_text_escapes_its_element(text: str) -> None:
    page = Page(element("p", element("b", text, title=text), text))
    assert page.tags == ["p", "b"]
    assert {name for _, name, _ in page.attributes} == {"title"}
    assert "".join(page.pieces) == 2 * visible(text)


def test_a_run_that_is_not_for_release_is_stamped_with_its_reasons(tmp_path: Path) -> None:
    reasons = ["hand-seeded key", "somebody moved a weight"]
    page = page_of(tmp_path / "run", certificate=made_up.certificate(for_release=False, stamps=reasons))
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
    text = page_of(tmp_path / "run", certificate=made_up.certificate(**changes)).text
    assert "Not for release" in text


def test_a_good_run_has_no_stamp(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run").text
    assert "ot for release" not in text
    assert "NOT FOR RELEASE" not in text


def test_a_run_without_privacy_claims_nothing(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run", certificate=made_up.without_privacy()).text
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


def test_one_point_a_flat_curve_and_a_curve_from_zero_can_be_drawn(tmp_path: Path) -> None:
    for index, curve in enumerate(
        (
            [{"step": 0, "epsilon": 0.0, "accuracy": 0.0}],
            [{"step": 9, "epsilon": 2.9, "accuracy": 1.0}],
            [{"step": step, "epsilon": 1e-9 * step, "accuracy": 0.5} for step in range(3)],
        )
    ):
        page = page_of(tmp_path / str(index), metrics=made_up.metrics(curve=curve))
        drawn = " ".join(value for _, name, value in page.attributes if name in {"d", "cx", "cy", "x", "y"})
        assert "nan" not in drawn
        assert "inf" not in drawn


def test_the_worst_class_comes_first_and_is_marked(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    assert "Worst is 9 with 96.9 %, best is 1 with 99.4 %: 2.4 percentage points apart." in page.text.replace(
        SPACE, " "
    )
    kinds = [value for _, name, value in page.attributes if name == "class" and value in {"bar", "bar worst"}]
    assert kinds == ["bar worst"] + ["bar"] * 9


def test_many_classes_are_folded_and_none_is_lost(tmp_path: Path) -> None:
    metrics = made_up.metrics()
    metrics["final"]["per_class"] = {f"class-{index:03}": index / 200 for index in range(200)} | {"nobody": None}
    metrics["final"]["per_class_count"] = {f"class-{index:03}": 50 for index in range(200)} | {"nobody": 0}
    text = page_of(tmp_path / "run", metrics=metrics).text
    assert "180 classes in between" in text
    assert all(text.count(f"class-{index:03}") >= 1 for index in range(200))
    assert "No test pictures: nobody." in text


def test_the_report_becomes_part_of_the_release(tmp_path: Path) -> None:
    run = made_up.write_run(tmp_path / "run")
    path = write_report(run)
    assert path == run / "release" / "report.html"
    assert "report.html" in json.loads((run / "release" / "manifest.json").read_text())


def test_a_received_release_is_left_as_it_is(tmp_path: Path) -> None:
    run = made_up.write_run(tmp_path / "run")
    (run / "private").rmdir()
    before = {path.name: path.read_bytes() for path in (run / "release").iterdir()}
    with pytest.raises(DPVisionError, match="--output"):
        write_report(run)
    assert write_report(run, output=tmp_path / "page.html").is_file()
    assert {path.name: path.read_bytes() for path in (run / "release").iterdir()} == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("certificate", b"{"),
        ("certificate", b"[]"),
        ("certificate", b"\xff\xfe\x00"),
        ("certificate", b"[" * 100_000),
        ("certificate", b'{"format": 2}'),
        ("certificate", json.dumps(made_up.certificate(epsilon=-1.0)).encode()),
        ("certificate", json.dumps(made_up.certificate(epsilon=math.nan)).encode()),
        ("certificate", json.dumps(made_up.certificate(for_release="yes")).encode()),
        ("certificate", json.dumps(made_up.certificate(charged="everything")).encode()),
        ("certificate", json.dumps(made_up.certificate(privacy_unit="\ud800")).encode()),
        ("metrics", json.dumps({"final": {"accuracy": 7}}).encode()),
        ("metrics", json.dumps({"curve": [{"step": 1}]}).encode()),
        ("config", b"nonsense"),
    ],
)
def test_a_broken_file_is_one_line_and_leaves_nothing_behind(tmp_path: Path, name: str, content: bytes) -> None:
    run = made_up.write_run(tmp_path / "run")
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
    assert report_words.epsilon_text(2.93) == "2.93"
    assert report_words.epsilon_text(2.9300001) == "2.94"
    assert report_words.epsilon_text(0.0) == "0.000"
    assert report_words.bound_percent(0.05401) == f"5.5{SPACE}%"
    assert report_words.bound_percent(0.99999) == f"100{SPACE}%"
    assert report_words.power_of_ten(1e-5) == ("1", -5)
    assert report_words.power_of_ten(3.11e-6) == ("3.2", -6)
    assert report_words.power_of_ten(9.99e-6) == ("1", -5)


@given(st.floats(min_value=0, max_value=50), st.floats(min_value=1e-12, max_value=0.5))
def test_shown_epsilon_and_delta_are_never_below_the_true_ones(epsilon: float, delta: float) -> None:
    assert float(report_words.epsilon_text(epsilon)) >= epsilon
    factor, exponent = report_words.power_of_ten(delta)
    assert float(f"{factor}e{exponent}") >= delta


def test_charges_sharpen_the_bound_only_when_they_give_the_stated_epsilon() -> None:
    def bound(**changes: Any) -> float:
        certificate = checked_certificate(made_up.certificate(**changes))
        return true_positive_bound(proved_profile(certificate), false_positive_rate=0.01)

    pairs = [(p["epsilon"], p["delta"]) for p in made_up.certificate()["curve"]]
    stated_only = true_positive_bound(Profile.from_pairs(pairs), false_positive_rate=0.01)
    assert 0.01 < bound() < 0.06
    assert bound(charged=[]) == stated_only
    few = [{"purpose": "training step", "sample_rate": 0.1, "noise_multiplier": 2.997, "count": 4}]
    assert bound(charged=few) == stated_only
    absurd = [{"purpose": "training step", "sample_rate": 1.0, "noise_multiplier": 1e-200, "count": 4}]
    assert bound(charged=absurd) == stated_only


def test_the_bound_knows_which_data_are_neighbours() -> None:
    """Replacing a unit moves a sum by twice as much as removing it, so an attacker is left with more."""
    charges = [(Event(sample_rate=0.1, noise_multiplier=2.997), 400)]

    def bound(adjacency: Adjacency) -> float:
        epsilon = guarantee(charges, delta=1e-5, adjacency=adjacency).epsilon
        certificate = made_up.certificate(adjacency=adjacency, epsilon=epsilon, curve=[])
        return true_positive_bound(proved_profile(checked_certificate(certificate)), false_positive_rate=0.01)

    assert bound("replace_one") > 1.5 * bound("add_remove")


def test_a_delta_that_says_nothing_is_called_out(tmp_path: Path) -> None:
    large = made_up.certificate(delta=1e-4, curve=[])
    assert "Delta is not below 1/60,000" in page_of(tmp_path / "run", certificate=large).text
    assert "Delta is not below" not in page_of(tmp_path / "good").text


def test_an_epsilon_that_excludes_nothing_is_called_so(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run", certificate=made_up.certificate(epsilon=12.0, epsilon_rdp=13.0, curve=[])).text
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
    certificate = made_up.certificate(privacy_unit="patient", adjacency=adjacency)
    text = page_of(tmp_path / "run", certificate=certificate).text
    assert phrase in text
    assert "each patient with all of its pictures" in text
    assert "each picture" not in text


def test_the_terminal_gets_accuracy_epsilon_delta_and_their_meaning() -> None:
    assert summary_lines(made_up.certificate(), made_up.metrics()) == [
        "accuracy  98.14 %  (the test split of mnist, 10,000 pictures, raw weights)",
        "worst     96.9 %  (class 9)",
        "epsilon   2.93  (proved upper bound, one example added or removed)",
        "delta     1e-05",
        "meaning   an attack that wrongly accuses 1 % of outsiders finds at most 5.2 % of the pictures",
    ]


def test_the_terminal_hears_of_missing_privacy_and_hostile_names() -> None:
    metrics = made_up.metrics()
    metrics["final"]["per_class"] = {"\x1b[31m": 0.1, "b": 0.2}
    lines = summary_lines(made_up.without_privacy(), metrics)
    assert "\\u001b" in lines[1]
    assert lines[-2:] == [
        "epsilon   none: trained without privacy, no guarantee",
        "NOT FOR RELEASE: trained without privacy: no guarantee",
    ]
    assert summary_lines(made_up.certificate(), None)[0] == "accuracy  not measured: no public test data"


def run_command(*arguments: str) -> Any:
    from dpvision.cli.report_command import report

    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_writes_the_page_and_prints_its_place(tmp_path: Path) -> None:
    run = made_up.write_run(tmp_path / "run")
    done = run_command(str(run))
    assert done.exit_code == 0
    assert str(run / "release" / "report.html") in done.stdout
    done = run_command(str(run), "--output", str(tmp_path / "page.html"), "--json")
    figures = json.loads(done.stdout)
    assert figures["report"] == str(tmp_path / "page.html")
    assert figures["epsilon"] == made_up.certificate()["epsilon"]
    assert figures == {"report": figures["report"], **figures_of(run)}


def test_the_command_ends_with_one_line_and_code_2_for_no_run(tmp_path: Path) -> None:
    done = run_command(str(tmp_path))
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.09, 0.11), (0.0, 2.93), (0.0, 1e-9), (0.0, 4e5)])
def test_axis_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high, about=5)
    assert 2 <= len(found) <= 8
    assert all(low - 1e-9 * high <= value <= high * (1 + 1e-9) for value in found)
