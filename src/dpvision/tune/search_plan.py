"""What a search may spend: its settings, the noise of each trial, and the price of all of it, before it starts.

``SearchSettings`` is what the user asks for; ``plan_search`` turns it into a ``SearchPlan`` or refuses it. Nothing here
reads private data or imports torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal, final

from pydantic import Field, ValidationError, model_validator

from dpvision.accounting import (
    Charges,
    best_filter_order,
    best_of_random_many,
    calibrate_noise_multiplier,
    divergence_at,
    filter_epsilon,
    filter_limit,
    guarantee,
    steps_for_epochs,
)
from dpvision.accounting.calibrate import NOISE_GRID, last_within
from dpvision.config import RunConfig, Settings, required
from dpvision.errors import ArgumentError, validation_message
from dpvision.privacy.mechanism import Event
from dpvision.tune.space import SearchSpace, parse_space

Sampler = Literal["tpe", "random", "quasi_random", "grid"]
Price = Literal["composition", "best_of"]
Pruner = Literal["none", "threshold", "patience"]
ADAPTIVE: frozenset[str] = frozenset({"tpe"})
MOST_TRIALS = 10_000
SCORE = "validation score"
"""The purpose of the charge for a score on private data."""
LEAST_SCORE_NOISE = 8.0
MOST_POISSON = 500
"""Largest mean of a Poisson number of trials: the chance of none must not round to zero."""
_SLACK = 0.995  # trials of different noise compose to a little more than the mean of their epsilons
_NOISE_ENDS = (1e5, 0.05)
_ROUNDED = 1 - 1e-9  # as many equal parts as there are trials fit into the limit, however they are added up


@final
class SearchSettings(Settings):
    """What to search, how, and at which price. It is part of the search's folder."""

    space: dict[str, Any]
    """Values of each searched setting, by name."""
    sampler: Sampler = "random"
    """How settings are proposed."""
    price: Price = "composition"
    """composition: every trial is charged and may be shown. best_of: only the best trial is released."""
    trials: int = Field(default=10, ge=1, le=MOST_TRIALS)
    """Number of trials; with best_of the mean of their random number. A grid by composition has one for each point."""
    stopping: Literal["geometric", "logarithmic", "poisson"] = "geometric"
    """Distribution of the number of trials, with best_of."""
    score: Literal["auto", "public", "private"] = "auto"
    """Data that trials are compared on: a public test set (free), or a private split (noise, charged)."""
    validation_fraction: float = Field(default=0.1, gt=0, lt=0.9)
    """Share of the units that is kept from training to compare trials, with a private score."""
    score_noise: float | None = Field(default=None, gt=0)
    """Standard deviation of the noise on the number of correct units. Default: 1 % of the split, at least 8."""
    budget_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the budget for the search; a final run with the best settings gets the rest. Default: the best trial is
    the result."""
    pruner: Pruner = "none"
    """End trials early: below a threshold, or after 15 evaluations without improvement. On public scores only. With
    patience a trial has 60 evaluations by default."""
    prune_below: float | None = Field(default=None, ge=0, le=1)
    """Score below which a trial ends at an evaluation, with the pruner threshold."""
    rule: Literal["none", "linear_scaling"] = "none"
    """linear_scaling: two stages of trials at small epsilons, whose best learning rate is extrapolated."""
    early: float | None = Field(default=None, gt=0, lt=1)
    """Share of its steps that a trial takes, so that candidates are compared early; the final run takes all steps."""
    batch_divisor: float = Field(default=1.0, ge=1, le=1024)
    """Divide the batch and the noise of trials on search_data by this number: the same noise per step, less work."""
    search_data: str | None = None
    """Similar public data that all trials use; then only the final run is charged."""

    @model_validator(mode="before")
    @classmethod
    def _one_trial_for_each_point(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("sampler") != "grid" or values.get("trials") is not None:
            return values
        if values.get("price", "composition") != "composition" or values.get("rule", "none") != "none":
            return values
        space = values.get("space")
        return {**values, "trials": parse_space(space).points} if isinstance(space, dict) else values

    def parsed_space(self) -> SearchSpace:
        """Return the search space; raises ``ArgumentError`` if it is wrong."""
        return parse_space(self.space)

    @property
    def adaptive(self) -> bool:
        """Whether later trials depend on what earlier ones released."""
        return self.sampler in ADAPTIVE or self.rule != "none"


def parse_settings(values: dict[str, Any]) -> SearchSettings:
    """Read the settings of a search; raises ``ArgumentError`` with one line that names every problem."""
    try:
        return SearchSettings.model_validate(values)
    except ValidationError as error:
        raise ArgumentError(validation_message(error, whole="search")) from error


STORAGE_VARIABLE = "DPVISION_TUNE_STORAGE"
"""The environment variable with the URL of a database: unlike a flag, other users do not see it in a process list."""


def with_driver(url: str | None) -> str | None:
    """Name a PostgreSQL driver that is installed: which one SQLAlchemy takes by itself depends on its version."""
    scheme, separator, rest = (url or "").partition("://")
    if scheme not in ("postgresql", "postgres"):
        return url
    driver = next((name for name in ("psycopg2", "psycopg") if find_spec(name) is not None), None)
    if driver is None:
        raise ArgumentError("PostgreSQL needs a driver: pip install psycopg2-binary.")
    return f"postgresql+{driver}{separator}{rest}"


@final
@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Time, processes and storage: without influence on what a trial computes.

    Attributes:
        timeout: seconds after which no trial is started.
        workers: processes that run trials.
        storage: URL of a database for the list of trials. It may hold a password, which is written nowhere. Default:
            the environment variable DPVISION_TUNE_STORAGE, else a journal in the search's folder.
    """

    timeout: float | None = None
    workers: int = 1
    storage: str | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise ArgumentError(f"timeout must be > 0 seconds, got {self.timeout}.")
        if not 1 <= self.workers <= 256:
            raise ArgumentError(f"workers must be between 1 and 256, got {self.workers}.")
        if self.storage is not None and "://" not in self.storage:
            raise ArgumentError("storage must be the URL of a database, such as postgresql://HOST/NAME.")

    @property
    def database(self) -> str | None:
        """The URL of the database, of ``storage`` or of the environment, with the driver that is installed.

        Raises:
            ArgumentError: it is PostgreSQL, and there is no driver for it.
        """
        return with_driver(self.storage or os.environ.get(STORAGE_VARIABLE))

    def __repr__(self) -> str:
        return f"SearchLimits(timeout={self.timeout}, workers={self.workers}, storage={'…' if self.storage else None})"


