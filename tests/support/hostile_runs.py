"""Hostile configurations, run folders and command lines: a damaged input for everything that reads them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from damage import ODD_TEXTS, damaged_bytes, damaged_json, damaged_safetensors, json_bytes, odd_texts, one_in, one_of
from dpvision.cli import main
from dpvision.cli.train_command import build_config
from dpvision.config import parse_config
from dpvision.inference.load import load_model
from dpvision.privacy.ledger import read_ledger
from dpvision.release.report import write_report
from dpvision.release.schema import parse_certificate
from dpvision.release.verify import verify
from dpvision.training import resume_training
from hostile_files import Case, Draw, damaged_source
from hostile_seeds import Seeds

_ALLOWED_CODES = (0, 1, 2, 130)


class WrongEndError(Exception):
    """A command ended in another way than it may."""


def json_config(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """The configuration of a run as JSON or as plain values."""
    del box
    values = draw(damaged_json(seeds.config))
    if draw(st.booleans()) and isinstance(values, dict):
        return lambda: parse_config(values)
    text = draw(json_bytes(values))
    return lambda: parse_config(text)


def toml_config(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """A TOML file as ``dpvision train --config`` reads it."""
    path = box / "run.toml"
    text = _toml(draw(damaged_json(seeds.config)))
    odd = (
        "a = " + "[" * 4000,
        "steps = 0x" + "f" * 5000,
        "steps = " + "9" * 5000,
        "data = 3",
        "privacy = []",
        "model = 'x'",
        "[data]\n[data]",
        "name = 1\nname = 2",
        "[privacy]\nsteps = inf",
        "a." * 2000 + "b = 1",
        'name = "\\ud800"',
        "x = 1979-05-27T07:32:00Z",
    )
    if draw(st.booleans()):
        at = draw(one_of(0, *(n for n, c in enumerate(text) if c == "\n")))
        text = text[:at] + "\n" + draw(st.sampled_from(odd)) + "\n" + text[at:]
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(draw(st.one_of(st.just(data), damaged_bytes(data))))
    given: dict[str, Any] = {}
    if draw(st.booleans()):
        given["privacy"] = {"target_epsilon": 3.0}
    if draw(st.booleans()):
        given["model"] = {"options": {"image_size": 8}}
    return lambda: build_config(given, file=path)


def _toml(values: Any) -> str:
    """Return values as TOML; for what TOML cannot express, any text."""
    if not isinstance(values, dict):
        return f"x = {_toml_value(values)}\n"
    plain = {name: value for name, value in values.items() if not isinstance(value, dict)}
    lines = [f"{_toml_value(name)} = {_toml_value(value)}" for name, value in plain.items()]
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"[{_toml_value(name)}]", *(f"{_toml_value(k)} = {_toml_value(v)}" for k, v in value.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_value(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def certificate(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """The certificate's own parser."""
    del box
    values = draw(damaged_json(json.loads((seeds.run / "release" / "certificate.json").read_text())))
    return lambda: parse_certificate(values)


def ledger(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """A ledger: damaged, or with wrong entries under right hashes."""
    data = (seeds.run / "release" / "ledger.jsonl").read_bytes()
    path = box / "ledger.jsonl"
    path.write_bytes(draw(damaged_bytes(data)) if draw(one_in(3)) else _rechained(draw, data))
    return lambda: read_ledger(path)


def _rechained(draw: Draw, data: bytes) -> bytes:
    entries = [json.loads(line) for line in data.splitlines()]
    at = draw(st.integers(0, len(entries) - 1))
    kind = draw(one_of("payload", "payload", "repeat", "remove"))
    if kind == "repeat":
        entries.insert(at, entries[draw(st.integers(0, len(entries) - 1))])
    elif kind == "remove":
        del entries[at]
    else:
        entries[at]["payload"] = draw(damaged_json(entries[at]["payload"]))
    lines, prev = [], "0" * 64
    for seq, entry in enumerate(entries):
        fields = {"kind": entry.get("kind"), "payload": entry.get("payload"), "prev": prev, "seq": seq}
        body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        prev = hashlib.sha256(body).hexdigest()
        lines.append(b'{"hash":"' + prev.encode() + b'",' + body[1:] + b"\n")
    return b"".join(lines)


def run_folder(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """A run folder in which one or two files were changed or replaced, for each reader of run folders."""
    run = box / "run"
    shutil.copytree(seeds.run, run)
    for _ in range(draw(st.integers(1, 2))):
        _damage_run(draw, run, box)
    use = draw(one_of(verify, verify, load_model, write_report, lambda path: resume_training(path, allow_fork=True)))
    return lambda: use(run)


def _damage_run(draw: Draw, run: Path, box: Path) -> None:
    files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink() and path.name != "lock")
    path = draw(st.sampled_from(files))
    kind = draw(one_of("bytes", "replace", *["inside"] * 6))
    if kind == "replace":
        _replace(draw, path, box)
    else:
        data = path.read_bytes()
        try:
            damaged = draw(damaged_bytes(data)) if kind == "bytes" else _damaged_inside(draw, path.name, data)
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):  # it was damaged before
            damaged = draw(damaged_bytes(data))
        path.write_bytes(damaged)
    _correct_hashes(run)


