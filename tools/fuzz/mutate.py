"""Ways to spoil good input: bytes, JSON values, and the parts of PNG, npy, zip and safetensors files."""

from __future__ import annotations

import copy
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

from tools.fuzz.guard import CANARY

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


def odd_value(rng: Random) -> Any:
    """Something that a field is hardly made for."""
    simple: list[Any] = [None, True, False, 0, -1, 1, 2, 0.5, 1e308, -1e308, 5e-324, 1e-9, 10**6, 2**31, 2**63, 2**64]
    wild: list[Any] = [10**400, float("nan"), float("inf"), [], {}, [[]], {"": {}}, [None] * 50, nested(50)]
    return copy.deepcopy(rng.choice([*simple, *wild, *ODD_TEXTS]))


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def spoiled_bytes(rng: Random, data: bytes, *, times: int = 3) -> bytes:
    """The bytes after a few small accidents."""
    for _ in range(min(times, rng.choice((1, 1, 1, 2, 3, 4)))):
        data = rng.choice(_ACCIDENTS)(rng, data)
    return data


def _flip(rng: Random, data: bytes) -> bytes:
    found = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 4, 16))):
        found[_place(rng, len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def _cut(rng: Random, data: bytes) -> bytes:
    return data[: _place(rng, len(data) + 1)]


def _insert(rng: Random, data: bytes) -> bytes:
    at = _place(rng, len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice((1, 4, 64, 1024))) + data[at:]


def _remove(rng: Random, data: bytes) -> bytes:
    at = _place(rng, len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 8, 100)) :]


def _repeat(rng: Random, data: bytes) -> bytes:
    at = _place(rng, len(data) + 1)
    piece = data[at : at + rng.choice((4, 32, 512))]
    return data[:at] + piece * rng.choice((2, 3, 50)) + data[at:]


def _number(rng: Random, data: bytes) -> bytes:
    """An extreme number somewhere: most often in the header."""
    width = rng.choice((1, 2, 4, 8))
    raw = (rng.choice(_EXTREMES) % (1 << (8 * width))).to_bytes(width, rng.choice(("little", "big")))
    at = _place(rng, max(1, len(data) - width + 1))
    return data[:at] + raw + data[at + width :]


