"""``dpvision plan``: a table of ways to spend a budget, its curves, or one setting scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpvision.cli.console import print_json, say
from dpvision.cli.epsilon_command import choose_delta, count_steps, mechanism_of, read_risk, require, solve
from dpvision.cli.flags import Given, Json, ModelOptions, Threads, parse_options, set_threads
from dpvision.errors import ArgumentError, printable

if TYPE_CHECKING:
    from dpvision.accounting import AttackRisk, PlanRow
    from dpvision.cli.plan_chart import Published
    from dpvision.privacy.mechanism import Mechanism
    from dpvision.training.step_time import StepTime


_CAPTION = (
    "effective noise = noise multiplier / batch, on the mean gradient: lower learns better. signal = √steps · sample "
    "rate / noise. per step: batch / noise, the most that the sum of a step can exceed the noise along it. "
    "× full: the effective noise against that of as many steps with every unit in each; • marks a batch "
    "that is large enough: a larger one gains less than 10 % at as many steps."
)


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What ``dpvision plan`` is told besides units, target, noise, delta and adjacency."""

    expected_batch_size: Annotated[
        list[float] | None, typer.Option(help="Repeat for several. Example: --expected-batch-size 1024")
    ] = None
    epochs: Annotated[list[float] | None, typer.Option(help="Repeat for several. Example: --epochs 30")] = None
    steps: Annotated[list[int] | None, typer.Option(help="Instead of --epochs. Example: --steps 2000")] = None
    scale_down: Annotated[
        float | None,
        typer.Option(help="One setting and a cheaper one for a search, NOT private (TAN). Example: --scale-down 16"),
    ] = None
    scale_up: Annotated[
        float | None, typer.Option(help="From the cheap setting back to the full one. Example: --scale-up 16")
    ] = None
    plot: Annotated[Path | None, typer.Option(help="Write a chart here. Example: --plot plan.png")] = None
    curves: Annotated[
        Path | None,
        typer.Option(
            help="Write curves to this folder as PNG, SVG, CSV and JSON: epsilon over steps, noise at a fixed batch, "
            "epochs over the batch. Takes about half a minute. Example: --curves plan"
        ),
    ] = None
    needed_steps: Annotated[
        int | None,
        typer.Option(help="With --curves: steps that the optimizer needs, whatever the batch. Default: 1000."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Measure private steps of this model on synthetic images, for some seconds, and estimate the time of "
            "every row. A name that `dpvision models` lists, or FILE.py:FUNCTION."
        ),
    ] = None
    option: ModelOptions = None
    image_size: Annotated[int | None, typer.Option(help="With --model: side of an image in pixels.")] = None
    in_channels: Annotated[int | None, typer.Option(help="With --model: channels of an image.")] = None
    num_classes: Annotated[int | None, typer.Option(help="With --model: number of classes.")] = None
    views: Annotated[int, typer.Option(help="With --model: augmented views of an image.")] = 1
    threads: Threads = None
    json: Json = False


def plan(
    given: Annotated[Given, ("num_units", "target_epsilon", "target_risk", "noise_multiplier", "delta", "adjacency")],
    flags: PlanFlags,
) -> None:
    """Tabulate the noise for every pair of batch size and length at one target; or scale one setting.

    Example: dpvision plan --num-units 50000 --target-epsilon 8 --plot plan.png

    A limit on attacks, times and curves: dpvision plan --num-units 50000 --target-risk tpr:0.05@0.01 --model wrn16_4
    --curves plan
    """
    values = dict(given.get("privacy", {}))
    risk = read_risk(values)
    _require_model(flags)
    if flags.scale_down is not None or flags.scale_up is not None:
        _scale(values, flags)
        return
    if "noise_multiplier" in values:
        raise ArgumentError("plan finds the noise_multiplier. For a given one use dpvision epsilon.")
    require(values, "num_units", *(() if risk else ("target_epsilon",)))
    delta, proposed = choose_delta(values, json=flags.json)
    if flags.plot is not None:
        _check_plot(flags.plot)
    if flags.curves is not None:
        _check_curves(flags.curves)
    pace = _measured(flags)
    from rich.console import Console

    from dpvision.accounting import plan as make_plan
    from dpvision.cli.plan_chart import draw_plan, published_settings

    with Console(stderr=True).status("calibrating the noise"):
        rows = list(
            make_plan(
                **{**values, "delta": delta},
                expected_batch_sizes=flags.expected_batch_size or (),
                epochs=flags.epochs or (),
                steps=flags.steps or (),
            )
        )
    target = values.get("target_epsilon", risk)
    known = () if risk else published_settings(num_units=values["num_units"], target_epsilon=target, delta=delta)
    print_plan(rows, known, target=target, delta_proposed=proposed, json=flags.json, pace=pace)
    if flags.plot is not None:
        draw_plan(rows, flags.plot, published=known)
        typer.echo(printable(f"chart: {flags.plot}"), err=flags.json)
    if flags.curves is not None:
        from dpvision.cli.plan_curves_chart import write_curves

        with Console(stderr=True).status("computing the curves"):
            written = write_curves(rows, target, flags.curves, published=known, steps=flags.needed_steps)
        typer.echo(printable(f"curves: {', '.join(map(str, written))}"), err=flags.json)


