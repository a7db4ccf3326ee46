"""Shared set-up of the test-suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import settings

# `make fuzz`: 22 targets of tests/properties/test_fuzz.py, 12,100 examples.
settings.register_profile("fuzz", max_examples=550)
os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """Tests may set the number of threads as they like."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    yield
    if torch is not None and before not in (None, torch.get_num_threads()):
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_drawn_ahead() -> None:
    """No test finds noise that another one drew."""
    noise = sys.modules.get("dpvision.privacy.noise")
    if noise is not None:
        noise._drawn_ahead.cache_clear()


@pytest.fixture(autouse=True)
def no_installed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults do not depend on whether the extra ``pretrained`` is installed on this machine."""
    pretrained = sys.modules.get("dpvision.training.pretrained")
    if pretrained is not None:
        known = replace(pretrained.KNOWN_WEIGHTS[pretrained.DEFAULT], package="not_installed")
        monkeypatch.setitem(pretrained.KNOWN_WEIGHTS, pretrained.DEFAULT, known)


@pytest.fixture(autouse=True)
def no_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of most tests end without their report, which takes half a second; ``result.report`` writes it."""
    if request.path.stem not in ("test_notebook", "test_tutorial"):
        for name in ("start", "resume"):
            module = sys.modules.get(f"dpvision.training.{name}")
            if module is not None:
                monkeypatch.setattr(module, "reported", lambda result: result)


ENGINE = ("gradients", "kernels", "models", "privacy")
PROOF = ("test_batch_axis", "test_proved_graph", "test_own_models_table", "test_zoo_models")


@pytest.fixture(autouse=True)
def no_proof(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the engine itself, on models that are known to keep their rows apart.

    The proof for anyone's own code has its own tests. In these folders it would only take time, and hide the engine's
    own checks behind it.
    """
    if request.path.parent.name in ENGINE and request.path.stem not in PROOF:
        from dpvision.gradients import plan

        monkeypatch.setattr(plan, "_make_proved_plan", plan._make_plan)
        monkeypatch.setattr(plan, "proof_findings", lambda *_: [])


@pytest.fixture(params=["native", "numpy"])
def generator(request: pytest.FixtureRequest) -> Iterator[str]:
    """Normals and their release from native kernels, where there are any, and from numpy."""
    from dpvision import kernels

    if request.param == "native" and not kernels.available():
        pytest.skip(f"no native kernels: {kernels.reason()}")
    with kernels.switched_off(when=request.param == "numpy"):
        yield request.param
