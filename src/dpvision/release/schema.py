"""The layout of certificate.json, format 2."""

from __future__ import annotations

from typing import Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpvision.errors import ArgumentError, brief
from dpvision.privacy.mechanism import Adjacency

FORMAT = 2
MOST_SHOWN = 10
_Digest = Field(pattern="^[0-9a-f]{64}$")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@final
class Charged(_Part):
    """One kind of noisy release and how often it was charged."""

    purpose: str
    sample_rate: float
    noise_multiplier: float
    count: int = Field(ge=1)


@final
class Declared(_Part):
    """A public fact, or a look at data, that is declared and not charged."""

    what: str
    how: str


@final
class CurvePoint(_Part):
    """One more proved pair."""

    delta: float = Field(gt=0, lt=1)
    epsilon: float = Field(ge=0)


@final
class GaussianBound(_Part):
    """At every epsilon up to ``epsilon_up_to`` the run is at least as private as a Gaussian release of shift ``mu``."""

    mu: float = Field(ge=0)
    epsilon_up_to: float = Field(ge=0)


@final
class AttackBound(_Part):
    """The most members that any test recognises while it wrongly accuses this share of the others."""

    false_positive_rate: float = Field(ge=0, le=1)
    true_positive_rate: float = Field(ge=0, le=1)


@final
class OtherUnit(_Part):
    """What the same charges prove for another unit than the protected one; no epsilon: nothing is proved."""

    unit: str
    epsilon: float | None = Field(ge=0)
    delta: float = Field(gt=0, lt=1)
    why: str


@final
class Attachment(_Part):
    """A further file of the release that belongs to the claim, such as an audit."""

    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    sha256: str = _Digest


@final
class LedgerMark(_Part):
    """The ledger from which the certificate was made."""

    length: int = Field(ge=1)
    head: str = _Digest


@final
class Certificate(_Part):
    """All that a release claims."""

    format: Literal[2]
    for_release: bool
    stamps: list[str]
    privacy_unit: str = Field(min_length=1)
    adjacency: Adjacency
    delta: float | None = Field(gt=0, lt=1)
    epsilon: float | None = Field(ge=0)
    epsilon_rdp: float | None = Field(ge=0)
    curve: list[CurvePoint]
    gaussian_dp: GaussianBound | None
    attack_success: list[AttackBound]
    other_units: list[OtherUnit]
    mechanism: dict[str, Any]
    sampler: Literal["poisson"] | None
    divisor: float | None = Field(gt=0)
    steps_taken: int = Field(ge=0)
    charged: list[Charged]
    declared: list[Declared]
    not_covered: list[str]
    deployment: dict[str, str]
    ledger: LedgerMark
    weights_sha256: str = _Digest
    config_sha256: str = _Digest
    data: dict[str, Any]
    software: dict[str, Any]
    attachments: list[Attachment]


def parse_certificate(values: object) -> Certificate:
    """Check a certificate's layout; ``ArgumentError`` names every field that is wrong."""
    try:
        return Certificate.model_validate(values)
    except ValidationError as error:
        problems = error.errors(include_url=False)[:MOST_SHOWN]
        found = (f"{brief('.'.join(map(str, p['loc'])) or 'all')}: {p['msg']}" for p in problems)
        raise ArgumentError("; ".join(found)) from error
