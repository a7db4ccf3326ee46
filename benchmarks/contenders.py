"""Everybody who can take part, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

from benchmarks.contender import Contender
from benchmarks.contenders_engine import ENGINE
from benchmarks.contenders_jax import UNNAMED
from benchmarks.contenders_opacus import OPACUS
from benchmarks.contenders_ordinary import ORDINARY
from dpvision.errors import ArgumentError, did_you_mean

REFERENCE: Final = "eager"
"""The contender that all ratios are ratios to; it always takes part."""

ALL: Final[tuple[Contender, ...]] = (*ORDINARY, *ENGINE, *OPACUS, UNNAMED)
_BY_NAME: Final = {contender.name: contender for contender in ALL}


def contender(name: str) -> Contender:
    """The contender of that name."""
    if name not in _BY_NAME:
        raise ArgumentError(f"contenders must be names of contenders, got {name!r}. {did_you_mean(name, _BY_NAME)}")
    return _BY_NAME[name]


def named(names: Sequence[str]) -> tuple[Contender, ...]:
    """These contenders and the reference, each once, in the usual order."""
    wanted = {REFERENCE, *(contender(name).name for name in names)}
    return tuple(one for one in ALL if one.name in wanted)


def default(*, compile_: bool) -> tuple[Contender, ...]:
    """Everybody who can run here; those that compile only where asked for, because that takes minutes."""
    there = (*ORDINARY, *ENGINE, *(OPACUS if find_spec("opacus") is not None else ()))
    return tuple(one for one in there if compile_ or not one.compiles)
