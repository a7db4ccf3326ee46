"""A search is charged, released and verified as a whole, at both prices."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dpvision
from dpvision.accounting import best_of_random_many, guarantee, propose_delta
from dpvision.config import ModelConfig, parse_config
from dpvision.errors import ArgumentError, DataError, PrivacyError, TamperError
from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.release.composition import Bill, composed, read_bill, spent_together
from dpvision.release.report import render
from dpvision.release.run_states import describe_run, list_runs
from dpvision.release.statements import TRIAL_ALONE
from dpvision.release.verify import verify
from dpvision.training.callbacks import RunCallback
from dpvision.tune import SearchEnded, SearchLimits, SearchResult, SearchSettings, resume_search, tune
from dpvision.tune import search as search_module
from dpvision.tune.search import FINAL_NUMBER
from dpvision.tune.search_folder import SearchFolder
from dpvision.tune.trial import Pruning
from fixed_keys import numbered_secrets
from tiny_runs import SIDE, synthetic_images
from tiny_searches import RATES, run_search, search_config, search_images

MODELS = ["linear", "scatter_linear"]


@pytest.fixture(scope="module", autouse=True)
def _same_secrets() -> Iterator[None]:
    """Of 120 images none might be held out for the scores."""
    with numbered_secrets("searches"):
        yield


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return run_search(tmp_path_factory.mktemp("composition"))


@pytest.fixture(scope="module")
def best_of(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return run_search(tmp_path_factory.mktemp("best_of"), price="best_of")


def write_public_images(path: Path) -> None:
    (x_train, y_train), (x_test, y_test) = synthetic_images(120, seed=7), synthetic_images(30, seed=8)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def searched_ledger(result: SearchResult) -> Any:
    return read_ledger(result.folder / "release" / "search.jsonl")


def test_the_headline_epsilon_is_that_of_all_trials_and_scores(searched: SearchResult) -> None:
    entries = searched_ledger(searched)
    assert [entry.payload["trial"] for entry in entries if entry.kind == "trial"] == [0, 1]
    purposes = {event.purpose: count for event, count in charges_of(entries)}
    assert purposes == {"training step": 12, "validation score": 2}
    epsilon = guarantee(charges_of(entries), delta=1e-3).epsilon
    assert searched.certificate["epsilon"] == epsilon <= 3.0
    claim = searched.certificate["search"]
    assert claim["trials"] == 2
    assert claim["epsilon_of_this_run_alone"] < epsilon
    found = verify(searched.folder)
    assert found.problems == ()
    assert found.epsilon == epsilon
    assert found.for_release


def test_the_pages_say_that_the_run_alone_is_not_the_guarantee(searched: SearchResult) -> None:
    for name in ("certificate.md", "model_card.md"):
        assert "NOT the guarantee" in (searched.folder / "release" / name).read_text()


def test_a_trial_that_is_taken_out_of_its_search_is_not_for_release(searched: SearchResult) -> None:
    trial = searched.folder / "private" / "trials" / "0000-0"
    found = verify(trial)
    assert found.ok
    assert not found.for_release
    assert TRIAL_ALONE in found.stamps


def test_the_table_of_trials_is_released_by_composition(searched: SearchResult) -> None:
    table = json.loads((searched.folder / "release" / "trials.json").read_text())["trials"]
    assert [row["number"] for row in table] == [0, 1]
    assert all(0 <= row["score"] <= 1 and 0 < row["epsilon"] < 3 for row in table)


def test_the_best_of_search_is_charged_once_for_all_trials(best_of: SearchResult) -> None:
    entries = searched_ledger(best_of)
    assert [entry.kind for entry in entries] == ["header", "declare", "selection", "release"]
    payload = entries[2].payload
    price = best_of_random_many(
        charges_of(entries), mean_trials=payload["mean_trials"], stopping=payload["stopping"], delta=1e-3
    )
    assert best_of.certificate["epsilon"] == price.epsilon <= 3.0
    assert best_of.trials is None
    found = verify(best_of.folder)
    assert found.problems == ()
    assert found.epsilon == price.epsilon


def test_nothing_but_the_winner_leaves_private_with_the_best_of_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    class Listening(RunCallback):
        def message(self, text: str) -> None:
            heard.append(text)

        def started(self, **_: Any) -> None:
            heard.append("started")

        def stepped(self, **_: Any) -> None:
            heard.append("stepped")

    kept: dict[int, Any] = {}
    for number in (1, 2):
        monkeypatch.setattr("dpvision.tune.trial_book.number_of_trials", lambda *_, number=number: number)
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = SearchSettings(space=RATES, trials=2, price="best_of")
        config = search_config(search_images(folder))
        result = tune(config, settings, folder=folder / "search", callback=Listening())
        release = result.folder / "release"
        ledger = [(entry.kind, entry.payload) for entry in read_ledger(release / "search.jsonl")]
        kept[number] = {
            "files": sorted(path.relative_to(release).as_posix() for path in release.rglob("*")),
            "ledger": [(kind, sorted(payload)) for kind, payload in ledger],
            "charges": [payload for kind, payload in ledger if kind == "selection"],
            "claim": {k: v for k, v in result.certificate["search"].items() if k not in ("search_id", "ledger")},
            "outside": sorted(path.name for path in result.folder.iterdir()),
            "figures": sorted(result.figures()),
        }
        assert len(list((result.folder / "private" / "trials").glob("*-0"))) == number
    assert kept[1] == kept[2]
    assert heard == []


def test_a_poisson_number_of_zero_trials_releases_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpvision.tune.trial_book.number_of_trials", lambda *_: 0)
    with pytest.raises(SearchEnded):
        run_search(tmp_path, price="best_of", stopping="poisson")
    assert not (tmp_path / "search" / "release" / "certificate.json").exists()
    assert [entry.kind for entry in read_ledger(tmp_path / "search" / "release" / "search.jsonl")][2] == "selection"


def test_a_final_run_gets_the_rest_of_the_budget(tmp_path: Path) -> None:
    result = run_search(tmp_path, budget_share=0.5, sampler="tpe", score_noise=20.0)
    entries = [entry.payload for entry in searched_ledger(result) if entry.kind == "trial"]
    assert [(each["trial"], each["role"]) for each in entries] == [(0, "trial"), (1, "trial"), (FINAL_NUMBER, "final")]
    assert entries[2]["releases"][0]["noise_multiplier"] < entries[0]["releases"][0]["noise_multiplier"]
    assert 2.97 < result.certificate["epsilon"] <= 3.0
    assert verify(result.folder).problems == ()


def test_an_adaptive_search_of_changing_cost_claims_its_whole_filter(tmp_path: Path) -> None:
    result = run_search(tmp_path, sampler="tpe", space={**RATES, "epochs": "int:1:3"})
    assert result.certificate["search"]["accountant"] == "rdp_filter"
    assert 2.99 < result.certificate["epsilon"] <= 3.0
    assert verify(result.folder).problems == ()


def test_trials_on_public_look_alike_data_are_declared_and_not_charged(tmp_path: Path) -> None:
    write_public_images(tmp_path / "public.npz")
    result = run_search(tmp_path, search_data=str(tmp_path / "public.npz"), batch_divisor=2.0)
    entries = searched_ledger(result)
    assert [entry.payload["role"] for entry in entries if entry.kind == "trial"] == ["final"]
    declared = {note["what"]: note["how"] for note in result.certificate["declared"]}
    assert "public.npz, declared public" in declared["search data"]
    assert result.certificate["epsilon"] == pytest.approx(
        result.certificate["search"]["epsilon_of_this_run_alone"], rel=1e-9
    )
    assert verify(result.folder).problems == ()


def test_public_search_data_needs_no_owners_where_the_private_images_have_some(tmp_path: Path) -> None:
    write_public_images(tmp_path / "public.npz")
    source = tmp_path / "owned.npz"
    with np.load(search_images(tmp_path)) as arrays:
        owners = {"patient": np.arange(120) // 3, "test_patient": 100 + np.arange(30)}
        np.savez(source, **arrays, **owners)
    values = search_config(source, num_units=40).model_dump(mode="python", exclude_unset=True)
    values["data"]["unit_column"] = "patient"
    wanted = SearchSettings(space=RATES, trials=1, search_data=str(tmp_path / "public.npz"))
    result = tune(parse_config(values), wanted, folder=tmp_path / "search")
    assert result.certificate["privacy_unit"] != "example"
    assert verify(result.folder).problems == ()


def test_models_are_compared_each_with_defaults_of_its_own(tmp_path: Path) -> None:
    values = search_config(search_images(tmp_path), expected_batch_size=None, clip_norm=None).model_dump(
        mode="python", exclude_unset=True
    )
    del values["model"]  # by default scatter_linear, with options that the linear model has not
    place, wanted = SearchFolder(tmp_path / "search"), SearchSettings(space={"model.name": MODELS}, trials=2)
    search_module.begin_search(parse_config(values), wanted, place, seed=None, device="cpu", database=False)
    wrong = SearchSettings(space={"model.name": [*MODELS, "nothing"]}, trials=2)
    with pytest.raises(ArgumentError, match="nothing"):
        tune(parse_config(values), wrong, folder=tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_public_trials_may_choose_the_length_of_the_final_run(tmp_path: Path) -> None:
    write_public_images(tmp_path / "public.npz")
    space = {"epochs": "choice:1,4"}
    result = run_search(tmp_path, space=space, sampler="grid", trials=2, search_data=str(tmp_path / "public.npz"))
    (final,) = [e.payload for e in searched_ledger(result) if e.kind == "trial"]
    assert final["releases"][0]["count"] == 4 * result.settings["privacy.epochs"]
    assert 2.97 < result.certificate["epsilon"] <= 3.0
    assert verify(result.folder).problems == ()


def test_early_candidates_share_their_initial_weights_with_the_final_run(tmp_path: Path) -> None:
    source = search_images(tmp_path)
    values = search_config(source).model_dump(exclude_unset=True)
    public = dpvision.train(
        dpvision.RunConfig.model_validate(
            {**values, "privacy": {"enabled": False, "expected_batch_size": 30.0, "steps": 3}}
        ),
        run=tmp_path / "public",
    )
    values["transfer"] = {"weights": str(public.run), "trained": "all", "initialisation": "mean_var", "source": "x"}
    settings = SearchSettings(
        space={"transfer.draw": "int:0:2:3"}, sampler="grid", early=0.2, budget_share=0.4, score_noise=40.0
    )
    result = tune(dpvision.RunConfig.model_validate(values), settings, folder=tmp_path / "search")
    steps = [e.payload["releases"][0]["count"] for e in searched_ledger(result) if e.kind == "trial"]
    assert steps == [2, 2, 2, 6]
    own = json.loads((result.folder / "release" / "config.json").read_text())
    assert own["transfer"]["draw"] == result.settings["transfer.draw"]
    assert verify(result.folder).problems == ()


def test_the_package_itself_is_called_to_search(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="budget"):
        dpvision.tune(
            search_config(search_images(tmp_path), target_epsilon=None, noise_multiplier=1.0),
            SearchSettings(space=RATES),
            folder=tmp_path / "search",
        )


def test_a_pruned_trial_stays_charged_in_full(tmp_path: Path) -> None:
    source = search_images(tmp_path)
    shutil.copy(source, tmp_path / "test.npz")
    values = search_config(source).model_dump(exclude_unset=True)
    values["data"]["test"] = str(tmp_path / "test.npz")
    config = dpvision.RunConfig.model_validate(values)
    settings = SearchSettings(space=RATES, trials=2, pruner="threshold", prune_below=1.0)
    with contextlib.suppress(SearchEnded):
        tune(config, settings, folder=tmp_path / "search")
    entries = read_ledger(tmp_path / "search" / "release" / "search.jsonl")
    assert {event.purpose: count for event, count in charges_of(entries)} == {"training step": 12}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"space": {"learning_rat": "log:0.1:1"}}, {}, "learning_rate"),
    ({"space": {"learning_rate": "log:1:1"}}, {}, "empty"),
    ({"trials": 900}, {}, "cannot hold"),
    ({"price": "best_of", "sampler": "tpe"}, {}, "independent random draws"),
    ({"score": "public"}, {}, "public test set"),
    ({"pruner": "patience"}, {}, "public scores"),
    ({}, {"num_units": None}, "num-units"),
]


@pytest.mark.parametrize(("settings", "privacy", "says"), REFUSED)
def test_a_bad_search_is_refused_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], privacy: dict[str, Any], says: str
) -> None:
    source = search_images(tmp_path)
    wanted = {"space": RATES, "trials": 2, **settings}
    with pytest.raises(ArgumentError, match=says):
        tune(search_config(source, **privacy), SearchSettings(**wanted), folder=tmp_path / "search")
    assert not (tmp_path / "search").exists()


def test_a_search_whose_trials_would_learn_nothing_is_refused(tmp_path: Path) -> None:
    config = search_config(search_images(tmp_path), anyway=False, target_epsilon=0.06)
    config = config.model_copy(update={"model": ModelConfig(name="scatter_linear", options={"image_size": SIDE})})
    with pytest.raises(ArgumentError, match=r"hardly beat chance.*share of the budget"):
        tune(config, SearchSettings(space=RATES, trials=2, score_noise=200.0), folder=tmp_path / "search")
    assert not (tmp_path / "search").exists()


def test_a_range_in_units_of_the_default_is_fixed_before_the_first_trial(tmp_path: Path) -> None:
    asked = {"learning_rate": "times:0.1:10"}
    found = run_search(tmp_path, space=asked, trials=1)
    kind, low, high, _ = searched_ledger(found)[0].payload["space"]["optimizer.learning_rate"].split(":")
    assert kind == "log"
    assert float(high) == pytest.approx(100 * float(low))
    assert float(low) <= found.settings["optimizer.learning_rate"] <= float(high)
    assert run_search(tmp_path, space=asked, trials=1).settings == found.settings  # the same search: continued


def test_a_search_of_own_images_needs_no_settings_but_budget_and_units(tmp_path: Path) -> None:
    asked = {"data": {"source": str(search_images(tmp_path))}, "privacy": {"target_epsilon": 30.0, "num_units": 120}}
    place, wanted = SearchFolder(tmp_path / "search"), SearchSettings(space={"learning_rate": "times:0.1:10"}, trials=2)
    search_module.begin_search(parse_config(asked), wanted, place, seed=None, device="cpu", database=False)
    stored = place.read_settings()
    assert stored["plan"]["num_units"] == 108  # of 120, the others are for the private scores
    assert stored["base"]["privacy"]["expected_batch_size"] == 108  # by default every unit in every step
    assert stored["plan"]["delta"] == propose_delta(120)


def test_processes_of_a_search_take_the_threads_that_it_began_with(searched: SearchResult, tmp_path: Path) -> None:
    shutil.copytree(searched.folder, tmp_path / "search")
    began = torch.get_num_threads()
    try:
        torch.set_num_threads(began + 1)
        resume_search(tmp_path / "search")
        assert torch.get_num_threads() == began
    finally:
        torch.set_num_threads(began)


def test_patience_has_evaluations_to_wait_for(tmp_path: Path) -> None:
    write_public_images(tmp_path / "public.npz")
    values = search_config(search_images(tmp_path), steps=20).model_dump(mode="python", exclude_unset=True)
    values["data"]["test"] = str(tmp_path / "public.npz")
    del values["evaluations"]
    wanted = SearchSettings(space=RATES, trials=1, pruner="patience")
    with pytest.raises(ArgumentError, match="waits for 15 evaluations without progress, and a trial has 10"):
        tune(parse_config({**values, "evaluations": 10}), wanted, folder=tmp_path / "search")
    assert not (tmp_path / "search").exists()
    with contextlib.suppress(SearchEnded):  # the trial may be pruned
        tune(parse_config(values), wanted, folder=tmp_path / "search")
    assert SearchFolder(tmp_path / "search").read_settings()["base"]["evaluations"] > Pruning.PATIENCE


def test_a_second_search_in_the_same_folder_is_refused(searched: SearchResult) -> None:
    before = (searched.folder / "release" / "search.jsonl").read_bytes()
    with pytest.raises(ArgumentError, match="other settings"):
        run_search(searched.folder.parent, trials=3)
    assert (searched.folder / "release" / "search.jsonl").read_bytes() == before


def test_resuming_a_finished_search_charges_nothing_more(searched: SearchResult, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(searched.folder, folder)
    again = resume_search(folder)
    assert again.certificate["epsilon"] == searched.certificate["epsilon"]
    assert charges_of(searched_ledger(again)) == charges_of(searched_ledger(searched))
    assert verify(folder).problems == ()


def test_a_trial_whose_folder_is_lost_is_charged_again_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(search_module.OpenSearch, "_score", killed)
        with pytest.raises(KeyboardInterrupt):
            run_search(tmp_path, budget_share=0.6, trials=2)
    shutil.rmtree(tmp_path / "search" / "private" / "trials" / "0000-0")
    result = resume_search(tmp_path / "search")
    charged = [(e.payload["trial"], e.payload["attempt"]) for e in searched_ledger(result) if e.kind == "trial"]
    assert charged[:2] == [(0, 0), (0, 1)]
    assert result.certificate["search"]["repeated"] == 1
    assert result.certificate["epsilon"] <= 3.0
    assert verify(result.folder).problems == ()


def rewrite(entries: list[dict[str, Any]], path: Path) -> None:
    """Write entries as a ledger with a valid chain."""
    from dpvision.privacy.ledger import _make_entry

    prev, lines = "0" * 64, b""
    for seq, entry in enumerate(entries):
        made, line = _make_entry(seq, entry["kind"], entry["payload"], prev)
        prev, lines = made.hash, lines + line
    path.write_bytes(lines)


def drop_trial(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = next(i for i, e in enumerate(entries) if e["kind"] == "trial")
    return entries[:first] + entries[first + 1 :]


def change_noise(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for entry in entries:
        if entry["kind"] == "trial":
            entry["payload"]["releases"][0]["noise_multiplier"] *= 2
    return entries


def other_price(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trials of a composition, priced as the best of a random number."""
    trial = next(e["payload"] for e in entries if e["kind"] == "trial")
    entries[0]["payload"] |= {"price": "best_of", "planned": None}
    kept = [e for e in entries if e["kind"] != "trial"]
    payload = {"stopping": "geometric", "mean_trials": 1.0, "releases": trial["releases"]}
    return [*kept[:-1], {"kind": "selection", "payload": payload}, kept[-1]]


