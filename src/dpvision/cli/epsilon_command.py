"""``dpvision epsilon`` and ``dpvision calibrate``: what a mechanism costs, before anything is spent.

The flags of a mechanism are those of ``dpvision.config``. ``plan_command`` uses the helpers of this file too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpvision.cli.console import print_results, say
from dpvision.cli.flags import Given, Json
from dpvision.errors import ArgumentError

if TYPE_CHECKING:
    from dpvision.accounting import AttackRisk
    from dpvision.privacy.mechanism import Mechanism

_CALIBRATED = ("noise_multiplier", "steps", "expected_batch_size", "target_epsilon")
_MECHANISM = ("num_units", "expected_batch_size", "noise_multiplier", "steps", "delta", "adjacency")
_SEARCH_NOTE = (
    "epsilon_all_trials: every trial may follow from the others and be published. epsilon_best_…: settings drawn at "
    "random, a number of trials drawn from that distribution (with --trials as its mean) and kept secret, and only the "
    "best one released."
)
Epochs = Annotated[float | None, typer.Option(help="Instead of --steps: passes over the data. Example: --epochs 60")]


@dataclass(frozen=True, kw_only=True)
class EpsilonFlags:
    """What ``dpvision epsilon`` is told besides the mechanism."""

    epochs: Epochs = None
    trials: Annotated[
        int | None, typer.Option(help="Also the cost of a search with this many runs. Example: --trials 20")
    ] = None
    most_rows_per_owner: Annotated[
        int | None, typer.Option(help="Also for an owner of this many units. Example: --most-rows-per-owner 30")
    ] = None
    json: Json = False


def epsilon(given: Annotated[Given, _MECHANISM], flags: EpsilonFlags) -> None:
    """Compute the epsilon of a mechanism by PLD, and by RDP beside it.

    Example: dpvision epsilon --num-units 60000 --expected-batch-size 256 --noise-multiplier 1.1 --steps 14063
    """
    values = dict(given.get("privacy", {}))
    require(values, "num_units", "expected_batch_size", "noise_multiplier")
    values["steps"] = count_steps(values, flags.epochs)
    mechanism = mechanism_of(values)
    delta = choose_delta(values, json=flags.json)
    extra = {
        **_search_costs(mechanism, delta=delta[0], trials=flags.trials),
        **_owner_cost(mechanism, delta=delta[0], most_rows=flags.most_rows_per_owner),
    }
    _print_mechanism(mechanism, delta=delta, json=flags.json, extra=extra)
    if flags.trials is not None and not flags.json:
        typer.echo(_SEARCH_NOTE)


def calibrate(
    given: Annotated[Given, (*_MECHANISM, "target_epsilon", "target_risk", "accountant")],
    epochs: Epochs = None,
    json: Json = False,
) -> None:
    """Compute the one that is left out of noise multiplier, steps, batch size and target.

    Example: dpvision calibrate --num-units 60000 --expected-batch-size 256 --steps 14063 --target-epsilon 3

    A limit on attacks: dpvision calibrate --num-units 60000 --expected-batch-size 256 --steps 14063 --target-risk
    tpr:0.05@0.01
    """
    values = dict(given.get("privacy", {}))
    require(values, "num_units")
    risk = read_risk(values)
    if epochs is not None and "expected_batch_size" not in values:
        raise ArgumentError("--epochs needs --expected-batch-size. Give --steps to calibrate the batch size.")
    if "steps" in values or epochs is not None:
        values["steps"] = count_steps(values, epochs)
    left_out = [name for name in _CALIBRATED if name not in values and not (risk and name == "target_epsilon")]
    if len(left_out) != 1:
        names, count = ", ".join(map(_flag, _CALIBRATED)), len(_CALIBRATED)
        raise ArgumentError(f"leave out exactly one of {names}, got {count - len(left_out)} of {count}.")
    (unknown,) = left_out
    if "accountant" in values and unknown != "noise_multiplier":
        raise ArgumentError("--accountant is for the noise: leave it out, or leave --noise-multiplier open.")
    delta = choose_delta(values, json=json)
    if unknown != "target_epsilon":
        values[unknown] = solve(unknown, values, delta=delta[0])
    extra = {"calibrated": unknown.replace("target_", ""), "target_epsilon": values.get("target_epsilon")}
    values.pop("target_risk", None)
    if risk is not None:
        mechanism = mechanism_of(values)
        extra |= {"target_risk": str(risk), "risk_bound": risk_bound(risk, mechanism, delta=delta[0])}
    _print_mechanism(mechanism_of(values), delta=delta, json=json, extra=extra)


def read_risk(values: dict[str, Any]) -> AttackRisk | None:
    """Turn the text of --target-risk among ``values`` into an ``AttackRisk``; None if it was not given.

    Raises:
        ArgumentError: it is not a limit on attacks, or --target-epsilon is given too.
    """
    if "target_risk" not in values:
        return None
    from dpvision.accounting import AttackRisk

    if "target_epsilon" in values:
        raise ArgumentError("give --target-epsilon or --target-risk, got both.")
    values["target_risk"] = AttackRisk.parse(values["target_risk"])
    return values["target_risk"]


def risk_bound(risk: AttackRisk, mechanism: Mechanism, *, delta: float) -> float:
    """Return the proved bound on the attack that ``risk`` limits, for all steps of a mechanism."""
    from dpvision.accounting import full_profile

    charges = [(mechanism.step_event, mechanism.steps)]
    return risk.bound(full_profile(charges, delta=delta, adjacency=mechanism.adjacency))


def require(values: dict[str, Any], *names: str) -> None:
    """Raise one error that names every flag that is needed and was not given."""
    missing = [_flag(name) for name in names if name not in values]
    if missing:
        raise ArgumentError(f"missing {', '.join(missing)}. See --help for an example.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def count_steps(values: dict[str, Any], epochs: float | None) -> int:
    """Return the number of steps.

    Args:
        values: num_units, expected_batch_size, and perhaps steps.
        epochs: passes over the data instead; the least number of steps that makes them up is returned.

    Raises:
        ArgumentError: neither or both of steps and ``epochs`` are given.
    """
    from dpvision.accounting import steps_for_epochs

    if ("steps" in values) == (epochs is not None):
        raise ArgumentError(f"give either --steps or --epochs, got {'neither' if epochs is None else 'both'}.")
    if epochs is None:
        return values["steps"]
    sizes = {name: values[name] for name in ("num_units", "expected_batch_size")}
    return steps_for_epochs(epochs, **sizes)


def choose_delta(values: dict[str, Any], *, json: bool) -> tuple[float, bool]:
    """Return delta, and whether it was proposed: a power of ten below 1 / num_units, which is announced.

    Args:
        values: num_units, and perhaps delta.
        json: announce on stderr, since stdout carries JSON.
    """
    from dpvision.accounting import propose_delta

    if "delta" in values:
        return values["delta"], False
    units = values["num_units"]
    proposed = propose_delta(units)
    typer.echo(f"delta was not given: {proposed:g} is used, which is below 1/num_units = {1 / units:.3g}", err=json)
    return proposed, True


def mechanism_of(values: dict[str, Any]) -> Mechanism:
    """Build the mechanism."""
    from dpvision.privacy.mechanism import Mechanism

    given = {name: values[name] for name in _MECHANISM if name in values and name != "delta"}
    # The clip norm has no part in the accounting: noise is measured in units of it.
    return Mechanism(clip_norm=1.0, **given)


def solve(unknown: str, values: dict[str, Any], *, delta: float) -> float:
    """Calibrate one quantity of a mechanism to the target.

    Args:
        unknown: noise_multiplier, steps or expected_batch_size.
        values: num_units, target_epsilon or target_risk, the other two, and perhaps the adjacency.
        delta: delta of the guarantee.

    Returns:
        The value with which the mechanism stays below the target.
    """
    from dpvision import accounting

    return getattr(accounting, f"calibrate_{unknown}")(**{**values, "delta": delta})


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
    for kind in STOPPINGS:
        adjacency = mechanism.adjacency
        best = best_of_random_many(charges, mean_trials=trials, stopping=kind, delta=delta, adjacency=adjacency)
        found[f"epsilon_best_{kind}"] = best.epsilon
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
    shown = ((name, value) for name, value in values.items() if value is not None and name != "delta_proposed")
    lines = [*(f"{name:20} {_shown(name, value)}" for name, value in shown), meaning]
    values |= {"true_positive_rate_at_0.01": attack, "meaning": meaning, "cautions": warnings}
    print_results(values, lines, json=json)


def _shown(name: str, value: Any) -> str:
    """A number with six digits. A bound is rounded up; a batch size must be printed as it was given."""
    from dpvision.privacy.mechanism import rounded_up

    if not isinstance(value, float):
        return str(value)
    is_bound = name in {"delta", "risk_bound"} or name.startswith("epsilon")
    return rounded_up(value, digits=6) if is_bound else f"{value:.6g}"


def _rdp_if_proved(mechanism: Mechanism, delta: float) -> tuple[float | None, list[str]]:
    """Epsilon by RDP; None, and why, under an adjacency for which there is no proof."""
    from dpvision.accounting import mechanism_guarantee

    if mechanism.adjacency == "replace_one":
        return None, ["epsilon_rdp is left out: RDP of Poisson-sampled noise is not proved for replace_one."]
    return mechanism_guarantee(mechanism, delta=delta, accountant="rdp").epsilon, []
