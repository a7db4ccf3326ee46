"""The heart: draw, clip, charge, add noise, step. One direction, no way back."""

from __future__ import annotations

import time

import torch

from dpvision.checks import DPVisionError
from dpvision.evaluate import evaluate
from dpvision.flow import OrdinaryGrad, charge_for
from dpvision.grads import clipped_sum_of_batch, ordinary_gradient
from dpvision.noise import privatize
from dpvision.training.budget import BudgetSpent
from dpvision.training.interrupt import StopRequest
from dpvision.training.session import Session, classification_loss
from dpvision.training.watch import Watcher


class Diverged(DPVisionError):
    """The weights are no longer finite."""


def run_steps(session: Session, watcher: Watcher, stop: StopRequest) -> bool:
    """Take steps until the plan is done, the budget is spent or somebody asks to stop. True when the plan is done."""
    due = evaluation_points(session)
    bound = spent_at_most(session, due)
    while session.step < session.total_steps and not stop.requested:
        started = time.perf_counter()
        try:
            take_step(session)
        except BudgetSpent as spent:
            watcher.said(str(spent))
            break
        session.seconds += time.perf_counter() - started
        watcher.stepped(done=session.step, epsilon_bound=bound)
        if session.step in due:
            evaluate_now(session, watcher)
            bound = spent_at_most(session, due)
        if session.step % session.config.checkpoint_every == 0 or session.step == session.total_steps:
            session.save_checkpoint()
    return session.step == session.total_steps


def take_step(session: Session) -> None:
    """One step. The ledger is on disk before the noisy gradient exists."""
    batch = session.draws.batch(session.step)
    performance = session.config.performance
    if session.budget is None:
        mean = ordinary_gradient(
            session.model,
            classification_loss,
            batch,
            divisor=session.config.plan.expected_batch_size,
            performance=performance,
        )
        session.optimizer.step(OrdinaryGrad(mean, session.step))
    else:
        mechanism = session.config.mechanism
        clipped = clipped_sum_of_batch(
            session.model, classification_loss, batch, clip_norm=mechanism.clip_norm, performance=performance
        )
        session.budget.charge(charge_for(batch.sampling, mechanism), step=session.step, fork=session.fork)
        session.optimizer.step(privatize(clipped, mechanism, session.keys, step=session.step))
    session.step += 1


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


def evaluate_now(session: Session, watcher: Watcher) -> None:
    """Add a point to the curve, on the public test split."""
    require_finite(session)
    metrics = evaluate(
        session.model,
        session.pictures.test,
        session.normalisation,
        parameters=session.optimizer.averaged_parameters(),
        device=session.device,
    )
    spent = None if session.meter is None else session.meter.spent(session.step + session.recharged_steps).epsilon
    point = {
        "step": session.step,
        "epsilon": spent,
        "accuracy": metrics.accuracy,
        "top5": metrics.top5,
        "loss": metrics.loss,
    }
    session.curve.append(point)
    session.final = metrics
    session.optimizer.report_public_metric(metrics.loss)
    watcher.evaluated(point)


def require_finite(session: Session) -> None:
    """Stop a run whose weights have overflowed."""
    for name, parameter in session.model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise Diverged(f"{name} is not finite after step {session.step}: lower the learning rate and start anew.")
