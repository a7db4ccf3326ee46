"""``dpvision epsilon``, ``calibrate`` and ``plan``, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpvision.accounting import all_trials, best_of_random_many, guarantee
from dpvision.cli import app
from dpvision.privacy.mechanism import Event

MNIST = "--num-units 60000 --expected-batch-size 6000"
EPSILON = f"epsilon {MNIST} --noise-multiplier 2.997 --steps 400"


def run(line: str) -> Any:
    return CliRunner().invoke(app, line.split(), catch_exceptions=False)


def figures(line: str) -> dict[str, Any]:
    result = run(f"{line} --json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_importing_the_commands_imports_nothing_heavy() -> None:
    program = (
        "import sys, dpvision.cli.epsilon_command; "
        "sys.exit(' '.join({'torch', 'dp_accounting', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert result.stderr.strip() == ""


def test_epsilon_prints_both_accountants_as_json() -> None:
    found = figures(
        "epsilon --num-units 60000 --expected-batch-size 256 --noise-multiplier 1.1 --steps 14063 --delta 1e-5"
    )
    assert found["epsilon"] == pytest.approx(2.3817, rel=1e-4)
    assert found["epsilon_rdp"] == pytest.approx(2.5967, rel=1e-4)
    assert found["delta"] == 1e-5
    assert found["delta_proposed"] is False
    assert found["adjacency"] == "add_remove"
    assert found["sample_rate"] == 256 / 60000
    assert found["cautions"] == []


def test_epochs_are_another_way_to_say_steps() -> None:
    by_steps = figures(f"epsilon {MNIST} --noise-multiplier 2.997 --steps 400")
    assert figures(f"epsilon {MNIST} --noise-multiplier 2.997 --epochs 40") == by_steps


def test_a_missing_delta_is_proposed_and_announced() -> None:
    result = run(f"{EPSILON} --json")
    assert "delta was not given: 1e-05 is used" in result.stderr
    assert json.loads(result.stdout)["delta_proposed"] is True
    assert json.loads(result.stdout)["delta"] == 1e-5
    assert "delta was not given: 1e-05 is used" in run(EPSILON).stdout


def test_people_get_words() -> None:
    output = run(f"{EPSILON} --delta 1e-5").stdout
    assert "epsilon              2.92" in output
    assert "Adding or removing one example makes any outcome at most" in output


def test_dangerous_figures_are_warned_of() -> None:
    result = run(
        "epsilon --num-units 1000 --expected-batch-size 500 --noise-multiplier 0.5 --steps 9 --delta 1e-3 --json"
    )
    assert result.exit_code == 0
    assert result.stderr.count("warning: ") == 2
    assert len(json.loads(result.stdout)["cautions"]) == 2


def test_replacing_has_no_rdp_and_says_so() -> None:
    result = run(f"{EPSILON} --adjacency replace_one --delta 1e-5 --json")
    assert json.loads(result.stdout)["epsilon_rdp"] is None
    assert "not proved for replace_one" in result.stderr


def test_calibrate_computes_whatever_is_left_out() -> None:
    known = {
        "noise_multiplier": "--noise-multiplier 3",
        "steps": "--steps 400",
        "expected_batch_size": "--expected-batch-size 6000",
        "epsilon": "--target-epsilon 2.925",
    }
    for unknown in known:
        flags = " ".join(flag for name, flag in known.items() if name != unknown)
        found = figures(f"calibrate --num-units 60000 --delta 1e-5 {flags}")
        assert found["calibrated"] == unknown
        event = Event(sample_rate=found["sample_rate"], noise_multiplier=found["noise_multiplier"])
        assert found["epsilon"] == guarantee([(event, found["steps"])], delta=1e-5).epsilon
        if unknown != "epsilon":
            assert 2.925 * 0.998 < found["epsilon"] <= 2.925 == found["target_epsilon"]


def test_plan_prints_a_table_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    line = "plan --num-units 1797 --target-epsilon 3 --expected-batch-size 256 --expected-batch-size 512 --epochs 10"
    result = run(f"{line} --plot {picture}")
    assert result.exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "epsilon ≤ 3 at delta 0.0001 (add_remove)" in result.stdout
    assert "delta was not given: 0.0001 is used" in result.stdout
    rows = figures(line)["rows"]
    assert [row["expected_batch_size"] for row in rows] == [256, 512]
    assert all(row["epsilon"] <= 3 for row in rows)
    assert rows[0]["effective_noise"] == rows[0]["noise_multiplier"] / 256


@pytest.mark.slow
def test_plan_needs_no_more_than_units_and_a_target() -> None:
    found = figures("plan --num-units 50000 --target-epsilon 8")
    assert len(found["rows"]) == 12
    assert all(8 * 0.999 < row["epsilon"] <= 8 for row in found["rows"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epsilon", "missing --num-units, --expected-batch-size, --noise-multiplier"),
        (f"epsilon {MNIST} --noise-multiplier 1", "give either --steps or --epochs, got neither"),
        (f"{EPSILON} --epochs 3", "give either --steps or --epochs, got both"),
        (
            "epsilon --num-units 100 --expected-batch-size 101 --noise-multiplier 1 --steps 5",
            "sample_rate must be <= 1",
        ),
        (f"epsilon {MNIST} --noise-multiplier 0 --steps 5", "--noise-multiplier must be a finite number > 0"),
        (f"epsilon {MNIST} --noise-multiplier -1 --steps 5", "--noise-multiplier must be a finite number > 0"),
        (f"epsilon {MNIST} --noise-multiplier nan --steps 5", "--noise-multiplier must be a finite number > 0"),
        (f"epsilon {MNIST} --noise-multiplier 1 --steps -500", "steps must be a whole number >= 1"),
        (f"epsilon {MNIST} --noise-multiplier 1 --epochs nan", "epochs must be a finite number > 0"),
        (f"{EPSILON} --delta 1", "delta must lie strictly between 0 and 1"),
        (f"{EPSILON} --delta nan", "delta must lie strictly between 0 and 1"),
        (f"{EPSILON} --delta 0", "delta must lie strictly between 0 and 1"),
        (f"{EPSILON} --adjacency swap", "adjacency must be one of"),
        (
            "epsilon --num-units 0 --expected-batch-size 1 --noise-multiplier 1 --epochs 5",
            "--num-units must be a",
        ),
        (
            "epsilon --num-units -3 --expected-batch-size 1 --noise-multiplier 1 --steps 5",
            "--num-units must be a",
        ),
        ("calibrate", "missing --num-units"),
        ("calibrate --num-units 100 --steps 5", "leave out exactly one of"),
        (f"calibrate {MNIST} --noise-multiplier 1 --steps 5 --target-epsilon 3", "leave out exactly one of"),
        ("calibrate --num-units 100 --noise-multiplier 1 --epochs 5 --target-epsilon 3", "--epochs needs"),
        (f"calibrate {MNIST} --steps 5 --target-epsilon nan", "--target-epsilon must be a finite number > 0"),
        (f"calibrate {MNIST} --steps 5 --target-epsilon -3", "--target-epsilon must be a finite number > 0"),
        ("plan --num-units 100", "missing --target-epsilon"),
        ("plan --num-units 100 --target-epsilon 0", "--target-epsilon must be a finite number > 0"),
        ("plan --num-units 100 --target-epsilon 3 --epochs 3 --steps 4", "epochs or steps, got both"),
        ("plan --num-units 100 --target-epsilon 3 --expected-batch-size 101", "sample_rate must be <= 1"),
        ("plan --num-units 100 --target-epsilon 3 --plot plan.exe", "--plot must end in"),
        ("plan --num-units 100 --target-epsilon 3 --plot /nowhere/at/all/plan.png", "folder that exists"),
    ],
)
@pytest.mark.parametrize("form", ["", " --json"])
def test_nonsense_is_one_clear_line_and_exit_code_2(line: str, message: str, form: str) -> None:
    result = run(f"{line}{form}")
    assert result.exit_code == 2
    (error,) = [line for line in result.stderr.splitlines() if not line.startswith("delta was not given")]
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in result.output


def test_a_search_shows_both_costs() -> None:
    found = figures(f"{EPSILON} --delta 1e-5 --trials 20")
    charges = [(Event(sample_rate=0.1, noise_multiplier=2.997), 400)]
    assert found["epsilon_all_trials"] == all_trials(charges, trials=20, delta=1e-5).epsilon
    best = best_of_random_many(charges, mean_trials=20, stopping="geometric", delta=1e-5)
    assert found["epsilon_best_geometric"] == best.epsilon < found["epsilon_all_trials"]
    shown = run(f"{EPSILON} --delta 1e-5 --trials 20")
    assert "epsilon_all_trials" in shown.stdout
    assert "kept secret" in shown.stdout
    assert run(f"{EPSILON} --trials 0").exit_code == 2


def test_an_owner_of_several_units_is_told_the_cost() -> None:
    line = "epsilon --num-units 1000 --expected-batch-size 300 --noise-multiplier 2 --steps 2 --delta 1e-4"
    found = figures(f"{line} --most-rows-per-owner 2")
    assert found["epsilon_owner"] > found["epsilon"]
    assert run(f"{line} --most-rows-per-owner 0").exit_code == 2
    assert run(f"{line} --most-rows-per-owner 2 --adjacency replace_one").exit_code == 2
