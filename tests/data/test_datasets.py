"""Known datasets: where they are looked for, and downloads that are whole and right or leave nothing."""

from __future__ import annotations

import gzip
import hashlib
import re
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from dpvision.data import DATASETS, LoadOptions, dataset_names, load
from dpvision.data.datasets import RemoteFile, download
from dpvision.errors import DataError


class Site:
    """A little web site on this machine: path → bytes, or a status to fail with."""

    def __init__(self) -> None:
        self.files: dict[str, bytes | int] = {}
        self.promised: dict[str, int] = {}
        self.asked: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                content = site.files.get(self.path, 404)
                if isinstance(content, int):
                    self.send_error(content)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(site.promised.get(self.path, len(content))))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Silence."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    site = Site()
    thread = threading.Thread(target=site.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield site
    site.server.shutdown()
    thread.join()
    site.server.server_close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, so that nothing of this machine is found."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("DPVISION_DATA", raising=False)
    return home


def remote(site: Site, content: bytes, *, file: str = "file.gz") -> RemoteFile:
    return RemoteFile(file, (site.address + file,), len(content), hashlib.sha256(content).hexdigest())


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, rows: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem in ("train", "t10k"):
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(idx(np.zeros((rows, 4, 4), np.uint8)))
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(idx(np.zeros(rows, np.uint8)))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# --- downloads -------------------------------------------------------------------------------------------------------


def test_a_download_is_kept_when_it_is_right(site: Site, tmp_path: Path) -> None:
    content = bytes(range(256)) * 9000
    site.files["/file.gz"] = content
    seen: list[tuple[str, int, int]] = []
    path = download(remote(site, content), tmp_path / "new" / "place", progress=lambda *facts: seen.append(facts))
    assert path.read_bytes() == content
    assert leftovers(tmp_path) == ["file.gz"]
    assert seen[-1] == ("downloading file.gz", len(content), len(content))
    download(remote(site, content), tmp_path / "new" / "place")
    assert site.asked == ["/file.gz"]


@pytest.mark.parametrize(
    ("sent", "promised"),
    [(b"right contenT", None), (b"right conten", None), (b"right content and more", None), (b"right", 13)],
)
def test_a_wrong_short_or_endless_file_is_refused_and_nothing_is_left(
    site: Site, tmp_path: Path, sent: bytes, promised: int | None
) -> None:
    site.files["/file.gz"] = sent
    if promised is not None:
        site.promised["/file.gz"] = promised
    with pytest.raises(DataError, match=r"file.gz can't be downloaded: .*(checksum|more than the 13 bytes|read)"):
        download(remote(site, b"right content"), tmp_path)
    assert leftovers(tmp_path) == []


def test_a_wrong_file_in_the_cache_is_replaced_only_by_the_right_one(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file.gz").write_bytes(b"old and wrong")
    with pytest.raises(DataError, match="404"):
        download(remote(site, b"new"), tmp_path)
    assert (tmp_path / "file.gz").read_bytes() == b"old and wrong"
    site.files["/file.gz"] = b"new"
    assert download(remote(site, b"new"), tmp_path).read_bytes() == b"new"


def test_an_interrupted_download_leaves_nothing(site: Site, tmp_path: Path) -> None:
    content = bytes(3 << 20)
    site.files["/file.gz"] = content

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(remote(site, content), tmp_path, progress=interrupt)
    assert leftovers(tmp_path) == []


def test_the_second_address_is_tried_when_the_first_fails(site: Site, tmp_path: Path) -> None:
    site.files |= {"/broken": 500, "/wrong": b"oops", "/good": b"fine"}
    first, second, third = (site.address + name for name in ("broken", "wrong", "good"))
    wanted = replace(remote(site, b"fine"), addresses=(first, second, third))
    assert download(wanted, tmp_path).read_bytes() == b"fine"
    assert site.asked == ["/broken", "/wrong", "/good"]


def test_no_network_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = RemoteFile("file.gz", (f"http://127.0.0.1:{taken.getsockname()[1]}/file.gz",), 3, "0" * 64)
        with pytest.raises(DataError, match=r"refused.*Check the network, or put the file into") as caught:
            download(nobody, tmp_path)
    assert str(caught.value).isprintable()
    assert leftovers(tmp_path) == []


def test_a_folder_that_can_not_be_written_is_named(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="can't be written"):
        download(remote(site, b"x"), tmp_path / "file")


# --- finding ---------------------------------------------------------------------------------------------------------


def test_known_sets_are_looked_for_in_data_dir_then_the_variable_then_the_cache(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LoadOptions(download=False)
    with pytest.raises(DataError, match=r"mnist is not in .*dpvision; download is off"):
        load("mnist", options)
    write_mnist(home / ".cache" / "dpvision" / "mnist", 3)
    assert load("mnist", options).train.num_rows == 3
    monkeypatch.setenv("DPVISION_DATA", str(tmp_path / "variable"))
    assert load("mnist", options).train.num_rows == 3
    write_mnist(tmp_path / "variable" / "MNIST" / "raw", 4)
    assert load("mnist", options).train.num_rows == 4
    write_mnist(tmp_path / "given", 5)
    assert load("mnist", options.model_copy(update={"data_dir": tmp_path / "given"})).train.num_rows == 5
    with pytest.raises(DataError, match=r"data_dir .* is not a folder"):
        load("mnist", options.model_copy(update={"data_dir": tmp_path / "nowhere"}))


def test_fashion_is_never_taken_for_mnist_in_a_shared_cache(home: Path) -> None:
    write_mnist(home / ".cache" / "dpvision" / "fashionmnist", 3)
    write_mnist(home / ".cache" / "dpvision", 3)
    assert load("fashionmnist", LoadOptions(download=False)).train.class_names[9] == "Ankle boot"
    with pytest.raises(DataError, match="mnist is not in"):
        load("mnist", LoadOptions(download=False))


def test_a_missing_set_is_downloaded_into_the_cache_and_then_found(
    site: Site, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = idx(np.ones((6, 28, 28), np.uint8)), idx(np.arange(6, dtype=np.uint8))
    remotes = []
    for wanted in DATASETS["mnist"].remotes:
        content = gzip.compress(images if "images" in wanted.file else labels)
        site.files[f"/{wanted.file}"] = content
        remotes.append(remote(site, content, file=wanted.file))
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], remotes=tuple(remotes)))
    splits = load("mnist")
    assert splits.train.labels.tolist() == list(range(6))
    assert len(site.asked) == 4
    assert leftovers(home / ".cache" / "dpvision" / "mnist") == sorted(each.file for each in remotes)
    assert load("mnist", LoadOptions(download=False)).train.fingerprint() == splits.train.fingerprint()
    assert len(site.asked) == 4


def test_the_addresses_and_checksums_are_well_formed() -> None:
    assert dataset_names() == ("digits", "mnist", "fashionmnist", "cifar10", "cifar100")
    for known in DATASETS.values():
        for each in known.remotes:
            assert re.fullmatch("[0-9a-f]{64}", each.sha256)
            assert each.addresses[0].startswith("https://")
            assert all(address.endswith(each.file) for address in each.addresses)


# --- the embedded set ------------------------------------------------------------------------------------------------


def test_digits_come_with_a_fixed_split_and_fixed_constants() -> None:
    splits = load("digits")
    assert splits.test is not None
    assert (splits.train.num_rows, splits.test.num_rows) == (1437, 360)
    assert splits.train.image_shape == (1, 8, 8)
    assert int(splits.train.images.max()) == 255
    # The first digits of the set, and the first of its last 360, as scikit-learn ships them.
    assert splits.train.labels[:10].tolist() == list(range(10))
    assert splits.normalisation.source == "fixed"
    assert load("digits", LoadOptions(image_size=28)).train.image_shape == (1, 28, 28)


def test_without_scikit_learn_digits_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="digits comes with scikit-learn, which is not installed"):
        load("digits")


@pytest.mark.parametrize("options", [LoadOptions(unit_column="x"), LoadOptions(unit_folder_level=1)])
def test_known_sets_have_no_groups(options: LoadOptions) -> None:
    with pytest.raises(DataError, match="each of its rows is a unit of its own"):
        load("digits", options)
