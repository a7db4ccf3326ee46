"""Logs of a run for other programs: CSV, TensorBoard, Weights & Biases, MLflow.

A log holds what a run may publish anyway: at each evaluation the step, epsilon and the metrics of the public test
split. It holds no loss or norm of private images and no batch size. It holds no time either, because how long the steps
took depends on how many units were drawn: all events of a TensorBoard file have the time of its beginning, and values
for services, which add the time at which they arrive, are sent when the run has ended.
"""

from __future__ import annotations

import csv
import importlib
import io
import math
import struct
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from dpvision.errors import ArgumentError, brief
from dpvision.storage.files import disk_errors, read_file, write_atomically
from dpvision.training.callbacks import Callbacks, RunCallback
from dpvision.training.defaults import Choice

LOG_KINDS = ("csv", "tensorboard", "wandb", "mlflow")
LOGS = "logs"
"""Folder of the log files inside a run's folder."""
_CSV_FILE = "metrics.csv"
_EVENTS = "events.out.tfevents."
_FIRST = ("step", "epsilon")


def public_values(point: Mapping[str, Any]) -> dict[str, float]:
    """Return what a log takes of a point of the curve, by name: epsilon and metrics that are finite numbers.

    Args:
        point: what ``RunCallback.evaluated`` is told.

    Guarantee: nothing that is named ``unsafe_…``, and not the step, which is an index.
    """
    return {
        name: float(value)
        for name, value in point.items()
        if name != "step"
        and not name.startswith("unsafe_")
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


@final
class CsvLog(RunCallback):
    """Write one line per evaluation to a CSV file: step, epsilon, metrics.

    A resumed run continues the file of its first part.

    Args:
        path: the file. It must not exist, or be a log of this kind, which is replaced.

    Raises:
        ArgumentError: the file holds something else.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._rows: list[dict[str, Any]] = _csv_rows(self._path) if self._path.exists() else []

    def started(self, *, name: str, steps: int, done: int, choices: tuple[Choice, ...]) -> None:
        """Keep the lines of the steps that are done: the others will be taken again."""
        del name, steps, choices
        self._rows = [row for row in self._rows if int(row["step"]) <= done]

    def evaluated(self, point: dict[str, Any]) -> None:
        """Add a line; the file is replaced as a whole."""
        self._rows.append({"step": point["step"], **public_values(point)})
        columns = dict.fromkeys([*_FIRST, *(name for row in self._rows for name in row)])
        text = io.StringIO()
        table = csv.DictWriter(text, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(self._rows)
        with disk_errors(f"write {self._path}"):
            write_atomically(self._path, text.getvalue().encode())


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    """Read a log that ``CsvLog`` wrote."""
    table = csv.DictReader(io.StringIO(read_file(path).decode(errors="replace")))
    rows = list(table)
    if tuple(table.fieldnames or ())[:2] != _FIRST or not all(str(row["step"]).isdecimal() for row in rows):
        raise ArgumentError(f"{path} is not a log of dpvision, and is left as it is. Choose another file.")
    return rows


@final
class TensorBoardLog(RunCallback):
    """Write scalars for TensorBoard: ``privacy/epsilon`` and ``test/…``. Needs no further package.

    A resumed run adds a file, which replaces the points of the steps that are taken again.

    Args:
        folder: the folder of the event files.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._path = self._folder / f"{_EVENTS}{0:010d}.dpvision"
        self._time = 0.0

    def started(self, *, name: str, steps: int, done: int, choices: tuple[Choice, ...]) -> None:
        """Begin a file; its name sorts after those of the run's earlier parts."""
        del name, steps, choices
        self._path = self._folder / f"{_EVENTS}{done:010d}.dpvision"
        self._time = float(int(time.time()))
        begun = _field(7, _field(1, 1))  # a session starts: later steps in earlier files are void
        events = (self._event(0, _field(3, b"brain.Event:2")), self._event(done + 1, begun))
        with disk_errors(f"write {self._path}"):
            for path in self._folder.glob(f"{_EVENTS}*"):
                if path.name > self._path.name:  # of steps that will be taken again
                    path.unlink()
            write_atomically(self._path, b"".join(events))

    def evaluated(self, point: dict[str, Any]) -> None:
        """Append the values of one evaluation."""
        values = b"".join(
            _field(1, _field(1, _tag(name).encode()) + _field(2, value)) for name, value in public_values(point).items()
        )
        with disk_errors(f"write {self._path}"), self._path.open("ab") as file:
            file.write(self._event(point["step"], _field(5, values)))

    def _event(self, step: int, content: bytes) -> bytes:
        """One record of the file: length, message, and their checksums."""
        message = b"\x09" + struct.pack("<d", self._time) + _field(2, step) + content
        length = struct.pack("<Q", len(message))
        return length + _checksum(length) + message + _checksum(message)


def _tag(name: str) -> str:
    """TensorBoard's name of a value; the part before the slash is its group."""
    return "privacy/epsilon" if name == "epsilon" else f"test/{name}"


def _field(number: int, value: bytes | float) -> bytes:
    """Encode one field of a protobuf message: a whole number, a 32-bit float, or bytes."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    """Seven bits in each byte, the lowest first."""
    low = value & 0x7F
    return bytes([low]) if value == low else bytes([low | 0x80]) + _varint(value >> 7)


def _checksum(content: bytes) -> bytes:
    """CRC-32C, masked as the record format asks."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class _Service(RunCallback):
    """Collects the points of a run, and sends them when it has ended; a problem there does not end a run."""

    package = ""

    def __init__(self, name: str) -> None:
        self._name = name
        self._points: list[tuple[int, dict[str, float]]] = []
        try:
            self._module: Any = importlib.import_module(self.package)
        except ImportError as error:
            raise ArgumentError(f"--log {self.package} needs the package: pip install {self.package}.") from error

    def evaluated(self, point: dict[str, Any]) -> None:
        """Keep the values until the end."""
        values = {_tag(name): value for name, value in public_values(point).items()}
        self._points.append((int(point["step"]), values))

    def finished(self) -> None:
        """Send everything."""
        points, self._points = self._points, []
        if not points:
            return
        try:
            self._send(points)
        except Exception as error:  # noqa: BLE001 (of a package that is not ours; the run is complete without it)
            warnings.warn(f"{self.package} did not take the log of {self._name}: {brief(error)}", stacklevel=2)

    def _send(self, points: list[tuple[int, dict[str, float]]]) -> None:
        raise NotImplementedError


@final
class WandbLog(_Service):
    """Send the log to Weights & Biases when the run has ended. Its own environment variables (WANDB_…) apply.

    Args:
        name: what the run is called there.

    Raises:
        ArgumentError: the package ``wandb`` is not installed.
    """

    package = "wandb"

    def _send(self, points: list[tuple[int, dict[str, float]]]) -> None:
        # Left to itself, it records the machine, the console, the command, the program and the state of git too.
        quiet = self._module.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        run = self._module.init(name=self._name, settings=quiet)
        for step, values in points:
            run.log(values, step=step)
        run.finish()


@final
class MlflowLog(_Service):
    """Send the log to MLflow when the run has ended. Its own environment variables (MLFLOW_…) apply.

    Args:
        name: what the run is called there.

    Raises:
        ArgumentError: the package ``mlflow`` is not installed.
    """

    package = "mlflow"

    def _send(self, points: list[tuple[int, dict[str, float]]]) -> None:
        with self._module.start_run(run_name=self._name, log_system_metrics=False):
            for step, values in points:
                self._module.log_metrics(values, step=step)


def log_callback(kinds: str | None, run: Path) -> RunCallback:
    """Return the callback that writes the logs that ``--log`` names, and continues those that the run already has.

    Args:
        kinds: names of ``LOG_KINDS``, separated by commas; None continues only.
        run: the folder of the run. Files go into its folder ``logs``, which is no part of the release.

    Returns:
        A callback; without any log it does nothing.

    Raises:
        ArgumentError: a name is not known, or its package is not installed.
    """
    folder = run / LOGS
    asked = [name.strip() for name in (kinds or "").split(",")] if kinds is not None else []
    unknown = [name for name in asked if name not in LOG_KINDS]
    if unknown:
        raise ArgumentError(f"--log must name some of {', '.join(LOG_KINDS)}, separated by commas, got {brief(kinds)}.")
    known = {"csv": (folder / _CSV_FILE).exists(), "tensorboard": any(folder.glob(f"{_EVENTS}*"))}
    made = {
        "csv": lambda: CsvLog(folder / _CSV_FILE),
        "tensorboard": lambda: TensorBoardLog(folder),
        "wandb": lambda: WandbLog(run.resolve().name),
        "mlflow": lambda: MlflowLog(run.resolve().name),
    }
    return Callbacks(*(make() for name, make in made.items() if name in asked or known.get(name)))
