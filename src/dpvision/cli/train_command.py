"""``dpvision train`` and ``dpvision resume``: from flags, recipes and files to a run.

The flags of ``train`` are the fields of ``dpvision.config`` (see ``cli.flags``) and the few of ``TrainFlags`` that are
not settings of the run. Everything that can be refused without torch is refused before torch is imported.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpvision.cli.console import INTERRUPTED, known_device, print_results, say
from dpvision.cli.flags import Given, Json, Machine, OwnModel, Threads, set_threads
from dpvision.errors import ArgumentError, DataError, brief, shown
from dpvision.ranks import Ranks, job_name, may_restart

if TYPE_CHECKING:
    from dpvision.config import RunConfig
    from dpvision.training import RunCallback, RunResult

LARGEST_CONFIG = 2**20
MAX_NAME_BYTES = 100
_OUTPUT = "Output and speed"
_Log = Annotated[
    str | None,
    typer.Option(
        help="Write epsilon and test metrics to logs: csv and tensorboard in RUN/logs, wandb, mlflow. May be several, "
        "separated by commas.",
        metavar="KINDS",
        rich_help_panel=_OUTPUT,
    ),
]


_Watch = Annotated[
    bool,
    typer.Option(
        "--watch",
        help="Record activation norms on public test images and the optimizer's first moment in RUN/logs/watch.json.",
        rich_help_panel=_OUTPUT,
    ),
]


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """What ``dpvision train`` is told besides the settings of the run."""

    recipe: Annotated[str | None, typer.Option(help="Settings to start from; `dpvision recipes` lists them.")] = None
    config: Annotated[Path | None, typer.Option(help="TOML file with settings of the run to start from.")] = None
    output: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/NAME-1, -2 …")] = None
    quick: Annotated[bool, typer.Option("--quick", help="Smoke test of a recipe: two steps, synthetic images.")] = False
    log: _Log = None
    watch: _Watch = False
    json: Json = False
    scale: Annotated[
        str,
        typer.Option(help="Version of the recipe: paper or cpu.", rich_help_panel=_OUTPUT),
    ] = "paper"
    unsafe_seed: Annotated[
        int | None, typer.Option(help="Repeatable noise, for experiments: not for release.", rich_help_panel="Privacy")
    ] = None
    device: Annotated[str, typer.Option(help="cpu or cuda.", callback=known_device, rich_help_panel=_OUTPUT)] = "cpu"
    threads: Threads = None


def train(given: Given, flags: TrainFlags) -> None:
    """Train privately: images in; model, certificate and report out.

    Example: dpvision train ./scans --target-epsilon 3

    Masks: dpvision train --task segmentation ./slices ./masks --target-epsilon 3

    A table of files: dpvision train labels.csv --classes benign,malignant --target-epsilon 3

    Your own model: dpvision train ./scans --model my_model.py:make --target-epsilon 3

    Watch it: dpvision train ./scans --target-epsilon 3 --log tensorboard,csv
    """
    base = build_config(given, recipe=flags.recipe, scale=flags.scale, file=flags.config)
    set_threads(flags.threads)
    ranks = Ranks.of_this_job()
    ranks.agree({"settings": base.digest()})
    placed = ranks.decided(lambda: _placed(base, flags))
    folder = Path(placed["folder"])
    from dpvision.config import parse_config
    from dpvision.training import resume_training
    from dpvision.training import train as train_run

    if placed["again"]:
        own = _own_names(base)
        with _told(flags.log, folder, ranks, watch=flags.watch) as callback:
            result = resume_training(
                folder, device=flags.device, callback=callback, model=own.get("model"), loss=own.get("loss")
            )
        _finish(result, ranks, json=flags.json, quick=flags.quick)
        return
    # A smoke test must never pass for a release: a seed set by hand stamps it.
    seed = 0 if flags.quick and flags.unsafe_seed is None else flags.unsafe_seed
    with _told(flags.log, folder, ranks, watch=flags.watch) as callback:
        result = train_run(
            parse_config(placed["config"]), run=folder, seed=seed, device=flags.device, callback=callback
        )
    _finish(result, ranks, json=flags.json, quick=flags.quick)


@contextmanager
def _told(log: str | None, folder: Path, ranks: Ranks, *, watch: bool) -> Iterator[RunCallback]:
    """Show progress on the terminal and in logs; ranks other than 0 show nothing."""
    from dpvision.cli.progress import TerminalProgress
    from dpvision.training import Callbacks, RunCallback
    from dpvision.training.run_logs import log_callback

    # What a user's own code prints must not mix with the results.
    with redirect_stdout(sys.stderr):
        if not ranks.leads:
            yield RunCallback()
            return
        logs = log_callback(log, folder)
        with closing(TerminalProgress()) as progress:
            yield Callbacks(progress, logs, _watcher(folder, watch))


def _placed(base: RunConfig, flags: TrainFlags) -> dict[str, Any]:
    """Decide on the folder and the data, on rank 0; a restarted job continues its own run."""
    if may_restart() and flags.output is None:
        raise ArgumentError("name the run's folder with --output: torchrun may restart this command (--max-restarts).")
    config, folder = place_run(base, recipe=flags.recipe, output=flags.output, quick=flags.quick)
    if flags.output is not None and job_name() is not None and _is_own_run(folder, config):
        return {"folder": str(folder), "again": True}
    return {"folder": str(folder), "config": config.to_json(), "again": False}


def _is_own_run(folder: Path, config: RunConfig) -> bool:
    """Return whether an earlier process of this job began the run in this folder, and left a checkpoint.

    What it left before its first checkpoint is removed, if nothing was spent. A job with several torchruns has its name
    by ``--rdzv-id``: without one, another torchrun's run is another job's.
    """
    from dpvision.storage.run_folder import RunFolder
    from dpvision.training.prepare import load_run_code
    from dpvision.training.start import request_digest

    found = RunFolder(folder)
    if not found.private.is_dir() or found.started_by() not in (job_name(), None):
        return False
    if found.started_by() is not None and any(found.checkpoints.glob("*.safetensors")):
        if found.asked_for() != request_digest(load_run_code(config)[0]):
            raise ArgumentError(f"{folder} holds a run of this job with other settings. Choose another --output.")
        return True
    found.remove_unspent()
    return False


def _own_names(config: RunConfig) -> dict[str, str]:
    """Return the model and the loss of a configuration that are the user's own, for a resume."""
    from dpvision.own_code import is_own

    named = {"model": None if config.model is None else config.model.name, "loss": config.loss}
    return {kind: name for kind, name in named.items() if name is not None and is_own(name)}


