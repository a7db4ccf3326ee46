"""Sessions on made-up pictures: the very step path of training, in a run of its own that is stamped not for release."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpvision.certificate import NOT_FOR_RELEASE
from dpvision.config import RunConfig
from dpvision.data import ImageStore, Normalisation, store_of_arrays
from dpvision.keys import Keys
from dpvision.ledger import Ledger
from dpvision.runfolder import RunFolder
from dpvision.training.phases import Phase
from dpvision.training.prepare import Pictures, constant_normalisation
from dpvision.training.session import Learner, Place, Session, assemble, make_learner
from dpvision.training.start import ledger_header

AUDIT_STAMP = "an audit run: canaries or made-up pictures are part of its data"


@contextmanager
def session_on(
    config: RunConfig,
    train: ImageStore,
    *,
    keys: Keys,
    learner: Learner | None = None,
    normalisation: Normalisation | None = None,
    parent: Path | None = None,
) -> Iterator[Session]:
    """A session over ``train`` in a folder of its own, which is gone afterwards; ``parent`` says where it lies.

    Its keys are bound to nothing: neighbouring stores under equal keys share draws and noise, which is the point.
    """
    pictures = Pictures(train, train, None, held_out=False)
    learner = learner or whole_learner(config, pictures)
    with tempfile.TemporaryDirectory(prefix="dpvision-audit-", dir=parent) as place:
        folder = RunFolder.create(Path(place) / "run")
        with folder:
            ledger = Ledger.create(
                folder.ledger_path, ledger_header(config, keys.derive("run")[:8].hex(), hand_seeded=keys.hand_seeded)
            )
            ledger.note("declare", {"what": NOT_FOR_RELEASE, "how": AUDIT_STAMP})
            yield assemble(
                config,
                pictures,
                place=Place(folder, ledger, keys, 0, "cpu"),
                learner=learner,
                normalisation=normalisation or constant_normalisation(config, pictures),
            )


def whole_learner(config: RunConfig, pictures: Pictures) -> Learner:
    """The configured model, all of it trained in one phase, on pictures."""
    return make_learner(config.model_copy(update={"transfer": None, "cache_features": "off"}), pictures, "cpu")


def one_phase(network: torch.nn.Module) -> Learner:
    """A network of ours, all of it trained in one phase."""
    trained = frozenset(name for name, value in network.named_parameters() if value.requires_grad)
    return Learner(network, (Phase(0, trained, network),))


def made_up_pictures(count: int, image_shape: tuple[int, int, int], *, seed: int) -> NDArray[np.uint8]:
    """Noise: the same for everybody."""
    return np.random.default_rng(seed).integers(0, 256, size=(count, *image_shape), dtype=np.uint8)


def made_up_store(
    config: RunConfig,
    images: NDArray[np.uint8],
    *,
    num_classes: int,
    labels: NDArray[np.int64] | None = None,
    unit_names: list[str] | None = None,
) -> ImageStore:
    """A store over made-up pictures; unless told, labels (or masks, where that is the task) are made up too."""
    shape = (len(images), *images.shape[2:]) if config.task == "segmentation" else (len(images),)
    drawn = np.random.default_rng(len(images)).integers(0, num_classes, size=shape)
    return store_of_arrays(
        images=images,
        labels=drawn if labels is None else labels,
        class_names=[f"class {number}" for number in range(num_classes)],
        name="made-up pictures",
        unit_names=unit_names,
    )
