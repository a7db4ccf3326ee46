"""Random damage to whole runs: named, refused or without effect (PITFALLS 29, 30). tools/tamper_runs.py does it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dpvision.release.verify as verify_module
from dpvision.release.verify import Verification, verify
from dpvision.storage.files import json_bytes
from tools.tamper_runs import World, make_world, tamper


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # as many as the runs were made with: another number is a fork


def silent(text: str) -> None:
    del text


def test_random_damage_to_a_run_is_named_refused_or_without_effect(world: World, tmp_path: Path) -> None:
    tally = tamper(world, tmp_path, cases=60, seed=6, say=silent)
    assert not tally.failures
    assert tally.total("named") > 35
    assert tally.total("refused") > 0
    assert tally.total("harmless") > 0


def test_a_manifest_with_its_lines_in_another_order_is_named(world: World, tmp_path: Path) -> None:
    run = Path(shutil.copytree(world.states["finished"], tmp_path / "run"))
    path = run / "release" / "manifest.json"
    hashes = json.loads(path.read_bytes())
    path.write_bytes(json_bytes(dict(reversed(hashes.items()))))
    assert [problem for problem in verify(run).problems if problem.endswith("manifest.json is not as it was written.")]


@pytest.mark.slow
def test_two_thousand_damages_to_a_run_are_named_refused_or_without_effect(world: World, tmp_path: Path) -> None:
    assert not tamper(world, tmp_path, cases=2000, seed=7, say=silent).failures


def test_the_same_experiment_notices_a_verification_that_is_blind(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blind(path: Path, **options: Any) -> Verification:
        del options
        return Verification(path=str(path), problems=())

    monkeypatch.setattr(verify_module, "verify", blind)
    assert tamper(world, tmp_path, cases=20, seed=6, say=silent).failures
