"""Cases for configurations, run folders and the command line."""

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
from random import Random
from typing import Any

from dpvision.cli import main
from dpvision.cli.train_command import build_config
from dpvision.config import parse_config
from dpvision.inference.load import load_model
from dpvision.privacy.ledger import read_ledger
from dpvision.release.report import write_report
from dpvision.release.schema import parse_certificate
from dpvision.release.verify import verify
from dpvision.training import resume_training
from tools.fuzz.mutate import ODD_TEXTS, json_text, odd_value, spoiled_bytes, spoiled_json, spoiled_safetensors
from tools.fuzz.readers import Case
from tools.fuzz.seeds import Seeds

_ALLOWED_CODES = (0, 1, 2)
_TRAINED_CODE = 130


class Wrong(Exception):
    """A command ended in another way than it may."""


def json_config(rng: Random, seeds: Seeds, box: Path) -> Case:
    """The configuration of a run as JSON or as plain values."""
    del box
    values = _spoiled(rng, seeds.config)
    if rng.random() < 0.5 and isinstance(values, dict):
        return lambda: parse_config(values)
    text = json_text(rng, values)
    return lambda: parse_config(text)


def toml_config(rng: Random, seeds: Seeds, box: Path) -> Case:
    """A TOML file as ``dpvision train --config`` reads it."""
    path = box / "run.toml"
    text = _toml(_spoiled(rng, seeds.config))
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
    if rng.random() < 0.5:
        at = rng.choice([0, *(n for n, c in enumerate(text) if c == "\n")])
        text = text[:at] + "\n" + rng.choice(odd) + "\n" + text[at:]
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(spoiled_bytes(rng, data) if rng.random() < 0.4 else data)
    given: dict[str, Any] = rng.choice(({}, {"privacy": {"target_epsilon": 3.0}}))
    options = rng.choice(({}, {"model": {"options": {"image_size": 8}}}))
    return lambda: build_config({**given, **options}, file=path)


def _spoiled(rng: Random, values: Any) -> Any:
    for _ in range(rng.randint(1, 3)):
        values = spoiled_json(rng, values)
    return values


def _toml(values: Any) -> str:
    """Values as TOML, as far as it goes; what it can't say comes as it may."""
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


def certificate(rng: Random, seeds: Seeds, box: Path) -> Case:
    """The certificate's own parser."""
    del box
    values = _spoiled(rng, json.loads((seeds.run / "release" / "certificate.json").read_text()))
    return lambda: parse_certificate(values)


def ledger(rng: Random, seeds: Seeds, box: Path) -> Case:
    """A ledger: spoiled, or with wrong entries under right hashes."""
    data = (seeds.run / "release" / "ledger.jsonl").read_bytes()
    path = box / "ledger.jsonl"
    path.write_bytes(spoiled_bytes(rng, data) if rng.random() < 0.3 else _rechained(rng, data))
    return lambda: read_ledger(path)


def _rechained(rng: Random, data: bytes) -> bytes:
    entries = [json.loads(line) for line in data.splitlines()]
    at = rng.randrange(len(entries))
    kind = rng.randrange(4)
    if kind == 0:
        entries.insert(at, entries[rng.randrange(len(entries))])
    elif kind == 1:
        del entries[at]
    else:
        entries[at]["payload"] = _spoiled(rng, entries[at]["payload"])
    lines, prev = [], "0" * 64
    for seq, entry in enumerate(entries):
        fields = {"kind": entry.get("kind"), "payload": entry.get("payload"), "prev": prev, "seq": seq}
        body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        prev = hashlib.sha256(body).hexdigest()
        lines.append(b'{"hash":"' + prev.encode() + b'",' + body[1:] + b"\n")
    return b"".join(lines)


def run_folder(rng: Random, seeds: Seeds, box: Path) -> Case:
    """A run folder in which one file, or what it is, was changed; then whoever reads run folders."""
    run = box / "run"
    shutil.copytree(seeds.run, run)
    for _ in range(rng.randint(1, 2)):
        _spoil_run(rng, run, box)
    use = rng.choice((verify, verify, load_model, write_report, lambda path: resume_training(path, allow_fork=True)))
    return lambda: use(run)


def _spoil_run(rng: Random, run: Path, box: Path) -> None:
    files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink() and path.name != "lock")
    path = rng.choice(files)
    kind = rng.randrange(8)
    if kind == 1:
        _spoil_kind(rng, path, box)
    else:
        data = path.read_bytes()
        try:
            spoiled = spoiled_bytes(rng, data) if kind == 0 else _spoiled_file(rng, path.name, data)
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):  # it was spoiled before
            spoiled = spoiled_bytes(rng, data)
        path.write_bytes(spoiled)
    _mend_hashes(run)


