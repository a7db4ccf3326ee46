"""How names of files and lists of them appear in messages: one line, no control characters, never endless."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN_LENGTH = 120
SHOWN_ITEMS = 3


class BadFile(Exception):
    """Why a file can't be used. Whoever reads many files collects these, and names the files."""


def printable(name: object) -> str:
    """A name that is safe to print: terminal escapes, line breaks and undecodable bytes appear as backslash codes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(name))


def shown(name: object) -> str:
    """The same, cut to a length that fits into a message."""
    text = printable(name)
    return text if len(text) <= SHOWN_LENGTH else f"…{text[-SHOWN_LENGTH:]}"


def some_of(items: Sequence[object], *, limit: int = SHOWN_ITEMS) -> str:
    """The first few of many, and how many more there are."""
    text = ", ".join(shown(item) for item in items[:limit])
    return text if len(items) <= limit else f"{text} and {len(items) - limit} more"


def bad_files_text(bad: Sequence[tuple[str, str]]) -> str:
    """What is wrong with a few of the bad files, and how many there are."""
    return some_of([f"{shown(name)} ({shown(reason)})" for name, reason in bad])
