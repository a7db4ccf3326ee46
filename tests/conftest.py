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


@pytest.fixture(params=["native", "numpy"])
def generator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Normals from the native kernel, where there is one, and from numpy."""
    from dpvision import native, noise

    monkeypatch.setattr(noise, "_drawn_ahead", noise._drawn_ahead.__wrapped__)  # nothing that another one drew
    if request.param == "numpy":
        monkeypatch.setattr(noise.kernels, "takes", lambda array: False)
    elif not native.available():
        pytest.skip(f"no native kernels: {native.reason()}")
    return request.param
