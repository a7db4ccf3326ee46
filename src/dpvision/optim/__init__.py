"""Optimizers behind a door that takes private gradients only; schedules by step; parameter averaging."""

from __future__ import annotations

from dpvision.optim.averaging import Average
from dpvision.optim.optimizer import Optimizer
from dpvision.optim.schedules import Schedule
from dpvision.optim.settings import AveragingSettings, OptimizerSettings, ScheduleSettings
from dpvision.optim.watch import Watch

__all__ = ["Average", "AveragingSettings", "Optimizer", "OptimizerSettings", "Schedule", "ScheduleSettings", "Watch"]
