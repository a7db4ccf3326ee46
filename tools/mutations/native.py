"""Breakages of the native kernels: each is compiled anew, and the tests of its kernel must notice."""

from __future__ import annotations

from tools.mutations.mutation import mutations

NATIVE = (
    *mutations(
        "test_native_winograd",
        "native/kernels/winograd_gradient.cpp",
        ("a dead row is added", "if (!rows.factors || rows.factors[row] != 0.f) chosen", "if (true) chosen"),
        ("rows are not weighted", "tile.factor = rows.factors ? rows.factors[row] : 1.f;", "tile.factor = 1.f;"),
        ("a unit is its first row", "shape.rows /= units;", "shape.rows = 1;"),
        ("old moments stay", "std::fill(moments, moments + count, 0.0);", ""),
        ("only the last rows are in the total", "p[lane] += single[lane];", "p[lane] = single[lane];"),
        ("a total in float32", "p[lane] += single[lane];", "p[lane] = float(p[lane]) + single[lane];"),
        ("a total reaches beyond its channels", "lane < this->count()", "lane < PANEL"),
    ),
    *mutations(
        "test_native_winograd",
        "native/kernels/winograd_convolve_anew.cpp",
        ("only the last channels count", "begin > 0, products", "false, products"),
        ("every group is the first", "packed.group(0, group), packed.channels", "packed.values, packed.channels"),
        ("later tiles are the first again", "pack_block(x, shape, first + group", "pack_block(x, shape, group"),
    ),
    *mutations(
        "test_native_norm_act",
        "native/kernels/norm_act_backward.cpp",
        ("the norm's gradient keeps its own direction", "- p.normed * f.pull", ""),
    ),
    *mutations(
        "test_native_grams",
        "native/kernels/grams.cpp",
        ("an overflow passes as finite", "if (!std::isfinite(total)) return std::fabs(total);", ""),
        ("windows reach around the edge", "right[t] = t % width + 1 < width;", "right[t] = t + 1 < size;"),
        ("what rounding hides is not added", "16 * EPSILON * diagonal", "0 * EPSILON * diagonal"),
    ),
    *mutations(
        "test_native_normals",
        "native/kernels/normals.cpp",
        ("native normals lose their tails", "tails.overwrite(radii, first, last);", ""),
        ("native normals are one percent too small", "* -2.0)", "* -1.98)"),
        ("the sum is not rounded to the grid", "std::rint(part[i] * steps_per_sum)", "(part[i] * steps_per_sum)"),
        (
            "the noise is not rounded to the grid",
            "std::rint(normals[i] * steps_per_normal)",
            "(normals[i] * steps_per_normal)",
        ),
        ("an infinite sum is released", "!(std::fabs(part[i]) <= DBL_MAX)", "part[i] != part[i]"),
        ("every parameter gets the first one's noise", "        normals += count;\n", ""),
    ),
    *mutations(
        "test_native_skinny",
        "native/kernels/accumulate.cpp",
        ("dead units are added", "if (factor_U[u] != 0) {", "{"),
        ("sums in float32", "factors[u] * double(parts[u][d])", "float(factors[u]) * parts[u][d]"),
    ),
    *mutations(
        "test_native_skinny",
        "native/kernels/skinny.cpp",
        ("dead rows are added", "if (factor_N[n] != 0) rows", "rows"),
        ("the head is not clipped", "float(factor_N[rows[r]] * g_NO", "float(g_NO"),
    ),
    *mutations(
        "test_native_windows",
        "native/kernels/windows.cpp",
        ("squares of the last block only", "squares += multiply<", "squares = multiply<"),
        ("a stale rim behind each window", "std::fill(matrix + depth, matrix + stride, 0.f);", "(void)depth;"),
        ("every unit has the first one's pictures", "x + u * sizes->rows_per_unit * sizes->row_stride", "x"),
    ),
    *mutations(
        "test_native_windows",
        "native/kernels/depthwise.cpp",
        ("squares of the last entry only", "squares += double(entry)", "squares = double(entry)"),
        ("sums of one unit reach the next", "    std::fill_n(totals, taps * WIDE * LANES, 0.0);\n", ""),
        ("a long sum stays in float32", "if (run >= RUN) {", "if (run >= RUN << 40) {"),
        ("only a unit's first row counts", "row < sizes.rows_per_unit", "row < 1"),
    ),
    *mutations(
        "test_native_windows",
        "native/windows.py",
        ("windows of another reach are read as if they fitted", "reach != x_NCHW.shape[2:]", "False"),
    ),
    *mutations(
        "test_native_tanh",
        "native/kernels/tanh.cpp",
        ("what is left over at the end is left out", "if (i < last) store_some", "if (false) store_some"),
    ),
    *mutations(
        "test_native_tanh",
        "grads/fast/activation.py",
        ("tanh has the slope one", "torch.ops.aten.tanh_backward(dy, y)", "dy"),
    ),
    *mutations(
        "test_native_windows",
        "grads/rules/conv.py",
        ("windows with gaps are read without them", " or set(geometry.dilation) != {1}", ""),
        ("tiny gradients have no norm", "self._squares_U + underflow(formed_UOD.flatten(1))", "self._squares_U"),
    ),
    *mutations(
        "test_grads_conformance",
        "grads/rules/conv.py",
        (
            "only the last pictures' gradients are added",
            "beta=int(first > 0)",
            "beta=0",
        ),
    ),
    *mutations(
        "test_native_pull_back",
        "native/kernels/pull_back.cpp",
        ("the rest of a filter has no part in its mean", "        sums[i % LANES] += e[i];\n", ""),
        ("filters that hardly vary lose their length", " * filter.live", ""),
        (
            "windows' order is taken for a weight's",
            "if (channels_inside) to_weight_order",
            "if (false) to_weight_order",
        ),
        ("every filter has the first one's weights", "weight_OD + o * entries", "weight_OD"),
    ),
    *mutations(
        "test_native_filter_moments",
        "native/kernels/filter_moments.cpp",
        ("the rest of a filter has no moments", "z + i, count - i);", "z + i, 0);"),
        ("half of a filter has no moments", "sums[0].add(sums[2]);", ""),
        ("every filter has the first one's direction", "z_OD + o * depth", "z_OD"),
        ("every unit has the first one's moments", "e_UOD + (u * outputs + o) * depth", "e_UOD + o * depth"),
    ),
    *mutations(
        "test_native_pool",
        "native/kernels/pool.cpp",
        ("a window's gradient goes to its neighbour", "== -2 * r - k", "== -r - 2 * k"),
    ),
)
