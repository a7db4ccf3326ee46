"""Breakages of the accountants and of calibration."""

from __future__ import annotations

from tools.mutations.mutation import mutations

ACCOUNTING = (
    *mutations(
        "accounting/test_tradeoff",
        "accounting/pld.py",
        ("deltas of huge epsilons are not numbers", "np.minimum(epsilons, LARGEST_EXPONENT)", "epsilons"),
    ),
    *mutations(
        "accounting/test_pld",
        "accounting/pld.py",
        ("rounding of long compositions is free", "ROUNDING_PER_STEP = 2.0**-50", "ROUNDING_PER_STEP = 0.0"),
        ("optimistic instead of pessimistic", "pessimistic_estimate=True", "pessimistic_estimate=False"),
        ("tail mass not accounted for", "tail_mass=delta * 1e-7", "tail_mass=delta * 2"),
    ),
    *mutations(
        "accounting/test_published",
        "accounting/pld.py",
        ("one step is forgotten", "loss.self_compose(count, grid", "loss.self_compose(count - 1, grid"),
        ("rate a little too small", "sampling_prob=sample_rate", "sampling_prob=sample_rate * 0.999"),
    ),
    *mutations(
        "accounting/test_epsilon",
        "accounting/charges.py",
        ("equal charges count once", "counts.get(key, 0) + count", "count"),
        ("negative steps pass", "least=0", "least=-1000"),
        ("any delta passes", '    problems.probability("delta", delta)\n', ""),
    ),
    *mutations(
        "accounting/test_epsilon",
        "accounting/epsilon.py",
        ("extra charges are forgotten", "[(mechanism.step_event, taken), *extra]", "[(mechanism.step_event, taken)]"),
        ("adjacency is forgotten", "adjacency=mechanism.adjacency", 'adjacency="add_remove"'),
    ),
    *mutations(
        "accounting/test_published",
        "accounting/rdp.py",
        ("RDP of one step", "accountant.compose(sampled, count)", "accountant.compose(sampled, 1)"),
    ),
    *mutations(
        "accounting/test_calibrate",
        "accounting/calibrate.py",
        ("calibration does not ask the other accountant", "max(by_pld, by_other.epsilon)", "by_pld"),
        ("calibration forgets extra charges", "together = [*charges, *self.extra]", "together = [*charges]"),
        (
            "attacks are limited under another adjacency",
            "delta=self.delta, adjacency=self.adjacency))",
            "delta=self.delta))",
        ),
        ("the limit on attacks is overshot", "return self.target.limit if", "return 1.01 * self.target.limit if"),
    ),
    *mutations(
        "accounting/test_tradeoff",
        "accounting/tradeoff.py",
        ("delta of 1 / num_units is fine", "guarantee.delta * num_units >= 1", "guarantee.delta * num_units > 1"),
        (
            "an advantage is half of what it is",
            "(1 - inverse + 2 * profile.deltas * inverse)",
            "(1 - inverse + profile.deltas * inverse)",
        ),
        ("a limit below guessing passes", "least < self.limit < 1", "0 < self.limit < 1"),
        ("the proposed delta is too large", "_CLEARLY_BELOW = 2 / 3", "_CLEARLY_BELOW = 2.0"),
    ),
    *mutations(
        "training/test_target_risk",
        "training/prepare.py",
        (
            "a limit on attacks gives way to an epsilon",
            '{"noise_multiplier": max(wanted)}',
            '{"noise_multiplier": wanted[-1]}',
        ),
        ("given noise may break the limit on attacks", "    if bound > risk.limit:", "    if bound > 1:"),
        ("a limit on attacks forgets the count", "mechanism.steps), *extra_charges(config)]", "mechanism.steps)]"),
    ),
    *mutations(
        "training/test_target_risk",
        "release/build.py",
        (
            "the limit on attacks is not certified",
            "{*FALSE_POSITIVE_RATES, risk.telling_rate}",
            "{*FALSE_POSITIVE_RATES}",
        ),
    ),
)