def check_settings(config: RunConfig, settings: SearchSettings, *, limits: SearchLimits | None = None) -> None:
    """Refuse a search that no price covers.

    Args:
        config: what every trial starts from; its target epsilon is the budget of the whole search.
        settings: the search.
        limits: time and storage of the search.

    Raises:
        ArgumentError: one line with the first problem. Nothing has been read or written then.
    """
    privacy, space = config.privacy, settings.parsed_space()
    limits = limits or SearchLimits()
    best_of, grid = settings.price == "best_of", settings.sampler == "grid" and settings.rule == "none"
    for refused, why in (
        (not privacy.enabled, "a search without privacy has no price: leave --no-privacy out."),
        (config.baseline, "a search trains no baseline: leave --baseline out."),
        (privacy.target_epsilon is None, "a search needs a budget: --budget EPSILON, for all trials together."),
        (privacy.accountant != "pld", "the noise of a trial follows from the budget by PLD: leave --accountant out."),
        (privacy.target_risk is not None, "the budget of a search is an epsilon: leave target_risk out."),
        (privacy.noise_multiplier is not None, "the noise of a trial follows from the budget: leave it out."),
        (privacy.count_noise_multiplier is not None, "a search does not count units: declare num_units."),
        (privacy.adjacency == "replace_one", "a search needs adjacency add_remove or zero_out."),
        (
            best_of and settings.sampler not in ("random", "grid"),
            f"price best_of needs independent random draws (sampler random or grid), got {settings.sampler}: a search "
            "that learns from earlier trials is priced by composition.",
        ),
        (
            best_of and settings.rule != "none",
            "price best_of needs independent trials: this search learns from earlier ones.",
        ),
        (
            best_of and space.changes_cost,
            "price best_of needs trials of one cost: leave expected_batch_size, steps and epochs out of the space.",
        ),
        (
            best_of and settings.stopping == "poisson" and settings.trials > MOST_POISSON,
            f"stopping=poisson is for at most {MOST_POISSON} trials on average: take another distribution.",
        ),
        (best_of and settings.budget_share is not None, "price best_of releases the best trial: no budget_share."),
        (best_of and limits.storage is not None, "price best_of keeps its trials in private/: leave --storage out."),
        (
            best_of and limits.timeout is not None,
            "price best_of draws its number of trials: a timeout would change it.",
        ),
        (
            best_of and settings.pruner != "none",
            "price best_of charges whole trials and shows none of them: leave the pruner out.",
        ),
        (
            settings.pruner != "none" and settings.score == "private",
            "pruners look at scores during a trial, which are not charged: use them with public scores only.",
        ),
        (
            (settings.pruner == "threshold") != (settings.prune_below is not None),
            "prune_below and pruner=threshold belong together.",
        ),
        (
            settings.search_data is not None and settings.budget_share is not None,
            "trials on public search_data cost nothing: no budget_share.",
        ),
        (
            settings.batch_divisor != 1 and settings.search_data is None,
            "batch_divisor keeps the noise of a step and raises epsilon: it is for trials on public search_data.",
        ),
        (settings.search_data is not None and best_of, "trials on public search_data cost nothing: no best_of."),
        (grid and space.points > MOST_TRIALS, f"a grid has at most {MOST_TRIALS} points, got {space.points}."),
        (
            grid and not best_of and settings.trials != space.points,
            f"a grid by composition runs all of its {space.points} points: leave trials={settings.trials} out, or give "
            "fewer values, such as log:0.1:4:3 for three.",
        ),
        (
            settings.early is not None and settings.budget_share is None and settings.search_data is None,
            "early compares trials after a part of their steps, so it needs a final run: give a budget_share.",
        ),
        (
            settings.rule == "linear_scaling" and (settings.budget_share is None or settings.trials < 4),
            "the linear scaling rule needs a budget_share and at least 4 trials, in two stages.",
        ),
    ):
        if refused:
            raise ArgumentError(why)