def resume(
    run: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")],
    on: Machine,
    fork: Annotated[
        bool, typer.Option("--fork", help="Continue although data or own code changed: other noise, charged again.")
    ] = False,
    model: OwnModel = None,
    loss: Annotated[
        str | None, typer.Option(help="The run's own loss again, FILE.py:FUNCTION, where it has one.")
    ] = None,
    log: _Log = None,
    watch: _Watch = False,
) -> None:
    """Continue a run that was interrupted, from any directory. A finished run is left as it is.

    Log files that the run has are continued.

    Example: dpvision resume runs/demo-1
    """
    set_threads(on.threads)
    if (run / "private" / "search.json").is_file():
        raise ArgumentError(f"{run} is a search: continue it with dpvision tune --resume {shown(str(run))}.")
    ranks = Ranks.of_this_job()
    from dpvision.training import resume_training

    with _told(log, run, ranks, watch=watch) as callback:
        result = resume_training(run, allow_fork=fork, device=on.device, callback=callback, model=model, loss=loss)
    _finish(result, ranks, json=on.json)


def _watcher(run: Path, asked: bool) -> RunCallback:
    """The callback of --watch; a run that has its file goes on with it."""
    from dpvision.training.callbacks import RunCallback
    from dpvision.training.run_logs import LOGS

    path = run / LOGS / "watch.json"
    if not asked and not path.exists():
        return RunCallback()
    from dpvision.analyze import Watch

    return Watch(path)


def build_config(
    given: Mapping[str, Any], *, recipe: str | None = None, scale: str = "paper", file: Path | None = None
) -> RunConfig:
    """Join the settings of a recipe or a file with those of the command line, which come first.

    Args:
        given: settings from the command line, nested by section; what was left out is not there.
        recipe: name of a recipe to start from.
        scale: version of the recipe, "paper" or "cpu".
        file: TOML file to start from, instead of a recipe.

    Returns:
        The validated configuration, whose data paths exist.

    Raises:
        ArgumentError: a setting is wrong, unknown or missing.
        DataError: a path of the data does not exist.
    """
    from dpvision.config import parse_config

    values = _base(recipe, file, scale)
    if "source" in given.get("data", {}) and isinstance(values.get("data"), dict):
        values["data"].pop("masks", None)  # those of the base belong to its own images
    _drop_replaced(values, given.get("privacy", {}))
    for name, setting in given.items():
        if name == "model":
            values[name] = _model(_section(values, name), setting)
        else:
            values[name] = {**_section(values, name), **setting} if isinstance(setting, Mapping) else setting
    data = values["data"] = _section(values, "data")
    if "source" not in data:
        raise ArgumentError("name what to train on: a folder, an .npz file, a known dataset, or --recipe NAME.")
    if isinstance(data["source"], str) and "name" not in values:
        values["name"] = _run_name(data["source"])
    values.setdefault("privacy", {})
    config = parse_config(values)
    if recipe is None:
        _require_paths(config)
    _require_sources(config)
    return config


def _base(recipe: str | None, file: Path | None, scale: str) -> dict[str, Any]:
    """The settings of a recipe or a file, as nested plain values."""
    if recipe is not None and file is not None:
        raise ArgumentError("give --recipe or --config, not both.")
    if scale != "paper" and recipe is None:
        raise ArgumentError("--scale needs --recipe: it chooses a version of a recipe.")
    if recipe is not None:
        from dpvision.papers import find_recipe

        return find_recipe(recipe).at(scale).model_dump(mode="json")
    return {} if file is None else _toml(file)