def _disguise(rng: Random, data: bytes) -> bytes:
    other = rng.choice(DISGUISES)
    return rng.choice((other, other + data, data[: len(data) // 2] + other, data + other))


def _place(rng: Random, size: int) -> int:
    """A position, every other time within the first 64 bytes."""
    return rng.randrange(min(size, 64)) if size and rng.random() < 0.5 else rng.randrange(max(1, size))


_ACCIDENTS: tuple[Callable[[Random, bytes], bytes], ...] = (
    _flip,
    _flip,
    _cut,
    _insert,
    _remove,
    _repeat,
    _number,
    _number,
    _disguise,
)


def spoiled_json(rng: Random, value: Any) -> Any:
    """The value with one of its parts replaced, removed, renamed or added."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return odd_value(rng)
    owner, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, dict):
        owner[rng.choice(ODD_TEXTS)] = owner.pop(key)
    elif kind == 2 and isinstance(owner, dict):
        owner[rng.choice(ODD_TEXTS)] = odd_value(rng)
    elif kind == 3 and isinstance(owner[key], (int, float)) and not isinstance(owner[key], bool):
        old = owner[key]
        owner[key] = rng.choice((-old, old * 10**9, old + 1, old / 2 if abs(old) < 1e300 else 0, "12"))
    else:
        owner[key] = odd_value(rng)
    return value


def _places(value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(pairs):
        yield value, key
        yield from _places(part)


def json_text(rng: Random, value: Any) -> bytes:
    """The value as JSON, now and then with a key twice, deeply nested or cut."""
    text = json.dumps(value)
    kind = rng.randrange(12)
    if kind == 0 and text.startswith("{"):
        text = f'{{"format": 1, {text[1:]}'
    elif kind == 1:
        text = text.replace("null", "[" * 3000 + "]" * 3000, 1)
    elif kind == 2:
        text = text.replace(": ", f': {"9" * 5000}, "x": ', 1)
    data = text.encode("utf-8", "surrogatepass")
    return spoiled_bytes(rng, data) if rng.random() < 0.2 else data


def spoiled_png(rng: Random, data: bytes) -> bytes:
    """A PNG whose chunks are wrong, but whose checksums are right."""
    chunks = _chunks(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(chunks))
        kind, body = chunks[at]
        choice = rng.randrange(7)
        if choice == 0:
            size = struct.pack(">II", *(rng.choice((0, 1, 7, 9000, 30000, 2**16, 2**31 - 1, 2**32 - 1)) for _ in "wh"))
            depth = bytes(
                (rng.choice((0, 1, 2, 4, 8, 16, 32)), rng.choice((0, 1, 2, 3, 4, 6, 7)), 0, 0, rng.choice((0, 1)))
            )
            chunks[0] = (b"IHDR", size + depth)
        elif choice == 1:
            chunks[at] = (kind, spoiled_bytes(rng, body))
        elif choice == 2:
            chunks.insert(at, chunks[rng.randrange(len(chunks))])
        elif choice == 3 and len(chunks) > 1:
            del chunks[at]
        else:
            chunks.insert(at, _odd_chunk(rng))
    whole = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return data[:8] + whole


def _odd_chunk(rng: Random) -> tuple[bytes, bytes]:
    exif = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0" + struct.pack("<HH", rng.randrange(12), 0) + bytes(4)
    return rng.choice(
        (
            (b"eXIf", exif),
            (b"eXIf", spoiled_bytes(rng, exif)),
            (b"iCCP", b"junk\0\0" + zlib.compress(rng.randbytes(200))),
            (b"iCCP", b"junk\0\0" + zlib.compress(bytes(2**22))),
            (b"zTXt", b"bomb\0\0" + zlib.compress(bytes(2**24))),
            (b"tEXt", b"Title\0\x1b[2J"),
            (b"tRNS", rng.randbytes(rng.choice((1, 2, 6, 300)))),
            (b"PLTE", rng.randbytes(rng.choice((3, 768, 5)))),
            (b"acTL", struct.pack(">II", rng.choice((0, 2, 2**31 - 1)), 0)),
            (b"fcTL", rng.randbytes(26)),
            (b"pHYs", rng.randbytes(9)),
            (b"gAMA", bytes(4)),
            (b"IDAT", zlib.compress(bytes(2**20))),
        )
    )


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 8
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    return found


def npy(header: str, body: bytes, *, version: int = 1) -> bytes:
    """A .npy file with any header."""
    text = header.encode("utf-8", "surrogatepass") + b"\n"
    return b"\x93NUMPY" + bytes((version, 0)) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + body


def odd_npy(rng: Random) -> bytes:
    """A .npy file that promises what it does not hold."""
    kinds = ("|u1", "<i8", "<f4", "|O", "<U4", "<U0", "|S0", "|V0", "<c8", "<M8[s]", "|b1", "(3,)u1", "x", "")
    big = ("3", "-1", "0", "4294967296", "9" * 30, "True", "1.5", "'a'", "()", "1000000000000")
    kind: Any = rng.choice(kinds)
    descr = repr(kind) if rng.random() < 0.9 else "[('a', '|u1'), ('b', '<U4')]"
    shape = ", ".join(rng.choice(big) for _ in range(rng.randrange(5)))
    header = f"{{'descr': {descr}, 'fortran_order': {rng.choice(('False', 'True', '0'))}, 'shape': ({shape},), }}"
    if shape == "":
        header = header.replace("(,)", "()")
    if rng.random() < 0.2:
        header = rng.choice(("(" * 200, "{'descr': __import__('os')}", header[:-5], header + "'", "{\n  'a", "9L" * 50))
    body = rng.randbytes(rng.choice((0, 1, 12, 64)))
    return npy(header, body, version=rng.choice((1, 1, 2, 3)))


def zipped(rng: Random, members: list[tuple[str, bytes]], *, packed: bool | None = None) -> bytes:
    """Members in a zip archive, whatever they are called."""
    packed = rng.random() < 0.5 if packed is None else packed
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, archive.compression)
    return held.getvalue()


def unzipped(data: bytes) -> list[tuple[str, bytes]]:
    """The members of an archive, in order."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(member.filename, archive.read(member)) for member in archive.infolist()]


def respoiled_zip(rng: Random, data: bytes) -> bytes:
    """An archive with one member spoiled or renamed, and right checksums."""
    members = unzipped(data)
    at = rng.randrange(len(members))
    name, content = members[at]
    kind = rng.randrange(4)
    if kind == 0 and name.endswith(".npy"):
        members[at] = (name, odd_npy(rng))
    elif kind == 1:
        members.append((rng.choice(("../../evil.npy", "/abs.npy", name, "x\x1b[2J.npy", "a" * 300)), content))
    else:
        members[at] = (name, spoiled_bytes(rng, content))
    data = zipped(rng, members)
    return spoiled_bytes(rng, data, times=1) if rng.random() < 0.2 else data


def spoiled_safetensors(rng: Random, data: bytes) -> bytes:
    """A safetensors file with another header."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    text = json_text(rng, spoiled_json(rng, header))
    if rng.random() < 0.3:
        kinds = ('"F8_E4M3"', '"F4"', '"BOOL"', '"C64"', '"U64"', '"X"')
        text = text.replace(b'"F32"', rng.choice(kinds).encode(), 1)
    length = len(text) if rng.random() < 0.8 else rng.choice((0, 1, len(text) + 1, 2**31, 2**63, 2**64 - 1))
    return length.to_bytes(8, "little") + text + body
