"""Breakages of the per-unit gradients, their clipping and the admission of models."""

from __future__ import annotations

from tools.mutations.mutation import mutations

GRADIENTS = (
    *mutations(
        "test_grads_guarantee",
        "grads/clip.py",
        ("non-finite units are kept", "None if bool(finite_U.all()) else ~finite_U", "None"),
        (
            "short gradients are stretched",
            "added=0.0, most=1.0, least=least)",
            "added=0.0, most=math.inf, least=least)",
        ),
    ),
    *mutations(
        "test_grads_networks",
        "grads/shares.py",
        ("shared weights count once", "total = total + share.per_unit()", "total = total"),
    ),
    *mutations(
        "test_grads_conformance",
        "grads/shares.py",
        (
            "rows of a unit are averaged twice",
            "return x.unflatten(0, (units, -1)).sum(1)",
            "return x.unflatten(0, (units, -1)).mean(1)",
        ),
    ),
    *mutations(
        "test_grads_guarantee",
        "grads/capture.py",
        ("row weights are ignored", "grad_outputs=weights", "grad_outputs=torch.ones_like(weights)"),
    ),
    *mutations(
        "test_grads_traces",
        "grads/capture.py",
        (
            "changed activations pass",
            "if any(tensor._version != version",
            "if False and any(tensor._version != version",
        ),
        ("hooks stay behind", "            handle.remove()", "            pass"),
    ),
    *mutations(
        "test_grads_guarantee",
        "grads/totals.py",
        (
            "only the last micro-batch counts",
            "share.add_weighted_sum(self._sums.get(parameter), ",
            "share.add_weighted_sum(None, ",
        ),
    ),
    *mutations(
        "test_preflight",
        "grads/admission.py",
        ("mixing models pass", "    _refuse_mixing(model, loss_fn, probe)\n", ""),
    ),
    *mutations(
        "test_grads_separability",
        "grads/probe.py",
        ("targets are never varied", "theirs.copy_(1 - theirs if", "theirs.copy_(theirs if True else 1 - theirs if"),
    ),
    *mutations(
        "test_grads_separability",
        "grads/admission.py",
        ("another loss is not tried", 'getattr(loss_fn, "__code__", loss_fn), speed', "speed"),
    ),
    *mutations(
        "test_preflight",
        "grads/preflight.py",
        ("preflight finds no mixing", "    findings += mixing\n", ""),
        ("preflight finds no moving buffers", "findings = [*idle, *_moving(model, moved)]", "findings = [*idle]"),
    ),
    *mutations(
        "test_grads_conformance",
        "grads/rules/linear.py",
        ("a bias is averaged over positions", "g_UTO.sum(1))", "g_UTO.mean(1))"),
    ),
    *mutations(
        "test_grads_conformance",
        "grads/rules/registry.py",
        (
            "subclasses inherit their parent's rule",
            "entry = _ENTRIES.get(type(module))",
            "entry = next((e for t, e in _ENTRIES.items() if isinstance(module, t)), None)",
        ),
    ),
)
