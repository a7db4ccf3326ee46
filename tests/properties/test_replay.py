"""The main oracle: the same randomness on two neighbouring datasets.

Whatever differs between the two runs must be the clipped sum alone, by at most clip_norm; with the noisy output
frozen, everything downstream of it must be the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpvision.training.run_fingerprint as binding_module
import dpvision.training.trainer as loop_module
from dpvision.privacy import values
from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import ClippedSum, PrivateGrad
from dpvision.training import train
from dpvision.training.callbacks import Silence
from tiny_runs import SIDE, tiny_config, write_pictures

EXTRA_PICTURES = {
    "ordinary": np.full((1, SIDE, SIDE), 77, dtype=np.uint8),
    "black": np.zeros((1, SIDE, SIDE), dtype=np.uint8),
    "extreme": (np.indices((1, SIDE, SIDE)).sum(0) % 2 * 255).astype(np.uint8),
}


class Recorder(Silence):
    """Remembers everything a watcher is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        self.heard.append(("stepped", done, epsilon_bound))

    def evaluated(self, point: dict[str, Any]) -> None:
        self.heard.append(("evaluated", json.dumps(point)))

    def said(self, text: str) -> None:
        self.heard.append(("said", text))


class Replay:
    """Freezes the noisy output: it depends on the step and the shapes alone. Records the sums that went in."""

    def __init__(self) -> None:
        self.sums: list[dict[str, torch.Tensor]] = []

    def privatize(self, clipped: ClippedSum, mechanism: Mechanism, keys: Keys, *, step: int) -> PrivateGrad:
        assert clipped.clip_norm == mechanism.clip_norm
        self.sums.append({name: value.clone() for name, value in clipped.gradients.items()})
        generator = torch.Generator().manual_seed(step)
        frozen = {name: torch.randn(value.shape, generator=generator) for name, value in clipped.gradients.items()}
        return PrivateGrad(frozen, step, proof=values._MADE_BY_PRIVATIZE)


def run_frozen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, extra: np.ndarray | None, **changes: Any
) -> tuple[Replay, Recorder, Path]:
    """A run with fixed keys (not bound to the data, so that neighbours share them) and a frozen noisy output."""
    replay, recorder = Replay(), Recorder()
    monkeypatch.setattr(loop_module, "privatize", replay.privatize)
    bound: Callable[..., dict[str, str]] = binding_module.current_binding

    def without_data(**facts: str) -> dict[str, str]:
        return bound(**{**facts, "data_fingerprint": "shared"})

    monkeypatch.setattr("dpvision.training.start.current_binding", without_data)
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_pictures(Path("pictures.npz"), extra=extra)
    train(tiny_config(Path("pictures.npz"), **changes), run=Path("run"), seed=5, watcher=recorder)
    return replay, recorder, folder / "run"


def released_files(run: Path) -> dict[str, bytes]:
    files = {str(p.relative_to(run)): p.read_bytes() for p in sorted((run / "release").rglob("*")) if p.is_file()}
    assert len(files) >= 6
    return files


@pytest.fixture(params=sorted(EXTRA_PICTURES))
def extra(request: pytest.FixtureRequest) -> np.ndarray:
    return EXTRA_PICTURES[request.param]


def test_neighbours_differ_in_the_clipped_sum_alone_and_by_at_most_clip_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: np.ndarray
) -> None:
    one, _, _ = run_frozen(tmp_path / "a", monkeypatch, None)
    other, _, _ = run_frozen(tmp_path / "b", monkeypatch, extra)
    assert len(one.sums) == len(other.sums) == 12
    moved = []
    for a, b in zip(one.sums, other.sums, strict=True):
        assert a.keys() == b.keys()
        moved.append(sum(float((a[n].double() - b[n].double()).square().sum()) for n in a) ** 0.5)
    assert max(moved) <= 0.7 * (1 + 1e-5)  # float32 sums of up to 61 units
    assert sum(m > 0 for m in moved) >= 1, "the extra picture was never drawn: the test shows nothing"


def test_everything_downstream_of_the_noise_is_the_same_for_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: np.ndarray
) -> None:
    _, heard, run = run_frozen(tmp_path / "a", monkeypatch, None)
    _, heard_too, other = run_frozen(tmp_path / "b", monkeypatch, extra)
    assert heard.heard == heard_too.heard
    one, two = released_files(run), released_files(other)
    assert one.keys() == two.keys()
    for name in one:
        assert one[name] == two[name], f"{name} depends on the private data"


def test_the_ledger_holds_one_charge_for_each_noise_draw_empty_draws_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare = {"privacy": {"expected_batch_size": 0.5}}
    replay, _, run = run_frozen(tmp_path / "a", monkeypatch, None, **rare)
    empty = sum(all(not value.any() for value in sums.values()) for sums in replay.sums)
    assert empty >= 1, "no draw was empty: the test shows nothing"
    charges = charges_of(read_ledger(run / "release" / "ledger.jsonl"))
    assert sum(count for _, count in charges) == len(replay.sums) == 12
