"""The ledger of a run: every charge, append-only and hash-chained, written before the release that it pays for.

One line of canonical JSON per entry: ``seq``, ``prev`` (the hash of the line before), ``kind``, ``payload`` and
``hash`` (SHA-256 of the rest). No clock and no randomness: a run that was interrupted and resumed leaves the same
bytes as one that was not. The chain shows edits, not forgeries: anyone who rewrites every line gets a valid chain with
another head, which is why checkpoints and certificates keep the head and the length too.

Each time a run writes its release, it appends a ``release`` entry with the hashes of what it releases. Format 1 had no
such entry; a ledger keeps the format that it was created with.

A hyper-parameter search has a ledger of its own, whose header names a ``price``. It holds one ``trial`` entry for all
releases that a trial may make, written before the trial starts (price ``composition``), or one ``selection`` entry for
the whole search (price ``best_of``), and no other charges.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpvision.errors import ArgumentError, DataError, PrivacyError, TamperError, brief, validation_message
from dpvision.privacy.mechanism import Adjacency, Event
from dpvision.storage.files import disk_errors, synced, write_atomically

FORMAT = 2
FIRST_FORMAT, COMMITTING_FORMAT = 1, 2
MOST_KINDS = 24  # of charges: composing takes a while for each, and no run has more than a few
MOST_SEARCH_KINDS = 512  # in the ledger of a search, whose trials may each have a noise of their own
MOST_RELEASES = 2**40  # of one kind in one trial: counts stay exact when they are added up
TRAINING = "training step"
_FIRST_PREV = "0" * 64
_HASHED_LINE = re.compile(rb'\{"hash":"([0-9a-f]{64})",(.*)', re.DOTALL)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_ENTRY_FIELDS = frozenset({"seq", "prev", "kind", "payload"})
_Text = Annotated[str, Field(min_length=1)]
_Whole = Annotated[int, Field(ge=0)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

Payload = dict[str, Any]


class _Payload(BaseModel):
    """Exactly these fields, of exactly these types."""

    model_config = ConfigDict(strict=True, extra="forbid")


class _Header(_Payload):
    """Public facts of the run, with any further ones; ``delta`` is None for a run without privacy."""

    model_config = ConfigDict(extra="allow")

    format: Annotated[int, Field(ge=FIRST_FORMAT, le=FORMAT)]
    run_id: _Text
    privacy_unit: _Text
    adjacency: Adjacency
    num_units: Annotated[int, Field(ge=1)]
    delta: Annotated[float, Field(gt=0, lt=1)] | None
    most_rows_per_owner: Annotated[int, Field(ge=1)] | None = None


class _Charge(_Payload):
    fork: _Whole
    step: _Whole
    sample_rate: float
    noise_multiplier: float
    purpose: _Text


class _Declaration(_Payload):
    what: _Text
    how: _Text


class _Fork(_Payload):
    fork: _Whole
    step: _Whole
    reason: _Text


class _Release(_Payload):
    """Hashes of the released weights and of what is needed to use them."""

    weights_sha256: _Digest
    config_sha256: _Digest
    data_sha256: _Digest


class _Planned(_Payload):
    """A kind of release of a trial, and how often it may be made."""

    sample_rate: float
    noise_multiplier: float
    purpose: _Text
    count: Annotated[int, Field(ge=1, le=MOST_RELEASES)]


class _Trial(_Payload):
    """Everything that one trial of a search, or its final run, may release."""

    trial: _Whole
    attempt: _Whole
    role: Literal["trial", "final"]
    releases: Annotated[list[_Planned], Field(min_length=1)]


class _Selection(_Payload):
    """What releasing only the best of a random number of trials costs: the most of one trial, and the distribution."""

    stopping: Literal["logarithmic", "geometric", "poisson"]
    mean_trials: Annotated[float, Field(ge=1)]
    releases: Annotated[list[_Planned], Field(min_length=1)]


_KINDS: dict[str, type[_Payload]] = {
    "header": _Header,
    "charge": _Charge,
    "declare": _Declaration,
    "fork": _Fork,
    "release": _Release,
    "trial": _Trial,
    "selection": _Selection,
}
_OF_SEARCHES = frozenset({"trial", "selection"})


@final
@dataclass(frozen=True)
class Entry:
    """One line of a ledger.

    Attributes:
        seq: its number, from zero.
        kind: "header", "charge", "declare", "fork" or "release"; in a search also "trial" or "selection".
        payload: its content.
        prev: hash of the line before.
        hash: its own hash.
    """

    seq: int
    kind: str
    payload: Payload
    prev: str
    hash: str


class _RuleBroken(Exception):
    """What is wrong with an entry; reader and writer turn it into their own error."""


@final
class _Book:
    """The state of a ledger: what its entries say, and what may follow them. Reader and writer share these rules."""

    def __init__(self) -> None:
        self.header: Payload | None = None
        self.forks: list[Payload] = []
        self.declared: list[Payload] = []
        self.released: Payload | None = None  # only while the release is the last entry
        self._charged: dict[tuple[int, str], dict[int, Event]] = {}
        self._events: dict[tuple[object, ...], Event] = {}
        self._counts: dict[Event, int] = {}
        self._trials: dict[tuple[int, int], Payload] = {}
        self._selected = False

    def admit(self, kind: str, payload: Payload) -> None:
        """Take the entry in, or raise ``_RuleBroken``."""
        _require(kind in _KINDS, f"kind must be one of {', '.join(_KINDS)}, got {kind!r}")
        _require((kind == "header") == (self.header is None), "the first entry must be the header, and no other")
        try:
            _KINDS[kind].model_validate(payload)
        except ValidationError as error:
            raise _RuleBroken(f"a {kind} breaks its rules: {validation_message(error, whole=kind)}") from error
        self.released = None
        if self.header is None:
            self.header = payload
        elif kind == "release":
            _require(self.header["format"] >= COMMITTING_FORMAT, "a ledger of format 1 has no release entries")
            self.released = payload
        elif kind == "charge":
            self._admit_charge(payload)
        elif kind in _OF_SEARCHES:
            self._admit_planned(kind, payload)
        elif kind == "declare":
            self.declared.append(payload)
        else:
            wanted = len(self.forks) + 1
            _require(payload["fork"] == wanted, f"the next fork must be number {wanted}, got {payload['fork']}")
            self.forks.append(payload)

    def _admit_charge(self, payload: Payload) -> None:
        """Take a charge in: of the present fork, with the next number of its purpose."""
        _require(self.header is not None and self.header["delta"] is not None, "without privacy nothing is charged")
        _require("price" not in (self.header or {}), "a search charges whole trials")
        fork, step, purpose = payload["fork"], payload["step"], payload["purpose"]
        _require(fork == len(self.forks), f"fork must be {len(self.forks)}, got {fork}")
        event = self._event(payload)
        known = event in self._counts or len(self._counts) < MOST_KINDS
        _require(known, f"more than {MOST_KINDS} kinds of releases are charged")
        steps = self._charged.setdefault((fork, purpose), {})
        # A fork may begin with zero, or where it left the run that it continues.
        first = {0} if not self.forks else {0, self.forks[-1]["step"]}
        allowed = {next(reversed(steps)) + 1} if steps else first
        wanted = " or ".join(map(str, sorted(allowed)))
        _require(step in allowed, f"the next {purpose} of fork {fork} must be number {wanted}, got {step}")
        steps[step] = event
        self._counts[event] = self._counts.get(event, 0) + 1

    def _admit_planned(self, kind: str, payload: Payload) -> None:
        """Take in what a trial, or a whole search, may release."""
        header = self.header or {}
        wanted = {"trial": "composition", "selection": "best_of"}[kind]
        _require(header["delta"] is not None, "without privacy nothing is charged")
        _require(header.get("price") == wanted, f"a {kind} is for a search whose price is {wanted}")
        if kind == "trial":
            number, attempt = payload["trial"], payload["attempt"]
            _require((number, attempt) not in self._trials, f"trial {number} was charged before")
            _require(attempt == 0 or (number, attempt - 1) in self._trials, f"attempt {attempt} follows no other")
            self._trials[number, attempt] = payload
        else:
            _require(not self._selected, "the search was charged before")
            self._selected = True
        for release in payload["releases"]:
            event = self._event(release)
            known = event in self._counts or len(self._counts) < MOST_SEARCH_KINDS
            _require(known, f"more than {MOST_SEARCH_KINDS} kinds of releases are charged")
            self._counts[event] = self._counts.get(event, 0) + release["count"]

    def _event(self, payload: Payload) -> Event:
        rate, noise, purpose = payload["sample_rate"], payload["noise_multiplier"], payload["purpose"]
        numbers = isinstance(rate, float) and isinstance(noise, float)  # pydantic takes whole numbers too
        _require(numbers, f"sample_rate and noise_multiplier must be numbers, got {rate!r} and {noise!r}")
        key = (rate, noise, purpose)
        if key not in self._events:
            try:
                self._events[key] = Event(sample_rate=rate, noise_multiplier=noise, purpose=purpose)
            except ArgumentError as error:
                raise _RuleBroken(str(error).rstrip(".")) from error
        return self._events[key]

    def charge_at(self, fork: int, purpose: str, step: int) -> Event | None:
        """Return what was charged there, or None."""
        return self._charged.get((fork, purpose), {}).get(step)

    def charges(self) -> tuple[tuple[Event, int], ...]:
        """Return every kind of release and how often it was charged."""
        return tuple(self._counts.items())

    def has_note(self, kind: str, payload: Payload) -> bool:
        """Return whether this note is already there; a release counts only as the last entry."""
        if kind == "release":
            return payload == self.released
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
    """A ledger that is open for writing, by one process at a time (the run folder is locked).

    Make one with ``Ledger.create``, open one with ``Ledger.open``.

    Guarantee: a charge that returned is on disk. A crash may leave one that was never used, never the reverse.

    The caller guarantees that each charge is written before its release is made, at what the release costs, and that
    what is released but not charged (names, metrics, settings) is declared and does not follow from private data.
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
        """Create a ledger.

        Args:
            path: the file, which must not exist.
            header: the public facts of the run; they are released.
            charges: what finding these facts has cost, such as a noisy count of units.

        Returns:
            The open ledger.

        Raises:
            ArgumentError: the file exists, or the header breaks a rule.

        Guarantee: header and ``charges`` are on disk together or not at all.
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
        """Open an existing ledger and check all of it. A torn last line is dropped: its noise never existed.

        Args:
            path: the file.
            at_least: (length, head) that a checkpoint remembers; a ledger without them was rolled back.
            before_growth: called once, before the first new entry is written.

        Returns:
            The open ledger.

        Raises:
            TamperError: an entry was changed, or the ledger was rolled back.
        """
        contents = _read(path)
        if at_least is not None:
            require_mark(contents.entries, length=at_least[0], head=at_least[1], path=path)
        # Also flushed when nothing is cut: a writer that was killed may have left its last line in the cache only.
        with disk_errors(f"write {path}"), synced(path) as descriptor:
            os.ftruncate(descriptor, contents.whole_bytes)
        return Ledger(path, contents, before_growth)

    def charge(self, event: Event, *, step: int, fork: int = 0) -> None:
        """Write what one release costs, before it is made.

        Args:
            event: the cost.
            step: the number of the release within its fork and purpose, from zero, without gaps.
            fork: the present fork.

        Raises:
            PrivacyError: the step was charged as another event, or an earlier write failed.
            ArgumentError: the numbers are out of order.

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
        """Append a ``declare`` (what, how), a ``fork`` (fork, step, reason) or a ``release`` (see ``commit_release``).

        The same note again appends nothing; a release counts as the same only if it is the last entry.

        Args:
            kind: "declare", "fork" or "release".
            payload: its fields.

        Raises:
            ArgumentError: another kind, or fields that break a rule.
        """
        self._require_whole()
        if kind in ("header", "charge", *_OF_SEARCHES):
            raise ArgumentError(f"a {kind} must be recorded with Ledger.create or Ledger.charge, not Ledger.note.")
        if not self._book.has_note(kind, payload):
            self._append(kind, payload)

    def charge_trial(
        self, releases: Sequence[tuple[Event, int]], *, trial: int, attempt: int = 0, final_run: bool = False
    ) -> None:
        """Write everything that a trial of a search may release, before the trial starts.

        Args:
            releases: every kind of release of the trial and the most often that it is made.
            trial: the number of the trial.
            attempt: 0, or one more than the last: a trial that could not be continued and starts again.
            final_run: whether it is the run with the chosen settings.

        Raises:
            ArgumentError: the ledger is not that of a search by composition, or this attempt was charged before.

        Guarantee: on disk when this returns. Nothing is taken back: what a trial does not use is over-counted.
        """
        self._require_whole()
        role = "final" if final_run else "trial"
        payload = {"trial": trial, "attempt": attempt, "role": role, "releases": release_list(releases)}
        self._append("trial", payload)

    def charge_selection(self, releases: Sequence[tuple[Event, int]], *, stopping: str, mean_trials: float) -> None:
        """Write what releasing only the best of a random number of trials costs, before the first one starts.

        Args:
            releases: every kind of release of one trial and the most often that it is made.
            stopping: the distribution of the number of trials.
            mean_trials: its mean.

        Raises:
            ArgumentError: the ledger is not that of such a search, or it was charged before.

        Guarantee: on disk when this returns.
        """
        self._require_whole()
        payload = {"stopping": stopping, "mean_trials": float(mean_trials), "releases": release_list(releases)}
        self._append("selection", payload)

    def commit_release(self, *, weights_sha256: str, config_sha256: str, data: Mapping[str, Any]) -> None:
        """Append the hashes of what is about to be released; the certificate is built after this.

        Args:
            weights_sha256: SHA-256 of the weights file, in hex.
            config_sha256: SHA-256 of the released configuration, which holds model and pixel constants.
            data: the certificate's description of the data: class names, image shape and so on.

        Raises:
            PrivacyError: an earlier write failed.

        Guarantee: on disk when this returns. Appends nothing if the last entry commits to the same files, or if the
        ledger has format 1, which has no such entry.
        """
        if self.header["format"] >= COMMITTING_FORMAT:
            payload = release_payload(weights_sha256=weights_sha256, config_sha256=config_sha256, data=data)
            self.note("release", payload)

    def has_charge(self, *, step: int, fork: int = 0, purpose: str = TRAINING) -> bool:
        """Return whether this release has been charged."""
        return self._book.charge_at(fork, purpose, step) is not None

    def charges(self) -> tuple[tuple[Event, int], ...]:
        """Return every kind of release and how often it was charged, over all forks."""
        return self._book.charges()

    @property
    def header(self) -> Payload:
        """The public facts of entry 0."""
        return dict(self._book.header or {})

    @property
    def forks(self) -> int:
        """Number of forks; charges go to the fork of this number."""
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
        # After an error from here on, only reading the file again can tell what is on disk.
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
            raise PrivacyError(f"an earlier write to {self._path} failed. Open the ledger again before continuing.")


