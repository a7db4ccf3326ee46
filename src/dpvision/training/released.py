"""A released model, ready to use: needs the release folder only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import nn

from dpvision import models
from dpvision.checks import DataError, TamperError
from dpvision.config import RunConfig, parse_config, required
from dpvision.data import ImageStore, LoadOptions, Normalisation, load_one
from dpvision.runfolder import CERTIFICATE, RunFolder, parse_object, read_file
from dpvision.training.prepare import load_pictures
from dpvision.training.start import holdout_keys, normalisation_of


@final
@dataclass(frozen=True)
class Released:
    """A model with all that is needed to show it pictures."""

    model: nn.Module
    config: RunConfig
    normalisation: Normalisation
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    certificate: dict[str, Any]


def load_released(run: Path) -> Released:
    """The model of a run, with its weights checked against the certificate."""
    folder = RunFolder.open(run)
    path = folder.release / CERTIFICATE
    certificate = parse_object(read_file(path), name=str(path))
    config = parse_config(folder.read_config())
    try:
        class_names = tuple(certificate["data"]["class_names"])
        channels, height, width = certificate["data"]["image_shape"]
    except (KeyError, TypeError, ValueError) as error:
        raise TamperError(f"{path} does not say what the model was trained on.") from error
    chosen = required(config.model, "model")
    model = models.create(chosen.name, num_classes=len(class_names), in_channels=channels, seed=0, **chosen.options)
    weights = folder.load_weights()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise TamperError(f"the weights in {run} do not fit its model {chosen.name}.") from error
    return Released(
        model=model.eval(),
        config=config,
        normalisation=normalisation_of(config),
        class_names=class_names,
        image_shape=(channels, height, width),
        certificate=certificate,
    )


def test_pictures(run: Path, released: Released, *, test: str | None, data_dir: Path | None) -> ImageStore:
    """Public pictures to measure a released model on: named ones, or the run's own test split."""
    if test is not None:
        height, width = released.image_shape[1:]
        options = LoadOptions(data_dir=data_dir, image_size=(height, width), channels=released.image_shape[0])
        return load_one(test, options, class_names=released.class_names)
    folder = RunFolder.open(run)
    stored = folder.load_key()
    whole = parse_config(folder.read_whole_config()).data
    if data_dir is not None:
        whole = whole.model_copy(update={"data_dir": str(data_dir)})
    store = load_pictures(whole, holdout_keys(stored.keys, stored.run_id)).test
    if store.fingerprint() != stored.bindings[-1].get("test"):
        raise DataError("the run's test split is not what it was: the data changed. Name pictures with --test.")
    return store
