"""Breakages of the native kernels: each is compiled, and the tests of its kernel must fail."""

from __future__ import annotations

from tools.mutations.mutation import mutations

NATIVE = (
    *mutations(
        "kernels/test_winograd",
        "kernels/cpp/winograd_gradient.cpp",
        ("a dead row is added", "if (!rows.factors || rows.factors[row] != 0.f) chosen", "if (true) chosen"),
        ("rows are not weighted", "tile.factor = rows.factors ? rows.factors[row] : 1.f;", "tile.factor = 1.f;"),
        ("a unit is its first row", "shape.rows /= units;", "shape.rows = 1;"),
        ("old moments stay", "std::fill(moments, moments + count, 0.0);", ""),
        ("only the last rows are in the total", "p[lane] += single[lane];", "p[lane] = single[lane];"),
        ("a total in float32", "p[lane] += single[lane];", "p[lane] = float(p[lane]) + single[lane];"),
        ("a total reaches beyond its channels", "lane < this->count()", "lane < PANEL"),
    ),
    *mutations(
        "kernels/test_winograd",
        "kernels/cpp/winograd_convolve_raw.cpp",
        ("only the last channels count", "begin > 0, products", "false, products"),
        ("every group is the first", "packed.group(0, group), packed.channels", "packed.values, packed.channels"),
        ("later tiles are the first again", "pack_block(x, shape, first + group", "pack_block(x, shape, group"),
    ),
    *mutations(
        "kernels/test_norm_act",
        "kernels/cpp/norm_act_backward.cpp",
        ("the norm's gradient keeps its own direction", "- p.normed * f.pull", ""),
    ),
    *mutations(
        "kernels/test_conv_gradients",
        "kernels/cpp/grams.cpp",
        ("an overflow passes as finite", "if (!std::isfinite(total)) return std::fabs(total);", ""),
        ("windows reach around the edge", "right[t] = t % width + 1 < width;", "right[t] = t + 1 < size;"),
        ("what rounding hides is not added", "16 * EPSILON * diagonal", "0 * EPSILON * diagonal"),
    ),
    *mutations(
        "kernels/test_normals",
        "kernels/cpp/normals.cpp",
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
        "kernels/test_unit_sums",
        "kernels/cpp/accumulate.cpp",
        ("dead units are added", "if (factor_U[u] != 0) {", "{"),
        ("sums in float32", "factors[u] * double(parts[u][d])", "float(factors[u]) * parts[u][d]"),
    ),
    *mutations(
        "kernels/test_unit_sums",
        "kernels/cpp/outer_sum.cpp",
        ("dead rows are added", "if (factor_N[n] != 0) rows", "rows"),
        ("the head is not clipped", "float(factor_N[rows[r]] * g_NO", "float(g_NO"),
    ),
    *mutations(
        "kernels/test_conv_gradients",
        "kernels/cpp/windows.cpp",
        ("squares of the last block only", "squares += multiply<", "squares = multiply<"),
        ("a stale rim behind each window", "std::fill(matrix + depth, matrix + stride, 0.f);", "(void)depth;"),
        ("every unit has the first one's images", "x + u * sizes.rows_per_unit * sizes.row_stride", "x"),
    ),
    *mutations(
        "kernels/test_conv_gradients",
        "kernels/cpp/depthwise.cpp",
        ("squares of the last entry only", "squares += double(entry)", "squares = double(entry)"),
        ("sums of one unit reach the next", "    std::fill_n(totals, taps * WIDE * LANES, 0.0);\n", ""),
        ("a long sum stays in float32", "if (run >= RUN) {", "if (run >= RUN << 40) {"),
        ("only a unit's first row counts", "row < sizes.rows_per_unit", "row < 1"),
    ),
    *mutations(
        "kernels/test_conv_gradients",
        "kernels/conv_gradients.py",
        ("windows of another reach are read as if they fitted", "reach != x_NCHW.shape[2:]", "False"),
    ),
    *mutations(
        "kernels/test_norm_act",
        "kernels/cpp/tanh.cpp",
        ("what is left over at the end is left out", "if (i < last) store_some", "if (false) store_some"),
    ),
    *mutations(
        "kernels/test_norm_act",
        "gradients/fast/small_layers.py",
        ("tanh has the slope one", "torch.ops.aten.tanh_backward(dy, y)", "dy"),
    ),
    *mutations(
        "kernels/test_scatter",
        "kernels/cpp/scatter.cpp",
        ("neighbours' sums are left over", "v8 re = {}, im = {};", "v8 re = work[y * width + x].re, im = {};"),
        ("edges are repeated", "2 * (size - 1) - i", "2 * size - 1 - i"),
        ("every eighth colour is left out", "std::min<int64_t>(LANES, planes", "std::min<int64_t>(LANES - 1, planes"),
        ("every colour is the first", "index % sizes.colours * channels", "index % sizes.colours * 0"),
        ("aliases are left out", "full = width * times;", "full = width;"),
    ),
    *mutations(
        "kernels/test_scatter",
        "kernels/cpp/fourier.h",
        (
            "large factors turn the wrong way",
            "over_i(a[k + 1] - a[factor - 1 - k])",
            "over_i(a[factor - 1 - k] - a[k + 1])",
        ),
    ),
    *mutations(
        "kernels/test_scatter",
        "kernels/scatter.py",
        ("gradients of images are lost", " or (x_NCHW.requires_grad and torch.is_grad_enabled())", ""),
        ("long lines of factors overflow", "_MOST_FACTOR: Final = 61", "_MOST_FACTOR: Final = 67"),
        ("tables are read past their end", "and table.shape == shape", ""),
        ("sides need not be halved evenly", "        and height % 2**scales == width % 2**scales == 0\n", ""),
        ("half a table is read as a whole one", "all(is_dense(table) and", "all("),
        ("lines before the image are read", "        and min(padding) >= 0\n", ""),
        ("lines below the image are read", "        and max(top, bottom) < height\n", ""),
        ("columns beside the image are read", "        and max(left, right) < width\n", ""),
    ),
    *mutations(
        "data/test_features",
        "training/stages.py",
        ("features of other kernels are taken from the disk", " {kernels.identity()}", ""),
        ("private pictures decide about layers", "_synthetic_images(store.image_shape)", "store.images[:2]"),
    ),
    *mutations(
        "kernels/test_conv_gradients",
        "gradients/rules/convolution.py",
        ("tiny gradients have no norm", "self._squares_U + underflow(formed_UOD.flatten(1))", "self._squares_U"),
    ),
    *mutations(
        "gradients/test_rules",
        "gradients/rules/convolution.py",
        (
            "only the last images' gradients are added",
            "beta=int(first > 0)",
            "beta=0",
        ),
    ),
    *mutations(
        "kernels/test_conv_gradients",
        "kernels/cpp/pull_back.cpp",
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
        "kernels/test_conv_gradients",
        "kernels/cpp/filter_moments.cpp",
        ("the rest of a filter has no moments", "z + i, count - i);", "z + i, 0);"),
        ("half of a filter has no moments", "sums[0].add(sums[2]);", ""),
        ("every filter has the first one's direction", "z_OD + o * depth", "z_OD"),
        ("every unit has the first one's moments", "e_UOD + (u * outputs + o) * depth", "e_UOD + o * depth"),
    ),
    *mutations(
        "kernels/test_norm_act",
        "kernels/cpp/pool.cpp",
        ("a window's gradient goes to its neighbour", "== -2 * r - k", "== -r - 2 * k"),
    ),
)
