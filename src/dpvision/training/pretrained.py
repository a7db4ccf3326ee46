"""Published pretrained weights that are known by name: their file, checksum, source, licence and model.

To add a set, add an entry to ``KNOWN_WEIGHTS``; its model must be in ``dpvision.models.registry``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import final

from dpvision.data import Normalisation, cache_folder
from dpvision.errors import DataError

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

    def covers(self, data: str) -> bool:
        """Whether a dataset of that name belongs to what the weights were trained on."""
        return any(fnmatchcase(data.lower(), pattern) for pattern in self.data_names)

    def find(self, data_dir: Path | None) -> Path:
        """Find the file in ``data_dir``, or where datasets are kept.

        Raises:
            DataError: it is in none of these folders.
        """
        places = (data_dir, cache_folder(), Path.home() / ".cache" / "dpvision")
        folders = list(dict.fromkeys(place / self.folder for place in places if place is not None))
        for folder in folders:
            for path in sorted(folder.glob(self.pattern)):
                return path
        tried = ", ".join(map(str, folders))
        raise DataError(f"the weights {self.name} are not in {tried}. Put the file there, or give its path.")


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
