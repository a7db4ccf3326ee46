"""Load a released model for inference: needs the release folder only.

The weights are checked against the certificate's hash; ``dpvision verify`` checks the certificate itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from dpvision import models
from dpvision.config import RunConfig, parse_config, required
from dpvision.data import ImageStore, LoadOptions, Normalisation, load_one
from dpvision.data.options import MAX_SIDE
from dpvision.data.splits import holdout_keys, load_options, load_splits, stored_normalisation
from dpvision.errors import ArgumentError, DataError, TamperError, printable, some_of
from dpvision.models.losses import outputs_for
from dpvision.own_code import named_again
from dpvision.storage.files import parse_object, read_file
from dpvision.storage.run_folder import CERTIFICATE, RunFolder

if TYPE_CHECKING:
    from dpvision.inference.predict import Picture, Predictions

MOST_CLASSES = 100_000


@final
@dataclass(frozen=True)
class ReleasedModel:
    """A released model in evaluation mode, with what is needed to apply it to images.

    Attributes:
        model: the network.
        config: the released configuration.
        normalisation: the pixel constants.
        class_names: names of the outputs.
        image_shape: (channels, height, width) of its inputs.
        certificate: content of ``certificate.json``, not verified.
    """

    model: nn.Module
    config: RunConfig
    normalisation: Normalisation
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    certificate: dict[str, Any]

    def __repr__(self) -> str:
        """Name the network, its inputs and outputs and the guarantee; the whole content is in the attributes."""
        return (
            f"ReleasedModel(model={type(self.model).__name__}, image_shape={self.image_shape}, "
            f"classes={some_of(self.class_names)}, epsilon={self.certificate.get('epsilon')}, "
            f"delta={self.certificate.get('delta')})"
        )

    @property
    def file_window(self) -> tuple[float, float] | None:
        """The intensity window for image files and DICOM; that of an .npz file is for its own numbers."""
        return None if Path(self.config.data.source).suffix == ".npz" else self.config.data.window

    def predict(
        self, images: Picture | Sequence[Picture], *, skip_bad: bool = False, device: str = "cpu"
    ) -> Predictions:
        """Predict classes or masks of files, arrays or tensors; see ``dpvision.inference.predict``.

        Args:
            images: files and folders; an array or tensor of a batch, or one image; or several of these in a list.
            skip_bad: continue without files that can't be read.
            device: torch's name of the device.

        Returns:
            The probabilities of all classes and the classes themselves, or the masks.

        Raises:
            DataError: there are no images, or some can't be read or have another layout.
        """
        from dpvision.inference.predict import predict  # it imports this module

        return predict(self, images, skip_bad=skip_bad, device=device)

    def with_window(self, window: tuple[float, float]) -> ReleasedModel:
        """The same model with another intensity window (low, high) for volumes, DICOM and 16-bit images."""
        values = self.config.model_dump()
        return replace(self, config=parse_config({**values, "data": {**values["data"], "window": window}}))


def load_model(run: Path | str, *, model: object | None = None) -> ReleasedModel:
    """Load the released model of a run; ``dpvision.load`` is this function.

    Args:
        run: the run folder, or its release folder, also a copy.
        model: the code of the run's own model: FILE.py:FUNCTION, a function or class that makes it, or a module. Only
            for a run that has one.

    Raises:
        ArgumentError: the run has an own model, and it was not named.
        PrivacyError: the named code is not what the model was trained with; nothing of it was executed.
        TamperError: weights, configuration and certificate do not fit together.

    Guarantee: no code is executed that ``model`` does not name.
    """
    folder = RunFolder.open_release(Path(run))
    folder.require_loop(own=False)
    path = folder.release / CERTIFICATE
    certificate = parse_object(read_file(path), name=str(path))
    config = parse_config(folder.read_config())
    class_names, image_shape = _trained_on(certificate, path)
    chosen = required(config.model, "model")
    outputs = outputs_for(config.task, len(class_names))
    code = named_again(chosen.name, chosen.sha256, model, kind="model")
    if code is None:
        network = models.create(chosen.name, num_classes=outputs, in_channels=image_shape[0], seed=0, **chosen.options)
    else:
        network = models.create_own(code, num_classes=outputs, image_shape=image_shape, seed=0)
    weights = folder.load_weights()
    try:
        network.load_state_dict(weights)
        with torch.no_grad():
            network.eval()(torch.zeros(1, *image_shape))
    except (RuntimeError, ValueError, IndexError) as error:
        raise TamperError(f"weights, model {chosen.name} and image_shape in {run} do not fit together.") from error
    return ReleasedModel(
        model=network.eval(),
        config=config,
        normalisation=stored_normalisation(config),
        class_names=class_names,
        image_shape=image_shape,
        certificate=certificate,
    )


def _trained_on(certificate: dict[str, Any], path: Path) -> tuple[tuple[str, ...], tuple[int, int, int]]:
    """Read class names and image shape; the certificate is not verified here, so they may be anything."""
    data = certificate.get("data")
    names, shape = (data.get("class_names"), data.get("image_shape")) if isinstance(data, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(shape, list) or len(shape) != 3:
        raise TamperError(f"{path} does not say what the model was trained on.")
    named = 0 < len(names) <= MOST_CLASSES and all(isinstance(name, str) for name in names)
    shaped = shape[0] in (1, 3) and all(type(side) is int and 1 <= side <= MAX_SIDE for side in shape)
    if not named or not shaped:
        raise TamperError(f"{path} names classes or an image shape that no model has.")
    return tuple(printable(name) for name in names), (shape[0], shape[1], shape[2])


def load_test_images(
    run: Path,
    released: ReleasedModel,
    *,
    test: str | None,
    test_masks: str | None,
    data_dir: Path | None,
    test_findings: str | None = None,
) -> ImageStore:
    """Load public images to measure a released model on.

    Args:
        run: the run folder; needed with its private part where ``test`` is None.
        released: the model, whose image shape and classes are used.
        test: images to load; by default the run's own test split.
        test_masks: masks of ``test``, for segmentation.
        data_dir: folder that holds the known datasets.
        test_findings: CSV of the findings of ``test``, for a model of findings.

    Raises:
        ArgumentError: masks or findings are given or missing where the model does not fit.
        DataError: the run's test split is no longer what it was.
    """
    if test_masks is not None and (test is None or released.config.task != "segmentation"):
        raise ArgumentError("--test-masks belong to the images of --test and to a model that draws masks.")
    if (test_findings is not None) != (test is not None and released.config.data.findings is not None):
        raise ArgumentError(
            "--test-findings belong to the images of --test and to a model of findings, and only there."
        )
    if test is not None:
        options = _options_like(released, test_masks, data_dir, test_findings)
        if released.config.task == "classification" and Path(test).suffix != ".npz":
            options = options.model_copy(update={"window": released.file_window})
        return load_one(test, options, class_names=released.class_names)
    folder = RunFolder.open(run)
    stored = folder.load_key()
    whole = parse_config(folder.read_whole_config())
    if data_dir is not None:
        whole = whole.model_copy(update={"data": whole.data.model_copy(update={"data_dir": str(data_dir)})})
    store = load_splits(whole, holdout_keys(stored.keys, stored.run_id)).test
    if store.fingerprint() != stored.bindings[-1].get("test"):
        raise DataError("the run's test split is not what it was: the data changed. Name images with --test.")
    return store


def _options_like(
    released: ReleasedModel, masks: str | None, data_dir: Path | None, findings: str | None = None
) -> LoadOptions:
    """Read other images as the run read its own, without its table of owners."""
    other = {"data_dir": None if data_dir is None else str(data_dir), "unit_csv": None, "masks": masks}
    other |= {"findings": findings, "test_findings": None, "image_folder": None, "test": None}
    return load_options(released.config).with_shape(released.image_shape).model_copy(update=other)
