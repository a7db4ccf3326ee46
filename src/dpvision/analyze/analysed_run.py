"""What is analysed: a released model and images that may be used for it.

Images must be declared public: the test part of a published dataset, or images that the user names. A run's private
training images are read only on an explicit, unsafe request; then everything computed from them stays in ``private/``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from dpvision.config import RunConfig, parse_config
from dpvision.data import ImageStore
from dpvision.data.splits import holdout_keys, load_splits, test_is_public
from dpvision.errors import ArgumentError, DataError, PrivacyError
from dpvision.inference.load import ReleasedModel, load_model, load_test_images
from dpvision.models.losses import RowLoss, loss_for
from dpvision.own_code import is_own
from dpvision.privacy.mechanism import Mechanism
from dpvision.storage.run_folder import RunFolder

UNSAFE_STAMP: Final = "UNSAFE: computed from private training images without noise. Do not publish."
NO_PRIVACY_STAMP: Final = "The model was trained without privacy: its weights are not covered by any guarantee."
UNSAFE_FOLDER: Final = "unsafe_analysis"
_SEED: Final = 0


@final
@dataclass(frozen=True, kw_only=True)
class AnalysedRun:
    """A released model with normalised images in evaluation mode.

    Attributes:
        name: of the run's folder.
        released: the model.
        inputs: normalised images.
        targets: their targets.
        loss: one loss per row.
        images_from: what the images are.
        private_folder: where results on private images must stay; None if the images are public.
    """

    name: str
    released: ReleasedModel
    inputs: Tensor
    targets: Tensor
    loss: RowLoss
    images_from: str
    private_folder: Path | None = None

    @property
    def unsafe(self) -> bool:
        """Whether the images are private."""
        return self.private_folder is not None

    @property
    def model(self) -> nn.Module:
        """The network, in evaluation mode."""
        return self.released.model

    @property
    def mechanism(self) -> Mechanism | None:
        """The run's mechanism; None without privacy."""
        return self.released.config.mechanism if self.released.config.privacy.enabled else None

    @property
    def stamps(self) -> tuple[str, ...]:
        """What a reader of the results must know."""
        private = self.released.config.privacy.enabled
        return (*((UNSAFE_STAMP,) if self.unsafe else ()), *(() if private else (NO_PRIVACY_STAMP,)))

    def facts(self) -> dict[str, Any]:
        """What was analysed, on what, for every document of results."""
        return {
            "run": self.name,
            "model": None if self.released.config.model is None else self.released.config.model.name,
            "epsilon": self.released.certificate.get("epsilon"),
            "images": len(self.inputs),
            "images_from": self.images_from,
            "stamps": list(self.stamps),
        }


def open_run(
    run: Path,
    *,
    images: int,
    test: str | None = None,
    test_masks: str | None = None,
    data_dir: Path | None = None,
    unsafe: bool = False,
    model: object | None = None,
) -> AnalysedRun:
    """Load a released model and images to analyse it on.

    Args:
        run: the run's folder, or its release folder if ``test`` is named.
        images: most images, at least 2; spread evenly over the rows.
        test: public images; None takes the test part of the published dataset that the run trained on.
        test_masks: their masks, for segmentation.
        data_dir: folder that holds the known datasets.
        unsafe: take the private training images instead.
        model: the code of the run's own model, where it has one.

    Returns:
        The model and the images.

    Raises:
        PrivacyError: the run's test images are not declared public for this: they were held out of private data.
        ArgumentError: there are too few images, or both public and private ones are asked for.
        DataError: the run's images have changed.

    Guarantee: without ``unsafe``, no private image is used; images that were held out of the private ones are
    private here, because they are declared public for metrics alone.
    """
    if images < 2:
        raise ArgumentError(f"images must be a whole number >= 2, got {images}.")
    if unsafe and (test is not None or test_masks is not None):
        raise ArgumentError("choose public images (--test) or the private ones (--unsafe-training-data), not both.")
    released = load_model(run, model=model)
    if unsafe:
        store = _training_images(run, data_dir)
    else:
        if test is None:
            # The released configuration has names without paths: a private folder may be called mnist there.
            require_public_test(parse_config(RunFolder.open(run).read_whole_config()))
        store = load_test_images(run, released, test=test, test_masks=test_masks, data_dir=data_dir)
    rows = np.unique(np.linspace(0, store.num_rows - 1, min(images, store.num_rows)).round().astype(np.int64))
    if len(rows) < 2:
        raise ArgumentError(f"an analysis needs at least 2 images, {store.name} has {store.num_rows}.")
    chosen = torch.from_numpy(rows)
    labels = store.labels[chosen]
    return AnalysedRun(
        name=run.resolve().name,
        released=released,
        inputs=released.normalisation.apply(store.images[chosen]),
        targets=labels if store.multi_label else labels.long(),
        loss=_loss(released),
        images_from=f"{'private training images' if unsafe else 'public test images'} of {store.name}",
        private_folder=unsafe_folder(run) if unsafe else None,
    )


def require_public_test(config: RunConfig) -> None:
    """Refuse the run's own test images unless they are public for any use, see ``data.splits.test_is_public``.

    Raises:
        PrivacyError: they were held out of the private images, or came with them.
    """
    if not test_is_public(config):
        raise PrivacyError(
            "the run's test images came with the private ones and are declared public for metrics alone. Name public "
            "images with --test, or ask for --unsafe-training-data, whose results stay in private/."
        )


def unsafe_folder(run: Path) -> Path:
    """Return where results on private images go: into ``private/``, never elsewhere."""
    return RunFolder.open(run).private / UNSAFE_FOLDER


def _training_images(run: Path, data_dir: Path | None) -> ImageStore:
    folder = RunFolder.open(run)
    stored = folder.load_key()
    config = parse_config(folder.read_whole_config())
    if data_dir is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"data_dir": str(data_dir)})})
    store = load_splits(config, holdout_keys(stored.keys, stored.run_id)).train
    if store.fingerprint() != stored.bindings[-1].get("data"):
        raise DataError("the run's training images are not what they were: the data changed.")
    return store


def _loss(released: ReleasedModel) -> Callable[[Tensor, Tensor], Tensor]:
    config = released.config
    loss = None if config.loss is None or is_own(config.loss) else config.loss
    return loss_for(config.task, loss or "cross_entropy", len(released.class_names))
