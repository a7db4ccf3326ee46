"""Breakages of manifests, DICOM files and pages: who owns an image, which classes there are, what is tested on."""

from __future__ import annotations

from tools.mutations.mutation import mutations

INPUTS = (
    *mutations(
        "data/test_loading data/test_manifest",
        "data/units.py",
        (
            "a placeholder is a patient",
            "nameless = [owner for owner in owners if _NO_ONE.fullmatch(owner)]",
            "nameless = [owner for owner in owners if not owner]",
        ),
        (
            "one id in all files is a patient",
            "if len(owners) > 1 and len(set(owners)) == 1:",
            "if len(owners) > 1 and not set(owners):",
        ),
    ),
    *mutations(
        "data/test_dicom",
        "data/image_folder.py",
        (
            "dicom files protect images and not patients",
            "if any(patient is not None for patient in images.patients):",
            "if any(patient is not None for patient in ()):",
        ),
        (
            "files without a patient fall back to single images",
            'if missing and not options.public and options.units != "rows":',
            'if missing and options.public and options.units != "rows":',
        ),
    ),
    *mutations(
        "data/test_loading",
        "data/image_folder.py",
        (
            "pages of a file become units of their own",
            "if several and not options.public:",
            "if several and options.public:",
        ),
    ),
    *mutations(
        "data/test_manifest",
        "data/manifest.py",
        (
            "private labels decide the classes of a manifest",
            "if not (options.public_classes or options.public or options.classes_are_public):",
            "if options.public and not options.public_classes:",
        ),
        ("private images of a manifest are tested on too", "    if both:\n", "    if both and options.public:\n"),
        ("a column of patients protects images", "headings = () if by_name else UNIT_HEADINGS", "headings = ()"),
    ),
    *mutations(
        "data/test_manifest data/test_dicom",
        "data/splits.py",
        (
            "an owner is on both sides of the split",
            "shared = sorted(set(train.owners) & set(test.owners)) if",
            "shared = sorted(set(train.owners) - set(train.owners)) if",
        ),
    ),
    *mutations(
        "release/test_build",
        "release/certificate_page.py",
        (
            "own test images without an epsilon are not named",
            "if own is not None and own.endswith(NO_EPSILON):",
            "if own is not None and not own:",
        ),
    ),
)
