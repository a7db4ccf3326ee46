"""Own code: a model or a loss that the user wrote, named as FILE.py:FUNCTION or given as a Python object.

A release names own code by file name, function and SHA-256, and never contains or executes it: anyone who loads the
release names the code again, and the hash is compared before anything runs. The hash covers the file and every module
beside it that it imports with an import statement, directly or through another one. These files are read once; what was
hashed is what is executed, so that neither a cached .pyc nor a later edit comes between. Modules of other folders,
installed packages and imports by computed names are not hashed.

This module does not import torch, so that a missing file is reported at once.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.abc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, final

from dpvision.errors import ArgumentError, DPVisionError, PrivacyError, brief, shown

Kind = Literal["model", "loss"]
GIVEN_IN_PYTHON: Final = "python"
"""Takes the place of the file's name where own code has no source file."""
LARGEST_SOURCE = 2**24
_NEVER_BESIDE: Final = sys.stdlib_module_names | {"dpvision", "numpy", "torch"}
"""Modules that are never taken from the folder of own code, whatever is there."""


def is_own(name: str | None) -> bool:
    """Whether a model or loss of this name is own code: FILE.py:FUNCTION, not a name of ours."""
    return name is not None and (":" in name or name.endswith(".py"))


def place_of(text: str, kind: Kind) -> tuple[str, str]:
    """Divide FILE.py:FUNCTION into its two parts.

    Raises:
        ArgumentError: there is no function.
    """
    place, _, function = text.rpartition(":")
    if not place or not function:
        file = (place or function).rstrip(":")
        raise ArgumentError(f"{kind} must name a function of the file, as in {shown(file)}:make, got {shown(text)}.")
    return place, function


@final
@dataclass(frozen=True)
class _File:
    """One file of own code: its content as it was read; ``package`` if it is an __init__.py."""

    path: Path
    content: bytes
    package: bool = False


@final
@dataclass(frozen=True, eq=False)
class Source(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The files of own code, and the importer that executes exactly what was read.

    Attributes:
        main: the file that was named.
        beside: modules of the same folder that it imports, by their names.
        sha256: of the file, as ``sha256sum`` prints it. With modules beside it: of the lines that ``sha256sum`` prints
            for all files, sorted by path relative to the folder.
    """

    main: _File
    beside: Mapping[str, _File]
    sha256: str
    _loaded: dict[str, ModuleType] = field(default_factory=dict, repr=False)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find a module among the files that were read."""
        del path, target
        file = self.beside.get(fullname)
        if file is None:
            return None
        # A package without search path: what was not read can't be imported from it.
        spec = ModuleSpec(fullname, self, origin=str(file.path), is_package=file.package)
        spec.has_location = True
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute the content that was read."""
        _execute(self.beside[module.__name__], module)

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Import the modules beside the file from here; modules of the same names are put back afterwards."""
        names = {name.partition(".")[0] for name in self.beside}
        others = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in names}
        sys.modules.update(self._loaded)
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            self._loaded.update({n: m for n, m in sys.modules.items() if n.partition(".")[0] in names})
            sys.modules.update(others)

    def executed(self) -> ModuleType:
        """Execute the file as a module of its own name: a user's torch.py must not be taken for torch."""
        module = ModuleType(f"own_{self.main.path.stem}_{self.sha256[:12]}")
        module.__file__ = str(self.main.path)
        sys.modules[module.__name__] = module  # dataclasses look their module up by name
        _execute(self.main, module)
        return module


