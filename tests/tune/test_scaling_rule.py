"""The learning rate of the final run is read off a line through two stages."""

from __future__ import annotations

import pytest

from dpvision.errors import ArgumentError
from dpvision.tune.scaling_rule import best_rate, extrapolated_rate


def test_the_best_rate_is_the_top_of_a_parabola_in_log_rate() -> None:
    assert best_rate([(0.1, 0.5), (1.0, 0.8), (10.0, 0.5)]) == pytest.approx(1.0)
    assert 1.0 < best_rate([(0.1, 0.4), (1.0, 0.8), (10.0, 0.6)]) < 10.0
    assert best_rate([(0.1, 0.9), (1.0, 0.8)]) == 0.1


def test_a_line_through_both_stages_gives_the_rate_at_the_larger_epsilon() -> None:
    trials = [(1.0, 0.9, False), (5.0, 0.1, False), (1.5, 0.9, True), (5.0, 0.1, True)]
    assert extrapolated_rate(trials, epsilons=(0.5, 1.0, 2.0), within=(0.1, 10.0)) == pytest.approx(2.5)


def test_the_extrapolation_stays_within_a_factor_of_four() -> None:
    trials = [(1.0, 0.9, False), (3.0, 0.9, True)]
    wide = (0.01, 100.0)
    assert extrapolated_rate(trials, epsilons=(0.1, 0.2, 9.0), within=wide) == 12.0
    assert extrapolated_rate([(3.0, 0.9, False), (1.0, 0.9, True)], epsilons=(0.1, 0.2, 9.0), within=wide) == 0.25


def test_the_extrapolation_stays_within_the_searched_range() -> None:
    rising, falling = [(1.0, 0.9, False), (3.0, 0.9, True)], [(3.0, 0.9, False), (1.0, 0.9, True)]
    assert extrapolated_rate(rising, epsilons=(0.1, 0.2, 9.0), within=(0.5, 5.0)) == 5.0
    assert extrapolated_rate(falling, epsilons=(0.1, 0.2, 9.0), within=(0.5, 5.0)) == 0.5


def test_a_stage_without_results_is_an_error() -> None:
    with pytest.raises(ArgumentError):
        extrapolated_rate([(1.0, 0.5, False)], epsilons=(0.1, 0.2, 1.0), within=(0.1, 10.0))
