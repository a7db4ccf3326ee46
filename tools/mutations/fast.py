"""Breakages of the fast fused_copy and the native kernels."""

from __future__ import annotations

from tools.mutations.mutation import mutations

FAST = (
    *mutations(
        "gradients/test_rewrite",
        "gradients/fast/fused_layer.py",
        ("filters outlive their weights", "self._cache = {}  # a step", "self._cache = self._cache or {}  # a step"),
    ),
    *mutations(
        "gradients/test_rewrite",
        "gradients/fast/fused_conv.py",
        ("a filter's own output is trusted too far", "_LEAST_GAIN: Final = 0.01", "_LEAST_GAIN: Final = 0.0"),
    ),
    *mutations(
        "gradients/test_rewrite_hazards",
        "gradients/per_unit.py",
        (
            "an overwritten output speaks for its layer",
            "call.versions.append((seen, seen._version))  # overwritten later, it would say something else",
            "pass",
        ),
    ),
    *mutations(
        "gradients/test_rewrite_hazards",
        "gradients/rules/weight_standardisation.py",
        ("rounding hides a standardised gradient", "terms = max(64, facts.entries / 2)", "terms = 8"),
    ),
    *mutations(
        "gradients/test_rewrite_hazards",
        "gradients/layer_gradient.py",
        ("tiny numbers have no norm", "return x_UD.shape[1] * torch.finfo(x_UD.dtype).tiny", "return 0.0"),
    ),
    *mutations(
        "gradients/test_rewrite_hazards",
        "privacy/clipping.py",
        ("no room for rounding", "SLACK: Final = 32", "SLACK: Final = 0"),
        (
            "factors below the smallest float are kept",
            "least = max((kind.tiny for kind in kinds), default=0.0)",
            "least = 0.0",
        ),
    ),
    *mutations(
        "gradients/test_rewrite_hazards",
        "gradients/fast/rewrite.py",
        (
            "writing into what others read",
            " or any(_writes_for_others(graph_module, node) for node in graph_module.graph.nodes)",
            "",
        ),
    ),
    *mutations(
        "kernels/test_compile",
        "kernels/compile.py",
        ("anybody's kernels are loaded", "    _require_own(path)\n", ""),
    ),
    *mutations(
        "kernels/test_prebuilt",
        "kernels/compile.py",
        ("damaged kernels are loaded", 'if content != manifest["libraries"][fitting[0]]:', "if False:"),
        ("kernels of other sources are loaded", 'if manifest["sources"] != _sources_digest():', "if False:"),
        ("prebuilt kernels are the same on every processor", " {facts[:16]}", ""),
        ("prebuilt kernels are the same whatever they contain", " {content[:16]} {facts", " {facts"),
        ("one instruction set stands for all", "set(processor.split()) >= _NEEDED[name]", "name in processor"),
    ),
    *mutations(
        "gradients/test_rewrite",
        "gradients/fast/weight_gradients.py",
        ("the scale of standardised filters is lost in ghost norms", "dy * scale_O[:, None, None]", "dy"),
        ("the bias stays in the inner product", "(dyy_U - bias * dy_U)", "dyy_U"),
        ("ghost norms across the rows of a unit", "self._x.shape[0] == self._units and ", ""),
        ("earlier micro-batches are lost", "self._zeros() if total is None else total", "self._zeros()"),
    ),
    *mutations(
        "gradients/test_rewrite",
        "gradients/fast/fused_layer.py",
        ("filters take more room than there is", "total > limits.all_layers or ", ""),
        ("one layer may take all the room", " or one.cache_bytes > limits.one_layer", ""),
    ),
    *mutations(
        "gradients/test_rewrite",
        "gradients/fast/rewrite.py",
        ("Python's decisions are frozen", "if before != _outside_state() or not untouched or ", "if "),
        ("hooks are forgotten", "if _has_hooks(model) or ", "if "),
    ),
    *mutations(
        "gradients/test_rewrite",
        "gradients/fast/rewrite.py",
        ("the other summand is lost", "inputs.append(other)", "pass"),
    ),
    *mutations(
        "gradients/test_rewrite",
        "gradients/plan.py",
        (
            "a changed setting keeps the old graph",
            "return modules, parameters, frozen_values(model)",
            "return modules, parameters",
        ),
    ),
    *mutations(
        "gradients/test_rewrite",
        "gradients/plan.py",
        (
            "a fused copy is used unproved",
            "return None if found.wrong else found",
            "return found",
        ),
    ),
    *mutations(
        "gradients/test_engine_memory",
        "gradients/separability.py",
        (
            "a compared layer gradient stays",
            "                step.layer_gradients.pop(parameter, None)",
            "                pass",
        ),
    ),
    *mutations(
        "gradients/test_engine_memory",
        "gradients/plan.py",
        (
            "a call's tensors outlive its shapes",
            "    calls = run_captured(model, loss_fn, microbatch, owners, backward=backward)\n",
            "    calls = run_captured(model, loss_fn, microbatch, owners, backward=backward)\n"
            "    model.kept = [*getattr(model, 'kept', []), *calls]\n",
        ),
    ),
    *mutations(
        "gradients/test_rules",
        "gradients/separability.py",
        ("only the first unit is compared", "for unit in range(units):", "for unit in range(1):"),
        (
            "what is compared is not what a step adds up",
            "    norms = {parameter: each.norms_sq().sqrt().cpu().tolist() for parameter, each in step.layer_gradients.items()}\n",
            "    import copy\n"
            "    clean = copy.deepcopy(step.layer_gradients)\n"
            "    norms = {parameter: clean[twin].norms_sq().sqrt().tolist() "
            "for parameter, twin in zip(step.layer_gradients, clean, strict=True)}\n",
        ),
    ),
    *mutations(
        "gradients/test_rewrite",
        "gradients/fast/fused_conv.py",
        (
            "uncached filters are not standardised",
            "self.facts().standardisation.used_OD.view_as(self.layer.weight)",
            "self.layer.weight",
        ),
    ),
    *mutations(
        "gradients/test_engine_memory",
        "gradients/clipped_sum.py",
        ("an added layer gradient stays", "layer_gradients.pop(parameter)", "layer_gradients[parameter]"),
    ),
    *mutations(
        "gradients/test_engine_memory",
        "gradients/separability.py",
        (
            "copies to look for mixing",
            "return _first_difference(seen, seen_after, unit, units) or LOSS\n    return None",
            "return _first_difference(seen, seen_after, unit, units) or LOSS\n    return suspect_mixing(model, loss_fn, microbatch)",
        ),
    ),
)
