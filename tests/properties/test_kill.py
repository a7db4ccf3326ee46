"""kill -9 at random moments: nothing is under-reported, and the end is the same bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpvision.privacy.ledger import Ledger
from dpvision.privacy.private_step import Privatizer
from tools.kill_runs import experiment


def test_killed_and_resumed_runs_equal_those_left_alone_and_report_every_noise_draw(tmp_path: Path) -> None:
    counts = experiment(tmp_path, kills=4, steps=6, seed=7, kinds=("statistics",))
    assert counts.kills == 4
    assert counts.under_reported == 0
    assert counts.unrecoverable == 0
    assert counts.different == 0
    assert sum(counts.hits.values()) == 4


@pytest.mark.slow
def test_a_hundred_kills_over_runs_of_every_kind_lose_nothing(tmp_path: Path) -> None:
    counts = experiment(tmp_path, kills=100, seed=8)
    assert counts.good
    assert min(counts.hits.values()) >= 5, "hardly a kill in one part of a life"


def test_the_same_experiment_notices_a_charge_that_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children are forks, so that they inherit a broken ledger."""
    real = Ledger.charge

    def forgetful(self: Ledger, event: Any, *, step: int, fork: int = 0) -> None:
        if step != 1:
            real(self, event, step=step - (step > 1), fork=fork)

    monkeypatch.setattr(Ledger, "charge", forgetful)
    monkeypatch.setattr(Privatizer, "spent", 0)
    counts = experiment(tmp_path, kills=1, steps=4, seed=7, kinds=("linear",))
    assert counts.under_reported >= 1
    assert not counts.good
