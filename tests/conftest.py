"""Shared set-up of the test-suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """Tests may set the number of threads as they like."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    yield
    if torch is not None and before not in (None, torch.get_num_threads()):
        torch.set_num_threads(before)
