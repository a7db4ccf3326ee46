"""One trial of a search: a private run in a folder of its own, then its score.

The search's ledger holds everything that the trial may release before this module starts it. The run's own ledger is a
second record: its hard limit keeps it from releasing more than was planned, however often it is interrupted.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from dpvision.config import RunConfig
from dpvision.data import ImageStore
from dpvision.data.loading import Splits
from dpvision.data.splits import holdout_keys
from dpvision.errors import PrivacyError
from dpvision.inference.load import load_model
from dpvision.inference.predict import outputs_of
from dpvision.privacy.mechanism import Event
from dpvision.privacy.noise import noisy_count
from dpvision.privacy.randomness import Keys
from dpvision.release.statements import TRIAL
from dpvision.storage.files import sync_folder
from dpvision.training.callbacks import RunCallback
from dpvision.training.prepare import extra_charges, load_run_code, prepare
from dpvision.training.resume import finished_result, resume_run
from dpvision.training.start import run_id_of, write_first_state
from dpvision.training.trainer import Diverged, Session
from dpvision.training.write_release import RunResult, run_to_release

WORST = 0.0
"""The score of a trial that diverged."""
DIVERGED_LOSS = 1000.0


class TrialPruned(Exception):
    """A trial was ended early; what it may have released stays charged."""


@final
@dataclass(frozen=True)
class TrialRun:
    """What a trial needs to start or to continue.

    ``planned`` is None on public search data, which is not charged. ``marker`` is a file that is made before the first
    step.
    """

    path: Path
    config: RunConfig
    keys: Keys
    search_id: str
    planned: tuple[tuple[Event, int], ...] | None
    device: str
    splits: Splits
    marker: Path


def trial_keys(keys: Keys, number: int, attempt: int) -> Keys:
    """Return the key of one attempt at a trial: its own, and the same whenever the attempt is repeated exactly."""
    return Keys(keys.derive("search", "trial", number, attempt), "", hand_seeded=keys.hand_seeded)


def run_trial(trial: TrialRun, callback: RunCallback) -> RunResult | None:
    """Start a trial, or continue it where it stopped; return None if its weights diverged.

    Args:
        trial: the trial; its planned releases are in the search's ledger.
        callback: told about public values only.

    Raises:
        PrivacyError: the run would release something else than what was charged.
        TrialPruned: the callback ended it.

    Guarantee: the run releases at most ``trial.planned``. A trial that is repeated from its start with the same key
    draws the same noise on the same data: it releases nothing new.
    """
    done = finished_result(trial.path) if _has_run(trial.path) else None
    if done is not None:
        return done
    try:
        session, notes = _session(trial, callback)
        # The run states from its first step on that its own epsilon is not the guarantee.
        session.ledger.note("declare", {"what": TRIAL, "how": trial.search_id})
        _require_planned(session, trial)
        trial.marker.touch()
        sync_folder(trial.marker.parent)
        result = run_to_release(session, callback, notes=notes)
    except Diverged:
        return None
    if result.outcome == "stopped":
        raise KeyboardInterrupt
    return result


def _session(trial: TrialRun, callback: RunCallback) -> tuple[Session, list[str]]:
    if can_continue(trial.path):
        return resume_run(trial.path, allow_fork=False, device=trial.device, callback=callback, data=trial.splits)
    # Without a checkpoint no step was taken and nothing left the folder.
    if trial.path.exists():
        shutil.rmtree(trial.path)
    config, code = load_run_code(trial.config)
    prepared = prepare(config, holdout_keys(trial.keys, run_id_of(trial.keys)), trial.splits)
    session, prepared = write_first_state(
        config, prepared, trial.path, keys=trial.keys, device=trial.device, callback=callback, code=code
    )
    return session, list(prepared.notes)


def can_continue(path: Path) -> bool:
    """Whether a trial's folder holds a checkpoint, which is written before its first step."""
    return _has_run(path) and any((path / "private" / "checkpoints").glob("*.safetensors"))


def _has_run(path: Path) -> bool:
    return (path / "release").is_dir() and (path / "private" / "key.json").is_file()


def _require_planned(session: Session, trial: TrialRun) -> None:
    """Refuse a run whose plan is not what the search's ledger was charged for."""
    if trial.planned is None:
        return
    allowed = dict(trial.planned)
    mechanism = session.config.mechanism
    wanted = [(mechanism.step_event, mechanism.steps), *extra_charges(session.config)]
    beyond = [event.purpose for event, count in wanted if count > allowed.get(event, 0)]
    if beyond:
        raise PrivacyError(f"a trial would release more than its search was charged for: {', '.join(beyond)}.")


def public_score(result: RunResult) -> float:
    """Return the headline metric on the public test set: accuracy, Dice, or mean AUC."""
    final_metrics = result.metrics["final"]
    return float(next(final_metrics[name] for name in ("dice", "accuracy", "mean_auc") if name in final_metrics))


def private_score(run: Path, store: ImageStore, *, noise: float, divisor: float, keys: Keys) -> float:
    """Release the share of correctly classified units of a private split, with noise.

    Args:
        run: the folder of the finished trial.
        store: the split; no trial trains on it.
        noise: standard deviation of the noise on the number of correct units.
        divisor: the expected number of units of the split, public.
        keys: of the search; the stream depends on weights and split, so that equal noise means an equal count.

    Returns:
        The noisy share, between 0 and 1.

    Guarantee: one Gaussian mechanism of sensitivity one: a unit counts as correct if more than half of its rows are, so
    adding or removing it moves the number by at most one. The charge is in the ledger before the trial starts.
    """
    released = load_model(run)
    outputs = outputs_of(released.model, store.images, released.normalisation.apply)
    predicted = torch.cat(list(outputs)).cpu().argmax(1).numpy()
    count = correct_units(predicted == store.labels.numpy(), store.unit_of_row.numpy())
    key = keys.derive("search", "score", run.name, str(released.certificate["weights_sha256"]), store.fingerprint())
    return min(1.0, noisy_count(count, noise_multiplier=noise, key=key) / divisor)


def correct_units(correct_N: np.ndarray, unit_N: np.ndarray) -> int:
    """Count the units more than half of whose rows are correct. Sensitive."""
    if not len(unit_N):
        return 0
    rows = np.bincount(unit_N)
    right = np.bincount(unit_N, weights=correct_N.astype(np.float64))
    return int(((2 * right > rows) & (rows > 0)).sum())


@final
class Pruning(RunCallback):
    """Ends a trial early on its public scores: diverged, below a threshold, or without improvement."""

    PATIENCE = 15

    def __init__(self, *, below: float | None, patience: bool) -> None:
        self._below = below
        self._patience = patience
        self._best = -1.0
        self._waited = 0

    def evaluated(self, point: dict[str, Any]) -> None:
        """Look at one more point of the curve on the public test set."""
        score = next(float(point[name]) for name in ("dice", "accuracy", "mean_auc") if name in point)
        loss = point.get("loss")
        if isinstance(loss, float) and not loss < DIVERGED_LOSS:
            raise TrialPruned
        if self._below is not None and score < self._below:
            raise TrialPruned
        self._waited = 0 if score > self._best else self._waited + 1
        self._best = max(self._best, score)
        if self._patience and self._waited >= self.PATIENCE:
            raise TrialPruned
