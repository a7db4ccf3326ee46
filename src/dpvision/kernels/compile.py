"""Compile the C++ sources on first use, keep the library in the user's cache, and load it.

The library is named after everything that its machine code depends on, so another compiler, processor or source is
another file. Nothing here raises an error: where the kernels cannot be had, ``Build.reason`` says why, and the callers
use plain PyTorch. The variable DPVISION_NATIVE chooses: 0 for none, 1 for this processor, avx2 for AVX2 and no wider.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch

from dpvision.errors import ArgumentError

SWITCH: Final = "DPVISION_NATIVE"
_SOURCES: Final = Path(__file__).parent / "cpp"
# No -ffast-math: it lets the compiler reorder sums and drop NaN checks, and a norm must be exact.
_FLAGS: Final = ("-std=c++17", "-O3", "-fno-math-errno", "-fPIC", "-fopenmp", "-Wall", "-Werror")
_NEEDED: Final[dict[str, frozenset[str]]] = {"1": frozenset(), "avx2": frozenset({"avx2", "fma", "bmi2"})}
"""Values of the switch besides 0, and the instruction sets that each needs."""
_SECONDS: Final = 300


@final
@dataclass(frozen=True)
class Build:
    """The loaded kernels, or the reason why there are none.

    Attributes:
        library: The shared library; None without kernels.
        identity: Names the code that runs, compiler and processor included; "plain" without kernels.
        reason: Why there is no library, in one line; empty if there is one.
    """

    library: ctypes.CDLL | None
    identity: str
    reason: str = ""


_switched_off: Final[ContextVar[bool]] = ContextVar("switched_off", default=False)


def build() -> Build:
    """Return the kernels for this machine, compiled if necessary; none inside ``switched_off``."""
    return _without("switched off for this computation") if _switched_off.get() else _built()


def loaded() -> ctypes.CDLL:
    """Return the library.

    Raises:
        ArgumentError: There is none.
    """
    found = build()
    if found.library is None:
        raise ArgumentError(f"native kernels are not available: {found.reason}. Check with `takes` first.")
    return found.library


@contextmanager
def switched_off(*, when: bool = True) -> Iterator[None]:
    """Use plain PyTorch instead of kernels inside the block, if ``when`` is true or an outer block says so."""
    token = _switched_off.set(when or _switched_off.get())
    try:
        yield
    finally:
        _switched_off.reset(token)


@functools.cache
def _built() -> Build:
    """Compile and load once a process."""
    kind = os.environ.get(SWITCH) or "1"
    if kind == "0":
        return _without(f"switched off by {SWITCH}=0")
    if kind not in _NEEDED:
        return _without(f"{SWITCH} must be 0, {' or '.join(_NEEDED)}, got {kind!r}")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or platform.system() != "Linux":
        return _without("no C++ compiler was found" if compiler is None else "kernels are built on Linux only")
    try:
        missing = sorted(_NEEDED[kind] - set(_processor().split()))
        if missing:
            return _without(f"{SWITCH}={kind} needs a processor with {', '.join(missing)}")
        digest = _digest(compiler, flags(kind))
        path = _cache() / f"kernels-{digest}.so"
        if not path.exists():
            _compile(compiler, flags(kind), path)
        _require_own(path)
        content = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return Build(ctypes.CDLL(str(path)), f"native {digest} {content}")
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return _without(f"the kernels could not be built: {_first_error(error)}")


def _without(reason: str) -> Build:
    return Build(None, "plain", reason)


def _cache() -> Path:
    """A folder that only its owner can write to, because its files are loaded into the process."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpvision" / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _require_own(folder)
    return folder


def _require_own(path: Path) -> None:
    """Refuse a path that another user owns or may write to, or that is a link."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path.name} in the cache of kernels could have been changed by another user")


def flags(kind: str) -> tuple[str, ...]:
    """Return the compiler's flags for a value of the switch, "1" or "avx2"."""
    return (*_FLAGS, "-march=haswell" if kind == "avx2" else "-march=native")


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    """A digest of everything the machine code depends on: sources, flags, compiler, processor, OpenMP runtime."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_SECONDS).stdout
    content = hashlib.sha256(version)
    for source in sorted(_SOURCES.iterdir()):
        content.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for fact in (*flags, *map(str, _openmp()), platform.machine(), _processor()):
        content.update(fact.encode() + b"\0")
    return content.hexdigest()[:16]


def _processor() -> str:
    """The processor's instruction sets, on which ``-march=native`` depends, separated by spaces."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _openmp() -> list[Path]:
    """The OpenMP runtime that torch brings: a second one would compete with it for the cores."""
    return sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile all sources and move the library into place in one step: other processes may do the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        sources = sorted(map(str, _SOURCES.glob("*.cpp")))
        _run([compiler, *flags, "-c", *sources], folder)
        objects = sorted(map(str, Path(folder).glob("*.o")))
        openmp = [str(file) for file in _openmp()] or ["-fopenmp"]
        _run([compiler, "-shared", *objects, *openmp, "-o", "kernels.so"], folder)
        (Path(folder) / "kernels.so").chmod(0o700)
        os.replace(Path(folder) / "kernels.so", path)


def _run(command: list[str], folder: str) -> None:
    subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=_SECONDS)


def _first_error(error: Exception) -> str:
    """The first line of the compiler's output that names an error, or else of the exception."""
    text = getattr(error, "stderr", None) or str(error)
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or [type(error).__name__]
    return lines[0]
