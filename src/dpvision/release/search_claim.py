"""The cost of a hyper-parameter search, recomputed from its ledger: what the certificate of its winner claims.

The headline epsilon of a release that came out of a search is that of the whole search. ``search_cost`` computes it,
``verify`` calls the same function. Three prices exist, and the ledger's header fixes which one holds:

- composition by PLD of everything that any trial could release, where no trial's noise depends on earlier results;
- composition under a Rényi filter, where it may: the limit that was fixed before the first trial is the guarantee;
- best of a random number of trials (Papernot and Steinke), one charge for the whole search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpvision.accounting import (
    CURVE_DELTAS,
    Charges,
    Profile,
    best_of_random_many,
    divergence_at,
    filter_epsilon,
    guarantee,
    true_positive_bound,
)
from dpvision.errors import PrivacyError, TamperError, validation_message
from dpvision.privacy.ledger import Entry, charges_of, committed_release, planned_releases
from dpvision.privacy.mechanism import Adjacency, Event
from dpvision.release.build import FALSE_POSITIVE_RATES, Bounds, SearchCost, bounds_of
from dpvision.release.schema import AttackBound, CurvePoint, LedgerMark, SearchClaim
from dpvision.release.statements import TRIAL, declared_in

_SHARED = ("privacy_unit", "adjacency", "delta")
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


@final
class _Release(BaseModel):
    """A planned release, as in a ``trial`` entry."""

    model_config = _STRICT
    sample_rate: float
    noise_multiplier: float
    purpose: str
    count: int


@final
class _Stage(BaseModel):
    """What trials release from number ``first`` on."""

    model_config = _STRICT
    first: int
    releases: list[_Release]


@final
class _Plan(BaseModel):
    """What every trial and the final run release."""

    model_config = _STRICT
    trials: list[_Stage]
    final: list[_Release] | None


@final
class _Filter(BaseModel):
    """A Rényi filter."""

    model_config = _STRICT
    order: float
    divergence: float


@final
class _SearchHeader(BaseModel):
    """What the header of a search's ledger says of the search."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    price: Literal["composition", "best_of"]
    sampler: str
    adaptive: bool
    score: str
    space: dict[str, str]
    budget: float = Field(gt=0)
    filter: _Filter | None
    planned: _Plan | None


def _facts(search: Sequence[Entry]) -> _SearchHeader:
    """Read the header, which anyone may have written."""
    try:
        return _SearchHeader.model_validate(search[0].payload)
    except ValidationError as error:
        why = validation_message(error, whole="header", most=2)
        raise TamperError(f"the search's ledger does not say what was searched: {why}.") from error


def search_cost(search: Sequence[Entry], run: Sequence[Entry]) -> SearchCost:
    """Compute what a search has spent, and check that it covers the released run.

    Args:
        search: The entries of the search's ledger, checked.
        run: The entries of the released run's ledger, checked.

    Returns:
        The bounds of the whole search, and what the certificate says of it.

    Raises:
        TamperError: The two ledgers do not belong together, or the run releases more than its search charged.
        PrivacyError: No finite epsilon can be proved, or the trials exceed the filter's limit.

    Guarantee:
        The bounds cover every trial, every score and the released run.
    """
    header, ran = search[0].payload, run[0].payload
    facts = _facts(search)
    _require_together(search, run)
    bounds, accountant = search_bounds(search)
    selection = next((entry.payload for entry in search if entry.kind == "selection"), None)
    trials = [entry.payload for entry in search if entry.kind == "trial"]
    alone = guarantee(charges_of(run), delta=ran["delta"], adjacency=ran["adjacency"]).epsilon
    claim = SearchClaim(
        search_id=header["run_id"],
        price=facts.price,
        accountant=accountant,
        sampler=facts.sampler,
        score=facts.score,
        space=facts.space,
        budget=facts.budget,
        trials=None if selection else sum(each["role"] == "trial" and each["attempt"] == 0 for each in trials),
        repeated=None if selection else sum(each["attempt"] > 0 for each in trials),
        stopping=None if selection is None else selection["stopping"],
        mean_trials=None if selection is None else selection["mean_trials"],
        epsilon_of_this_run_alone=alone,
        ledger=LedgerMark(length=len(search), head=search[-1].hash),
    )
    declared = tuple(note for note in declared_in(search)[1:] if note.what != TRIAL)
    exact = charges_of(search) if accountant == "pld" else None
    return SearchCost(bounds=bounds, claim=claim, charges=exact, declared=declared, shown=charges_of(search))


def search_bounds(search: Sequence[Entry]) -> tuple[Bounds, Literal["pld", "rdp_filter", "rdp"]]:
    """Compute what a search has spent so far, whether or not it released anything.

    Args:
        search: The entries of the search's ledger, checked.

    Returns:
        The bounds, and by which accountant: only those by PLD are a composition of the ledger's charges.

    Raises:
        TamperError: The ledger is not that of a search.
        PrivacyError: No finite epsilon can be proved, or the trials exceed the filter's limit.
    """
    header, facts = search[0].payload, _facts(search)
    if facts.price == "best_of":
        return _best_of(search), "rdp"
    if facts.filter is not None:
        return _filtered(search), "rdp_filter"
    _require_fixed_noise(search)
    return bounds_of(charges_of(search), delta=header["delta"], adjacency=header["adjacency"]), "pld"


