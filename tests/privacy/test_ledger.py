"""The bill of a run: written ahead, chained, checked entry by entry (PITFALLS 11, 28, 29 as far as the ledger goes)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dpvision.errors import ArgumentError, DataError, DPVisionError, PrivacyError, TamperError
from dpvision.privacy.ledger import FORMAT, MOST_KINDS, Ledger, charges_of, committed_release, read_ledger
from dpvision.privacy.mechanism import Event

HEADER = {"run_id": "r1", "privacy_unit": "example", "adjacency": "add_remove", "num_units": 1000, "delta": 1e-4}
STEP = Event(sample_rate=0.1, noise_multiplier=1.5)
STATISTICS = Event(sample_rate=1.0, noise_multiplier=8.0, purpose="normalisation statistics")
CHARGE = {"fork": 0, "step": 0, "sample_rate": 0.1, "noise_multiplier": 1.5, "purpose": "training step"}


def made(path: Path, *, steps: int = 5) -> Ledger:
    ledger = Ledger.create(path, HEADER)
    ledger.note("declare", {"what": "test split", "how": "public"})
    ledger.charge(STATISTICS, step=0)
    for step in range(steps):
        ledger.charge(STEP, step=step)
    return ledger


def forge(path: Path, entries: list[tuple[str, dict[str, Any]]], *, seqs: list[int] | None = None) -> None:
    """A ledger with a perfect chain, whatever it says: only the checks of the entries can refuse it."""
    prev, lines = "0" * 64, []
    for number, (kind, payload) in enumerate(entries):
        seq = number if seqs is None else seqs[number]
        body = {"kind": kind, "payload": payload, "prev": prev, "seq": seq}
        prev = hashlib.sha256(canonical(body)).hexdigest()
        lines.append(canonical({**body, "hash": prev}) + b"\n")
    path.write_bytes(b"".join(lines))


def canonical(values: dict[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def header(**changes: Any) -> tuple[str, dict[str, Any]]:
    return "header", {"format": FORMAT, **HEADER, **changes}


def charge(**changes: Any) -> tuple[str, dict[str, Any]]:
    return "charge", {**CHARGE, **changes}


def test_charges_are_counted_by_event(tmp_path: Path) -> None:
    ledger = made(tmp_path / "ledger", steps=5)
    assert dict(ledger.charges()) == {STATISTICS: 1, STEP: 5}
    assert ledger.length == 8
    entries = read_ledger(tmp_path / "ledger")
    assert charges_of(entries) == ledger.charges()
    assert entries[-1].hash == ledger.head
    assert ledger.mark == {"length": 8, "head": ledger.head}
    assert ledger.header["num_units"] == 1000


def test_what_the_header_costs_is_written_in_one_piece_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr("dpvision.privacy.ledger.write_atomically", lambda path, content: written.append(content))
    ledger = Ledger.create(tmp_path / "ledger", HEADER, charges=[STATISTICS])
    monkeypatch.undo()
    (content,) = written
    (tmp_path / "ledger").write_bytes(content)
    entries = read_ledger(tmp_path / "ledger")
    assert [entry.kind for entry in entries] == ["header", "charge"]
    assert charges_of(entries) == ledger.charges() == ((STATISTICS, 1),)
    ledger.charge(STATISTICS, step=0)
    ledger.charge(STEP, step=0)
    assert Ledger.open(tmp_path / "ledger").length == ledger.length == 3


def test_the_file_is_what_the_docs_say(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    made(path, steps=2)
    forge(
        tmp_path / "by hand",
        [
            header(),
            ("declare", {"what": "test split", "how": "public"}),
            charge(sample_rate=1.0, noise_multiplier=8.0, purpose="normalisation statistics"),
            charge(step=0),
            charge(step=1),
        ],
    )
    assert path.read_bytes() == (tmp_path / "by hand").read_bytes()


def test_a_charge_is_on_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    ledger = made(path, steps=0)
    flushed: list[bytes] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (real(descriptor), flushed.append(path.read_bytes())))
    ledger.charge(STEP, step=0)
    assert flushed
    assert flushed[-1] == path.read_bytes()
    assert b'"purpose":"training step"' in flushed[-1].splitlines()[-1]


def test_opening_flushes_what_a_killed_writer_left_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "ledger")
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    Ledger.open(tmp_path / "ledger")
    assert flushed


def test_the_exact_replay_of_a_step_appends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    made(path, steps=5)
    before = path.read_bytes()
    ledger = Ledger.open(path)
    ledger.note("declare", {"what": "test split", "how": "public"})
    ledger.charge(STATISTICS, step=0)
    for step in range(5):
        assert ledger.has_charge(step=step)
        ledger.charge(STEP, step=step)
    assert path.read_bytes() == before
    assert not ledger.has_charge(step=5)


def test_a_charged_step_can_not_change_its_price(tmp_path: Path) -> None:
    ledger = made(tmp_path / "ledger")
    for other in (Event(sample_rate=0.1, noise_multiplier=1.4), Event(sample_rate=0.2, noise_multiplier=1.5)):
        with pytest.raises(PrivacyError, match="fork"):
            ledger.charge(other, step=2)


def test_an_interrupted_and_resumed_ledger_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    made(whole, steps=4)
    content = whole.read_bytes()
    header_end = content.index(b"\n") + 1
    for cut in (*range(header_end, len(content), 19), len(content)):
        part = tmp_path / "part"
        part.write_bytes(content[:cut])
        ledger = Ledger.open(part)
        ledger.note("declare", {"what": "test split", "how": "public"})
        ledger.charge(STATISTICS, step=0)
        for step in range(4):
            ledger.charge(STEP, step=step)
        assert part.read_bytes() == content


def test_a_fork_is_charged_again_from_where_it_left(tmp_path: Path) -> None:
    ledger = made(tmp_path / "ledger", steps=5)
    note = {"fork": 1, "step": 3, "reason": "changed: data"}
    ledger.note("fork", note)
    ledger.note("fork", note)
    assert ledger.forks == 1
    assert ledger.length == 9
    with pytest.raises(ArgumentError, match="number 0 or 3"):
        ledger.charge(STEP, step=4, fork=1)
    for step in (3, 4, 5):
        ledger.charge(STEP, step=step, fork=1)
    with pytest.raises(ArgumentError, match="fork must be 1"):
        ledger.charge(STEP, step=5, fork=0)
    ledger.charge(STEP, step=4, fork=0)
    assert dict(Ledger.open(tmp_path / "ledger").charges()) == {STATISTICS: 1, STEP: 8}


def test_a_changed_mechanism_composes_in_a_fork(tmp_path: Path) -> None:
    ledger = made(tmp_path / "ledger", steps=5)
    ledger.note("fork", {"fork": 1, "step": 2, "reason": "less noise"})
    louder = Event(sample_rate=0.1, noise_multiplier=1.0)
    ledger.charge(louder, step=2, fork=1)
    assert dict(ledger.charges()) == {STATISTICS: 1, STEP: 5, louder: 1}


BAD_ENTRIES = {
    "rate zero": charge(sample_rate=0.0),
    "rate negative": charge(sample_rate=-0.1),
    "rate above one": charge(sample_rate=1.0000001),
    "rate not a number": charge(sample_rate=float("nan")),
    "rate as text": charge(sample_rate="0.1"),
    "rate as a whole number": charge(sample_rate=1),
    "noise zero": charge(noise_multiplier=0.0),
    "noise negative": charge(noise_multiplier=-1.5),
    "noise infinite": charge(noise_multiplier=float("inf")),
    "noise not a number": charge(noise_multiplier=float("nan")),
    "noise null": charge(noise_multiplier=None),
    "step negative": charge(step=-500),
    "step with a gap": charge(step=1),
    "step as a truth value": charge(step=False),
    "step as a fraction": charge(step=0.0),
    "fork that was not noted": charge(fork=1),
    "fork negative": charge(fork=-1),
    "purpose empty": charge(purpose=""),
    "a count of its own": charge(count=-500),
    "a field too few": ("charge", {"fork": 0, "step": 0, "sample_rate": 0.1, "noise_multiplier": 1.5}),
    "unknown kind": ("refund", CHARGE),
    "second header": header(),
    "fork out of order": ("fork", {"fork": 2, "step": 0, "reason": "x"}),
    "fork at a negative step": ("fork", {"fork": 1, "step": -1, "reason": "x"}),
    "fork without a reason": ("fork", {"fork": 1, "step": 0, "reason": ""}),
    "declaration without words": ("declare", {"what": "x", "how": None}),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_an_entry_that_breaks_a_rule_is_refused_even_with_a_perfect_chain(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ledger"
    forge(path, [header(), BAD_ENTRIES[name]])
    with pytest.raises(TamperError, match="line 2: "):
        read_ledger(path)
    with pytest.raises(TamperError, match="line 2: "):
        Ledger.open(path)


RELEASE = {"weights_sha256": "a" * 64, "config_sha256": "b" * 64, "data": {"class_names": ["x", "y"]}}


def test_a_release_is_committed_to_once_until_the_ledger_grows(tmp_path: Path) -> None:
    ledger = made(tmp_path / "ledger", steps=1)
    before = ledger.length
    ledger.commit_release(**RELEASE)
    ledger.commit_release(**RELEASE)
    assert ledger.length == before + 1
    again = Ledger.open(tmp_path / "ledger")
    again.commit_release(**RELEASE)
    assert again.length == before + 1
    committed = committed_release(read_ledger(tmp_path / "ledger"))
    assert committed is not None
    assert committed["weights_sha256"] == "a" * 64
    again.charge(STEP, step=1)
    assert committed_release(read_ledger(tmp_path / "ledger")) is None
    again.commit_release(**RELEASE)
    again.commit_release(**{**RELEASE, "data": {"class_names": ["y", "x"]}})
    assert again.length == before + 4
    assert charges_of(read_ledger(tmp_path / "ledger"))[-1] == (STEP, 2)


def test_a_ledger_of_format_1_is_read_and_has_no_release(tmp_path: Path) -> None:
    forge(tmp_path / "old", [header(format=1), charge(step=0)])
    ledger = Ledger.open(tmp_path / "old")
    ledger.commit_release(**RELEASE)
    ledger.charge(STEP, step=1)
    assert [entry.kind for entry in read_ledger(tmp_path / "old")] == ["header", "charge", "charge"]
    digests = dict.fromkeys(("weights_sha256", "config_sha256", "data_sha256"), "a" * 64)
    forge(tmp_path / "forged", [header(format=1), ("release", digests)])
    with pytest.raises(TamperError, match="line 2: a ledger of format 1 has no release entries"):
        read_ledger(tmp_path / "forged")


def test_a_release_entry_holds_three_hashes_and_nothing_else(tmp_path: Path) -> None:
    digests: dict[str, Any] = dict.fromkeys(("weights_sha256", "config_sha256", "data_sha256"), "a" * 64)
    for wrong in ({**digests, "more": 1}, {**digests, "data_sha256": "a" * 63}, {"weights_sha256": "a" * 64}):
        forge(tmp_path / "forged", [header(), ("release", wrong)])
        with pytest.raises(TamperError, match="line 2: a release breaks its rules"):
            read_ledger(tmp_path / "forged")


def test_more_kinds_of_charges_than_any_run_has_are_refused(tmp_path: Path) -> None:
    """Composing them would take verify minutes."""
    kinds = [charge(step=step, noise_multiplier=1.5 + step) for step in range(MOST_KINDS + 1)]
    forge(tmp_path / "most", [header(), *kinds[:-1], charge(step=MOST_KINDS, noise_multiplier=1.5)])
    assert len(charges_of(read_ledger(tmp_path / "most"))) == MOST_KINDS
    forge(tmp_path / "more", [header(), *kinds])
    with pytest.raises(TamperError, match=f"more than {MOST_KINDS} kinds of releases are charged"):
        read_ledger(tmp_path / "more")
    ledger = Ledger.open(tmp_path / "most")
    with pytest.raises(ArgumentError, match="kinds of releases"):
        ledger.charge(Event(sample_rate=0.5, noise_multiplier=3.25), step=MOST_KINDS + 1)
    assert ledger.length == MOST_KINDS + 2


BAD_HEADERS = {
    "no delta": {"delta": 0.0},
    "delta of one": {"delta": 1.0},
    "delta not a number": {"delta": float("nan")},
    "delta as text": {"delta": "1e-5"},
    "no units": {"num_units": 0},
    "fewer than no units": {"num_units": -500},
    "a fraction of units": {"num_units": 10.5},
    "another format": {"format": FORMAT + 1},
    "format as a truth value": {"format": True},
    "unknown adjacency": {"adjacency": "none"},
    "no unit": {"privacy_unit": ""},
    "no name": {"run_id": None},
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_header_that_breaks_a_rule_is_refused(tmp_path: Path, name: str) -> None:
    forge(tmp_path / "forged", [header(**BAD_HEADERS[name])])
    with pytest.raises(TamperError, match="line 1: "):
        read_ledger(tmp_path / "forged")
    if name != "another format":
        with pytest.raises(ArgumentError):
            Ledger.create(tmp_path / "new", {**HEADER, **BAD_HEADERS[name]})
        assert not (tmp_path / "new").exists()


def test_the_same_step_twice_is_refused(tmp_path: Path) -> None:
    forge(tmp_path / "ledger", [header(), charge(step=0), charge(step=0)])
    with pytest.raises(TamperError, match=r"line 3: the next training step of fork 0 must be number 1, got 0"):
        read_ledger(tmp_path / "ledger")


def test_a_ledger_begins_with_its_header(tmp_path: Path) -> None:
    forge(tmp_path / "ledger", [charge()])
    with pytest.raises(TamperError, match="first entry must be the header"):
        read_ledger(tmp_path / "ledger")


def test_numbers_must_be_consecutive(tmp_path: Path) -> None:
    forge(tmp_path / "ledger", [header(), charge()], seqs=[0, 2])
    with pytest.raises(TamperError, match="seq must be 1, got 2"):
        read_ledger(tmp_path / "ledger")


def test_lines_of_another_ledger_can_not_be_spliced_in(tmp_path: Path) -> None:
    """Same length, same numbers, every line whole in itself: only the chain can tell."""
    dear, cheap = tmp_path / "dear", tmp_path / "cheap"
    for path, noise in ((dear, 0.5), (cheap, 50.0)):
        ledger = Ledger.create(path, HEADER)
        for step in range(6):
            ledger.charge(Event(sample_rate=0.1, noise_multiplier=noise), step=step)
    dear_lines, cheap_lines = (path.read_bytes().splitlines(keepends=True) for path in (dear, cheap))
    dear.write_bytes(b"".join([dear_lines[0], dear_lines[1], *cheap_lines[2:-1], dear_lines[-1]]))
    with pytest.raises(TamperError, match="line 3: it does not follow the line before"):
        read_ledger(dear)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    forge(path, [header(), charge()])
    first, second = path.read_bytes().splitlines()
    body = b"{" + second[second.index(b'"kind"') :].replace(b'"step":0', b'"step":0,"step":0')
    own = hashlib.sha256(body).hexdigest().encode()
    path.write_bytes(first + b'\n{"hash":"' + own + b'",' + body[1:] + b"\n")
    with pytest.raises(TamperError, match="line 2: it is not canonical"):
        read_ledger(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"null\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"x"])
def test_whatever_is_no_ledger_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(content)
    with pytest.raises(TamperError, match="ledger"):
        read_ledger(path)
    with pytest.raises(TamperError, match="ledger"):
        Ledger.open(path)


def test_deep_nesting_with_a_right_hash_is_named(tmp_path: Path) -> None:
    body = b'{"kind":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    own = hashlib.sha256(body).hexdigest().encode()
    (tmp_path / "ledger").write_bytes(b'{"hash":"' + own + b'",' + body[1:] + b"\n")
    with pytest.raises(TamperError, match="line 1"):
        read_ledger(tmp_path / "ledger")


def test_a_missing_ledger_or_a_pipe_in_its_place_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DPVisionError, match="No such file"):
        read_ledger(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="ordinary file"):
        read_ledger(tmp_path / "pipe")


def test_a_torn_last_line_is_dropped_unless_somebody_remembers_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = made(path, steps=3)
    content, length, head = path.read_bytes(), ledger.length, ledger.head
    last = content.rindex(b"\n", 0, -1) + 1
    for cut in (last, *range(last + 1, len(content) - 2, 13), len(content) - 2, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(TamperError, match="rolled back"):
            Ledger.open(path, at_least=(length, head))
        if cut > last:
            with pytest.raises(TamperError, match="cut off"):
                read_ledger(path)
        assert path.stat().st_size == cut
        assert Ledger.open(path).length == length - 1
        assert path.read_bytes() == content[:last]


def test_a_valid_prefix_is_named_as_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = made(path, steps=6)
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(1, ledger.length):
        path.write_bytes(b"".join(lines[:kept]))
        assert Ledger.open(path).length == kept
        with pytest.raises(TamperError, match=rf"rolled back: {kept} of {ledger.length} known"):
            Ledger.open(path, at_least=(ledger.length, ledger.head))


def test_a_longer_ledger_of_another_history_is_named(tmp_path: Path) -> None:
    ledger = made(tmp_path / "ledger", steps=3)
    other = Ledger.create(tmp_path / "other", HEADER)
    for step in range(20):
        other.charge(STEP, step=step)
    with pytest.raises(TamperError, match="replaced: entry 5 is not the known one"):
        Ledger.open(tmp_path / "other", at_least=(ledger.length, ledger.head))
    Ledger.open(tmp_path / "ledger", at_least=(ledger.length, ledger.head))


def damage(content: bytes, rng: random.Random) -> bytes:
    """One random edit of the whole lines: a flipped bit, a lost, doubled or moved line, lost or foreign bytes."""
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(content))
    line = rng.randrange(len(lines) - 1)
    edits = (
        lambda: content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :],
        lambda: content[:at] + content[at + rng.randint(1, 40) :],
        lambda: content[:at] + rng.randbytes(rng.randint(1, 40)) + content[at:],
        lambda: content[:at],
        lambda: b"".join(lines[:line] + lines[line + 1 :]),
        lambda: b"".join([*lines[: line + 1], lines[line], *lines[line + 1 :]]),
        lambda: b"".join(rng.sample(lines, len(lines))),
        lambda: content.replace(b'"noise_multiplier":1.5', b'"noise_multiplier":9.5', rng.randint(1, 9)),
        lambda: content.replace(b'"step":%d,' % line, b'"step":%d,' % (line + 1)),
    )
    return rng.choice(edits)()


def check_random_edits(path: Path, *, cases: int, seed: int) -> None:
    ledger = made(path, steps=12)
    content = path.read_bytes()
    rng = random.Random(seed)
    for _ in range(cases):
        broken = damage(content, rng)
        if broken == content:
            continue
        path.write_bytes(broken)
        with pytest.raises(TamperError):
            Ledger.open(path, at_least=(ledger.length, ledger.head))
        # Without somebody who remembers the head, a cut at the end of a line is the one edit that can't be seen.
        if not content.startswith(broken) or not broken.endswith(b"\n"):
            with pytest.raises(TamperError):
                read_ledger(path)


def test_random_edits_are_all_named(tmp_path: Path) -> None:
    check_random_edits(tmp_path / "ledger", cases=400, seed=1)


@pytest.mark.slow
def test_ten_thousand_random_edits_are_all_named(tmp_path: Path) -> None:
    check_random_edits(tmp_path / "ledger", cases=10_000, seed=2)


def test_before_growth_runs_once_and_only_before_a_new_entry(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    size = made(path, steps=3)._size
    seen: list[int] = []
    ledger = Ledger.open(path, before_growth=lambda: seen.append(path.stat().st_size))
    ledger.charge(STEP, step=2)
    assert seen == []
    ledger.charge(STEP, step=3)
    ledger.charge(STEP, step=4)
    assert seen == [size]


def test_a_failed_write_is_one_line_and_ends_the_charging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = made(tmp_path / "ledger", steps=2)

    def full(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(DPVisionError, match=r"No space left on device\. Free some space"):
            ledger.charge(STEP, step=2)
    for step in (2, 3):
        with pytest.raises(PrivacyError, match="Open the ledger again"):
            ledger.charge(STEP, step=step)
    with pytest.raises(PrivacyError, match="Open the ledger again"):
        ledger.note("declare", {"what": "a", "how": "b"})
    again = Ledger.open(tmp_path / "ledger")
    again.charge(STEP, step=2)
    assert dict(again.charges())[STEP] == 3


def test_a_disk_that_fills_in_the_middle_of_a_line_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = made(path, steps=2)
    size = path.stat().st_size
    code = f"""
        import resource
        from pathlib import Path
        from dpvision.errors import DPVisionError
        from dpvision.privacy.ledger import Ledger
        from dpvision.privacy.mechanism import Event
        ledger = Ledger.open(Path({str(path)!r}))
        resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 50}, {size + 50}))
        try:
            ledger.charge(Event(sample_rate=0.1, noise_multiplier=1.5), step=2)
        except DPVisionError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "only 50 of" in done.stdout
    assert path.stat().st_size == size + 50
    assert Ledger.open(path, at_least=(ledger.length, ledger.head)).length == ledger.length


