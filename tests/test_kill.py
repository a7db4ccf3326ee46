"""kill -9 at random moments: nothing is under-reported, and the end is the same bit for bit."""

from __future__ import annotations

from pathlib import Path

from tools.kill_runs import kill_and_resume


def test_a_killed_and_resumed_run_equals_the_one_left_alone_and_reports_every_noise_draw(tmp_path: Path) -> None:
    counts = kill_and_resume(tmp_path, kills=3, steps=30, seed=7)
    assert counts["kills"] == 3
    assert counts["under_reported"] == 0
    assert counts["weights_equal"]
    assert counts["ledger_equal"]