def _toml(file: Path) -> dict[str, Any]:
    if file.exists() and not file.is_file():
        raise ArgumentError(f"--config {file} is a pipe or a device, not a file.")
    try:
        with file.open("rb") as opened:
            content = opened.read(LARGEST_CONFIG + 1)
    except OSError as error:
        raise ArgumentError(f"can't read --config {file}: {error.strerror}.") from error
    if len(content) > LARGEST_CONFIG:
        raise ArgumentError(f"--config {file} must have at most {LARGEST_CONFIG} bytes.")
    try:
        return tomllib.loads(content.decode())
    # The parser's own errors are of this kind too; a number of too many digits and too many brackets are not its own.
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"--config {file} is not TOML: {brief(error)}.") from error


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table of the file; left out, it is empty."""
    found = values.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise ArgumentError(f"{name} must be a table of settings, got {brief(found)}.")
    return dict(found or {})


def _drop_replaced(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Drop settings of the base that exclude one of the command line: its targets and noise, its steps or epochs."""
    targets, lengths, replaced = {"target_epsilon", "target_risk"}, {"steps", "epochs"}, set[str]()
    if targets & given.keys() and "noise_multiplier" not in given:
        replaced |= {"noise_multiplier", *targets}
    if lengths & given.keys():
        replaced |= lengths
    if replaced:
        values["privacy"] = {k: v for k, v in _section(values, "privacy").items() if k not in replaced}


def _model(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A model from the command line has no options of the base; options alone join those of the base."""
    if "name" in given:
        return {"options": {}, **given}
    if "name" not in base:
        raise ArgumentError("--option needs --model or a recipe that names one.")
    return {"name": base["name"], "options": {**_section(base, "options"), **given["options"]}}


def _run_name(source: str) -> str:
    """The name of a run that was given none: the source's own, as far as a folder may have it."""
    stem = Path(source).stem.replace("\\", "_").replace("\0", "_")
    return stem.encode(errors="replace")[:MAX_NAME_BYTES].decode(errors="ignore") or "run"


def _require_paths(config: RunConfig) -> None:
    """Refuse paths of the data that do not exist, before torch is imported."""
    from dpvision.config import KNOWN_DATASETS

    data = config.data
    for path in (data.source, data.test, data.masks, data.test_masks, data.image_folder):
        if path is None or path in KNOWN_DATASETS:
            continue
        try:
            found = Path(path).exists()
        except (OSError, ValueError):
            found = False
        if not found:
            raise DataError(f"{shown(path)} is neither a file or folder nor one of {', '.join(KNOWN_DATASETS)}.")


def _require_sources(config: RunConfig) -> None:
    """Refuse own code whose file is not there or is not Python, before torch is imported. Nothing is executed."""
    from dpvision.own_code import is_own, place_of, read_source

    if config.model is not None and is_own(config.model.name):
        read_source(Path(place_of(config.model.name, "model")[0]))
    if config.loss is not None and is_own(config.loss):
        read_source(Path(place_of(config.loss, "loss")[0]))


def place_run(config: RunConfig, *, recipe: str | None, output: Path | None, quick: bool) -> tuple[RunConfig, Path]:
    """Choose the run's folder, and place the data of a recipe.

    Args:
        config: the configuration.
        recipe: the recipe that it came from, or None.
        output: the folder that was asked for; None chooses runs/NAME-1, -2 and so on.
        quick: write synthetic images beside the run and train on them, for two steps.

    Returns:
        The configuration with the place of its data, and the folder.
    """
    folder = output or free_folder(Path("runs"), f"{config.name}-quick" if quick else config.name)
    if recipe is None and not quick:
        return config, folder
    if recipe is None:
        raise ArgumentError("--quick needs --recipe: it tries a recipe on synthetic images.")
    from dpvision.papers import place_data, quick_config

    return quick_config(config, folder.parent / "made-up") if quick else place_data(config), folder


def free_folder(parent: Path, name: str) -> Path:
    """Return the first of NAME-1, NAME-2 … that does not exist."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def _finish(result: RunResult, ranks: Ranks, *, json: bool, quick: bool = False) -> None:
    """Write the report, print the results, and say how to continue if the run is not done; on rank 0 only."""
    if not ranks.leads:
        if result.outcome == "stopped":
            raise typer.Exit(INTERRUPTED)
        return
    from dpvision.release.report import summary_lines, verdicts_of

    report = result.report
    verdicts = verdicts_of(result.certificate, result.metrics)
    values = {**result.figures(), **verdicts, "report": str(report), "run": str(result.run)}
    if quick:
        from dpvision.papers import MEANS_NOTHING

        say(MEANS_NOTHING)
        values["smoke_test"] = MEANS_NOTHING
    lines = summary_lines(result.certificate, result.metrics)
    print_results(values, [*lines, f"report: {report}"], json=json)
    if result.outcome == "stopped":
        say(f"stopped before all steps were done; continue with: dpvision resume {result.run}")
        raise typer.Exit(INTERRUPTED)
