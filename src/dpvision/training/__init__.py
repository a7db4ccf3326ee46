"""Training from a configuration to a release.

``train`` starts a run and ``resume_training`` continues one. The walk through a run: ``prepare`` (settings and data),
``start`` or ``resume`` (key, ledger, model), ``trainer`` (the steps), ``write_release`` (what becomes public).
"""

from __future__ import annotations

from dpvision.training.callbacks import RunCallback
from dpvision.training.resume import resume_training
from dpvision.training.start import train
from dpvision.training.write_release import RunResult

__all__ = ["RunCallback", "RunResult", "resume_training", "train"]
