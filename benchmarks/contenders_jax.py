"""jax-privacy's step, in an environment of its own: ``jax_worker.py`` runs there, driven through a pipe.

The worker has its own versions of a few networks. It gets weights and rows as files and must reproduce PyTorch's
outputs before it is timed. For any other model its row stays empty.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO, Any, Final, NoReturn, final

import numpy as np
import torch
from torch import Tensor

from benchmarks.contender import CLIP_NORM, LEARNING_RATE, MOMENTUM, NOISE_MULTIPLIER, Contender, NoSuchModelError
from benchmarks.workload import Workload
from dpvision.errors import ArgumentError, DPVisionError, brief

JAX: Final = "jax-privacy"
WORKER: Final = Path(__file__).with_name("jax_worker.py")
_LARGEST_DIFFERENCE: Final = 1e-3
_SHAKEN: Final = 0.02
_LONGEST_ANSWER: Final = 1000
_SECONDS: Final = 3600
_SECONDS_TO_IMPORT: Final = 300
_PROBE: Final = "import jax, jax_privacy; jax_privacy.clipped_grad; print(jax_privacy.__version__)"


class WorkerError(DPVisionError):
    """The process died, said nothing in time, or said something else than it should."""


def jax_privacy(python: Path) -> Contender:
    """The contender that runs in that Python's environment. Refuses one that has no jax_privacy."""
    label = f"{JAX} {_version(python)}"
    return Contender(
        name=JAX, label=label, kind="peer", make=lambda it: _started(python, it), memory=lambda it: _memory(python, it)
    )


def nameless(_: object = None) -> NoReturn:
    """Refuse to run jax-privacy before somebody names its Python."""
    raise ArgumentError(f"{JAX} lives in an environment of its own. Name its Python with --jax-python.")


UNNAMED: Final = Contender(name=JAX, label=JAX, kind="peer", make=nameless)
"""Stands for jax-privacy where names are looked up."""


@final
class Worker:
    """The process, ready to take steps. It ends when this object goes, at the latest with the program."""

    def __init__(self, python: Path, folder: Path, *, seconds: float = _SECONDS) -> None:
        self._seconds, self._errors = seconds, tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
        self._process = subprocess.Popen(
            [python, WORKER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env=_environment(torch.get_num_threads()),
        )
        weakref.finalize(self, _end, self._process, self._errors)
        _confine(self._process.pid, torch.get_num_threads())
        self._check(self._answer())

    def __call__(self) -> float:
        """Take a step and tell the seconds that it took over there."""
        asked = time.perf_counter()
        seconds = self.ask("step")
        if not 0 < seconds <= time.perf_counter() - asked:
            raise WorkerError(f"told {seconds:g} seconds for a step, which it can't have taken.")
        return seconds

    def ask(self, word: str) -> float:
        """Send one line, get one number."""
        try:
            _pipe(self._process.stdin).write(f"{word}\n".encode())
        except BrokenPipeError:
            raise self._death() from None
        answer = self._answer()
        try:
            return float(answer)
        except ValueError:
            raise WorkerError(f"answered {brief(answer)!r} to {word!r}, not a number.") from None

    def _check(self, greeting: str) -> None:
        """Refuse a program whose outputs are not PyTorch's: it would be another network that is timed."""
        if greeting.startswith("no "):
            raise NoSuchModelError(brief(greeting.removeprefix("no ")))
        told = re.fullmatch(r"ready (\S+)", greeting)
        try:
            difference = float(told[1] if told else "")
        except ValueError:
            raise WorkerError(f"began with {brief(greeting)!r}, not with 'ready'.") from None
        if not difference <= _LARGEST_DIFFERENCE:
            raise WorkerError(f"outputs must equal PyTorch's up to {_LARGEST_DIFFERENCE:g}, got {difference:.2g}.")

    def _answer(self) -> str:
        """One line, waited for as long as is reasonable."""
        line, until = b"", time.monotonic() + self._seconds
        source = _pipe(self._process.stdout)
        while not line.endswith(b"\n") and len(line) < _LONGEST_ANSWER:
            if not select.select([source], [], [], max(0.0, until - time.monotonic()))[0]:
                raise WorkerError(f"said nothing for {self._seconds:g} seconds.")
            found = source.read(_LONGEST_ANSWER)
            if not found:
                raise self._death()
            line += found
        return line.decode(errors="replace").strip()

    def _death(self) -> WorkerError:
        code = self._process.wait(self._seconds)
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        return WorkerError(f"ended with exit code {code}: {brief(last) or 'no word'}")


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    if end is None:
        raise WorkerError("has no pipe.")
    return end


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for end in (process.stdin, process.stdout, errors):
        if end is not None:
            end.close()


def _environment(threads: int) -> dict[str, str]:
    """No accelerator, XLA's pool of as many threads as torch has, and no module of this folder in the way of others."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": str(threads), "PYTHONSAFEPATH": "1"}


def _confine(process: int, threads: int) -> None:
    """As many cores as threads, because XLA's pool is not the only place where it computes."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process, sorted(os.sched_getaffinity(0))[:threads])


def write_setting(workload: Workload, folder: Path) -> None:
    """Write the workload's settings, weights, rows by unit, and the outputs that PyTorch has for them.

    Every weight is moved a little: with biases at zero and gains at one, outputs agree even if those are forgotten.
    """
    model, (rows, targets) = workload.make_model(), workload.make_rows()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=_SHAKEN)
        by_row = {"rows": rows, "targets": targets, "expected": model(rows)}
    by_unit = {name: value.unflatten(0, (workload.batch, workload.views)) for name, value in by_row.items()}
    arrays: dict[str, Tensor] = {**dict(model.named_parameters()), **by_unit}
    contents: dict[str, Any] = {name: value.detach().numpy() for name, value in arrays.items()}
    np.savez(folder / "arrays.npz", **contents)
    setting = {
        "model": workload.model,
        "batch": workload.batch,
        "microbatch_size": workload.microbatch_size,
        "clip_norm": CLIP_NORM,
        "noise_multiplier": NOISE_MULTIPLIER,
        "learning_rate": LEARNING_RATE,
        "momentum": MOMENTUM,
    }
    (folder / "setting.json").write_text(json.dumps(setting))


def _started(python: Path, workload: Workload) -> Worker:
    with tempfile.TemporaryDirectory() as folder:
        write_setting(workload, Path(folder))
        return Worker(python, Path(folder))


def _memory(python: Path, workload: Workload) -> int:
    """The peak of two steps beyond model and data, in a new process: the first one compiles."""
    worker = _started(python, workload)
    for _ in range(2):
        worker()
    return int(worker.ask("memory"))


def _version(python: Path) -> str:
    """The version of the jax_privacy that this Python has."""
    cause = f"took more than {_SECONDS_TO_IMPORT} seconds to import jax_privacy"
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS_TO_IMPORT,
            env=_environment(1),
        )
        told = re.fullmatch(r"(?:.*\n)*(\d[\w.+-]{0,30})\n", done.stdout)
        if not done.returncode and told:
            return told[1]
        cause = done.stderr.strip().rpartition("\n")[2] or f"ended with exit code {done.returncode}"
    except OSError as error:
        cause = str(error.strerror)
    except subprocess.TimeoutExpired:
        pass
    raise ArgumentError(
        f"jax_python must be the Python of an environment that has jax_privacy, got {brief(python)!r}: {brief(cause)}. "
        "Install jax and jax-privacy there, or name another."
    )
