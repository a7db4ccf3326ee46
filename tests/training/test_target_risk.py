"""``--target-risk``: a run that is calibrated to a limit on attacks keeps it, and its certificate shows the limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpvision.accounting import AttackRisk, Charges, full_profile
from dpvision.cli import app
from dpvision.config import RunConfig
from dpvision.errors import ArgumentError
from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.release.verify import verify
from dpvision.storage.files import json_bytes
from dpvision.training import train
from dpvision.training.prepare import calibrate
from tiny_runs import tiny_config, write_images

OPEN: dict[str, Any] = {"noise_multiplier": None, "target_epsilon": None, "delta": 1e-3, "privacy_unit": "example"}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images.npz")


def config_of(source: Path, **privacy: Any) -> RunConfig:
    return tiny_config(source, privacy={**OPEN, **privacy})


def reached(risk: str, charges: Charges) -> float:
    return AttackRisk.parse(risk).bound(full_profile(charges, delta=1e-3))


@pytest.mark.parametrize(("risk", "rate"), [("tpr:0.05@0.02", 0.02), ("advantage:0.2", 0.4)])
def test_a_run_keeps_its_limit_and_the_certificate_shows_it(
    images: Path, tmp_path: Path, risk: str, rate: float
) -> None:
    run = tmp_path / "run"
    train(config_of(images, target_risk=risk), run=run)
    limit = AttackRisk.parse(risk).limit
    bound = reached(risk, charges_of(read_ledger(run / "release" / "ledger.jsonl")))
    assert 0.99 * limit < bound <= limit
    certificate = json.loads((run / "release" / "certificate.json").read_text())
    shown = {each["false_positive_rate"]: each["true_positive_rate"] for each in certificate["attack_success"]}
    assert sorted(shown) == sorted({0.001, 0.01, 0.1, rate})
    assert shown[rate] <= (limit if rate == 0.02 else rate + limit)
    assert risk in certificate["deployment"]["target_risk"]
    assert verify(run).problems == ()
    config = json.loads((run / "release" / "config.json").read_text())["privacy"]
    assert config["target_epsilon"] == pytest.approx(certificate["epsilon"], rel=1e-9)


def test_a_certificate_that_hides_the_bound_at_the_limit_is_named(images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config_of(images, target_risk="tpr:0.05@0.02"), run=run)
    path = run / "release" / "certificate.json"
    certificate = json.loads(path.read_text())
    certificate["attack_success"] = [b for b in certificate["attack_success"] if b["false_positive_rate"] != 0.02]
    path.write_bytes(json_bytes(certificate))
    (run / "release" / "manifest.json").unlink()
    assert any("attack_success" in problem for problem in verify(path).problems)


def test_with_two_targets_both_are_kept(images: Path) -> None:
    alone = calibrate(config_of(images, target_risk="advantage:0.2"))
    loose = calibrate(config_of(images, target_risk="advantage:0.2", target_epsilon=50.0))
    strict = calibrate(config_of(images, target_risk="advantage:0.2", target_epsilon=0.1))
    assert loose.privacy.noise_multiplier == alone.privacy.noise_multiplier
    assert strict.mechanism.noise_multiplier > alone.mechanism.noise_multiplier
    assert strict.privacy.target_epsilon == 0.1


def test_noise_that_breaks_the_limit_is_refused(images: Path) -> None:
    with pytest.raises(ArgumentError, match=r"more than target_risk=advantage:0\.01"):
        calibrate(config_of(images, target_risk="advantage:0.01", noise_multiplier=1.0))


@pytest.mark.parametrize("risk", ["0.1", "tpr:0.01@0.5", "advantage:1.5"])
def test_a_bad_limit_is_one_line_and_nothing_is_written(images: Path, tmp_path: Path, risk: str) -> None:
    output = tmp_path / "run"
    result = CliRunner().invoke(app, ["train", str(images), "--target-risk", risk, "--output", str(output)])
    assert result.exit_code == 2
    assert "--target-risk" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not output.exists()


def test_units_are_counted_at_the_price_of_the_limit(images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config_of(images, target_risk="advantage:0.3", num_units=None, anyway=True), run=run)
    charges = charges_of(read_ledger(run / "release" / "ledger.jsonl"))
    assert len(charges) == 2
    assert reached("advantage:0.3", charges) <= 0.3


def test_noise_by_rdp_is_more_and_both_accountants_keep_the_target(images: Path, tmp_path: Path) -> None:
    by_pld, by_rdp = (
        calibrate(config_of(images, target_epsilon=2.0, accountant=which)).privacy.noise_multiplier
        for which in ("pld", "rdp")
    )
    assert by_pld is not None
    assert by_rdp is not None
    assert 1.01 * by_pld < by_rdp < 1.5 * by_pld
    run = tmp_path / "run"
    train(config_of(images, target_epsilon=2.0, accountant="rdp"), run=run)
    certificate = json.loads((run / "release" / "certificate.json").read_text())
    assert certificate["mechanism"]["noise_multiplier"] == by_rdp
    assert certificate["epsilon"] < certificate["epsilon_rdp"] <= 2.0
    assert certificate["epsilon_rdp"] > 1.99
    assert verify(run).problems == ()


def test_a_limit_on_attacks_has_no_value_by_rdp(images: Path) -> None:
    with pytest.raises(ArgumentError, match="accountant=rdp"):
        config_of(images, target_risk="tpr:0.05@0.02", accountant="rdp")