def read_ledger(path: Path) -> tuple[Entry, ...]:
    """Read and check all entries of a ledger.

    Args:
        path: the file.

    Returns:
        The entries, from the header on.

    Raises:
        TamperError: names the line and the cause.
    """
    contents = _read(path)
    if contents.torn:
        raise TamperError(f"{path}, line {len(contents.entries) + 1}: it is cut off.")
    return contents.entries


def charges_of(entries: Iterable[Entry]) -> tuple[tuple[Event, int], ...]:
    """Return every kind of release in checked entries, and how often it was charged."""
    book = _Book()
    for entry in entries:
        book.admit(entry.kind, entry.payload)
    return book.charges()


def release_payload(*, weights_sha256: str, config_sha256: str, data: Mapping[str, Any]) -> Payload:
    """Return the payload of a ``release`` entry; see ``Ledger.commit_release``."""
    described = hashlib.sha256(_ENCODER.encode(data).encode()).hexdigest()
    return {"weights_sha256": weights_sha256, "config_sha256": config_sha256, "data_sha256": described}


def committed_release(entries: Sequence[Entry]) -> Payload | None:
    """Return the payload of the last entry if it is a release; None if the run continued after its last release."""
    return entries[-1].payload if entries and entries[-1].kind == "release" else None


def require_mark(entries: tuple[Entry, ...], *, length: int, head: str, path: Path) -> None:
    """Raise ``TamperError`` if a ledger lacks an entry that is known from elsewhere, by length and head."""
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
    typed = type(values["seq"]) is int and isinstance(values["kind"], str) and isinstance(values["payload"], dict)
    _require(typed, "seq, kind and payload must be a whole number, a text and an object")
    return Entry(values["seq"], values["kind"], values["payload"], values["prev"], claimed)