def _require_together(search: Sequence[Entry], run: Sequence[Entry]) -> None:
    """The run is a trial of this search, under the same guarantee, and released no more than its trial was charged."""
    header, ran = search[0].payload, run[0].payload
    named = [entry.payload["how"] for entry in run if entry.kind == "declare" and entry.payload["what"] == TRIAL]
    if named != [header["run_id"]]:
        raise TamperError("the run's ledger does not name the search whose ledger lies beside it.")
    different = [name for name in _SHARED if header[name] != ran[name]]
    if different:
        raise TamperError(f"search and run differ in {', '.join(different)}: the search's ledger is of other data.")
    spent = charges_of(run)
    covered = any(
        _covers(planned_releases(entry.payload), spent) for entry in search if entry.kind in ("trial", "selection")
    )
    if not covered:
        raise TamperError("the search's ledger charges no trial that covers what the released run has spent.")
    committed = committed_release(search)
    released = committed_release(run)
    if committed is None or released is None or committed != released:
        raise TamperError("the search's ledger does not commit to the released run: entries were removed or added.")


def _covers(planned: Charges, spent: Charges) -> bool:
    """Whether each kind of release was planned at least as often as it was charged."""
    allowed: dict[Event, int] = dict(planned)
    return all(count <= allowed.get(event, 0) for event, count in spent)


def _require_fixed_noise(search: Sequence[Entry]) -> None:
    """Without a filter, no result may have changed what a trial costs.

    Either settings are drawn independently of all results and there is no final run; or the final run is alone, and its
    settings come from public data; or the header, which is older than the first trial, says what the trial of each
    number and the final run release.
    """
    facts = _facts(search)
    entries = [entry.payload for entry in search if entry.kind == "trial"]
    planned = facts.planned
    if planned is None:
        final = [[_Release(**one) for one in each["releases"]] for each in entries if each["role"] == "final"]
        alone = len(final) == len(entries) and all(_at_most(each, final[0]) for each in final)
        if not alone and (final or facts.adaptive):
            raise PrivacyError(
                "what the trials of this search cost may depend on earlier results, which composes only under a filter "
                "that was fixed before the first trial."
            )
        return
    for each in entries:
        releases = [_Release(**release) for release in each["releases"]]
        if each["role"] == "final":
            same = _at_most(releases, planned.final)
        else:
            stages = [stage.releases for stage in planned.trials if stage.first <= each["trial"]]
            same = releases in stages[-1:]
        if not same:
            raise PrivacyError(f"trial {each['trial']} does not cost what was planned before the first trial.")


def _at_most(releases: list[_Release], planned: list[_Release] | None) -> bool:
    """Whether these are the planned releases, with at least their noise."""
    if planned is None or len(releases) != len(planned):
        return False
    return all(
        one == other.model_copy(update={"noise_multiplier": one.noise_multiplier})
        and one.noise_multiplier >= other.noise_multiplier
        for one, other in zip(releases, planned, strict=True)
    )


def _best_of(search: Sequence[Entry]) -> Bounds:
    """One charge: the best of a random number of trials."""
    chosen = [entry.payload for entry in search if entry.kind == "selection"]
    if len(chosen) != 1:
        raise TamperError("the search's ledger must hold one charge for the selection of the best trial.")
    payload, header = chosen[0], search[0].payload

    def epsilon_at(delta: float) -> float:
        return best_of_random_many(
            planned_releases(payload),
            mean_trials=payload["mean_trials"],
            stopping=payload["stopping"],
            delta=delta,
            adjacency=header["adjacency"],
        ).epsilon

    return _from_curve({delta: epsilon_at(delta) for delta in {header["delta"], *CURVE_DELTAS}}, header["delta"])


def _filtered(search: Sequence[Entry]) -> Bounds:
    """The limit of the filter, if the trials are within it."""
    header = search[0].payload
    order, limit = _filter_of(search)
    spent = filter_spent(search)
    if not spent <= limit:
        raise PrivacyError(
            f"the trials have a Rényi divergence of {spent:.6g} at order {order:g}, more than the limit {limit:.6g} "
            "that was fixed before the first one."
        )
    deltas = {header["delta"], *CURVE_DELTAS}
    curve = {delta: filter_epsilon(order=order, divergence=limit, delta=delta) for delta in deltas}
    return _from_curve(curve, header["delta"])


def filter_spent(search: Sequence[Entry]) -> float:
    """Return the Rényi divergence of all trials so far, at the order of the search's filter."""
    header = search[0].payload
    order, _ = _filter_of(search)
    adjacency: Adjacency = header["adjacency"]
    entries = [entry for entry in search if entry.kind == "trial"]
    parts = [divergence_at(planned_releases(each.payload), order=order, adjacency=adjacency) for each in entries]
    return math.fsum(parts)


def _filter_of(search: Sequence[Entry]) -> tuple[float, float]:
    found = _facts(search).filter
    if found is None:
        raise TamperError("the search's ledger names no filter.")
    return found.order, found.divergence


def _from_curve(epsilons: dict[float, float], delta: float) -> Bounds:
    """Bounds from (epsilon, delta) pairs by RDP; a pair that proves nothing is left out."""
    epsilon = epsilons[delta]
    if not math.isfinite(epsilon):
        raise PrivacyError(f"no finite epsilon can be proved at delta {delta:g}. Choose a larger delta.")
    proved = {at: value for at, value in epsilons.items() if math.isfinite(value)}
    profile = Profile.from_pairs([(value, at) for at, value in proved.items()])
    return Bounds(
        epsilon=epsilon,
        epsilon_rdp=epsilon,
        curve=tuple(CurvePoint(delta=at, epsilon=proved[at]) for at in sorted(proved, reverse=True)),
        attack_success=tuple(
            AttackBound(
                false_positive_rate=rate, true_positive_rate=true_positive_bound(profile, false_positive_rate=rate)
            )
            for rate in FALSE_POSITIVE_RATES
        ),
    )
