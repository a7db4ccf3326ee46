"""``tune``: search hyper-parameters, and charge the search.

The order of a search, and what each part charges:

1. Check the settings, load the data, split off what trials are compared on, choose the noise. Nothing is written.
2. Create the folder with the search's ledger. With the best-of price, the one charge is written here.
3. Trials, by any number of processes: claim one, charge everything that it may release, run it, score it.
4. With ``budget_share`` or public search data: the final run, charged like a trial.
5. Publish: the release of the winner, with a certificate whose epsilon is that of the whole search.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from dpvision.accounting import divergence_at, propose_delta
from dpvision.config import RunConfig, parse_config, required
from dpvision.data import ImageStore, dataset_names
from dpvision.data.batches import hold_out
from dpvision.data.loading import Splits, load
from dpvision.data.splits import load_options
from dpvision.data.store import row_digests
from dpvision.errors import ArgumentError, DataError, DPVisionError, PrivacyError, TamperError
from dpvision.own_code import is_own
from dpvision.privacy.ledger import charges_of, committed_release, planned_releases, read_ledger, release_list
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.randomness import Keys
from dpvision.ranks import job_size
from dpvision.release.build import ReleaseFacts, build_certificate
from dpvision.release.certificate_page import render_certificate_page
from dpvision.release.model_card import model_card
from dpvision.release.search_claim import filter_spent, search_cost
from dpvision.storage.files import disk_errors, json_bytes, parse_object, read_file, write_atomically
from dpvision.storage.run_folder import CARD, CERTIFICATE, CERTIFICATE_PAGE, CONFIG, METRICS, WEIGHTS, RunFolder
from dpvision.training.callbacks import Callbacks, RunCallback
from dpvision.training.notebook import default_callback
from dpvision.training.prepare import load_run_code, prepare
from dpvision.training.stages import create_model
from dpvision.tune.scaling_rule import extrapolated_rate
from dpvision.tune.search_folder import SearchFolder
from dpvision.tune.search_plan import (
    STORAGE_VARIABLE,
    SearchLimits,
    SearchPlan,
    SearchSettings,
    check_settings,
    first_stage,
    parse_settings,
    plan_search,
    trained_units,
)
from dpvision.tune.space import (
    CHARGING,
    Dimension,
    SearchSpace,
    Value,
    absolute_space,
    check_space,
    parse_space,
    require_option_owner,
    with_settings,
)
from dpvision.tune.trial import (
    WORST,
    Pruning,
    TrialPruned,
    TrialRun,
    can_continue,
    private_score,
    public_score,
    run_trial,
    trial_keys,
)
from dpvision.tune.trial_book import (
    Claimed,
    KeyedBook,
    OptunaBook,
    TrialBook,
    require_optuna,
    require_storage,
)
from dpvision.tune.trial_table import TrialRow

FINAL_NUMBER = 1_000_000
"""The number of the final run among the trials."""
TABLE = "trials.json"
_TOLERANCE = 1e-6  # relative: noise is calibrated to a budget from below, up to the accountant's rounding
_POLL = 0.5
_EVALUATIONS = 60  # of a trial that is pruned by patience, where none were asked for


class SearchEnded(DPVisionError):
    """The search ended without a model that could be released."""


@final
@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        folder: the search's folder; ``release/`` in it may be given away.
        settings: the winner's settings.
        certificate: content of the winner's certificate; its epsilon is that of the whole search.
        metrics: the winner's metrics on public test data.
        trials: the table of trials by composition; None where only the best trial is released.
    """

    folder: Path
    settings: dict[str, Value]
    certificate: dict[str, Any]
    metrics: dict[str, Any]
    trials: tuple[TrialRow, ...] | None

    def figures(self) -> dict[str, Any]:
        """Return the most important values as plain values, for JSON."""
        claim, final_metrics = self.certificate["search"], self.metrics["final"]
        scores = {name: final_metrics[name] for name in ("accuracy", "dice", "mean_auc") if name in final_metrics}
        return {
            "search": str(self.folder),
            "settings": self.settings,
            **scores,
            "epsilon": self.certificate["epsilon"],
            "delta": self.certificate["delta"],
            "epsilon_of_this_run_alone": claim["epsilon_of_this_run_alone"],
            "price": claim["price"],
            "for_release": self.certificate["for_release"],
            "trials": None if self.trials is None else [asdict(row) for row in self.trials],
        }


