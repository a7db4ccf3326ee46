"""Bounds in few digits. A rounded bound is still a bound: it is rounded up, never to the nearest."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context


def rounded_up(value: float, *, digits: int = 4) -> str:
    """``value`` with at most so many digits, never below what it was."""
    ceiling = Context(prec=digits, rounding=ROUND_CEILING)
    return f"{float(ceiling.create_decimal(repr(value))):.{digits}g}"