def _spoiled_file(rng: Random, name: str, data: bytes) -> bytes:
    if name.endswith(".json"):
        values = _spoiled(rng, json.loads(data))
        return _json(values) if rng.random() < 0.8 else json_text(rng, values)
    if name == "ledger.jsonl":
        return _rechained(rng, data)
    return spoiled_safetensors(rng, data) if name.endswith(".safetensors") else spoiled_bytes(rng, data)


def _spoil_kind(rng: Random, path: Path, box: Path) -> None:
    """Another thing in a file's place, or a folder that lies elsewhere."""
    kind = rng.randrange(6)
    if kind == 5:
        folder = rng.choice((path.parent, path.parent.parent / "private"))
        if folder.is_dir() and not folder.is_symlink():
            outside = box.parent / "outside" / f"{rng.randrange(10**6)}"
            shutil.move(folder, outside)
            folder.symlink_to(outside)
        return
    if rng.random() < 0.2:
        path = path.parent.parent / "private" / "lock"
    path.unlink(missing_ok=True)
    if not path.parent.is_dir():
        return
    if kind == 0:
        path.symlink_to("/dev/zero")
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.symlink_to(box.parent / "outside" / "file")


def _json(values: Any) -> bytes:
    try:
        return (json.dumps(values, indent=2) + "\n").encode()
    except ValueError:
        return b"{}"


def _mend_hashes(run: Path) -> None:
    """Make the hashes right again where that is easy: what lies behind them must stand firm, too."""
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


def arguments(rng: Random, seeds: Seeds, box: Path) -> Case:
    """Flags of the commands that only compute."""
    del seeds
    command = rng.choice(sorted(_FLAGS))
    usual, flags = _FLAGS[command]
    values = [command, *usual]
    for _ in range(rng.randint(1, 2)):
        values += [rng.choice(flags), _argument(rng)]
    return lambda: _call(values, box)


def training(rng: Random, seeds: Seeds, box: Path) -> Case:
    """Flags of ``dpvision train`` on good data, or good flags on odd sources."""
    values = ["train", str(seeds.data), "--model", "linear", "--option", "image_size=8", "--output", str(box / "out")]
    values += ["--steps", "1", "--noise-multiplier", "2", "--num-units", "12", "--expected-batch-size", "4"]
    values += ["--delta", "1e-3", "--checkpoint-every", "1", "--evaluations", "1"]
    if rng.random() < 0.2:
        values[1] = rng.choice(ODD_TEXTS).replace("\0", "") or "/dev/null"
    for _ in range(rng.randint(1, 2)):
        values += [rng.choice(_TRAIN_FLAGS), _argument(rng)]
    return lambda: _call(values, box)


def commands(rng: Random, seeds: Seeds, box: Path) -> Case:
    """The commands that read run folders, on one that was changed, with images that were changed."""
    run = box / "run"
    shutil.copytree(seeds.run, run)
    _spoil_run(rng, run, box)
    name, data = rng.choice(sorted(seeds.images.items()))
    image = box / f"\x1b[31m{name}"
    image.write_bytes(data if rng.random() < 0.5 else spoiled_bytes(rng, data))
    json_flag = rng.choice(((), ("--json",)))
    values = rng.choice(
        (
            ["verify", str(run)],
            ["verify", str(run / "release" / "certificate.json")],
            ["report", str(run)],
            ["predict", str(run), str(image)],
            ["evaluate", str(run), "--test", str(seeds.data)],
            ["evaluate", str(run)],
            ["resume", str(run)],
        )
    )
    return lambda: _call([*values, *json_flag], box)


def _argument(rng: Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(_NUMBERS)
    text = rng.choice((*ODD_TEXTS, "linear", "image_size=8", "image_size=99999999", "a=b=c", "=", "cuda", "digits"))
    value = odd_value(rng)
    return (text if rng.random() < 0.7 else str(value) if not isinstance(value, int) else "7").replace("\0", "")


def _call(values: list[str], box: Path) -> None:
    """The command in this process: its exit code and every character that it prints are looked at."""
    held = io.StringIO()
    with redirect_stdout(held), redirect_stderr(held), _inside(box, ["dpvision", *values]):
        try:
            main()
            code: Any = 0
        except SystemExit as error:
            code = error.code
    printed = held.getvalue()
    if code not in _ALLOWED_CODES and code != _TRAINED_CODE:
        raise Wrong(f"exit code {code}: {printed[-300:]!r}")
    if "Traceback" in printed:
        raise Wrong(f"a traceback: {printed[-300:]!r}")
    raw = sorted({c for c in printed if not c.isprintable() and c not in "\n\r\t"})
    if raw:
        raise Wrong(f"raw control characters {raw!r}")
    printed.encode()


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