def _damaged_inside(draw: Draw, name: str, data: bytes) -> bytes:
    if name.endswith(".json"):
        values = draw(damaged_json(json.loads(data)))
        return draw(json_bytes(values)) if draw(one_in(5)) else _json(values)
    if name == "ledger.jsonl":
        return _rechained(draw, data)
    return draw(damaged_safetensors(data) if name.endswith(".safetensors") else damaged_bytes(data))


def _replace(draw: Draw, path: Path, box: Path) -> None:
    """Put another thing in a file's place, or a link in a folder's place."""
    kind = draw(one_of("nothing", "device", "pipe", "directory", "link", "folder"))
    outside = box.parent / "outside"
    if kind == "folder":
        folder = draw(one_of(path.parent, path.parent.parent / "private"))
        if folder.is_dir() and not folder.is_symlink():
            shutil.move(folder, outside / folder.name)
            folder.symlink_to(outside / folder.name)
        return
    if draw(one_in(5)):
        path = path.parent.parent / "private" / "lock"
    path.unlink(missing_ok=True)
    if not path.parent.is_dir():
        return
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(outside / "file")


def _json(values: Any) -> bytes:
    try:
        return (json.dumps(values, indent=2) + "\n").encode()
    except ValueError:
        return b"{}"


def _correct_hashes(run: Path) -> None:
    """Correct the hashes, as an attacker would: the checks behind them must hold too."""
    release, key = run / "release", run / "private" / "key.json"
    values = _object(key)
    if values is not None:
        values.pop("sha256", None)
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        key.write_bytes(_json({**values, "sha256": digest}))
    values = _object(release / "certificate.json")
    if values is not None:
        for name, file in (("weights_sha256", "weights.safetensors"), ("config_sha256", "config.json")):
            if _ordinary(release / file):
                values[name] = hashlib.sha256((release / file).read_bytes()).hexdigest()
        (release / "certificate.json").write_bytes(_json(values))
    if _ordinary(release / "manifest.json"):
        files = sorted(path.name for path in release.iterdir() if _ordinary(path) and path.name != "manifest.json")
        hashes = {name: hashlib.sha256((release / name).read_bytes()).hexdigest() for name in files}
        (release / "manifest.json").write_bytes(_json(hashes))
    checkpoints = run / "private" / "checkpoints"
    for path in list(checkpoints.glob("step-*.safetensors")) if checkpoints.is_dir() else ():
        if _ordinary(path):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            path.rename(path.with_name(f"{path.name[:13]}-{digest}.safetensors"))


def _object(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_bytes()) if _ordinary(path) else None
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _ordinary(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


_NUMBERS = (
    "0",
    "-1",
    "1",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e400",
    "5e-324",
    "9" * 400,
    "9" * 5000,
    "0x10",
    "1e-9",
    "",
    "3",
    "10.5",
)
_FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "epsilon": (
        ("--num-units", "1000", "--expected-batch-size", "10", "--noise-multiplier", "1", "--steps", "5"),
        ("--delta", "--num-units", "--expected-batch-size", "--noise-multiplier", "--steps", "--adjacency"),
    ),
    "calibrate": (
        ("--target-epsilon", "3", "--num-units", "1000", "--expected-batch-size", "10", "--steps", "5"),
        ("--delta", "--target-epsilon", "--num-units", "--expected-batch-size", "--steps"),
    ),
    "plan": (
        ("--num-units", "1000", "--target-epsilon", "3", "--expected-batch-size", "100", "--steps", "10"),
        (
            "--delta",
            "--num-units",
            "--target-epsilon",
            "--noise-multiplier",
            "--scale-down",
            "--expected-batch-size",
            "--steps",
        ),
    ),
    "check": (("linear",), ("--in-channels", "--num-classes", "--option", "--image-size")),
    "recipes": ((), ("--json",)),
    "reproduce": (("--list",), ("--rows", "--scale", "--repeats")),
    "models": ((), ("--json",)),
}
_TRAIN_FLAGS = (
    "--target-epsilon", "--delta", "--noise-multiplier", "--expected-batch-size", "--steps", "--clip-norm",
    "--num-units", "--test", "--model", "--option", "--optimizer", "--learning-rate", "--momentum", "--image-size",
    "--unit-csv", "--unit-column", "--unit-folder-level", "--rows-per-unit", "--privacy-unit", "--views",
    "--crop-padding", "--rotation", "--erasing", "--transfer-weights", "--trained", "--evaluations",
    "--checkpoint-every", "--microbatch-size", "--unsafe-seed", "--device", "--config", "--data-dir", "--recipe",
)  # fmt: skip
_ARGUMENTS = st.one_of(
    st.sampled_from(_NUMBERS),
    odd_texts,
    one_of("linear", "image_size=8", "image_size=99999999", "a=b=c", "=", "cuda", "digits"),
).map(lambda text: text.replace("\0", ""))


