"""The one builder of certificates: from the entries of a ledger to everything that a release claims.

``verify`` calls the same builder and compares, so whatever is computed here is checked there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, final

from dpvision.accounting import (
    CURVE_DELTAS,
    AttackRisk,
    Charges,
    Profile,
    full_profile,
    gaussian_dp,
    guarantee,
    owner_guarantee,
    row_guarantee,
    true_positive_bound,
)
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.ledger import TRAINING, Entry, charges_of
from dpvision.privacy.mechanism import Adjacency, Event, Guarantee, Mechanism
from dpvision.release.schema import (
    AttackBound,
    Certificate,
    Charged,
    CurvePoint,
    Declared,
    Format,
    GaussianBound,
    LedgerMark,
    OtherUnit,
    SearchClaim,
    format_for,
    parse_certificate,
)
from dpvision.release.statements import (
    ROW_UNITS,
    SEARCH_ACCOUNTING,
    WORDING,
    declared_in,
    deployment_of,
    not_covered_by,
    stamps_of,
)

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
_SAME_EPSILON = 1e-3  # relative; other versions of the accountant differ by less


@final
@dataclass(frozen=True, kw_only=True)
class ReleaseFacts:
    """What a certificate says without the ledger: hashes of the released files, and public descriptions."""

    weights_sha256: str
    config_sha256: str
    data: Mapping[str, Any]
    software: Mapping[str, Any]


def build_certificate(
    *,
    ledger: Sequence[Entry],
    mechanism: Mechanism | None,
    hand_seeded: bool,
    release: ReleaseFacts,
    version: Format | None = None,
    search: SearchCost | None = None,
) -> dict[str, Any]:
    """Build the certificate of a run.

    Args:
        ledger: The entries of the run's ledger, the header first.
        mechanism: What the run was planned with; None without privacy.
        hand_seeded: Whether the key was made from a seed, so that the run must not be released.
        release: Hashes of the released files, and public descriptions of data and software.
        version: The format, which decides the sentences. Default: the newest that suits the ledger's format.
        search: What the search has spent that the run is the result of; its bounds are the certificate's.

    Returns:
        The content of certificate.json, without attachments.

    Raises:
        PrivacyError: The mechanism is not the one that the ledger was opened for, or no finite epsilon can be proved.

    Guarantee:
        Epsilon covers every charge in the ledger, and in that of the search if there was one. A run that must not be
        released says so; so does a trial of a search whose cost is not given.
    """
    header = ledger[0].payload
    version = format_for(header) if version is None else version
    _require_same_facts(header, mechanism)
    charges = charges_of(ledger)
    steps = steps_taken(charges)
    stamps = stamps_of(ledger, mechanism, hand_seeded=hand_seeded, version=version, searched=search is not None)
    declared, deployment = declared_in(ledger, version=version), deployment_of(ledger, version=version)
    if search is None:
        rates = attack_rates(header)
        bounds = bounds_of(charges, delta=header["delta"], adjacency=header["adjacency"], rates=rates)
        other_units = _other_units(header, charges, version=version)
    else:
        bounds = search.bounds
        other_units = _other_units(header, search.charges, version=version)
        declared = [*declared, *(note for note in search.declared if note not in declared)]
        deployment = {**deployment, "accounting": SEARCH_ACCOUNTING[search.claim.accountant]}
        charges = search.shown
    certificate = Certificate(
        format=version,
        for_release=not stamps,
        stamps=stamps,
        privacy_unit=header["privacy_unit"],
        adjacency=header["adjacency"],
        delta=header["delta"],
        epsilon=bounds.epsilon,
        epsilon_rdp=bounds.epsilon_rdp,
        curve=list(bounds.curve),
        gaussian_dp=bounds.gaussian_dp,
        attack_success=list(bounds.attack_success),
        other_units=other_units,
        mechanism={} if mechanism is None else mechanism.to_dict(),
        sampler=None if mechanism is None else "poisson",
        divisor=None if mechanism is None else mechanism.divisor,
        steps_taken=steps,
        charged=[
            Charged(purpose=e.purpose, sample_rate=e.sample_rate, noise_multiplier=e.noise_multiplier, count=count)
            for e, count in charges
        ],
        declared=declared,
        not_covered=not_covered_by(ledger, version=version),
        deployment=deployment,
        ledger=LedgerMark(length=len(ledger), head=ledger[-1].hash),
        weights_sha256=release.weights_sha256,
        config_sha256=release.config_sha256,
        data=dict(release.data),
        software=dict(release.software),
        attachments=[],
        search=None if search is None else search.claim,
    )
    return certificate.model_dump()


def with_attachment(certificate: Mapping[str, Any], *, name: str, sha256: str) -> dict[str, Any]:
    """Return the certificate with one more attachment.

    Args:
        certificate: The content of certificate.json.
        name: The file's name inside the release; an earlier attachment of that name is replaced.
        sha256: The file's SHA-256, in hex.

    Returns:
        The new content of certificate.json. Every other claim stays as it is.

    Raises:
        ArgumentError: The name is not a plain file name of at most 100 characters.
    """
    known = parse_certificate(certificate)
    hashes = {attachment.name: attachment.sha256 for attachment in known.attachments} | {name: sha256}
    named = [{"name": name, "sha256": sha256} for name, sha256 in sorted(hashes.items())]
    return parse_certificate({**known.model_dump(), "attachments": named}).model_dump()


def differing_facts(header: Mapping[str, Any], mechanism: Mechanism) -> list[str]:
    """Return the names of the mechanism's facts that differ from the ledger's header.

    A header need not name every fact. Headers written before ``clipping`` existed mean flat clipping.
    """
    opened_for = {"clipping": "flat", "unit_norm": False, **header}
    names = ("num_units", "privacy_unit", "adjacency", "clip_norm", "clipping", "unit_norm")
    names += ("steps", "expected_batch_size", "noise_multiplier")
    return [name for name in names if name in opened_for and opened_for[name] != getattr(mechanism, name)]


def _require_same_facts(header: Mapping[str, Any], mechanism: Mechanism | None) -> None:
    """Refuse a mechanism that is not the ledger's."""
    if mechanism is None:
        if header["delta"] is not None:
            raise PrivacyError("the ledger is that of a private run, so its certificate needs the mechanism.")
        return
    wrong = differing_facts(header, mechanism)
    if header["delta"] is None or wrong:
        names = ", ".join(wrong) or "delta"
        raise PrivacyError(f"the mechanism is not the one that the ledger was opened for: {names} differ.")


