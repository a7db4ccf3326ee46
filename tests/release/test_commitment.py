"""Weights, class names, image shape or pixel constants that were replaced in a release are named (PITFALLS 40)."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save
from typer.testing import CliRunner

from dpvision.cli import app
from dpvision.privacy.ledger import read_ledger
from dpvision.privacy.mechanism import Mechanism
from dpvision.release.amend import attach, sign_release
from dpvision.release.build import ReleaseFacts, build_certificate
from dpvision.release.certificate_page import render_certificate_page
from dpvision.release.model_card import model_card
from dpvision.release.sign import make_keys
from dpvision.release.verify import NO_COMMITMENT, verify
from dpvision.storage.files import file_sha256, json_bytes
from dpvision.training import RunCallback, resume_training, train
from forged_releases import commit_again, mend_hashes
from tiny_runs import interrupt_run, tiny_config, write_images

Values = dict[str, Any]
FORMAT_2 = Path(__file__).with_name("format_2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with averaged weights, one that forked, and one without averaging."""
    place = tmp_path_factory.mktemp("finished")
    config = tiny_config(write_images(place / "pictures.npz"))
    train(config, run=place / "averaged", seed=3)
    interrupt_run(place / "forked", config, after=7)
    values = json.loads((place / "forked" / "private" / "config.json").read_text())
    values["optimizer"]["learning_rate"] = 0.25
    (place / "forked" / "private" / "config.json").write_text(json.dumps(values))
    resume_training(place / "forked", allow_fork=True)
    train(tiny_config(place / "pictures.npz", averaging={"kind": "none", "decay": None}), run=place / "raw", seed=3)
    return place


@pytest.fixture(params=["averaged", "forked", "raw"])
def run(request: pytest.FixtureRequest, finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished / request.param, tmp_path / "run"))


def values_of(release: Path, name: str) -> Values:
    return json.loads((release / name).read_bytes())


def write_values(release: Path, name: str, values: Values) -> None:
    (release / name).write_bytes(json_bytes(values))


def rewrite(release: Path, certificate: Values) -> None:
    """Make the certificate, its pages and the manifest fit the files."""
    hashes = {"weights_sha256": "weights.safetensors", "config_sha256": "config.json"}
    certificate |= {field: file_sha256(release / name) for field, name in hashes.items()}
    write_values(release, "certificate.json", certificate)
    metrics, config = values_of(release, "metrics.json"), values_of(release, "config.json")
    (release / "certificate.md").write_text(render_certificate_page(certificate))
    (release / "model_card.md").write_text(model_card(certificate, metrics=metrics, config=config))
    mend_hashes(release)


def replace_weights(release: Path, certificate: Values) -> None:
    path = release / "weights.safetensors"
    path.write_bytes(save({name: np.zeros_like(value) for name, value in load(path.read_bytes()).items()}))


def replace_constants(release: Path, certificate: Values) -> None:
    config = values_of(release, "config.json")
    config["data"]["mean"] = [0.25]
    write_values(release, "config.json", config)


def replace_names(release: Path, certificate: Values) -> None:
    certificate["data"]["class_names"] = ["benign", "malign", "unknown"]


def replace_shape(release: Path, certificate: Values) -> None:
    certificate["data"]["image_shape"] = [1, 8, 16]