def tune(
    config: RunConfig,
    search: SearchSettings,
    *,
    folder: Path | str,
    seed: int | None = None,
    device: str = "cpu",
    callback: RunCallback | None = None,
    limits: SearchLimits | None = None,
) -> SearchResult:
    """Search hyper-parameters; the epsilon of the result is that of the whole search.

    Args:
        config: what every trial starts from; ``privacy.target_epsilon`` is the budget of all trials together.
        search: which settings to search, how, and at which price.
        folder: the folder of the search: new, empty, or that of the same search, which is then continued or joined.
        seed: replaces the operating system's entropy: reproducible, and stamped as not for release.
        device: torch's name of the device.
        callback: told about progress; with the best-of price it is told nothing of the trials.
        limits: time, processes and the database of the trials.

    Returns:
        The winner, with its certificate and, by composition, the table of trials.

    Raises:
        ArgumentError: the search is impossible, or its budget cannot hold one trial. Nothing is written then.
        SearchEnded: no trial could be released. What was charged stays charged.

    Guarantee: the released weights are (epsilon, delta)-private with the certificate's epsilon, which covers every
    trial, every score and the choice of the winner.
    """
    limits = limits or SearchLimits()
    _require_one_process()
    require_optuna()
    check_settings(config, search, limits=limits)
    place = SearchFolder(Path(folder))
    if not place.is_search(place.root):
        RunFolder.require_new(place.root)
        database = None if search.price == "best_of" else limits.database
        require_storage(database)
        begin_search(config, search, place, seed=seed, device=device, database=database is not None)
    require_same_search(place, config, search)
    return continue_search(place, callback=callback, limits=limits)


def _require_one_process() -> None:
    if job_size() > 1:
        raise ArgumentError("a search has processes of its own (--workers): start it without torchrun.")


def require_same_search(place: SearchFolder, config: RunConfig, search: SearchSettings) -> None:
    """Refuse to join a search in the same folder that was started with other settings.

    Raises:
        ArgumentError: the settings differ.
    """
    stored = place.read_settings()
    if stored["asked"] != {"config": _as_asked(config), "search": search.model_dump(mode="json")}:
        raise ArgumentError(
            f"{place.root} holds a search with other settings. Choose a new or an empty folder, or continue that one "
            "with --resume."
        )


def resume_search(
    folder: Path | str, *, callback: RunCallback | None = None, limits: SearchLimits | None = None
) -> SearchResult:
    """Continue a search, or join one that other processes work on, with the number of threads that it began with.

    Args:
        folder: the folder of the search.
        callback: told about progress.
        limits: as for ``tune``; the database must be named again.

    Returns:
        As ``tune``.

    Raises:
        ArgumentError: the folder is not that of a search, or its database was not named.

    Guarantee: trials that a killed process left are continued; what was charged for them covers that.
    """
    limits = limits or SearchLimits()
    _require_one_process()
    require_optuna()
    return continue_search(SearchFolder(Path(folder)), callback=callback, limits=limits)


# The data


@final
@dataclass(frozen=True)
class SearchData:
    """The data of a search: what trials train and are tested on, and the private split that they are compared on."""

    splits: Splits
    validation: ImageStore | None

    @property
    def stores(self) -> dict[str, ImageStore]:
        """All parts by name."""
        parts = {"train": self.splits.train, "test": self.splits.test, "validation": self.validation}
        return {name: part for name, part in parts.items() if part is not None}

    def fingerprints(self) -> dict[str, str]:
        """The digest of each part. Sensitive."""
        return {name: part.fingerprint() for name, part in self.stores.items()}


def load_search_data(config: RunConfig, settings: SearchSettings, keys: Keys) -> SearchData:
    """Load the data once for all trials; split off a test part if there is none, and the part for private scores.

    Guarantee: which unit goes where is drawn by its name from the search's key, once for all trials.
    """
    loaded = load(config.data.source, load_options(config))
    train, test = loaded.train, loaded.test
    if test is None and config.data.test is None:
        train, test = hold_out(train, fraction=config.data.holdout_fraction, keys=keys.bind("search", "test"))
    validation = None
    if private_scores(config, settings):
        if train.per_pixel or train.multi_label:
            raise ArgumentError("private scores are for images with one class each: name a public test set.")
        train, validation = hold_out(train, fraction=settings.validation_fraction, keys=keys.bind("search", "score"))
    return SearchData(replace(loaded, train=train, test=test), validation)


def load_rehearsal_data(base: RunConfig, settings: SearchSettings, keys: Keys) -> tuple[RunConfig, SearchData]:
    """Load the public search data, and return it with the configuration of trials on it.

    Public data has its own test part, and its rows have no owners.
    """
    values = base.model_dump(mode="python", exclude_unset=True)
    kept = {name: value for name, value in values["data"].items() if name in _OF_ALL_IMAGES}
    values["data"] = {**kept, "source": required(settings.search_data, "search_data")}
    values["privacy"].pop("privacy_unit", None)
    config = parse_config(values)
    return config, load_search_data(config, settings, keys)


_OF_ALL_IMAGES = frozenset(
    {"data_dir", "image_size", "channels", "skip_bad", "holdout_fraction", "normalisation", "mean", "std", "window"}
)
"""Settings of the private data that hold for public search data too."""


def require_other_images(private: SearchData, public: SearchData) -> None:
    """Refuse public search data that holds an image of the private data: its trials would cost nothing.

    Raises:
        ArgumentError: an image of more than one grey value is in both. Nothing has been written then.
    """
    blank = np.stack([np.full(private.splits.train.image_shape, value, dtype=np.uint8) for value in range(256)])
    found = [
        {digest.tobytes() for store in data.stores.values() for digest in store.image_digests}
        for data in (private, public)
    ]
    if (found[0] & found[1]) - {digest.tobytes() for digest in row_digests(blank)}:
        raise ArgumentError(
            "search_data holds images of the private data, so it is not public: trials on it would use them without "
            "charge. Name other data, or leave search_data out."
        )


