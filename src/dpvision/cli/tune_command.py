"""``dpvision tune``: search hyper-parameters within a budget that covers the search.

The settings of a trial are the flags of ``dpvision train``; what is searched and how is in ``TuneFlags``. Everything
that can be refused without torch is refused before torch is imported.
"""

from __future__ import annotations

import sys
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpvision.cli.console import known_device, print_results, print_table, say
from dpvision.cli.flags import OTHER_NAMES, Given, Json, Threads, run_settings, set_threads
from dpvision.cli.train_command import build_config, free_folder
from dpvision.errors import ArgumentError, brief

if TYPE_CHECKING:
    from dpvision.tune import SearchResult, SearchSettings

_SEARCH = "Search"


def _flag(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=_SEARCH, **more)


@dataclass(frozen=True, kw_only=True)
class TuneFlags:
    """What ``dpvision tune`` is told besides the settings of a trial."""

    budget: Annotated[
        float | None, typer.Option(help="Epsilon of the whole search, > 0. The same as --target-epsilon.")
    ] = None
    space: Annotated[
        list[str] | None,
        typer.Option(
            help="Setting to search, named like its flag: log:LOW:HIGH, float:LOW:HIGH, int:LOW:HIGH, choice:A,B, or "
            "times:LOW:HIGH in units of the default. May be repeated.",
            metavar="NAME=VALUES",
        ),
    ] = None
    space_file: Annotated[Path | None, _flag("TOML file with a table named space, instead of --space.")] = None
    search: Annotated[
        str | None,
        _flag(
            "Ready-made: rate_and_batch, group_sizes, group_sizes_by_stage, clip_and_epochs, component_study, "
            "mean_var, linear_scaling or tan."
        ),
    ] = None
    sampler: Annotated[str | None, _flag("tpe, random, quasi_random or grid. Default: random.")] = None
    price: Annotated[
        str | None,
        _flag("composition: every trial is charged. best_of: only the best is released. Default: composition."),
    ] = None
    trials: Annotated[int | None, _flag("Trials; with best_of their mean number. Default: 10.")] = None
    stopping: Annotated[
        str | None, _flag("With best_of: geometric, logarithmic or poisson number of trials. Default: geometric.")
    ] = None
    score: Annotated[
        str | None,
        _flag("Compare trials on public test data (public), or on a private split with noise, charged (private)."),
    ] = None
    validation_fraction: Annotated[float | None, _flag("Share of the units for private scores. Default: 0.1.")] = None
    score_noise: Annotated[float | None, _flag("Noise stddev on the number of correct units.")] = None
    budget_share: Annotated[
        float | None, _flag("Share of the budget for the search; a final run gets the rest. Example: 0.2")
    ] = None
    pruner: Annotated[
        str | None, _flag("End trials early on public scores: none, threshold or patience. Default: none.")
    ] = None
    prune_below: Annotated[float | None, _flag("Score below which a trial ends, with --pruner threshold.")] = None
    search_data: Annotated[
        str | None, _flag("Similar public data for all trials, declared; only the final run is charged.")
    ] = None
    batch_divisor: Annotated[
        float | None, _flag("With --search-data: divide batch and noise of trials, for speed (TAN).")
    ] = None
    early: Annotated[
        float | None, _flag("Share of its steps that a trial takes; the final run takes all. Example: 0.1")
    ] = None
    timeout: Annotated[float | None, _flag("Seconds after which no trial is started.")] = None
    workers: Annotated[int, _flag("Processes that run trials.")] = 1
    storage: Annotated[
        str | None,
        _flag("Database for the list of trials, such as postgresql://HOST/NAME. Default: a journal in the folder."),
    ] = None
    figures: Annotated[
        Path | None,
        _flag(
            "Write figures of all trials to this folder, by composition only. With --resume also of a finished search."
        ),
    ] = None
    resume: Annotated[Path | None, _flag("Continue or join the search in this folder.")] = None
    config: Annotated[Path | None, typer.Option(help="TOML file with settings of a trial to start from.")] = None
    output: Annotated[Path | None, typer.Option(help="The search's folder. Default: searches/NAME-1, -2 …")] = None
    json: Json = False
    unsafe_seed: Annotated[
        int | None, typer.Option(help="Repeatable noise, for experiments: not for release.", rich_help_panel="Privacy")
    ] = None
    device: Annotated[str, typer.Option(help="cpu or cuda.", callback=known_device)] = "cpu"
    threads: Threads = None


