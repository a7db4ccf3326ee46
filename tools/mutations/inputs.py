"""Breakages of manifests, DICOM files and pages: who owns an image, which classes there are, what is tested on."""

from __future__ import annotations

from tools.mutations.mutation import mutations

INPUTS = (
    *mutations(
        "data/test_loading data/test_manifest",
        "data/units.py",
        (
            "a placeholder is a patient",
            "nameless = [row for row, owner in enumerate(owners) if _is_no_one(owner)]",
            "nameless = [row for row, owner in enumerate(owners) if not owner]",
        ),
        (
            "a person with two spellings is two",
            "alike = sorted(min(each) for each in written.values() if len(each) > 1)",
            "alike = sorted(min(each) for each in written.values() if len(each) > 9)",
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
        "data/test_image_folder",
        "data/image_folder.py",
        (
            "a file under two names is two units",
            "        if other != number and (owners is None",
            "        if other > number and (owners is None",
        ),
        ("owners excuse links where rows are the units", "owners=None if apart else of_file)", "owners=of_file)"),
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
        "data/test_loading",
        "data/splits.py",
        ("validation reads the test set", "elif test is None or data.validation:", "elif test is None:"),
    ),
    *mutations(
        "data/test_manifest data/test_dicom",
        "data/splits.py",
        (
            "an owner is on both sides of the split",
            "shared = owners_on_both_sides(train.owners, test.some_owners if test.owners is None else test.owners)",
            "shared = owners_on_both_sides(train.owners, ())",
        ),
        (
            "one unknown owner hides the others",
            "shared = owners_on_both_sides(train.owners, test.some_owners if test.owners is None else test.owners)",
            "shared = owners_on_both_sides(train.owners, test.owners or ())",
        ),
        (
            "owners that are not known are not declared",
            "return people and own and not splits.held_out and splits.test.owners is None",
            "return False",
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
