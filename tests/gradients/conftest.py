"""Most tests here are about the engine itself, for models that are known to keep their rows apart.

The proof that anyone's own code keeps them apart has its own tests, which are named below. Elsewhere it would only take
time, and hide the engine's own checks behind it.
"""

from __future__ import annotations

import pytest

from dpvision.gradients import plan

PROOF = ("test_batch_axis", "test_proved_graph", "test_own_models_table", "test_zoo_models")


@pytest.fixture(autouse=True)
def no_proof(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.module.__name__.rpartition(".")[2] not in PROOF:
        monkeypatch.setattr(plan, "_make_proved_plan", plan._make_plan)
        monkeypatch.setattr(plan, "proof_findings", lambda *_: [])
