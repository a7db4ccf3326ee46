"""Breakages of the styles of clipping and of what a sum is divided by."""

from __future__ import annotations

from tools.mutations.mutation import mutations

CLIPPING = (
    *mutations(
        "test_clipping_styles",
        "grads/clip.py",
        ("automatic clipping without its constant", "below / (norm_U + GAMMA)", "below / norm_U"),
        ("another constant than the documented one", "GAMMA: Final = 0.01", "GAMMA: Final = 0.001"),
        (
            "every layer gets the whole clip norm",
            "clip_norm / math.sqrt(max(1, len(set(groups.values()))))",
            "clip_norm",
        ),
        ("weight and bias are layers of their own", 'name.rpartition(".")[0] if by_layer', "name if by_layer"),
        (
            "a unit is left out of one layer only",
            "functools.reduce(torch.logical_and, finite)",
            "finite[-1]",
        ),
        (
            "the norm of the last parameter only",
            "norms_sq[group] + norms_sq_U if group in norms_sq else norms_sq_U",
            "norms_sq_U",
        ),
        ("rounding may pass the clip norm", "bound * (1 - SLACK * rounding)", "bound * (1 + SLACK * rounding)"),
        ("clipped by the squared norm", "(below / norm_U)", "(below / norm_U.square())"),
    ),
    *mutations(
        "test_clipping_styles",
        "grads/totals.py",
        ("one layer's factors for all", "factors[parameter], dead_U", "next(iter(factors.values())), dead_U"),
    ),
    *mutations(
        "test_clipping_styles",
        "grads/engine.py",
        (
            "the style is forgotten",
            "Clip.of(model, clip_norm=clip_norm, clipping=clipping)",
            "Clip.of(model, clip_norm=clip_norm)",
        ),
    ),
    *mutations(
        "test_clipping_runs",
        "training/loop.py",
        ("a run clips in another style", "            clipping=mechanism.clipping,\n", ""),
    ),
    *mutations(
        "test_clipping_runs",
        "mechanism.py",
        ("unit_norm divides by nothing", "(self.clip_norm if self.unit_norm else 1.0)", "1.0"),
    ),
    *mutations(
        "test_clipping_runs",
        "training/start.py",
        ("the ledger forgets the style", '        "clipping": privacy.clipping if privacy.enabled else None,\n', ""),
    ),
    *mutations(
        "test_clipping_runs",
        "certificate/claims.py",
        (
            "a certificate may name another style",
            '"adjacency", "clip_norm", "clipping", "unit_norm")',
            '"adjacency", "clip_norm")',
        ),
    ),
    *mutations(
        "test_privatize",
        "noise.py",
        ("divisor rounded", "divisor=mechanism.divisor)", "divisor=round(mechanism.divisor))"),
    ),
)
