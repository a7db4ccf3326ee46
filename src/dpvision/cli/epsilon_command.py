"""``dpvision epsilon``, ``dpvision calibrate``, ``dpvision plan``: figures before anything is spent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dpvision.cli.console import print_json, user_errors
from dpvision.cli.tuning_cost import OF_A_SEARCH, owner_figures, search_figures

if TYPE_CHECKING:
    from dpvision.privacy.mechanism import Adjacency, Mechanism


NumUnits = Annotated[int | None, typer.Option(help="How many units are protected. Example: --num-units 60000")]
BatchSize = Annotated[
    float | None, typer.Option(help="Mean size of a draw: sample_rate * num_units. Example: --expected-batch-size 256")
]
Noise = Annotated[
    float | None, typer.Option(help="Noise stddev on the sum, over the clip norm. Example: --noise-multiplier 1.1")
]
Steps = Annotated[int | None, typer.Option(help="Noisy releases, empty draws included. Example: --steps 14063")]
Epochs = Annotated[float | None, typer.Option(help="Instead of --steps: passes over the data. Example: --epochs 60")]
Delta = Annotated[
    float | None,
    typer.Option(help="Proposed if left out: below 1/num_units. Example: --delta 1e-5", show_default=False),
]
AdjacencyName = Annotated[
    str, typer.Option("--adjacency", help="add_remove, zero_out or replace_one. Example: --adjacency add_remove")
]
Target = Annotated[float | None, typer.Option(help="The epsilon to keep to. Example: --target-epsilon 3")]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout. Example: --json")]


def epsilon(
    num_units: NumUnits = None,
    expected_batch_size: BatchSize = None,
    noise_multiplier: Noise = None,
    steps: Steps = None,
    epochs: Epochs = None,
    delta: Delta = None,
    adjacency: AdjacencyName = "add_remove",
    trials: Annotated[
        int | None, typer.Option(help="Also the cost of so many runs in search of settings. Example: --trials 20")
    ] = None,
    most_rows_per_owner: Annotated[
        int | None, typer.Option(help="Also for an owner of so many units. Example: --most-rows-per-owner 30")
    ] = None,
    json: Json = False,
) -> None:
    """What a mechanism costs: epsilon by PLD, and by RDP beside it.

    Example: dpvision epsilon --num-units 60000 --expected-batch-size 256 --noise-multiplier 1.1 --steps 14063
    """
    with user_errors():
        units, batch, noise = _all_of(
            num_units=num_units, expected_batch_size=expected_batch_size, noise_multiplier=noise_multiplier
        )
        mechanism = _mechanism(units, batch, noise, _count_steps(steps, epochs, units, batch), adjacency)
        chosen = _choose_delta(delta, units, json=json)
        extra = {
            **search_figures(mechanism, delta=chosen[0], trials=trials),
            **owner_figures(mechanism, delta=chosen[0], most_rows=most_rows_per_owner),
        }
        _print_mechanism(mechanism, delta=chosen, json=json, extra=extra)
        if trials is not None and not json:
            typer.echo(OF_A_SEARCH)


def calibrate(
    num_units: NumUnits = None,
    expected_batch_size: BatchSize = None,
    noise_multiplier: Noise = None,
    steps: Steps = None,
    epochs: Epochs = None,
    target_epsilon: Target = None,
    delta: Delta = None,
    adjacency: AdjacencyName = "add_remove",
    json: Json = False,
) -> None:
    """Compute the one that is left out of noise multiplier, steps, batch size and target epsilon.

    Example: dpvision calibrate --num-units 60000 --expected-batch-size 256 --steps 14063 --target-epsilon 3
    """
    from dpvision.errors import ArgumentError

    with user_errors():
        (units,) = _all_of(num_units=num_units)
        if epochs is not None and expected_batch_size is None:
            raise ArgumentError("--epochs needs --expected-batch-size. Give --steps to calibrate the batch size.")
        if steps is not None or epochs is not None:
            steps = _count_steps(steps, epochs, units, expected_batch_size)
        given = {
            "noise_multiplier": noise_multiplier,
            "steps": steps,
            "expected_batch_size": expected_batch_size,
            "target_epsilon": target_epsilon,
        }
        unknown = _the_one_left_out(given)
        chosen = _choose_delta(delta, units, json=json)
        if unknown != "target_epsilon":
            given[unknown] = _solve(unknown, num_units=units, delta=chosen[0], adjacency=adjacency, given=given)
        mechanism = _mechanism(
            units, given["expected_batch_size"], given["noise_multiplier"], given["steps"], adjacency
        )
        extra = {"calibrated": unknown.replace("target_", ""), "target_epsilon": target_epsilon}
        _print_mechanism(mechanism, delta=chosen, json=json, extra=extra)


def plan(
    num_units: NumUnits = None,
    target_epsilon: Target = None,
    expected_batch_size: Annotated[
        list[float] | None, typer.Option(help="Repeat for several. Example: --expected-batch-size 1024")
    ] = None,
    epochs: Annotated[list[float] | None, typer.Option(help="Repeat for several. Example: --epochs 30")] = None,
    steps: Annotated[list[int] | None, typer.Option(help="Instead of --epochs. Example: --steps 2000")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="With --scale-…, instead of --target-epsilon. Example: --noise-multiplier 3")
    ] = None,
    scale_down: Annotated[
        float | None,
        typer.Option(help="One setting and its cheap twin for a search, NOT private (TAN). Example: --scale-down 16"),
    ] = None,
    scale_up: Annotated[
        float | None, typer.Option(help="From the cheap setting back to the costly one. Example: --scale-up 16")
    ] = None,
    delta: Delta = None,
    adjacency: AdjacencyName = "add_remove",
    plot: Annotated[Path | None, typer.Option(help="Write a picture here. Example: --plot plan.png")] = None,
    json: Json = False,
) -> None:
    """Noise for every pair of batch size and length, all at one target epsilon; or one setting, scaled.

    Example: dpvision plan --num-units 50000 --target-epsilon 8 --plot plan.png
    """
    from dpvision.errors import ArgumentError

    with user_errors():
        if scale_down is not None or scale_up is not None:
            if plot is not None:
                raise ArgumentError("--plot draws a plan over several settings. Leave it out with --scale-….")
            _scale(
                {"num_units": num_units, "expected_batch_size": expected_batch_size, "steps": steps, "epochs": epochs},
                noise={"target_epsilon": target_epsilon, "noise_multiplier": noise_multiplier},
                ways={"down": scale_down, "up": scale_up},
                delta=delta,
                adjacency=adjacency,
                json=json,
            )
            return
        if noise_multiplier is not None:
            raise ArgumentError("plan finds the noise_multiplier. For a given one use dpvision epsilon.")
        units, target = _all_of(num_units=num_units, target_epsilon=target_epsilon)
        chosen = _choose_delta(delta, units, json=json)
        if plot is not None:
            _check_picture(plot)
        from rich.console import Console

        from dpvision.accounting import plan as make_plan
        from dpvision.cli.plan_chart import published_settings
        from dpvision.cli.plan_command import print_plan

        with Console(stderr=True).status("calibrating the noise"):
            rows = list(
                make_plan(
                    num_units=units,
                    target_epsilon=target,
                    delta=chosen[0],
                    expected_batch_sizes=expected_batch_size or (),
                    epochs=epochs or (),
                    steps=steps or (),
                    adjacency=cast("Adjacency", adjacency),
                )
            )
        known = published_settings(num_units=units, target_epsilon=target, delta=chosen[0])
        print_plan(rows, known, target=target, delta_proposed=chosen[1], json=json)
        if plot is not None:
            from dpvision.cli.plan_chart import draw_plan

            draw_plan(rows, plot, published=known)
            typer.echo(f"picture: {plot}", err=json)


def _all_of(**given: Any) -> list[Any]:
    """The values, or one error that names every missing flag."""
    from dpvision.errors import ArgumentError

    missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
    if missing:
        raise ArgumentError(f"missing {', '.join(missing)}. See --help for an example.")
    return list(given.values())


def _the_one_left_out(given: dict[str, Any]) -> str:
    from dpvision.errors import ArgumentError

    left_out = [name for name, value in given.items() if value is None]
    if len(left_out) != 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ArgumentError(f"leave out exactly one of {names}, got {len(given) - len(left_out)} of {len(given)}.")
    return left_out[0]


def _count_steps(steps: int | None, epochs: float | None, num_units: int, expected_batch_size: float | None) -> int:
    """``steps`` as given, or the first whole number of steps that makes the epochs full."""
    from dpvision.accounting import steps_for_epochs
    from dpvision.errors import ArgumentError

    if (steps is None) == (epochs is None):
        raise ArgumentError(f"give either --steps or --epochs, got {'neither' if steps is None else 'both'}.")
    if epochs is None:
        return cast("int", steps)
    batch = cast("float", expected_batch_size)
    return steps_for_epochs(epochs, num_units=num_units, expected_batch_size=batch)


def _choose_delta(delta: float | None, num_units: int, *, json: bool) -> tuple[float, bool]:
    """The given delta, or a proposal that is announced; and whether it was proposed."""
    from dpvision.accounting import propose_delta

    if delta is not None:
        return delta, False
    proposed = propose_delta(num_units)
    typer.echo(f"delta was not given: {proposed:g} is used, which is below 1/num_units = {1 / num_units:.3g}", err=json)
    return proposed, True


def _mechanism(num_units: int, batch: Any, noise: Any, steps: Any, adjacency: str) -> Mechanism:
    from dpvision.privacy.mechanism import Mechanism

    return Mechanism(
        num_units=num_units,
        expected_batch_size=batch,
        clip_norm=1.0,  # no part in the accounting: noise is measured in units of it
        noise_multiplier=noise,
        steps=steps,
        adjacency=cast("Adjacency", adjacency),
    )


def _solve(unknown: str, *, num_units: int, delta: float, adjacency: str, given: dict[str, Any]) -> float:
    from dpvision import accounting

    function = getattr(accounting, f"calibrate_{unknown}")
    known = {name: value for name, value in given.items() if name != unknown}
    return function(num_units=num_units, delta=delta, adjacency=adjacency, **known)


def _print_mechanism(
    mechanism: Mechanism, *, delta: tuple[float, bool], json: bool, extra: dict[str, Any] | None = None
) -> None:
    from dpvision.accounting import (
        DISPLAY_RATE,
        cautions,
        describe,
        full_profile,
        mechanism_guarantee,
        true_positive_bound,
    )

    by_pld = mechanism_guarantee(mechanism, delta=delta[0])
    charges = [(mechanism.step_event, mechanism.steps)]
    profile = full_profile(charges, delta=delta[0], adjacency=mechanism.adjacency)
    attack = true_positive_bound(profile, false_positive_rate=DISPLAY_RATE)
    meaning = describe(by_pld, true_positive_rate=attack)
    epsilon_rdp, note = _rdp_if_proved(mechanism, delta[0])
    warnings = [*cautions(by_pld, num_units=mechanism.num_units), *note]
    figures: dict[str, Any] = {
        "epsilon": by_pld.epsilon,
        "epsilon_rdp": epsilon_rdp,
        "delta": by_pld.delta,
        "delta_proposed": delta[1],
        "adjacency": by_pld.adjacency,
        "num_units": mechanism.num_units,
        "expected_batch_size": mechanism.expected_batch_size,
        "sample_rate": mechanism.sample_rate,
        "noise_multiplier": mechanism.noise_multiplier,
        "steps": mechanism.steps,
        "epochs": mechanism.epochs,
        **(extra or {}),
    }
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    if json:
        words = {"true_positive_rate_at_0.01": attack, "meaning": meaning, "cautions": warnings}
        print_json({**figures, **words})
        return
    for name, value in figures.items():
        if value is not None and name != "delta_proposed":
            typer.echo(f"{name:20} {_shown(name, value)}")
    typer.echo(meaning)


def _shown(name: str, value: Any) -> str:
    """A figure in six digits. A bound is rounded up; a batch size must come out as it went in."""
    from dpvision.privacy.mechanism import rounded_up

    if not isinstance(value, float):
        return str(value)
    return rounded_up(value, digits=6) if name == "delta" or name.startswith("epsilon") else f"{value:.6g}"


def _rdp_if_proved(mechanism: Mechanism, delta: float) -> tuple[float | None, list[str]]:
    """Epsilon by RDP; nothing, and why, under an adjacency for which there is no proof."""
    from dpvision.accounting import mechanism_guarantee

    if mechanism.adjacency == "replace_one":
        return None, ["epsilon_rdp is left out: RDP of Poisson-sampled noise is not proved for replace_one."]
    return mechanism_guarantee(mechanism, delta=delta, accountant="rdp").epsilon, []


def _check_picture(path: Path) -> None:
    from dpvision.errors import ArgumentError

    if path.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise ArgumentError(f"--plot must end in .png, .svg or .pdf, got {path.name!r}.")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"--plot must be in a folder that exists, got {path}.")


def _scale(
    setting: dict[str, Any],
    *,
    noise: dict[str, float | None],
    ways: dict[str, float | None],
    delta: float | None,
    adjacency: str,
    json: bool,
) -> None:
    """Print one setting and its cheap or costly twin of equal noise on the mean gradient."""
    from dpvision.accounting import scaled
    from dpvision.cli.plan_command import print_scaling

    units, batch = _all_of(num_units=setting["num_units"], expected_batch_size=_only("--expected-batch-size", setting))
    up, factor = _way(ways)
    steps = _count_steps(_only("--steps", setting), _only("--epochs", setting), units, batch)
    _check_noise(noise, up=up)
    chosen = _choose_delta(delta, units, json=json)
    multiplier = noise["noise_multiplier"]
    if multiplier is None:
        known = {"expected_batch_size": batch, "steps": steps, "target_epsilon": noise["target_epsilon"]}
        multiplier = _solve("noise_multiplier", num_units=units, delta=chosen[0], adjacency=adjacency, given=known)
    given = _mechanism(units, batch, multiplier, steps, adjacency)
    other = scaled(given, by=factor if up else 1 / factor)
    search, target = (given, other) if up else (other, given)
    print_scaling(search=search, target=target, factor=factor, up=up, delta=chosen, json=json)


def _only(flag: str, setting: dict[str, Any]) -> Any:
    """The one value of a flag that may be repeated elsewhere, or None."""
    from dpvision.errors import ArgumentError

    values = setting[flag.removeprefix("--").replace("-", "_")] or []
    if len(values) > 1:
        raise ArgumentError(f"{flag} must be given once with --scale-down or --scale-up, got {len(values)} values.")
    return values[0] if values else None


def _way(ways: dict[str, float | None]) -> tuple[bool, float]:
    """Whether to scale up, and by how much."""
    from dpvision.errors import ArgumentError

    given = [(name, factor) for name, factor in ways.items() if factor is not None]
    if len(given) != 1:
        raise ArgumentError("give either --scale-down or --scale-up, got both.")
    ((name, factor),) = given
    if not 1 < factor < float("inf"):
        raise ArgumentError(f"--scale-{name} must be a finite number > 1, got {factor}.")
    return name == "up", factor


def _check_noise(noise: dict[str, float | None], *, up: bool) -> None:
    from dpvision.errors import ArgumentError

    if up and noise["noise_multiplier"] is None:
        raise ArgumentError("--scale-up starts from a cheap setting: give its --noise-multiplier.")
    if (noise["noise_multiplier"] is None) == (noise["target_epsilon"] is None):
        raise ArgumentError("with --scale-down or --scale-up give either --target-epsilon or --noise-multiplier.")