def _execute(file: _File, module: ModuleType) -> None:
    exec(compile(file.content, str(file.path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - named by the user


@final
@dataclass(frozen=True, eq=False)
class OwnCode:
    """A model or a loss that the user named.

    Attributes:
        name: FILE.py:FUNCTION without the path; ``python`` in the place of a file that there is not.
        sha256: of its source; None where the source can't be had.
        value: the function, class or object.
        repeatable: whether equal hashes mean equal code: not for an object with a state of its own, nor without a hash.
        source: the files, if it was read from some.
    """

    name: str
    sha256: str | None
    value: Any
    repeatable: bool
    source: Source | None = None

    def importable(self) -> AbstractContextManager[None]:
        """Let the code import what is beside its file, as long as the context lasts."""
        return nullcontext() if self.source is None else self.source.importable()


@final
@dataclass(frozen=True, eq=False)
class RunCode:
    """The own code of a run; None where it uses a model of the catalogue or one of our losses."""

    model: OwnCode | None = None
    loss: OwnCode | None = None

    @property
    def is_given(self) -> bool:
        """Whether the run uses any own code."""
        return self.model is not None or self.loss is not None

    @property
    def repeatable(self) -> bool:
        """Whether a resumed run can know that it executes the same code."""
        return all(code is None or code.repeatable for code in (self.model, self.loss))


NO_CODE: Final = RunCode()
"""That of a run with a model of the catalogue and one of our losses."""


def read_source(path: Path) -> Source:
    """Read a file and every module beside it that it imports; nothing is executed.

    Args:
        path: a Python file.

    Raises:
        ArgumentError: a file can't be read, or is not Python.
    """
    folder, main = path.resolve().parent, _read(path)
    beside: dict[str, _File] = {}
    waiting = list(_imports(main, package=""))
    while waiting:
        name = waiting.pop()
        file = None if name in beside or name.partition(".")[0] in _NEVER_BESIDE else _beside(folder, name)
        if file is not None:
            beside[name] = file
            waiting += _imports(file, package=name if file.package else name.rpartition(".")[0])
    files = {main.path.name: main.content}
    files |= {f.path.relative_to(folder).as_posix(): f.content for f in beside.values() if f.path.suffix == ".py"}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items()))
    alone = len(files) == 1
    return Source(main, beside, hashes[main.path.name] if alone else hashlib.sha256(lines.encode()).hexdigest())


def _read(path: Path, *, package: bool = False) -> _File:
    if not path.is_file():
        raise ArgumentError(f"there is no file {shown(path)}.")
    if path.stat().st_size > LARGEST_SOURCE:
        raise ArgumentError(f"{shown(path)} must have at most {LARGEST_SOURCE} bytes, as source code has.")
    return _File(path.resolve(), path.read_bytes(), package)


def _beside(folder: Path, name: str) -> _File | None:
    """Find a module of this name in the folder, as Python would: a package, a file, a folder without __init__.py."""
    place = folder.joinpath(*name.split("."))
    if (place / "__init__.py").is_file():
        return _read(place / "__init__.py", package=True)
    if place.with_name(f"{place.name}.py").is_file():
        return _read(place.with_name(f"{place.name}.py"))
    return _File(place, b"", package=True) if place.is_dir() else None


def _imports(file: _File, *, package: str) -> Iterator[str]:
    """Name every module that the file may import, with the packages that they are in; relative ones in ``package``."""
    try:
        tree = ast.parse(file.content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else brief(error)
        raise ArgumentError(f"{shown(file.path.name)} is not Python{where}: {reason}.") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = [*above, *(node.module or "").split(".")]
            origin = ".".join(part for part in base if part)
            found = [origin, *(f"{origin}.{alias.name}".lstrip(".") for alias in node.names)]
        else:
            continue
        for name in found:
            parts = name.split(".")
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)) if all(parts))


