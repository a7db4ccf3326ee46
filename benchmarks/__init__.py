"""Time and memory of a private step beside an ordinary one and the peers', interleaved in one run."""

from __future__ import annotations

from benchmarks.figures import Figures, Result, Row, Target
from benchmarks.measure import Settings, run
from benchmarks.suites import SUITES, Item, suite
from benchmarks.workload import Workload

__all__ = ["SUITES", "Figures", "Item", "Result", "Row", "Settings", "Target", "Workload", "run", "suite"]