def tune(given: Given, flags: TuneFlags) -> None:
    """Search hyper-parameters; the epsilon of the result is that of the whole search.

    Example: dpvision tune digits --budget 3 --space learning_rate=times:0.1:10 --trials 5

    Best of a random number: dpvision tune digits --budget 3 --price best_of --space learning_rate=times:0.1:10

    A small search, most of the budget for the result: dpvision tune digits --budget 3 --search linear_scaling

    Continue, or add a process: dpvision tune --resume searches/digits-1

    Figures of a finished search: dpvision tune --resume searches/digits-1 --figures figures
    """
    from dpvision.tune.search import resume_search
    from dpvision.tune.search import tune as search_settings
    from dpvision.tune.search_folder import SearchFolder
    from dpvision.tune.search_plan import SearchLimits

    limits = SearchLimits(timeout=flags.timeout, workers=flags.workers, storage=flags.storage)
    set_threads(flags.threads or _threads_of_each(flags.workers))
    from dpvision.cli.progress import TerminalProgress

    if flags.resume is not None:
        _require_alone(given, flags)
        if flags.figures is not None:
            _require_table(str(SearchFolder(flags.resume).read_settings()["settings"]["price"]))
        with closing(TerminalProgress()) as progress, redirect_stdout(sys.stderr):
            result = resume_search(flags.resume, callback=progress, limits=limits)
        _finish(result, flags)
        return
    if flags.budget is not None:
        privacy = given.setdefault("privacy", {})
        if "target_epsilon" in privacy:
            raise ArgumentError("give --budget or --target-epsilon, not both: they mean the same here.")
        privacy["target_epsilon"] = flags.budget
    wanted = wanted_search(flags)
    if not given.get("privacy", {}).get("target_epsilon") and flags.config is None:
        raise ArgumentError("a search needs a budget: --budget EPSILON, for all trials together.")
    if flags.figures is not None:
        _require_table(wanted.price)
    config = build_config(given, file=flags.config)
    folder = flags.output or free_folder(Path("searches"), config.name)
    with closing(TerminalProgress()) as progress, redirect_stdout(sys.stderr):
        result = search_settings(
            config,
            wanted,
            folder=folder,
            seed=flags.unsafe_seed,
            device=flags.device,
            callback=progress,
            limits=limits,
        )
    _finish(result, flags)


def _threads_of_each(workers: int) -> int | None:
    """Share torch's threads among several processes; None leaves one process to torch's choice."""
    if workers == 1:
        return None
    import torch

    return max(1, torch.get_num_threads() // workers)


_WITH_RESUME = frozenset({"resume", "figures", "timeout", "workers", "storage", "json"})


def _require_alone(given: Given, flags: TuneFlags) -> None:
    """Refuse settings beside --resume: a search keeps those that it began with."""
    others = [
        field.name
        for field in fields(flags)
        if field.name not in _WITH_RESUME and getattr(flags, field.name) != field.default
    ]
    if given or others:
        name = f"--{others[0].replace('_', '-')}" if others else "a setting of a trial"
        raise ArgumentError(f"--resume continues a search with its own settings: leave {name} out.")


def _require_table(price: str) -> None:
    """Refuse figures of trials that may not be shown."""
    if price != "composition":
        raise ArgumentError("figures show every trial, which only price composition charges: leave --figures out.")


def wanted_search(flags: TuneFlags) -> SearchSettings:
    """Join a ready-made search with the flags, which come first.

    Raises:
        ArgumentError: a flag is wrong, or no space is named.
    """
    from dpvision.tune.ready_made import ready_made
    from dpvision.tune.search_plan import SearchSettings, parse_settings
    from dpvision.tune.space import read_space

    values: dict[str, Any] = {} if flags.search is None else ready_made(flags.search)
    space = dict(values.get("space", {}))
    if flags.space_file is not None:
        space = read_space(flags.space_file)
    if flags.space:
        named = dict(map(_named, flags.space))
        space = {**space, **named} if flags.space_file is not None else named
    names = SearchSettings.model_fields.keys() - {"space", "rule"}
    for name in names:
        value = getattr(flags, name)
        if value is not None:
            values[name] = value
    found = parse_settings({**values, "space": space})
    found.parsed_space()
    return found


def _named(text: str) -> tuple[str, str]:
    name, equals, values = text.partition("=")
    if not equals or not name:
        raise ArgumentError(f"--space must look like --space learning_rate=log:0.01:4, got {brief(text)!r}.")
    return _setting(name), values


def _setting(name: str) -> str:
    """Return the key of a setting that is named like its flag; any other name as it is."""
    flag = f"--{name.replace('_', '-')}"
    flag = OTHER_NAMES.get(flag, flag)
    path = next((each.path for each in run_settings() if each.flag == flag), (name,))
    return name if path[-1] == name else ".".join(path)


def _finish(result: SearchResult, flags: TuneFlags) -> None:
    """Print the table of trials, if it may be shown, and the result; write the figures."""
    from dpvision.privacy.mechanism import rounded_up

    json = flags.json
    found = result.figures()
    if flags.figures is not None and result.trials is not None:
        from dpvision.papers import published_results
        from dpvision.tune.search_figures import write_figures

        score = next((name for name in ("accuracy", "dice", "mean_auc") if name in found), "score")
        published = published_results(str(result.certificate["data"].get("source"))) if score == "accuracy" else []
        reached = (found["epsilon"], found[score]) if score in found else None
        files = write_figures(result.trials, flags.figures, published=published, score=score, result=reached)
        found["figures"] = [str(path) for path in files]
    if result.trials is not None and not json and result.trials:
        rows = [
            {
                "trial": row.number,
                **{name: _shown(value) for name, value in row.settings.items()},
                "score": "" if row.score is None else f"{row.score:.4f}",
                "state": row.state,
            }
            for row in result.trials
        ]
        print_table(tuple(rows[0]), rows)
    settings = ", ".join(f"{name}={_shown(value)}" for name, value in result.settings.items())
    score = next((f"{name} {found[name]:.4f}" for name in ("accuracy", "dice", "mean_auc") if name in found), "")
    lines = [
        f"best: {settings}",
        f"test: {score} ({result.metrics['final']['evaluated_on']})",
        f"epsilon {rounded_up(found['epsilon'])} at delta {found['delta']:g}: the whole search, the guarantee",
        f"(the chosen run alone: {rounded_up(found['epsilon_of_this_run_alone'])}, NOT the guarantee)",
        f"release: {result.folder / 'release'}",
        *([f"figures: {flags.figures}"] if found.get("figures") else []),
    ]
    print_results(found, lines, json=json)
    if not found["for_release"]:
        say("not for release: see certificate.md.")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