def load_code(text: str, *, kind: Kind, sha256: str | None = None) -> OwnCode:
    """Read, compare and execute the code that the user named.

    Args:
        text: FILE.py:FUNCTION; MODULE:FUNCTION is imported as Python does, and not hashed.
        kind: what it is, for messages.
        sha256: the expected hash, if one is known.

    Returns:
        The function (or class, or object), not called yet.

    Raises:
        ArgumentError: there is no such file or function, or the file can't be imported.
        PrivacyError: the source has another hash; nothing was executed.
    """
    place, function = place_of(text, kind)
    source = read_source(Path(place)) if place.endswith(".py") else None
    if source is not None and sha256 not in (None, source.sha256):
        raise PrivacyError(
            f"{shown(Path(place).name)} is not the source that was meant: its SHA-256 is {source.sha256}, not {sha256}."
        )
    with code_errors(f"can't import {shown(place)}", module=place):
        if source is None:
            module = _imported(place)
        else:
            with source.importable():
                module = source.executed()
    if not hasattr(module, function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ArgumentError(
            f"{shown(place)} has no {brief(function)!r}. It has: {brief(', '.join(names) or 'nothing')}."
        )
    value = getattr(module, function)
    name = f"{Path(place).name}:{function}"
    stateless = isinstance(value, type) or inspect.isfunction(value)
    digest = None if source is None else source.sha256
    return OwnCode(name, digest, value, repeatable=stateless and digest is not None, source=source)


def _imported(place: str) -> ModuleType:
    """Import a module by its name, also one of the current folder."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(place)
    finally:
        sys.path.remove(folder)


@contextmanager
def code_errors(saying: str, *, module: str = "") -> Iterator[None]:
    """Re-raise whatever a user's code raises as one line, exits included; ``module`` is the one being imported."""
    try:
        yield
    except DPVisionError:
        raise
    except (Exception, SystemExit) as error:
        reason = brief((str(error).splitlines() or [""])[0].rstrip("."))
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = "" if missing is None else f" Install {brief(missing)}, or leave its import out."
        if missing is not None and module.partition(".")[0] == missing.partition(".")[0]:
            hint = " For a file, write FILE.py:FUNCTION."
        raise ArgumentError(f"{saying}: {type(error).__name__}: {reason}.{hint}") from error


def code_of(given: object, *, kind: Kind, sha256: str | None = None) -> OwnCode:
    """Describe own code that is given as FILE.py:FUNCTION or as a Python object.

    Args:
        given: a text; or a function, a class or an object.
        kind: what it is, for messages.
        sha256: the expected hash, if one is known.

    Returns:
        The code, hashed where its source can be had: the file that defines it, or the text of a notebook's cell.
    """
    if isinstance(given, str):
        return load_code(given, kind=kind, sha256=sha256)
    stateless = isinstance(given, type) or inspect.isfunction(given)
    described: Any = given if stateless else type(given)
    file, digest = GIVEN_IN_PYTHON, None
    try:
        text, path = inspect.getsource(described), Path(inspect.getsourcefile(described) or "")
        if path.is_file():
            file, digest = path.name, read_source(path).sha256
        else:
            digest = hashlib.sha256(text.encode()).hexdigest()
    except (OSError, TypeError, ArgumentError):
        pass  # no source: the certificate says "not hashed"
    if sha256 not in (None, digest):
        raise PrivacyError(f"the {kind} is not the one that was meant: its SHA-256 is {digest}, not {sha256}.")
    return OwnCode(f"{file}:{described.__qualname__}", digest, given, repeatable=stateless and digest is not None)


def named_again(
    name: str, sha256: str | None, given: object, *, kind: Kind, may_differ: bool = False
) -> OwnCode | None:
    """Load the code of an earlier run, if it had any, from what the user names now.

    Args:
        name: the run's model or loss.
        sha256: of its source, as the run recorded it; None if it had none.
        given: what the user names now, as for ``code_of``; None for nothing.
        kind: what it is.
        may_differ: accept other source code; the caller forks the run then.

    Raises:
        ArgumentError: own code is needed and not named, or named and not needed.
        PrivacyError: the named code has another hash; nothing of it was executed.

    Guarantee: nothing is executed that ``given`` does not name.
    """
    if not is_own(name):
        if given is not None:
            raise ArgumentError(f"the {kind} of this run is {name}, which is not own code. Leave --{kind} out.")
        return None
    file, _, function = name.rpartition(":")
    if given is None:
        raise ArgumentError(
            f"the {kind} of this run is own code, and a run folder holds none: name it again with --{kind} "
            f"{shown(file)}:{brief(function)} ({hash_text(sha256)})."
        )
    if isinstance(given, str) and place_of(given, kind)[1] != function and not may_differ:
        raise ArgumentError(f"the {kind} of this run is made by {brief(function)}, got {shown(given)}.")
    try:
        return code_of(given, kind=kind, sha256=None if may_differ else sha256)
    except PrivacyError as error:
        raise PrivacyError(f"{str(error).rstrip('.')}, as the run has recorded. Put the old file back.") from error


def hash_text(sha256: str | None) -> str:
    """State the hash of own code, or that there is none."""
    return "own code, not hashed" if sha256 is None else f"SHA-256 {sha256}"


def arguments_for(function: Callable[..., Any], offered: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """Choose the arguments that a function takes by name among those that are offered.

    Args:
        function: a user's function or class.
        offered: arguments by name.
        name: of the function, for messages.

    Raises:
        ArgumentError: it needs another argument.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    needed = [n for n, p in named.items() if p.default is p.empty and (n not in offered or p.kind is p.POSITIONAL_ONLY)]
    if needed:
        raise ArgumentError(
            f"{name} must take no argument, or {', '.join(offered)} by name, but it needs {', '.join(needed)}. Give "
            "them defaults."
        )
    return {n: offered[n] for n, p in named.items() if n in offered and p.kind is not p.POSITIONAL_ONLY}