def _require_model(flags: PlanFlags) -> None:
    """Refuse flags of the measurement without a model, and those of the curves without curves."""
    of_model = {"option": None, "image_size": None, "in_channels": None, "num_classes": None, "views": 1}
    given = [name for name, left_out in of_model.items() if getattr(flags, name) not in (left_out, [])]
    if given and flags.model is None:
        raise ArgumentError(f"--{given[0].replace('_', '-')} needs --model: it describes what is measured.")
    if flags.needed_steps is not None and flags.curves is None:
        raise ArgumentError("--needed-steps needs --curves.")
    if flags.model is not None and (flags.scale_down is not None or flags.scale_up is not None):
        raise ArgumentError("--model measures the rows of a plan. Leave it out with --scale-….")


def _check_curves(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"--curves must be a folder, got the file {folder}.")
    if not folder.absolute().parent.is_dir():
        raise ArgumentError(f"--curves must be in a folder that exists, got {folder}.")


def _measured(flags: PlanFlags) -> StepTime | None:
    """Measure the model's private step; None without a model."""
    if flags.model is None:
        return None
    import sys
    from contextlib import redirect_stdout

    from rich.console import Console

    from dpvision.cli.model_commands import find_model

    options = parse_options(flags.option)
    set_threads(flags.threads)
    with redirect_stdout(sys.stderr), Console(stderr=True).status("measuring private steps on synthetic images"):
        found = find_model(flags.model, flags.in_channels, flags.image_size, flags.num_classes, options)
        from dpvision.training.step_time import measure_step

        return measure_step(
            found.model,
            image_shape=found.image_shape,
            num_classes=found.num_classes,
            views=flags.views,
            own_code=found.own_code,
        )


def _check_plot(path: Path) -> None:
    if path.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise ArgumentError(f"--plot must end in .png, .svg or .pdf, got {path.name!r}.")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"--plot must be in a folder that exists, got {path}.")


def _scale(values: dict[str, Any], flags: PlanFlags) -> None:
    """Print one setting and the cheaper or larger one with equal noise on the mean gradient."""
    from dpvision.accounting import scaled

    if flags.plot is not None:
        raise ArgumentError("--plot draws a plan over several settings. Leave it out with --scale-….")
    once = {"expected_batch_size": flags.expected_batch_size, "steps": flags.steps, "epochs": flags.epochs}
    values |= {name: _only(name, given) for name, given in once.items() if given}
    require(values, "num_units", "expected_batch_size")
    up, factor = _direction(flags)
    values["steps"] = count_steps(values, values.pop("epochs", None))
    if up and "noise_multiplier" not in values:
        raise ArgumentError("--scale-up starts from a cheap setting: give its --noise-multiplier.")
    if ("noise_multiplier" in values) == ("target_epsilon" in values):
        raise ArgumentError("with --scale-down or --scale-up give either --target-epsilon or --noise-multiplier.")
    delta = choose_delta(values, json=flags.json)
    if "noise_multiplier" not in values:
        values["noise_multiplier"] = solve("noise_multiplier", values, delta=delta[0])
    given = mechanism_of(values)
    other = scaled(given, by=factor if up else 1 / factor)
    search, target = (given, other) if up else (other, given)
    print_scaling(search=search, target=target, factor=factor, up=up, delta=delta, json=flags.json)


def _only(name: str, values: list[Any]) -> Any:
    """The one value of a flag that may be repeated elsewhere."""
    if len(values) > 1:
        flag = f"--{name.replace('_', '-')}"
        raise ArgumentError(f"{flag} must be given once with --scale-down or --scale-up, got {len(values)} values.")
    return values[0]


