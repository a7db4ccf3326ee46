"""Error types, rules on arguments, and the wording of messages.

Every error that a user can act on is a ``DPVisionError``: one line with the rule, the value, the cause and the remedy.
This module also has the one escaper (``printable``), the one suggestion for a misspelt name (``did_you_mean``), the
one translator of foreign exceptions (``translated_errors``), the one wording of pydantic's errors
(``validation_message``) and the one check of the machine's memory (``require_memory``).
It imports nothing of dpvision and neither torch nor pydantic.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, final

if TYPE_CHECKING:
    from pydantic import ValidationError

LARGEST_COUNT = 2**53  # larger whole numbers are not exact in a float64
LARGEST_WHOLE = 10**100  # larger ones are not written out in messages
SHOWN_LENGTH = 120
SHOWN_ITEMS = 3


class DPVisionError(Exception):
    """An error that the user can act on. The command line prints it as one line and exits with 2."""


class ArgumentError(DPVisionError, ValueError):
    """One or more arguments break a rule."""


class DataError(DPVisionError):
    """A dataset, image or archive cannot be read in its expected format."""


class PrivacyError(DPVisionError):
    """Continuing would make the privacy claim false."""


class TamperError(DPVisionError):
    """A ledger, certificate, checkpoint or weight file differs from what was written."""


class BadFile(Exception):
    """Why one file cannot be used. Readers of many files collect these and name the files."""


@final
class Problems:
    """Collect every broken rule, then report all of them in one error.

    Rules can be chained: ``Problems().count("steps", steps).positive("delta", delta).raise_if_any()``.
    """

    def __init__(self) -> None:
        self._messages: list[str] = []

    def require(self, holds: bool, message: str) -> Self:
        """Note ``message`` unless the rule holds. Write rules so that NaN breaks them."""
        if not holds:
            self._messages.append(message)
        return self

    def positive(self, name: str, value: float) -> Self:
        """Require a finite number above zero."""
        return self._demand(_is_finite(value) and value > 0, name, "be a finite number > 0", value)

    def not_negative(self, name: str, value: float) -> Self:
        """Require a finite number, zero or above."""
        return self._demand(_is_finite(value) and value >= 0, name, "be a finite number >= 0", value)

    def count(self, name: str, value: int, *, least: int = 1) -> Self:
        """Require a whole number from ``least`` to ``LARGEST_COUNT``."""
        whole = type(value) is int
        self._demand(whole and value >= least, name, f"be a whole number >= {least}", value)
        return self._demand(not whole or value <= LARGEST_COUNT, name, f"be <= {LARGEST_COUNT}", value)

    def probability(self, name: str, value: float) -> Self:
        """Require a number strictly between 0 and 1."""
        return self._demand(_is_finite(value) and 0 < value < 1, name, "lie strictly between 0 and 1", value)

    def _demand(self, holds: bool, name: str, rule: str, value: object) -> Self:
        # The message is built only for a broken rule, because rules are checked in every step.
        if not holds:
            self._messages.append(f"{name} must {rule}, got {brief(value)}.")
        return self

    def raise_if_any(self) -> None:
        """Raise one ``ArgumentError`` that names all problems."""
        if self._messages:
            raise ArgumentError(" ".join(self._messages))


def _is_finite(value: object) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    # A whole number may be too large for a float, and then it is of no use as a quantity.
    return type(value) is int and abs(value) <= sys.float_info.max


def printable(text: object) -> str:
    """Escape everything that is not printable: terminal codes, line breaks and undecodable bytes.

    Args:
        text: any value; its ``str`` is escaped.

    Returns:
        One line in which unprintable characters are backslash codes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def brief(value: object, *, most: int = SHOWN_LENGTH) -> str:
    """Write a value for a message: on one line, escaped, and cut after ``most`` characters."""
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        return f"a whole number of {value.bit_length()} bits"
    text = printable(value)
    return text if len(text) <= most else f"{text[:most]}…"


def shown(name: object) -> str:
    """Write a file name for a message: escaped, with only its end if it is long."""
    text = printable(name)
    return text if len(text) <= SHOWN_LENGTH else f"…{text[-SHOWN_LENGTH:]}"


def some_of(items: Sequence[object], *, limit: int = SHOWN_ITEMS) -> str:
    """List the first ``limit`` items, and how many more there are."""
    return _first_of([shown(item) for item in items[:limit]], len(items))


def counted(count: int, noun: str) -> str:
    """Return "1 row" or "2 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _first_of(texts: Sequence[str], number: int) -> str:
    more = number - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def bad_files_text(bad: Sequence[tuple[str, str]]) -> str:
    """List the first bad files with their reasons, given as (name, reason), and how many more there are."""
    return _first_of([f"{shown(name)} ({brief(reason)})" for name, reason in bad[:SHOWN_ITEMS]], len(bad))


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """Suggest the choices closest to a name that is not one of them.

    Args:
        name: what was given.
        choices: the valid names.

    Returns:
        "Did you mean a or b?", or "There are: …" with all choices where none is close.
    """
    names = list(choices)
    close = difflib.get_close_matches(str(name), names, n=3)
    return f"Did you mean {' or '.join(close)}?" if close else f"There are: {', '.join(names)}."


def require_memory(
    size: int,
    what: object,
    *,
    remedy: str = "Use smaller or fewer images.",
    error: Callable[[str], DPVisionError] = DataError,
) -> None:
    """Refuse an allocation that exceeds the machine's memory.

    Without this check the operating system may kill the process instead of refusing the allocation.

    Args:
        size: bytes.
        what: what needs them, for the message.
        remedy: the end of the message.
        error: the type of the error.

    Raises:
        DPVisionError: of type ``error``, if the machine has less physical memory.
    """
    if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise error(f"{shown(what)} needs {size} bytes, more than this machine has. {remedy}")


@contextmanager
def translated_errors(
    *kinds: type[Exception], saying: str, to: Callable[[str], DPVisionError] = ArgumentError
) -> Generator[None]:
    """Re-raise foreign exceptions of the block as an error of dpvision.

    Args:
        kinds: the exceptions to translate, such as ``RuntimeError``.
        saying: the beginning of the message; the first line of the foreign message follows after a colon.
        to: the type of the new error.

    Raises:
        DPVisionError: of type ``to``. Errors that are already dpvision's own pass unchanged.
    """
    try:
        yield
    except DPVisionError:
        raise
    except kinds as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise to(f"{saying}: {reason}.") from error


def validation_message(error: ValidationError, *, whole: str = "configuration", most: int = 10) -> str:
    """Write a pydantic error as one line: where, what, and the value.

    Args:
        error: pydantic's error.
        whole: the name of the place where pydantic names none.
        most: the number of problems to name; the rest is counted.

    Returns:
        The problems, separated by semicolons.
    """
    parts: list[str] = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"]) or whole
        value = problem.get("input")
        plain = isinstance(value, (int, float, str))
        got = f", got {brief(repr(value) if isinstance(value, str) else value)}" if plain else ""
        parts.append(f"{brief(where)}: {problem['msg'].removeprefix('Value error, ')}{got}")
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return f"{'; '.join(parts[:most])}{more}"
