"""What ``dpvision plan`` prints: a table of ways to spend a budget, or a setting and its cheap or costly twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from dpvision.cli.console import print_json

if TYPE_CHECKING:
    from dpvision.accounting import PlanRow
    from dpvision.cli.plan_chart import Published
    from dpvision.privacy.mechanism import Adjacency, Guarantee, Mechanism


_CAPTION = (
    "effective noise = noise multiplier / batch, on the mean gradient: lower learns better. signal = √steps · sample "
    "rate / noise. × full: the effective noise against that of as many steps with every unit in each; • marks a batch "
    "that is large enough: a larger one gains less than 10 % at as many steps."
)


def print_plan(
    rows: Sequence[PlanRow], published: Sequence[Published], *, target: float, delta_proposed: bool, json: bool
) -> None:
    """The rows, what papers chose for the same data and epsilon, and warnings."""
    from dpvision.accounting import cautions

    spent: Guarantee = max((row.guarantee for row in rows), key=lambda guarantee: guarantee.epsilon)
    warnings = cautions(spent, num_units=rows[0].num_units)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    chosen = [_published_figures(setting, spent.adjacency) for setting in published]
    if json:
        facts = {"target_epsilon": target, "delta": spent.delta, "delta_proposed": delta_proposed}
        facts |= {"adjacency": spent.adjacency, "num_units": rows[0].num_units, "cautions": list(warnings)}
        print_json({**facts, "rows": [_row_figures(row) for row in rows], "published": chosen})
        return
    _print_rows(rows, title=f"epsilon ≤ {target:g} at delta {spent.delta:g} ({spent.adjacency})")
    if chosen:
        words = f"epsilon: by our accountant, {spent.adjacency}; they kept {target:g} by RDP, add_remove"
        _print_table(chosen, title=f"What papers chose ({words})")


def print_scaling(
    *, search: Mechanism, target: Mechanism, factor: float, up: bool, delta: tuple[float, bool], json: bool
) -> None:
    """The cheap setting, the costly one, the epsilon of each, and what that means for a search.

    ``up`` says that the search was given and the target found; ``delta`` comes with whether it was proposed.
    """
    from dpvision.privacy.mechanism import rounded_up

    figures = {"search": _mechanism_figures(search, delta[0]), "target": _mechanism_figures(target, delta[0])}
    notes = [
        f"The search does 1/{factor:g} of the work with equal noise on the mean gradient and equal steps: a learning "
        "rate, clip norm or model that wins there fits the target as it is.",
        f"The search is NOT private at the target's epsilon: each of its runs costs "
        f"{rounded_up(figures['search']['epsilon'])} by itself. Search on public data, or keep every run to yourself.",
        "What a search on the private data chose is not covered by the target's epsilon either: declare it, or charge "
        "the search.",
    ]
    back = _command(target if up else search, f"--scale-{'down' if up else 'up'} {factor:g}", delta[0])
    if json:
        facts = {"delta": delta[0], "delta_proposed": delta[1], "adjacency": target.adjacency}
        facts |= {"num_units": target.num_units, "factor": factor}
        print_json({**facts, **figures, "notes": notes, "back": back})
        return
    _print_table(
        [{"": name, **values} for name, values in figures.items()],
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


def _row_figures(row: PlanRow) -> dict[str, float | bool]:
    return {
        "expected_batch_size": row.expected_batch_size,
        "epochs": row.epochs,
        "steps": row.steps,
        "sample_rate": row.sample_rate,
        "noise_multiplier": row.noise_multiplier,
        "effective_noise": row.effective_noise,
        "full_batch_noise": row.full_batch_noise,
        "excess_noise": row.excess_noise,
        "batch_is_enough": row.batch_is_enough,
        "signal": row.signal,
        "epsilon": row.guarantee.epsilon,
    }


def _published_figures(setting: Published, adjacency: Adjacency) -> dict[str, float | str]:
    """The setting with its epsilon under the plan's adjacency, which need not be the paper's."""
    from dpvision.accounting import guarantee

    return {
        "source": setting.source,
        "expected_batch_size": setting.expected_batch_size,
        "steps": setting.steps,
        "noise_multiplier": setting.noise_multiplier,
        "effective_noise": setting.effective_noise,
        "epsilon": guarantee([(setting.step_event, setting.steps)], delta=setting.delta, adjacency=adjacency).epsilon,
    }


def _mechanism_figures(mechanism: Mechanism, delta: float) -> dict[str, Any]:
    from dpvision.accounting import mechanism_guarantee

    return {
        "expected_batch_size": mechanism.expected_batch_size,
        "epochs": mechanism.epochs,
        "steps": mechanism.steps,
        "noise_multiplier": mechanism.noise_multiplier,
        "effective_noise": mechanism.noise_multiplier / mechanism.expected_batch_size,
        "epsilon": mechanism_guarantee(mechanism, delta=delta).epsilon,
    }


def _print_rows(rows: Sequence[PlanRow], *, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from dpvision.privacy.mechanism import rounded_up

    table = Table(title=title, caption=_CAPTION)
    for heading in ("batch", "epochs", "steps", "noise multiplier", "effective noise", "× full", "signal", "epsilon"):
        table.add_column(heading, justify="right")
    previous: float | None = None
    for row in rows:
        if previous not in (None, row.expected_batch_size):
            table.add_section()
        previous = row.expected_batch_size
        excess = f"{row.excess_noise:.3g}{' •' if row.batch_is_enough else '  '}"
        figures = (row.expected_batch_size, row.epochs, row.steps, row.noise_multiplier, row.effective_noise)
        table.add_row(*map(_short, figures), excess, f"{row.signal:.3g}", rounded_up(row.guarantee.epsilon))
    Console().print(table)


def _print_table(lines: Sequence[Mapping[str, Any]], *, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from dpvision.privacy.mechanism import rounded_up

    table = Table(title=title)
    for name in lines[0]:
        table.add_column(name.replace("expected_batch_size", "batch").replace("_", " "), justify="right")
    for values in lines:
        table.add_row(*(rounded_up(v) if name == "epsilon" else _short(v) for name, v in values.items()))
    Console().print(table)


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
