"""docs/concepts/pitfalls.md has a row, a rule and tests that exist for every known mistake."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROWS = [
    line
    for line in (TESTS.parent / "docs" / "concepts" / "pitfalls.md").read_text().splitlines()
    if re.match(r"\| \d+ ", line)
]
_NAMED = re.compile(r"\[test_\w+\.py\]\(\.\./\.\./tests/(\w+/test_\w+\.py)\): ((?:`test_\w+`(?:, )?)+)")


def named_tests(row: str) -> list[tuple[str, str]]:
    """Every (file, test) that a row names with a link to its file."""
    return [(file, name) for file, names in _NAMED.findall(row) for name in re.findall(r"`(test_\w+)`", names)]


def test_every_pitfall_has_its_row() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == list(range(1, 41))


def test_every_row_has_a_mistake_a_rule_and_a_test() -> None:
    for row in ROWS:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 5, row
        assert cells[1] in {"A", "B"}
        assert all(cells)
        assert named_tests(row), row


def test_every_named_test_exists_in_the_file_that_is_named() -> None:
    for row in ROWS:
        found = named_tests(row)
        assert len(found) == len(re.findall(r"`test_\w+`", row)), f"a test without its file: {row}"
        for file, name in found:
            assert f"\ndef {name}(" in (TESTS / file).read_text(), f"{file} has no {name}"
