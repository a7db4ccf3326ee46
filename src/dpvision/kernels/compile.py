"""Load the kernels that came with the installation, or compile the C++ sources on first use.

A wheel for Linux on x86-64 carries one library for each of ``LEVELS``; the best one that the processor can execute is
loaded. Where there is none that fits, the sources are compiled for this processor, and the library is kept in the
user's cache under a name that depends on everything its machine code depends on. Nothing here raises an error: where
the kernels cannot be had, ``Build.reason`` says why, and the callers use plain PyTorch. The variable DPVISION_NATIVE
chooses (``SWITCH``).

The libraries have a plain C interface and know nothing of torch. They share torch's OpenMP runtime, so that the threads
of both do not compete for the cores. The build of a wheel imports this module: torch is only looked for, not imported.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

from dpvision.errors import ArgumentError

SWITCH: Final = "DPVISION_NATIVE"
"""0: no kernels. 1 (default): those of the installation, else compiled for this processor. avx2, avx512: for these
instruction sets and no wider. compile: compiled for this processor, whatever the installation has."""
LEVELS: Final = ("avx512", "avx2")
"""The instruction sets that a wheel has kernels for, the best first."""
_SOURCES: Final = Path(__file__).parent / "cpp"
_PREBUILT: Final = Path(__file__).parent / "prebuilt"
_MANIFEST: Final = "manifest.json"
# No -ffast-math: it lets the compiler reorder sums and drop NaN checks, and a norm must be exact.
_FLAGS: Final = ("-std=c++17", "-O3", "-fno-math-errno", "-fPIC", "-fopenmp", "-Wall", "-Werror")
_MARCH: Final = {"1": "native", "compile": "native", "avx2": "haswell", "avx512": "skylake-avx512"}
# What the compiler may use with -march=haswell and -march=skylake-avx512, in the words of /proc/cpuinfo.
_AVX2: Final = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_AVX512: Final = _AVX2 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_NEEDED: Final = {"1": frozenset[str](), "compile": frozenset[str](), "avx2": _AVX2, "avx512": _AVX512}
"""Values of the switch besides 0, and the instruction sets that each needs."""
_SECONDS: Final = 300
_LOG: Final = logging.getLogger("dpvision.kernels")


@final
@dataclass(frozen=True)
class Build:
    """The loaded kernels, or the reason why there are none.

    Attributes:
        library: The shared library; None without kernels.
        identity: Names the code that runs, compiler and processor included; "plain" without kernels.
        reason: Why there is no library, in one line; empty if there is one.
        target: The instruction set it was compiled for; "native": this processor's.
        passed_over: Why the libraries of the installation are not used, in one line; empty if one is.
    """

    library: ctypes.CDLL | None
    identity: str
    reason: str = ""
    target: str = ""
    passed_over: str = ""

    @property
    def origin(self) -> str:
        """Where the library is from: "prebuilt" (the installation), "compiled", or "plain" for none."""
        return {"native": "compiled"}.get(self.identity.split()[0], self.identity.split()[0])


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
    """Load, after compiling if necessary, once a process."""
    return _found(may_compile=True)


def without_compiling() -> Build:
    """Return what ``build`` would, but do not compile: the reason then says that the first use will."""
    return _found(may_compile=False)


def _found(*, may_compile: bool) -> Build:
    kind = os.environ.get(SWITCH) or "1"
    if kind == "0":
        return _without(f"switched off by {SWITCH}=0")
    if kind not in _NEEDED:
        return _without(f"{SWITCH} must be one of 0, {', '.join(_NEEDED)}, got {kind!r}")
    place = (platform.system(), platform.machine())
    if place[0] != "Linux" or (place[1] not in ("x86_64", "AMD64") and kind != "compile"):
        return _without(f"there are kernels for Linux on x86-64 only, this is {place[0]} on {place[1]}")
    try:
        missing = sorted(_NEEDED[kind] - set(_processor().split()))
        if missing:
            return _without(f"{SWITCH}={kind} needs a processor with {', '.join(missing)}")
        prebuilt = _prebuilt(kind)
    except (OSError, ValueError, KeyError, TypeError) as error:
        prebuilt = _without(f"the kernels of the installation could not be loaded: {_first_error(error)}")
    if prebuilt.library is not None:
        return prebuilt
    try:
        found = _compiled(kind, may_compile=may_compile)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        found = _without(f"the kernels could not be built: {_first_error(error)}")
    return replace(found, passed_over=prebuilt.reason)


def _without(reason: str) -> Build:
    return Build(None, "plain", reason)


def _prebuilt(kind: str) -> Build:
    """Load the best library of the installation that this processor can execute."""
    if kind == "compile":
        return _without(f"{SWITCH}=compile")
    if not (_PREBUILT / _MANIFEST).exists():
        return _without("the installation has no kernels")
    manifest = json.loads((_PREBUILT / _MANIFEST).read_text())
    if manifest["sources"] != _sources_digest():
        return _without("the kernels of the installation were compiled from other sources")
    processor = _processor()
    fitting = [name for name in (LEVELS if kind == "1" else (kind,)) if set(processor.split()) >= _NEEDED[name]]
    if not fitting:
        return _without(f"the kernels of the installation need a processor with {LEVELS[-1]}")
    openmp = _openmp()
    if not openmp:
        return _without("torch brings no libgomp, which the kernels of the installation need")
    path = _PREBUILT / _file_of(fitting[0])
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    if content != manifest["libraries"][fitting[0]]:
        return _without(f"{path.name} of the installation is damaged")
    # The libraries name no OpenMP runtime, because its file has another name in every distribution of torch.
    ctypes.CDLL(str(openmp[0]), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    # The processor belongs to the identity as it does for compiled kernels: the C library's functions depend on it.
    facts = hashlib.sha256(f"{platform.machine()}\0{processor}".encode()).hexdigest()
    return Build(library, f"prebuilt {fitting[0]} {content[:16]} {facts[:16]}", target=fitting[0])


def _compiled(kind: str, *, may_compile: bool) -> Build:
    """Load the library for this processor from the cache, compiled first if it is not there."""
    compiler = _compiler()
    if compiler is None:
        return _without("no C++ compiler was found")
    digest = _digest(compiler, flags(kind))
    path = _cache() / f"kernels-{digest}.so"
    if not path.exists():
        if not may_compile:
            return _without(NOT_YET)
        _LOG.info("compiling the C++ kernels for this processor, once: some 10 to 40 seconds ...")
        _compile(compiler, flags(kind), path, _openmp() or ["-fopenmp"])
    _require_own(path)
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return Build(ctypes.CDLL(str(path)), f"native {digest} {content}", target=_MARCH[kind])


NOT_YET: Final = "they are compiled on first use"
"""The reason of ``without_compiling`` where ``build`` would compile."""


def write_prebuilt(folder: Path) -> None:
    """Compile the libraries that a wheel carries: one for each of ``LEVELS``, and their manifest.

    Raises:
        RuntimeError: There is no compiler.
        subprocess.SubprocessError: It fails.
    """
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler was found")
    folder.mkdir(parents=True, exist_ok=True)
    libraries = {}
    for name in LEVELS:
        path = folder / _file_of(name)
        # Named symbols of the compiler's OpenMP runtime stay open: torch's, loaded before, has them.
        _compile(compiler, flags(name), path, ["-Wl,--strip-all"])
        path.chmod(0o755)
        libraries[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = {"sources": _sources_digest(), "compiler": _version(compiler).splitlines()[0], "libraries": libraries}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _file_of(name: str) -> str:
    return f"kernels-{name}.so"


def cache_folder() -> Path:
    """The folder of compiled kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpvision" / "native"


