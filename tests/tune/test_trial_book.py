"""Independent draws for the best-of price; trials that survive a kill; a database whose password is never shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpvision.accounting.selection import stopping_chance
from dpvision.errors import ArgumentError, DPVisionError
from dpvision.privacy.randomness import Keys
from dpvision.release.verify import verify
from dpvision.tune import SearchLimits, SearchSettings, resume_search, tune
from dpvision.tune.search_folder import SearchFolder
from dpvision.tune.search_plan import with_driver
from dpvision.tune.trial_book import (
    Claimed,
    KeyedBook,
    OptunaBook,
    drop_torn_line,
    number_of_trials,
    optuna_errors,
)
from fixed_keys import numbered_secrets
from postgres import PASSWORD, postgres_url
from tiny_searches import RATES, search_config, search_images

DRAWS = 4000


@pytest.fixture(autouse=True)
def _same_secrets() -> Iterator[None]:
    """Of 120 images none might be held out for the scores."""
    with numbered_secrets("books of trials"):
        yield


def place_of(path: Path) -> SearchFolder:
    place = SearchFolder(path)
    place.trials.mkdir(parents=True)
    return place


def book_of(path: Path, **settings: Any) -> OptunaBook:
    place = SearchFolder(path)
    place.trials.mkdir(parents=True, exist_ok=True)
    wanted = SearchSettings(**{"space": RATES, "trials": 3, **settings})
    return OptunaBook(place, wanted, keys=Keys.from_seed(0), name="s", storage=None, points=[])


@pytest.mark.parametrize("mean", [1, 4, 10])
@pytest.mark.parametrize("stopping", ["geometric", "logarithmic", "poisson"])
def test_the_number_of_trials_has_the_distribution_that_is_priced(stopping: Any, mean: int) -> None:
    settings = SearchSettings(space=RATES, price="best_of", trials=mean, stopping=stopping)
    drawn = np.array([number_of_trials(Keys.from_seed(seed), settings) for seed in range(DRAWS)])
    assert drawn.min() >= (0 if stopping == "poisson" else 1)
    # Five standard errors: a false alarm in fewer than 1e-6 of the runs, and the seeds are fixed.
    assert abs(drawn.mean() - mean) <= 5 * drawn.std() / np.sqrt(DRAWS) + 1e-9
    first = float((drawn == 1).mean())
    exact = {
        "geometric": 1 / mean,
        "poisson": mean * np.exp(-mean),
        "logarithmic": 1.0 if mean == 1 else (1 - stopping_chance(mean, 0)) / -np.log(stopping_chance(mean, 0)),
    }[stopping]
    assert abs(first - exact) <= 5 * np.sqrt(max(exact * (1 - exact), 1e-12) / DRAWS) + 1e-9


def test_settings_are_drawn_independently_and_again_the_same(tmp_path: Path) -> None:
    place = place_of(tmp_path / "a")
    settings = SearchSettings(space=RATES, price="best_of")
    one, again = (KeyedBook(place, settings, Keys.from_seed(5)) for _ in range(2))
    drawn = [one.settings_of(number)["optimizer.learning_rate"] for number in range(500)]
    assert drawn == [again.settings_of(number)["optimizer.learning_rate"] for number in range(500)]
    assert len(set(drawn)) == 500
    other = KeyedBook(place, settings, Keys.from_seed(6))
    assert other.settings_of(0) != one.settings_of(0)


def test_a_grid_is_drawn_with_replacement_for_the_best_of_price(tmp_path: Path) -> None:
    settings = SearchSettings(space={"learning_rate": "log:0.1:1:3"}, price="best_of", sampler="grid")
    book = KeyedBook(place_of(tmp_path / "a"), settings, Keys.from_seed(5))
    counts = Counter(book.settings_of(number)["optimizer.learning_rate"] for number in range(900))
    assert len(counts) == 3
    assert min(counts.values()) > 200


def test_a_trial_of_a_killed_process_is_continued_with_its_settings(tmp_path: Path) -> None:
    book = book_of(tmp_path / "a")
    first = book.claim(may_begin=True)
    assert first is not None
    second = book.claim(may_begin=True)
    assert second is not None
    assert second.number == 1
    first.release()  # as the system does for a process that was killed
    taken = book_of(tmp_path / "a").claim(may_begin=True)
    assert taken is not None
    assert (taken.number, taken.settings) == (first.number, first.settings)
    second.release()
    taken.release()


def test_no_more_trials_begin_than_were_asked_for(tmp_path: Path) -> None:
    book = book_of(tmp_path / "a", trials=2)
    claims: list[Claimed] = []
    for number in range(2):
        claimed = book.claim(may_begin=True)
        assert claimed is not None
        assert claimed.number == number
        claims.append(claimed)
    assert book.claim(may_begin=True) is None
    book.record(0, 0.5, "complete")
    book.record(1, None, "pruned")
    for claimed in claims:
        claimed.release()
    assert book.claim(may_begin=True) is None
    assert [(row.number, row.score, row.state) for row in book.rows()] == [(0, 0.5, "complete"), (1, None, "pruned")]


def test_a_torn_line_of_the_journal_is_dropped(tmp_path: Path) -> None:
    book = book_of(tmp_path / "a")
    claimed = book.claim(may_begin=True)
    assert claimed is not None
    journal = tmp_path / "a" / "private" / "journal.log"
    with journal.open("ab") as file:
        file.write(b'{"op_code":6,"worker')
    book.record(0, 0.5, "complete")
    claimed.release()
    assert [row.state for row in book_of(tmp_path / "a").rows()] == ["complete"]
    drop_torn_line(tmp_path / "none")


def test_a_database_keeps_the_trials_and_its_password_is_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with postgres_url() as url:
        limits = SearchLimits(storage=url)
        assert PASSWORD not in repr(limits)
        config = search_config(search_images(tmp_path))
        settings = SearchSettings(space=RATES, trials=2, sampler="tpe")
        result = tune(config, settings, folder=tmp_path / "search", limits=limits)
        assert result.trials is not None
        assert len(result.trials) == 2
        assert verify(result.folder).problems == ()
        assert not (tmp_path / "search" / "private" / "journal.log").exists()
        with pytest.raises(ArgumentError, match="--storage"):
            resume_search(tmp_path / "search")
        wrong = url.replace(PASSWORD, "wr0ng-password")
        with pytest.raises(DPVisionError) as caught:
            resume_search(tmp_path / "search", limits=SearchLimits(storage=wrong))
        assert "wr0ng-password" not in str(caught.value)
        assert caught.value.__cause__ is None
    captured = "".join(capfd.readouterr())
    assert PASSWORD not in captured
    for path in (tmp_path / "search").rglob("*"):
        if path.is_file():
            assert PASSWORD.encode() not in path.read_bytes(), path


def test_a_storage_that_is_no_url_or_does_not_answer_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match="URL"):
        SearchLimits(storage="host/name")
    config, settings = search_config(search_images(tmp_path)), SearchSettings(space=RATES)
    for url in ("postgresql+psycopg2://me:geheim@127.0.0.1:1/x", "nodatabase://me:geheim@host/x"):
        monkeypatch.setenv("DPVISION_TUNE_STORAGE", url)  # the variable counts like the flag
        with pytest.raises(DPVisionError, match="storage of the trials") as caught:
            tune(config, settings, folder=tmp_path / "search")
        assert "geheim" not in str(caught.value)
        assert not (tmp_path / "search").exists()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_postgresql_url_gets_a_driver_that_is_installed(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{scheme}://me:geheim@host:5432/name?sslmode=require"
    for installed, driver in ((("psycopg2", "psycopg"), "psycopg2"), (("psycopg",), "psycopg")):
        monkeypatch.setattr("dpvision.tune.search_plan.find_spec", lambda name, known=installed: name in known or None)
        assert with_driver(url) == f"postgresql+{driver}://me:geheim@host:5432/name?sslmode=require"
    monkeypatch.setattr("dpvision.tune.search_plan.find_spec", lambda _: None)
    with pytest.raises(ArgumentError, match="pip install psycopg2-binary") as caught:
        with_driver(url)
    assert "geheim" not in str(caught.value)
    assert with_driver("postgresql+pg8000://host/name") == "postgresql+pg8000://host/name"


def test_an_error_of_a_driver_is_told_without_the_password_in_it() -> None:
    with pytest.raises(DPVisionError, match="no route to postgresql") as caught, optuna_errors():
        raise RuntimeError("no route to postgresql://me:geheim@host/name?password=geheim")
    assert "geheim" not in str(caught.value)
    assert caught.value.__cause__ is None
