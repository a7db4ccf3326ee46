"""Hostile input ends in one clear line or in a correct reading. Each test is a defect that was found and mended."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

import dpvision.data.images as images
from dpvision.cli import main
from dpvision.cli.train_command import build_config
from dpvision.config import parse_config
from dpvision.data import LoadOptions, load, load_images
from dpvision.data.features import Features, kept_features
from dpvision.data.mnist_cifar import MAX_MEMBERS, open_cifar, read_idx
from dpvision.data.safe_read import open_regular
from dpvision.data.units import unit_names
from dpvision.errors import ArgumentError, DataError, DPVisionError, Problems, TamperError, brief, require_memory
from dpvision.models import create
from dpvision.privacy.ledger import read_ledger
from dpvision.privacy.randomness import Keys
from dpvision.storage.files import tensors_of
from dpvision.storage.run_folder import RunFolder
from dpvision.training.initial_weights import read_weights

HEADER = "{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


def npy(descr: str, shape: str, body: bytes = b"") -> bytes:
    header = HEADER.format(descr=descr, shape=shape).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


def write_npz(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def png(path: Path, value: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(path)
    return path


def command(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Exit code and everything printed of one command."""
    monkeypatch.setattr(sys, "argv", ["dpvision", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return ended.value.code, captured.out + captured.err


def test_a_pipe_among_the_images_is_named_and_not_waited_for(tmp_path: Path) -> None:
    png(tmp_path / "a" / "1.png")
    png(tmp_path / "b" / "1.png")
    os.mkfifo(tmp_path / "b" / "2.png")
    with pytest.raises(DataError, match="pipe or a device"):
        load(tmp_path)
    assert load(tmp_path, LoadOptions(skip_bad=True, image_size=8)).train.num_rows == 2


@pytest.mark.parametrize("name", ["x.npz", "x.tar", "x.tar.gz", "x.png"])
def test_a_pipe_as_a_source_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=r"pipe or a device|can't be read"):
        load_images([tmp_path / name], image_shape=(1, 8, 8)) if name == "x.png" else load(tmp_path / name)


def test_pipes_as_weights_owners_and_configuration_are_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "x.pth"
    os.mkfifo(pipe)
    with pytest.raises(DPVisionError, match="pipe or a device"):
        read_weights(pipe)
    with pytest.raises(DPVisionError, match="pipe or a device"):
        unit_names(["a.png"], options=LoadOptions(unit_csv=pipe))
    with pytest.raises(DPVisionError, match="pipe or a device"):
        build_config({}, file=pipe)
    with pytest.raises(DataError, match="device"), open_regular(Path("/dev/zero")):
        pass


@pytest.mark.parametrize("source", ["x" * 5000, "a\0b", "y" * 300 + ".npz"])
def test_a_path_that_the_system_refuses_is_one_line(source: str) -> None:
    with pytest.raises(DataError) as caught:
        load(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    with pytest.raises(DataError):
        load_images([source], image_shape=(1, 8, 8))


def test_what_is_larger_than_the_machine_is_refused_before_it_is_tried() -> None:
    with pytest.raises(DataError, match="more than this machine has"):
        require_memory(2**60, "a file")
    with pytest.raises(ArgumentError, match="more than this machine has"):
        create("linear", image_size=1_000_000)


def test_large_images_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = png(tmp_path / "a.png")
    monkeypatch.setattr(images, "LARGE_PIXELS", 10)
    with images.opened(path):
        assert images._ONE_LARGE.locked()  # pyright: ignore[reportPrivateUsage]
    assert not images._ONE_LARGE.locked()  # pyright: ignore[reportPrivateUsage]


def test_sixteen_bits_become_eight_over_the_whole_range(tmp_path: Path) -> None:
    values = np.array([[0, 255, 256, 32767, 32768, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    images, _, _ = load_images([tmp_path / "deep.png"], image_shape=(1, 1, 6))
    assert images.flatten().tolist() == [round(int(value) * 255 / 65535) for value in values[0]]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (npy("'<U0'", "(1000000000000,)"), "no array of numbers or texts"),
        (npy("'|V0'", "(1000000000000,)"), "no array of numbers or texts"),
        (npy("'|u1'", "(-1, -1)", b"x"), "no array of numbers or texts"),
        (npy("'|u1'", "(True,)", b"x"), "no array of numbers or texts"),
        (npy("'|O'", "(1,)", pickle.dumps([1])), "pickled objects"),
        (npy("'<U1'", "(1,)", b"\xff\xff\xff\x7f"), "characters that don't exist"),
        (npy("'<U1'", "(1,)", b"\x00\xd8\x00\x00"), "characters that don't exist"),
        (npy("'<U2'", "(1,)", b"\0\0\0\0\0\0\0\1"), "characters that don't exist"),
        (npy("'>U1'", "(1,)", b"\0\x11\0\0"), "characters that don't exist"),
        (npy("'|u1'", f"(0, {10**30})"), "no array of numbers or texts"),
        (npy("'|u1'", "(5,)", b"abc"), "its size says otherwise"),
        (b"\x93NUMPY\x01\x00\x06\x00{\n  'a", "no header of an array"),
        (b"\x93NUMPY\x01\x00\xc8\x00" + b"(" * 200, "no header of an array"),
    ],
)
def test_an_array_that_lies_is_refused(tmp_path: Path, labels: bytes, message: str) -> None:
    good = io.BytesIO()
    np.save(good, np.zeros((1, 4, 4), np.uint8))
    path = write_npz(tmp_path / "x.npz", {"images": good.getvalue(), "labels": labels})
    with pytest.raises(DataError, match=message):
        load(path)


def test_texts_in_either_byte_order_are_read(tmp_path: Path) -> None:
    for order in "<>":
        path = tmp_path / "x.npz"
        np.savez(path, images=np.zeros((2, 4, 4), np.uint8), labels=np.array(["a😀", "é"], f"{order}U2"))
        assert set(load(path).train.class_names) == {"a😀", "é"}


@pytest.mark.parametrize("shape", [(2, 8, 0), (2, 0, 8)])
def test_an_idx_file_of_images_without_pixels_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    header = bytes((0, 0, 8, 3)) + np.array(shape, ">u4").tobytes()
    (tmp_path / "train-images-idx3-ubyte").write_bytes(header)
    with pytest.raises(DataError, match="without pixels"):
        read_idx(tmp_path / "train-images-idx3-ubyte")


def test_the_words_of_a_foreign_library_are_one_line() -> None:
    header = b'{"w":{"dtype":"a\\nb","shape":[1],"data_offsets":[0,4]}}'
    with pytest.raises(TamperError) as caught:
        tensors_of(len(header).to_bytes(8, "little") + header + bytes(4), name="x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("save_arrays", [np.savez, np.savez_compressed])
def test_an_archive_whose_checksum_is_wrong_is_refused(tmp_path: Path, save_arrays: Any) -> None:
    path = tmp_path / "x.npz"
    save_arrays(path, images=np.full((2, 4, 4), 171, np.uint8), labels=np.zeros(2, np.int64))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 16] ^= 1  # the first member's checksum
    path.write_bytes(content)
    with pytest.raises(DataError, match="CRC"):
        load(path)


def test_kept_features_that_lie_are_computed_anew(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    fresh = Features(torch.zeros(2, 1, 3))
    for number, content in enumerate((npy("'<f4'", "(4000000000000, 1)"), pickle.dumps([1]), b"PK\x03\x04", b"{'")):
        (folder / f"k-{number}.npy").write_bytes(content)
    assert kept_features(folder, "k", lambda: fresh) is fresh
    assert [path.name for path in folder.iterdir()] == [f"k-{fresh.digest}.npy"]


def test_class_names_are_printable_and_different(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0, 1])}
    path = tmp_path / "x.npz"
    np.savez(path, **arrays, class_names=np.array(["\x1b[2J", "b"]))
    assert load(path).train.class_names == ("\\x1b[2J", "b")
    np.savez(path, **arrays, class_names=np.array(["a", "a"]))
    with pytest.raises(DataError, match="class_names must differ"):
        load(path)


def negative_tar() -> bytes:
    """A header whose size is negative: as a file of its own it sends the reader back to itself, for ever."""
    member = tarfile.TarInfo("x")
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (2**96 - 1024).to_bytes(12, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header) + bytes(1024)


def test_a_tar_with_a_negative_size_ends(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(negative_tar())
    with pytest.raises(DataError):
        open_cifar(tmp_path / "x.tar")


def test_a_small_archive_that_unpacks_to_a_huge_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpvision.data.mnist_cifar.MAX_ARCHIVE_BYTES", 2**20)
    member = tarfile.TarInfo("pax")
    member.type, member.size = tarfile.XHDTYPE, 2**32
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(member.tobuf() + bytes(2**22)))
    with pytest.raises(DataError, match="unpacks to more"):
        open_cifar(path)


def test_an_archive_of_countless_members_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tarfile.TarInfo("x").tobuf() * (MAX_MEMBERS + 2))
    with pytest.raises(DataError, match="more members"):
        open_cifar(path)


@pytest.mark.parametrize("kind", ["meta", "sparse", "complex", "repeated"])
def test_weights_must_be_plain_tensors(tmp_path: Path, kind: str) -> None:
    odd = {
        "meta": lambda: torch.empty(3, device="meta"),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "complex": lambda: torch.ones(3, dtype=torch.complex64),
        "repeated": lambda: torch.ones(1).expand(10**12),
    }[kind]()
    torch.save({"w": odd}, tmp_path / "x.pth")
    with pytest.raises(DataError, match=r"plain real tensors|can't be read|damaged"):
        read_weights(tmp_path / "x.pth")


def test_a_pickle_in_disguise_is_not_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    program = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    for name in ("x.pth", "x.bin", "x.npz", "x.safetensors"):
        (tmp_path / name).write_bytes(program)
        with pytest.raises(DataError):
            read_weights(tmp_path / name)
    (tmp_path / "x.png").write_bytes(program)
    with pytest.raises(DataError, match="not an image"):
        load_images([tmp_path / "x.png"], image_shape=(1, 8, 8))
    assert not canary.exists()


def test_safetensors_that_lie_are_refused(tmp_path: Path) -> None:
    good = save({"w": torch.ones(4)})
    for content in ((2**63).to_bytes(8, "little") + good[8:], good.replace(b"[0,16]", b"[0,99]"), good[:-1]):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(DataError):
            read_weights(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 4000,
        "steps = " + "9" * 5000,
        "data = 3",
        "privacy = []\n[data]\nsource = 'digits'",
        "[privacy]\nnoise_multiplier = 1\nsteps = 0x" + "f" * 5000 + "\n[data]\nsource = 'digits'",
        "[data]\nsource = 3",
        "model = 'x'\n[data]\nsource = 'digits'",
        '[data]\nsource = "digits"\n["a\\nb"]\nx = 1',
        "name = '../../x'\n[data]\nsource = 'digits'\n[privacy]\nnoise_multiplier = 1.0",
    ],
)
def test_a_hostile_configuration_is_one_short_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    given = {"privacy": {"target_epsilon": 3.0}, "model": {"options": {"image_size": 8}}}
    with pytest.raises(ArgumentError) as caught:
        build_config(given, file=path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_message_about_a_configuration_does_not_repeat_all_of_it() -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_config({f"key{number}": "x" * 10_000 for number in range(1000)})
    assert len(str(caught.value)) < 5000
    assert "more" in str(caught.value)


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a\\b", "", "a\0b", "x" * 500])
def test_a_run_can_not_be_named_into_another_folder(name: str) -> None:
    values = {"name": name, "data": {"source": "digits"}, "privacy": {"noise_multiplier": 1.0}}
    with pytest.raises(ArgumentError, match="name"):
        parse_config(values)


def test_numbers_that_no_float_holds_are_refused() -> None:
    problems = Problems()
    problems.positive("a", 10**400)
    problems.count("b", 10**5000)
    problems.not_negative("c", float("nan"))
    with pytest.raises(ArgumentError, match=r"a must be .*bits.* b must be <= .*bits.* c must be"):
        problems.raise_if_any()
    assert len(brief("x" * 10_000)) < 200
    assert "\x1b" not in brief("\x1b[2J")


def test_an_unknown_device_and_a_bad_path_are_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("train", "digits", "--target-epsilon", "3", "--device", "\x1b[2Jnonsense"),
        ("train", "x" * 5000, "--target-epsilon", "3"),
        ("verify", "x" * 5000),
        ("report", "x" * 5000),
        ("train", "digits", "--target-epsilon", "3", "--model", "linear", "--option", "image_size=99999999"),
    ):
        code, printed = command(*arguments, monkeypatch=monkeypatch, capsys=capsys)
        assert code == 2
        assert printed.startswith("error: ")
        assert printed.count("\n") == 1
        assert "\x1b" not in printed
    assert not list(tmp_path.iterdir())


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.close()
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (folder.private / "lock").unlink(missing_ok=True)
    (folder.private / "lock").symlink_to(outside)
    with pytest.raises(DPVisionError, match="can't lock"):
        RunFolder.open(tmp_path / "run").lock()
    assert outside.read_text() == "precious"


