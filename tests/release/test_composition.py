"""The epsilon of several runs together: everything adds up, and what voids it is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpvision.accounting import guarantee
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Event
from dpvision.release.composition import Bill, spent_together

STEP = Event(sample_rate=0.2, noise_multiplier=1.5)


def bill(run: str, source: str | None = "scans", steps: int = 10, delta: float = 1e-4) -> Bill:
    return Bill(run=run, source=source, charges=((STEP, steps),), delta=delta, run_id=run, head=f"head of {run}")


def cost(steps: int, delta: float = 1e-4) -> float:
    return guarantee([(STEP, steps)], delta=delta).epsilon


@pytest.mark.parametrize("other", ["scans", "photos", None])
def test_runs_add_up_on_the_same_and_on_different_data(other: str | None) -> None:
    found = spent_together([bill("a"), bill("b", other)])
    assert (found["epsilon"], found["delta"], found["void"]) == (pytest.approx(cost(20)), 1e-4, None)
    assert cost(10) < found["epsilon"] < 2 * cost(10)


def test_data_declared_disjoint_cost_the_largest_of_their_sums() -> None:
    found = spent_together([bill("a"), bill("b"), bill("c", "photos", 30)], disjoint=True)
    assert found["epsilon"] == pytest.approx(cost(30))
    assert [(group["source"], group["runs"]) for group in found["groups"]] == [("photos", 1), ("scans", 2)]
    assert found["groups"][1]["epsilon"] == pytest.approx(cost(20)), "runs on the same data add up all the same"


def test_a_run_on_unknown_data_adds_to_every_name() -> None:
    found = spent_together([bill("a"), bill("b", "photos"), bill("c", None)], disjoint=True)
    assert found["epsilon"] == pytest.approx(cost(20))
    assert spent_together([bill("c", None), bill("d", None)], disjoint=True)["epsilon"] == pytest.approx(cost(20))


def test_the_sum_is_at_the_smallest_delta_and_at_least_each_epsilon() -> None:
    found = spent_together([bill("a", delta=1e-6), bill("b", "photos", delta=1e-3)], disjoint=True)
    assert found["delta"] == 1e-6
    assert found["epsilon"] == pytest.approx(cost(10, 1e-6))


def test_a_run_without_a_guarantee_voids_the_sum_also_of_disjoint_data() -> None:
    bad = replace(bill("b", "photos"), voids=("trained without privacy: no guarantee",))
    for disjoint in (False, True):
        found = spent_together([bill("a"), bad], disjoint=disjoint)
        assert (found["epsilon"], found["void"]) == (None, "run b: trained without privacy: no guarantee")


def test_disjoint_data_that_protect_different_units_have_no_common_epsilon() -> None:
    patients = replace(bill("b", "photos"), privacy_unit="patient")
    found = spent_together([bill("a"), patients], disjoint=True)
    assert found["epsilon"] is None
    assert "no common epsilon" in found["void"]


def test_initial_weights_of_a_private_run_that_is_not_given_void_the_sum() -> None:
    child = replace(bill("child"), earlier=("parent",))
    alone = spent_together([child])
    assert alone["epsilon"] is None
    assert "initial weights come from the private run parent, which is not given" in alone["void"]
    assert spent_together([child, bill("parent", "photos")])["epsilon"] == pytest.approx(cost(20))


def test_the_same_run_given_twice_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a and copy are the same run"):
        spent_together([bill("a"), replace(bill("a"), run="copy")])
