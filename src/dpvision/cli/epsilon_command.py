"""``dpvision epsilon`` and ``dpvision calibrate``: what a mechanism costs, before anything is spent.

``plan_command`` uses the flags and helpers of this file too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dpvision.cli.console import print_json, say
from dpvision.cli.flags import Json
from dpvision.errors import ArgumentError

if TYPE_CHECKING:
    from dpvision.privacy.mechanism import Adjacency, Mechanism

NumUnits = Annotated[int | None, typer.Option(help="Number of protected units. Example: --num-units 60000")]
Target = Annotated[float | None, typer.Option(help="Epsilon to stay below. Example: --target-epsilon 3")]
Delta = Annotated[
    float | None, typer.Option(help="Delta. Default: a power of ten below 1/num_units. Example: --delta 1e-5")
]
AdjacencyName = Annotated[str, typer.Option("--adjacency", help="Neighbours: add_remove, zero_out or replace_one.")]
_SEARCH_NOTE = (
    "epsilon_all_trials: every trial may follow from the others and be published. epsilon_best_…: settings drawn at "
    "random, a number of trials drawn from that distribution (with --trials as its mean) and kept secret, and only the "
    "best one released."
)


@dataclass(frozen=True, kw_only=True)
class MechanismFlags:
    """A mechanism on the command line."""

    num_units: NumUnits = None
    expected_batch_size: Annotated[
        float | None, typer.Option(help="Mean number of units in a draw. Example: --expected-batch-size 256")
    ] = None
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise stddev on the sum over the clip norm. Example: --noise-multiplier 1.1")
    ] = None
    steps: Annotated[int | None, typer.Option(help="Noisy releases, also of empty draws. Example: --steps 14063")] = (
        None
    )
    epochs: Annotated[
        float | None, typer.Option(help="Instead of --steps: passes over the data. Example: --epochs 60")
    ] = None
    delta: Delta = None
    adjacency: AdjacencyName = "add_remove"
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class EpsilonFlags(MechanismFlags):
    """What ``dpvision epsilon`` is told."""

    trials: Annotated[
        int | None, typer.Option(help="Also the cost of a search with this many runs. Example: --trials 20")
    ] = None
    most_rows_per_owner: Annotated[
        int | None, typer.Option(help="Also for an owner of this many units. Example: --most-rows-per-owner 30")
    ] = None


@dataclass(frozen=True, kw_only=True)
class CalibrateFlags(MechanismFlags):
    """What ``dpvision calibrate`` is told."""

    target_epsilon: Target = None


def epsilon(flags: EpsilonFlags) -> None:
    """Compute the epsilon of a mechanism by PLD, and by RDP beside it.

    Example: dpvision epsilon --num-units 60000 --expected-batch-size 256 --noise-multiplier 1.1 --steps 14063
    """
    require(
        num_units=flags.num_units,
        expected_batch_size=flags.expected_batch_size,
        noise_multiplier=flags.noise_multiplier,
    )
    steps = count_steps(flags.steps, flags.epochs, flags.num_units, flags.expected_batch_size)
    mechanism = mechanism_of(flags, steps=steps)
    delta = choose_delta(flags.delta, mechanism.num_units, json=flags.json)
    extra = {
        **_search_costs(mechanism, delta=delta[0], trials=flags.trials),
        **_owner_cost(mechanism, delta=delta[0], most_rows=flags.most_rows_per_owner),
    }
    _print_mechanism(mechanism, delta=delta, json=flags.json, extra=extra)
    if flags.trials is not None and not flags.json:
        typer.echo(_SEARCH_NOTE)


def calibrate(flags: CalibrateFlags) -> None:
    """Compute the one that is left out of noise multiplier, steps, batch size and target epsilon.

    Example: dpvision calibrate --num-units 60000 --expected-batch-size 256 --steps 14063 --target-epsilon 3
    """
    require(num_units=flags.num_units)
    units = cast("int", flags.num_units)
    if flags.epochs is not None and flags.expected_batch_size is None:
        raise ArgumentError("--epochs needs --expected-batch-size. Give --steps to calibrate the batch size.")
    steps = flags.steps
    if steps is not None or flags.epochs is not None:
        steps = count_steps(steps, flags.epochs, units, flags.expected_batch_size)
    known: dict[str, Any] = {
        "noise_multiplier": flags.noise_multiplier,
        "steps": steps,
        "expected_batch_size": flags.expected_batch_size,
        "target_epsilon": flags.target_epsilon,
    }
    unknown = _the_one_left_out(known)
    delta = choose_delta(flags.delta, units, json=flags.json)
    if unknown != "target_epsilon":
        known[unknown] = solve(unknown, known, num_units=units, delta=delta[0], adjacency=flags.adjacency)
    del known["target_epsilon"]
    extra = {"calibrated": unknown.replace("target_", ""), "target_epsilon": flags.target_epsilon}
    _print_mechanism(mechanism_of(flags, **known), delta=delta, json=flags.json, extra=extra)


def require(**given: Any) -> None:
    """Raise one error that names every flag whose value is None."""
    missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
    if missing:
        raise ArgumentError(f"missing {', '.join(missing)}. See --help for an example.")


def count_steps(steps: int | None, epochs: float | None, num_units: Any, expected_batch_size: Any) -> int:
    """Return the number of steps.

    Args:
        steps: the number itself, or None.
        epochs: passes over the data instead, or None; the least number of steps that makes them up is returned.
        num_units: number of privacy units.
        expected_batch_size: mean number of units in a draw.

    Raises:
        ArgumentError: neither or both of ``steps`` and ``epochs`` are given.
    """
    from dpvision.accounting import steps_for_epochs

    if (steps is None) == (epochs is None):
        raise ArgumentError(f"give either --steps or --epochs, got {'neither' if steps is None else 'both'}.")
    if epochs is None:
        return cast("int", steps)
    return steps_for_epochs(epochs, num_units=num_units, expected_batch_size=expected_batch_size)


def choose_delta(delta: float | None, num_units: int, *, json: bool) -> tuple[float, bool]:
    """Return delta, and whether it was proposed.

    Args:
        delta: the given one, or None to propose a power of ten below 1 / num_units; a proposal is announced.
        num_units: number of privacy units.
        json: announce on stderr, since stdout carries JSON.
    """
    from dpvision.accounting import propose_delta

    if delta is not None:
        return delta, False
    proposed = propose_delta(num_units)
    typer.echo(f"delta was not given: {proposed:g} is used, which is below 1/num_units = {1 / num_units:.3g}", err=json)
    return proposed, True


def mechanism_of(flags: Any, **found: Any) -> Mechanism:
    """Build the mechanism.

    Args:
        flags: has num_units, expected_batch_size, noise_multiplier and adjacency.
        found: values that were computed; they replace those of the flags.
    """
    from dpvision.privacy.mechanism import Mechanism

    given = ("num_units", "expected_batch_size", "noise_multiplier", "adjacency")
    # The clip norm has no part in the accounting: noise is measured in units of it.
    return Mechanism(**{**{name: getattr(flags, name) for name in given}, "clip_norm": 1.0, **found})


def solve(unknown: str, known: dict[str, Any], *, num_units: int, delta: float, adjacency: str) -> float:
    """Calibrate one quantity of a mechanism to the target epsilon.

    Args:
        unknown: noise_multiplier, steps or expected_batch_size.
        known: the other two and target_epsilon; a value of ``unknown`` is ignored.
        num_units: number of privacy units.
        delta: delta of the guarantee.
        adjacency: which datasets are neighbours.

    Returns:
        The value with which the mechanism stays below the target.
    """
    from dpvision import accounting

    function = getattr(accounting, f"calibrate_{unknown}")
    others = {name: value for name, value in known.items() if name != unknown}
    return function(num_units=num_units, delta=delta, adjacency=cast("Adjacency", adjacency), **others)


def _the_one_left_out(known: dict[str, Any]) -> str:
    left_out = [name for name, value in known.items() if value is None]
    if len(left_out) != 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in known)
        raise ArgumentError(f"leave out exactly one of {names}, got {len(known) - len(left_out)} of {len(known)}.")
    return left_out[0]


def _search_costs(mechanism: Mechanism, *, delta: float, trials: int | None) -> dict[str, Any]:
    """Both costs of a search over settings: all trials composed, and the best of a random number of them."""
    if trials is None:
        return {}
    from dpvision.accounting import STOPPINGS, all_trials, best_of_random_many

    charges = [(mechanism.step_event, mechanism.steps)]
    composed = all_trials(charges, trials=trials, delta=delta, adjacency=mechanism.adjacency)
    found: dict[str, Any] = {"trials": trials, "epsilon_all_trials": composed.epsilon}
    if mechanism.adjacency == "replace_one":  # not proved for random stopping
        return found
    for stopping in STOPPINGS:
        best = best_of_random_many(
            charges, mean_trials=trials, stopping=stopping, delta=delta, adjacency=mechanism.adjacency
        )
        found[f"epsilon_best_{stopping}"] = best.epsilon
    return found


def _owner_cost(mechanism: Mechanism, *, delta: float, most_rows: int | None) -> dict[str, Any]:
    """The epsilon of the same run for an owner of several units."""
    if most_rows is None:
        return {}
    from dpvision.accounting import owner_guarantee

    charges = [(mechanism.step_event, mechanism.steps)]
    proved = owner_guarantee(charges, most_rows=most_rows, delta=delta, adjacency=mechanism.adjacency)
    return {"most_rows_per_owner": most_rows, "epsilon_owner": proved.epsilon}


def _print_mechanism(mechanism: Mechanism, *, delta: tuple[float, bool], json: bool, extra: dict[str, Any]) -> None:
    """Print the mechanism, its epsilon by both accountants and what it means; ``delta`` is as from choose_delta."""
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
    names = ("num_units", "expected_batch_size", "sample_rate", "noise_multiplier", "steps", "epochs")
    values: dict[str, Any] = {
        "epsilon": by_pld.epsilon,
        "epsilon_rdp": epsilon_rdp,
        "delta": by_pld.delta,
        "delta_proposed": delta[1],
        "adjacency": by_pld.adjacency,
        **{name: getattr(mechanism, name) for name in names},
        **extra,
    }
    for warning in warnings:
        say(f"warning: {warning}")
    if json:
        print_json({**values, "true_positive_rate_at_0.01": attack, "meaning": meaning, "cautions": warnings})
        return
    for name, value in values.items():
        if value is not None and name != "delta_proposed":
            typer.echo(f"{name:20} {_shown(name, value)}")
    typer.echo(meaning)


def _shown(name: str, value: Any) -> str:
    """A number with six digits. A bound is rounded up; a batch size must be printed as it was given."""
    from dpvision.privacy.mechanism import rounded_up

    if not isinstance(value, float):
        return str(value)
    return rounded_up(value, digits=6) if name == "delta" or name.startswith("epsilon") else f"{value:.6g}"


def _rdp_if_proved(mechanism: Mechanism, delta: float) -> tuple[float | None, list[str]]:
    """Epsilon by RDP; None, and why, under an adjacency for which there is no proof."""
    from dpvision.accounting import mechanism_guarantee

    if mechanism.adjacency == "replace_one":
        return None, ["epsilon_rdp is left out: RDP of Poisson-sampled noise is not proved for replace_one."]
    return mechanism_guarantee(mechanism, delta=delta, accountant="rdp").epsilon, []
