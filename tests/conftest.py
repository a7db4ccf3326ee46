"""Shared set-up of the test-suite."""

from __future__ import annotations

import os

os.environ.setdefault("MPLBACKEND", "Agg")