def arguments(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """Flags of the commands that only compute."""
    del seeds
    command = draw(st.sampled_from(sorted(_FLAGS)))
    usual, flags = _FLAGS[command]
    values = [command, *usual]
    for _ in range(draw(st.integers(1, 2))):
        values += [draw(st.sampled_from(flags)), draw(_ARGUMENTS)]
    return lambda: _call(values, box)


def training(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """Flags of ``dpvision train`` on good data, or good flags on odd sources."""
    values = ["train", str(seeds.data), "--model", "linear", "--option", "image_size=8", "--output", str(box / "out")]
    values += ["--steps", "1", "--noise-multiplier", "2", "--num-units", "12", "--expected-batch-size", "4"]
    values += ["--delta", "1e-3", "--checkpoint-every", "1", "--evaluations", "1"]
    if draw(one_in(5)):
        values[1] = draw(st.sampled_from(ODD_TEXTS)).replace("\0", "") or "/dev/null"
    for _ in range(draw(st.integers(1, 2))):
        values += [draw(st.sampled_from(_TRAIN_FLAGS)), draw(_ARGUMENTS)]
    return lambda: _call(values, box)


def training_on_files(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """``dpvision train`` on a damaged Parquet or Arrow table or on DICOM files: a whole run, or one line."""
    if not seeds.tables or not seeds.dicom:
        pytest.skip("pyarrow and pydicom are not installed")
    values = ["train", str(damaged_source(draw, seeds, box)), "--model", "linear", "--image-size", "8"]
    values += ["--steps", "1", "--noise-multiplier", "2", "--num-units", "12", "--expected-batch-size", "4"]
    values += ["--delta", "1e-3", "--holdout", "0.4", "--evaluations", "1", "--anyway", "--output", str(box / "out")]
    values += draw(one_of((), ("--skip-bad",), ("--public-classes",), ("--classes", "ill,well")))

    def train_or_leave() -> None:
        code, errors = _call(values, box)
        left = sorted(path.name for path in (box / "out").rglob("*")) if (box / "out").exists() else []
        if code == 0 and "manifest.json" not in left:
            raise WrongEndError(f"a run without a manifest: {left}")
        if code != 0 and (code != 2 or left or len(errors.strip().splitlines()) != 1):
            raise WrongEndError(f"exit code {code}, {left} was written, and the errors are {errors!r}")

    return train_or_leave


def commands(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """The commands that read run folders, on one that was changed, with images that were changed."""
    run = box / "run"
    shutil.copytree(seeds.run, run)
    _damage_run(draw, run, box)
    name = draw(st.sampled_from(sorted(seeds.images)))
    image = box / f"\x1b[31m{name}"
    image.write_bytes(draw(st.one_of(st.just(seeds.images[name]), damaged_bytes(seeds.images[name]))))
    values = draw(
        one_of(
            ["verify", str(run)],
            ["verify", str(run / "release" / "certificate.json")],
            ["report", str(run)],
            ["predict", str(run), str(image)],
            ["evaluate", str(run), "--test", str(seeds.data)],
            ["evaluate", str(run)],
            ["resume", str(run)],
        )
    )
    json_flag = draw(one_of((), ("--json",)))
    return lambda: _call([*values, *json_flag], box)


def _call(values: list[str], box: Path) -> tuple[Any, str]:
    """Run the command in this process and check its exit code and every character that it prints.

    Returns:
        The exit code and what was written to stderr.
    """
    held, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(held), redirect_stderr(errors), _inside(box, ["dpvision", *values]):
        try:
            main()
            code: Any = 0
        except SystemExit as error:
            code = error.code
    printed = held.getvalue() + errors.getvalue()
    if code not in _ALLOWED_CODES:
        raise WrongEndError(f"exit code {code}: {printed[-300:]!r}")
    if "Traceback" in printed:
        raise WrongEndError(f"a traceback: {printed[-300:]!r}")
    raw = sorted({c for c in printed if not c.isprintable() and c not in "\n\r\t"})
    if raw:
        raise WrongEndError(f"raw control characters {raw!r}")
    printed.encode()
    return code, errors.getvalue()


@contextmanager
def _inside(box: Path, argv: list[str]) -> Iterator[None]:
    before, folder = sys.argv, Path.cwd()
    sys.argv = argv
    os.chdir(box)
    try:
        yield
    finally:
        os.chdir(folder)
        sys.argv = before
