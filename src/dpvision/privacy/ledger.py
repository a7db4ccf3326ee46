"""The bill of a run: append-only, hash-chained, written ahead of every release.

One line of canonical JSON per entry: ``seq``, ``prev`` (the hash of the line before), ``kind``, ``payload`` and
``hash`` (SHA-256 of the rest). No clock and no randomness: a run that was interrupted and resumed leaves the same
bytes as one that was not. The chain shows edits, not forgeries: whoever rewrites every line gets a valid chain with
another head, which is why checkpoints and certificates keep the head and the length too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from dpvision.errors import ArgumentError, DataError, PrivacyError, TamperError, brief
from dpvision.privacy.mechanism import ADJACENCIES, Event
from dpvision.storage.files import disk_errors, synced, write_atomically

FORMAT = 1
TRAINING = "training step"
_FIRST_PREV = "0" * 64
_HASHED_LINE = re.compile(rb'\{"hash":"([0-9a-f]{64})",(.*)', re.DOTALL)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_ENTRY_FIELDS = frozenset({"seq", "prev", "kind", "payload"})
_HEADER_FIELDS = frozenset({"format", "run_id", "privacy_unit", "adjacency", "num_units", "delta"})
_FIELDS = {
    "charge": frozenset({"fork", "step", "sample_rate", "noise_multiplier", "purpose"}),
    "declare": frozenset({"what", "how"}),
    "fork": frozenset({"fork", "step", "reason"}),
}

Payload = dict[str, Any]


@final
@dataclass(frozen=True)
class Entry:
    """One line of a ledger."""

    seq: int
    kind: str
    payload: Payload
    prev: str
    hash: str


class _RuleBroken(Exception):
    """What is wrong with an entry, for the reader or the writer to word as its own error."""


@final
class _Book:
    """What the entries so far say, and what may follow them. Reader and writer obey the same rules here."""

    def __init__(self) -> None:
        self.header: Payload | None = None
        self.forks: list[Payload] = []
        self.declared: list[Payload] = []
        self._charged: dict[tuple[int, str], dict[int, Event]] = {}
        self._events: dict[tuple[object, ...], Event] = {}
        self._counts: dict[Event, int] = {}

    def admit(self, kind: str, payload: Payload) -> None:
        """Take the entry in, or raise ``_RuleBroken``."""
        if kind == "header":
            self._admit_header(payload)
            return
        _require(kind in _FIELDS, f"kind must be header, {', '.join(_FIELDS)}, got {kind!r}")
        _require(self.header is not None, "the first entry must be the header")
        fields = ", ".join(sorted(_FIELDS[kind]))
        _require(payload.keys() == _FIELDS[kind], f"a {kind} has the fields {fields}, got {', '.join(sorted(payload))}")
        {"charge": self._admit_charge, "declare": self._admit_declaration, "fork": self._admit_fork}[kind](payload)

    def _admit_header(self, payload: Payload) -> None:
        _require(self.header is None, "there is one header, at the beginning")
        missing = _HEADER_FIELDS - payload.keys()
        _require(not missing, f"the header lacks {', '.join(sorted(missing))}")
        layout, num_units, delta = payload["format"], payload["num_units"], payload["delta"]
        _require(_is_whole(layout) and layout == FORMAT, f"format must be {FORMAT}, got {layout!r}")
        _require_texts(payload, "run_id", "privacy_unit", "adjacency")
        adjacency = payload["adjacency"]
        _require(adjacency in ADJACENCIES, f"adjacency must be one of {', '.join(ADJACENCIES)}, got {adjacency!r}")
        _require(_is_whole(num_units, least=1), f"num_units must be a whole number >= 1, got {num_units!r}")
        if delta is not None:  # null: a run without privacy
            _require(isinstance(delta, float) and 0 < delta < 1, f"delta must lie between 0 and 1, got {delta!r}")
        most_rows = payload.get("most_rows_per_owner")
        bounded = most_rows is None or _is_whole(most_rows, least=1)
        _require(bounded, f"most_rows_per_owner must be a whole number >= 1, got {most_rows!r}")
        self.header = payload

    def _admit_charge(self, payload: Payload) -> None:
        _require(self.header is not None and self.header["delta"] is not None, "without privacy nothing is charged")
        fork, step, purpose = payload["fork"], payload["step"], payload["purpose"]
        _require(_is_whole(fork) and fork == len(self.forks), f"fork must be {len(self.forks)}, got {fork!r}")
        _require(_is_whole(step), f"step must be a whole number >= 0, got {step!r}")
        event = self._event(payload)
        steps = self._charged.setdefault((fork, purpose), {})
        allowed = {next(reversed(steps)) + 1} if steps else self._first_steps()
        wanted = " or ".join(map(str, sorted(allowed)))
        _require(step in allowed, f"the next {purpose} of fork {fork} must be number {wanted}, got {step}")
        steps[step] = event
        self._counts[event] = self._counts.get(event, 0) + 1

    def _event(self, payload: Payload) -> Event:
        rate, noise = payload["sample_rate"], payload["noise_multiplier"]
        numbers = isinstance(rate, float) and isinstance(noise, float)
        _require(numbers, f"sample_rate and noise_multiplier must be numbers, got {rate!r} and {noise!r}")
        _require_texts(payload, "purpose")
        key = (rate, noise, payload["purpose"])
        if key not in self._events:
            try:
                self._events[key] = Event(sample_rate=rate, noise_multiplier=noise, purpose=payload["purpose"])
            except ArgumentError as error:
                raise _RuleBroken(str(error).rstrip(".")) from error
        return self._events[key]

    def _first_steps(self) -> set[int]:
        """Numbers with which a fork may begin: zero, or where it left the run that it continues."""
        return {0} if not self.forks else {0, self.forks[-1]["step"]}

    def _admit_declaration(self, payload: Payload) -> None:
        _require_texts(payload, "what", "how")
        self.declared.append(payload)

    def _admit_fork(self, payload: Payload) -> None:
        fork, step, wanted = payload["fork"], payload["step"], len(self.forks) + 1
        _require(_is_whole(fork) and fork == wanted, f"the next fork must be number {wanted}, got {fork!r}")
        _require(_is_whole(step), f"step must be a whole number >= 0, got {step!r}")
        _require_texts(payload, "reason")
        self.forks.append(payload)

    def charge_at(self, fork: int, purpose: str, step: int) -> Event | None:
        """What was charged there, if anything."""
        return self._charged.get((fork, purpose), {}).get(step)

    def charges(self) -> tuple[tuple[Event, int], ...]:
        """Every kind of release and how often it was charged."""
        return tuple(self._counts.items())

    def has_note(self, kind: str, payload: Payload) -> bool:
        """Whether this very note is already there."""
        return payload in {"declare": self.declared, "fork": self.forks}.get(kind, [])


@final
@dataclass(frozen=True)
class _Contents:
    """A ledger file as read: its whole lines, their rules, and whether half a line follows."""

    entries: tuple[Entry, ...]
    book: _Book
    whole_bytes: int
    torn: bool


@final
class Ledger:
    """A ledger that is open for writing. One process at a time: the run folder's lock sees to that.

    Guarantee: a charge that returned is on disk. A crash may leave one that was never used, never the reverse.
    """

    def __init__(self, path: Path, contents: _Contents, before_growth: Callable[[], None] | None = None) -> None:
        self._path = path
        self._book = contents.book
        self._hashes = [entry.hash for entry in contents.entries]
        self._size = contents.whole_bytes
        self._before_growth = before_growth
        self._broken = False

    @staticmethod
    def create(path: Path, header: Payload, *, charges: Iterable[Event] = ()) -> Ledger:
        """A new ledger whose first entry is ``header``: public facts only, because it is released.

        Guarantee: ``charges``, what the facts of the header cost, are on disk together with it or not at all.
        """
        if path.exists():
            raise ArgumentError(f"{path} exists already. Resume that run, or choose another folder.")
        book, entries, content, prev = _Book(), list[Entry](), b"", _FIRST_PREV
        first = [("charge", _charge_payload(event, step=0, fork=0)) for event in charges]
        for seq, (kind, payload) in enumerate([("header", {"format": FORMAT, **header}), *first]):
            _refuse_misuse(book, kind, payload)
            entry, line = _make_entry(seq, kind, payload, prev)
            entries.append(entry)
            content, prev = content + line, entry.hash
        with disk_errors(f"write {path}"):
            write_atomically(path, content)
        return Ledger(path, _Contents(tuple(entries), book, len(content), torn=False))

    @staticmethod
    def open(
        path: Path, *, at_least: tuple[int, str] | None = None, before_growth: Callable[[], None] | None = None
    ) -> Ledger:
        """An existing ledger, checked whole. A torn last line is dropped: its noise never existed.

        ``at_least`` is the (length, head) that somebody remembers; a ledger without them was rolled back.
        ``before_growth`` is called once, before the first new entry is written.
        """
        contents = _read(path)
        if at_least is not None:
            require_mark(contents.entries, length=at_least[0], head=at_least[1], path=path)
        # Also flushed when nothing is cut: a writer that was killed may have left its last line in the cache only.
        with disk_errors(f"write {path}"), synced(path) as descriptor:
            os.ftruncate(descriptor, contents.whole_bytes)
        return Ledger(path, contents, before_growth)

    def charge(self, event: Event, *, step: int, fork: int = 0) -> None:
        """Write what one release costs, before it is made. ``step`` counts within its fork and purpose.

        Guarantee: on disk when this returns. The exact replay of a charged step appends nothing, since with the same
        keys it releases nothing new; another event for the same step is refused.
        """
        self._require_whole()
        known = self._book.charge_at(fork, event.purpose, step)
        if known is None:
            self._append("charge", _charge_payload(event, step=step, fork=fork))
        elif known != event:
            raise PrivacyError(
                f"step {step} of fork {fork} was charged as {known}, now it is {event}: a changed mechanism composes. "
                "Note a fork first."
            )

    def note(self, kind: str, payload: Payload) -> None:
        """Chain a ``declare`` (what, how) or a ``fork`` (fork, step, reason); the same note again appends nothing."""
        self._require_whole()
        if kind in ("header", "charge"):
            raise ArgumentError(f"a {kind} is no note. Use Ledger.create or Ledger.charge.")
        if not self._book.has_note(kind, payload):
            self._append(kind, payload)

    def has_charge(self, *, step: int, fork: int = 0, purpose: str = TRAINING) -> bool:
        """Whether this release has been charged."""
        return self._book.charge_at(fork, purpose, step) is not None

    def charges(self) -> tuple[tuple[Event, int], ...]:
        """Every kind of release and how often it was charged, over all forks."""
        return self._book.charges()

    @property
    def header(self) -> Payload:
        """The public facts of entry 0."""
        return dict(self._book.header or {})

    @property
    def forks(self) -> int:
        """How many forks were noted; charges go to the fork of this number."""
        return len(self._book.forks)

    @property
    def head(self) -> str:
        """Hash of the last entry, in hex."""
        return self._hashes[-1]

    @property
    def length(self) -> int:
        """Number of entries, the header included."""
        return len(self._hashes)

    @property
    def mark(self) -> Payload:
        """Length and head, for a checkpoint or a certificate to remember."""
        return {"length": self.length, "head": self.head}

    def _append(self, kind: str, payload: Payload) -> None:
        _refuse_misuse(self._book, kind, payload)
        entry, line = _make_entry(self.length, kind, payload, self.head)
        # Anything that goes wrong from here on leaves it open what is on disk: only reading it anew can tell.
        self._broken = True
        if self._before_growth is not None:
            self._before_growth()
            self._before_growth = None
        with disk_errors(f"write {self._path}"), synced(self._path) as descriptor:
            _append_line(descriptor, line, path=self._path, expected_size=self._size)
        self._size += len(line)
        self._hashes.append(entry.hash)
        self._broken = False

    def _require_whole(self) -> None:
        if self._broken:
            raise PrivacyError(f"an earlier write to {self._path} failed. Open the ledger again before going on.")


def read_ledger(path: Path) -> tuple[Entry, ...]:
    """All entries, checked one by one; ``TamperError`` names the line and the cause."""
    contents = _read(path)
    if contents.torn:
        raise TamperError(f"{path}, line {len(contents.entries) + 1}: it is cut off.")
    return contents.entries


def charges_of(entries: Iterable[Entry]) -> tuple[tuple[Event, int], ...]:
    """Every kind of release in checked entries, and how often it was charged."""
    book = _Book()
    for entry in entries:
        book.admit(entry.kind, entry.payload)
    return book.charges()


def require_mark(entries: tuple[Entry, ...], *, length: int, head: str, path: Path) -> None:
    """Refuse a ledger that does not contain what somebody remembers of it."""
    if len(entries) < length:
        raise TamperError(
            f"{path} was rolled back: {len(entries)} of {length} known entries are left. Put the longer ledger back."
        )
    if length < 1 or entries[length - 1].hash != head:
        raise TamperError(
            f"{path} was rolled back or replaced: entry {length - 1} is not the known one. Put the old ledger back."
        )


def _read(path: Path) -> _Contents:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise DataError(f"{path} must be an ordinary file.")
    with disk_errors(f"read {path}"):
        content = path.read_bytes()
    *lines, rest = content.split(b"\n")
    book, entries, prev = _Book(), list[Entry](), _FIRST_PREV
    for seq, line in enumerate(lines):
        try:
            entry = _parse_line(line)
            _require(entry.prev == prev, "it does not follow the line before: lines were removed, added or moved")
            _require(entry.seq == seq, f"seq must be {seq}, got {entry.seq}")
            book.admit(entry.kind, entry.payload)
        except _RuleBroken as error:
            raise TamperError(f"{path}, line {seq + 1}: {brief(error, most=300)}.") from error
        entries.append(entry)
        prev = entry.hash
    if not entries:
        raise TamperError(f"{path}: no whole line is left, not even the header.")
    return _Contents(tuple(entries), book, len(content) - len(rest), torn=bool(rest))


def _parse_line(line: bytes) -> Entry:
    match = _HASHED_LINE.fullmatch(line)
    if match is None:
        raise _RuleBroken("it is not an entry of a ledger")
    claimed, body = match[1].decode(), b"{" + match[2]
    _require(hashlib.sha256(body).hexdigest() == claimed, "it was changed: its hash does not fit its content")
    try:
        values: Any = json.loads(body)
        # Exactly the bytes that we would write: no second key of the same name, no NaN, no other spelling.
        canonical = _ENCODER.encode(values).encode() == body
    except (ValueError, RecursionError) as error:
        raise _RuleBroken("it is not canonical JSON with finite numbers") from error
    _require(canonical, "it is not canonical JSON")
    _require(values.keys() == _ENTRY_FIELDS, f"an entry has the fields hash, {', '.join(sorted(_ENTRY_FIELDS))}")
    typed = _is_whole(values["seq"]) and isinstance(values["kind"], str) and isinstance(values["payload"], dict)
    _require(typed, "seq, kind and payload must be a whole number, a text and an object")
    return Entry(values["seq"], values["kind"], values["payload"], values["prev"], claimed)


def _charge_payload(event: Event, *, step: int, fork: int) -> Payload:
    rate, noise = float(event.sample_rate), float(event.noise_multiplier)
    return {"fork": fork, "step": step, "sample_rate": rate, "noise_multiplier": noise, "purpose": event.purpose}


def _make_entry(seq: int, kind: str, payload: Payload, prev: str) -> tuple[Entry, bytes]:
    """An entry and its line."""
    body = _ENCODER.encode({"seq": seq, "kind": kind, "payload": payload, "prev": prev}).encode()
    own_hash = hashlib.sha256(body).hexdigest()
    line = b'{"hash":"' + own_hash.encode() + b'",' + body[1:] + b"\n"
    return Entry(seq, kind, payload, prev, own_hash), line


def _refuse_misuse(book: _Book, kind: str, payload: Payload) -> None:
    try:
        _ENCODER.encode(payload)
        book.admit(kind, payload)
    except (_RuleBroken, TypeError, ValueError) as error:
        raise ArgumentError(f"the ledger can't take this {kind}: {error}.") from error


def _append_line(descriptor: int, line: bytes, *, path: Path, expected_size: int) -> None:
    size = os.fstat(descriptor).st_size
    if size != expected_size:
        raise TamperError(f"{path} has {size} bytes instead of {expected_size}: somebody else changed it.")
    written = os.write(descriptor, line)
    if written != len(line):
        raise PrivacyError(f"can't write {path}: only {written} of {len(line)} bytes went in. Free some space.")


def _is_whole(value: object, *, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise _RuleBroken(message)


def _require_texts(payload: Payload, *names: str) -> None:
    for name in names:
        value = payload[name]
        _require(isinstance(value, str) and bool(value), f"{name} must be a text, got {value!r}")