def steps_taken(charges: Charges) -> int:
    """Return the number of training steps that were charged, over all forks: at least the number taken."""
    return sum(count for event, count in charges if event.purpose == TRAINING)


@final
@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Upper bounds on what the charges of a ledger spend. All None or empty in a run without privacy."""

    epsilon: float | None = None
    epsilon_rdp: float | None = None
    curve: tuple[CurvePoint, ...] = ()
    gaussian_dp: GaussianBound | None = None
    attack_success: tuple[AttackBound, ...] = ()


def attack_rates(header: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the false-positive rates at which a certificate bounds attacks: three, and that of the run's target risk.

    Args:
        header: The ledger's header. Its ``target_risk``, if it has one, adds a rate.

    Returns:
        The rates, rising.
    """
    try:
        risk = AttackRisk.parse(str(header["target_risk"]))
    except (KeyError, ArgumentError):
        return FALSE_POSITIVE_RATES
    return tuple(sorted({*FALSE_POSITIVE_RATES, risk.telling_rate}))


@final
@dataclass(frozen=True, kw_only=True)
class SearchCost:
    """What a search has spent, as its ledger gives it (``search_claim.search_cost``).

    Attributes:
        bounds: The guarantee of the whole search.
        claim: What the certificate says of it.
        charges: Charges whose composition is the guarantee; None where it is not a composition by PLD.
        declared: What the search declares.
        shown: All charges of the search's ledger; with the best-of price those of one trial.
    """

    bounds: Bounds
    claim: SearchClaim
    charges: tuple[tuple[Event, int], ...] | None
    declared: tuple[Declared, ...]
    shown: tuple[tuple[Event, int], ...]


