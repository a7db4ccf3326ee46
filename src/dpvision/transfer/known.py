"""Weights known by name: what they were trained on, under which licence, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import final

from dpvision.checks import DataError
from dpvision.data import Normalisation, cache_folder

IMAGENET = "ImageNet (ILSVRC2012)"
# Names under which pictures of ImageNet go about: ImageNette and the like are parts of it.
IMAGENET_NAMES = ("*imagenet*", "*imagewoof*", "*ilsvrc*")


@final
@dataclass(frozen=True, kw_only=True)
class KnownWeights:
    """A published file: ``model`` and ``options`` are what the catalogue makes for it where no model is named.

    ``data_names`` are patterns for the names of data that it was trained on, wholly or in part.
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
        """Whether data of that name belong to what the weights were trained on."""
        return any(fnmatchcase(data.lower(), pattern) for pattern in self.data_names)


def _constants(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalisation:
    return Normalisation(mean=mean, std=std, source="published")


def _lite_names() -> dict[str, str]:
    """The published names begin with an underscore, at the top and inside each block."""
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
        normalisation=_constants((127 / 255,) * 3, (128 / 255,) * 3),
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
        normalisation=_constants((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        data_names=IMAGENET_NAMES,
    ),
)
KNOWN_WEIGHTS: dict[str, KnownWeights] = {each.name: each for each in _ALL}


def known_by_hash(sha256: str | None) -> KnownWeights | None:
    """The known set with that file, under whatever name it was given."""
    return next((known for known in KNOWN_WEIGHTS.values() if known.sha256 == sha256), None)


def find_known(known: KnownWeights, data_dir: Path | None) -> Path:
    """The file of a known set: in ``data_dir``, or where datasets are kept."""
    places = [place for place in (data_dir, cache_folder(), Path.home() / ".cache" / "dpvision") if place is not None]
    for place in dict.fromkeys(places):
        for path in sorted((place / known.folder).glob(known.pattern)):
            return path
    tried = ", ".join(str(place / known.folder) for place in dict.fromkeys(places))
    raise DataError(f"the weights {known.name} are not in {tried}. Put the file there, or give its path.")
