"""Training from a configuration to a release.

``train`` starts a run and ``resume_training`` continues one. The walk through a run: ``prepare`` (settings and data),
``start`` or ``resume`` (key, ledger, model), ``trainer`` (the steps), ``write_release`` (what becomes public).
"""

from __future__ import annotations

from dpvision.training.callbacks import Callbacks, RunCallback
from dpvision.training.resume import resume_training
from dpvision.training.run_logs import CsvLog, MlflowLog, TensorBoardLog, WandbLog
from dpvision.training.start import train
from dpvision.training.write_release import RunResult

__all__ = [
    "Callbacks",
    "CsvLog",
    "MlflowLog",
    "RunCallback",
    "RunResult",
    "TensorBoardLog",
    "WandbLog",
    "resume_training",
    "train",
]
