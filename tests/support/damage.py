"""Strategies that damage good input: bytes, JSON values, and the parts of PNG, npy, zip and safetensors files."""

from __future__ import annotations

import copy
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from hostile_guard import CANARY

_EXTREMES = (0, 1, -1, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
PICKLE = f"c{CANARY}\nrun\n(S'x'\ntR.".encode()
SYSTEM_PICKLE = b"\x80\x02cos\nsystem\nq\x00X\x0c\x00\x00\x00touch canaryq\x01\x85q\x02Rq\x03."
DISGUISES = (
    b"",
    b"\0",
    PICKLE,
    SYSTEM_PICKLE,
    b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
    b"<!DOCTYPE html><html><body>not an image</body></html>",
    b"%PDF-1.7\n",
    b"GIF89a\xff\xff\xff\xff\x00\x00\x00;",
    b"PK\x05\x06" + bytes(18),
    b"#!/bin/sh\ntouch canary\n",
)
ODD_TEXTS = (
    "",
    " ",
    "\x1b[2J\x1b]0;owned\x07",
    "a\nb",
    "\u202egnp.exe",
    "../../../../tmp/out",
    "/etc/passwd",
    "nul\0byte",
    "x" * 5000,
    "\udc80\udcff",
    "${HOME}",
    "nan",
    "-1",
    "__proto__",
    "💥" * 50,
    "C:\\x",
    "%s%n{0}",
)


def one_of(*values: Any) -> SearchStrategy[Any]:
    """Draw one of these values."""
    return st.sampled_from(values)


def one_in(count: int) -> SearchStrategy[bool]:
    """Draw True once in ``count`` draws."""
    return st.sampled_from([False] * (count - 1) + [True])


def random_bytes(*sizes: int) -> SearchStrategy[bytes]:
    """Draw bytes of one of these lengths."""
    return st.sampled_from(sizes).flatmap(lambda size: st.binary(min_size=size, max_size=size))


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


_ODD_NUMBERS = (None, True, False, 0, -1, 1, 2, 0.5, 1e308, -1e308, 5e-324, 1e-9, 10**6, 2**31, 2**63, 2**64, 10**400)
_ODD_SHAPES = (float("nan"), float("inf"), [], {}, [[]], {"": {}}, [None] * 50, _nested(50))

odd_texts = st.one_of(st.sampled_from(ODD_TEXTS), st.text(max_size=12))
odd_values: SearchStrategy[Any] = st.one_of(
    st.sampled_from((*_ODD_NUMBERS, *_ODD_SHAPES)), odd_texts, st.integers(), st.floats()
).map(copy.deepcopy)
"""Values that a field is hardly made for."""


# ---- bytes


def _places(size: int) -> SearchStrategy[int]:
    """A position, every other time within the first 64 bytes: most formats begin with their header."""
    return st.one_of(st.integers(0, max(0, min(size, 64) - 1)), st.integers(0, max(0, size - 1)))


@st.composite
def _flipped(draw: DrawFn, data: bytes) -> bytes:
    found = bytearray(data or b"\0")
    for _ in range(draw(one_of(1, 1, 4, 16))):
        found[draw(_places(len(found)))] ^= 1 << draw(st.integers(0, 7))
    return bytes(found)


@st.composite
def _cut(draw: DrawFn, data: bytes) -> bytes:
    return data[: draw(_places(len(data) + 1))]


@st.composite
def _with_more(draw: DrawFn, data: bytes) -> bytes:
    at = draw(_places(len(data) + 1))
    return data[:at] + draw(random_bytes(1, 4, 64, 1024)) + data[at:]


@st.composite
def _with_less(draw: DrawFn, data: bytes) -> bytes:
    at = draw(_places(len(data) + 1))
    return data[:at] + data[at + draw(one_of(1, 2, 8, 100)) :]


@st.composite
def _with_repetition(draw: DrawFn, data: bytes) -> bytes:
    at = draw(_places(len(data) + 1))
    piece = data[at : at + draw(one_of(4, 32, 512))]
    return data[:at] + piece * draw(one_of(2, 3, 50)) + data[at:]


@st.composite
def _with_extreme_number(draw: DrawFn, data: bytes) -> bytes:
    width = draw(one_of(1, 2, 4, 8))
    raw = (draw(st.sampled_from(_EXTREMES)) % (1 << (8 * width))).to_bytes(width, draw(one_of("little", "big")))
    at = draw(_places(max(1, len(data) - width + 1)))
    return data[:at] + raw + data[at + width :]


@st.composite
def _disguised(draw: DrawFn, data: bytes) -> bytes:
    other = draw(st.sampled_from(DISGUISES))
    return draw(one_of(other, other + data, data[: len(data) // 2] + other, data + other))


_ACCIDENTS: tuple[Callable[[bytes], SearchStrategy[bytes]], ...] = (
    _flipped,
    _flipped,
    _cut,
    _with_more,
    _with_less,
    _with_repetition,
    _with_extreme_number,
    _with_extreme_number,
    _disguised,
)


@st.composite
def damaged_bytes(draw: DrawFn, data: bytes, *, most: int = 3) -> bytes:
    """Draw the bytes after one to ``most`` small accidents."""
    for _ in range(draw(st.integers(1, most))):
        data = draw(draw(st.sampled_from(_ACCIDENTS))(data))
    return data


def mostly(good: bytes, *, damaged_one_in: int) -> SearchStrategy[bytes]:
    """Draw the good bytes, and damaged ones once in this many draws."""
    return one_in(damaged_one_in).flatmap(lambda hit: damaged_bytes(good, most=1) if hit else st.just(good))


# ---- JSON


@st.composite
def damaged_json(draw: DrawFn, value: Any, *, most: int = 3) -> Any:
    """Draw the value with one to ``most`` of its parts replaced, removed, renamed or added."""
    for _ in range(draw(st.integers(1, most))):
        value = draw(_json_with_one_change(value))
    return value


@st.composite
def _json_with_one_change(draw: DrawFn, value: Any) -> Any:
    value = copy.deepcopy(value)
    parts = list(_parts(value))
    if not parts:
        return draw(odd_values)
    owner, key = parts[draw(st.integers(0, len(parts) - 1))]
    kind = draw(one_of("replace", "replace", "remove", "rename", "add", "scale"))
    old = owner[key]
    if kind == "remove":
        del owner[key]
    elif kind == "rename" and isinstance(owner, dict):
        owner[draw(odd_texts)] = owner.pop(key)
    elif kind == "add" and isinstance(owner, dict):
        owner[draw(odd_texts)] = draw(odd_values)
    elif kind == "scale" and isinstance(old, (int, float)) and not isinstance(old, bool):
        owner[key] = draw(one_of(-old, old * 10**9, old + 1, old / 2 if abs(old) < 1e300 else 0, "12"))
    else:
        owner[key] = draw(odd_values)
    return value


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(pairs):
        yield value, key
        yield from _parts(part)


@st.composite
def json_bytes(draw: DrawFn, value: Any) -> bytes:
    """Draw the value as JSON, sometimes with a key twice, deeply nested or damaged."""
    text = json.dumps(value)
    kind = draw(st.integers(0, 11))
    if kind == 11 and text.startswith("{"):
        text = f'{{"format": 1, {text[1:]}'
    elif kind == 10:
        text = text.replace("null", "[" * 3000 + "]" * 3000, 1)
    elif kind == 9:
        text = text.replace(": ", f': {"9" * 5000}, "x": ', 1)
    return draw(mostly(text.encode("utf-8", "surrogatepass"), damaged_one_in=5))


# ---- PNG


@st.composite
def damaged_png(draw: DrawFn, data: bytes) -> bytes:
    """Draw a PNG whose chunks are wrong, but whose checksums are right."""
    chunks = _chunks(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(chunks) - 1))
        kind, body = chunks[at]
        choice = draw(one_of("header", "body", "copy", "remove", "add", "add", "add"))
        if choice == "header":
            chunks[0] = (b"IHDR", draw(_png_headers()))
        elif choice == "body":
            chunks[at] = (kind, draw(damaged_bytes(body)))
        elif choice == "copy":
            chunks.insert(at, draw(st.sampled_from(chunks)))
        elif choice == "remove" and len(chunks) > 1:
            del chunks[at]
        else:
            chunks.insert(at, draw(_odd_chunks()))
    return data[:8] + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


@st.composite
def _png_headers(draw: DrawFn) -> bytes:
    sides = one_of(0, 1, 7, 9000, 30000, 2**16, 2**31 - 1, 2**32 - 1)
    depth, colours = draw(one_of(0, 1, 2, 4, 8, 16, 32)), draw(one_of(0, 1, 2, 3, 4, 6, 7))
    return struct.pack(">II", draw(sides), draw(sides)) + bytes((depth, colours, 0, 0, draw(one_of(0, 1))))


@st.composite
def _odd_chunks(draw: DrawFn) -> tuple[bytes, bytes]:
    exif = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0" + struct.pack("<HH", draw(st.integers(0, 11)), 0) + bytes(4)
    kinds: dict[bytes, Sequence[SearchStrategy[bytes]]] = {
        b"eXIf": (st.just(exif), damaged_bytes(exif)),
        b"iCCP": tuple(st.just(b"junk\0\0" + zlib.compress(body)) for body in (bytes(range(200)), bytes(2**22))),
        b"zTXt": (st.just(b"bomb\0\0" + zlib.compress(bytes(2**24))),),
        b"tEXt": (st.just(b"Title\0\x1b[2J"),),
        b"tRNS": (random_bytes(1, 2, 6, 300),),
        b"PLTE": (random_bytes(3, 768, 5),),
        b"acTL": (one_of(*(struct.pack(">II", frames, 0) for frames in (0, 2, 2**31 - 1))),),
        b"fcTL": (random_bytes(26),),
        b"pHYs": (random_bytes(9),),
        b"gAMA": (st.just(bytes(4)),),
        b"IDAT": (st.just(zlib.compress(bytes(2**20))),),
    }
    kind = draw(st.sampled_from(sorted(kinds)))
    return kind, draw(st.one_of(*kinds[kind]))


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 8
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    return found


# ---- arrays, archives and tensors


def npy(header: str, body: bytes, *, version: int = 1) -> bytes:
    """Return a .npy file with any header."""
    text = header.encode("utf-8", "surrogatepass") + b"\n"
    return b"\x93NUMPY" + bytes((version, 0)) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + body


@st.composite
def odd_npy(draw: DrawFn) -> bytes:
    """Draw a .npy file that promises what it does not hold."""
    kinds = ("|u1", "<i8", "<f4", "|O", "<U4", "<U0", "|S0", "|V0", "<c8", "<M8[s]", "|b1", "(3,)u1", "x", "")
    sides = one_of("3", "-1", "0", "4294967296", "9" * 30, "True", "1.5", "'a'", "()", "1000000000000")
    descr = "[('a', '|u1'), ('b', '<U4')]" if draw(one_in(10)) else repr(draw(st.sampled_from(kinds)))
    shape = "".join(f"{side}, " for side in draw(st.lists(sides, max_size=4)))
    order = draw(one_of("False", "True", "0"))
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': ({shape}), }}"
    if draw(one_in(5)):
        header = draw(one_of("(" * 200, "{'descr': __import__('os')}", header[:-5], header + "'", "{\n  'a", "9L" * 50))
    return npy(header, draw(random_bytes(0, 1, 12, 64)), version=draw(one_of(1, 1, 2, 3)))


@st.composite
def zipped(draw: DrawFn, members: Sequence[tuple[str, bytes]]) -> bytes:
    """Draw a zip archive of the members, packed or not, whatever they are called."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", draw(one_of(zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, archive.compression)
    return held.getvalue()


@st.composite
def damaged_zip(draw: DrawFn, data: bytes) -> bytes:
    """Draw an archive with one member damaged or renamed, and right checksums."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(member.filename, archive.read(member)) for member in archive.infolist()]
    at = draw(st.integers(0, len(members) - 1))
    name, content = members[at]
    kind = draw(one_of("damage", "damage", "array", "add"))
    if kind == "array" and name.endswith(".npy"):
        members[at] = (name, draw(odd_npy()))
    elif kind == "add":
        members.append((draw(one_of("../../evil.npy", "/abs.npy", "x\x1b[2J.npy", "a" * 300, name)), content))
    else:
        members[at] = (name, draw(damaged_bytes(content)))
    return draw(mostly(draw(zipped(members)), damaged_one_in=5))


@st.composite
def damaged_safetensors(draw: DrawFn, data: bytes) -> bytes:
    """Draw a safetensors file with another header."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    text = draw(json_bytes(draw(damaged_json(header, most=1))))
    if draw(one_in(3)):
        text = text.replace(b'"F32"', draw(one_of(b'"F8_E4M3"', b'"F4"', b'"BOOL"', b'"C64"', b'"U64"', b'"X"')), 1)
    length = draw(one_of(0, 1, len(text) + 1, 2**31, 2**63, 2**64 - 1)) if draw(one_in(5)) else len(text)
    return length.to_bytes(8, "little") + text + body
