"""What weights bring along from the runs before: nothing is laundered, forgotten or added up wrongly on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import dpvision.training.lineage as origin_module
from dpvision import models
from dpvision.config import PriorRelease, RunConfig, TransferConfig, parse_config
from dpvision.data import fixed_normalisation
from dpvision.errors import ArgumentError, TamperError
from dpvision.privacy.ledger import Ledger, read_ledger
from dpvision.privacy.mechanism import Event, rounded_up
from dpvision.release.certificate_page import render_certificate_page
from dpvision.release.model_card import model_card
from dpvision.release.statements import HISTORY, NOT_FOR_RELEASE, history_digest
from dpvision.release.verify import verify
from dpvision.storage.files import file_sha256, json_bytes, sha256_hex
from dpvision.training import resume_training, train
from dpvision.training.callbacks import RunCallback
from dpvision.training.lineage import transfer_declarations, transfer_stamps
from dpvision.training.pretrained import KNOWN_WEIGHTS, KnownWeights
from tiny_runs import SIDE, tiny_config, write_images

CNN: dict[str, Any] = {"name": "shoefit_cnn", "options": {"image_size": SIDE, "filters": 3}}
STEPS = 3


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    return write_images(tmp_path / "patients.npz")


@pytest.fixture
def others(tmp_path: Path) -> Path:
    return write_images(tmp_path / "others.npz")


def config_of(data: Path, weights: Path | None = None, *, source: str | None = None, **privacy: Any) -> RunConfig:
    sections: dict[str, Any] = {"evaluations": 1, "checkpoint_every": 1}
    config = tiny_config(data, model=CNN, privacy={"steps": STEPS, **privacy}, **sections)
    if weights is None:
        return config
    return parse_config({**config.model_dump(), "transfer": {"weights": str(weights), "source": source}})


def declared(certificate: dict[str, Any]) -> dict[str, str]:
    return {item["what"]: item["how"] for item in certificate["declared"]}


def edit_release(run: Path, change: Callable[[dict[str, Any]], object], name: str = "certificate.json") -> None:
    """Change a file and make pages and hashes fit it again, as somebody would who means to deceive."""
    release = run / "release"
    values = json.loads((release / name).read_text())
    change(values)
    (release / name).write_bytes(json_bytes(values))
    if name == "config.json":
        digest = file_sha256(release / name)
        edit_release(run, lambda certificate: certificate.update(config_sha256=digest))
    certificate, metrics, config = (
        json.loads((release / file).read_text()) for file in ("certificate.json", "metrics.json", "config.json")
    )
    (release / "certificate.md").write_text(render_certificate_page(certificate))
    (release / "model_card.md").write_text(model_card(certificate, metrics=metrics, config=config))
    hashes = json.loads((release / "manifest.json").read_text())
    hashes |= {file: file_sha256(release / file) for file in (name, "certificate.md", "model_card.md")}
    (release / "manifest.json").write_bytes(json_bytes(hashes))


def rewrite_ledger(run: Path, hidden: object) -> None:
    """Write the whole ledger anew with another history in it, and make certificate and manifest fit."""
    path = run / "release" / "ledger.jsonl"
    header, *rest = read_ledger(path)
    path.unlink()
    ledger = Ledger.create(path, {name: value for name, value in header.payload.items() if name != "format"})
    digest = history_digest(hidden)
    for entry in rest:
        payload = entry.payload
        if entry.kind == "charge":
            facts = {name: payload[name] for name in ("sample_rate", "noise_multiplier", "purpose")}
            ledger.charge(Event(**facts), step=payload["step"], fork=payload["fork"])
        elif entry.kind != "release" and payload.get("what") != HISTORY:
            ledger.note(entry.kind, payload)
        elif entry.kind != "release" and digest is not None:
            ledger.note("declare", {"what": HISTORY, "how": f"SHA-256 {digest}"})
    notes = [{"what": HISTORY, "how": f"SHA-256 {digest}"}] if digest is not None else []

    def change(values: dict[str, Any]) -> None:
        kept = [item for item in values["declared"] if item["what"] != HISTORY]
        values.update(declared=kept + notes)
        ledger.commit_release(**{name: values[name] for name in ("weights_sha256", "config_sha256", "data")})
        values["ledger"] = ledger.mark

    edit_release(run, change)
    hashes = json.loads((run / "release" / "manifest.json").read_text())
    hashes["ledger.jsonl"] = file_sha256(path)
    (run / "release" / "manifest.json").write_bytes(json_bytes(hashes))
    for mark in (*(run / "private" / "checkpoints").iterdir(), run / "private" / "released-ledger.json"):
        mark.unlink()


def nested(runs: int) -> dict[str, Any] | None:
    """A history of so many runs."""
    found = None
    for _ in range(runs):
        run = {"run_id": "r", "data": ["x"], "privacy_unit": "example", "transfer": found}
        found = {"weights": "run", "source": "x", "prior": run}
    return found


# ---- runs before the run before


def test_non_private_ancestry_is_not_laundered_through_a_run_on_other_data(
    tmp_path: Path, patients: Path, others: Path
) -> None:
    train(config_of(patients, enabled=False), run=tmp_path / "a")
    train(config_of(others, tmp_path / "a", enabled=False), run=tmp_path / "b")
    result = train(config_of(patients, tmp_path / "b"), run=tmp_path / "c")
    assert not result.certificate["for_release"]
    assert any("without privacy on patients.npz" in stamp for stamp in result.certificate["stamps"])
    words = declared(result.certificate)
    assert "others.npz" in words["first weights"]
    assert "patients.npz" in words["first weights, runs back: 1"]
    assert verify(tmp_path / "c").ok
    again = train(config_of(others, tmp_path / "c"), run=tmp_path / "d").certificate
    assert any("not for release" in stamp for stamp in again["stamps"])


def test_the_sum_counts_every_private_run_before(tmp_path: Path, patients: Path, others: Path) -> None:
    parts = [train(config_of(patients), run=tmp_path / "a").certificate]
    parts.append(train(config_of(others, tmp_path / "a"), run=tmp_path / "b").certificate)
    parts.append(train(config_of(patients, tmp_path / "b"), run=tmp_path / "c").certificate)
    text = declared(parts[-1])["first weights and this run together"]
    total = float(text.partition("epsilon at most ")[2].partition(" ")[0])
    spent = sum(part["epsilon"] for part in parts)
    assert spent <= total <= spent * 1.002  # four digits, rounded up
    assert "at delta 0.003 " in text
    assert parts[-1]["for_release"]


def test_what_an_ancestor_began_with_is_declared_too(tmp_path: Path, patients: Path, others: Path) -> None:
    weights = tmp_path / "public.safetensors"
    save_file(
        models.create("shoefit_cnn", num_classes=3, in_channels=1, seed=5, **CNN["options"]).state_dict(), weights
    )
    train(config_of(others, weights, source="holiday pictures"), run=tmp_path / "a")
    result = train(config_of(patients, tmp_path / "a"), run=tmp_path / "b").certificate
    assert "holiday pictures" in declared(result)["first weights, runs back: 1"]
    assert result["for_release"]
    kept = json.loads((tmp_path / "b" / "release" / "config.json").read_text())["transfer"]["prior"]
    assert kept["transfer"]["sha256"] == sha256_hex(weights.read_bytes())
    assert str(tmp_path) not in json.dumps(kept)


@pytest.mark.parametrize("hidden", [None, {"of": "another version"}, nested(60)])
def test_a_release_that_hides_what_it_began_with_gives_neither_a_sum_nor_a_release(
    tmp_path: Path, patients: Path, others: Path, hidden: object
) -> None:
    train(config_of(patients), run=tmp_path / "a")
    train(config_of(others, tmp_path / "a"), run=tmp_path / "b")
    edit_release(tmp_path / "b", lambda config: config.update(transfer=hidden), "config.json")
    assert any("another history" in problem for problem in verify(tmp_path / "b").problems)
    with pytest.raises(TamperError, match="another history"):
        train(config_of(others, tmp_path / "b"), run=tmp_path / "refused")
    rewrite_ledger(tmp_path / "b", hidden)
    assert verify(tmp_path / "b").ok  # the files agree with each other, since all of them were made anew
    result = train(config_of(others, tmp_path / "b"), run=tmp_path / "c").certificate
    assert any("began with is not known" in stamp for stamp in result["stamps"])
    assert "no common figure" in declared(result)["first weights and this run together"]


# ---- words, stamps and sums of made-up histories


def prior(**changes: Any) -> PriorRelease:
    facts: dict[str, Any] = {"run_id": "r", "data": ("x",), "privacy_unit": "example", "adjacency": "add_remove"}
    return PriorRelease(**{**facts, "epsilon": 2.0, "delta": 1e-3, **changes})


def began_with(*runs: PriorRelease, data: str = "patients.npz") -> RunConfig:
    """A configuration whose weights went through these runs, the nearest first."""
    found: TransferConfig | None = None
    for run in reversed(runs):
        run = run.model_copy(update={"transfer": found})
        found = TransferConfig(weights="run", source="run", sha256="0" * 64, prior=run)
    config = tiny_config(Path(data), privacy={"privacy_unit": "example"})
    return parse_config({**config.model_dump(), "transfer": None if found is None else found.model_dump()})


def together(config: RunConfig) -> str:
    return dict(transfer_declarations(config, planned_epsilon=1.0))["first weights and this run together"]


def test_epsilons_add_up_only_for_the_same_unit_and_adjacency() -> None:
    assert "epsilon at most 5 at delta 0.003 " in together(began_with(prior(), prior()))
    for other in (prior(privacy_unit="patient"), prior(adjacency="replace_one"), prior(adjacency=None)):
        for runs in ((other,), (prior(), other), (other, prior())):
            assert together(began_with(*runs)).startswith("no common figure")


def test_a_run_without_privacy_on_the_way_is_said_beside_the_sum() -> None:
    open_run = prior(epsilon=None, delta=None, data=("z",))
    assert "epsilon at most 3 at" in together(began_with(open_run, prior()))
    assert "has no guarantee" in together(began_with(open_run, prior()))
    assert "has no guarantee" not in together(began_with(prior()))


@pytest.mark.parametrize("epsilon", [0.00123456, 1.23456, 99.99961, 100.00004, 1234.5678, 123456.7])
def test_a_sum_that_is_shown_is_never_rounded_down(epsilon: float) -> None:
    text = together(began_with(prior(epsilon=epsilon, delta=1.00001e-3)))
    assert float(text.partition("epsilon at most ")[2].partition(" ")[0]) >= epsilon + 1.0
    assert float(text.partition("at delta ")[2].partition(" ")[0]) >= 2.00001e-3
    assert f"of {rounded_up(epsilon)} and" in text


def test_stamps_come_from_however_far_back_and_once() -> None:
    seeded = prior(stamps=("hand-seeded",))
    after = prior(stamps=("the first weights are of a run that is not for release: hand-seeded",))
    assert transfer_stamps(began_with(prior(), after, seeded)) == after.stamps
    assert transfer_stamps(began_with(prior(epsilon=None, delta=None), seeded)) == after.stamps
    same = prior(epsilon=None, delta=None, data=("y", "patients.npz"))
    assert len(transfer_stamps(began_with(prior(), prior(), same))) == 1
    assert transfer_stamps(began_with(prior(data=("patients.npz",)))) == ()
    assert len(transfer_stamps(began_with(prior(began_elsewhere=True)))) == 1


def test_known_weights_are_stamped_on_the_data_that_they_were_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "public.safetensors"
    save_file(
        models.create("shoefit_cnn", num_classes=3, in_channels=1, seed=5, **CNN["options"]).state_dict(), weights
    )
    known = KnownWeights(
        name="made-up",
        model="shoefit_cnn",
        folder="none",
        pattern="none",
        sha256=sha256_hex(weights.read_bytes()),
        source="ImageNet",
        licence="MIT",
        normalisation=fixed_normalisation(1),
        data_names=KNOWN_WEIGHTS["efficientnet-lite0"].data_names,
    )
    monkeypatch.setitem(KNOWN_WEIGHTS, "made-up", known)
    data = write_images(tmp_path / "imagenette2.npz")
    result = train(config_of(data, weights, source="my own pictures"), run=tmp_path / "run").certificate
    assert any("ImageNet" in stamp for stamp in result["stamps"])
    words = declared(result)["first weights"]
    assert "trained on ImageNet (the person who configured the run adds: my own pictures)" in words


def test_every_known_set_names_the_data_that_would_stamp_it() -> None:
    for known in KNOWN_WEIGHTS.values():
        for name in ("imagenet", "ILSVRC2012", "imagenette2-160", "tiny-imagenet-200"):
            assert known.covers(name), (known.name, name)
        assert not any(known.covers(name) for name in ("cifar10", "mnist", "patients.npz"))


# ---- stamps stand in the ledger


class PowerCut(RunCallback):
    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        raise ConnectionAbortedError


def interrupt_run(config: RunConfig, run: Path) -> None:
    with pytest.raises(ConnectionAbortedError):
        train(config, run=run, callback=PowerCut())


def edit_whole_config(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = run / "private" / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_verify_misses_a_stamp_that_was_taken_out(tmp_path: Path, patients: Path) -> None:
    train(config_of(patients, enabled=False), run=tmp_path / "a")
    train(config_of(patients, tmp_path / "a"), run=tmp_path / "b")
    entries = read_ledger(tmp_path / "b" / "release" / "ledger.jsonl")
    assert sum(entry.payload.get("what") == NOT_FOR_RELEASE for entry in entries) == 1
    edit_release(tmp_path / "b", lambda certificate: certificate.update(stamps=[], for_release=True))
    assert any("stamps lacks" in problem for problem in verify(tmp_path / "b").problems)


def test_a_fork_does_not_drop_a_stamp(tmp_path: Path, patients: Path) -> None:
    train(config_of(patients, enabled=False), run=tmp_path / "a")
    interrupt_run(config_of(patients, tmp_path / "a"), tmp_path / "b")
    edit_whole_config(tmp_path / "b", lambda values: values["transfer"].update(prior=None))
    result = resume_training(tmp_path / "b", allow_fork=True)
    assert any("data of this very run" in stamp for stamp in result.certificate["stamps"])


def test_a_fork_to_other_data_is_stamped_for_them_and_remembers_both(
    tmp_path: Path, patients: Path, others: Path
) -> None:
    train(config_of(patients, enabled=False), run=tmp_path / "a")
    interrupt_run(config_of(others, tmp_path / "a"), tmp_path / "b")
    edit_whole_config(tmp_path / "b", lambda values: values["data"].update(source=str(patients)))
    result = resume_training(tmp_path / "b", allow_fork=True)
    assert any("data of this very run" in stamp for stamp in result.certificate["stamps"])
    assert verify(tmp_path / "b").ok
    train(config_of(patients, tmp_path / "b"), run=tmp_path / "c")
    kept = json.loads((tmp_path / "c" / "release" / "config.json").read_text())["transfer"]["prior"]
    assert kept["data"] == ["others.npz", "patients.npz"]


# ---- what an earlier run says is checked, and stays


def test_words_of_the_user_are_added_to_what_the_earlier_run_says(tmp_path: Path, patients: Path, others: Path) -> None:
    train(config_of(patients), run=tmp_path / "a")
    result = train(config_of(others, tmp_path / "a", source="harmless pictures"), run=tmp_path / "b").certificate
    words = declared(result)["first weights"]
    assert "trained on patients.npz (the person who configured the run adds: harmless pictures)" in words


def test_a_file_out_of_a_run_is_refused_where_its_folder_should_be_given(
    tmp_path: Path, patients: Path, others: Path
) -> None:
    train(config_of(patients), run=tmp_path / "a")
    checkpoint = next((tmp_path / "a" / "private" / "checkpoints").glob("*.safetensors"))
    link = tmp_path / "link.safetensors"
    link.symlink_to(tmp_path / "a" / "release" / "weights.safetensors")
    for weights in (link.readlink(), checkpoint, link):
        with pytest.raises(ArgumentError, match=f"got a file in {tmp_path / 'a'}\\."):
            train(config_of(others, weights, source="harmless pictures"), run=tmp_path / "b")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda certificate: certificate["data"].update(source="others.npz"), "the data are"),
        (lambda certificate: certificate.update(epsilon=1e-3), "claims LESS"),
        (lambda certificate: certificate.update(stamps=[], for_release=True), "hides it"),
    ],
)
def test_an_earlier_run_whose_certificate_was_edited_is_refused(
    tmp_path: Path, patients: Path, others: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    train(config_of(patients), run=tmp_path / "a", seed=3)
    edit_release(tmp_path / "a", change)
    with pytest.raises(TamperError, match=reason):
        train(config_of(others, tmp_path / "a"), run=tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", ["weights.safetensors", "config.json"])
def test_what_is_swapped_after_the_check_is_found(
    tmp_path: Path, patients: Path, others: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for run in ("a", "b"):
        train(config_of(patients, steps=3 if run == "a" else 4), run=tmp_path / run)
    checked = origin_module.require_verified

    def then_swapped(path: Path) -> Any:
        found = checked(path)
        for each in ("certificate.json", name):
            (path / "release" / each).write_bytes((tmp_path / "b" / "release" / each).read_bytes())
        return found

    monkeypatch.setattr(origin_module, "require_verified", then_swapped)
    with pytest.raises(TamperError, match="not the file that the certificate names"):
        train(config_of(others, tmp_path / "a"), run=tmp_path / "c")
