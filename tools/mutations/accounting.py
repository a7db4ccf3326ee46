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
        ("calibration forgets extra charges", "together = [*charges, *self.extra]", "together = [*charges]"),
    ),
    *mutations(
        "accounting/test_tradeoff",
        "accounting/tradeoff.py",
        ("delta of 1 / num_units is fine", "guarantee.delta * num_units >= 1", "guarantee.delta * num_units > 1"),
        ("the proposed delta is too large", "_CLEARLY_BELOW = 2 / 3", "_CLEARLY_BELOW = 2.0"),
    ),
)
