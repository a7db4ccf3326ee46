"""The wording of errors, once: the rule, the value, the cause and the remedy.

How names of files and lists of them appear in messages: one line, no control characters, never endless.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import final

LARGEST_COUNT = 2**53
LARGEST_WHOLE = 10**100


class DPVisionError(Exception):
    """An error that the user can act on. The command line prints it as one line and exits with 2."""


class ArgumentError(DPVisionError, ValueError):
    """One or more arguments break a rule."""


class DataError(DPVisionError):
    """A dataset, picture or archive can't be read as what it should be."""


class PrivacyError(DPVisionError):
    """Going on would make the privacy claim false."""


class TamperError(DPVisionError):
    """A ledger, certificate, checkpoint or weight file is not what was written."""


@final
class Problems:
    """Collects every broken rule, so that all of them are reported at once."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    def require(self, holds: bool, message: str) -> None:
        """Note ``message`` unless the rule holds. Write rules so that NaN breaks them."""
        if not holds:
            self._messages.append(message)

    def positive(self, name: str, value: float) -> None:
        """Require a finite number above zero."""
        self._demand(_is_finite(value) and value > 0, name, "be a finite number > 0", value)

    def not_negative(self, name: str, value: float) -> None:
        """Require a finite number, zero or above."""
        self._demand(_is_finite(value) and value >= 0, name, "be a finite number >= 0", value)

    def count(self, name: str, value: int, *, least: int = 1) -> None:
        """Require a whole number of at least ``least``, and small enough to be exact wherever it is used."""
        whole = type(value) is int
        self._demand(whole and value >= least, name, f"be a whole number >= {least}", value)
        self._demand(not whole or value <= LARGEST_COUNT, name, f"be <= {LARGEST_COUNT}", value)

    def probability(self, name: str, value: float) -> None:
        """Require a number strictly between 0 and 1."""
        self._demand(_is_finite(value) and 0 < value < 1, name, "lie strictly between 0 and 1", value)

    def _demand(self, holds: bool, name: str, rule: str, value: object) -> None:
        # The words are put together for a broken rule only: rules are checked in every step.
        if not holds:
            self._messages.append(f"{name} must {rule}, got {brief(value)}.")

    def raise_if_any(self) -> None:
        """Raise one ``ArgumentError`` that names all problems."""
        if self._messages:
            raise ArgumentError(" ".join(self._messages))


def brief(value: object, *, most: int = 120) -> str:
    """A value as it can stand in a message: on one line, without control characters, and not endless."""
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        return f"a whole number of {value.bit_length()} bits"
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(value))
    return text if len(text) <= most else f"{text[:most]}…"


def _is_finite(value: object) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    # A whole number may be too large for a float, and then it is of no use as a quantity.
    return type(value) is int and abs(value) <= sys.float_info.max


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
