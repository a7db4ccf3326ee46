"""Words and plans: what an epsilon means, and how to spend it."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest

from dpvision.accounting import attack_success, cautions, describe, guarantee, plan, propose_delta, steps_for_epochs
from dpvision.accounting.budget_plan import default_batch_sizes
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Adjacency, Event, Guarantee


def a_guarantee(epsilon: float, delta: float = 1e-5, adjacency: Adjacency = "add_remove") -> Guarantee:
    return Guarantee(epsilon=epsilon, delta=delta, adjacency=adjacency, accountant="pld", privacy_unit="patient")


@pytest.mark.parametrize(
    ("num_units", "delta"),
    [(1, 0.1), (10, 1e-2), (1797, 1e-4), (9469, 1e-5), (50_000, 1e-5), (60_000, 1e-5), (90_000, 1e-6), (10**6, 1e-7)],
)
def test_the_proposed_delta_is_a_power_of_ten_clearly_below_one_over_units(num_units: int, delta: float) -> None:
    assert propose_delta(num_units) == delta
    assert propose_delta(num_units) <= 2 / 3 / num_units


@pytest.mark.parametrize("num_units", [0, -5, 2.5, True])
def test_no_delta_is_proposed_for_nonsense(num_units: Any) -> None:
    with pytest.raises(ArgumentError, match="num_units"):
        propose_delta(num_units)


def test_attack_success_has_its_known_values() -> None:
    assert attack_success(a_guarantee(0.0, 1e-5), false_positive_rate=0.01) == pytest.approx(0.01001)
    assert attack_success(a_guarantee(1.0, 1e-5), false_positive_rate=0.01) == pytest.approx(math.e / 100 + 1e-5)
    # The other branch: few false negatives are as hard to reach as few false positives.
    expected = 1 - math.exp(-3) * (1 - 1e-5 - 0.5)
    assert attack_success(a_guarantee(3.0, 1e-5), false_positive_rate=0.5) == pytest.approx(expected)
    assert attack_success(a_guarantee(1e9), false_positive_rate=0.01) == 1.0
    assert attack_success(a_guarantee(3.0), false_positive_rate=0.0) == 1e-5


def test_attack_success_bounds_the_best_attack_on_a_gaussian() -> None:
    # Against one full-batch release of noise 1, the best test has TPR = Phi(Phi^-1(FPR) + 1).
    from scipy.special import ndtr, ndtri

    spent = guarantee([(Event(sample_rate=1.0, noise_multiplier=1.0), 1)], delta=1e-3)
    for rate in (1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9):
        assert attack_success(spent, false_positive_rate=rate) >= ndtr(ndtri(rate) + 1)


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_impossible_false_positive_rates_are_refused(rate: float) -> None:
    with pytest.raises(ArgumentError, match="false_positive_rate"):
        attack_success(a_guarantee(1.0), false_positive_rate=rate)


@pytest.mark.parametrize(
    ("adjacency", "words"),
    [
        ("add_remove", "Adding or removing one patient"),
        ("zero_out", "Blanking out one patient"),
        ("replace_one", "Replacing one patient by another"),
    ],
)
def test_a_guarantee_is_told_in_plain_words(adjacency: Adjacency, words: str) -> None:
    text = describe(a_guarantee(3.0, adjacency=adjacency))
    assert words in text
    assert "any outcome at most 20.1 times as likely, plus 1e-05" in text
    assert "finds at most 20.1 in 100 members" in text
    assert "moderate" in text


def test_words_follow_epsilon() -> None:
    assert "strong" in describe(a_guarantee(0.5))
    assert "weak" in describe(a_guarantee(15.0))
    assert "practically no guarantee" in describe(a_guarantee(1e6))


def test_delta_at_or_above_one_over_units_is_warned_of() -> None:
    (warning,) = cautions(a_guarantee(3.0, delta=1e-4), num_units=10_000)
    assert "not below 1/num_units" in warning
    assert "Use 1e-05 or less" in warning
    assert cautions(a_guarantee(3.0, delta=1e-4), num_units=9_999) == ()


def test_meaninglessly_large_epsilons_are_warned_of() -> None:
    assert cautions(a_guarantee(10.0), num_units=100) == ()
    assert "weak promise" in cautions(a_guarantee(12.0), num_units=100)[0]
    assert "next to nothing" in cautions(a_guarantee(50.0), num_units=100)[0]
    assert len(cautions(a_guarantee(50.0), num_units=10**6)) == 2


def test_a_plan_keeps_the_target_in_every_row() -> None:
    rows = list(
        plan(num_units=50_000, target_epsilon=3.0, delta=1e-5, expected_batch_sizes=(4096, 16384), epochs=(10, 30))
    )
    assert [(row.expected_batch_size, row.steps) for row in rows] == [
        (4096, 123),
        (4096, 367),
        (16384, 31),
        (16384, 92),
    ]
    for row in rows:
        event = Event(sample_rate=row.sample_rate, noise_multiplier=row.noise_multiplier)
        assert row.guarantee == guarantee([(event, row.steps)], delta=1e-5)
        assert 3.0 * 0.999 < row.guarantee.epsilon <= 3.0
        assert row.effective_noise == row.noise_multiplier / row.expected_batch_size
        assert row.epochs == pytest.approx(row.steps * row.expected_batch_size / 50_000)
    # A larger batch needs more noise, and still learns from a cleaner mean.
    assert rows[2].noise_multiplier > rows[0].noise_multiplier
    assert rows[2].effective_noise < rows[0].effective_noise


def test_a_plan_may_be_asked_in_steps() -> None:
    facts: dict[str, Any] = {"num_units": 1000, "target_epsilon": 3.0, "delta": 1e-4}
    (row,) = plan(**facts, expected_batch_sizes=[250.0], steps=[40])
    assert (row.steps, row.epochs) == (40, 10.0)
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


def test_a_plan_can_be_drawn(tmp_path: Path) -> None:
    from dpvision.accounting.budget_chart import draw_plan

    rows = list(plan(num_units=1000, target_epsilon=3.0, delta=1e-4, expected_batch_sizes=(400, 800), steps=(2, 4)))
    draw_plan(rows, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="at least one row"):
        draw_plan([], tmp_path / "nothing.png")


def test_the_example_of_the_page_on_accounting_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "accounting.md"
    example = page.read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "example.py").write_text(example)
    runpy.run_path(str(tmp_path / "example.py"))
    assert capsys.readouterr().out.strip() == example.rsplit("# ", 1)[1].strip()