def test_a_second_writer_is_noticed(tmp_path: Path) -> None:
    first = made(tmp_path / "ledger", steps=2)
    second = Ledger.open(tmp_path / "ledger")
    second.charge(STEP, step=2)
    with pytest.raises(TamperError, match="another process changed it"):
        first.charge(STEP, step=2)


def test_a_ledger_that_is_gone_takes_no_charge(tmp_path: Path) -> None:
    ledger = made(tmp_path / "ledger", steps=2)
    (tmp_path / "ledger").unlink()
    with pytest.raises(DPVisionError, match="No such file"):
        ledger.charge(STEP, step=2)
    assert not (tmp_path / "ledger").exists()


def test_a_run_without_privacy_charges_nothing(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", {**HEADER, "delta": None})
    with pytest.raises(ArgumentError, match="without privacy"):
        ledger.charge(STEP, step=0)
    assert ledger.charges() == ()


def test_misuse_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = made(path, steps=2)
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match="must be number 2, got 7"):
        ledger.charge(STEP, step=7)
    with pytest.raises(ArgumentError, match="kind must be"):
        ledger.note("refund", {})
    with pytest.raises(ArgumentError, match=r"Ledger\.charge"):
        ledger.note("charge", dict(CHARGE))
    with pytest.raises(ArgumentError, match="can't take"):
        ledger.note("declare", {"what": "x", "how": {1, 2}})
    with pytest.raises(ArgumentError, match="exists already"):
        Ledger.create(path, HEADER)
    with pytest.raises(ArgumentError, match="delta: Field required"):
        Ledger.create(tmp_path / "other", {k: v for k, v in HEADER.items() if k != "delta"})
    ledger.charge(STEP, step=2)
    assert path.read_bytes().startswith(before)


