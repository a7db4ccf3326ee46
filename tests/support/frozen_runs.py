"""Runs whose noisy output is replaced by a constant: whatever still differs between neighbours has leaked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpvision.privacy.private_step as step_module
import dpvision.training.run_fingerprint as binding_module
from dpvision.privacy import values
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import ClippedSum, PrivateGrad
from dpvision.training import RunCallback, train
from tiny_runs import SIDE, tiny_config, write_images

EXTRA_IMAGES = {
    "ordinary": np.full((1, SIDE, SIDE), 77, dtype=np.uint8),
    "black": np.zeros((1, SIDE, SIDE), dtype=np.uint8),
    "extreme": (np.indices((1, SIDE, SIDE)).sum(0) % 2 * 255).astype(np.uint8),
}


class Recorder(RunCallback):
    """Remembers everything a callback is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        self.heard.append(("stepped", done, epsilon_bound))

    def evaluated(self, point: dict[str, Any]) -> None:
        self.heard.append(("evaluated", json.dumps(point)))

    def message(self, text: str) -> None:
        self.heard.append(("said", text))


class Replay:
    """Freezes the noisy output: it depends on the step and the shapes alone. Records the sums that went in."""

    def __init__(self) -> None:
        self.sums: list[dict[str, torch.Tensor]] = []

    def noisy_mean(
        self, clipped: ClippedSum, mechanism: Mechanism, keys: Keys, *, step: int, sizes: None = None
    ) -> PrivateGrad:
        assert sizes is None  # one process
        assert clipped.clip_norm == mechanism.clip_norm
        self.sums.append({name: value.clone() for name, value in clipped.gradients.items()})
        generator = torch.Generator().manual_seed(step)
        frozen = {name: torch.randn(value.shape, generator=generator) for name, value in clipped.gradients.items()}
        return PrivateGrad(frozen, step, proof=values.PROOF_OF_NOISE)


def run_frozen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, extra: np.ndarray | None, **changes: Any
) -> tuple[Replay, Recorder, Path]:
    """A run with fixed keys and a frozen noisy output.

    The keys are bound neither to the data, so that neighbours share them, nor to code and machine, so that the draws
    are always the same: in another draw the extra image might not occur.
    """
    replay, recorder = Replay(), Recorder()
    monkeypatch.setattr(step_module, "noisy_mean", replay.noisy_mean)
    bound: Callable[..., dict[str, str]] = binding_module.current_binding

    def without_values(**facts: str) -> dict[str, str]:
        return dict.fromkeys(bound(**facts), "shared")

    monkeypatch.setattr("dpvision.training.run_fingerprint.current_binding", without_values)
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_images(Path("pictures.npz"), extra=extra)
    train(tiny_config(Path("pictures.npz"), **changes), run=Path("run"), seed=5, callback=recorder)
    return replay, recorder, folder / "run"


def released_files(run: Path) -> dict[str, bytes]:
    files = {str(p.relative_to(run)): p.read_bytes() for p in sorted((run / "release").rglob("*")) if p.is_file()}
    assert len(files) >= 6
    return files
