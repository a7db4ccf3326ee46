"""The wording of errors, once: the rule, the value, the cause and the remedy."""

from __future__ import annotations

import math
from typing import final


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
        self.require(_is_finite(value) and value > 0, f"{name} must be a finite number > 0, got {value}.")

    def not_negative(self, name: str, value: float) -> None:
        """Require a finite number, zero or above."""
        self.require(_is_finite(value) and value >= 0, f"{name} must be a finite number >= 0, got {value}.")

    def count(self, name: str, value: int, *, least: int = 1) -> None:
        """Require a whole number of at least ``least``."""
        whole = type(value) is int
        self.require(whole and value >= least, f"{name} must be a whole number >= {least}, got {value}.")

    def probability(self, name: str, value: float) -> None:
        """Require a number strictly between 0 and 1."""
        self.require(_is_finite(value) and 0 < value < 1, f"{name} must lie strictly between 0 and 1, got {value}.")

    def raise_if_any(self) -> None:
        """Raise one ``ArgumentError`` that names all problems."""
        if self._messages:
            raise ArgumentError(" ".join(self._messages))


def _is_finite(value: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
