"""A plan's curve: noise against a full batch's, signal, what papers chose, and the picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from typer.testing import CliRunner

from dpvision.accounting import PlanRow, effective_noise, guarantee, plan
from dpvision.cli import app
from dpvision.cli.plan_chart import PUBLISHED, draw_plan, published_settings
from dpvision.cli.plan_command import print_plan
from dpvision.privacy.mechanism import Adjacency, Guarantee, Mechanism, rounded_up


def run(line: str) -> Any:
    return CliRunner().invoke(app, ["plan", *line.split()], catch_exceptions=False)


def row(**changes: Any) -> PlanRow:
    values: dict[str, Any] = {
        "mechanism": mechanism(4096.0, 3.0),
        "guarantee": Guarantee(epsilon=6.58, delta=1e-5, adjacency="add_remove", accountant="pld"),
        "full_batch_noise": 0.0007,
    }
    return PlanRow(**{**values, **changes})


def mechanism(batch: float, noise: float) -> Mechanism:
    facts: dict[str, Any] = {"num_units": 50_000, "clip_norm": 1.0, "steps": 2500}
    return Mechanism(**facts, expected_batch_size=batch, noise_multiplier=noise)


def test_the_figures_of_a_row_are_those_computed_by_hand() -> None:
    found = row()
    assert effective_noise(found.mechanism) == 3 / 4096
    assert found.signal == pytest.approx(50 * 0.08192 / 3)
    assert found.excess_noise == pytest.approx(3 / 4096 / 0.0007)
    assert found.batch_is_enough
    assert row(full_batch_noise=3 / 4096).batch_is_enough
    assert not row(full_batch_noise=3 / 4096 / 1.11).batch_is_enough


def gaussian_delta(epsilon: float, shift: float) -> float:
    """Delta of one Gaussian release that a unit moves by ``shift`` standard deviations (Balle & Wang 2018)."""
    cdf = NormalDist().cdf
    return cdf(shift / 2 - epsilon / shift) - math.exp(epsilon) * cdf(-shift / 2 - epsilon / shift)


def test_a_full_batch_is_the_plain_gaussian_mechanism_at_every_length() -> None:
    facts: dict[str, Any] = {"num_units": 1000, "target_epsilon": 1.0, "delta": 1e-5}
    rows = list(plan(**facts, expected_batch_sizes=(1000.0,), steps=(1, 16)))
    for found in rows:
        assert found.excess_noise == pytest.approx(1.0, abs=1e-3)
        shift = math.sqrt(found.mechanism.steps) / (found.full_batch_noise * 1000)
        assert gaussian_delta(1.0, shift) == pytest.approx(1e-5, rel=2e-2)  # calibrated to five digits, from below
        assert gaussian_delta(1.0, shift) <= 1e-5
        assert found.signal == pytest.approx(shift, rel=1e-3)
    # 3.7306 is the noise of one Gaussian release at epsilon 1, delta 1e-5.
    assert rows[0].mechanism.noise_multiplier == pytest.approx(3.7306, rel=1e-4)
    assert rows[1].full_batch_noise == pytest.approx(4 * rows[0].full_batch_noise, rel=1e-12)


def test_larger_batches_lower_the_effective_noise_until_it_saturates() -> None:
    batches = (32.0, 128.0, 1000.0, 2000.0)
    rows = list(plan(num_units=4_000, target_epsilon=1.0, delta=1e-5, expected_batch_sizes=batches, steps=(100,)))
    noises = [effective_noise(found.mechanism) for found in rows]
    assert noises == sorted(noises, reverse=True)
    assert [found.batch_is_enough for found in rows] == [False, False, True, True]
    assert [found.excess_noise for found in rows] == pytest.approx([2.85, 1.28, 1.016, 1.005], abs=5e-3)
    assert all(found.mechanism.noise_multiplier > 2 for found in rows if found.batch_is_enough)  # TAN's rule of thumb


def test_extra_charges_raise_the_noise_of_a_full_batch_too() -> None:
    from dpvision.privacy.mechanism import Event

    facts: dict[str, Any] = {"num_units": 1000, "target_epsilon": 1.0, "delta": 1e-5}
    facts |= {"expected_batch_sizes": (500.0,), "steps": (4,)}
    (plain,) = plan(**facts)
    (dearer,) = plan(**facts, extra=[(Event(sample_rate=1.0, noise_multiplier=8.0, purpose="statistics"), 1)])
    assert dearer.full_batch_noise > 1.01 * plain.full_batch_noise


def test_what_papers_chose_keeps_the_epsilon_that_they_claim() -> None:
    assert len(PUBLISHED) == 12
    for setting in PUBLISHED:
        charges = [(setting.mechanism.step_event, setting.mechanism.steps)]
        by_rdp = guarantee(charges, delta=setting.delta, accountant="rdp").epsilon
        assert 0.98 * setting.epsilon < by_rdp < 1.0002 * setting.epsilon, setting


def test_papers_are_shown_for_their_own_data_and_epsilon_only() -> None:
    facts: dict[str, Any] = {"num_units": 50_000, "target_epsilon": 1.0, "delta": 1e-5}
    small, large = (setting.mechanism for setting in published_settings(**facts))
    assert (small.expected_batch_size, small.steps, small.noise_multiplier) == (4096, 875, 10)
    assert (large.expected_batch_size, large.steps, large.noise_multiplier) == (16_384, 906, 40)
    assert effective_noise(small) == 10 / 4096
    for other in ({"num_units": 50_001}, {"target_epsilon": 1.1}, {"delta": 1e-6}):
        assert published_settings(**{**facts, **other}) == ()


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_what_papers_chose_is_shown_under_the_adjacency_of_the_plan(
    adjacency: Adjacency, capsys: pytest.CaptureFixture[str]
) -> None:
    (setting, _) = published_settings(num_units=50_000, target_epsilon=1.0, delta=1e-5)
    charges = [(setting.mechanism.step_event, setting.mechanism.steps)]
    expected = guarantee(charges, delta=1e-5, adjacency=adjacency).epsilon
    rows = [row(guarantee=Guarantee(epsilon=1.0, delta=1e-5, adjacency=adjacency, accountant="pld"))]
    print_plan(rows, [setting], target=1.0, delta_proposed=False, json=True)
    (found,) = json.loads(capsys.readouterr().out)["published"]
    assert found["epsilon"] == expected
    assert (expected > 1.5) == (adjacency == "replace_one")
    print_plan(rows, [setting], target=1.0, delta_proposed=False, json=False)
    words = " ".join(capsys.readouterr().out.split())
    assert f"epsilon: by our accountant, {adjacency}; they kept 1 by RDP, add_remove" in words
    assert rounded_up(expected) in words


def test_epsilon_is_rounded_up_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    spent = Guarantee(epsilon=6.58000001, delta=1e-5, adjacency="add_remove", accountant="pld")
    print_plan([row(guarantee=spent)], [], target=7.0, delta_proposed=False, json=False)
    assert "6.581" in capsys.readouterr().out


def test_the_command_shows_the_curve_as_table_json_and_picture(tmp_path: Path) -> None:
    line = "--num-units 50000 --target-epsilon 1 --delta 1e-5 --steps 875"
    line += " --expected-batch-size 256 --expected-batch-size 4096"
    result = run(f"{line} --plot {tmp_path / 'plan.svg'}")
    assert result.exit_code == 0
    assert "1.64" in result.stdout
    assert "1.01 •" in result.stdout
    assert "WRN-16-4" in result.stdout
    picture = (tmp_path / "plan.svg").read_text()
    assert picture.count("WRN-16-4, 875 steps") == 2 or "<path" in picture  # text may be drawn as paths
    found = json.loads(run(f"{line.replace(' --expected-batch-size 256', '')} --json").stdout)
    assert [entry["batch_is_enough"] for entry in found["rows"]] == [True]
    assert found["rows"][0]["signal"] == pytest.approx(0.266, abs=1e-3)
    assert [entry["noise_multiplier"] for entry in found["published"]] == [10, 40]
    assert found["published"][0]["epsilon"] == pytest.approx(0.9028, abs=1e-4)


def test_a_picture_needs_no_paper(tmp_path: Path) -> None:
    draw_plan([row(), row(mechanism=mechanism(256.0, 1.3))], tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
