"""The main oracle: the same randomness on two neighbouring datasets.

Whatever differs between the two runs must be the clipped sum alone, by at most clip_norm; with the noisy output
frozen, everything downstream of it must be the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpvision.privacy.ledger import charges_of, read_ledger
from frozen_runs import EXTRA_IMAGES, released_files, run_frozen


@pytest.fixture(params=sorted(EXTRA_IMAGES))
def extra(request: pytest.FixtureRequest) -> np.ndarray:
    return EXTRA_IMAGES[request.param]


def test_neighbours_differ_in_the_clipped_sum_alone_and_by_at_most_clip_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: np.ndarray
) -> None:
    one, _, _ = run_frozen(tmp_path / "a", monkeypatch, None)
    other, _, _ = run_frozen(tmp_path / "b", monkeypatch, extra)
    assert len(one.sums) == len(other.sums) == 12
    moved = []
    for a, b in zip(one.sums, other.sums, strict=True):
        assert a.keys() == b.keys()
        moved.append(sum(float((a[n].double() - b[n].double()).square().sum()) for n in a) ** 0.5)
    assert max(moved) <= 0.7 * (1 + 1e-5)  # float32 sums of up to 61 units
    assert sum(m > 0 for m in moved) >= 1, "the extra picture was never drawn: the test shows nothing"


def test_everything_downstream_of_the_noise_is_the_same_for_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: np.ndarray
) -> None:
    _, heard, run = run_frozen(tmp_path / "a", monkeypatch, None)
    _, heard_too, other = run_frozen(tmp_path / "b", monkeypatch, extra)
    assert heard.heard == heard_too.heard
    one, two = released_files(run), released_files(other)
    assert one.keys() == two.keys()
    for name in one:
        assert one[name] == two[name], f"{name} depends on the private data"


def test_the_ledger_holds_one_charge_for_each_noise_draw_empty_draws_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare = {"privacy": {"expected_batch_size": 0.5, "steps": 36}}
    replay, _, run = run_frozen(tmp_path / "a", monkeypatch, None, **rare)
    empty = sum(all(not value.any() for value in sums.values()) for sums in replay.sums)
    assert 1 <= empty < 36, "no draw was empty, or all were: the test shows little"
    charges = charges_of(read_ledger(run / "release" / "ledger.jsonl"))
    assert sum(count for _, count in charges) == len(replay.sums) == 36