@final
@dataclass(frozen=True)
class SearchPlan:
    """What trials cost.

    Attributes:
        settings: the search.
        base: the configuration that every trial starts from, without noise.
        num_units: units that a trial trains on, declared.
        delta: of the guarantee.
        budget: epsilon of the whole search.
        score_noise: noise of a score on private data; None with public scores.
        noise: noise of every trial, where all cost the same; None otherwise.
        stage_noise: noise of the second half of the trials, with the linear scaling rule.
        final_noise: noise of the final run, where it does not depend on the search; None otherwise.
        filter: order and limit of the Rényi filter, where later trials may cost something else; None otherwise.
    """

    settings: SearchSettings
    base: RunConfig
    num_units: int
    delta: float
    budget: float
    score_noise: float | None = None
    noise: float | None = None
    stage_noise: float | None = None
    final_noise: float | None = None
    filter: tuple[float, float] | None = None

    @property
    def trials(self) -> int:
        """Trials by composition; 0 where trials run on public data and cost nothing."""
        return 0 if self.settings.search_data is not None else self.settings.trials

    def steps_of(self, config: RunConfig, *, final_run: bool = False) -> tuple[float, int]:
        """Return expected batch size and steps of a trial with this configuration, or of the final run."""
        privacy = config.privacy
        batch = required(privacy.expected_batch_size, "expected_batch_size")
        if batch > self.num_units:
            raise ArgumentError(f"expected_batch_size must be at most num_units={self.num_units}, got {batch:g}.")
        steps = privacy.steps
        if privacy.epochs is not None:
            steps = steps_for_epochs(privacy.epochs, num_units=self.num_units, expected_batch_size=batch)
        steps = required(steps, "steps")
        early = None if final_run else self.settings.early
        return batch, steps if early is None else max(1, math.ceil(early * steps))

    def other_releases(self, config: RunConfig, *, final_run: bool = False) -> Charges:
        """Return what a trial releases besides its steps: pixel statistics and its score."""
        found: list[tuple[Event, int]] = []
        if config.data.normalisation == "released":
            noise = config.data.statistics_noise_multiplier
            found.append((Event(sample_rate=1.0, noise_multiplier=noise, purpose="normalisation statistics"), 1))
        if self.score_noise is not None and not final_run:
            found.append((Event(sample_rate=1.0, noise_multiplier=self.score_noise, purpose=SCORE), 1))
        return tuple(found)

    def releases(self, config: RunConfig, noise: float, *, final_run: bool = False) -> Charges:
        """Return everything that a trial with this noise may release."""
        batch, steps = self.steps_of(config, final_run=final_run)
        step = Event(sample_rate=batch / self.num_units, noise_multiplier=noise)
        return ((step, steps), *self.other_releases(config, final_run=final_run))

    def noise_of(self, config: RunConfig, number: int) -> float:
        """Return the noise of a trial; on public search data that of a final run with its settings.

        Raises:
            ArgumentError: its share of the budget cannot hold it with any noise.
        """
        if self.stage_noise is not None and number >= first_stage(self.settings.trials):
            return self.stage_noise
        if self.noise is not None:
            return self.noise
        if self.settings.search_data is not None:
            return self.final_noise or self.final_noise_of(config, charges=())
        share = self.settings.budget_share or 1.0
        if self.filter is not None:
            order, limit = self.filter
            return self._least_noise(config, order=order, limit=_ROUNDED * share * limit / self.trials)
        return self.equal_noise(config, trials=self.trials, epsilon=_SLACK * share * self.budget)

    def final_noise_of(self, config: RunConfig, *, charges: Charges, spent: float | None = None) -> float:
        """Return the noise of the final run.

        Args:
            config: the run.
            charges: what the search was charged.
            spent: the Rényi divergence of that at the filter's order, where there is a filter.

        Raises:
            ArgumentError: nothing is left for it.
        """
        if self.filter is not None:
            order, limit = self.filter
            return self._least_noise(config, order=order, limit=limit - (spent or 0.0), final_run=True)
        return self.calibrated(config, extra=charges, trials=1, epsilon=self.budget, final_run=True)

    def equal_noise(self, config: RunConfig, *, trials: int, epsilon: float) -> float:
        """Return the least noise with which this many equal trials stay within epsilon, by PLD."""
        return self.calibrated(config, extra=(), trials=trials, epsilon=epsilon)

    def calibrated(
        self, config: RunConfig, *, extra: Charges, trials: int, epsilon: float, final_run: bool = False
    ) -> float:
        """Return the least noise with which this many equal trials and ``extra`` stay within epsilon, by PLD."""
        batch, steps = self.steps_of(config, final_run=final_run)
        others = [(event, count * trials) for event, count in self.other_releases(config, final_run=final_run)]
        return calibrate_noise_multiplier(
            num_units=self.num_units,
            expected_batch_size=batch,
            steps=steps * trials,
            target_epsilon=epsilon,
            delta=self.delta,
            adjacency=config.privacy.adjacency,
            extra=(*extra, *others),
        )

    def _least_noise(self, config: RunConfig, *, order: float, limit: float, final_run: bool = False) -> float:
        """The least noise with which the divergence of a trial at ``order`` stays within ``limit``."""
        adjacency = config.privacy.adjacency

        def cost(noise: float) -> float:
            releases = self.releases(config, noise, final_run=final_run)
            return divergence_at(releases, order=order, adjacency=adjacency)

        return _least(cost, limit, what="a trial" if not final_run else "the final run")

    def price(self, charges: Charges) -> float:
        """Return the epsilon of these charges by PLD."""
        adjacency = self.base.privacy.adjacency
        return guarantee(charges, delta=self.delta, adjacency=adjacency).epsilon


