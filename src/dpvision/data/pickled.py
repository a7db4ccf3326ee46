"""Reads the plain values of a pickle without running it.

The official CIFAR files are pickles, and a pickle is a program. This reader looks at its opcodes and builds dicts,
lists, tuples, texts, bytes, numbers and uint8 arrays by itself. It imports nothing that the file names, calls nothing
that the file names, and refuses every opcode and every name that the official files do not need.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dpvision.errors import DataError, shown

MAX_OPCODES = 2_000_000
_MARK = object()
# The opcodes that are read, with the form of what follows each: a number (struct format), a text or bytes with a
# length before it (struct format of the length), or two lines.
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i"}
_TEXTS = {b"X": ("<I", "utf-8"), b"\x8c": ("<B", "utf-8"), b"U": ("<B", "latin1"), b"T": ("<i", "latin1")}
_BYTES = {b"B": "<I", b"C": "<B"}
_MEMO_NUMBERS = {b"q": "<B", b"r": "<I", b"h": "<B", b"j": "<I"}
_SKIPPED_NUMBERS = {b"\x80": "<B", b"\x95": "<Q"}
_GLOBAL, _STOP = b"c", b"."
_CONSTANTS = frozenset((*_NUMBERS, *_TEXTS, *_BYTES))
_SINGLETONS = {b"N": None, b"\x88": True, b"\x89": False}
_TUPLES = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}
_KNOWN_NAMES = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",
}
_BYTE_TYPES = ("u1", "|u1")


class _Refused(Exception):
    """The file is not one of the plain pickles that are read here."""


@final
@dataclass(frozen=True)
class _Name:
    """A name that the file mentions. It stands for itself: nothing is looked up or imported."""

    meaning: str


@final
@dataclass(frozen=True)
class _ByteType:
    """The type uint8, the only one that these files hold."""


@final
class _Array:
    """An array that is waiting for its shape and bytes."""

    def __init__(self) -> None:
        self.values: NDArray[np.uint8] | None = None


def read_plain_pickle(data: bytes, *, source: str) -> dict[Any, Any]:
    """The dict in a pickle of plain values.

    Guarantee: no code of the file runs. Whatever is not a plain value or a uint8 array raises ``DataError``.
    """
    machine = _Machine(spare=len(data))
    try:
        for count, (opcode, argument) in enumerate(_opcodes(data)):
            if count > MAX_OPCODES:
                raise _Refused("it is too long")
            machine.step(opcode, argument)
        result = _finished(machine.result())
    except _Refused as error:
        raise DataError(f"{shown(source)} is refused: not a plain data pickle ({shown(error)}).") from error
    except (ValueError, IndexError, KeyError) as error:
        raise DataError(f"{shown(source)} can't be read as a pickle of plain values: {shown(error)}.") from error
    if not isinstance(result, dict):
        raise DataError(f"{shown(source)} holds no dictionary, so it is not a CIFAR batch.")
    return result


def _opcodes(data: bytes) -> Iterator[tuple[bytes, Any]]:
    """Each opcode up to the stop with what follows it. An opcode that is not ours is given without, to be refused."""
    at = 0
    while (opcode := data[at : at + 1]) != _STOP:
        at += 1
        argument: Any = None
        if opcode in _TEXTS or opcode in _BYTES:
            form, encoding = _TEXTS[opcode] if opcode in _TEXTS else (_BYTES[opcode], None)
            length, at = _number(data, at, form)
            raw, at = _slice(data, at, length)
            argument = raw if encoding is None else raw.decode(encoding)
        elif opcode == _GLOBAL:
            module, at = _line(data, at)
            name, at = _line(data, at)
            argument = f"{module} {name}"
        elif form := _NUMBERS.get(opcode) or _MEMO_NUMBERS.get(opcode) or _SKIPPED_NUMBERS.get(opcode):
            argument, at = _number(data, at, form)
        elif not opcode:
            raise _Refused("it ends without a stop")
        yield opcode, argument


def _number(data: bytes, at: int, form: str) -> tuple[int, int]:
    raw, after = _slice(data, at, struct.calcsize(form))
    return struct.unpack(form, raw)[0], after


def _slice(data: bytes, at: int, length: int) -> tuple[bytes, int]:
    if length < 0 or at + length > len(data):
        raise _Refused("a length that leads beyond its end")
    return data[at : at + length], at + length


def _line(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(b"\n", at)
    return data[at:end].decode("ascii"), end + 1


def _finished(value: Any) -> Any:
    """Replaces arrays under construction, in the one place where these files have them: values of the dict."""
    if not isinstance(value, dict):
        return value
    return {key: item.values if isinstance(item, _Array) else item for key, item in value.items()}


class _Machine:
    """A stack and a memo, as the pickle protocol has them, over values that can do nothing."""

    def __init__(self, *, spare: int) -> None:
        self._spare = spare
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._actions: dict[bytes, Callable[[Any], None]] = {
            b"(": lambda _: self._stack.append(_MARK),
            b"}": lambda _: self._stack.append({}),
            b"]": lambda _: self._stack.append([]),
            b"a": lambda _: self._append([self._stack.pop()]),
            b"e": lambda _: self._append(self._to_mark()),
            b"s": lambda _: self._set_items([self._stack.pop() for _ in range(2)][::-1]),
            b"u": lambda _: self._set_items(self._to_mark()),
            b"t": lambda _: self._stack.append(tuple(self._to_mark())),
            b"q": self._put,
            b"r": self._put,
            b"\x94": lambda _: self._put(len(self._memo)),
            b"h": self._get,
            b"j": self._get,
            b"c": lambda name: self._stack.append(_name(name)),
            b"\x93": lambda _: self._stack_global(),
            b"R": lambda _: self._reduce(),
            b"b": lambda _: self._build(),
        }

    def step(self, opcode: bytes, argument: Any) -> None:
        if opcode in _CONSTANTS:
            self._stack.append(argument)
        elif opcode in _SINGLETONS:
            self._stack.append(_SINGLETONS[opcode])
        elif opcode in _TUPLES:
            self._stack.append(tuple(self._stack.pop() for _ in range(_TUPLES[opcode]))[::-1])
        elif opcode in self._actions:
            self._actions[opcode](argument)
        elif opcode not in _SKIPPED_NUMBERS:
            raise _Refused(f"opcode {opcode!r}")

    def result(self) -> Any:
        if len(self._stack) != 1:
            raise _Refused(f"{len(self._stack)} values at its end")
        return self._stack[0]

    def _to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise _Refused("items for something that is not a list")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise _Refused("items for something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, bytes)):
                raise _Refused("a key that is not a text")
            target[key] = value

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _Refused("a name that is not a text")
        self._stack.append(_name(f"{module} {name}"))

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise _Refused("a call")
        made = _stand_in(function.meaning, arguments)
        self._spend(len(made) if isinstance(made, bytes) else 0)
        self._stack.append(made)

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, _Array):
            target.values = _array_of(state)
            self._spend(target.values.nbytes if isinstance(state[4], str) else 0)
        elif not isinstance(target, _ByteType):
            raise _Refused("a state for something that is not an array")

    def _spend(self, size: int) -> None:
        """Each byte of the file may be copied once: a text that is made bytes again and again would fill the memory."""
        self._spare -= size
        if self._spare < 0:
            raise _Refused("it makes more than it holds")


def _name(name: str) -> _Name:
    if name not in _KNOWN_NAMES:
        raise _Refused(f"it names {name!r}")
    return _Name(_KNOWN_NAMES[name])


def _stand_in(meaning: str, arguments: tuple[Any, ...]) -> Any:
    """What a call would have made, made by us."""
    if meaning == "array" and arguments and arguments[0] == _Name("ndarray"):
        return _Array()
    if meaning == "dtype" and arguments and isinstance(arguments[0], str) and arguments[0] in _BYTE_TYPES:
        return _ByteType()
    if meaning == "encode" and len(arguments) == 2 and arguments[1] == "latin1" and isinstance(arguments[0], str):
        return arguments[0].encode("latin1")
    raise _Refused(f"a call of {meaning} with arguments that these files don't have")


def _array_of(state: Any) -> NDArray[np.uint8]:
    if not isinstance(state, tuple) or len(state) != 5:
        raise _Refused("an array state of another form")
    _, shape, kind, fortran, content = state
    whole = isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
    raw = content.encode("latin1") if isinstance(content, str) else content
    if not (whole and isinstance(kind, _ByteType) and isinstance(raw, bytes) and math.prod(shape) == len(raw)):
        raise _Refused("an array whose shape, type and content don't agree")
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran is True else "C")
