"""The layout of certificate.json.

``format`` says with which sentences a certificate was written (statements.py has them all): 2 is the first published
format, 3 has plain words, 4 belongs to ledgers that commit to the released files. The fields are the same, and all
formats can be verified. ``search`` is an addition to format 4 that older programs refuse. New certificates have
``FORMAT``, but one for a ledger of format 1 has ``format_for``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from dpvision.errors import ArgumentError, validation_message
from dpvision.privacy.ledger import COMMITTING_FORMAT
from dpvision.privacy.mechanism import Adjacency

Format = Literal[2, 3, 4]
FORMAT: Format = 4
_Digest = Field(pattern="^[0-9a-f]{64}$")


class _Part(BaseModel):
    """Frozen and strict: no unknown field, no conversion of types, no infinite number."""

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
    """A public fact, or a query to data, that is declared and not charged."""

    what: str
    how: str


@final
class CurvePoint(_Part):
    """One proved (epsilon, delta) pair."""

    delta: float = Field(gt=0, lt=1)
    epsilon: float = Field(ge=0)


@final
class GaussianBound(_Part):
    """At every epsilon up to ``epsilon_up_to`` the run is at least as private as a Gaussian release of shift ``mu``."""

    mu: float = Field(ge=0)
    epsilon_up_to: float = Field(ge=0)


@final
class AttackBound(_Part):
    """The largest true positive rate of any membership test at this false positive rate."""

    false_positive_rate: float = Field(ge=0, le=1)
    true_positive_rate: float = Field(ge=0, le=1)


@final
class OtherUnit(_Part):
    """What the same charges prove for another unit than the protected one; epsilon None means nothing is proved."""

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
    """Length and head hash of the ledger from which the certificate was made."""

    length: int = Field(ge=1)
    head: str = _Digest


@final
class SearchClaim(_Part):
    """The hyper-parameter search that the release came out of. The certificate's epsilon is that of all of it.

    ``epsilon_of_this_run_alone`` is shown for comparison; it is not the guarantee. ``trials`` and ``repeated`` (trials
    that were charged again after a crash) are None where only the best trial is released: their number is secret.
    """

    search_id: str = Field(min_length=1)
    price: Literal["composition", "best_of"]
    accountant: Literal["pld", "rdp_filter", "rdp"]
    sampler: str
    score: str
    space: dict[str, str]
    budget: float | None = Field(gt=0)
    trials: int | None = Field(ge=0)
    repeated: int | None = Field(ge=0)
    stopping: str | None
    mean_trials: float | None = Field(ge=1)
    epsilon_of_this_run_alone: float = Field(ge=0)
    ledger: LedgerMark


@final
class Certificate(_Part):
    """Everything that a release claims. ``search`` is there only for a run that was chosen by a search."""

    format: Format
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
    search: SearchClaim | None = None

    @model_serializer(mode="wrap")
    def _without_empty_search(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = handler(self)
        return values if self.search is not None else {k: v for k, v in values.items() if k != "search"}


def format_for(header: Mapping[str, Any]) -> Format:
    """Return the format of a new certificate for a ledger with this header: 3 if the ledger commits to no files."""
    return FORMAT if header["format"] >= COMMITTING_FORMAT else 3


def parse_certificate(values: object) -> Certificate:
    """Check the layout of a certificate.

    Args:
        values: The parsed content of certificate.json.

    Returns:
        The certificate.

    Raises:
        ArgumentError: A field is missing, unknown or out of range; the message names every one, up to ten.
    """
    try:
        return Certificate.model_validate(values)
    except ValidationError as error:
        raise ArgumentError(validation_message(error, whole="all")) from error