def first_stage(trials: int) -> int:
    """Number of trials in the first of two stages."""
    return (trials + 1) // 2


def _least(cost: Callable[[float], float], limit: float, *, what: str) -> float:
    """The least noise on the public grid whose cost is within the limit."""
    found = last_within(cost, target=limit, grid=NOISE_GRID, guess=2.0, ends=_NOISE_ENDS) if limit > 0 else None
    if found is None:
        raise ArgumentError(f"the budget cannot hold {what}: raise --budget, or lower --trials or the score's cost.")
    return found


def trained_units(settings: SearchSettings, *, num_units: int, private_score: bool) -> int:
    """Return the number of units that a trial trains on: all, or those that no private score is measured on."""
    return max(1, round(num_units - settings.validation_fraction * num_units)) if private_score else num_units


def plan_search(settings: SearchSettings, base: RunConfig, *, num_units: int, private_score: bool) -> SearchPlan:
    """Choose noise and limits so that the whole search stays within its budget.

    Args:
        settings: the search; ``check_settings`` has passed it.
        base: resolved but for its noise: batch, steps or epochs, delta and target epsilon are given.
        num_units: units of the whole training data, declared.
        private_score: whether scores come from a private split.

    Returns:
        The plan.

    Raises:
        ArgumentError: the budget cannot hold one trial.

    Guarantee:
        Trials and a final run with the noise of the plan cost at most the budget together. The noise of a trial depends
        on earlier results only under a Rényi filter.
    """
    budget = required(base.privacy.target_epsilon, "target_epsilon")
    delta = required(base.privacy.delta, "delta")
    score_noise = None
    trained = trained_units(settings, num_units=num_units, private_score=private_score)
    if private_score:
        split = settings.validation_fraction * num_units
        score_noise = settings.score_noise or max(LEAST_SCORE_NOISE, round(split / 100, 1))
    plan = SearchPlan(settings, base, trained, delta, budget, score_noise=score_noise)
    varies = settings.parsed_space().changes_cost
    if settings.search_data is not None:
        return plan if varies else replace(plan, final_noise=plan.final_noise_of(base, charges=()))
    if settings.price == "best_of":
        return replace(plan, noise=_best_of_noise(plan))
    share = settings.budget_share
    try:
        if settings.rule == "linear_scaling":
            return _two_stages(plan)
        if varies and (settings.adaptive or share is not None):
            return replace(plan, filter=_filter(plan))
        if varies:
            return plan
        noise = plan.equal_noise(base, trials=plan.trials, epsilon=budget * (share or 1.0))
        found = replace(plan, noise=noise)
        if share is None:
            return found
        charges = [(event, count * plan.trials) for event, count in found.releases(base, noise)]
        return replace(found, final_noise=found.final_noise_of(base, charges=charges))
    except ArgumentError as error:
        remedy = "Raise the budget or --budget-share, lower --trials"
        remedy += ", or put more noise on scores (--score-noise)." if private_score else "."
        reason = str(error).partition(". Raise it")[0].rstrip(".")
        raise ArgumentError(f"the budget {budget:g} cannot hold this search: {reason}. {remedy}") from error