def private_scores(config: RunConfig, settings: SearchSettings) -> bool:
    """Whether trials are compared on private data.

    Raises:
        ArgumentError: public scores were asked for, and there is no public test set.
    """
    if settings.search_data is not None:
        return False
    public = config.data.test is not None or config.data.source in dataset_names()
    if settings.score == "public" and not public:
        raise ArgumentError("public scores need a public test set: name one (data.test), or choose score=private.")
    return settings.score == "private" or not public


# Beginning


def begin_search(
    config: RunConfig, settings: SearchSettings, place: SearchFolder, *, seed: int | None, device: str, database: bool
) -> None:
    """Plan a search and write its folder. Everything that can be refused is refused before that."""
    space = settings.parsed_space()
    private = private_scores(config, settings)
    if private and config.model is not None and is_own(config.model.name):
        raise ArgumentError(
            "private scores are for the models of dpvision, which compute each image by itself: name a public test set "
            "(--test) to compare trials of your own model."
        )
    if private and settings.pruner != "none":
        raise ArgumentError("pruners look at scores during a trial, which are not charged: use public scores.")
    if settings.rule == "linear_scaling" and [each.path[-1] for each in space.dimensions] != ["learning_rate"]:
        raise ArgumentError("the linear scaling rule searches learning_rate alone: it stands for rate times steps.")
    if config.privacy.num_units is None and config.data.source not in dataset_names():
        raise ArgumentError("a search needs a declared number of units: give --num-units.")
    require_option_owner(config, space)
    asked = {"config": _as_asked(config), "search": settings.model_dump(mode="json")}
    keys = Keys.from_os_entropy("search") if seed is None else Keys.from_seed(seed, "search")
    data = load_search_data(config, settings, keys)
    num_units = config.privacy.num_units or data.splits.train.num_units + _units(data.validation)
    trained = trained_units(settings, num_units=num_units, private_score=private)
    delta = config.privacy.delta or propose_delta(num_units)
    defaults = _run_by_default(config, data, num_units=trained, delta=delta, keys=keys)
    base = pinned(config, defaults, num_units=num_units)
    space = parse_space(absolute_space(space, defaults))
    settings = settings.model_copy(update={"space": space.texts})
    base = _with_evaluations(base, settings)
    check_space(base, space)
    known, rehearsal = data.fingerprints(), None
    if settings.search_data is not None:
        rehearsal = load_rehearsal_data(base, settings, keys)
        require_other_images(data, rehearsal[1])
        known |= {f"search {name}": digest for name, digest in rehearsal[1].fingerprints().items()}
    plan = plan_search(settings, base, num_units=num_units, private_score=private)
    _require_patience(plan)
    _require_trials(plan, data, rehearsal, keys, anyway=config.privacy.anyway)
    search_id = keys.derive("run")[:8].hex()
    place.create(
        keys,
        values={
            "settings": settings.model_dump(mode="json"),
            "base": base.model_dump(mode="json", exclude_unset=True),
            "plan": _plan_values(plan),
            "asked": asked,
            "data": known,
            "device": device,
            "database": database,
            "threads": torch.get_num_threads(),
            "started_in": str(Path.cwd()),
        },
        header=search_header(plan, search_id, private=private, hand_seeded=keys.hand_seeded),
    )


def note_search(place: SearchFolder, plan: SearchPlan, *, private: bool) -> None:
    """Write what the search declares, and with the best-of price its one charge, unless they are there.

    Guarantee: on disk before the first trial starts, also where the process that began the search was killed.
    """
    settings = plan.settings
    with place.locked(), place.ledger() as ledger:
        entries = read_ledger(place.ledger_path)
        if len(entries) > 1 and (settings.price != "best_of" or any(e.kind == "selection" for e in entries)):
            return
        for what, how in _declarations(plan, private=private):
            ledger.note("declare", {"what": what, "how": how})
        if settings.price == "best_of":
            ledger.charge_selection(
                plan.releases(plan.base, required(plan.noise, "noise")),
                stopping=settings.stopping,
                mean_trials=float(settings.trials),
            )


def _units(store: ImageStore | None) -> int:
    return 0 if store is None else store.num_units


def _run_by_default(config: RunConfig, data: SearchData, *, num_units: int, delta: float, keys: Keys) -> RunConfig:
    """The configuration of one run on these units with the whole budget, with everything filled in that is open."""
    asked = _merged(config, {"num_units": num_units, "delta": delta, "anyway": True})
    return prepare(asked, keys.bind("search", "plan"), data.splits).config


def pinned(config: RunConfig, defaults: RunConfig, *, num_units: int) -> RunConfig:
    """Fill in batch, steps and delta once, so that what a trial costs follows from searched settings only."""
    resolved = defaults.privacy
    pins: dict[str, Any] = {
        "num_units": num_units,
        "delta": resolved.delta,
        "expected_batch_size": resolved.expected_batch_size,
        "privacy_unit": resolved.privacy_unit,
        "anyway": True,
    }
    if config.privacy.epochs is None:
        pins["steps"] = resolved.steps
    return _merged(config, pins)


