"""Every page of the documentation can be reached, its links lead somewhere and its lines are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
LONGEST_LINE = 160
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def links(page: Path) -> list[tuple[Path, str | None]]:
    """Every (file, anchor) that a page links to, without links to the web."""
    found = _LINK.findall(page.read_text())
    return [
        ((page.parent / target).resolve() if target else page, anchor or None)
        for target, anchor in found
        if not target.startswith("http")
    ]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, spelt as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name} links to {target}, which does not exist"
        assert anchor is None or anchor in anchors(target), f"{page.name}: {target.name} has no heading #{anchor}"


def test_every_page_is_linked_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {target for target, _ in links(index)}
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs") and page.parent.name != "decisions"}
    assert pages - {index} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_outside_tables_are_short(page: Path) -> None:
    long = [line for line in page.read_text().splitlines() if len(line) > LONGEST_LINE and not line.startswith("|")]
    assert not long
