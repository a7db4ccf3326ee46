"""The heart: draw, clip, charge, add noise, step. One direction, no way back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from dpvision.checks import DPVisionError
from dpvision.evaluate import MaskMetrics, Metrics, evaluate, evaluate_features, evaluate_masks
from dpvision.flow import OrdinaryGrad, charge_for
from dpvision.grads import clipped_sum_of_batch, ordinary_gradient
from dpvision.noise import privatize
from dpvision.training.budget import BudgetSpent
from dpvision.training.examples import may_show_pictures
from dpvision.training.interrupt import StopRequest
from dpvision.training.session import Session
from dpvision.training.watch import Watcher


class Diverged(DPVisionError):
    """The weights are no longer finite."""


Outcome = Literal["finished", "budget_spent", "stopped"]


def run_steps(session: Session, watcher: Watcher, stop: StopRequest) -> Outcome:
    """Take steps until the plan is done, the budget is spent or somebody asks to stop."""
    due = evaluation_points(session)
    bound = spent_at_most(session, due)
    while session.step < session.total_steps and not stop.requested:
        started = time.perf_counter()
        try:
            take_step(session)
        except BudgetSpent as spent:
            watcher.said(str(spent))
            return "budget_spent"
        session.seconds += time.perf_counter() - started
        watcher.stepped(done=session.step, epsilon_bound=bound)
        if session.step in due:
            evaluate_now(session, watcher)
            bound = spent_at_most(session, due)
        if session.step % session.config.checkpoint_every == 0 or session.step == session.total_steps:
            session.save_checkpoint()
    return "finished" if session.step == session.total_steps else "stopped"


@contextmanager
def keyed_randomness(session: Session) -> Iterator[None]:
    """Random layers draw from a stream of their own step, so that a replayed step draws the same."""
    devices = [] if session.device == "cpu" else [session.device]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(session.keys.seed("views", session.step))
        yield


def take_step(session: Session) -> None:
    """One step. The ledger is on disk before the noisy gradient exists."""
    session.enter_phase()
    with keyed_randomness(session):
        _take_step(session)
    session.step += 1
    session.final = None


def _take_step(session: Session) -> None:
    batch = session.draws.batch(session.step)
    performance = session.config.performance
    if session.budget is None:
        mean = ordinary_gradient(
            session.phase.network,
            session.loss,
            batch,
            divisor=session.config.plan.expected_batch_size,
            performance=performance,
        )
        session.optimizer.step(OrdinaryGrad(mean, session.step))
    else:
        mechanism = session.config.mechanism
        clipped = clipped_sum_of_batch(
            session.phase.network,
            session.loss,
            batch,
            clip_norm=mechanism.clip_norm,
            clipping=mechanism.clipping,
            performance=performance,
        )
        session.budget.charge(charge_for(batch.sampling, mechanism), step=session.step, fork=session.fork)
        session.optimizer.step(privatize(clipped, mechanism, session.keys, step=session.step))


def evaluation_points(session: Session) -> list[int]:
    """Step counts after which the public test split is looked at: evenly spread, the last step always."""
    count = min(session.config.evaluations, session.total_steps)
    return [round(session.total_steps * (i + 1) / count) for i in range(count)]


def spent_at_most(session: Session, due: list[int]) -> float | None:
    """Epsilon at the next point of evaluation: a bound on what is spent until then."""
    if session.meter is None:
        return None
    coming = next((point for point in due if point > session.step), session.total_steps)
    return session.meter.spent(coming + session.recharged_steps).epsilon


def measure(session: Session, *, averaged: bool = True) -> Metrics | MaskMetrics:
    """The figures of the present weights on the public test split: of averaged ones, if there are any and asked for."""
    require_finite(session)
    parameters = session.optimizer.averaged_parameters() if averaged else None
    if session.config.task == "segmentation":
        return evaluate_masks(
            session.model,
            session.pictures.test,
            session.normalisation,
            loss=session.loss,
            parameters=parameters,
            device=session.device,
            name_patients=may_show_pictures(session.config) and not session.pictures.held_out,
        )
    if session.phase.front is not None and session.features is not None:
        return evaluate_features(
            session.phase.network,
            session.features.test.values_NWF[:, 0],
            session.pictures.test,
            parameters=parameters,
            device=session.device,
        )
    return evaluate(
        session.model,
        session.pictures.test,
        session.normalisation,
        parameters=parameters,
        device=session.device,
    )


def evaluate_now(session: Session, watcher: Watcher) -> None:
    """Add a point to the curve, on the public test split."""
    metrics = measure(session)
    spent = None if session.meter is None else session.meter.spent(session.step + session.recharged_steps).epsilon
    point = {"step": session.step, "epsilon": spent, **metrics.headline(), "loss": metrics.loss}
    if session.step == session.total_steps and session.optimizer.averaged_parameters() is not None:
        point["raw"] = measure(session, averaged=False).headline()  # what averaging was worth
    session.curve.append(point)
    session.final = metrics
    session.optimizer.report_public_metric(metrics.loss)
    watcher.evaluated(point)


def require_finite(session: Session) -> None:
    """Stop a run whose weights have overflowed."""
    for name, parameter in session.model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise Diverged(f"{name} is not finite after step {session.step}: lower the learning rate and start anew.")
