"""Which trial is next, and what came out of the others.

``OptunaBook`` is for prices by composition: Optuna proposes settings and keeps the list of trials in a journal file or
a database. ``KeyedBook`` is for the best-of price: settings and the number of trials are drawn from the search's key,
independently of all results, and never leave ``private/``.

A trial belongs to the process that holds its lock. A trial that is running by the list and whose lock is free was left
by a process that was killed: the next process continues it.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

from dpvision.accounting.selection import stopping_chance
from dpvision.errors import ArgumentError, DPVisionError
from dpvision.privacy.randomness import Keys
from dpvision.tune.search_folder import SearchFolder, redacted
from dpvision.tune.search_plan import SearchSettings
from dpvision.tune.space import Dimension, Value
from dpvision.tune.trial_table import State, TrialRow

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

_MOST_DRAWN = 10_000_000


@final
@dataclass(frozen=True)
class Claimed:
    """A trial that this process has locked: its number, its settings, and the descriptor of the lock."""

    number: int
    settings: dict[str, Value]
    lock: int

    def release(self) -> None:
        """Let the trial go."""
        os.close(self.lock)


class TrialBook(Protocol):
    """The list of trials of a search."""

    def claim(self, *, may_begin: bool) -> Claimed | None:
        """Lock an abandoned trial, or a new one if ``may_begin``; None if there is nothing to do at present."""
        ...

    def record(self, number: int, score: float | None, state: State) -> None:
        """Write down how a trial ended."""
        ...

    def rows(self) -> list[TrialRow]:
        """List the trials; epsilons are left open."""
        ...


@final
class KeyedBook:
    """Independent draws from the search's key, for the best-of price.

    Guarantee: settings of all trials and their number are drawn independently of the data and of all results.
    """

    def __init__(self, folder: SearchFolder, settings: SearchSettings, keys: Keys) -> None:
        self._folder, self._keys, self._space = folder, keys, settings.parsed_space()
        self._grid = self._space.grid() if settings.sampler == "grid" else None
        self.number = number_of_trials(keys, settings)

    def settings_of(self, number: int) -> dict[str, Value]:
        """Return the settings of a trial: drawn with replacement from the space, or from its grid."""
        shares = _uniforms(self._keys, len(self._space.dimensions), "settings", number)
        if self._grid is not None:
            return self._grid[min(len(self._grid) - 1, int(shares[0] * len(self._grid)))]
        return self._space.drawn(shares)

    def claim(self, *, may_begin: bool) -> Claimed | None:
        """Lock the first trial without a score that no process works on."""
        del may_begin  # the number of trials was drawn, and all of them are run
        for number in range(self.number):
            if self._folder.read_score(number) is None:
                lock = self._folder.try_trial(number)
                if lock is not None:
                    return Claimed(number, self.settings_of(number), lock)
        return None

    def record(self, number: int, score: float | None, state: State) -> None:
        """Write the score into ``private/``."""
        self._folder.write_score(number, {"score": score, "state": state})

    def rows(self) -> list[TrialRow]:
        """List the trials. Sensitive: their number and scores are not part of the release."""
        found = []
        for number in range(self.number):
            known = self._folder.read_score(number) or {"score": None, "state": "running"}
            found.append(TrialRow(number, self.settings_of(number), known["score"], None, known["state"]))
        return found


def number_of_trials(keys: Keys, settings: SearchSettings) -> int:
    """Draw the number of trials from its distribution. Secret.

    Args:
        keys: of the search.
        settings: name the distribution and its mean.

    Guarantee: drawn from 64 random bits by inversion; the distribution is cut off where less than 2⁻⁶⁴ is left.
    """
    (share,) = _uniforms(keys, 1, "number of trials")
    mean = float(settings.trials)
    if settings.stopping == "geometric":
        chance = stopping_chance(mean, 1)
        return 1 if chance >= 1 else 1 + math.floor(math.log1p(-share) / math.log1p(-chance))
    if settings.stopping == "logarithmic":
        chance = stopping_chance(mean, 0)
        if chance >= 1:
            return 1
        first = (1 - chance) / -math.log(chance)
        return _inverted(share, 1, first, lambda k, before: before * (1 - chance) * (k - 1) / k)
    return _inverted(share, 0, math.exp(-mean), lambda k, before: before * mean / k)


def _inverted(share: float, start: int, first: float, following: Any) -> int:
    """Return the smallest number up to which the probabilities add up to more than ``share``."""
    number, probability = start, first
    total = probability
    while total <= share and number < _MOST_DRAWN and probability > 0:
        number += 1
        probability = following(number, probability)
        total += probability
    return number


def _uniforms(keys: Keys, count: int, *index: int | str) -> list[float]:
    """Uniform numbers in [0, 1) from the stream of the search."""
    words = keys.bits(count, "search", *index)
    return [min(int(word) / 2**64, 1 - 2**-53) for word in words]


@final
class OptunaBook:
    """The trials of a search by composition, proposed and kept by Optuna."""

    def __init__(
        self,
        folder: SearchFolder,
        settings: SearchSettings,
        *,
        keys: Keys,
        name: str,
        storage: str | None,
        points: list[dict[str, Value]],
    ) -> None:
        self._folder, self._settings, self._space = folder, settings, settings.parsed_space()
        self._distributions = {each.name: _distribution(each) for each in self._space.dimensions}
        with optuna_errors(), folder.locked():
            sampler = _sampler(settings, keys)
            self._study = _open_study(folder, sampler, name=name, storage=storage)
            # Points are numbered in their order; a process that was killed here left the first of them.
            for point in points[len(self._study.get_trials(deepcopy=False)) :]:
                self._study.enqueue_trial(point)

    def claim(self, *, may_begin: bool) -> Claimed | None:
        """Lock a trial: one that a killed process left, else a new one while there are any."""
        with optuna_errors(), self._folder.locked():
            trials = self._study.get_trials(deepcopy=False)
            for trial in trials:
                if trial.state.name == "RUNNING":
                    claimed = self._abandoned(trial)
                    if claimed is not None:
                        return claimed
            counted = [trial for trial in trials if trial.state.name not in ("FAIL", "WAITING")]
            if not may_begin or len(counted) >= self._settings.trials:
                return None
            asked = self._study.ask(fixed_distributions=self._distributions)
            lock = self._folder.try_trial(asked.number)
            if lock is None:
                raise DPVisionError(f"trial {asked.number} of {self._folder.root} is locked by another process.")
            return Claimed(asked.number, dict(asked.params), lock)

    def _abandoned(self, trial: FrozenTrial) -> Claimed | None:
        lock = self._folder.try_trial(trial.number)
        if lock is None:
            return None
        settings = {**trial.params, **trial.system_attrs.get("fixed_params", {})}
        if settings.keys() == self._distributions.keys():
            return Claimed(trial.number, settings, lock)
        # Killed while its settings were drawn: it was never charged and never started.
        self._tell(trial.number, None, "failed")
        os.close(lock)
        return None

    def record(self, number: int, score: float | None, state: State) -> None:
        """Tell Optuna how a trial ended; a trial that ended before stays as it is."""
        self._folder.write_score(number, {"score": score, "state": state})
        with optuna_errors(), self._folder.locked():
            self._tell(number, score, state)

    def _tell(self, number: int, score: float | None, state: State) -> None:
        from optuna.trial import TrialState

        known = self._study.get_trials(deepcopy=False)[number].state
        if not known.is_finished():
            if state == "complete":
                self._study.tell(number, score)
            else:
                self._study.tell(number, state=TrialState.PRUNED if state == "pruned" else TrialState.FAIL)

    def rows(self) -> list[TrialRow]:
        """List the trials that began, without those that were never charged."""
        states: dict[str, State] = {"COMPLETE": "complete", "PRUNED": "pruned", "RUNNING": "running", "FAIL": "failed"}
        with optuna_errors():
            trials = self._study.get_trials(deepcopy=False)
        return [
            TrialRow(each.number, dict(each.params), each.value if each.values else None, None, states[each.state.name])
            for each in trials
            if each.state.name in states and each.params
        ]


def _open_study(folder: SearchFolder, sampler: BaseSampler, *, name: str, storage: str | None) -> Study:
    import optuna

    logging.getLogger("sqlalchemy").setLevel(logging.ERROR)
    kept = _storage(folder, storage)
    return optuna.create_study(
        study_name=name, storage=kept, sampler=sampler, direction="maximize", load_if_exists=True
    )


def _storage(folder: SearchFolder, url: str | None) -> BaseStorage:
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if url is None:
        held: Any = _HeldLock(folder.journal_path)  # Optuna does not export the base class of its locks
        return JournalStorage(JournalFileBackend(str(folder.journal_path), lock_obj=held))
    return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})


@final
class _HeldLock:
    """A lock of Optuna's journal that does not lock: every write happens under the lock of the search.

    Optuna's own locks are files that a killed process leaves behind. A line that was cut off is dropped first.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal

    def acquire(self) -> bool:
        """Drop what a killed process left."""
        drop_torn_line(self._journal)
        return True

    def release(self) -> None:
        """Do nothing."""


