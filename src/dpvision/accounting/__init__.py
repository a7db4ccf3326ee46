"""From a mechanism to a guarantee, and back: epsilon, calibration, planning. Imports without torch."""

from __future__ import annotations

from dpvision.accounting.calibrate import (
    calibrate_expected_batch_size,
    calibrate_noise_multiplier,
    calibrate_steps,
)
from dpvision.accounting.charges import Charges
from dpvision.accounting.guarantees import Accountant, guarantee, mechanism_guarantee, privacy_curve
from dpvision.accounting.meaning import attack_success, cautions, describe, propose_delta
from dpvision.accounting.meter import EpsilonMeter
from dpvision.accounting.plan import PlanRow, plan, steps_for_epochs
from dpvision.accounting.published import Published, published_settings
from dpvision.accounting.scaling import scaled

__all__ = [
    "Accountant",
    "Charges",
    "EpsilonMeter",
    "PlanRow",
    "Published",
    "attack_success",
    "calibrate_expected_batch_size",
    "calibrate_noise_multiplier",
    "calibrate_steps",
    "cautions",
    "describe",
    "guarantee",
    "mechanism_guarantee",
    "plan",
    "privacy_curve",
    "propose_delta",
    "published_settings",
    "scaled",
    "steps_for_epochs",
]
