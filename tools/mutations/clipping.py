"""Breakages of the styles of clipping and of what a sum is divided by."""

from __future__ import annotations

from tools.mutations.mutation import mutations

CLIPPING = (
    *mutations(
        "privacy/test_clipping",
        "privacy/clipping.py",
        ("automatic clipping without its constant", "added=GAMMA", "added=0.0"),
        ("another constant than the documented one", "GAMMA: Final = 0.01", "GAMMA: Final = 0.001"),
        (
            "every layer gets the whole clip norm",
            "clip_norm / math.sqrt(max(1, len(set(groups.values()))))",
            "clip_norm",
        ),
        ("weight and bias are layers of their own", 'name.rpartition(".")[0] if by_layer', "name if by_layer"),
        (
            "a unit is left out of one layer only",
            "functools.reduce(torch.logical_and, map(_is_norm, norms_sq.values()), real_U.new_ones(()))",
            "_is_norm([*norms_sq.values()][-1])",
        ),
        (
            "the norm of the last parameter only",
            ".setdefault(self.groups[parameter], []).append(layer_gradient.norms_sq().double())",
            "[self.groups[parameter]] = [layer_gradient.norms_sq().double()]",
        ),
        ("rounding may pass the clip norm", "bound * (1 - SLACK * max(", "bound * (1 + SLACK * max("),
        ("clipped by the squared norm", "norms_sq_U.sqrt() + limits", "norms_sq_U + limits"),
        ("the bound is not that of the style", "below=limits.below,", "below=1.0,"),
        ("units without a finite norm are clipped as usual", "        if factor_U is None:", "        if False:"),
    ),
    *mutations(
        "kernels/test_unit_sums",
        "kernels/cpp/clip_factors.cpp",
        ("only the last part has a norm", "factor_U[u] += norms", "factor_U[u] = norms"),
        ("the squared norm instead of the norm", "std::sqrt(factor_U[u])", "factor_U[u]"),
        ("short gradients are stretched by a kernel", "factor < most ? factor : most", "factor"),
        ("padding counts", "real_U[u] & (bounded >= least) ? bounded : 0.0", "bounded >= least ? bounded : 0.0"),
        ("factors may be rounded up", " & (bounded >= least)", ""),
        ("a negative norm passes", "(factor_U[u] >= 0) & ", ""),
        ("norms that are not finite pass", "units - finite", "0"),
    ),
    *mutations(
        "kernels/test_unit_sums",
        "kernels/cpp/squares.h",
        ("the rest of a row has no norm", "rest += double(x[i]) * x[i]", "rest += 0"),
        ("half of a row has no norm", "(sums[0] + sums[1]) + (sums[2] + sums[3])", "sums[0] + sums[1]"),
    ),
    *mutations(
        "kernels/test_unit_sums",
        "kernels/cpp/unit_squares.cpp",
        ("every unit has the first one's norm", "squares_of(x_UD + u * entries, entries)", "squares_of(x_UD, entries)"),
    ),
    *mutations(
        "privacy/test_clipping",
        "gradients/clipped_sum.py",
        ("one layer's factors for all", "factors[parameter], nonfinite_U", "next(iter(factors.values())), nonfinite_U"),
    ),
    *mutations(
        "privacy/test_clipping",
        "gradients/clipped_sum.py",
        (
            "the style is forgotten",
            "Clipper.for_parameters(parameters, clip_norm=clip_norm, clipping=clipping)",
            "Clipper.for_parameters(parameters, clip_norm=clip_norm)",
        ),
    ),
    *mutations(
        "training/test_clipping_runs",
        "privacy/private_step.py",
        ("a run clips in another style", "        clipping=mechanism.clipping,\n", ""),
    ),
    *mutations(
        "training/test_clipping_runs",
        "privacy/mechanism.py",
        ("unit_norm divides by nothing", "(self.clip_norm if self.unit_norm else 1.0)", "1.0"),
    ),
    *mutations(
        "training/test_clipping_runs",
        "training/start.py",
        ("the ledger forgets the style", '        "clipping": privacy.clipping if private else None,\n', ""),
    ),
    *mutations(
        "training/test_clipping_runs",
        "release/build.py",
        (
            "a certificate may name another style",
            '"adjacency", "clip_norm", "clipping", "unit_norm")',
            '"adjacency", "clip_norm")',
        ),
    ),
    *mutations(
        "privacy/test_privatize",
        "privacy/noise.py",
        ("divisor rounded", "divisor=mechanism.divisor)", "divisor=round(mechanism.divisor))"),
    ),
)
