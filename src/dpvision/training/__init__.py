"""Training from a configuration to a release: the first user of the private step."""

from __future__ import annotations

from dpvision.training.callbacks import RunCallback
from dpvision.training.start import resume_training, train
from dpvision.training.write_release import RunResult

__all__ = ["RunCallback", "RunResult", "resume_training", "train"]
