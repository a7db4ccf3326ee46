"""kill -9 of workers within their trials: nothing is lost, and nothing is under-counted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dpvision.privacy.ledger import Ledger
from dpvision.tune import SearchLimits
from postgres import postgres_url
from tools.kill_searches import KINDS, TRIALS, one_search, write_images


def killed(folder: Path, *, kind: dict[str, Any], kills: int, storage: str | None = None) -> dict[str, int]:
    return one_search(
        folder / "search",
        write_images(folder / "images.npz"),
        kind=kind,
        storage=storage,
        workers=2,
        kills=kills,
        chance=random.Random(1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=["alike", "final run", "filter", "best of"])
def test_a_search_whose_workers_are_killed_ends_with_all_of_its_trials(tmp_path: Path, kind: dict[str, Any]) -> None:
    found = killed(tmp_path, kind=kind, kills=8)
    assert found["kills"] >= 8
    assert found["trials"] == (0 if "price" in kind else TRIALS)


@pytest.mark.slow
def test_a_search_in_a_database_survives_kills_too(tmp_path: Path) -> None:
    with postgres_url() as url:
        assert SearchLimits(storage=url).database == url
        assert killed(tmp_path, kind=KINDS[1], kills=8, storage=url)["trials"] == TRIALS


@pytest.mark.slow
def test_the_same_experiment_notices_a_trial_that_is_charged_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are forks, so that they inherit a broken ledger."""
    real = Ledger.charge_trial

    def cheap(self: Ledger, releases: Any, **which: Any) -> None:
        real(self, [(event, 1) for event, _ in releases], **which)

    monkeypatch.setattr(Ledger, "charge_trial", cheap)
    with pytest.raises(SystemExit, match="UNDER-COUNTED"):
        killed(tmp_path, kind=KINDS[0], kills=50)