def fewer_trials(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for entry in entries:
        if entry["kind"] == "selection":
            entry["payload"]["mean_trials"] = 1.0
    return entries


def other_distribution(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for entry in entries:
        if entry["kind"] == "selection":
            entry["payload"]["stopping"] = "logarithmic"
    return entries


Change = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.mark.parametrize(
    ("price", "change"),
    [
        ("composition", drop_trial),
        ("composition", change_noise),
        ("composition", other_price),
        ("best_of", fewer_trials),
        ("best_of", other_distribution),
    ],
)
@pytest.mark.parametrize("with_mark", [False, True], ids=["ledger alone", "certificate's mark too"])
def test_a_changed_search_ledger_is_named(
    searched: SearchResult, best_of: SearchResult, tmp_path: Path, price: str, change: Change, with_mark: bool
) -> None:
    source = searched if price == "composition" else best_of
    release = tmp_path / "release"
    shutil.copytree(source.folder / "release", release)
    entries = [{"kind": e.kind, "payload": e.payload} for e in read_ledger(release / "search.jsonl")]
    rewrite(change(entries), release / "search.jsonl")
    if with_mark:
        again = read_ledger(release / "search.jsonl")
        certificate = json.loads((release / "certificate.json").read_text())
        certificate["search"]["ledger"] = {"length": len(again), "head": again[-1].hash}
        (release / "certificate.json").write_text(json.dumps(certificate, indent=2) + "\n")
    found = verify(release)
    problems = " ".join(p for p in found.problems if "manifest" not in p)
    assert any(
        word in problems for word in ("rolled back", "LESS", "does not cost", "is not that of", "claims", "gives")
    )


@pytest.mark.parametrize(
    "change",
    [
        {"planned": {"trials": [], "final": None}},
        {"planned": {"trials": [[0, []]], "final": None}},
        {"planned": {"trials": [{"first": 0, "releases": [{}]}], "final": None}},
        {"planned": 3},
        {"filter": {"order": "x", "divergence": 1.0}},
        {"space": []},
        {"budget": -1.0},
        {"adaptive": None},
        {"price": ["composition"]},
    ],
    ids=str,
)
def test_a_malformed_header_of_a_search_is_named(
    searched: SearchResult, tmp_path: Path, change: dict[str, Any]
) -> None:
    release = tmp_path / "release"
    shutil.copytree(searched.folder / "release", release)
    entries = [{"kind": e.kind, "payload": dict(e.payload)} for e in read_ledger(release / "search.jsonl")]
    entries[0]["payload"] |= change
    rewrite(entries, release / "search.jsonl")
    found = verify(release)  # and no traceback
    assert not found.ok
    assert found.search is None or "planned" in str(found.problems)


def test_lists_and_comparisons_of_runs_show_the_epsilon_of_the_whole_search(
    searched: SearchResult, best_of: SearchResult
) -> None:
    for result in (searched, best_of):
        run = describe_run(result.folder)
        assert run.state == "finished"
        assert run.epsilon == result.certificate["epsilon"] > result.certificate["search"]["epsilon_of_this_run_alone"]
        assert run.facts is not None
        assert run.facts.metrics is not None
        assert {point.epsilon for point in run.facts.metrics.curve} == {None}
        page = render(run.facts)
        assert "Epsilon spent" not in page
        assert "NOT the guarantee" in page
        assert ("by privacy loss distributions" in page) is (result is searched)
    (twice,) = list_runs(searched.folder)
    other = replace(read_required(searched.folder), head="another", run="other")
    assert twice.bill is not None
    together = spent_together([twice.bill, other])
    assert together["epsilon"] == guarantee([(e, 2 * c) for e, c in other.charges], delta=1e-3).epsilon
    beside = spent_together([twice.bill, read_required(best_of.folder)])
    assert beside["epsilon"] is None
    assert "no composition" in beside["void"]
    alone = composed([read_required(best_of.folder)], delta=1e-4)
    assert (alone["epsilon"], "at delta 0.001 alone" in alone["void"]) == (None, True)


def read_required(run: Path) -> Bill:
    bill = read_bill(run, run.name)
    assert bill is not None
    return bill


def test_an_unfinished_search_is_listed_with_what_it_has_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(search_module.OpenSearch, "_score", killed)
        with pytest.raises(KeyboardInterrupt):
            run_search(tmp_path)
    run = describe_run(tmp_path / "search")
    entries = read_ledger(tmp_path / "search" / "release" / "search.jsonl")
    assert (run.state, run.why) == ("interrupted", "a search: dpvision tune --resume continues it")
    assert run.epsilon == guarantee(charges_of(entries), delta=1e-3).epsilon > 0
    assert spent_together([read_required(tmp_path / "search")])["epsilon"] is None


def test_a_release_without_its_search_ledger_is_named(searched: SearchResult, tmp_path: Path) -> None:
    release = tmp_path / "release"
    shutil.copytree(searched.folder / "release", release)
    (release / "search.jsonl").unlink()
    problems = " ".join(verify(release).problems)
    assert "search.jsonl is missing" in problems
    assert "result of a search" in problems


def test_a_certificate_that_hides_its_search_is_named(searched: SearchResult, tmp_path: Path) -> None:
    release = tmp_path / "release"
    shutil.copytree(searched.folder / "release", release)
    trial = next(
        path
        for path in (searched.folder / "private" / "trials").glob("*-0")
        if (path / "release" / "weights.safetensors").read_bytes() == (release / "weights.safetensors").read_bytes()
    )
    certificate = json.loads((trial / "release" / "certificate.json").read_text())
    certificate |= {"stamps": [], "for_release": True}
    (release / "certificate.json").write_text(json.dumps(certificate, indent=2) + "\n")
    problems = " ".join(verify(release).problems)
    assert "the certificate does not state it" in problems
    (release / "search.jsonl").unlink()
    problems = " ".join(verify(release).problems)
    assert "stamps" in problems


def test_a_ledger_that_was_rolled_back_is_refused(searched: SearchResult, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(searched.folder, folder)
    place = SearchFolder(folder)
    place.ledger_path.write_bytes(b"".join(place.ledger_path.read_bytes().splitlines(keepends=True)[:3]))
    with pytest.raises(TamperError, match="rolled back"), place.locked(), place.ledger():
        pass


def test_a_timeout_stops_new_trials_and_the_rest_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = search_images(tmp_path)
    settings = SearchSettings(space=RATES, trials=50, score_noise=60.0)
    clock = itertools.count()  # a second passes from one look at it to the next
    monkeypatch.setattr(search_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock)), sleep=None))
    result = tune(search_config(source), settings, folder=tmp_path / "search", limits=SearchLimits(timeout=2.5))
    assert result.trials is not None
    assert len(result.trials) == 2
    assert result.certificate["epsilon"] < 3.0
    assert verify(result.folder).problems == ()