def _best_of_noise(plan: SearchPlan) -> float:
    """The least noise of one trial with which releasing the best of a random number stays within the budget."""

    def cost(noise: float) -> float:
        return best_of_random_many(
            plan.releases(plan.base, noise),
            mean_trials=float(plan.settings.trials),
            stopping=plan.settings.stopping,
            delta=plan.delta,
            adjacency=plan.base.privacy.adjacency,
        ).epsilon

    return _least(cost, plan.budget, what="one trial")


def _filter(plan: SearchPlan) -> tuple[float, float]:
    """Order and limit of the filter: the order that suits trials like the base, the limit of the whole budget."""
    noise = plan.equal_noise(plan.base, trials=plan.trials + 1, epsilon=plan.budget)
    charges = [(event, count * (plan.trials + 1)) for event, count in plan.releases(plan.base, noise)]
    order = best_filter_order(charges, delta=plan.delta, adjacency=plan.base.privacy.adjacency)
    limit = filter_limit(order=order, epsilon=plan.budget, delta=plan.delta)
    # Rounded down, so that the limit's epsilon is within the budget whatever the last bits are.
    limit = math.floor(limit * 1e9) / 1e9
    while limit > 0 and filter_epsilon(order=order, divergence=limit, delta=plan.delta) > plan.budget:
        limit -= 1e-9
    if not limit > 0:
        raise ArgumentError("no filter fits: raise the budget")
    return order, limit


def _two_stages(plan: SearchPlan) -> SearchPlan:
    """Noise of both stages of the linear scaling rule, and of the final run: a third and two thirds of the share."""
    share = required(plan.settings.budget_share, "budget_share") * plan.budget
    first = first_stage(plan.settings.trials)
    second = plan.settings.trials - first
    noise = plan.equal_noise(plan.base, trials=first, epsilon=share / 3)
    charges = [(event, count * first) for event, count in plan.releases(plan.base, noise)]
    later = plan.calibrated(plan.base, extra=charges, trials=second, epsilon=share)
    charges += [(event, count * second) for event, count in plan.releases(plan.base, later)]
    return replace(plan, noise=noise, stage_noise=later, final_noise=plan.final_noise_of(plan.base, charges=charges))
