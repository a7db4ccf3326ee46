"""Breakages of the per-unit gradients, their clipping and the admission of models."""

from __future__ import annotations

from tools.mutations.mutation import mutations

GRADIENTS = (
    *mutations(
        "gradients/test_clipped_sum",
        "privacy/clipping.py",
        ("non-finite units are kept", "None if bool(finite_U.all()) else ~finite_U", "None"),
        (
            "short gradients are stretched",
            "added=0.0, most=1.0, least=least)",
            "added=0.0, most=math.inf, least=least)",
        ),
    ),
    *mutations(
        "gradients/test_networks",
        "gradients/layer_gradient.py",
        ("shared weights count once", "total = total + layer_gradient.per_unit()", "total = total"),
    ),
    *mutations(
        "gradients/test_rules",
        "gradients/layer_gradient.py",
        (
            "rows of a unit are averaged twice",
            "return x.unflatten(0, (units, -1)).sum(1)",
            "return x.unflatten(0, (units, -1)).mean(1)",
        ),
    ),
    *mutations(
        "gradients/test_clipped_sum",
        "gradients/per_unit.py",
        ("row weights are ignored", "grad_outputs=weights", "grad_outputs=torch.ones_like(weights)"),
    ),
    *mutations(
        "gradients/test_traces",
        "gradients/per_unit.py",
        (
            "changed activations pass",
            "if any(tensor._version != version",
            "if False and any(tensor._version != version",
        ),
        (
            "hooks stay behind",
            "                hooks.enter_context(handle)\n        yield calls",
            "                pass\n        yield calls",
        ),
    ),
    *mutations(
        "gradients/test_clipped_sum",
        "gradients/clipped_sum.py",
        (
            "only the last micro-batch counts",
            "self._sums.get(parameter), factors",
            "None, factors",
        ),
    ),
    *mutations(
        "gradients/test_plan",
        "gradients/plan.py",
        (
            "mixing models pass",
            "    refuse(mixing_units(model, find_mixing(model, loss_fn, batch)))\n    found",
            "    found",
        ),
    ),
    *mutations(
        "gradients/test_separability",
        "gradients/separability.py",
        (
            "targets are never varied",
            "targets[mine] = 1 - theirs if",
            "targets[mine] = theirs if True else 1 - theirs if",
        ),
    ),
    *mutations(
        "gradients/test_separability",
        "gradients/plan.py",
        ("another loss is not tried", "frozen_callable(loss_fn), speed", "speed"),
    ),
    *mutations(
        "gradients/test_plan",
        "gradients/plan.py",
        ("the check finds no mixing", "    findings += mixing\n", ""),
        (
            "the check finds no moving buffers",
            "findings = [*idle, *moving_state(model, trial.moved)]",
            "findings = [*idle]",
        ),
    ),
    *mutations(
        "gradients/test_rules",
        "gradients/rules/linear.py",
        ("a bias is averaged over positions", "g_UTO.sum(1))", "g_UTO.mean(1))"),
        ("an offset's bias counts once", "g_UTO.sum(1) * call.layer(OffsetLinear).bias_factor", "g_UTO.sum(1)"),
    ),
    *mutations(
        "gradients/test_rules",
        "gradients/rules/rule.py",
        (
            "subclasses inherit their parent's rule",
            "entry = _ENTRIES.get(type(module))",
            "entry = next((e for t, e in _ENTRIES.items() if isinstance(module, t)), None)",
        ),
    ),
)
