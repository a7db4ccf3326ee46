"""Breakages of pictures with masks, of volumes, and of who owns a slice."""

from __future__ import annotations

from tools.mutations.mutation import mutations

_LABELS = "make_views(labels[:, None], self._views, words_NKJ, classes=True)"

MASKS = (
    *mutations(
        "data/test_batches_masks",
        "data/batches.py",
        ("a turned mask gets classes that nobody drew", "words_NKJ, classes=True)", "words_NKJ, classes=False)"),
        (
            "masks stay where their pictures move",
            _LABELS,
            "labels[:, None].repeat_interleave(self._views.count, dim=0)",
        ),
    ),
    *mutations(
        "data/test_batches_masks",
        "data/augmentation.py",
        ("classes are mixed", "outside=outside, nearest=classes)", "outside=outside, nearest=False)"),
    ),
    *mutations(
        "data/test_masks",
        "data/store.py",
        (
            "a patient is split between training and test",
            "names = self.row_names if self.owners is None else self.owners",
            "names = self.row_names",
        ),
        (
            "chosen rows become units of their own",
            "dense_units(self.unit_of_row.numpy()[chosen])",
            "torch.arange(len(chosen))",
        ),
    ),
    *mutations(
        "data/test_nifti",
        "data/options.py",
        (
            "slices are units though patients are known",
            'return owners is not None and self.units != "rows"',
            'return owners is not None and self.units == "owners"',
        ),
    ),
    *mutations(
        "data/test_nifti",
        "data/units.py",
        (
            "known owners protect nobody",
            "return dense_units(owners) if owners is not None and by_owner else torch.arange(rows)",
            "return torch.arange(rows)",
        ),
    ),
    *mutations(
        "data/test_masks_npz",
        "data/npz.py",
        (
            "owners of an archive protect nobody",
            "unit_names=texts, rows_are_units=by_row",
            "unit_names=texts, rows_are_units=True",
        ),
    ),
    *mutations(
        "data/test_nifti",
        "data/masks.py",
        (
            "a slice is scaled by its neighbours",
            "slices_are_units = not options.public and not options.owners_are_units(found)",
            'slices_are_units = not options.public and options.units == "owners"',
        ),
    ),
    *mutations(
        "data/test_nifti",
        "data/nifti.py",
        ("a header promises more than there is", "if math.prod(shape) > MAX_VOXELS:", "if False:"),
        ("a mask of another shape", "if shape != mask.voxels.shape:", "if False:"),
        ("a mask from another place", "if apart > voxel / 2:", "if False:"),
    ),
    *mutations(
        "data/test_masks",
        "data/units.py",
        ("an owner that nobody knows", "if missing and not options.public:", "if False:"),
    ),
    *mutations(
        "models/test_losses",
        "models/losses.py",
        (
            "Dice mixes the rows of a batch",
            "total_NF = p_NFHW.sum((2, 3)) + t_NFHW.sum((2, 3))",
            "total_NF = (p_NFHW.sum((2, 3)) + t_NFHW.sum((2, 3))).mean(0, keepdim=True)",
        ),
        ("an empty mask divides by nothing", "SMOOTHING = 1.0", "SMOOTHING = 0.0"),
        (
            "outputs of another shape are broadcast",
            "        _require_maps(outputs, targets, self.maps)\n",
            "",
        ),
    ),
    *mutations(
        "models/test_losses",
        "gradients/separability.py",
        ("batch Dice is refused without a reason", "    if place == LOSS:\n", "    if place == LOSS and False:\n"),
    ),
    *mutations(
        "inference/test_mask_metrics",
        "inference/mask_metrics.py",
        ("names of held-out patients are released", "    if name_patients:\n", "    if name_patients or True:\n"),
    ),
    *mutations(
        "training/test_segmentation",
        "data/splits.py",
        ("an owner gives one row too many", "place < most", "place <= most"),
        ("an owner's rows depend on others", "np.arange(len(order)) - first", "np.arange(len(order))"),
        ("rows of an owner are not limited", "train=limit_rows(train, config)", "train=train"),
    ),
    *mutations(
        "training/test_segmentation",
        "training/prepare.py",
        (
            "patients are not the unit though they are known",
            'grouped = store.owners is not None and data.units != "rows"',
            'grouped = store.owners is not None and data.units == "owners"',
        ),
    ),
    *mutations(
        "training/test_shown_examples",
        "data/splits.py",
        ("pictures that nobody called public are shown", " and config.data.test is not None", ""),
    ),
    *mutations(
        "training/test_shown_examples",
        "training/write_release.py",
        ("held-out pictures are shown", " or session.splits.held_out", ""),
    ),
    *mutations(
        "release/test_report",
        "release/run_facts.py",
        (
            "undeclared pictures are shown",
            "_content(run, EXAMPLES) if images_are_public(checked) else None",
            "_content(run, EXAMPLES)",
        ),
    ),
    *mutations(
        "inference/test_predict",
        "data/splits.py",
        (
            "private pictures are their own public test",
            "if around or test.is_relative_to(private):",
            "if False:",
        ),
    ),
    *mutations(
        "inference/test_predict",
        "inference/predict.py",
        (
            "masks are written anywhere",
            "if not job.path.parent.resolve().is_relative_to(folder.resolve()):",
            "if False:",
        ),
    ),
    *mutations(
        "training/test_segmentation",
        "training/start.py",
        ("a fork protects somebody else", '        "units": config.data.units,\n', ""),
    ),
    *mutations(
        "training/test_segmentation",
        "training/trainer.py",
        (
            "names of patients whom nobody called public",
            "name_patients=may_show_images(session.config) and not",
            "name_patients=not",
        ),
    ),
    *mutations(
        "data/test_nifti",
        "data/masks.py",
        (
            "a bad slice takes other units with it",
            "    if slices_are_units and options.skip_bad:\n",
            "    if False:\n",
        ),
    ),
)
