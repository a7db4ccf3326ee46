"""Time and memory of a private step beside an ordinary one and the peers', interleaved in one run."""

from __future__ import annotations

from dpvision.bench.figures import Figures, Result, Row, Target
from dpvision.bench.measure import Settings, run
from dpvision.bench.suites import SUITES, Item, suite
from dpvision.bench.workload import Workload

__all__ = ["SUITES", "Figures", "Item", "Result", "Row", "Settings", "Target", "Workload", "run", "suite"]