def copied(result: SearchResult, folder: Path) -> SearchFolder:
    shutil.copytree(result.folder, folder)
    return SearchFolder(folder)


def test_search_data_that_holds_a_private_image_is_refused(tmp_path: Path) -> None:
    write_public_images(tmp_path / "public.npz")
    values = dict(np.load(tmp_path / "public.npz"))
    values["x_test"][3] = synthetic_images(120)[0][17]
    np.savez(tmp_path / "public.npz", **values)
    with pytest.raises(ArgumentError, match="images of the private data"):
        run_search(tmp_path, search_data=str(tmp_path / "public.npz"))
    assert not (tmp_path / "search").exists()


def test_blank_images_may_be_in_private_and_public_data(tmp_path: Path) -> None:
    write_public_images(tmp_path / "public.npz")
    values = dict(np.load(tmp_path / "public.npz"))
    values["x_train"][3] = 7
    np.savez(tmp_path / "public.npz", **values)
    source = search_images(tmp_path)
    private = dict(np.load(source))
    private["x_train"][5] = 7
    np.savez(source, **private)
    settings = SearchSettings(space=RATES, trials=1, search_data=str(tmp_path / "public.npz"))
    assert tune(search_config(source), settings, folder=tmp_path / "search").certificate["for_release"]


def test_private_scores_of_an_own_model_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from torch import nn\n\n\ndef make(**_):\n    return nn.Flatten()\n")
    values = search_config(search_images(tmp_path)).model_dump(exclude_unset=True)
    config = parse_config({**values, "model": {"name": f"{tmp_path / 'own.py'}:make"}})
    with pytest.raises(ArgumentError, match="private scores are for the models of dpvision"):
        tune(config, SearchSettings(space=RATES), folder=tmp_path / "search")
    assert not (tmp_path / "search").exists()


