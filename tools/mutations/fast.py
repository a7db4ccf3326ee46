"""Breakages of the fast twin and the native kernels."""

from __future__ import annotations

from tools.mutations.mutation import mutations

FAST = (
    *mutations(
        "test_grads_fast",
        "grads/fast/conv.py",
        ("filters outlive their weights", "self.release()  # a step that broke off may have left something", "pass"),
        ("a filter's own output is trusted too far", "_LEAST_GAIN: Final = 0.01", "_LEAST_GAIN: Final = 0.0"),
    ),
    *mutations(
        "test_grads_fast",
        "grads/fast/weights.py",
        ("the scale of standardised filters is lost in ghost norms", "dy * scale_O[:, None, None]", "dy"),
        ("the bias stays in the inner product", "(dyy_U - bias * dy_U)", "dyy_U"),
        ("ghost norms across the rows of a unit", "self._x.shape[0] == self._units and ", ""),
    ),
    *mutations(
        "test_grads_fast",
        "grads/fast/trace.py",
        ("Python's decisions are frozen", "if before != _outside_state() or not untouched or ", "if "),
        ("hooks are forgotten", "if _has_hooks(model) or ", "if "),
    ),
    *mutations(
        "test_grads_fast",
        "grads/fast/rewrite.py",
        ("an activation between two users is fused", "if len(node.users) == 1 else None", "if node.users else None"),
        ("the other summand is lost", "inputs.append(other)", "pass"),
    ),
    *mutations(
        "test_grads_fast",
        "grads/admission.py",
        ("a changed setting keeps the old graph", "return modules, parameters, rows, frozen_values(model)", "return modules, parameters, rows"),
    ),
    *mutations(
        "test_grads_fast",
        "grads/plan.py",
        ("a twin is used unproved", "return None if wrong else replace(plan, bytes_per_unit=memory)", "return replace(plan, bytes_per_unit=memory)"),
    ),
)
