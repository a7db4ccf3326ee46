"""Run folders as a training run leaves them, for tests of the report. The figures are made up but consistent."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from dpvision.release.statements import SHOWN_IMAGES
from dpvision.storage.run_folder import EXAMPLES, Example, examples_bytes

MNIST_ACCURACIES = (0.9918, 0.9938, 0.9797, 0.9832, 0.9817, 0.9776, 0.9854, 0.9747, 0.9754, 0.9693)
MNIST_COUNTS = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)


def certificate(**changes: Any) -> dict[str, Any]:
    """A certificate of MNIST at epsilon 2.93, computed by PLD (q = 0.1, noise multiplier 2.997, 400 steps)."""
    values: dict[str, Any] = {
        "format": 2,
        "for_release": True,
        "stamps": [],
        "privacy_unit": "example",
        "adjacency": "add_remove",
        "delta": 1e-5,
        "epsilon": 2.924371,
        "epsilon_rdp": 3.184682,
        "mechanism": {
            "num_units": 60_000,
            "expected_batch_size": 6000,
            "clip_norm": 0.5,
            "noise_multiplier": 2.997,
            "steps": 400,
            "privacy_unit": "example",
            "adjacency": "add_remove",
        },
        "steps_taken": 400,
        "charged": [{"purpose": "training step", "sample_rate": 0.1, "noise_multiplier": 2.997, "count": 400}],
        "declared": [
            {"what": "number of pictures: 60,000", "how": "published with the dataset"},
            {"what": "classes and picture size", "how": "published with the dataset"},
            {"what": "normalisation constants", "how": "none used: pixels are scaled to 0…1"},
            {"what": "test split", "how": "public; used for every accuracy of this run"},
        ],
        "not_covered": [
            "How hyper-parameters, architecture and clip norm were chosen outside this run.",
            "Other runs and releases on the same data: each of them composes with this one.",
            "Timing, memory use and other side channels of the machine that trained.",
            "Whoever can read private/: it holds the key of the noise.",
            "A person who owns several examples: the guarantee protects one example at a time.",
        ],
        "curve": [
            {"delta": 1e-4, "epsilon": 2.502570},
            {"delta": 1e-5, "epsilon": 2.924371},
            {"delta": 1e-6, "epsilon": 3.301661},
            {"delta": 1e-7, "epsilon": 3.646404},
            {"delta": 1e-8, "epsilon": 3.966070},
        ],
        "gaussian_dp": {"mu": 0.711286, "epsilon_up_to": 3.966070},
        "attack_success": [
            {"false_positive_rate": 0.001, "true_positive_rate": 0.008313},
            {"false_positive_rate": 0.01, "true_positive_rate": 0.051011},
            {"false_positive_rate": 0.1, "true_positive_rate": 0.275611},
        ],
        "other_units": [],
        "sampler": "poisson",
        "divisor": 6000.0,
        "deployment": {"trust_model": "central"},
        "attachments": [],
        "ledger": {"length": 402, "head": hashlib.sha256(b"ledger").hexdigest()},
        "weights_sha256": hashlib.sha256(b"weights").hexdigest(),
        "config_sha256": hashlib.sha256(b"config").hexdigest(),
        "data": {"name": "mnist", "image_shape": [1, 28, 28], "classes": 10, "test_pictures": 10_000},
        "software": {"dpvision": "0.1.0", "torch": "2.13.0", "dp-accounting": "0.6.0", "python": "3.11.9"},
    }
    return values | changes


def metrics(**changes: Any) -> dict[str, Any]:
    """Figures of a run whose accuracy climbs from chance to 98.1 %."""
    steps = range(0, 401, 20)
    names = [str(digit) for digit in range(10)]
    accuracy = sum(a * n for a, n in zip(MNIST_ACCURACIES, MNIST_COUNTS, strict=True)) / sum(MNIST_COUNTS)
    values: dict[str, Any] = {
        "curve": [
            {
                "step": step,
                "epsilon": 2.924371 * math.sqrt(step / 400),
                "accuracy": accuracy - (accuracy - 0.1) * math.exp(-step / 22) * (1 - step / 400),
                "top5": None,
                "loss": 0.1,
            }
            for step in steps
        ],
        "final": {
            "accuracy": accuracy,
            "top5": 0.9994,
            "loss": 0.0712,
            "calibration": 0.0124,
            "count": sum(MNIST_COUNTS),
            "per_class": dict(zip(names, MNIST_ACCURACIES, strict=True)),
            "per_class_count": dict(zip(names, MNIST_COUNTS, strict=True)),
            "evaluated_on": "the test split of mnist",
            "weights": "raw",
        },
        "train_seconds": 95.2,
    }
    return values | changes


def config(**changes: Any) -> dict[str, Any]:
    """The settings of that run, cut short."""
    values: dict[str, Any] = {
        "name": "mnist-shoefit-tanh",
        "data": {"source": "mnist", "normalisation": "none", "test": None},
        "model": {"name": "shoefit_cnn", "options": {"activation": "tanh"}},
        "privacy": {"target_epsilon": 2.93, "delta": 1e-5, "clip_norm": 0.5},
        "optimizer": {"name": "sgd", "learning_rate": 4.0, "momentum": 0.7},
    }
    return values | changes


def without_privacy() -> dict[str, Any]:
    """The certificate of an ordinary run."""
    return certificate(
        for_release=False,
        stamps=["trained without privacy: no guarantee"],
        epsilon=None,
        epsilon_rdp=None,
        delta=None,
        mechanism={},
        charged=[],
        curve=[],
    )


def write_run(folder: Path, **files: dict[str, Any] | None) -> Path:
    """A run folder with these public files; a file given as None is left out, one not given is the usual one."""
    usual = {"certificate": certificate(), "metrics": metrics(), "config": config(), "manifest": {}}
    release = folder / "release"
    release.mkdir(parents=True, exist_ok=True)
    (folder / "private").mkdir(mode=0o700, exist_ok=True)
    for name, values in (usual | files).items():
        if values is not None:
            (release / f"{name}.json").write_text(json.dumps(values, indent=2))
    return folder


PATIENTS = {"p1": 0.81, "p2": 0.43, "p3": 0.9}


def example(**changes: Any) -> Example:
    """An image of 16 × 20 pixels with a square as its truth, and a prediction that is two pixels off."""
    truth = np.zeros((16, 20), dtype=np.uint8)
    truth[4:12, 4:12] = 1
    values = {
        "rank": "best",
        "dice": 0.91,
        "owner": "p1",
        "image_CHW": np.full((1, 16, 20), 90, dtype=np.uint8),
        "truth_HW": truth,
        "predicted_HW": np.roll(truth, 2, axis=1),
    }
    return Example(**{**values, **changes})


def mask_metrics(**changes: Any) -> dict[str, Any]:
    """Metrics as training writes them for segmentation."""
    final = {
        "task": "segmentation",
        "dice": 0.7123,
        "iou": 0.6011,
        "dice_per_patient": 0.7133,
        "iou_per_patient": 0.6022,
        "per_class": {"foreground": {"dice": 0.7123, "iou": 0.6011, "dice_per_patient": 0.7133}},
        "per_patient": PATIENTS,
        "pixel_accuracy": 0.94,
        "baseline_dice": 0.5312,
        "baseline_dice_per_patient": 0.5434,
        "loss": 0.9,
        "count": 123,
        "evaluated_on": "liver test, declared public",
        "weights": "averaged",
    }
    curve = [{"step": 10 * n, "epsilon": 0.7 * n, "dice": 0.1 + 0.15 * n, "loss": 1.0} for n in range(1, 5)]
    return {"task": "segmentation", "curve": curve, "final": final | changes}


def mask_certificate(*, public: bool = True, unit: str = "patient", **changes: Any) -> dict[str, Any]:
    """The certificate of a segmentation run; ``public`` test images may be shown."""
    declared = [{"what": SHOWN_IMAGES, "how": "named by the user"}] if public else []
    mechanism = certificate()["mechanism"] | {"privacy_unit": unit}
    return certificate(privacy_unit=unit, declared=declared, mechanism=mechanism) | changes


def write_mask_run(folder: Path, *, examples: list[Example] | None = None, **files: Any) -> Path:
    """The folder of a segmentation run, with stored examples where some are given."""
    usual = {"certificate": mask_certificate(), "metrics": mask_metrics(), "config": config(task="segmentation")}
    run = write_run(folder, **(usual | files))
    if examples is not None:
        (run / "release" / EXAMPLES).write_bytes(examples_bytes(examples))
    return run
