"""The breakages of ``make mutants`` still fit the source: a stale one would break nothing and be caught by nobody."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tools.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("file", sorted({mutation.file for mutation in MUTATIONS}))
def test_every_breakage_replaces_one_place(file: str) -> None:
    text = (ROOT / "src" / "dpvision" / file).read_text()
    found = {m.name: text.count(m.old) for m in MUTATIONS if m.file == file}
    assert {name: count for name, count in found.items() if count != 1} == {}


def test_every_breakage_changes_something_and_has_a_test() -> None:
    def idle(mutation: Mutation) -> bool:
        paths = [ROOT / test.split("::")[0] for test in mutation.tests]
        return mutation.old == mutation.new or not paths or not all(path.exists() for path in paths)

    assert [mutation.name for mutation in MUTATIONS if idle(mutation)] == []


def test_breakages_have_names_of_their_own() -> None:
    counts = Counter(mutation.name for mutation in MUTATIONS)
    assert [name for name, count in counts.items() if count > 1] == []
