"""A bound that is shown is never below the bound that was proved."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dpvision.accounting import cautions, describe, plan
from dpvision.cli import app
from dpvision.privacy.mechanism import Guarantee, rounded_up

JUST_ABOVE = 2.00001  # to the nearest, this is 2 in four digits


def proved(epsilon: float, delta: float = 1e-5) -> Guarantee:
    return Guarantee(epsilon=epsilon, delta=delta, adjacency="add_remove", accountant="pld")


@given(st.floats(min_value=0, max_value=1e12), st.integers(min_value=1, max_value=12))
def test_rounding_never_lowers_and_adds_less_than_one_unit_of_the_last_digit(value: float, digits: int) -> None:
    shown = float(rounded_up(value, digits=digits))
    assert shown >= value
    assert shown <= value * (1 + 10 ** (1 - digits)) * (1 + 1e-12)  # the last factor: rounding of this line itself


def test_what_has_few_digits_stays_and_what_is_infinite_says_so() -> None:
    assert [rounded_up(value) for value in (0.0, 3.0, 1e-5, 2.998, math.inf)] == ["0", "3", "1e-05", "2.998", "inf"]


@given(st.floats(min_value=1e-6, max_value=1e3), st.floats(min_value=1e-12, max_value=0.5))
def test_a_guarantee_in_words_is_never_below_itself(epsilon: float, delta: float) -> None:
    said = re.findall(r"epsilon (\S+) at delta (\S+)", str(proved(epsilon, delta)))
    assert float(said[0][0]) >= epsilon
    assert float(said[0][1]) >= delta


def test_what_an_epsilon_means_is_rounded_up() -> None:
    text = describe(proved(JUST_ABOVE))
    assert "epsilon 2.001" in text
    assert float(re.findall(r"at most (\S+) times", text)[0]) >= math.exp(JUST_ABOVE)
    (caution,) = cautions(proved(12.00001), num_units=50_000)
    assert "epsilon 12.01" in caution


@pytest.mark.parametrize("steps", [100, 1000])
def test_the_terminal_never_shows_less_than_was_computed(steps: int) -> None:
    import json

    setting = f"epsilon --num-units 60000 --expected-batch-size 256 --noise-multiplier 1.1 --delta 1e-5 --steps {steps}"
    exact: dict[str, Any] = json.loads(CliRunner().invoke(app, [*setting.split(), "--json"]).stdout)
    lines = dict(line.split(maxsplit=1) for line in CliRunner().invoke(app, setting.split()).stdout.splitlines())
    for name in ("epsilon", "epsilon_rdp", "delta"):
        assert exact[name] <= float(lines[name]) <= exact[name] * (1 + 1e-5)


def test_the_title_of_a_plan_is_rounded_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dpvision.cli import plan_chart

    rows = list(
        plan(num_units=1000, target_epsilon=3.00004, delta=1e-4, expected_batch_sizes=[100.0], epochs=(), steps=[50])
    )
    said: list[str] = []
    monkeypatch.setattr(plan_chart.Figure, "suptitle", lambda _, text: said.append(text))
    plan_chart.draw_plan(rows, tmp_path / "plan.png")
    spent = max(row.guarantee.epsilon for row in rows)
    assert float(re.findall(r"epsilon ≤ (\S+),", said[0])[0]) >= spent
