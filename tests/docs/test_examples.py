"""What the pages say about the code is true: imports work, and the files that they name exist.

The tests of single modules run the examples of the pages that describe them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "dpvision"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PYTHON = [page for page in PAGES if "```python" in page.read_text()]
_IMPORT = re.compile(r"^(?:from dpvision[\w.]* import \w[\w, ]*|import dpvision[\w.]*)", re.MULTILINE)
_PACKAGES = "|".join(sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.stem)
def test_every_import_of_an_example_works(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    for line in _IMPORT.findall("\n".join(blocks)):
        exec(line, {})  # noqa: S102 - our own page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_source_and_test_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    sources = set(re.findall(rf"`(?:src/dpvision/)?((?:{_PACKAGES})/[\w/]+\.(?:py|cpp|h))`", text))
    assert not {name for name in sources if not (SOURCE / name).exists()}
    tests = set(re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert not {name for name in tests if not (ROOT / name).exists()}


def test_the_tree_of_the_architecture_page_lists_every_module() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    tree = page[page.index("## The tree") : page.index("## Layers")]
    listed = set()
    for section in tree.split("\n### ")[1:]:
        folder = "" if section.startswith("Top") else section[1 : section.index("/`") + 1]
        listed |= {folder + name for name in re.findall(r"^\| `(\w+\.py)` \|", section, re.MULTILINE)}
    modules = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if not path.name.startswith("__")}
    assert listed == modules


def test_the_page_on_python_lists_every_public_name_and_each_exists() -> None:
    import dpvision

    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == set(dpvision.__all__) - {"__version__"}
    assert all(getattr(dpvision, name) for name in listed)


def test_every_test_that_the_page_on_hostile_input_names_exists() -> None:
    page = (ROOT / "docs" / "concepts" / "hostile-input.md").read_text()
    tests = (ROOT / "tests" / "properties" / "test_hostile_files.py").read_text()
    last_cells = [row.rsplit(" | ", 1)[-1] for row in re.findall(r"^\| .*$", page, re.MULTILINE)]
    named = {name for cell in last_cells for name in re.findall(r"`([a-z_]+)…?`", cell)}
    assert len(named) > 10
    assert not {name for name in named if name not in tests}
