"""Breakages of the audit: each makes it claim too much, or overlook what it should find."""

from __future__ import annotations

from tools.mutations.mutation import Mutation, mutations

AUDIT: tuple[Mutation, ...] = (
    *mutations(
        "audit/test_bounds",
        "audit/bounds.py",
        ("half of the delta term", "tail + 2 * canaries * delta * lifted", "tail + canaries * delta * lifted"),
        ("picking the best costs nothing", "each = 1 - (1 - confidence) / len(sides)", "each = confidence"),
        ("ten times the error allowed", "return p < 1 - confidence", "return p < 10 * (1 - confidence)"),
        (
            "the error of the means is forgotten",
            "of_means = (variances[0] / len(inside) + variances[1] / len(outside)) / pooled",
            "of_means = 0.0",
        ),
        ("ties are accused", "(members > threshold)", "(members >= threshold)"),
        ("the likelihood ratio upside down", "return logs[0] - logs[1]", "return logs[1] - logs[0]"),
    ),
    *mutations(
        "audit/test_bounds",
        "audit/mechanism_check.py",
        (
            "noise is looked at over all parameters together only",
            'tried = {"all parameters": together, **residuals}',
            'tried = {"all parameters": together}',
        ),
    ),
    *mutations(
        "audit/test_canaries",
        "audit/canaries.py",
        ("canaries share their clip with the network", "_STEEP: Final = 1e6", "_STEEP: Final = 1.0"),
        ("a canary's weight changes losses", "steep_NM - steep_NM.detach() + _NEVER", "steep_NM + _NEVER"),
    ),
    *mutations(
        "audit/test_canaries",
        "audit/audited_runs.py",
        (
            "an audit run is not stamped",
            '            ledger.note("declare", {"what": NOT_FOR_RELEASE, "how": AUDIT_STAMP})\n',
            "",
        ),
    ),
    *mutations(
        "audit/test_canaries",
        "audit/mechanism_check.py",
        (
            "a clip that nobody reaches is not lowered",
            "        clip_norm *= max(*moved, 1e-3) / 4\n",
            "        pass\n",
        ),
        (
            "gross moves pass",
            "passed = reached <= largest <= 1 + SENSITIVITY_SLACK and same_bill",
            "passed = (largest <= 1 + SENSITIVITY_SLACK or largest > 5) and same_bill",
        ),
    ),
    *mutations(
        "audit/test_membership",
        "audit/findings.py",
        ("attack figures may be attached", "    if private:\n", "    if False:\n"),
    ),
    *mutations(
        "audit/test_reconstruction",
        "audit/reconstruction.py",
        ("any images may be shown", "            self.source in dataset_names(),\n", "            True,\n"),
        (
            "the bound forgets steps",
            "profile = full_profile([(mechanism.step_event, mechanism.steps)], delta=delta)",
            "profile = full_profile([(mechanism.step_event, 1)], delta=delta)",
        ),
    ),
)