def _charge_payload(event: Event, *, step: int, fork: int) -> Payload:
    rate, noise = float(event.sample_rate), float(event.noise_multiplier)
    return {"fork": fork, "step": step, "sample_rate": rate, "noise_multiplier": noise, "purpose": event.purpose}


def release_list(releases: Sequence[tuple[Event, int]]) -> list[Payload]:
    """Return releases as plain values; ``planned_releases`` reads them back."""
    return [
        {
            "sample_rate": float(event.sample_rate),
            "noise_multiplier": float(event.noise_multiplier),
            "purpose": event.purpose,
            "count": count,
        }
        for event, count in releases
    ]


def planned_releases(payload: Mapping[str, Any]) -> tuple[tuple[Event, int], ...]:
    """Return the releases that a ``trial`` or ``selection`` entry covers, and how often each may be made."""
    return tuple(
        (
            Event(sample_rate=each["sample_rate"], noise_multiplier=each["noise_multiplier"], purpose=each["purpose"]),
            each["count"],
        )
        for each in payload["releases"]
    )


def _make_entry(seq: int, kind: str, payload: Payload, prev: str) -> tuple[Entry, bytes]:
    """Return an entry and its line."""
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
        raise TamperError(f"{path} has {size} bytes instead of {expected_size}: another process changed it.")
    written = os.write(descriptor, line)
    if written != len(line):
        raise PrivacyError(f"can't write {path}: only {written} of {len(line)} bytes went in. Free some space.")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise _RuleBroken(message)
