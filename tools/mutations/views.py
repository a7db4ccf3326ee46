"""Breakages of the views of images and of the words they are made from."""

from __future__ import annotations

from tools.mutations.mutation import mutations

VIEWS = (
    *mutations(
        "data/test_augmentation",
        "data/augmentation.py",
        (
            "rotated views are another image's",
            "rotate(images_NCHW[source_B], angle_B",
            "rotate(images_NCHW[source_B.flip(0)], angle_B",
        ),
        ("views of one image are not together", ".repeat_interleave(settings.count)\n", ".repeat(settings.count)\n"),
    ),
    *mutations(
        "data/test_augmentation",
        "data/batches.py",
        ("every step makes the same views", '"augmentation", step).reshape', '"augmentation").reshape'),
        (
            "views depend on who else was drawn",
            "keys.bits_by_unit(units, ",
            "keys.bits_by_unit(np.arange(len(units)), ",
        ),
        (
            "views are summed instead of averaged",
            "count_U = np.maximum(there_UR.sum(axis=1, keepdims=True), 1)",
            "count_U = np.maximum((rows_UR != NO_ROW).sum(axis=1, keepdims=True), 1)",
        ),
        (
            "padding keeps images",
            "absent = torch.from_numpy(np.flatnonzero(~there_UR))",
            "absent = torch.from_numpy(np.flatnonzero(rows_UR == NO_ROW))",
        ),
        ("views carry labels of others", ".repeat_interleave(self._views.count, dim=0)", ".repeat(self._views.count)"),
        (
            "each view is a unit of its own",
            "    return Microbatch(inputs, targets, weights_UR)\n",
            "    return Microbatch(inputs, targets, weights_UR.view(-1, 1) * copies)\n",
        ),
    ),
    *mutations(
        "training/test_augmented_runs",
        "training/trainer.py",
        ("views are configured and not made", "        views=config.views,\n", ""),
    ),
    *mutations(
        "privacy/test_randomness",
        "privacy/randomness.py",
        ("units share words", "units[:, None] * blocks + np.arange(blocks)", "units[:, None] + np.arange(blocks)"),
    ),
)
