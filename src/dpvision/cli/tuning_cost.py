"""What ``dpvision epsilon`` adds for a search over settings, and for owners of several units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpvision.privacy.mechanism import Mechanism


OF_A_SEARCH = (
    "epsilon_all_trials: every trial may follow from the others and be published. epsilon_best_…: settings drawn at "
    "random, a number of trials drawn from that distribution (with --trials as its mean) and kept secret, and only the "
    "best one released."
)


def search_figures(mechanism: Mechanism, *, delta: float, trials: int | None) -> dict[str, Any]:
    """Both costs of a search: all trials composed, and the best of a random number of them."""
    if trials is None:
        return {}
    from dpvision.accounting import STOPPINGS, all_trials, best_of_random_many

    charges = [(mechanism.step_event, mechanism.steps)]
    composed = all_trials(charges, trials=trials, delta=delta, adjacency=mechanism.adjacency)
    found: dict[str, Any] = {"trials": trials, "epsilon_all_trials": composed.epsilon}
    if mechanism.adjacency == "replace_one":  # not proved for random stopping
        return found
    for stopping in STOPPINGS:
        best = best_of_random_many(
            charges, mean_trials=trials, stopping=stopping, delta=delta, adjacency=mechanism.adjacency
        )
        found[f"epsilon_best_{stopping}"] = best.epsilon
    return found


def owner_figures(mechanism: Mechanism, *, delta: float, most_rows: int | None) -> dict[str, Any]:
    """What the same run means for whoever owns several units."""
    if most_rows is None:
        return {}
    from dpvision.accounting import owner_guarantee

    charges = [(mechanism.step_event, mechanism.steps)]
    proved = owner_guarantee(charges, most_rows=most_rows, delta=delta, adjacency=mechanism.adjacency)
    return {"most_rows_per_owner": most_rows, "epsilon_owner": proved.epsilon}
