"""What a release claims, and what it says that it does not (PITFALLS 12, 15, 20, 22, 24)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dpvision.accounting import (
    gaussian_dp,
    guarantee,
    mechanism_guarantee,
    owner_guarantee,
    privacy_profile,
    row_guarantee,
    true_positive_bound,
)
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.ledger import Entry, Ledger, read_ledger
from dpvision.privacy.mechanism import Event, Mechanism
from dpvision.release.build import ReleaseFacts, build_certificate, differing_facts
from dpvision.release.certificate_page import known_certificate_pages, render_certificate_page
from dpvision.release.schema import FORMAT, parse_certificate
from dpvision.release.statements import (
    COUNTED_UNITS,
    HAND_SEEDED,
    HELD_OUT,
    HELD_OUT_ENDINGS,
    NO_PRIVACY,
    OWN_TEST,
    TEST_SPLIT,
    VOLUME,
    WORDING,
)

MECHANISM = Mechanism(num_units=1000, expected_batch_size=100.0, clip_norm=0.5, noise_multiplier=1.5, steps=20)
DELTA = 1e-4
STATISTICS = Event(sample_rate=1.0, noise_multiplier=8.0, purpose="normalisation statistics")
FACTS = ReleaseFacts(
    weights_sha256="a" * 64, config_sha256="b" * 64, data={"source": "digits"}, software={"dpvision": "0.1.0"}
)


def ledger_of(
    folder: Path, *, steps: int = 20, mechanism: Mechanism = MECHANISM, delta: float | None = DELTA, **more: Any
) -> Ledger:
    header = {
        "run_id": "r1",
        "privacy_unit": mechanism.privacy_unit,
        "adjacency": mechanism.adjacency,
        "num_units": mechanism.num_units,
        "delta": delta,
        **more,
    }
    ledger = Ledger.create(folder / "ledger.jsonl", header)
    for step in range(steps):
        ledger.charge(mechanism.step_event, step=step)
    return ledger


def entries(folder: Path) -> tuple[Entry, ...]:
    return read_ledger(folder / "ledger.jsonl")


def certificate(folder: Path, **changes: Any) -> dict[str, Any]:
    arguments = {"ledger": entries(folder), "mechanism": MECHANISM, "hand_seeded": False, "release": FACTS}
    return build_certificate(**{**arguments, **changes})


def test_a_good_run_is_for_release_with_epsilon_from_the_ledger(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    made = certificate(tmp_path)
    assert (made["for_release"], made["stamps"]) == (True, [])
    assert made["epsilon"] == mechanism_guarantee(MECHANISM, delta=DELTA).epsilon
    assert made["epsilon_rdp"] == mechanism_guarantee(MECHANISM, delta=DELTA, accountant="rdp").epsilon
    assert made["steps_taken"] == 20
    assert made["ledger"] == ledger.mark
    assert made["mechanism"] == MECHANISM.to_dict()
    assert made["charged"] == [
        {"purpose": "training step", "sample_rate": 0.1, "noise_multiplier": 1.5, "count": 20},
    ]
    assert (made["weights_sha256"], made["config_sha256"]) == ("a" * 64, "b" * 64)
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_epsilon_covers_every_charge_and_only_those_made(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, steps=7)
    ledger.charge(STATISTICS, step=0)
    made = certificate(tmp_path)
    charges = [(MECHANISM.step_event, 7), (STATISTICS, 1)]
    assert made["epsilon"] == guarantee(charges, delta=DELTA).epsilon
    assert made["epsilon"] > mechanism_guarantee(MECHANISM, delta=DELTA, steps=7).epsilon
    assert [item["count"] for item in made["charged"]] == [7, 1]
    assert made["steps_taken"] == 7


def test_a_run_that_took_no_step_spends_nothing(tmp_path: Path) -> None:
    ledger_of(tmp_path, steps=0)
    made = certificate(tmp_path)
    assert (made["epsilon"], made["epsilon_rdp"], made["steps_taken"]) == (0.0, 0.0, 0)


def test_the_curve_falls_with_delta_and_holds_the_headline(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    made = certificate(tmp_path)
    curve = [(point["delta"], point["epsilon"]) for point in made["curve"]]
    assert len(curve) >= 5
    assert (made["delta"], made["epsilon"]) in curve
    assert curve == sorted(curve, reverse=True)
    assert [epsilon for _, epsilon in curve] == sorted(epsilon for _, epsilon in curve)


def test_the_whole_curve_is_given_as_mu_and_as_bounds_on_attacks(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    made = certificate(tmp_path)
    profile = privacy_profile([(MECHANISM.step_event, 20)], delta=1e-8)
    known = gaussian_dp(profile)
    assert made["gaussian_dp"] == {"mu": known.mu, "epsilon_up_to": known.epsilon_up_to}
    assert made["attack_success"] == [
        {"false_positive_rate": rate, "true_positive_rate": true_positive_bound(profile, false_positive_rate=rate)}
        for rate in (0.001, 0.01, 0.1)
    ]
    assert (made["sampler"], made["divisor"]) == ("poisson", 100.0)


def test_both_numbers_are_given_where_both_can_be_proved(tmp_path: Path) -> None:
    slices = Mechanism(**{**MECHANISM.to_dict(), "privacy_unit": "slice"})
    patients = Mechanism(**{**MECHANISM.to_dict(), "privacy_unit": "patient"})
    for name, mechanism, header in (("s", slices, {"most_rows_per_owner": 2}), ("p", patients, {}), ("n", slices, {})):
        (tmp_path / name).mkdir()
        ledger_of(tmp_path / name, mechanism=mechanism, steps=3, **header)
    charges = [(MECHANISM.step_event, 3)]
    (owner,) = certificate(tmp_path / "s", mechanism=slices)["other_units"]
    assert owner["unit"] == "an owner of at most 2 slices, with all of them"
    assert owner["epsilon"] == owner_guarantee(charges, most_rows=2, delta=DELTA).epsilon
    made = certificate(tmp_path / "p", mechanism=patients)
    (row,) = made["other_units"]
    assert row["unit"].startswith("one image of a patient")
    assert row["epsilon"] == row_guarantee(charges, delta=DELTA).epsilon > made["epsilon"]
    assert row["unit"] in render_certificate_page(made)
    nobody = certificate(tmp_path / "n", mechanism=slices)
    assert nobody["other_units"] == []
    assert any("several slices" in text for text in nobody["not_covered"])


def test_an_owner_without_a_proof_has_no_figure_and_the_release_does_not_fail(tmp_path: Path) -> None:
    ledger_of(tmp_path, steps=2, most_rows_per_owner=10**9)
    (owner,) = certificate(tmp_path)["other_units"]
    assert owner["epsilon"] is None
    assert "nothing is proved" in render_certificate_page(certificate(tmp_path))


@pytest.mark.parametrize("value", [0, -3, 2.5, "2", True])
def test_a_strange_number_of_rows_an_owner_is_refused_by_the_ledger(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ArgumentError, match="most_rows_per_owner"):
        ledger_of(tmp_path, most_rows_per_owner=value)


def test_how_the_guarantee_is_meant_is_said(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    meant = certificate(tmp_path)["deployment"]
    assert meant["neighbours"] == "unbounded: one example more or less"
    assert {"flavour", "trust_model", "release_type", "accounting", "composition", "access"} <= meant.keys()
    (tmp_path / "plain").mkdir()
    ledger_of(tmp_path / "plain", steps=0, delta=None)
    made = certificate(tmp_path / "plain", mechanism=None)
    assert (made["deployment"], made["gaussian_dp"], made["attack_success"], made["other_units"]) == ({}, None, [], [])


def test_the_page_says_all_that_the_certificate_says_and_markup_does_nothing(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    ledger.note("declare", {"what": "test split", "how": "<script>|[x](y)\n# big"})
    made = certificate(tmp_path)
    page = render_certificate_page(made)
    assert "<script>" not in page
    assert "\\<script\\>\\|\\[x\\](y) \\# big" in page
    for text in ("**For release.**", "## The whole curve", "shift ", "wrongly accused", made["weights_sha256"]):
        assert text in page
    for line in made["not_covered"]:
        assert line.replace("_", "\\_") in page
    stamped = render_certificate_page(certificate(tmp_path, hand_seeded=True))
    assert "NOT FOR RELEASE" in stamped


def test_a_hand_seeded_run_is_not_for_release(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    made = certificate(tmp_path, hand_seeded=True)
    assert (made["for_release"], made["stamps"]) == (False, [HAND_SEEDED])


def test_a_run_without_privacy_has_no_epsilon_and_is_not_for_release(tmp_path: Path) -> None:
    ledger_of(tmp_path, steps=0, delta=None)
    made = certificate(tmp_path, mechanism=None)
    assert (made["for_release"], made["stamps"]) == (False, [NO_PRIVACY])
    assert (made["epsilon"], made["epsilon_rdp"], made["delta"], made["curve"]) == (None, None, None, [])
    assert "NOT FOR RELEASE" in render_certificate_page(made)
    assert "no guarantee" in render_certificate_page(made)


def test_a_run_can_not_be_certified_as_something_else(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    with pytest.raises(PrivacyError, match="needs the mechanism"):
        certificate(tmp_path, mechanism=None)
    other = Mechanism(**{**MECHANISM.to_dict(), "num_units": 2000, "adjacency": "replace_one"})
    with pytest.raises(PrivacyError, match="num_units, adjacency differ"):
        certificate(tmp_path, mechanism=other)


def test_a_mechanism_that_changed_is_stamped(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    quieter = Mechanism(**{**MECHANISM.to_dict(), "noise_multiplier": 3.0})
    made = certificate(tmp_path, mechanism=quieter)
    assert not made["for_release"]
    assert "mechanism was changed" in made["stamps"][0]
    assert made["epsilon"] == mechanism_guarantee(MECHANISM, delta=DELTA).epsilon


def test_more_steps_than_planned_are_stamped(tmp_path: Path) -> None:
    ledger_of(tmp_path, steps=21)
    made = certificate(tmp_path)
    assert made["stamps"] == ["21 steps were charged, but 20 were planned"]
    assert not made["for_release"]


def test_a_fork_is_charged_and_declared(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, steps=10)
    ledger.note("fork", {"fork": 1, "step": 8, "reason": "changed: threads"})
    ledger.charge(MECHANISM.step_event, step=8, fork=1)
    made = certificate(tmp_path)
    assert made["steps_taken"] == 11
    assert made["epsilon"] == mechanism_guarantee(MECHANISM, delta=DELTA, steps=11).epsilon
    assert {"what": "fork 1 at step 8", "how": "changed: threads; repeated steps are charged"} in made["declared"]


def test_what_is_declared_and_what_is_not_covered_is_always_said(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    ledger.note("declare", {"what": "test split", "how": "a public folder"})
    ledger.note("declare", {"what": "first weights", "how": "trained on ImageNet, licence X"})
    made = certificate(tmp_path)
    declared = [(item["what"], item["how"]) for item in made["declared"]]
    assert declared == [
        ("num_units, class names and image shape", WORDING[FORMAT].declared_by),
        ("test split", "a public folder"),
        ("first weights", "trained on ImageNet, licence X"),
    ]
    assert set(WORDING[FORMAT].uncovered) <= set(made["not_covered"])
    assert len(made["not_covered"]) == len(set(made["not_covered"]))
    text = render_certificate_page(made)
    for phrase in (*(what for what, _ in declared), *made["not_covered"]):
        assert phrase.replace("_", "\\_") in text


def test_units_that_are_held_out_are_named_as_uncovered(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    assert not any("held out" in text for text in certificate(tmp_path)["not_covered"])
    ledger.note("declare", {"what": TEST_SPLIT, "how": f"10% of the units, {HELD_OUT}"})
    assert any("units held out for testing" in text for text in certificate(tmp_path)["not_covered"])


@pytest.mark.parametrize("how", [f"10% of the units, {HELD_OUT}", f"scans, {OWN_TEST}"])
def test_the_top_of_the_page_says_that_own_test_images_get_no_epsilon(tmp_path: Path, how: str) -> None:
    ledger = ledger_of(tmp_path)
    assert "No epsilon for the test images" not in render_certificate_page(certificate(tmp_path))
    ledger.note("declare", {"what": TEST_SPLIT, "how": how})
    made = certificate(tmp_path)
    top = render_certificate_page(made).partition("## ")[0]
    assert f"**No epsilon for the test images:** {how}." in top
    assert "public" not in made["deployment"]["utility"]


def test_held_out_units_of_earlier_ledgers_are_still_named(tmp_path: Path) -> None:
    earlier = HELD_OUT_ENDINGS[1]
    ledger_of(tmp_path).note("declare", {"what": TEST_SPLIT, "how": f"10% of the units, {earlier}"})
    made = certificate(tmp_path)
    assert any("units held out for testing" in text for text in made["not_covered"])
    assert "No epsilon for the test images" not in render_certificate_page(made)
    assert "declared public" in made["deployment"]["utility"]


def test_the_page_says_where_mu_ends(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    made = certificate(tmp_path)
    assert known_certificate_pages(made) == (render_certificate_page(made),)
    page, earlier = known_certificate_pages(certificate(tmp_path, version=2))
    up_to = f"{made['gaussian_dp']['epsilon_up_to']:.4g}"
    words = f"At every epsilon up to {up_to} the run is at least as private as one Gaussian"
    assert words in page
    assert words in earlier
    assert "Beyond that epsilon mu proves nothing" in page
    assert "Beyond that epsilon" not in earlier


def test_a_page_of_format_2_states_the_attack_bound_of_one_pair(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    pages = [render_certificate_page(certificate(tmp_path, version=version)) for version in (3, 2)]
    said = [float(re.findall(r"finds at most (\S+) in 100", page)[0]) for page in pages]
    assert said[0] < said[1]


def test_a_number_of_units_that_was_counted_with_noise_is_charged_and_not_declared(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    ledger.charge(Event(sample_rate=1.0, noise_multiplier=15.0, purpose=COUNTED_UNITS), step=0)
    made = certificate(tmp_path)
    assert not any("num_units" in item["what"] for item in made["declared"])
    assert any("class names" in item["what"] for item in made["declared"])
    assert [item["purpose"] for item in made["charged"]] == ["training step", COUNTED_UNITS]


def test_the_fixed_list_names_the_known_gaps(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    made = certificate(tmp_path)
    text = " ".join([*made["not_covered"], *(item["what"] for item in made["declared"])])
    for word in (
        "hyper-parameters",
        "architecture",
        "clip norm",
        "Timing",
        "Floating-point",
        "num_units",
        "class names",
    ):
        assert word in text


def test_a_person_with_several_examples_is_named_as_uncovered_unless_the_unit_is_a_person(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    assert any("several examples" in text for text in certificate(tmp_path)["not_covered"])
    patients = Mechanism(**{**MECHANISM.to_dict(), "privacy_unit": "patient"})
    (tmp_path / "patients").mkdir()
    ledger_of(tmp_path / "patients", mechanism=patients)
    made = certificate(tmp_path / "patients", mechanism=patients)
    assert made["privacy_unit"] == "patient"
    assert not any("several examples" in text for text in made["not_covered"])


def test_a_volume_is_not_called_a_patient_and_the_gap_is_named(tmp_path: Path) -> None:
    """Files of whom nobody said whose they are: a patient with two of them is protected less."""
    volumes = Mechanism(**{**MECHANISM.to_dict(), "privacy_unit": VOLUME})
    ledger_of(tmp_path, mechanism=volumes)
    made = certificate(tmp_path, mechanism=volumes)
    assert made["privacy_unit"] == "volume"
    assert "A patient with several volumes: each volume counts as a unit of its own." in made["not_covered"]
    assert not any("several examples" in text or "several volumes: the" in text for text in made["not_covered"])
    (picture,) = made["other_units"]
    assert picture["unit"].startswith("one image of a volume")
    assert "patient" not in render_certificate_page(made).replace("A patient with several volumes", "")


@pytest.mark.parametrize(("delta", "warned"), [(1e-4, False), (9.99e-4, False), (1e-3, True), (0.1, True)])
def test_a_delta_that_is_not_below_one_in_num_units_is_warned_of(tmp_path: Path, delta: float, warned: bool) -> None:
    ledger_of(tmp_path, delta=delta)
    made = certificate(tmp_path)
    assert any("not below 1/1000" in text for text in made["not_covered"]) == warned
    assert ("Caution: delta" in render_certificate_page(made)) == warned


def test_the_text_gives_the_guarantee_in_plain_words_and_never_rounds_it_down(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    made = certificate(tmp_path)
    text = render_certificate_page(made)
    assert "**For release.**" in text
    shown = float(text.split("Epsilon ")[1].split(" ")[0])
    assert made["epsilon"] <= shown <= made["epsilon"] * 1.001
    for phrase in (
        "add\\_remove of one example",
        "by RDP",
        "adding or removing one example",
        "wrongly accuse 1 in 100",
    ):
        assert phrase in text.replace("Adding", "adding")
    assert "Traceback" not in text


def test_a_certificate_with_wrong_fields_is_refused_with_all_of_them_named(tmp_path: Path) -> None:
    ledger_of(tmp_path)
    good = certificate(tmp_path)
    assert parse_certificate(good).model_dump() == good
    changes: dict[str, Any] = {
        "epsilon": -13410.0,
        "delta": 1.0,
        "for_release": "yes",
        "steps_taken": -500,
        "adjacency": "none",
        "weights_sha256": "A" * 64,
        "stamps": None,
        "extra": 1,
    }
    with pytest.raises(ArgumentError) as caught:
        parse_certificate({**good, **changes})
    assert all(name in str(caught.value) for name in changes)
    for name in good:
        with pytest.raises(ArgumentError, match=name):
            parse_certificate({key: value for key, value in good.items() if key != name})
    for value in (float("nan"), float("inf"), "1.0", True, [1.0]):
        with pytest.raises(ArgumentError, match="epsilon"):
            parse_certificate({**good, "epsilon": value})
    for value in (None, [], "x", 3):
        with pytest.raises(ArgumentError):
            parse_certificate(value)


@pytest.mark.parametrize("fact", ["steps", "expected_batch_size", "noise_multiplier"])
def test_a_plan_that_is_not_the_ledgers_is_named(fact: str) -> None:
    mechanism = Mechanism(
        num_units=1000, expected_batch_size=100.0, clip_norm=1.0, noise_multiplier=1.1, steps=10, privacy_unit="example"
    )
    header = mechanism.to_dict()
    assert differing_facts(header, mechanism) == []
    assert differing_facts({**header, fact: 2 * header[fact]}, mechanism) == [fact]