def drop_torn_line(path: Path) -> None:
    """Cut off what follows the last whole line: a process was killed while it wrote it, and no one has read it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())


def _sampler(settings: SearchSettings, keys: Keys) -> BaseSampler:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental parts of Optuna say so
        if settings.sampler == "tpe":
            return optuna.samplers.TPESampler(multivariate=True, constant_liar=True)
        if settings.sampler == "quasi_random":
            # All processes walk along the same sequence, so they need the same seed.
            return optuna.samplers.QMCSampler(scramble=True, seed=keys.seed("search", "sampler") % 2**32)
        return optuna.samplers.RandomSampler()


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.kind == "choice":
        return CategoricalDistribution(dimension.choices)
    if dimension.kind == "int":
        return IntDistribution(int(dimension.low), int(dimension.high))
    return FloatDistribution(dimension.low, dimension.high, log=dimension.kind == "log")


@contextmanager
def optuna_errors() -> Iterator[None]:
    """Turn errors of Optuna and of its database into one line without passwords."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (DPVisionError, KeyboardInterrupt):
        raise
    except Exception as error:  # noqa: BLE001, any driver may be behind the URL, and its message may name it
        text = redacted(" ".join(str(error).split()))[:300]
        # Not chained: the traceback of the driver would show the URL.
        raise DPVisionError(f"the storage of the trials failed: {type(error).__name__}: {text}") from None


def require_optuna() -> None:
    """Refuse to search where Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ArgumentError("searching needs Optuna: pip install 'dpvision[tune]'.") from error


def require_storage(url: str | None) -> None:
    """Refuse a database that does not answer, before anything is written."""
    if url is None:
        return
    from sqlalchemy import create_engine

    with optuna_errors():
        engine = create_engine(url)
        engine.connect().close()
        engine.dispose()
