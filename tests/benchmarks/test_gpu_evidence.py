"""The script for people with a GPU runs, on the CPU, with small sizes, and never writes the page from there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import gpu_evidence

SMALL = ["--device", "cpu", "--batch", "4", "--repeats", "1", "--models", "scaleresnet9:8"]


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_evidence", *flags])
    gpu_evidence.main()


def test_it_measures_exactness_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "gpu.md"
    run(monkeypatch, *SMALL, "--output", str(output))
    text = output.read_text()
    assert "Measured on: device cpu" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| scaleresnet9")]
    exact, times = rows[:2], rows[2:]
    errors = [float(row[2]) for row in exact]
    assert errors[0] < 1e-4 < errors[1] < 0.5
    assert all(0.9 < float(row[3]) <= 1 for row in exact), "no unit adds more than the clip norm"
    assert [row[4] for row in exact] == ["same bits", "same bits"]
    assert len(times) == 6
    assert all(re.fullmatch(r"[\d.]+ \([\d.]+–[\d.]+\)", row[3]) for row in times)


def test_it_does_not_write_the_page_of_gpus_from_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gpu_evidence.PAGE.read_bytes()
    with pytest.raises(SystemExit, match="is for GPUs"):
        run(monkeypatch, *SMALL)
    assert gpu_evidence.PAGE.read_bytes() == before


def test_the_page_states_no_number_until_somebody_measures_one() -> None:
    text = gpu_evidence.PAGE.read_text()
    assert "Not measured" in text or "Measured on: device cuda" in text
