"""HTML and SVG in which text is escaped unless it was made here."""

from __future__ import annotations

import html
from base64 import b64encode
from typing import final

_LONGEST_TEXT = 4000
_ALLOWED = "\n\u00a0"
_EMPTY_ELEMENTS = frozenset({"meta", "br"})
_SELF_CLOSING = frozenset({"line", "circle", "path", "rect"})


@final
class Markup(str):
    """Finished markup. Only this module makes it; every other string is text and gets escaped."""

    __slots__ = ()


Child = str | None
Attribute = str | int | float | bool | None


def element(name: str, *children: Child, **attributes: Attribute) -> Markup:
    """One element. Children that are not ``Markup`` are escaped; None is left out.

    ``class_`` becomes ``class`` and underscores become hyphens.
    """
    opening = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _EMPTY_ELEMENTS:
        return Markup(f"<{name}{opening}>")
    if name in _SELF_CLOSING:
        return Markup(f"<{name}{opening}/>")
    return Markup(f"<{name}{opening}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Children one after the other."""
    return Markup("".join(escape(child) for child in children if child is not None))


def escape(text: str) -> Markup:
    """``text`` as markup that shows it: nothing in it can act, hide or turn the direction of writing."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(visible(text), quote=True))


def visible(text: str) -> str:
    """``text`` at a bearable length, with control, direction and broken characters written out as codes."""
    if len(text) > _LONGEST_TEXT:
        text = text[: _LONGEST_TEXT - 1] + "…"
    return "".join(c if c.isprintable() or c in _ALLOWED else f"\\u{ord(c):04x}" for c in text)


def embedded_png(content: bytes, *, alt: str) -> Markup:
    """A picture that is part of the page. ``content`` must be a PNG that was made here, not one from a file."""
    source = b64encode(content).decode("ascii")
    return Markup(f'<img src="data:image/png;base64,{source}"{_attribute("alt", alt)}>')


def document(*, title: str, style: str, body: Markup) -> str:
    """A whole page that loads nothing and runs nothing. ``style`` must be our own."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = join(
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name_="color-scheme", content="light dark"),
        element("title", title),
        Markup(f"<style>{style}</style>"),
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{body}</body>\n</html>\n'


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f' {name}="{html.escape(visible(text), quote=True)}"'