def _direction(flags: PlanFlags) -> tuple[bool, float]:
    """Whether to scale up, and by how much."""
    given = {"down": flags.scale_down, "up": flags.scale_up}
    chosen = [(name, factor) for name, factor in given.items() if factor is not None]
    if len(chosen) != 1:
        raise ArgumentError("give either --scale-down or --scale-up, got both.")
    ((name, factor),) = chosen
    if not 1 < factor < float("inf"):
        raise ArgumentError(f"--scale-{name} must be a finite number > 1, got {factor}.")
    return name == "up", factor


def print_plan(
    rows: Sequence[PlanRow],
    published: Sequence[Published],
    *,
    target: float | AttackRisk,
    delta_proposed: bool,
    json: bool,
    pace: StepTime | None = None,
) -> None:
    """Print a plan, what papers chose for the same data and epsilon, and warnings.

    Args:
        rows: one for each pair of batch size and length, at least one.
        published: settings of papers at the same number of units, epsilon and delta.
        target: the target epsilon, or the limit on attacks.
        delta_proposed: whether delta was chosen by us.
        json: print JSON instead of tables.
        pace: the measured time of a step, for the time of each row.
    """
    from dpvision.accounting import AttackRisk, cautions

    spent = max((row.guarantee for row in rows), key=lambda guarantee: guarantee.epsilon)
    num_units = rows[0].mechanism.num_units
    warnings = cautions(spent, num_units=num_units)
    for warning in warnings:
        say(f"warning: {warning}")
    chosen = [
        {"source": each.source, **_values(replace(each.mechanism, adjacency=spent.adjacency), each.delta)}
        for each in published
    ]
    if json:
        name, value = ("target_risk", str(target)) if isinstance(target, AttackRisk) else ("target_epsilon", target)
        facts = {name: value, "delta": spent.delta, "delta_proposed": delta_proposed}
        if pace is not None:
            facts["measured_step"] = _pace_values(pace)
        facts |= {"adjacency": spent.adjacency, "num_units": num_units, "cautions": list(warnings)}
        print_json({**facts, "rows": [_row_values(row, pace) for row in rows], "published": chosen})
        return
    lines = [_row_line(row, pace) for row in rows]
    limit = f"attacks ≤ {target}" if isinstance(target, AttackRisk) else f"epsilon ≤ {target:g}"
    caption = _CAPTION if pace is None else f"{_CAPTION} {_pace_text(pace)}"
    _print_table(lines, title=f"{limit} at delta {spent.delta:g} ({spent.adjacency})", caption=caption)
    if chosen:
        words = f"epsilon: by our accountant, {spent.adjacency}; they kept {target:g} by RDP, add_remove"
        _print_table(chosen, title=f"What papers chose ({words})")


def print_scaling(
    *, search: Mechanism, target: Mechanism, factor: float, up: bool, delta: tuple[float, bool], json: bool
) -> None:
    """Print the cheap setting, the full one, the epsilon of each, and what that means for a search.

    Args:
        search: the cheap mechanism.
        target: the full mechanism, with equal noise on the mean gradient.
        factor: how many times the batch of the target is larger, > 1.
        up: whether the search was given and the target computed.
        delta: delta, and whether it was proposed.
        json: print JSON instead of a table.
    """
    from dpvision.privacy.mechanism import rounded_up

    values = {"search": _values(search, delta[0]), "target": _values(target, delta[0])}
    notes = [
        f"The search does 1/{factor:g} of the work with equal noise on the mean gradient and equal steps: a learning "
        "rate, clip norm or model that wins there fits the target as it is.",
        f"The search is NOT private at the target's epsilon: each of its runs costs "
        f"{rounded_up(values['search']['epsilon'])} by itself. Search on public data, or keep every run to yourself.",
        "What a search on the private data chose is not covered by the target's epsilon either: declare it, or charge "
        "the search.",
    ]
    back = _command(target if up else search, f"--scale-{'down' if up else 'up'} {factor:g}", delta[0])
    if json:
        facts = {"delta": delta[0], "delta_proposed": delta[1], "adjacency": target.adjacency}
        facts |= {"num_units": target.num_units, "factor": factor}
        print_json({**facts, **values, "notes": notes, "back": back})
        return
    _print_table(
        [{"": name, **each} for name, each in values.items()],
        title=f"at delta {delta[0]:g} ({target.adjacency}), {target.num_units} units",
    )
    for note in notes:
        typer.echo(note)
    typer.echo(f"The way back: {back}")