REPLACED: dict[str, tuple[Callable[[Path, Values], None], str]] = {
    "weights": (replace_weights, "the ledger commits to other weights"),
    "pixel constants": (replace_constants, "the ledger commits to other settings (model, pixel constants)"),
    "class names": (replace_names, "the ledger commits to other facts about the data (class names, image shape)"),
    "image shape": (replace_shape, "the ledger commits to other facts about the data (class names, image shape)"),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_was_replaced_is_named_though_manifest_and_pages_fit(run: Path, what: str) -> None:
    assert verify(run).problems == ()
    change, expected = REPLACED[what]
    certificate = values_of(run / "release", "certificate.json")
    change(run / "release", certificate)
    rewrite(run / "release", certificate)
    for path in (run, run / "release", run / "release" / "certificate.json"):
        (problem,) = verify(path).problems
        assert expected in problem


def test_a_rewritten_commitment_is_named_where_the_owner_keeps_the_mark(run: Path) -> None:
    certificate = values_of(run / "release", "certificate.json")
    replace_weights(run / "release", certificate)
    rewrite(run / "release", certificate)
    commit_again(run / "release")
    rewrite(run / "release", values_of(run / "release", "certificate.json"))
    (problem,) = verify(run).problems
    assert "rolled back or replaced" in problem
    assert verify(run / "release").ok  # known: without the owner's folder only a signature can tell


def test_an_older_format_of_the_certificate_escapes_nothing(finished: Path, tmp_path: Path) -> None:
    release = Path(shutil.copytree(finished / "raw" / "release", tmp_path / "release"))
    replace_weights(release, {})
    known = values_of(release, "certificate.json")
    names = ("config_sha256", "data", "software")
    facts = ReleaseFacts(weights_sha256="0" * 64, **{name: known[name] for name in names})
    older = build_certificate(
        ledger=read_ledger(release / "ledger.jsonl"),
        mechanism=Mechanism.from_dict(known["mechanism"]),
        hand_seeded=True,
        release=facts,
        version=3,
    )
    rewrite(release, older)
    text = "\n".join(verify(release).problems)
    assert "its format is 3, that of the ledger asks for 4" in text
    assert "the ledger commits to other weights" in text


def test_a_ledger_that_lost_its_commitment_is_named(finished: Path, tmp_path: Path) -> None:
    release = Path(shutil.copytree(finished / "raw" / "release", tmp_path / "release"))
    path = release / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    entries = read_ledger(path)
    mark = {"length": len(entries), "head": entries[-1].hash}
    rewrite(release, {**values_of(release, "certificate.json"), "ledger": mark})
    (problem,) = verify(release).problems
    assert "last entry commits to no release" in problem


def test_resuming_a_finished_run_commits_to_nothing_new(run: Path) -> None:
    before = (run / "release" / "ledger.jsonl").read_bytes()
    resume_training(run, allow_fork=True)
    assert (run / "release" / "ledger.jsonl").read_bytes() == before
    assert verify(run).ok


class StopBySignal(RunCallback):
    """Ask a run to stop after five steps, as Ctrl-C does."""

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        if done == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_was_stopped_and_resumed_commits_to_each_release(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_config(finished / "pictures.npz")
    assert train(config, run=run, seed=3, callback=StopBySignal()).outcome == "stopped"
    assert verify(run).problems == ()
    early = Path(shutil.copytree(run / "release", tmp_path / "early"))
    assert resume_training(run).outcome == "finished"
    assert verify(run).problems == ()
    assert verify(early).ok
    kinds = [entry.kind for entry in read_ledger(run / "release" / "ledger.jsonl")]
    assert kinds.count("release") == 2
    shutil.copy(early / "weights.safetensors", run / "release" / "weights.safetensors")
    rewrite(run / "release", values_of(run / "release", "certificate.json"))
    (problem,) = verify(run).problems
    assert "commits to other weights" in problem


def test_signing_and_attaching_leave_the_commitment_in_order(run: Path, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text("{}")
    attach(run, tmp_path / "audit.json")
    make_keys(tmp_path / "key")
    sign_release(run, tmp_path / "key", ask_password=lambda: "")
    assert verify(run).problems == ()
    assert verify(run).limits == ()


def test_a_release_of_an_old_format_says_what_it_does_not_commit_to() -> None:
    found = CliRunner().invoke(app, ["verify", str(FORMAT_2 / "patients-column")])
    assert found.exit_code == 0
    assert f"Limit: {NO_COMMITMENT}" in found.output
    assert verify(FORMAT_2 / "patients-column").to_dict()["limits"] == [NO_COMMITMENT]


def test_an_empty_folder_in_a_release_is_named(finished: Path, tmp_path: Path) -> None:
    release = Path(shutil.copytree(finished / "raw" / "release", tmp_path / "release"))
    (release / "outer" / "inner").mkdir(parents=True)
    (problem,) = verify(release).problems
    assert problem == f"{release / 'outer' / 'inner'} is an empty folder: it was added later."
