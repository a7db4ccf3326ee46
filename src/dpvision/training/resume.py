"""Resume a run from its newest whole checkpoint, exactly or as a fork.

The key is bound to the run's fingerprint (``training.run_fingerprint``). If the fingerprint is what it was, repeated
steps draw the same noise on the same sums: they release nothing new and are not charged twice. If anything changed, the
run forks: the fork's number enters the key, repeated steps get other noise, and they are charged again. A fork is saved
with the key first and noted in the ledger after that; a crash between the two is repaired at the next resume.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dpvision.config import RunConfig, parse_config
from dpvision.data.loading import require_given
from dpvision.data.splits import holdout_keys, load_splits, stored_normalisation
from dpvision.errors import DataError, DPVisionError, PrivacyError, TamperError, shown, some_of, translated_errors
from dpvision.own_code import RunCode
from dpvision.privacy.ledger import Ledger, read_ledger
from dpvision.ranks import Ranks
from dpvision.storage.checkpoint import Checkpoint
from dpvision.storage.files import ledger_mark, parse_object, read_file
from dpvision.storage.run_folder import CERTIFICATE, METRICS, RunFolder, StoredKey
from dpvision.training.callbacks import RunCallback
from dpvision.training.declarations import note_declarations
from dpvision.training.follower import (
    Follower,
    agree_on_start,
    leading,
    require_shareable,
    share_end,
    share_keys,
    share_preparation,
    share_weights,
)
from dpvision.training.notebook import ShownCertificate, default_callback
from dpvision.training.prepare import run_code_again
from dpvision.training.pretrained import require_weights_again
from dpvision.training.run_fingerprint import Binding, bound_keys, differences, own_code_facts, run_binding
from dpvision.training.stages import (
    choose_gradient_plans,
    loss_of,
    model_and_stages,
    split_features,
    stage_at,
    synthetic_like,
)
from dpvision.training.start import ledger_header, with_features
from dpvision.training.trainer import Session
from dpvision.training.write_release import RunResult, reported, run_to_release


def resume_training(
    run: Path | str,
    *,
    allow_fork: bool = False,
    device: str = "cpu",
    callback: RunCallback | None = None,
    model: object | None = None,
    loss: object | None = None,
    data: object | None = None,
) -> RunResult:
    """Continue a run from its newest whole checkpoint.

    Args:
        run: the folder of the run.
        allow_fork: continue also if the data, the configuration or the user's own code changed.
        device: torch's name of the device.
        callback: told about progress.
        model: the run's own model again, as for ``train``; only where it has one.
        loss: the run's own loss again; only where it has one.
        data: the run's data again, where it was given in Python.

    Returns:
        The outcome, the certificate and the metrics. A run that is finished is left as it is.

    Raises:
        ArgumentError: the run has a model or a loss of the user's own, and it was not named.
        DataError: the data is neither where it was, seen from the directory in which the run was started, nor below
            the present directory or one above the run.
        PrivacyError: the plan changed, or data or own code changed and ``allow_fork`` is not set.
        TamperError: a file of the run is damaged or belongs to another run.
        DPVisionError: the run stopped before its first checkpoint.

    Guarantee: steps that are repeated exactly release nothing new and are not charged twice; if anything changed on
    which their bits depend, they get other noise and are charged again.
    """
    ranks = Ranks.of_this_job()
    agree_on_start(ranks, asked=None, device=device)
    if not ranks.leads:

        def code_of(config: RunConfig) -> RunCode:
            # Rank 0 decides whether other code is allowed; all have the same, by its hash.
            return run_code_again(config, model=model, loss=loss, allow_fork=True)[1]

        return Follower(ranks, code_of=code_of, device=device, data=data).follow()
    callback = callback or default_callback()
    with leading(ranks):
        require_given(data)
        done = finished_result(Path(run))
        if done is not None:
            steps = f"all {done.metrics['curve'][-1]['step']} steps are done" if done.metrics["curve"] else "it is done"
            callback.message(f"{run} is finished: {steps}. Nothing was changed.")
            return share_end(ranks, done)
        session, notes = resume_run(
            Path(run), allow_fork=allow_fork, device=device, callback=callback, model=model, loss=loss, data=data
        )
        return share_end(ranks, reported(run_to_release(session, callback, notes=notes)))


def finished_result(run: Path) -> RunResult | None:
    """Return the result of a run whose steps are all done and whose release is whole; None if there is more to do.

    Args:
        run: the folder of the run.

    Raises:
        ArgumentError: the folder is not that of a run of ``dpvision train``.
    """
    folder = RunFolder.open(run)
    folder.require_loop(own=False)
    if folder.in_use() or not folder.release_is_whole():
        return None
    checkpoint = folder.latest_checkpoint()
    config = parse_config(folder.read_whole_config())
    if checkpoint is None or checkpoint.step < config.plan.steps:
        return None
    certificate, metrics = (
        parse_object(read_file(folder.release / name), name=name) for name in (CERTIFICATE, METRICS)
    )
    if ledger_mark(certificate.get("ledger")) != max(folder.known_marks().values()):
        return None
    with checkpoint_errors(checkpoint):
        return RunResult(run, "finished", ShownCertificate(certificate), metrics, float(checkpoint.values["seconds"]))


def resume_run(
    path: Path,
    *,
    allow_fork: bool,
    device: str,
    callback: RunCallback | None = None,
    model: object | None = None,
    loss: object | None = None,
    data: object | None = None,
) -> tuple[Session, list[str]]:
    """Restore the run in ``path``, and list what the user should know about it."""
    folder = RunFolder.open(path)
    folder.require_loop(own=False)
    folder.lock()
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None:
        raise DPVisionError(
            f"{path} stopped before its first checkpoint: start it again elsewhere. {spent_so_far(folder)}"
        )
    config, code = run_code_again(
        parse_config(folder.read_whole_config()), model=model, loss=loss, allow_fork=allow_fork
    )
    ranks = Ranks.of_this_job()
    require_shareable(config, ranks)
    places = [] if data is not None else [folder.started_in(), Path.cwd(), *path.resolve().parents]
    located = config.found_from(places)
    if data is None and located.absent_data:
        raise DataError(
            f"the data of this run is no longer there: {some_of(located.absent_data)}, looked for in "
            f"{shown(folder.started_in() or Path.cwd())} and in the folders above the run. Move it back, or put a link "
            "there."
        )
    require_weights_again(located)
    stored = folder.load_key()
    splits = load_splits(located, holdout_keys(stored.keys, stored.run_id), data)
    ledger = folder.open_ledger()
    require_same_plan(config, ledger, stored)
    binding = run_binding(config, splits, run_id=stored.run_id, device=device)
    require_permission(differences(stored.bindings[-1], binding), allow_fork=allow_fork)

    network, stages = model_and_stages(config, splits, device, code)
    facts = own_code_facts(code, network, loss_of(config, splits, code), synthetic_like(splits, device))
    if not code.repeatable:
        # Its source is not known, or it is an object whose state may be another one: every resume is a fork.
        facts["own code"] = f"named again {len(stored.bindings)} times"
    choose_gradient_plans(network, stages, config, splits, device, code)
    # What is different in a fork is rank 0's: the others compare the facts that they can know.
    known = {name: value for name, value in (binding | facts).items() if name != "own code"}
    share_preparation(ranks, config, holdout_keys(stored.keys, stored.run_id), known, places=places)
    with checkpoint_errors(checkpoint):
        network.load_state_dict(_tensors(checkpoint, "model/"))
    normalisation = stored_normalisation(config)
    stage = stage_at(stages, max(0, checkpoint.step - 1))
    share_weights(ranks, config, network)
    features = split_features(
        stage,
        located,
        splits,
        normalisation=normalisation,
        device=device,
        callback=callback or RunCallback(),
        ranks=ranks,
    )
    binding = with_features(binding | facts, features)

    changed = changes_since(stored.bindings[-1], binding, folder=folder, checkpoint=checkpoint, config=config)
    notes, bindings = list(checkpoint.warnings), stored.bindings
    if changed:
        bindings = (*bindings, binding)
        folder.save_key(stored.keys, run_id=stored.run_id, bindings=bindings)
        folder.write_whole_config(config.to_json())  # other own code has another hash
        notes.append(f"{', '.join(changed)} changed: the run forks, with other noise, and repeated steps are charged.")
    fork = note_forks(ledger, bindings, checkpoint)
    note_declarations(ledger, config, splits)  # a fork may have brought other data or settings

    session = Session(
        config=config,
        splits=splits,
        normalisation=normalisation,
        folder=folder,
        ledger=ledger,
        keys=bound_keys(stored.keys, bindings[-1], fork),
        fork=fork,
        device=device,
        model=network,
        stages=stages,
        features=features,
        code=code,
        ranks=ranks,
        step=checkpoint.step,
    )
    with checkpoint_errors(checkpoint):
        session.optimizer.load_state(_tensors(checkpoint, "optimizer/"), checkpoint.values["optimizer"])
        session.seconds = checkpoint.values["seconds"]
        session.curve = list(checkpoint.values["curve"])
    return share_keys(session), notes


def spent_so_far(folder: RunFolder) -> str:
    """State what a run without a checkpoint has spent."""
    # Opening the ledger drops a torn last line, whose noise never existed.
    charges = folder.open_ledger().charges() if folder.ledger_path.exists() else []
    if not charges:
        return "Nothing was spent."
    parts = ", ".join(f"{count} × {event.purpose} (noise {event.noise_multiplier:g})" for event, count in charges)
    return f"It did spend {parts}: that composes with whatever comes next."


def require_same_plan(config: RunConfig, ledger: Ledger, stored: StoredKey) -> None:
    """Refuse to continue under another mechanism, delta, target or key than the ledger was opened for."""
    now = ledger_header(config, stored.run_id, hand_seeded=stored.keys.hand_seeded)
    changed = sorted(name for name in now if now[name] != ledger.header.get(name))
    if changed:
        raise PrivacyError(
            f"the plan of this run changed since it began ({', '.join(changed)}): a run keeps its mechanism, target "
            "and key. Put the old state back, or begin a new run, which composes with this one."
        )


def require_permission(changed: list[str], *, allow_fork: bool) -> None:
    """Refuse changed data or settings without ``allow_fork``; another number of threads needs no permission."""
    grave = [name for name in changed if name in {"run", "config", "data", "pixels", "test"}]
    if grave and not allow_fork:
        raise PrivacyError(
            f"the {' and '.join(grave)} of this run changed since it stopped: going on needs other noise, and repeated "
            "steps are charged again. Put the old state back, or resume with --fork."
        )


def changes_since(
    old: dict[str, str], binding: Binding, *, folder: RunFolder, checkpoint: Checkpoint, config: RunConfig
) -> list[str]:
    """Name every reason why repeated steps could release other sums than before; none means an exact replay."""
    changed = differences(old, binding)
    forks = [entry.payload["step"] for entry in read_ledger(folder.ledger_path) if entry.kind == "fork"]
    if forks and checkpoint.step < forks[-1]:
        changed.append("checkpoint")  # newer ones were lost: the run is back before its last fork began
    if binding["device"] != "cpu":
        changed.append("device")  # sums on other devices may differ from run to run in their last bits
    if config.performance.kernels == "compiled":
        changed.append("compiled kernels")  # what the compiler makes depends on the shapes that it saw before
    return changed


def note_forks(ledger: Ledger, bindings: tuple[dict[str, str], ...], checkpoint: Checkpoint) -> int:
    """Note every fork that the key knows and the ledger does not; return the number of forks."""
    for number in range(ledger.forks + 1, len(bindings)):
        reason = ", ".join(differences(bindings[number - 1], bindings[number])) or "checkpoint"
        ledger.note("fork", {"fork": number, "step": checkpoint.step, "reason": f"changed: {reason}"})
    return len(bindings) - 1


def checkpoint_errors(checkpoint: Checkpoint) -> AbstractContextManager[None]:
    """Re-raise errors of a checkpoint that is whole, but of another run."""
    saying = f"the checkpoint of step {checkpoint.step} is not one of this run; put the right one in its place"
    kinds = (KeyError, TypeError, ValueError, AttributeError, RuntimeError)
    return translated_errors(*kinds, saying=saying, to=TamperError)


def _tensors(checkpoint: Checkpoint, prefix: str) -> dict[str, Any]:
    """The checkpoint's tensors whose names begin with ``prefix``, without it."""
    return {n.removeprefix(prefix): value for n, value in checkpoint.tensors.items() if n.startswith(prefix)}
