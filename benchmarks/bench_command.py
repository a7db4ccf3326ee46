"""``python -m benchmarks``: time and memory of a private step beside an ordinary one and the peers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from dpvision.cli import run_program
from dpvision.cli.console import print_json
from dpvision.cli.flags import Json, ModelOptions, as_command
from dpvision.errors import printable

if TYPE_CHECKING:
    from benchmarks import Figures, Item


Count = int | None


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """What ``python -m benchmarks`` is told; what is None is chosen."""

    model: Annotated[
        str | None, typer.Option(help="Model, or with --suite the models to keep. Default: shoefit_cnn.")
    ] = None
    option: ModelOptions = None
    batch: Annotated[Count, typer.Option(help="Privacy units in a step. Default: 256.")] = None
    image_size: Annotated[Count, typer.Option(help="Side of an image (1: features). Default: the paper's.")] = None
    in_channels: Annotated[Count, typer.Option(help="Channels of an image. Default: the paper's.")] = None
    views: Annotated[Count, typer.Option(help="Rows per unit, also of ordinary steps. Default: 1.")] = None
    microbatch_size: Annotated[Count, typer.Option(help="Units at a time. Default: chosen.")] = None
    suite: Annotated[
        str | None, typer.Option(help="targets, peers, catalogue, scaling or quick; several with commas.")
    ] = None
    contenders: Annotated[str | None, typer.Option(help="Names with commas. Default: all.")] = None
    compile_: Annotated[bool, typer.Option("--compile", help="Also the variants that are compiled.")] = False
    repeats: Annotated[int, typer.Option(help="Interleaved rounds.")] = 7
    threads: Annotated[Count, typer.Option(help="Threads of every contender. Default: torch's.")] = None
    jax_python: Annotated[Path | None, typer.Option(help="Python with jax_privacy, which then takes part.")] = None
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each contender in its own process.")] = True
    breakdown: Annotated[bool, typer.Option(help="Measure the parts of a private step.")] = True
    read: Annotated[list[Path] | None, typer.Option(help="Results of an earlier --json, instead of a run.")] = None
    write: Annotated[Path | None, typer.Option(help="Write a page, its chart and raw results, e.g. to x.md.")] = None
    json: Json = False

    def workload(self) -> dict[str, Any]:
        """The facts of a workload that were given."""
        names = ("model", "batch", "image_size", "in_channels", "views", "microbatch_size")
        options = {"options": " ".join(self.option)} if self.option else {}
        return {name: value for name in names if (value := getattr(self, name)) is not None} | options


def bench(flags: BenchFlags) -> None:
    """Time private, ordinary and peers' steps in turn: medians, as ratios to the ordinary eager step.

    Example: python -m benchmarks --model resnet9 --batch 128 --contenders channels-last,dpvision-native,opacus-hooks
    """
    from benchmarks.page import require_writable, write_page
    from benchmarks.table import terminal_lines

    if flags.write is not None:
        require_writable(flags.write)
    asked, suite = flags.workload(), flags.suite
    if flags.read:
        figures = _earlier(flags.read, asked if suite is None else {**asked, "suite": suite})
    else:
        figures = _measured(_items(asked) if suite is None else _suites(suite, asked), flags)
    if flags.write is not None:
        write_page(figures, flags.write)
    if flags.json:
        print_json(figures.to_dict())
        return
    for line in terminal_lines(figures):
        typer.echo(line)


def _measured(items: list[Item], flags: BenchFlags) -> Figures:
    """Run the workloads, and say on stderr which one is running."""
    from benchmarks import Settings, run
    from dpvision.kernels.memory import keep_freed_memory

    settings = Settings(
        contenders=None if flags.contenders is None else _names(flags.contenders),
        compile=flags.compile_,
        repeats=flags.repeats,
        threads=flags.threads,
        memory=flags.memory,
        breakdown=flags.breakdown,
        jax_python=flags.jax_python,
    )
    keep_freed_memory()  # as in training; ordinary steps gain from it, too
    with _progress() as progress:
        return run(items, settings, progress)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _items(asked: dict[str, Any]) -> list[Item]:
    from benchmarks import Item, Workload

    return [Item(suite="one workload", workload=Workload.of(**{"model": "shoefit_cnn", "batch": 256, **asked}))]


def _suites(names: str, asked: dict[str, Any]) -> list[Item]:
    from benchmarks import suite
    from dpvision.errors import ArgumentError

    chosen = asked.pop("model", None)
    _refuse_both("suite", asked)
    items = [item for name in _names(names) for item in suite(name)]
    if chosen is None:
        return items
    there = {item.workload.model for item in items}
    for name in _names(chosen):
        if name not in there:
            raise ArgumentError(f"--suite {names} has no model {name!r}. It has: {', '.join(sorted(there))}.")
    return [item for item in items if item.workload.model in _names(chosen)]


def _earlier(paths: list[Path], asked: dict[str, Any]) -> Figures:
    """The figures of earlier runs as one."""
    from benchmarks.figures import joined, load

    _refuse_both("read", asked)
    return joined([load(path) for path in paths])


def _refuse_both(chosen: str, asked: dict[str, Any]) -> None:
    from dpvision.errors import ArgumentError

    if asked:
        raise ArgumentError(f"--{chosen} brings its own workloads, got {', '.join(asked)} as well. Leave one out.")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is going on, on stderr: one line that changes between steps (never while one is timed), or a log."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: typer.echo(printable(text), err=True)
        return
    columns = (TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("")
        yield lambda text: bar.update(task, description=escape(printable(text)), refresh=True)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(as_command(bench))


def main() -> None:
    """Run the command, with the exit codes of the ``dpvision`` command."""
    run_program(app, name="python -m benchmarks")
