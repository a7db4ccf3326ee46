"""Breakages of the layer for Opacus scripts: what is recorded, and what becomes of the loss."""

from __future__ import annotations

from tools.mutations.mutation import mutations

COMPAT = (
    *mutations(
        "compat/test_recorded_step",
        "compat/recorded_step.py",
        (
            "compat: a value that was read may come back",
            "        if self._read_at is not None and needed[-1] >= self._read_at:",
            "        if False and needed[-1] >= self._read_at:",
        ),
        (
            "compat: a view may be written into",
            "and not draw.shares_memory(written):",
            "and True:",
        ),
        (
            "compat: a loss that is changed in place stays as it was",
            "            written.ref, written.fake = made.ref, made.fake\n            return written",
            "            return made",
        ),
        (
            "compat: tensors that a hook kept pass",
            "            elif isinstance(leaf, FakeTensor):",
            "            elif False:",
        ),
        (
            "compat: a trainable copy of the model passes",
            "leaf.requires_grad and torch.is_grad_enabled() and function",
            "leaf.requires_grad and not torch.is_grad_enabled() and function",
        ),
        (
            "compat: a mean is taken for a sum",
            'per_row.mean(1) if how == "mean" else',
            "per_row.sum(1) if True else",
        ),
        (
            "compat: a product of two means has rows",
            "            if len(totals) == 1 and constants and constants[0] is not None:",
            '            if name == "mul" and len(totals) == 2:\n                return self.total(totals[0], scale)\n'
            "            if len(totals) == 1 and constants and constants[0] is not None:",
        ),
        (
            "compat: weights of the batch pass",
            'if how == "mean" and name in _OWN_DIVISOR',
            "if False and name in _OWN_DIVISOR",
        ),
        (
            "compat: trainable tensors outside pass",
            "elif isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled() and function is not _MODEL:",
            "elif False:",
        ),
    ),
    *mutations(
        "compat/test_privacy_engine",
        "compat/recorded_step.py",
        (
            "compat: tensors of an earlier batch pass",
            "                if leaf.draw is not self or self.is_over:",
            "                if False:",
        ),
        (
            "compat: backward may come twice",
            "        if self.loss is not None:\n            raise",
            "        if False:\n            raise",
        ),
        ("compat: no_grad is ignored", "return found if self.has_gradient else", "return found if True else"),
        ("compat: constants are not compared", "same_kind and bool(torch.equal(one, two))", "same_kind"),
    ),
    *mutations(
        "compat/test_privacy_engine",
        "compat/privacy_engine.py",
        ("compat: the loss may change", "        if difference is not None:", "        if False:"),
        (
            "compat: the rate is rounded",
            "    return size, num_units, length\n",
            "    return num_units // length, num_units, length\n",
        ),
        (
            "compat: shuffled batches pass",
            '    if not options.get("poisson_sampling", True):',
            "    if False:",
        ),
        (
            "compat: a step is taken twice",
            "if draw is None or batch is None or draw.is_taken:",
            "if draw is None or batch is None:",
        ),
        (
            "compat: the drawn number of rows is shown",
            "self.shape = BatchShape(example, size=int(mechanism.expected_batch_size))",
            "self.shape = BatchShape(example, size=int(mechanism.expected_batch_size) + 1)",
        ),
    ),
)
