"""Private training from a configuration to a release: the one place that wires data, gradients, noise and ledger."""

from __future__ import annotations

from pathlib import Path

from dpvision.config import RunConfig, required
from dpvision.native.memory import keep_freed_memory
from dpvision.training.interrupt import stop_on_signals
from dpvision.training.loop import measure, run_steps
from dpvision.training.release import RunResult, write_release
from dpvision.training.released import Released, load_released
from dpvision.training.session import Session
from dpvision.training.start import begin, come_back
from dpvision.training.watch import Silence, Watcher

__all__ = ["Released", "RunResult", "Watcher", "load_released", "resume", "train"]


def train(
    config: RunConfig,
    *,
    run: Path | str,
    seed: int | None = None,
    device: str = "cpu",
    watcher: Watcher | None = None,
) -> RunResult:
    """Train as ``config`` says and leave the run in the folder ``run``.

    ``seed`` replaces the operating system's entropy: repeatable, and stamped as not for release.
    From here on the process keeps up to half a gibibyte of freed memory, which makes steps of small models faster.

    Guarantee: the released weights are (epsilon, delta)-private for the unit and adjacency named in the certificate,
    under the assumptions of docs/guarantee.md.
    """
    watcher = watcher or Silence()
    session, prepared = begin(config, Path(run), seed=seed, device=device, say=watcher.said)
    with session.folder:
        name = required(session.config.model, "model").name
        watcher.started(name=name, steps=session.total_steps, done=0, choices=prepared.choices)
        for note in prepared.notes:
            watcher.said(note)
        return _go_on(session, watcher)


def resume(
    run: Path | str, *, allow_fork: bool = False, device: str = "cpu", watcher: Watcher | None = None
) -> RunResult:
    """Go on with the run in that folder where its newest whole checkpoint left it.

    Guarantee: steps that are repeated exactly release nothing new and are not charged twice; if anything changed on
    which their bits depend, they get other noise and are charged again.
    """
    watcher = watcher or Silence()
    session, notes = come_back(Path(run), allow_fork=allow_fork, device=device, say=watcher.said)
    with session.folder:
        name = required(session.config.model, "model").name
        watcher.started(name=name, steps=session.total_steps, done=session.step, choices=())
        for note in notes:
            watcher.said(note)
        return _go_on(session, watcher)


def _go_on(session: Session, watcher: Watcher) -> RunResult:
    keep_freed_memory()
    with stop_on_signals() as stop:
        try:
            outcome = run_steps(session, watcher, stop)
            session.final = session.final or measure(session)  # the last step of a plan is evaluated already
            session.save_checkpoint()
            return write_release(session, outcome=outcome)
        finally:
            watcher.finished()