@pytest.mark.parametrize("name", ["release", "private", "private/checkpoints"])
def test_a_run_folder_that_leads_elsewhere_is_not_written_to(tmp_path: Path, name: str) -> None:
    RunFolder.create(tmp_path / "run").close()
    moved = tmp_path / "elsewhere"
    (tmp_path / "run" / name).rename(moved)
    (tmp_path / "run" / name).symlink_to(moved)
    before = sorted(moved.rglob("*"))
    with pytest.raises(TamperError, match="not a link"):
        RunFolder.open(tmp_path / "run").write_config("{}")
    assert sorted(moved.rglob("*")) == before


def test_a_ledger_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("")
    (tmp_path / "ledger.jsonl").symlink_to(tmp_path / "real")
    with pytest.raises(DataError, match="ordinary file"):
        read_ledger(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize(
    "change",
    [{"bindings": []}, {"bindings": [3]}, {"bindings": "ab"}, {"run_id": 3}, {"run_id": "\udc80"}, {"context": 1}],
)
def test_a_key_file_with_odd_fields_under_a_right_hash_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    import hashlib

    folder = RunFolder.create(tmp_path / "run")
    folder.save_key(Keys.from_seed(1), run_id="r", bindings=[{"data": "a"}])
    values = {**json.loads(folder.key_path.read_text()), **change}
    values.pop("sha256")
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    folder.key_path.write_text(json.dumps({**values, "sha256": digest}))
    with pytest.raises(TamperError, match="not what dpvision writes"):
        folder.load_key()


@pytest.mark.parametrize("options", [{"image_size": 8.5}, {"image_size": -1}, {"image_size": 10**19}])
def test_impossible_options_of_a_model_are_worded(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        create("linear", **options)
