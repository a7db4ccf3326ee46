"""Coverage of the papers: the page of rows and commands, the check that every command exists, and a run of all of them.

Usage: python -m tools.coverage [--run] [--missing] [--only WORDS] [--folder FOLDER]

``tools/coverage.toml`` is the source. Without ``--run`` the page docs/evidence/coverage.md is written again. With it
every command is run first, at quick scale (synthetic images, two steps, or what [quick] says), in a fork of this
process, and date and result go to ``tools/coverage_results.json``. Quick results mean nothing: they show that the
command works. Rows whose smoke tests are equal (they differ only in what a smoke test replaces, such as epsilon, batch
size or data, or in the learning rate) are run once; every table has at least one row run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "tools" / "coverage.toml"
RESULTS: Final = ROOT / "tools" / "coverage_results.json"
PAGE: Final = ROOT / "docs" / "evidence" / "coverage.md"
STATES: Final = ("WORKS", "PARTIAL", "OUT OF SCOPE")
LONGEST: Final = 1200
"""Seconds after which a command counts as hanging."""
_RUN_COMMANDS: Final = ("analyze", "audit", "report")
_TABLES: Final = "tables"


class CoverageError(Exception):
    """A row or a command that is not in order."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One item of a paper, and what shows that it works. ``note`` says what is missing, or what a reader must know."""

    where: str
    item: str
    status: str = "WORKS"
    commands: tuple[str, ...] = ()
    page: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The whole file: rows by paper, the runs that commands need, and how commands are run quickly."""

    papers: Mapping[str, tuple[Row, ...]]
    runs: Mapping[str, str]
    quick: Mapping[str, str]
    exits: Mapping[str, int]

    @property
    def commands(self) -> tuple[str, ...]:
        """Every command once, in the order of the rows."""
        return tuple(dict.fromkeys(c for rows in self.papers.values() for row in rows for c in row.commands))


def load() -> Coverage:
    """Read ``coverage.toml``.

    Raises:
        CoverageError: A row has an unknown status, or is neither shown by a command or a page nor explained.
    """
    values = tomllib.loads(SOURCE.read_text())
    papers: dict[str, tuple[Row, ...]] = {}
    for paper in values["paper"]:
        rows = [Row(**{**row, "commands": tuple(row.get("commands", ()))}) for row in paper["row"]]
        for row in rows:
            if row.status not in STATES:
                raise CoverageError(f"{row.where}: status must be one of {', '.join(STATES)}, got {row.status}.")
            if not (row.commands or row.page or row.status == STATES[2]) or (row.status != STATES[0] and not row.note):
                raise CoverageError(f"{row.where}, {row.item}: name a command or a page, and explain what is missing.")
        papers[paper["title"]] = tuple(rows)
    return Coverage(papers=papers, runs=values["runs"], quick=values.get("quick", {}), exits=values.get("exits", {}))


def resolve(command: str, runs: Mapping[str, str]) -> None:
    """Check that a command exists with its flags, tables, rows, recipes, models and runs, without running it.

    Raises:
        CoverageError: Something in it does not exist.
    """
    program, arguments = _split(command)
    if program == "pytest":
        missing = [name for name in arguments if not name.startswith("-") and not (ROOT / name.split("::")[0]).exists()]
        if missing:
            raise CoverageError(f"{command}: there is no {missing[0]}.")
        return
    if program == "benchmarks":
        import typer

        from benchmarks.bench_command import app

        _parsed(typer.main.get_command(app), program, arguments, command)
        return
    from dpvision.cli import command_with_flags

    try:
        found = command_with_flags(arguments[0])
    except KeyError as error:
        raise CoverageError(f"{command}: there is no command {arguments[0]}.") from error
    values = _parsed(found, arguments[0], arguments[1:], command)
    _require_names(command, arguments, values, runs)


def _split(command: str) -> tuple[str, list[str]]:
    """Split a command into the program that it starts and its arguments."""
    words = shlex.split(command)
    if words[0] == "dpvision":
        return "dpvision", words[1:]
    if words[:2] == ["python", "-m"] and words[2] in ("pytest", "benchmarks"):
        return words[2], words[3:]
    raise CoverageError(f"{command}: a command starts with dpvision, python -m pytest or python -m benchmarks.")


def _parsed(program: Any, name: str, arguments: Sequence[str], command: str) -> dict[str, Any]:
    """Parse the arguments as the program itself would, without running it."""
    import typer

    try:
        return dict(program.make_context(name, list(arguments)).params)
    except (typer.TyperException, SystemExit) as error:
        raise CoverageError(f"{command}: {error}") from error


def _require_names(command: str, arguments: Sequence[str], values: dict[str, Any], runs: Mapping[str, str]) -> None:
    """Look up what a command names."""
    from dpvision import models
    from dpvision.errors import DPVisionError
    from dpvision.papers import find_recipe
    from dpvision.papers.tables import find_table
    from dpvision.tune.ready_made import ready_made

    verb = arguments[0]
    try:
        if verb == "reproduce":
            patterns = tuple(part for part in (values.get("rows") or "").split(",") if part)
            find_table(values["table"]).choose(patterns)
        if values.get("recipe"):
            find_recipe(values["recipe"])
        if verb == "tune" and values.get("search"):
            ready_made(values["search"])
        model = arguments[1] if verb == "check" else _flag(arguments, "--model")
        if model is not None:
            options = dict(each.split("=", 1) for each in _flags(arguments, "--option"))
            unknown = options.keys() - models.entry(model).options.keys()
            if unknown:
                raise CoverageError(f"{command}: {model} has no option {', '.join(unknown)}.")
    except DPVisionError as error:
        raise CoverageError(f"{command}: {error}") from error
    named = [word.removeprefix("runs/") for word in arguments if word.startswith("runs/") and word.count("/") == 1]
    if verb in _RUN_COMMANDS or "--transfer-weights" in arguments:
        unknown_runs = [name for name in named if name not in runs]
        if unknown_runs:
            raise CoverageError(f"{command}: [runs] does not say how runs/{unknown_runs[0]} is made.")


def _flag(arguments: Sequence[str], name: str) -> str | None:
    return next(iter(_flags(arguments, name)), None)


def _flags(arguments: Sequence[str], name: str) -> Iterator[str]:
    return (value for flag, value in pairwise(arguments) if flag == name)


def quick_command(command: str, coverage: Coverage, *, folder: Path | None = None) -> str:
    """Return the command that is run in the place of another: at quick scale, with a folder for each table.

    Of a table's rows with equal smoke tests one is chosen, and none if ``folder`` has a run of that smoke test, but
    always one for the table.
    """
    if command in coverage.quick:
        return coverage.quick[command]
    program, arguments = _split(command)
    if program == "benchmarks":
        small = _without(_without(command, "--batch"), "--image-size")  # images of the usual size
        return f"{small} --batch 2 --repeats 1 --no-memory --no-breakdown"
    if program == "dpvision" and arguments[0] == "reproduce":
        rows = ",".join(_different_rows(arguments, folder))
        table = arguments[1]
        return f"dpvision reproduce {table} --rows {shlex.quote(rows)} --scale quick --output {_TABLES}/{table}"
    if program == "dpvision" and arguments[0] == "train" and "--recipe" in arguments:
        return f"{command} --quick"
    return command


def _different_rows(arguments: Sequence[str], folder: Path | None) -> list[str]:
    """Return one row of the table for each smoke test that was not run for another table; at least one row."""
    from dpvision.papers import all_recipes
    from dpvision.papers.tables import find_table

    patterns = tuple(part for part in (_flag(arguments, "--rows") or "").split(",") if part)
    rows = [row.name for row in find_table(arguments[1]).choose(patterns)]
    runs = [] if folder is None else list((folder / _TABLES).glob("*/runs/*/1/release/certificate.json"))
    finished = {path.parents[2].name for path in runs}
    finished_here = {path.parents[2].name for path in runs if path.parents[4].name == arguments[1]}
    worked = {_smoke_test(recipe.name) for recipe in all_recipes() if recipe.name in finished}
    different = {_smoke_test(name): name for name in reversed(rows)}
    new = [name for key, name in reversed(different.items()) if key not in worked]
    return new or [name for name in rows if name in finished_here][:1] or rows[:1]


@cache
def _smoke_test(recipe: str) -> str:
    """Return what a recipe's smoke test depends on, but for names and the learning rate."""
    from dpvision.papers import find_recipe, quick_config
    from dpvision.papers.recipe import changed

    found = find_recipe(recipe)
    transfer = found.config.transfer
    with tempfile.TemporaryDirectory() as folder:  # without weights, which would be drawn and written
        config = quick_config(changed(found.config, transfer=None), Path(folder))
        values = json.loads(config.to_json().replace(folder, ""))
    values["name"], values["optimizer"]["learning_rate"] = "", 0
    if transfer is not None:
        values["transfer"] = {**transfer.model_dump(mode="json"), "weights": found.after, "source": "", "licence": ""}
    return json.dumps(values, sort_keys=True)


