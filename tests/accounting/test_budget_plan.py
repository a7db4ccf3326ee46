"""TAN: a cheap search at equal noise on the mean gradient, the way back, and the words about its privacy."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dpvision.accounting import effective_noise, guarantee, mechanism_guarantee, plan, scaled, steps_for_epochs
from dpvision.accounting.budget_plan import default_batch_sizes
from dpvision.cli import app
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Mechanism, rounded_up

SETTING = "--num-units 50000 --expected-batch-size 4096 --steps 2500 --delta 1e-5"
TARGET = Mechanism(num_units=50_000, expected_batch_size=4096, clip_norm=1.0, noise_multiplier=3.0, steps=2500)


def run(line: str) -> Any:
    return CliRunner().invoke(app, ["plan", *shlex.split(line)], catch_exceptions=False)


def figures(line: str) -> dict[str, Any]:
    result = run(f"{line} --json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_scaling_down_divides_batch_and_noise_and_leaves_the_rest() -> None:
    search = scaled(TARGET, by=1 / 16)
    assert (search.expected_batch_size, search.noise_multiplier) == (256, 0.1875)
    assert (search.steps, search.num_units, search.clip_norm) == (2500, 50_000, 1.0)
    assert search.epochs == TARGET.epochs / 16


@settings(max_examples=50, deadline=None)
@given(by=st.floats(1e-3, 12), batch=st.floats(1, 4096), noise=st.floats(0.1, 50))
def test_noise_on_the_mean_stays_and_the_way_back_returns(by: float, batch: float, noise: float) -> None:
    here = Mechanism(num_units=50_000, expected_batch_size=batch, clip_norm=1.0, noise_multiplier=noise, steps=7)
    there = scaled(here, by=by)
    ratio = there.noise_multiplier / there.expected_batch_size
    assert ratio == pytest.approx(noise / batch, rel=1e-12)
    back = scaled(there, by=1 / by)
    assert back.expected_batch_size == pytest.approx(batch, rel=1e-12)
    assert back.noise_multiplier == pytest.approx(noise, rel=1e-12)


@pytest.mark.parametrize("by", [0.0, -1.0, math.nan, math.inf])
def test_a_factor_that_scales_nothing_is_refused(by: float) -> None:
    with pytest.raises(ArgumentError, match="by must be a finite number > 0"):
        scaled(TARGET, by=by)


def test_a_batch_of_more_than_all_units_is_refused() -> None:
    with pytest.raises(ArgumentError, match="sample_rate must be <= 1"):
        scaled(TARGET, by=13)


def test_the_search_states_its_own_true_epsilon() -> None:
    found = figures(f"{SETTING} --noise-multiplier 3 --scale-down 16")
    assert found["target"]["epsilon"] == mechanism_guarantee(TARGET, delta=1e-5).epsilon
    assert found["search"]["epsilon"] == mechanism_guarantee(scaled(TARGET, by=1 / 16), delta=1e-5).epsilon
    assert found["search"]["epsilon"] > 40 * found["target"]["epsilon"]
    assert found["search"]["effective_noise"] == found["target"]["effective_noise"] == 3 / 4096
    assert (found["factor"], found["search"]["steps"]) == (16, 2500)


def test_the_words_say_that_the_search_is_not_private() -> None:
    result = run(f"{SETTING} --noise-multiplier 3 --scale-down 16")
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert "The search is NOT private at the target's epsilon: each of its runs costs 298.4 by itself." in words
    assert "Search on public data, or keep every run to yourself." in words
    assert "is not covered by the target's epsilon either: declare it, or charge the search." in words


@pytest.mark.parametrize("noise", [3.0, 3.1, 3.2, 3.3])
def test_the_cost_of_the_search_is_rounded_up(noise: float) -> None:
    setting = f"--num-units 1797 --delta 1e-4 --expected-batch-size 512 --steps 71 --noise-multiplier {noise}"
    found = figures(f"{setting} --scale-down 8")
    epsilon = found["search"]["epsilon"]
    (shown,) = re.findall(r"costs (\S+) by itself", " ".join(found["notes"]))
    assert epsilon <= float(shown) < 1.001 * epsilon
    table = run(f"{setting} --scale-down 8").stdout.split("The search")[0]
    assert shown in table
    assert rounded_up(found["target"]["epsilon"]) in table


def test_the_way_back_is_a_command_that_works() -> None:
    down = figures(f"{SETTING} --noise-multiplier 3 --scale-down 16")
    up = figures(down["back"].removeprefix("dpvision plan "))
    assert up["target"] == down["target"]
    assert up["search"] == down["search"]
    again = figures(up["back"].removeprefix("dpvision plan "))
    assert again["search"] == down["search"]


def test_a_target_epsilon_calibrates_the_target_and_not_the_search() -> None:
    found = figures(
        "--num-units 1797 --target-epsilon 3 --delta 1e-4 --expected-batch-size 512 --epochs 20 --scale-down 8"
    )
    assert 2.99 < found["target"]["epsilon"] <= 3 < found["search"]["epsilon"]
    assert found["search"]["expected_batch_size"] == 64
    assert found["target"]["steps"] == 71


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{SETTING} --noise-multiplier 3 --scale-down 1", "--scale-down must be a finite number > 1, got 1"),
        (f"{SETTING} --noise-multiplier 3 --scale-down 0.5", "--scale-down must be a finite number > 1"),
        (f"{SETTING} --noise-multiplier 3 --scale-down nan", "--scale-down must be a finite number > 1"),
        (f"{SETTING} --noise-multiplier 3 --scale-up inf", "--scale-up must be a finite number > 1"),
        (f"{SETTING} --noise-multiplier 3 --scale-up 13", "sample_rate must be <= 1"),
        (f"{SETTING} --noise-multiplier 3 --scale-down 2 --scale-up 2", "either --scale-down or --scale-up, got both"),
        (f"{SETTING} --scale-down 2", "give either --target-epsilon or --noise-multiplier"),
        (f"{SETTING} --scale-down 2 --noise-multiplier 3 --target-epsilon 3", "give either --target-epsilon or"),
        (f"{SETTING} --scale-up 2 --target-epsilon 3", "--scale-up starts from a cheap setting"),
        (f"{SETTING} --epochs 3 --noise-multiplier 3 --scale-down 2", "give either --steps or --epochs, got both"),
        (f"{SETTING} --steps 3 --noise-multiplier 3 --scale-down 2", "--steps must be given once"),
        ("--num-units 50 --steps 3 --noise-multiplier 3 --scale-down 2", "missing --expected-batch-size"),
        ("--expected-batch-size 5 --steps 3 --noise-multiplier 3 --scale-down 2", "missing --num-units"),
        (f"{SETTING} --noise-multiplier 3 --scale-down 2 --plot plan.png", "--plot draws a plan"),
        (f"{SETTING} --noise-multiplier 0 --scale-down 2", "--noise-multiplier must be a finite number > 0"),
        (f"{SETTING} --noise-multiplier 3 --scale-down 1e9", "--noise-multiplier must lie between"),
        (f"{SETTING} --noise-multiplier 3", "plan finds the --noise-multiplier. For a given one use dpvision epsilon."),
    ],
)
@pytest.mark.parametrize("form", ["", " --json"])
def test_nonsense_is_one_clear_line_and_exit_code_2(line: str, message: str, form: str) -> None:
    result = run(f"{line}{form}")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_a_plan_keeps_the_target_in_every_row() -> None:
    rows = list(
        plan(num_units=50_000, target_epsilon=3.0, delta=1e-5, expected_batch_sizes=(4096, 16384), epochs=(10, 30))
    )
    assert [(row.mechanism.expected_batch_size, row.mechanism.steps) for row in rows] == [
        (4096, 123),
        (4096, 367),
        (16384, 31),
        (16384, 92),
    ]
    for row in rows:
        assert row.guarantee == guarantee([(row.mechanism.step_event, row.mechanism.steps)], delta=1e-5)
        assert 3.0 * 0.999 < row.guarantee.epsilon <= 3.0
    # A larger batch needs more noise, and still learns from a cleaner mean.
    assert rows[2].mechanism.noise_multiplier > rows[0].mechanism.noise_multiplier
    assert effective_noise(rows[2].mechanism) < effective_noise(rows[0].mechanism)


def test_a_plan_may_be_asked_in_steps() -> None:
    facts: dict[str, Any] = {"num_units": 1000, "target_epsilon": 3.0, "delta": 1e-4}
    (row,) = plan(**facts, expected_batch_sizes=[250.0], steps=[40])
    assert (row.mechanism.steps, row.mechanism.epochs) == (40, 10.0)
    with pytest.raises(ArgumentError, match="epochs or steps, got both"):
        list(plan(**facts, steps=[40], epochs=[3]))
    with pytest.raises(ArgumentError, match=r"sample_rate must be <= 1"):
        list(plan(**facts, expected_batch_sizes=[1001.0], steps=[40]))
    with pytest.raises(ArgumentError, match="epochs must be a finite number > 0"):
        list(plan(**facts, epochs=[math.nan]))


def test_default_batch_sizes_suit_the_dataset() -> None:
    assert default_batch_sizes(50_000) == (256, 1024, 4096, 16384)
    assert default_batch_sizes(1797) == (16, 64, 256)
    assert default_batch_sizes(3) == (3,)


def test_epochs_become_the_first_whole_number_of_steps() -> None:
    assert steps_for_epochs(60, num_units=60_000, expected_batch_size=256) == 14_063
    assert steps_for_epochs(3 * 0.1, num_units=1000, expected_batch_size=100) == 3
    assert steps_for_epochs(0.001, num_units=10, expected_batch_size=10) == 1
    with pytest.raises(ArgumentError, match="epochs must make at most"):
        steps_for_epochs(1e308, num_units=1000, expected_batch_size=10)


def test_a_plan_can_be_drawn(tmp_path: Path) -> None:
    from dpvision.cli.plan_chart import draw_plan

    rows = list(plan(num_units=1000, target_epsilon=3.0, delta=1e-4, expected_batch_sizes=(400, 800), steps=(2, 4)))
    draw_plan(rows, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="at least one row"):
        draw_plan([], tmp_path / "nothing.png")