def _with_evaluations(base: RunConfig, settings: SearchSettings) -> RunConfig:
    """Evaluate often enough for the pruner that waits, where no number was asked for."""
    if settings.pruner != "patience" or "evaluations" in base.model_fields_set:
        return base
    return parse_config({**base.model_dump(mode="python", exclude_unset=True), "evaluations": _EVALUATIONS})


def _require_patience(plan: SearchPlan) -> None:
    """Refuse a pruner that waits for more evaluations than a trial has."""
    most = min(plan.base.evaluations, plan.steps_of(plan.base)[1])
    if plan.settings.pruner == "patience" and not most > Pruning.PATIENCE:
        raise ArgumentError(
            f"pruner=patience waits for {Pruning.PATIENCE} evaluations without progress, and a trial has {most}: raise "
            "evaluations and steps, or leave the pruner out."
        )


def _as_asked(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_unset=True)


def _merged(config: RunConfig, privacy: Mapping[str, Any]) -> RunConfig:
    values = config.model_dump(mode="python", exclude_unset=True)
    values["privacy"] = {k: v for k, v in {**values.get("privacy", {}), **privacy}.items() if v is not None}
    return parse_config(values)


def _require_trials(
    plan: SearchPlan, data: SearchData, rehearsal: tuple[RunConfig, SearchData] | None, keys: Keys, *, anyway: bool
) -> None:
    """Refuse a search whose trials cannot start, or are forecast to learn nothing, before anything is spent."""
    noise, bound = plan.noise_of(plan.base, 0), keys.bind("search", "plan")
    asked = trial_config(plan, plan.base, noise=noise, final_run=rehearsal is not None)
    splits = data.splits
    prepared = prepare(asked, bound, splits)
    if prepared.forecast is not None and prepared.forecast.hopeless and not anyway:
        raise ArgumentError(
            f"{prepared.forecast.text}. That is one trial's share of the budget: raise --budget, lower --trials, or "
            "give --anyway. Nothing was spent."
        )
    if rehearsal is not None:
        config, public = rehearsal
        asked = public_trial_config(plan, config, noise=noise, num_units=public.splits.train.num_units)
        splits = public.splits
        prepared = prepare(asked, bound, splits)
    _, code = load_run_code(prepared.config)
    space = plan.settings.parsed_space()
    several_models = any(dimension.path == ("model", "name") for dimension in space.dimensions)
    for dimension in space.dimensions:
        for settings in _one_by_one(space, dimension):
            if ".".join(dimension.path) in CHARGING:
                plan.noise_of(with_settings(plan.base, settings), 0)  # its share of the budget holds it
            if dimension.path[0] == "model":
                tried = with_settings(prepared.config, settings)
                if several_models:  # each has defaults of its own for what is left open
                    tried = prepare(with_settings(asked, settings), bound, splits).config
                create_model(tried, prepared.splits, seed=0, code=code)


def _one_by_one(space: SearchSpace, varied: Dimension) -> Iterator[dict[str, Value]]:
    """The values of one dimension on its grid, with the first value of all others."""
    first = {each.name: each.grid()[0] for each in space.dimensions}
    for value in varied.grid():
        yield {**first, varied.name: value}


def trial_config(plan: SearchPlan, config: RunConfig, *, noise: float, final_run: bool = False) -> RunConfig:
    """Return the configuration of a trial: its noise is given, and its own epsilon is no target."""
    values = config.model_dump(mode="python", exclude_unset=True)
    privacy = {**values["privacy"], "noise_multiplier": noise, "num_units": plan.num_units, "anyway": True}
    del privacy["target_epsilon"]
    if plan.settings.early is not None:
        privacy.pop("epochs", None)
        privacy["steps"] = plan.steps_of(config, final_run=final_run)[1]
    return parse_config({**values, "privacy": privacy})


def public_trial_config(plan: SearchPlan, config: RunConfig, *, noise: float, num_units: int) -> RunConfig:
    """Return the configuration of a trial on public data of any size: the same rate, noise and steps.

    With ``batch_divisor`` both batch and noise are smaller: a step has the same noise on its mean, and less work.
    """
    batch, steps = plan.steps_of(config)
    divisor = plan.settings.batch_divisor
    values = trial_config(plan, config, noise=noise).model_dump(mode="python", exclude_unset=True)
    rehearsed = {
        "num_units": num_units,
        "expected_batch_size": batch / plan.num_units * num_units / divisor,
        "noise_multiplier": noise / divisor,
        "steps": steps,
    }
    values["privacy"] = {**values["privacy"], **rehearsed}
    values["privacy"].pop("epochs", None)
    return parse_config(values)


def search_header(plan: SearchPlan, search_id: str, *, private: bool, hand_seeded: bool) -> dict[str, Any]:
    """The public facts of the search: everything that its price follows from, fixed before the first trial."""
    settings, privacy = plan.settings, plan.base.privacy
    best_of = settings.price == "best_of"
    return {
        "run_id": search_id,
        "privacy_unit": required(privacy.privacy_unit, "privacy_unit"),
        "adjacency": privacy.adjacency,
        "num_units": required(privacy.num_units, "num_units"),
        "delta": plan.delta,
        "hand_seeded": hand_seeded,
        "price": settings.price,
        "sampler": settings.sampler,
        "adaptive": settings.adaptive,
        "score": "private" if private else "public",
        "space": settings.parsed_space().texts,
        "budget": plan.budget,
        "filter": None if plan.filter is None else {"order": plan.filter[0], "divergence": plan.filter[1]},
        "planned": None if best_of else _planned(plan),
    }