def _without(command: str, flag: str) -> str:
    """Take a flag and its value out of a command."""
    words = shlex.split(command)
    if flag in words:
        place = words.index(flag)
        del words[place : place + 2]
    return shlex.join(words)


def page(coverage: Coverage, results: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page: every row with its status, its command or page, and when the command last worked."""
    rows = [row for found in coverage.papers.values() for row in found]
    counts = ", ".join(f"{sum(row.status == each for row in rows)} {each}" for each in STATES)
    lines = [
        "# Coverage of the papers",
        "",
        "Every table, figure, technique and setting of the five papers, and the command or page that has it. This page",
        "is generated from `tools/coverage.toml` by `python -m tools.coverage`; a test resolves every command.",
        "",
        f"{len(rows)} rows: {counts}.",
        "",
        "*Last run* is the date on which `make coverage` ran the command at quick scale (synthetic images, two steps)",
        "with the expected exit code. Rows of tables that differ only in what a smoke test replaces (epsilon, batch,",
        "data) or in the learning rate are run once, and every table has at least one row run. That shows that the",
        "commands work, and nothing about accuracy;",
        "[results](results.md) has what was measured. A dash: not run yet.",
    ]
    for title, found in coverage.papers.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| where | item | status | command or page | last run |",
            "|---|---|---|---|---|",
        ]
        lines += [_line(row, results) for row in found]
    return "\n".join([*lines, ""])


def _line(row: Row, results: Mapping[str, Mapping[str, str]]) -> str:
    shown = [f"`{command}`" for command in row.commands]
    if row.page:
        name = Path(row.page)
        up = "" if name.parent.name == "evidence" else f"../{name.parent.name}/"
        shown.append(f"[{name.stem}]({up}{name.name})")
    words = f"{'<br>'.join(shown)}{f'<br>{row.note}' if row.note else ''}"
    last = [results.get(command, {}) for command in row.commands]
    when = "<br>".join(f"{each['date']}: {each['result']}" if each else "–" for each in last)
    return f"| {_cell(row.where)} | {_cell(row.item)} | {row.status} | {_cell(words)} | {when or '–'} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def read_results() -> dict[str, dict[str, str]]:
    """Read when each command was last run, and with which result."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def run_all(coverage: Coverage, folder: Path, *, only: str = "", missing: bool = False) -> bool:
    """Run every command and record date and result; returns whether all worked.

    ``only`` leaves out commands that contain none of its texts (separated by commas), ``missing`` those that worked
    before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _warm_up()
    done = {name for name, found in read_results().items() if missing and found["result"] == "ok"}
    texts = only.split(",")
    wanted = [
        command for command in coverage.commands if any(each in command for each in texts) and command not in done
    ]
    text = " ".join(wanted)
    for name, made_by in coverage.runs.items():
        if f"runs/{name}" in text and not (folder / "runs" / name).exists():
            _require_success(f"{made_by} --output runs/{name}", folder)
    worked = True
    for command in wanted:
        expected, started = coverage.exits.get(command, 0), time.monotonic()
        code = _run(quick_command(command, coverage, folder=folder), folder)
        worked &= code == expected
        outcome = "ok" if code == expected else f"exit code {code}"
        print(f"{time.monotonic() - started:6.0f} s  {outcome:12}  {command}", flush=True)
        results = {name: found for name, found in read_results().items() if name in coverage.commands}
        results[command] = {"date": time.strftime("%Y-%m-%d"), "result": outcome}
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    return worked


def _require_success(command: str, folder: Path) -> None:
    if _run(command, folder) != 0:
        raise CoverageError(f"{command} failed: see {folder / 'log.txt'}.")


@cache
def _warm_up() -> None:
    """Import what every command needs, so that forks share it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import dpvision.papers.reproduce
    import dpvision.training  # noqa: F401


def _run(command: str, folder: Path) -> int:
    """Run a command in a fork, in ``folder``, its output in log.txt there; returns its exit code."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    import signal

    code = 70
    try:
        signal.alarm(LONGEST)
        os.chdir(folder)
        with Path("log.txt").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        print(f"\n$ {command}", flush=True)
        code = _call(command)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(command: str) -> int:
    """Call the program of a command in this process."""
    program, arguments = _split(command)
    if program == "pytest":
        import pytest

        return int(pytest.main([*(str(ROOT / name) for name in arguments), "-q", "-m", "not slow"]))
    sys.argv = [program, *arguments]
    if program == "benchmarks":
        from benchmarks.bench_command import main
    else:
        from dpvision.cli import main
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main() -> None:
    """Write the page; with ``--run`` run the commands first."""
    parser = argparse.ArgumentParser(prog="python -m tools.coverage")
    parser.add_argument("--run", action="store_true", help="run the commands at quick scale first")
    parser.add_argument("--missing", action="store_true", help="with --run: leave out commands that worked before")
    parser.add_argument("--only", default="", help="run only commands that contain one of these texts (A,B)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "coverage", help="where runs are written")
    asked = parser.parse_args()
    coverage = load()
    for command in coverage.commands:
        resolve(command, coverage.runs)
    worked = not asked.run or run_all(coverage, asked.folder.resolve(), only=asked.only, missing=asked.missing)
    PAGE.write_text(page(coverage, read_results()))
    sys.exit(0 if worked else 1)


if __name__ == "__main__":
    main()