@lru_cache(maxsize=64)
def bounds_of(
    charges: tuple[tuple[Event, int], ...],
    *,
    delta: float | None,
    adjacency: Adjacency,
    rates: tuple[float, ...] = FALSE_POSITIVE_RATES,
) -> Bounds:
    """Compute epsilon by both accountants, and by PLD the curve and the bounds on attacks.

    Args:
        charges: Noisy releases, and how often each was charged.
        delta: The delta of the guarantee; None without privacy.
        adjacency: Which datasets are neighbours.
        rates: False-positive rates at which attacks are bounded.

    Returns:
        The bounds, none of them without privacy.

    Raises:
        PrivacyError: No finite epsilon can be proved at this delta.
    """
    if delta is None:
        return Bounds()
    by_pld = guarantee(charges, delta=delta, adjacency=adjacency, accountant="pld").epsilon
    by_rdp = guarantee(charges, delta=delta, adjacency=adjacency, accountant="rdp").epsilon
    if not (math.isfinite(by_pld) and math.isfinite(by_rdp)):
        raise PrivacyError(f"no finite epsilon can be proved at delta {delta:g}. Choose a larger delta.")
    epsilons = {delta: by_pld}
    for at in CURVE_DELTAS:
        epsilon = _if_proved(lambda at=at: guarantee(charges, delta=at, adjacency=adjacency))
        if at != delta and epsilon is not None:
            epsilons[at] = epsilon
    profile = full_profile(charges, delta=delta, adjacency=adjacency)
    return Bounds(
        epsilon=by_pld,
        epsilon_rdp=by_rdp,
        curve=tuple(CurvePoint(delta=at, epsilon=epsilons[at]) for at in sorted(epsilons, reverse=True)),
        gaussian_dp=GaussianBound(**asdict(gaussian_dp(profile))),
        attack_success=tuple(
            AttackBound(
                false_positive_rate=rate, true_positive_rate=true_positive_bound(profile, false_positive_rate=rate)
            )
            for rate in rates
        ),
    )


def _other_units(header: Mapping[str, Any], charges: Charges | None, *, version: Format) -> list[OtherUnit]:
    """What the charges prove for the owner of several units, or for one row of a unit that owns several.

    Without ``charges`` nothing is proved for them.
    """
    delta, unit, adjacency = header["delta"], header["privacy_unit"], header["adjacency"]
    most_rows = header.get("most_rows_per_owner")
    if delta is None:
        return []
    if unit not in ROW_UNITS:
        words = WORDING[version].one_row
        prove: Callable[[Charges], Guarantee] = partial(row_guarantee, delta=delta, adjacency=adjacency)
    elif most_rows is not None:
        words = WORDING[version].owner
        prove = partial(owner_guarantee, most_rows=most_rows, delta=delta, adjacency=adjacency)
    else:
        return []
    epsilon = None if charges is None else _if_proved(lambda: prove(charges))
    name, why = (text.format(unit=unit, most_rows=most_rows) for text in words)
    return [OtherUnit(unit=name, epsilon=epsilon, delta=delta, why=why)]


def _if_proved(prove: Callable[[], Guarantee]) -> float | None:
    """Epsilon, or None without a proof: a release must not fail because a secondary value cannot be proved."""
    try:
        epsilon = prove().epsilon
    except ArgumentError:
        return None
    return epsilon if math.isfinite(epsilon) else None


def proved_profile(certificate: Certificate) -> Profile:
    """Return the privacy profile behind a certificate, for ``true_positive_bound``.

    Args:
        certificate: A parsed certificate.

    Returns:
        The profile of the certificate's charges, if they give its stated epsilon. Otherwise a profile of the
        (epsilon, delta) pairs that the certificate states; without privacy it is empty.

    Guarantee:
        Charges that contradict the stated epsilon are ignored: they cannot make a bound smaller.
    """
    charges = tuple(
        (Event(sample_rate=part.sample_rate, noise_multiplier=part.noise_multiplier), part.count)
        for part in certificate.charged
    )
    pairs = [(point.epsilon, point.delta) for point in certificate.curve]
    if certificate.epsilon is None or certificate.delta is None:
        return Profile.from_pairs(pairs)
    stated = (certificate.epsilon, certificate.delta)
    return _profile_of(charges, stated, certificate.adjacency) or Profile.from_pairs([*pairs, stated])


@lru_cache(maxsize=64)
def _profile_of(
    charges: tuple[tuple[Event, int], ...], stated: tuple[float, float], adjacency: Adjacency
) -> Profile | None:
    """The profile of the charges; None if they do not give the stated epsilon or cannot be computed."""
    epsilon, delta = stated
    try:
        again = guarantee(charges, delta=delta, adjacency=adjacency).epsilon
        same = abs(again - epsilon) <= _SAME_EPSILON * epsilon
        return full_profile(charges, delta=delta, adjacency=adjacency) if same else None
    except ArgumentError:
        return None