def _planned(plan: SearchPlan) -> dict[str, Any] | None:
    """What the trial of each number and the final run release, where that is known before the first trial."""
    if plan.noise is None and plan.final_noise is None:
        return None
    stages = ((0, plan.noise), (first_stage(plan.settings.trials), plan.stage_noise))
    trials = [
        {"first": first, "releases": release_list(plan.releases(plan.base, noise))}
        for first, noise in stages
        if noise is not None
    ]
    final_releases = None
    if plan.final_noise is not None:
        final_releases = release_list(plan.releases(plan.base, plan.final_noise, final_run=True))
    return {"trials": trials, "final": final_releases}


def _declarations(plan: SearchPlan, *, private: bool) -> list[tuple[str, str]]:
    """What the search declares instead of charging it."""
    settings = plan.settings
    if settings.search_data is not None:
        name = Path(settings.search_data).name
        return [("search data", f"{name}, declared public: all trials and their scores used it, and are not charged")]
    if private:
        share = f"{settings.validation_fraction:.0%}"
        return [
            (
                "scores of the search",
                f"on {share} of the units, which no trial trains on; with noise, charged in addition to training",
            )
        ]
    return [
        (
            "scores of the search",
            "on the public test set, without charge; metrics on it are those of the best of several",
        )
    ]


_PLAN_FIELDS = ("num_units", "delta", "budget", "score_noise", "noise", "stage_noise", "final_noise", "filter")


def _plan_values(plan: SearchPlan) -> dict[str, Any]:
    values = {name: getattr(plan, name) for name in _PLAN_FIELDS}
    return {**values, "filter": None if plan.filter is None else list(plan.filter)}


# Running