def _cache() -> Path:
    """A folder that only its owner can write to, because its files are loaded into the process."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _require_own(folder)
    return folder


def _require_own(path: Path) -> None:
    """Refuse a path that another user owns or may write to, or that is a link."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path.name} in the cache of kernels could have been changed by another user")


def flags(kind: str) -> tuple[str, ...]:
    """Return the compiler's flags for a value of the switch, such as "1" or "avx2"."""
    return (*_FLAGS, f"-march={_MARCH[kind]}")


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=_SECONDS).stdout


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    """A digest of everything the machine code depends on: sources, flags, compiler, processor, OpenMP runtime."""
    content = hashlib.sha256(_version(compiler).encode())
    for fact in (_sources_digest(), *flags, *map(str, _openmp()), platform.machine(), _processor()):
        content.update(fact.encode() + b"\0")
    return content.hexdigest()[:16]


def _sources_digest() -> str:
    content = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        content.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return content.hexdigest()


def _processor() -> str:
    """The processor's instruction sets, on which ``-march=native`` depends, separated by spaces."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _openmp() -> list[str]:
    """The OpenMP runtime that torch brings: a second one would compete with it for the cores."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return []
    return [str(path) for path in sorted((Path(torch.origin).parent / "lib").glob("libgomp*.so*"))[:1]]


def _compile(compiler: str, flags: tuple[str, ...], path: Path, link: Sequence[str]) -> None:
    """Compile all sources and move the library into place in one step: other processes may do the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        sources = sorted(_SOURCES.glob("*.cpp"))
        objects = [f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", each] for source, each in zip(sources, objects, strict=True)
        ]
        list(threads.map(lambda command: _run(command, folder), commands))
        _run([compiler, "-shared", *objects, *link, "-o", "kernels.so"], folder)
        (Path(folder) / "kernels.so").chmod(0o700)
        os.replace(Path(folder) / "kernels.so", path)


def _run(command: list[str], folder: str) -> None:
    subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=_SECONDS)


def _first_error(error: Exception) -> str:
    """The first line of the compiler's output that names an error, or else of the exception."""
    text = getattr(error, "stderr", None) or str(error)
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or [type(error).__name__]
    return lines[0]
