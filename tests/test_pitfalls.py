"""docs/pitfalls.md names tests that exist, for every row."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROWS = [line for line in (TESTS.parent / "docs" / "pitfalls.md").read_text().splitlines() if re.match(r"\| \d+ ", line)]


def test_every_pitfall_has_its_row() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == list(range(1, 33))


def test_every_row_without_a_test_says_that_it_is_planned() -> None:
    assert [row for row in ROWS if "`test_" not in row and "Planned" not in row] == []


def test_every_named_test_exists_in_the_file_that_is_named() -> None:
    for row in ROWS:
        for file, names in re.findall(r"\[(test_\w+\.py)\]\(\.\./tests/\1\): ((?:`test_\w+`(?:, )?)+)", row):
            source = (TESTS / file).read_text()
            for name in re.findall(r"`(test_\w+)`", names):
                assert f"\ndef {name}(" in source, f"{file} has no {name}"
