"""The documentation site: every page is in its navigation, links work in it, and it loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.site_hooks import API_MARKER, API_PAGE, ROOT_PAGES, api_sections, public_names, site_links

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
_LOADING = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


def nav_pages(items: list[Any]) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    for item in items:
        (value,) = item.values()
        if isinstance(value, str):
            yield value
        else:
            yield from nav_pages(value)


class Tags(HTMLParser):
    """Collects what a page loads, where it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the addresses of a tag."""
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        if address := values.get(_LOADING.get(tag, "")):
            self.loaded.append(address)
        if tag == "a" and (address := values.get("href")):
            self.links.append(address)


def test_every_page_is_in_the_navigation_once_and_every_entry_exists() -> None:
    assert sorted(nav_pages(CONFIG["nav"])) == sorted([*PAGES, *ROOT_PAGES.values()])
    assert all((ROOT / name).is_file() for name in ROOT_PAGES)


def test_the_sections_of_the_navigation_are_the_folders_of_the_pages() -> None:
    for item in CONFIG["nav"]:
        ((title, value),) = item.items()
        if not isinstance(value, str):
            assert {page.split("/")[0] for page in nav_pages(value)} == {title.lower()}


@pytest.mark.parametrize("page", PAGES)
def test_lists_have_an_empty_line_before_them(page: str) -> None:
    """Python-Markdown would print them as running text, unlike repository hosts."""
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = text.splitlines()
    for before, line in pairwise(lines):
        if _ITEM.match(line):
            assert not before or _ITEM.match(before) or before.startswith(("  ", "#")), line
            assert len(line) - len(line.lstrip()) in (0, 4), f"indent a nested list by four spaces: {line}"


def test_a_link_to_a_page_of_the_root_leads_to_its_place_in_the_site() -> None:
    text = site_links("[a](../../README.md#install)", source="docs/concepts/x.md", page="concepts/x.md")
    assert text == "[a](../project/readme.md#install)"


def test_a_link_of_a_root_page_leads_into_the_site() -> None:
    text = site_links("![b](docs/images/r.png) [c](LOG.md)", source="README.md", page="project/readme.md")
    assert text == "![b](../images/r.png) c"


def test_a_link_to_a_file_outside_the_site_becomes_its_text() -> None:
    text = site_links("see [t.py](../../tests/t.py): [x](#here)", source="docs/a/b.md", page="a/b.md")
    assert text == "see t.py: [x](#here)"


def test_links_in_code_blocks_and_to_the_web_stay_as_they_are() -> None:
    text = "[w](https://example.org/a)\n```\n[t](../../tests/t.py)\n```\n"
    assert site_links(text, source="docs/a/b.md", page="a/b.md") == text


def test_the_page_of_signatures_has_every_public_name() -> None:
    import dpvision

    assert set(public_names()) == set(dpvision.__all__) - {"__version__"}
    assert re.findall(r"^::: dpvision\.(\w+)(?:\.\1)?$", api_sections(), re.MULTILINE) == public_names()
    assert (DOCS / API_PAGE).read_text().count(API_MARKER) == 1


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert not [line for line in output.splitlines() if line and not line.startswith("INFO ")]
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly_with_every_page(site: Path) -> None:
    for page in nav_pages(CONFIG["nav"]):
        assert (site / page).with_suffix(".html").is_file(), page


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for path in sorted(site.rglob("*.html")):
        for address in Tags(path.read_text()).loaded:
            assert not re.match(r"(?:[a-z]+:)?//", address), f"{path.name} loads {address}"
            if path.name != "404.html":  # served for any address, so its own are absolute
                assert (path.parent / address.split("?")[0]).exists(), f"{path.name} loads {address}"
    for path in sorted(site.rglob("*.css")):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text()), path.name


@pytest.mark.slow
def test_every_link_and_anchor_of_the_site_exists(site: Path) -> None:
    pages = {path: Tags(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, tags in pages.items():
        for link in tags.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            place = (path.parent / target).resolve() if target else path
            place = place / "index.html" if place.is_dir() else place
            assert place.exists(), f"{path.name}: {link}"
            assert not anchor or anchor in pages[place].anchors, f"{path.name}: {link}"


@pytest.mark.slow
def test_the_page_of_signatures_shows_docstrings(site: Path) -> None:
    text = (site / "reference" / "api.html").read_text()
    for name in public_names():
        assert f'id="dpvision.{name}"' in text
    assert "Train a model and write its release and its report." in text
    assert "::: " not in text


def test_make_docs_builds_strictly_and_counts_warnings() -> None:
    (command,) = re.findall(r"mkdocs build .*", (ROOT / "Makefile").read_text())
    assert command == "mkdocs build --strict"  # with --quiet, mkdocs would not count the warnings
