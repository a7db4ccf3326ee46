"""The wording of figures and of the guarantee, in plain English. No markup, no files.

Rounding is part of the claim: an epsilon, a delta or an attacker's success is rounded up, never down.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal

from dpvision.privacy.mechanism import Adjacency

_SAYS_NOTHING = 0.999
_ONE_PICTURE = {"example": "training picture", "slice": "slice, which is one training picture"}
SPACE = "\u00a0"  # keeps a number and its sign on one line


def epsilon_text(epsilon: float) -> str:
    """At most two decimals (three below 0.1), rounded up."""
    return _rounded_up(epsilon, 2 if epsilon >= 0.1 else 3)


def power_of_ten(value: float) -> tuple[str, int]:
    """A small number as factor and exponent of ten, rounded up: 1e-5 is ("1", -5), 3.14e-6 is ("3.2", -6)."""
    exponent = math.floor(math.log10(value))
    factor = Decimal(repr(value)).scaleb(-exponent).quantize(Decimal("0.1"), ROUND_CEILING)
    if factor >= 10:
        factor, exponent = Decimal(1), exponent + 1
    return "1" if factor == 1 else str(factor), exponent


def percent(share: float, *, of: int | None = None) -> str:
    """An accuracy. Two decimals only where there are enough pictures (``of``) to give them a meaning."""
    return f"{100 * share:.{2 if of is not None and of >= 1000 else 1}f}{SPACE}%"


def bound_percent(share: float) -> str:
    """An upper bound on a share, rounded up: two decimals below 1 %, else one."""
    if share >= _SAYS_NOTHING:
        return f"100{SPACE}%"
    return f"{_rounded_up(100 * share, 2 if share < 0.01 else 1)}{SPACE}%"


def number(value: object) -> str:
    """A value as a reader would write it: 60,000, 0.1, yes."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{int(value):,}" if value.is_integer() and abs(value) < 1e15 else f"{value:,.6g}"
    return "none" if value is None else str(value)


def sentence(text: str) -> str:
    """``text`` with a capital letter in front, unless its first word is a name such as num_units."""
    first = text.partition(" ")[0]
    return text if "_" in first else text[:1].upper() + text[1:]


def duration(seconds: float) -> str:
    """A training time."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def odds_factor(epsilon: float) -> str:
    """e^epsilon: how much more probable any outcome can become because of one unit."""
    factor = math.exp(min(epsilon, 700.0))
    return _rounded_up(factor, 1) if factor < 100 else (f"{math.ceil(factor):,}" if factor < 1e9 else f"{factor:.2g}")


def unit_and_pictures(unit: str) -> str:
    """The privacy unit as a phrase."""
    if unit in _ONE_PICTURE:
        return f"each single {_ONE_PICTURE[unit]}"
    return f"each {unit} with all of its pictures"


def less_than_a_person(unit: str) -> str | None:
    """What to say beside a guarantee whose unit is a part of what somebody gave."""
    if unit != "slice":
        return None
    return (
        "This is a guarantee for one slice, not for one patient. Whoever has many slices in the data is protected "
        "less, and what all of them show together may be recognised. Read it as a patient's protection only where a "
        "figure for patients stands beside it."
    )


def the_unit(unit: str) -> str:
    """A short name of the unit, for the middle of a sentence."""
    return "picture" if unit == "example" else unit


def neighbours(adjacency: Adjacency, unit: str) -> str:
    """Which two training sets the guarantee compares."""
    name = the_unit(unit)
    return {
        "add_remove": f"with and without this {name}",
        "replace_one": f"with this {name} and with any other {name} in its place",
        "zero_out": f"with this {name} and with its contribution left out",
    }[adjacency]


def secret(adjacency: Adjacency, unit: str) -> str:
    """What an attacker tries to find out."""
    name = the_unit(unit)
    if adjacency == "replace_one":
        return f"which of two given {name}s was in the training data"
    return f"whether a given {name} was in the training data"


def equal_chance(limit: float, unit: str) -> str:
    """What a limit on right answers means for the plainest of questions: in or out?"""
    if limit >= _SAYS_NOTHING:
        return (
            "At this epsilon the bound excludes hardly any attack. Real attacks are usually weaker than the worst "
            "case, but only a smaller epsilon proves a limit."
        )
    return (
        f"Asked about a {the_unit(unit)} that is in or out with equal chance, no attack answers right in more than "
        f"{bound_percent(limit)} of cases (guessing: 50{SPACE}%)."
    )


def orientation(epsilon: float) -> str:
    """Where epsilon stands by a published yardstick."""
    if epsilon <= 1:
        tier = "“strong”"
    elif epsilon <= 10:
        tier = "“reasonable”"
    else:
        tier = "“weak to none”"
    return (
        f"A published yardstick (Ponomareva et al., “How to DP-fy ML”, 2023) calls the formal protection at this "
        f"epsilon {tier}: strong up to 1, reasonable up to 10, weak above."
    )


def delta_warning(delta: float, num_units: object, unit: str) -> str | None:
    """What to say when delta is too large to mean anything."""
    if not isinstance(num_units, int) or num_units < 1 or delta < 1 / num_units:
        return None
    return (
        f"Delta is not below 1/{num_units:,}: a mechanism that simply publishes one {the_unit(unit)} in full "
        f"could meet such a guarantee. Choose a smaller delta."
    )


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share that was measured on ``count`` pictures (Wilson's score interval)."""
    z = 1.959964
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _rounded_up(value: float, decimals: int) -> str:
    if value >= 1e12:
        return f"{value:.3g}"
    return str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-decimals), ROUND_CEILING))