@pytest.mark.parametrize("price", ["composition", "best_of"])
def test_a_search_does_not_continue_on_other_images(
    tmp_path: Path, price: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dpvision.tune.trial_book.number_of_trials", lambda *_: 1)
    with monkeypatch.context() as patch:
        patch.setattr(search_module.OpenSearch, "_score", killed)
        with pytest.raises(KeyboardInterrupt):
            run_search(tmp_path, price=price)
    values = dict(np.load(tmp_path / "images.npz"))
    values["y_train"][3] = (values["y_train"][3] + 1) % 3
    np.savez(tmp_path / "images.npz", **values)
    with pytest.raises(DataError, match="not those that the search began with"):
        resume_search(tmp_path / "search")


def test_a_ledger_that_was_rolled_back_with_its_mark_is_refused(searched: SearchResult, tmp_path: Path) -> None:
    place = copied(searched, tmp_path / "search")
    lines = place.ledger_path.read_bytes().splitlines(keepends=True)[:3]  # header, declaration, one of two trials
    place.ledger_path.write_bytes(b"".join(lines))
    mark = {"length": 3, "head": json.loads(lines[-1])["hash"]}
    (place.private / "search-mark.json").write_text(json.dumps({"ledger": mark}))
    with pytest.raises(TamperError, match="trial 1 began and is not charged"):
        resume_search(place.root)


def test_a_list_of_trials_that_was_rolled_back_is_refused(searched: SearchResult, tmp_path: Path) -> None:
    place = copied(searched, tmp_path / "search")
    place.journal_path.unlink()
    with pytest.raises(TamperError, match="trial 0 is charged and not in it"):
        resume_search(place.root)


def test_a_trial_whose_checkpoints_are_lost_is_charged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dpvision.tune.trial.run_to_release", killed)
        with pytest.raises(KeyboardInterrupt):
            run_search(tmp_path, budget_share=0.6, trials=2)
    shutil.rmtree(tmp_path / "search" / "private" / "trials" / "0000-0" / "private" / "checkpoints")
    charged = searched_ledger(resume_search(tmp_path / "search"))
    assert [(e.payload["trial"], e.payload["attempt"]) for e in charged if e.kind == "trial"][:2] == [(0, 0), (0, 1)]


def test_a_lost_trial_of_the_best_of_price_is_not_repeated(best_of: SearchResult, tmp_path: Path) -> None:
    place = copied(best_of, tmp_path / "search")
    shutil.rmtree(place.trial_path(0, 0))
    place.score_path(0).unlink()
    with pytest.raises(PrivacyError, match="no trial is repeated"):
        resume_search(place.root)


def test_a_lost_final_run_is_not_repeated_for_free(tmp_path: Path) -> None:
    result = run_search(tmp_path, budget_share=0.5, trials=1, score_noise=20.0)
    shutil.rmtree(SearchFolder(result.folder).trial_path(FINAL_NUMBER, 0))
    with contextlib.suppress(SearchEnded):  # the second one has what is left of the budget: next to nothing
        resume_search(result.folder)
    final = [e.payload for e in searched_ledger(result) if e.kind == "trial" and e.payload["role"] == "final"]
    assert [each["attempt"] for each in final] == [0, 1]
    assert final[1]["releases"][0]["noise_multiplier"] > 20 * final[0]["releases"][0]["noise_multiplier"]
    assert guarantee(charges_of(searched_ledger(result)), delta=1e-3).epsilon <= 3.0


def test_a_trial_runs_with_what_was_charged_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(search_module, "run_trial", killed)  # charged, not started
        with pytest.raises(KeyboardInterrupt):
            run_search(tmp_path, space={"steps": "choice:3,6"}, sampler="grid", trials=2)
    search = search_module.OpenSearch(SearchFolder(tmp_path / "search"), callback=RunCallback(), limits=SearchLimits())
    other = search_module.with_settings(search.plan.base, {"privacy.steps": 6})  # as a list that was edited says
    assert search._charged(other, 0) == (1, search.plan.noise_of(other, 0))
    steps = [e.payload["releases"][0]["count"] for e in read_ledger(search.place.ledger_path) if e.kind == "trial"]
    assert steps == [3, 6]