@final
class OpenSearch:
    """A search that this process works on."""

    def __init__(self, place: SearchFolder, *, callback: RunCallback, limits: SearchLimits) -> None:
        stored = place.read_settings()
        self.place, self.limits = place, limits
        self.settings = parse_settings(stored["settings"])
        base = parse_config(stored["base"]).found_from([Path(stored["started_in"]), Path.cwd()])
        values = stored["plan"]
        fixed = {name: values[name] for name in _PLAN_FIELDS if name != "filter"}
        self.plan = SearchPlan(
            self.settings, base, **fixed, filter=None if values["filter"] is None else tuple(values["filter"])
        )
        self.device = str(stored["device"])
        # Another number of threads rounds differently: a trial that another process began could not be continued.
        torch.set_num_threads(int(stored["threads"]))
        self.keys = place.load_keys()
        self.search_id = self.keys.derive("run")[:8].hex()
        self.best_of = self.settings.price == "best_of"
        self.callback = callback
        if self.best_of and limits.timeout is not None:
            raise ArgumentError("price best_of draws its number of trials: a timeout would change it.")
        storage = limits.database
        if stored["database"] and storage is None:
            raise ArgumentError(f"the trials of {place.root} are in a database: name it with --storage.")
        self.data = load_search_data(base, self.settings, self.keys)
        self.trial_data = self.data
        self.trial_base = base
        known = self.data.fingerprints()
        if self.settings.search_data is not None:
            self.trial_base, self.trial_data = load_rehearsal_data(base, self.settings, self.keys)
            known |= {f"search {name}": digest for name, digest in self.trial_data.fingerprints().items()}
        if stored["data"] != known:
            raise DataError(
                f"the images of {place.root} are not those that the search began with: trials on other images can't be "
                "compared, and are no repetitions of one trial. Put the old ones back, or begin a new search."
            )
        note_search(place, self.plan, private=self.data.validation is not None)
        self.book: TrialBook
        if self.best_of:
            self.book = KeyedBook(place, self.settings, self.keys)
        else:
            self.book = OptunaBook(
                place,
                self.settings,
                keys=self.keys,
                name=f"dpvision-{self.search_id}",
                storage=storage if stored["database"] else None,
                points=self._points(),
            )
        self._require_complete()

    def _require_complete(self) -> None:
        """Refuse a ledger that lacks a trial that began, and a list of trials that lacks one that was charged.

        Raises:
            TamperError: one of them was rolled back or replaced.
        """
        begun = self.place.begun()  # before the ledger is read: other processes charge and begin trials meanwhile
        with self.place.locked(), self.place.ledger():
            entries = read_ledger(self.place.ledger_path)
        charged = {(e.payload["trial"], e.payload["attempt"]) for e in entries if e.kind == "trial"}
        if not self.best_of:
            if self.settings.search_data is not None:
                begun = {each for each in begun if each[0] == FINAL_NUMBER}
            missing = sorted(begun - charged)
            if missing:
                raise TamperError(
                    f"{self.place.ledger_path} was rolled back or replaced: trial {missing[0][0]} began and is not "
                    "charged in it. Put the longer ledger back."
                )
            listed = {row.number for row in self.book.rows()} | {FINAL_NUMBER}
            unlisted = sorted(number for number, _ in charged if number not in listed)
            if unlisted:
                raise TamperError(
                    f"the list of trials of {self.place.root} was rolled back or replaced: trial {unlisted[0]} is "
                    "charged and not in it. Put the old list back."
                )

    def _points(self) -> list[dict[str, Value]]:
        """The settings of a search that proposes none itself."""
        space = self.settings.parsed_space()
        if self.settings.rule == "linear_scaling":
            (dimension,) = space.dimensions
            first = first_stage(self.settings.trials)
            return [
                {dimension.name: dimension.at((index + 0.5) / count)}
                for count in (first, self.settings.trials - first)
                for index in range(count)
            ]
        return space.grid()[: self.settings.trials] if self.settings.sampler == "grid" else []

    # One trial

    def run(self, claimed: Claimed) -> None:
        """Charge, run and score one trial, and write down how it ended."""
        config = with_settings(self.trial_base, claimed.settings)
        number = claimed.number
        known = self.place.read_score(number)
        if known is not None:  # killed after its score was written, before the list of trials knew
            self.book.record(number, known["score"], known["state"])
            return
        charged = self._charged(config, number)
        if charged is None:
            self.book.record(number, None, "failed")
            raise _BudgetUsed
        trial = self._trial_run(config, number, *charged, data=self.trial_data)
        try:
            result = run_trial(trial, self._told(number))
        except TrialPruned:
            self.book.record(number, None, "pruned")
            charge = "" if self.settings.search_data is not None else "; it stays charged"
            self._say(f"trial {number} was pruned{charge}.")
            return
        score = WORST if result is None else self._score(trial, result)
        self.book.record(number, score, "complete")
        shown = ", ".join(f"{name}={_short(value)}" for name, value in claimed.settings.items())
        self._say(f"trial {number}: score {score:.4f} with {shown}")

    def _told(self, number: int) -> RunCallback:
        """Who is told about a trial: no one with the best-of price, since its progress is not part of the release."""
        del number
        if self.best_of:
            return RunCallback()
        told = [Told(self.callback, budget=self.plan.budget)]
        if self.settings.pruner != "none" or not self._private:
            patience = self.settings.pruner == "patience"
            told = [*told, Pruning(below=self.settings.prune_below, patience=patience)]
        return Callbacks(*told)

    @property
    def _private(self) -> bool:
        return self.data.validation is not None

    def _say(self, text: str) -> None:
        if not self.best_of:
            self.callback.message(text)

    def _trial_run(
        self, config: RunConfig, number: int, attempt: int, noise: float, *, data: SearchData, final_run: bool = False
    ) -> TrialRun:
        released = self.plan.releases(config, noise, final_run=final_run)
        free = data is not self.data  # public search data: nothing of it is in the search's ledger
        return TrialRun(
            path=self.place.trial_path(number, attempt),
            config=(
                public_trial_config(self.plan, config, noise=noise, num_units=data.splits.train.num_units)
                if free
                else trial_config(self.plan, config, noise=noise, final_run=final_run)
            ),
            keys=trial_keys(self.keys, number, attempt),
            search_id=self.search_id,
            planned=None if free else tuple(released),
            device=self.device,
            splits=data.splits,
            marker=self.place.started_path(number, attempt),
        )

    def _charged(self, config: RunConfig, number: int) -> tuple[int, float] | None:
        """Write a trial's charge, unless it is there; return its attempt and its noise, or None without budget.

        Guarantee: on disk before the trial starts. A trial that has to start again is charged again.
        """
        plan = self.plan
        if self.settings.search_data is not None:
            return 0, plan.noise_of(config, number)
        noise = plan.noise_of(config, number)
        if self.best_of:
            if self._is_lost(number, 0):
                raise PrivacyError(
                    f"trial {number} of {self.place.root} can't be continued, and with price best_of no trial is "
                    "repeated: put its folder back, or begin a new search."
                )
            return 0, noise
        releases = plan.releases(config, noise)
        with self.place.locked(), self.place.ledger() as ledger:
            entries = read_ledger(self.place.ledger_path)
            trials = [e.payload for e in entries if e.kind == "trial" and e.payload["trial"] == number]
            before = {each["attempt"]: each["releases"] for each in trials}
            if before:
                attempt = max(before)
                # What was charged is what may run: a list of trials that was edited names other settings.
                if before[attempt] == release_list(releases) and not self._is_lost(number, attempt):
                    return attempt, noise
                attempt += 1
            else:
                attempt = 0
            if not self._fits(entries, releases):
                return None
            ledger.charge_trial(releases, trial=number, attempt=attempt)
        return attempt, noise

    def _is_lost(self, number: int, attempt: int) -> bool:
        """Whether an attempt may have taken steps, and can't be continued."""
        started = self.place.started_path(number, attempt).exists()
        return started and not can_continue(self.place.trial_path(number, attempt))

    def _fits(self, entries: Any, releases: Any) -> bool:
        """Whether the budget of the trials can hold one more."""
        plan = self.plan
        share = self.settings.budget_share or 1.0
        if plan.filter is not None:
            order, limit = plan.filter
            new = divergence_at(releases, order=order, adjacency=plan.base.privacy.adjacency)
            return filter_spent(entries) + new <= share * limit  # the certificate allows no more, not by a bit
        return plan.price([*charges_of(entries), *releases]) <= share * plan.budget * (1 + _TOLERANCE)

    def _score(self, trial: TrialRun, result: Any) -> float:
        if self.trial_data.validation is None:
            return public_score(result)
        return private_score(
            trial.path,
            self.trial_data.validation,
            noise=required(self.plan.score_noise, "score_noise"),
            divisor=self.settings.validation_fraction * required(self.plan.base.privacy.num_units, "num_units"),
            keys=self.keys,
        )

    # All trials

    def run_all(self) -> None:
        """Run trials until none is left to do, also those that other processes abandon."""
        until = None if self.limits.timeout is None else time.monotonic() + self.limits.timeout
        may_begin = True
        while True:
            may_begin = may_begin and (until is None or time.monotonic() < until)
            claimed = self.book.claim(may_begin=may_begin)
            if claimed is not None:
                try:
                    self.run(claimed)
                except _BudgetUsed:
                    may_begin = False
                    self._say("the budget of the search is used up: no further trials.")
                finally:
                    claimed.release()
            elif any(row.state == "running" for row in self.book.rows()):
                time.sleep(_POLL)  # another process has it, and may be killed
            else:
                return

    def best(self) -> TrialRow:
        """Return the trial with the best score; of equals, the first."""
        rows = [row for row in self.book.rows() if row.state == "complete" and row.score is not None]
        if not rows:
            raise SearchEnded("no trial ended with a model: nothing is released, and what was charged stays charged.")
        return max(rows, key=lambda row: (row.score or 0.0, -row.number))

    @property
    def has_final_run(self) -> bool:
        """Whether the result is a further run with the best settings."""
        return self.settings.budget_share is not None or self.settings.search_data is not None

    def final_settings(self) -> dict[str, Value]:
        """The settings of the final run: the best trial's, or what the scaling rule extrapolates to."""
        if self.settings.rule != "linear_scaling":
            return dict(self.best().settings)
        self.best()  # refuses a search without results
        plan, (dimension,) = self.plan, self.settings.parsed_space().dimensions
        noises = (plan.noise, plan.stage_noise, plan.final_noise)
        epsilons = [
            plan.price([plan.releases(plan.base, required(noise, "noise"), final_run=last)[0]])
            for noise, last in zip(noises, (False, False, True), strict=True)
        ]
        values = [float(value) for value in dimension.grid()]
        rate = extrapolated_rate(
            [
                (float(row.settings[dimension.name]), row.score or 0.0, row.number >= first_stage(self.settings.trials))
                for row in self.book.rows()
                if row.state == "complete"
            ],
            epsilons=(epsilons[0], epsilons[1], epsilons[2]),
            within=(min(values), max(values)),
        )
        return {dimension.name: rate}

    def run_final(self) -> tuple[Path, dict[str, Value]] | None:
        """Charge and run the final run; None if another process does."""
        settings = self.final_settings()
        config = with_settings(self.plan.base, settings)
        lock = self.place.try_trial(FINAL_NUMBER)
        if lock is None:
            return None
        try:
            with self.place.locked(), self.place.ledger() as ledger:
                entries = read_ledger(self.place.ledger_path)
                known = [e.payload for e in entries if e.kind == "trial" and e.payload["role"] == "final"]
                attempt = len(known) - 1
                noise = planned_releases(known[-1])[0][0].noise_multiplier if known else 0.0
                releases = self.plan.releases(config, noise, final_run=True) if known else ()
                if not known or known[-1]["releases"] != release_list(releases) or self._is_lost(FINAL_NUMBER, attempt):
                    attempt, noise = attempt + 1, self._final_noise(config, entries)
                    releases = self.plan.releases(config, noise, final_run=True)
                    ledger.charge_trial(releases, trial=FINAL_NUMBER, attempt=attempt, final_run=True)
            trial = self._trial_run(config, FINAL_NUMBER, attempt, noise, data=self.data, final_run=True)
            result = run_trial(trial, Told(self.callback, budget=self.plan.budget))
            if result is None:
                raise SearchEnded("the final run diverged: lower the learning rates of the space.")
            return trial.path, settings
        finally:
            os.close(lock)

    def _final_noise(self, config: RunConfig, entries: Any) -> float:
        """At least what was planned; more if trials were charged twice."""
        plan = self.plan
        spent = filter_spent(entries) if plan.filter is not None else None
        charged = sum(entry.kind == "trial" for entry in entries)
        if plan.final_noise is not None and charged <= plan.trials:
            return plan.final_noise
        found = plan.final_noise_of(config, charges=charges_of(entries), spent=spent)
        return max(found, plan.final_noise or 0.0)

    # The release

    def publish(self, winner: Path, settings: dict[str, Value]) -> SearchResult:
        """Write the release of the winner with the certificate of the whole search.

        Guarantee: nothing is copied but the winner's own release files. By composition the table of trials is added.
        """
        run = RunFolder(winner)
        ran = read_ledger(run.ledger_path)
        old = parse_object(read_file(run.release / CERTIFICATE), name=CERTIFICATE)
        metrics = parse_object(read_file(run.release / METRICS), name=METRICS)
        config = run.read_config()
        with self.place.locked():
            with self.place.ledger() as ledger:
                ledger.note("release", required(committed_release(ran), "release"))
            searched = read_ledger(self.place.ledger_path)
            certificate = build_certificate(
                ledger=ran,
                mechanism=Mechanism.from_dict(old["mechanism"]),
                hand_seeded=self.keys.hand_seeded,
                release=ReleaseFacts(
                    weights_sha256=old["weights_sha256"],
                    config_sha256=old["config_sha256"],
                    data=old["data"],
                    software=old["software"],
                ),
                search=search_cost(searched, ran),
            )
            pages = {
                CERTIFICATE_PAGE: render_certificate_page(certificate),
                CARD: model_card(certificate, metrics=metrics, config=parse_object(config, name=CONFIG)),
            }
            with RunFolder(self.place.root) as folder:
                folder.withdraw_release()
                (self.place.private / "withdrawn-certificate.json").unlink(missing_ok=True)
                with disk_errors(f"write {folder.ledger_path}"):
                    write_atomically(folder.ledger_path, read_file(run.ledger_path))
                folder.write_release(
                    weights=read_file(run.release / WEIGHTS, limit=None),
                    certificate=certificate,
                    metrics=metrics,
                    config=config,
                    pages=pages,
                )
                rows = self._released_table(folder)
        return SearchResult(self.place.root, settings, certificate, metrics, rows)

    def _released_table(self, folder: RunFolder) -> tuple[TrialRow, ...] | None:
        """Add the table of trials to the release; by composition every trial and every score in it is charged."""
        if self.best_of:
            return None
        rows = self._table()
        folder.add_to_release(TABLE, json_bytes({"trials": [asdict(row) for row in rows]}))
        return rows

    def _table(self) -> tuple[TrialRow, ...]:
        """The trials that were charged, with the epsilon of each alone."""
        alone: dict[int, float] = {}
        known: dict[str, float] = {}
        for entry in read_ledger(self.place.ledger_path):
            if entry.kind == "trial" and entry.payload["role"] == "trial":
                text = str(entry.payload["releases"])
                if text not in known:
                    known[text] = self.plan.price(planned_releases(entry.payload))
                alone[entry.payload["trial"]] = known[text]
        rows = [row for row in self.book.rows() if row.state != "failed"]
        return tuple(replace(row, epsilon=alone.get(row.number)) for row in rows)


