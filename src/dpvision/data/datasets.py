"""Datasets known by name: where they lie, where they come from, and their published constants.

Data that ships inside a Python package: nothing to download.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from dpvision.data.cifar import has_cifar
from dpvision.data.download import Remote, download
from dpvision.data.idx import has_idx
from dpvision.data.normalisation import Normalisation, fixed_normalisation
from dpvision.data.options import LoadOptions, Progress
from dpvision.data.store import ImageStore, store_of_arrays
from dpvision.errors import DataError, shown

DATA_VARIABLE = "DPVISION_DATA"
DIGITS = tuple(str(digit) for digit in range(10))
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@final
@dataclass(frozen=True, kw_only=True)
class KnownSet:
    """Facts about a public dataset. ``folders`` are tried below each place, ``archives`` after them."""

    name: str
    kind: Literal["idx", "cifar"]
    folders: tuple[str, ...]
    archives: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None
    remotes: tuple[Remote, ...]
    keep_in: str
    normalisation: Normalisation
    homepage: str
    num_train: int

    def is_in(self, folder: Path) -> bool:
        """Whether ``folder`` holds the files of this set."""
        return has_idx(folder) if self.kind == "idx" else has_cifar(folder, self.name)


def _published(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalisation:
    return Normalisation(mean=mean, std=std, source="published")


def _idx_remotes(addresses: tuple[str, ...], *facts: tuple[int, str]) -> tuple[Remote, ...]:
    files = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    return tuple(
        Remote(f"{file}.gz", tuple(f"{address}{file}.gz" for address in addresses), size, sha256)
        for file, (size, sha256) in zip(files, facts, strict=True)
    )


def _cifar_remotes(file: str, size: int, sha256: str) -> tuple[Remote, ...]:
    return (Remote(file, (f"https://www.cs.toronto.edu/~kriz/{file}",), size, sha256),)


# The constants are those of the training sets as the literature quotes them: CIFAR-10's by the ScaleNorm code, the
# others by the customary PyTorch examples. The sets are public, so the constants cost nothing.
_ALL = (
    KnownSet(
        name="mnist",
        kind="idx",
        folders=("mnist", "mnist/raw", "MNIST", "MNIST/raw"),
        class_names=DIGITS,
        remotes=_idx_remotes(
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://yann.lecun.com/exdb/mnist/"),
            (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
        keep_in="mnist",
        normalisation=_published((0.1307,), (0.3081,)),
        homepage="yann.lecun.com/exdb/mnist",
        num_train=60_000,
    ),
    KnownSet(
        name="fashionmnist",
        kind="idx",
        folders=("fashionmnist", "FashionMNIST", "FashionMNIST/raw", "fashion-mnist", "fashion_mnist", "fashion"),
        class_names=FASHION,
        remotes=_idx_remotes(
            (
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            ),
            (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
        keep_in="fashionmnist",
        normalisation=_published((0.2860,), (0.3530,)),
        homepage="github.com/zalandoresearch/fashion-mnist",
        num_train=60_000,
    ),
    KnownSet(
        name="cifar10",
        kind="cifar",
        folders=tuple(
            f"{above}{folder}"
            for above in ("", "cifar10/", "CIFAR10/")
            for folder in ("cifar-10-batches-bin", "cifar-10-batches-py", ".")
        ),
        archives=("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"),
        remotes=_cifar_remotes(
            "cifar-10-python.tar.gz", 170498071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
        ),
        keep_in="cifar10",
        normalisation=_published((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
        homepage="www.cs.toronto.edu/~kriz/cifar.html",
        num_train=50_000,
    ),
    KnownSet(
        name="cifar100",
        kind="cifar",
        folders=tuple(
            f"{above}{folder}"
            for above in ("", "cifar100/", "CIFAR100/")
            for folder in ("cifar-100-binary", "cifar-100-python", ".")
        ),
        archives=("cifar-100-python.tar.gz", "cifar-100-binary.tar.gz"),
        remotes=_cifar_remotes(
            "cifar-100-python.tar.gz", 169001437, "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"
        ),
        keep_in="cifar100",
        normalisation=_published((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        homepage="www.cs.toronto.edu/~kriz/cifar.html",
        num_train=50_000,
    ),
)
KNOWN: dict[str, KnownSet] = {each.name: each for each in _ALL}


def cache_folder() -> Path:
    """Where downloads go: ``$DPVISION_DATA``, or ``~/.cache/dpvision``."""
    variable = os.environ.get(DATA_VARIABLE)
    return Path(variable) if variable else Path.home() / ".cache" / "dpvision"


def locate(known: KnownSet, options: LoadOptions, *, progress: Progress | None = None) -> Path:
    """The folder or archive of a known set: in data_dir, in ``$DPVISION_DATA``, in the cache, or downloaded now."""
    for place, direct in _places(options):
        for candidate in _candidates(known, place, direct=direct):
            if candidate.is_file() or known.is_in(candidate):
                return candidate
    places = ", ".join(shown(place) for place, _ in _places(options))
    if not options.download:
        raise DataError(f"{known.name} is not in {places}, and download is off. It comes from {known.homepage}.")
    folder = cache_folder() / known.keep_in
    for remote in known.remotes:
        download(remote, folder, progress=progress)
    return folder if known.kind == "idx" else folder / known.remotes[0].file


def _places(options: LoadOptions) -> list[tuple[Path, bool]]:
    """Where to look, and whether the files may lie right there: only in the folder that the user named."""
    places = [] if options.data_dir is None else [(Path(options.data_dir), True)]
    if places and not places[0][0].is_dir():
        raise DataError(f"data_dir {shown(options.data_dir)} is not a folder.")
    default = Path.home() / ".cache" / "dpvision"
    return [*places, *((place, False) for place in dict.fromkeys((cache_folder(), default)))]


def _candidates(known: KnownSet, place: Path, *, direct: bool) -> list[Path]:
    folders = [place / folder for folder in known.folders]
    archives = [place / above / archive for above in ("", known.keep_in) for archive in known.archives]
    return [*folders, *([place] if direct else []), *archives]


DIGITS_TEST_ROWS = 360


def load_digits() -> tuple[ImageStore, ImageStore, Normalisation]:
    """scikit-learn's 1,797 digits of 8×8 pixels: the first 1,437 to train, the last 360 to test.

    The split is fixed and follows the order of the set. Values 0..16 become 0..255. The normalisation constants are
    fixed too: nobody publishes customary ones for this set.
    """
    try:
        from sklearn.datasets import load_digits as packaged_digits
    except ImportError as error:
        raise DataError("digits comes with scikit-learn, which is not installed: pip install scikit-learn.") from error
    data: Any = packaged_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = data.target
    train, test = (
        store_of_arrays(images=images[rows].copy(), labels=labels[rows], class_names=DIGITS, name=f"digits {split}")
        for split, rows in (("train", slice(None, -DIGITS_TEST_ROWS)), ("test", slice(-DIGITS_TEST_ROWS, None)))
    )
    return train, test, fixed_normalisation(1)
