"""What people read of a run: one self-contained page, and the last lines on the terminal."""

from __future__ import annotations

from dpvision.report.page import write_report
from dpvision.report.terminal import figures_of, summary_lines

__all__ = ["figures_of", "summary_lines", "write_report"]
