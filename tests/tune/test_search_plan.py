"""The noise of trials keeps the whole search within its budget; searches without a price are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpvision.accounting import best_of_random_many, divergence_at, filter_epsilon, guarantee
from dpvision.errors import ArgumentError
from dpvision.tune.search_plan import SearchLimits, SearchPlan, SearchSettings, check_settings, plan_search
from dpvision.tune.space import with_settings
from tiny_searches import RATES, search_config

UNITS = 2000
VARIED = {**RATES, "epochs": "int:1:6"}


def planned(*, private_score: bool = True, **settings: Any) -> SearchPlan:
    base = search_config(Path("x.npz"), num_units=UNITS, expected_batch_size=200.0, steps=20, privacy_unit="example")
    wanted = SearchSettings(**{"space": RATES, "trials": 4, **settings})
    check_settings(base, wanted)
    return plan_search(wanted, base, num_units=UNITS, private_score=private_score)


def epsilon_of(plan: SearchPlan, *, final_run: bool = False) -> float:
    charges = [(e, c * plan.trials) for e, c in plan.releases(plan.base, plan.noise_of(plan.base, 0))]
    if final_run:
        assert plan.final_noise is not None
        charges += plan.releases(plan.base, plan.final_noise, final_run=True)
    return guarantee(charges, delta=plan.delta).epsilon


def test_all_trials_and_their_scores_together_use_the_budget_and_no_more() -> None:
    plan = planned()
    assert plan.score_noise == 8.0
    assert 0.99 * plan.budget < epsilon_of(plan) <= plan.budget


def test_public_scores_cost_nothing_and_leave_more_for_training() -> None:
    private, public = planned(), planned(private_score=False)
    assert private.noise is not None
    assert public.noise is not None
    assert [event.purpose for event, _ in public.releases(public.base, 1.0)] == ["training step"]
    assert public.noise < private.noise


def test_a_share_of_the_budget_is_for_the_search_and_the_rest_for_the_final_run() -> None:
    plan = planned(budget_share=0.4)
    assert epsilon_of(plan) <= 0.4 * plan.budget
    assert 0.99 * plan.budget < epsilon_of(plan, final_run=True) <= plan.budget


def test_a_search_that_may_change_its_cost_gets_a_filter_of_the_whole_budget() -> None:
    plan = planned(space=VARIED, sampler="tpe", budget_share=0.5)
    assert plan.filter is not None
    order, limit = plan.filter
    assert 0.999 * plan.budget < filter_epsilon(order=order, divergence=limit, delta=plan.delta) <= plan.budget
    for epochs in (1, 3, 6):
        config = with_settings(plan.base, {"epochs": epochs})
        cost = divergence_at(plan.releases(config, plan.noise_of(config, 0)), order=order)
        assert 0.95 * 0.5 * limit / 4 < cost <= 0.5 * limit / 4
    spent = 4 * cost
    noise = plan.final_noise_of(config, charges=(), spent=spent)
    assert divergence_at(plan.releases(config, noise, final_run=True), order=order) <= limit - spent


def test_the_filter_costs_little_beside_composition_by_pld() -> None:
    plan = planned(space=VARIED, sampler="tpe", private_score=False)
    fixed = planned(private_score=False)
    config = with_settings(plan.base, {"epochs": 2})
    assert fixed.noise is not None
    assert plan.noise_of(config, 0) < 1.15 * fixed.noise  # RDP at one order instead of PLD


def test_independent_draws_of_different_cost_need_no_filter() -> None:
    plan = planned(space=VARIED, sampler="random")
    assert plan.filter is None
    charges = []
    for epochs in (1, 2, 4, 6):
        config = with_settings(plan.base, {"epochs": epochs})
        charges += plan.releases(config, plan.noise_of(config, 0))
    assert guarantee(charges, delta=plan.delta).epsilon <= plan.budget


@pytest.mark.parametrize("stopping", ["geometric", "logarithmic", "poisson"])
def test_the_best_of_a_random_number_uses_the_budget_and_no_more(stopping: str) -> None:
    plan = planned(price="best_of", stopping=stopping, trials=5)
    assert plan.noise is not None
    found = best_of_random_many(
        plan.releases(plan.base, plan.noise),
        mean_trials=5,
        stopping=plan.settings.stopping,
        delta=plan.delta,
    )
    assert 0.99 * plan.budget < found.epsilon <= plan.budget


def test_both_stages_of_the_scaling_rule_and_the_final_run_fit_into_the_budget() -> None:
    plan = planned(rule="linear_scaling", budget_share=0.5, private_score=False)
    assert plan.noise is not None
    assert plan.stage_noise is not None
    assert plan.final_noise is not None
    assert plan.noise > plan.stage_noise > plan.final_noise
    charges = [(e, 2 * c) for noise in (plan.noise, plan.stage_noise) for e, c in plan.releases(plan.base, noise)]
    assert guarantee(charges, delta=plan.delta).epsilon <= 0.5 * plan.budget
    charges += plan.releases(plan.base, plan.final_noise, final_run=True)
    assert 0.99 * plan.budget < guarantee(charges, delta=plan.delta).epsilon <= plan.budget


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"price": "best_of", "sampler": "tpe"}, "independent random draws"),
        ({"price": "best_of", "sampler": "quasi_random"}, "independent random draws"),
        ({"price": "best_of", "space": VARIED}, "trials of one cost"),
        ({"price": "best_of", "budget_share": 0.2}, "no budget_share"),
        ({"price": "best_of", "pruner": "patience"}, "whole trials"),
        ({"price": "best_of", "rule": "linear_scaling"}, "independent trials"),
        ({"score": "private", "pruner": "patience"}, "public scores only"),
        ({"pruner": "threshold"}, "belong together"),
        ({"rule": "linear_scaling"}, "budget_share"),
        ({"batch_divisor": 4.0}, "search_data"),
        ({"search_data": "digits", "price": "best_of"}, "no best_of"),
        ({"search_data": "digits", "budget_share": 0.2}, "no budget_share"),
        ({"early": 0.1}, "needs a final run"),
        ({"sampler": "grid"}, "all of its 5 points"),
        ({"sampler": "grid", "space": {f"option.a.{n}": "int:1:60:60" for n in range(1, 4)}}, "at most 10000 points"),
        ({"trials": 500}, "cannot hold"),
        ({"price": "best_of", "stopping": "poisson", "trials": 501}, "at most 500"),
        ({"score_noise": 0.3}, "cannot hold.*or put more noise on scores"),
    ],
)
def test_a_search_without_a_price_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        planned(**settings)


@pytest.mark.parametrize(
    ("privacy", "says"),
    [
        ({"target_epsilon": None, "noise_multiplier": 1.0}, "budget"),
        ({"noise_multiplier": 1.0}, "follows from the budget"),
        ({"target_risk": "tpr:0.05@0.01"}, "leave target_risk out"),
        ({"enabled": False}, "no price"),
        ({"adjacency": "replace_one"}, "add_remove"),
    ],
)
def test_a_run_that_a_search_cannot_price_is_refused(privacy: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        check_settings(search_config(Path("x.npz"), **privacy), SearchSettings(space=RATES))


def test_early_candidates_take_a_share_of_the_steps_and_the_final_run_all() -> None:
    plan = planned(early=0.1, budget_share=0.2, private_score=False)
    assert plan.noise is not None
    assert plan.final_noise is not None
    assert plan.steps_of(plan.base) == (200.0, 2)
    assert plan.steps_of(plan.base, final_run=True) == (200.0, 20)
    charges = [(event, 4 * count) for event, count in plan.releases(plan.base, plan.noise)]
    assert [count for _, count in charges] == [8]
    assert guarantee(charges, delta=plan.delta).epsilon <= 0.2 * plan.budget
    charges += plan.releases(plan.base, plan.final_noise, final_run=True)
    assert charges[-1][1] == 20
    assert 0.99 * plan.budget < guarantee(charges, delta=plan.delta).epsilon <= plan.budget


def test_a_grid_by_composition_has_a_trial_for_each_point() -> None:
    space = {"learning_rate": "log:0.1:4:3", "clip_norm": "choice:0.5,1"}
    assert SearchSettings(space=space, sampler="grid").trials == 6
    assert SearchSettings(space=space, sampler="grid", price="best_of").trials == 10
    assert SearchSettings(space=space, sampler="grid", trials=4).trials == 4  # check_settings refuses it


def test_a_database_beside_the_best_of_price_is_refused() -> None:
    settings = SearchSettings(space=RATES, price="best_of")
    with pytest.raises(ArgumentError, match="storage"):
        check_settings(search_config(Path("x.npz")), settings, limits=SearchLimits(storage="postgresql://h/n"))


def test_a_timeout_is_refused_where_the_number_of_trials_is_drawn() -> None:
    settings = SearchSettings(space=RATES, price="best_of")
    with pytest.raises(ArgumentError, match="timeout"):
        check_settings(search_config(Path("x.npz")), settings, limits=SearchLimits(timeout=5))
