"""What mkdocs needs to build the same pages that a repository host shows (see ``hooks`` in mkdocs.yml).

- README, CONTRIBUTING and CHANGELOG stay in the root of the repository and become pages of the site.
- A link to another file outside ``docs/``, such as a test, becomes its text: that file is not part of the site.
- Headings get the anchors that repository hosts give them.
- A mean and its spread ("9.0 ± 1.5") stay on one line.
- ``reference/api.md`` gets one entry for each name in ``__all__`` of the package, read without importing it.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
API_PAGE = "reference/api.md"
API_MARKER = "<!-- public names -->"
_SITE_PAGES = {site: name for name, site in ROOT_PAGES.items()}
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]+)?\)")


def public_names() -> list[str]:
    """Return ``dpvision.__all__`` without ``__version__``: functions first, then classes."""
    tree = ast.parse((ROOT / "src" / "dpvision" / "__init__.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
    )
    names = [name for name in ast.literal_eval(value) if name != "__version__"]
    return sorted(names, key=lambda name: (name[0].isupper(), name))


def api_sections() -> str:
    """Return the body of the page of signatures, for mkdocstrings."""
    parts: list[str] = []
    for heading, classes in (("Functions", False), ("Classes", True)):
        entries = [_api_entry(name) for name in public_names() if name[0].isupper() == classes]
        parts += [f"## {heading}", *entries]
    return "\n\n".join(parts)


def _api_entry(name: str) -> str:
    """Return the entry of a name; where a package has the same name, the function in it is meant."""
    if not (ROOT / "src" / "dpvision" / name / "__init__.py").is_file():
        return f"::: dpvision.{name}"
    entry = f"::: dpvision.{name}.{name}\n    options:\n      heading: dpvision.{name}"
    return f'<a id="dpvision.{name}"></a>\n\n{entry}'


def site_links(text: str, *, source: str, page: str) -> str:
    """Change the links of a page so that they work in the site; code blocks stay as they are.

    Args:
        text: the page's Markdown.
        source: the file that the text comes from, relative to the root of the repository.
        page: the place of the page in the site, relative to ``docs/``.

    Returns:
        The text, in which a link to a page of the site is relative to ``page``, and a link to any other file of the
        repository is replaced by its text.
    """
    folder = PurePosixPath(source).parent

    def replace(match: re.Match[str]) -> str:
        image, label, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = os.path.normpath(folder / target)
        if path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif path in ROOT_PAGES:
            place = ROOT_PAGES[path]
        else:
            return label
        return f"{image}[{label}]({os.path.relpath(place, PurePosixPath(page).parent)}{anchor})"

    parts = _FENCE.split(text)
    return "".join(part if index % 2 else _LINK.sub(replace, part) for index, part in enumerate(parts))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors of repository hosts, which the links use."""
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root."""
    from mkdocs.structure.files import File

    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Change the links of a page, and fill in the page of signatures."""
    place = page.file.src_uri
    text = site_links(markdown, source=_SITE_PAGES.get(place, f"docs/{place}"), page=place)
    text = re.sub(r"(?<=[\d%]) ± (?=\d)", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}", text)
    return text.replace(API_MARKER, api_sections()) if place == API_PAGE else text