def _command(mechanism: Mechanism, scale: str, delta: float) -> str:
    """What to type to get from here to the other setting."""
    return (
        f"dpvision plan --num-units {mechanism.num_units} --expected-batch-size {mechanism.expected_batch_size!r} "
        f"--noise-multiplier {mechanism.noise_multiplier!r} --steps {mechanism.steps} --delta {delta:g} "
        f"--adjacency {mechanism.adjacency} {scale}"
    )


def _values(mechanism: Mechanism, delta: float) -> dict[str, Any]:
    """A mechanism and its epsilon, in the order of the table."""
    from dpvision.accounting import mechanism_guarantee

    return {**_settings(mechanism), "epsilon": mechanism_guarantee(mechanism, delta=delta).epsilon}


def _settings(mechanism: Mechanism) -> dict[str, Any]:
    from dpvision.accounting import effective_noise

    names = ("expected_batch_size", "epochs", "steps", "noise_multiplier")
    return {**{name: getattr(mechanism, name) for name in names}, "effective_noise": effective_noise(mechanism)}


def _pace_values(pace: StepTime) -> dict[str, Any]:
    """The measurement for JSON."""
    from dataclasses import asdict

    return {**asdict(pace), "synthetic_images": True}


def _pace_text(pace: StepTime) -> str:
    """What the column of times rests on."""
    how = "C++ kernels" if pace.native else "plain PyTorch"
    return (
        f"time: estimated for this machine as it is now ({how}, threads: {pace.threads}), from private steps of "
        f"{pace.parameters} parameters on at most {pace.largest_batch} synthetic images: {pace.seconds_fixed:.2g} s + "
        f"{1000 * pace.seconds_per_unit:.3g} ms per unit; without data loading, evaluation and cached features. norm: "
        "batch / (noise · √parameters), the most that the sum's length can be of the noise's."
    )


def _over_norm(row: PlanRow, pace: StepTime) -> float:
    """The largest possible length of a step's sum over that of its noise."""
    return row.signal_per_step / math.sqrt(max(1, pace.parameters))


def _duration(seconds: float) -> str:
    """Seconds as a person says them."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def _row_values(row: PlanRow, pace: StepTime | None) -> dict[str, float | bool]:
    """A row of the plan for JSON."""
    more = ("full_batch_noise", "excess_noise", "batch_is_enough", "signal", "signal_per_step")
    timed = {} if pace is None else {"seconds": pace.seconds(row.mechanism), "signal_over_norm": _over_norm(row, pace)}
    return {
        **_settings(row.mechanism),
        "sample_rate": row.mechanism.sample_rate,
        **{name: getattr(row, name) for name in more},
        **timed,
        "epsilon": row.guarantee.epsilon,
    }


def _row_line(row: PlanRow, pace: StepTime | None) -> dict[str, Any]:
    """A row of the plan for the table."""
    timed = (
        {} if pace is None else {"norm": f"{_over_norm(row, pace):.2g}", "time": _duration(pace.seconds(row.mechanism))}
    )
    return {
        **_settings(row.mechanism),
        "× full": f"{row.excess_noise:.3g}{' •' if row.batch_is_enough else '  '}",
        "signal": f"{row.signal:.3g}",
        "per step": _short(row.signal_per_step),
        **timed,
        "epsilon": row.guarantee.epsilon,
    }


def _print_table(lines: Sequence[Mapping[str, Any]], *, title: str, caption: str | None = None) -> None:
    """Print mappings with equal keys as a table, with a line between batch sizes. Epsilon is rounded up."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from dpvision.privacy.mechanism import rounded_up

    # No vertical lines: all columns fit a terminal of 80 characters, and no number is cut off.
    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1)
    )
    for name in lines[0]:
        table.add_column(name.replace("expected_batch_size", "batch").replace("_", " "), justify="right")
    for before, values in zip((lines[0], *lines), lines, strict=False):
        if before["expected_batch_size"] != values["expected_batch_size"]:
            table.add_section()
        table.add_row(*(rounded_up(v) if name == "epsilon" else _short(v) for name, v in values.items()))
    Console().print(table)


def _short(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1000 <= value < 1e15 else f"{value:.4g}"
