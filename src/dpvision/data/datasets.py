"""The registry of public datasets: names, files with checksums, classes, and published normalisation constants.

``locate`` finds a dataset's files on this machine or downloads them into the cache. The small digits dataset comes
with scikit-learn and needs no download.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, final

import numpy as np

from dpvision.data.mnist_cifar import CIFAR_HOMEPAGE, has_cifar, has_idx
from dpvision.data.normalisation import Normalisation, fixed_normalisation
from dpvision.data.options import LoadOptions, Progress
from dpvision.data.store import ImageStore, store_of_arrays
from dpvision.errors import BadFile, DataError, shown
from dpvision.storage.files import replacing, sha256_of

DATA_VARIABLE = "DPVISION_DATA"
DIGITS = "digits"
DIGIT_CLASSES = tuple(str(digit) for digit in range(10))
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
DIGITS_TEST_ROWS = 360
TIMEOUT_SECONDS = 30.0
BLOCK_BYTES = 1 << 20


@final
@dataclass(frozen=True)
class RemoteFile:
    """One file of a public dataset.

    Attributes:
        file: its name in the cache.
        addresses: URLs, in order of preference.
        size: its length in bytes; a longer answer is cut off and refused.
        sha256: the hex digest that decides whether it is the right file.
    """

    file: str
    addresses: tuple[str, ...]
    size: int
    sha256: str


@final
@dataclass(frozen=True, kw_only=True)
class PublicDataset:
    """A registered dataset.

    Attributes:
        name: what a user calls it; also its folder in the cache.
        kind: the format of its files.
        folders: where its files may be below a data folder, first match first.
        archives: files that hold all of it, tried after the folders.
        class_names: names of the classes; None if the files name them.
        remotes: its files at their official sources.
        normalisation: constants of the training set as the literature quotes them. The dataset is public, so they
            cost no epsilon.
        homepage: where it comes from, for messages.
        num_train: number of training images.
    """

    name: str
    kind: Literal["idx", "cifar"]
    folders: tuple[str, ...]
    archives: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None
    remotes: tuple[RemoteFile, ...]
    normalisation: Normalisation
    homepage: str
    num_train: int

    def is_in(self, folder: Path) -> bool:
        """Whether ``folder`` holds the files of this dataset."""
        return has_idx(folder) if self.kind == "idx" else has_cifar(folder, self.name)


def _published(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalisation:
    return Normalisation(mean=mean, std=std, source="published")


def _idx_files(addresses: tuple[str, ...], *facts: tuple[int, str]) -> tuple[RemoteFile, ...]:
    """Name the four idx files of a dataset, given the size and the SHA-256 of each."""
    files = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    return tuple(
        RemoteFile(f"{file}.gz", tuple(f"{address}{file}.gz" for address in addresses), size, sha256)
        for file, (size, sha256) in zip(files, facts, strict=True)
    )


def _cifar(classes: int, unpacked: str, size: int, sha256: str, normalisation: Normalisation) -> PublicDataset:
    """Register CIFAR-10 or CIFAR-100 in its binary version."""
    name, archive = f"cifar{classes}", f"cifar-{classes}-binary.tar.gz"
    return PublicDataset(
        name=name,
        kind="cifar",
        folders=tuple(f"{above}{below}" for above in ("", f"{name}/", f"{name.upper()}/") for below in (unpacked, ".")),
        archives=(archive,),
        remotes=(RemoteFile(archive, (f"https://www.cs.toronto.edu/~kriz/{archive}",), size, sha256),),
        normalisation=normalisation,
        homepage=CIFAR_HOMEPAGE,
        num_train=50_000,
    )


# CIFAR-10's constants are those of the ScaleNorm code, the others those of the customary PyTorch examples.
_ALL = (
    PublicDataset(
        name="mnist",
        kind="idx",
        folders=("mnist", "mnist/raw", "MNIST", "MNIST/raw"),
        class_names=DIGIT_CLASSES,
        remotes=_idx_files(
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://yann.lecun.com/exdb/mnist/"),
            (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
        normalisation=_published((0.1307,), (0.3081,)),
        homepage="yann.lecun.com/exdb/mnist",
        num_train=60_000,
    ),
    PublicDataset(
        name="fashionmnist",
        kind="idx",
        folders=("fashionmnist", "FashionMNIST", "FashionMNIST/raw", "fashion-mnist", "fashion_mnist", "fashion"),
        class_names=FASHION_CLASSES,
        remotes=_idx_files(
            (
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            ),
            (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
        normalisation=_published((0.2860,), (0.3530,)),
        homepage="github.com/zalandoresearch/fashion-mnist",
        num_train=60_000,
    ),
    _cifar(
        10,
        "cifar-10-batches-bin",
        170052171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        _published((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    ),
    _cifar(
        100,
        "cifar-100-binary",
        168513733,
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        _published((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ),
)
DATASETS: dict[str, PublicDataset] = {each.name: each for each in _ALL}


def dataset_names() -> tuple[str, ...]:
    """The names that ``load`` accepts besides paths."""
    return (DIGITS, *DATASETS)


def cache_folder() -> Path:
    """The folder that downloads go to: ``$DPVISION_DATA``, or ``~/.cache/dpvision``."""
    variable = os.environ.get(DATA_VARIABLE)
    return Path(variable) if variable else Path.home() / ".cache" / "dpvision"


def locate(dataset: PublicDataset, options: LoadOptions, *, progress: Progress | None = None) -> Path:
    """Find the files of a dataset, or download them into the cache.

    Args:
        dataset: which one.
        options: ``data_dir`` is searched first, then ``$DPVISION_DATA``, then the cache; ``download`` allows the rest.
        progress: called during a download.

    Returns:
        A folder, or an archive that holds all of the dataset.

    Raises:
        DataError: if the dataset is not found and can't be downloaded.
    """
    places = _places(options)
    for place, direct in places:
        folders = [*(place / folder for folder in dataset.folders), *([place] if direct else [])]
        archives = [place / above / archive for above in ("", dataset.name) for archive in dataset.archives]
        for candidate in (*folders, *archives):
            if candidate.is_file() or dataset.is_in(candidate):
                return candidate
    if not options.download:
        searched = ", ".join(shown(place) for place, _ in places)
        files = f" ({dataset.archives[0]})" if dataset.archives else ""
        raise DataError(f"{dataset.name} is not in {searched}; download is off. It is at {dataset.homepage}{files}.")
    folder = cache_folder() / dataset.name
    for remote in dataset.remotes:
        download(remote, folder, progress=progress)
    return folder if dataset.kind == "idx" else folder / dataset.remotes[0].file


def _places(options: LoadOptions) -> list[tuple[Path, bool]]:
    """List the folders to search, and whether the files may be right there: only in the one that the user named."""
    named = [] if options.data_dir is None else [(Path(options.data_dir), True)]
    if named and not named[0][0].is_dir():
        raise DataError(f"data_dir {shown(options.data_dir)} is not a folder.")
    default = Path.home() / ".cache" / "dpvision"
    return [*named, *((place, False) for place in dict.fromkeys((cache_folder(), default)))]


def download(remote: RemoteFile, folder: Path, *, progress: Progress | None = None) -> Path:
    """Download a file unless ``folder`` has it already.

    Args:
        remote: which file; its addresses are tried in order.
        folder: where to put it; made if it does not exist.
        progress: called with (what is downloaded, bytes so far, bytes in all).

    Returns:
        The file's path.

    Raises:
        DataError: if no address gives the right file.

    Guarantee: the file has the stated SHA-256. On failure or interruption no part of it stays.
    """
    target = folder / remote.file
    if target.is_file() and sha256_of(target) == remote.sha256:
        return target
    failures: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for address in remote.addresses:
            try:
                with replacing(target) as file:
                    _copy(remote, address, file, progress)
            except BadFile as error:
                failures.append(f"{address} ({error})")
            else:
                return target
    except OSError as error:
        raise DataError(f"{shown(folder)} can't be written: {shown(error)}.") from error
    raise DataError(
        f"{remote.file} can't be downloaded: {'; '.join(shown(each) for each in failures)}. "
        f"Check the network, or put the file into {shown(folder)}."
    )


def _copy(remote: RemoteFile, address: str, file: BinaryIO, progress: Progress | None) -> None:
    """Copy what ``address`` answers into ``file``, or raise ``BadFile`` if it is not the right content."""
    digest, done = hashlib.sha256(), 0
    try:
        # The addresses are constants of this package, and the checksum decides, whichever server answers.
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310
            while block := response.read(BLOCK_BYTES):
                done += len(block)
                if done > remote.size:
                    raise BadFile(f"more than the {remote.size} bytes that the file has")
                digest.update(block)
                file.write(block)
                if progress is not None:
                    progress(f"downloading {remote.file}", done, remote.size)
    except urllib.error.HTTPError as error:
        error.close()
        raise BadFile(str(error)) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise BadFile(str(getattr(error, "reason", error)) or type(error).__name__) from error
    if done != remote.size or digest.hexdigest() != remote.sha256:
        raise BadFile(f"checksum {digest.hexdigest()[:16]}… of {done} bytes, expected {remote.sha256[:16]}…")


def load_digits() -> tuple[ImageStore, ImageStore, Normalisation]:
    """Load scikit-learn's 1,797 digits of 8×8 pixels: the first 1,437 to train, the last 360 to test.

    Returns:
        The training split, the test split and normalisation constants. The split follows the order of the dataset,
        values 0..16 become 0..255, and the constants are fixed: no customary ones are published for this dataset.

    Raises:
        DataError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as packaged_digits
    except ImportError as error:
        raise DataError("digits comes with scikit-learn, which is not installed: pip install scikit-learn.") from error
    data: Any = packaged_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.uint8)[:, None]
    train, test = (
        store_of_arrays(
            images=images[rows].copy(), labels=data.target[rows], class_names=DIGIT_CLASSES, name=f"{DIGITS} {split}"
        )
        for split, rows in (("train", slice(None, -DIGITS_TEST_ROWS)), ("test", slice(-DIGITS_TEST_ROWS, None)))
    )
    return train, test, fixed_normalisation(1)