class _BudgetUsed(Exception):
    """The budget of the trials cannot hold one more."""


@final
class Told(RunCallback):
    """Passes on what a search may show of a run: notes about the machine are left out, the trial's points too."""

    def __init__(self, callback: RunCallback, *, budget: float) -> None:
        self._callback = callback
        self._budget = budget

    def started(self, *, name: str, steps: int, done: int, choices: Any) -> None:
        """A trial starts or continues."""
        del choices
        self._callback.started(name=name, steps=steps, done=done, choices=())

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        """A step of a trial. What is spent is at most the budget; the epsilon of the trial alone is not shown."""
        del epsilon_bound
        self._callback.stepped(done=done, epsilon_bound=self._budget)

    def finished(self) -> None:
        """A trial ended."""
        self._callback.finished()


def continue_search(place: SearchFolder, *, callback: RunCallback | None, limits: SearchLimits) -> SearchResult:
    """Run the trials that are left with all workers, then the final run, and publish the winner."""
    callback = callback or default_callback()
    search = OpenSearch(place, callback=callback, limits=limits)
    helpers = _start_workers(place, limits)
    try:
        search.run_all()
    except BaseException:
        for helper in helpers:
            helper.terminate()
        raise
    finally:
        codes = [helper.wait() for helper in helpers]
    if any(codes):
        callback.message(f"a worker ended with an error, and others ran its trials: see {place.workers_log}.")
    while search.has_final_run:
        found = search.run_final()
        if found is not None:
            return search.publish(*found)
        time.sleep(_POLL)
    best = search.best()
    attempts = sorted(place.trials.glob(f"{best.number:04d}-[0-9]"), key=lambda path: path.name)
    finished = [path for path in attempts if (path / "release" / CERTIFICATE).exists()]
    if not finished:
        raise SearchEnded("the best trial left no model: nothing is released, and what was charged stays charged.")
    return search.publish(finished[-1], dict(best.settings))


def _start_workers(place: SearchFolder, limits: SearchLimits) -> list[subprocess.Popen[bytes]]:
    """Start the other processes. The database's URL goes through the environment, never through a command line."""
    environment = dict(os.environ)
    if limits.storage is not None:
        environment[STORAGE_VARIABLE] = limits.storage
    command = [sys.executable, "-m", "dpvision.tune.worker", str(place.root)]
    if limits.timeout is not None:
        command += [str(limits.timeout)]
    with place.workers_log.open("ab") as log:
        return [
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)
            for _ in range(limits.workers - 1)
        ]


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
