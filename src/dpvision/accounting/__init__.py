"""Privacy accounting: epsilon of a mechanism, calibration to a target, planning, and what an epsilon means.

Nothing here imports torch. ``epsilon`` turns charges into a guarantee with the accountants in ``pld`` and ``rdp``;
``calibrate`` and ``budget_plan`` go the other way; ``groups`` and ``selection`` cover owners of several units and
hyper-parameter searches; ``tradeoff`` bounds attacks.
"""

from __future__ import annotations

from dpvision.accounting.budget_plan import PlanRow, effective_noise, plan, scaled, steps_for_epochs
from dpvision.accounting.calibrate import calibrate_expected_batch_size, calibrate_noise_multiplier, calibrate_steps
from dpvision.accounting.charges import Charges
from dpvision.accounting.epsilon import Accountant, EpsilonMeter, guarantee, mechanism_guarantee
from dpvision.accounting.groups import owner_guarantee, row_guarantee
from dpvision.accounting.selection import (
    STOPPINGS,
    Stopping,
    all_trials,
    best_filter_order,
    best_of_random_many,
    divergence_at,
    filter_epsilon,
    filter_limit,
)
from dpvision.accounting.tradeoff import (
    CURVE_DELTAS,
    DISPLAY_RATE,
    AttackRisk,
    Profile,
    advantage_bound,
    balanced_accuracy_bound,
    cautions,
    describe,
    full_profile,
    gaussian_dp,
    privacy_profile,
    propose_delta,
    true_positive_bound,
)

__all__ = [
    "CURVE_DELTAS",
    "DISPLAY_RATE",
    "STOPPINGS",
    "Accountant",
    "AttackRisk",
    "Charges",
    "EpsilonMeter",
    "PlanRow",
    "Profile",
    "Stopping",
    "advantage_bound",
    "all_trials",
    "balanced_accuracy_bound",
    "best_filter_order",
    "best_of_random_many",
    "calibrate_expected_batch_size",
    "calibrate_noise_multiplier",
    "calibrate_steps",
    "cautions",
    "describe",
    "divergence_at",
    "effective_noise",
    "filter_epsilon",
    "filter_limit",
    "full_profile",
    "gaussian_dp",
    "guarantee",
    "mechanism_guarantee",
    "owner_guarantee",
    "plan",
    "privacy_profile",
    "propose_delta",
    "row_guarantee",
    "scaled",
    "steps_for_epochs",
    "true_positive_bound",
]