WRITER = """
import os, sys
from pathlib import Path
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import Event
path, header = Path(sys.argv[1]), {header!r}
ledger = Ledger.open(path) if path.exists() else Ledger.create(path, header)
event = Event(sample_rate=0.1, noise_multiplier=1.5)
for step in range(int(sys.argv[2])):
    ledger.charge(event, step=step)
    os.write(1, b"%d\\n" % step)
"""


def check_kills(folder: Path, *, kills: int, seed: int) -> None:
    steps, rng = 100, random.Random(seed)
    whole = Ledger.create(folder / "whole", HEADER)
    for step in range(steps):
        whole.charge(STEP, step=step)
    for number in range(kills):
        path = folder / f"killed {number}"
        command = [sys.executable, "-c", WRITER.format(header=HEADER), str(path), str(steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            returned = [int(writer.stdout.readline()) for _ in range(rng.randrange(1, steps))]
            writer.kill()
            returned += [int(line) for line in writer.stdout.read().split()]
        charged = dict(Ledger.open(path).charges())[STEP]
        assert charged >= len(returned), "a charge that had returned is lost"
        assert (folder / "whole").read_bytes().startswith(path.read_bytes())
        again = Ledger.open(path)
        for step in range(steps):
            again.charge(STEP, step=step)
        assert path.read_bytes() == (folder / "whole").read_bytes()


def test_a_writer_killed_at_random_moments_loses_no_charge(tmp_path: Path) -> None:
    check_kills(tmp_path, kills=5, seed=3)


@pytest.mark.slow
def test_a_writer_killed_at_many_random_moments_loses_no_charge(tmp_path: Path) -> None:
    check_kills(tmp_path, kills=100, seed=4)
