"""How a run begins: anew, or from its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from dpvision.config import RunConfig, parse_config, required
from dpvision.data import Normalisation, released_normalisation
from dpvision.errors import DPVisionError, PrivacyError, TamperError, brief
from dpvision.kernels.memory import keep_freed_memory
from dpvision.privacy.ledger import Ledger, read_ledger
from dpvision.privacy.noise import standard_normals
from dpvision.privacy.randomness import Keys
from dpvision.storage.checkpoint import Checkpoint
from dpvision.storage.run_folder import RunFolder, StoredKey
from dpvision.training.callbacks import RunCallback, stop_on_signals
from dpvision.training.declarations import note_declarations
from dpvision.training.prepare import (
    Prepared,
    RunSplits,
    constant_normalisation,
    count_charges,
    load_splits,
    prepare,
    statistics_charges,
)
from dpvision.training.run_fingerprint import Binding, bound_keys, current_binding, differences
from dpvision.training.stages import RunFeatures, run_features, set_trained, stage_at
from dpvision.training.trainer import (
    Place,
    Session,
    assemble,
    choose_gradient_plans,
    draw_weights,
    make_learner,
    measure,
    preflight,
    run_steps,
)
from dpvision.training.write_release import RunResult, write_release


def start_run(
    config: RunConfig, path: Path, *, seed: int | None, device: str, callback: RunCallback | None = None
) -> tuple[Session, Prepared]:
    """A new run. Nothing is written before the data, the plan and the model have been found good."""
    RunFolder.require_new(path)
    keys = Keys.from_os_entropy() if seed is None else Keys.from_seed(seed)
    run_id = keys.derive("run")[:8].hex()
    prepared = prepare(config, holdout_keys(keys, run_id))
    config, pictures = prepared.config, prepared.pictures
    binding = binding_of(config, pictures, run_id=run_id, device=device)
    bound = bound_keys(keys, binding, fork=0)
    learner = make_learner(config, pictures, device)
    if config.privacy.enabled:
        set_trained(learner.model, learner.stages[-1])  # who learns at all, learns in the last phase
        findings = preflight(learner.model, config, pictures, device)
        prepared = replace(prepared, notes=(*prepared.notes, *map(str, findings)))
    choose_gradient_plans(learner, config, pictures, device)
    draw_weights(learner.model, config, pictures, bound)
    folder = RunFolder.create(path)
    folder.save_key(keys, run_id=run_id, bindings=[binding])
    header = ledger_header(config, run_id, hand_seeded=keys.hand_seeded)
    counted = [event for event, _ in count_charges(config)]  # the header gives the number away: charged with it
    ledger = Ledger.create(folder.ledger_path, header, charges=counted)
    note_declarations(ledger, config, pictures)
    normalisation = normalise(config, pictures, bound, ledger)
    config = config.with_normalisation(normalisation.mean, normalisation.std)
    folder.write_whole_config(config.to_json())
    folder.write_config(config.public().to_json())
    features = run_features(
        learner.stages[0],
        config,
        pictures,
        normalisation=normalisation,
        device=device,
        callback=callback or RunCallback(),
    )
    # From here on the key is bound to the constants for the pixels and to the features too: neither was known before.
    binding = with_features(binding_of(config, pictures, run_id=run_id, device=device), features)
    folder.save_key(keys, run_id=run_id, bindings=[binding])
    place = Place(folder, ledger, bound_keys(keys, binding, fork=0), 0, device)
    learner = replace(learner, features=features)
    session = assemble(config, pictures, place=place, learner=learner, normalisation=normalisation)
    session.save_checkpoint()
    return session, prepared


def resume_run(
    path: Path, *, allow_fork: bool, device: str, callback: RunCallback | None = None
) -> tuple[Session, list[str]]:
    """The run in ``path`` as its newest whole checkpoint left it, and what the user should know about that."""
    folder = RunFolder.open(path)
    folder.lock()
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None:
        raise DPVisionError(
            f"{path} stopped before its first checkpoint: start it anew elsewhere. {spent_so_far(folder)}"
        )
    config = parse_config(folder.read_whole_config())
    stored = folder.load_key()
    pictures = load_splits(config, holdout_keys(stored.keys, stored.run_id))
    ledger = folder.open_ledger()
    require_same_plan(config, ledger, stored)
    binding = binding_of(config, pictures, run_id=stored.run_id, device=device)
    require_permission(differences(stored.bindings[-1], binding), allow_fork=allow_fork)
    learner = make_learner(config, pictures, device)
    choose_gradient_plans(learner, config, pictures, device)
    with checkpoint_errors(checkpoint):
        load_model(learner.model, checkpoint)
    normalisation = normalisation_of(config)
    phase = stage_at(learner.stages, max(0, checkpoint.step - 1))
    features = run_features(
        phase, config, pictures, normalisation=normalisation, device=device, callback=callback or RunCallback()
    )
    binding = with_features(binding, features)
    notes = list(checkpoint.warnings)
    changed = differences(stored.bindings[-1], binding)
    if went_back_before_fork(folder, checkpoint):
        changed = [*changed, "checkpoint"]
    if device != "cpu":
        changed = [*changed, "device"]  # sums on other devices may differ from run to run in their last bits
    if config.performance.kernels == "compiled":
        changed = [*changed, "compiled kernels"]  # what the compiler makes depends on the shapes it saw before
    bindings = stored.bindings
    if changed:
        bindings = (*bindings, binding)
        folder.save_key(stored.keys, run_id=stored.run_id, bindings=bindings)
        notes.append(f"{', '.join(changed)} changed: the run forks, with other noise, and repeated steps are charged.")
    fork = note_forks(ledger, bindings, checkpoint)
    note_declarations(ledger, config, pictures)  # a fork may have brought other data or settings
    place = Place(folder, ledger, bound_keys(stored.keys, bindings[-1], fork), fork, device)
    learner = replace(learner, features=features)
    session = assemble(
        config, pictures, place=place, learner=learner, normalisation=normalisation, taken=checkpoint.step
    )
    with checkpoint_errors(checkpoint):
        restore(session, checkpoint)
    return session, notes


def holdout_keys(keys: Keys, run_id: str) -> Keys:
    """Which units are held out depends on the run alone, so that a resumed run holds out the same."""
    return keys.bind("holdout", run_id)


def binding_of(config: RunConfig, pictures: RunSplits, *, run_id: str, device: str) -> Binding:
    """What the key is bound to at this moment."""
    return current_binding(
        run_id=run_id,
        config_digest=config.digest(),
        data_fingerprint=pictures.train.fingerprint(),
        device=device,
        test=pictures.test.fingerprint(),
        pixels=f"{config.data.mean} {config.data.std}",
    )


def with_features(binding: Binding, features: RunFeatures | None) -> Binding:
    """The same facts and the very bits of the features, which a step's sum is made of."""
    return binding if features is None else {**binding, "features": f"{features.train.digest} {features.test.digest}"}


def ledger_header(config: RunConfig, run_id: str, *, hand_seeded: bool) -> dict[str, Any]:
    """The public facts under which everything is charged: the whole plan, so that no later file can change it."""
    privacy = config.privacy
    return {
        "run_id": run_id,
        "privacy_unit": required(privacy.privacy_unit, "privacy_unit"),
        "adjacency": privacy.adjacency,
        "num_units": required(privacy.num_units, "num_units"),
        "delta": privacy.delta if privacy.enabled else None,
        "expected_batch_size": config.plan.expected_batch_size,
        "clip_norm": privacy.clip_norm if privacy.enabled else None,
        "clipping": privacy.clipping if privacy.enabled else None,
        "unit_norm": privacy.unit_norm if privacy.enabled else None,
        "noise_multiplier": privacy.noise_multiplier if privacy.enabled else None,
        "steps": config.plan.steps,
        "target_epsilon": privacy.target_epsilon,
        "most_rows_per_owner": privacy.most_rows_per_owner if privacy.enabled else None,
        "units": config.data.units,
        "hand_seeded": hand_seeded,
    }


def require_same_plan(config: RunConfig, ledger: Ledger, stored: StoredKey) -> None:
    """Refuse to go on under another mechanism, delta, target or key than the ledger was opened for."""
    now = ledger_header(config, stored.run_id, hand_seeded=stored.keys.hand_seeded)
    changed = sorted(name for name in now if now[name] != ledger.header.get(name))
    if changed:
        raise PrivacyError(
            f"the plan of this run changed since it began ({', '.join(changed)}): a run keeps its mechanism, target "
            "and key. Put the old state back, or begin a new run, which composes with this one."
        )


def spent_so_far(folder: RunFolder) -> str:
    """What a run that never came to its first checkpoint has spent."""
    if not folder.ledger_path.exists():
        return "Nothing was spent."
    charges = folder.open_ledger().charges()  # without half a line: its noise never existed
    if not charges:
        return "Nothing was spent."
    parts = ", ".join(f"{count} × {event.purpose} (noise {event.noise_multiplier:g})" for event, count in charges)
    return f"It did spend {parts}: that composes with whatever comes next."


def normalise(config: RunConfig, pictures: RunSplits, keys: Keys, ledger: Ledger) -> Normalisation:
    """Constants for the pixels. Statistics of private pictures are charged before they are drawn."""
    charges = statistics_charges(config)
    if not charges:
        return constant_normalisation(config, pictures)
    ((event, _),) = charges
    ledger.charge(event, step=0)
    normalisation, drawn = released_normalisation(
        pictures.train,
        num_units=config.mechanism.num_units,
        noise_multiplier=event.noise_multiplier,
        keys=keys,
        normals=standard_normals,
    )
    if drawn != event:
        raise PrivacyError(f"the statistics cost {drawn}, but {event} was charged.")
    return normalisation


def normalisation_of(config: RunConfig) -> Normalisation:
    """The constants that the run has written into its configuration."""
    source = {"published": "published", "released": "released"}.get(config.data.normalisation, "fixed")
    mean, std = required(config.data.mean, "mean"), required(config.data.std, "std")
    return Normalisation.from_dict({"mean": mean, "std": std, "source": source})


def require_permission(changed: list[str], *, allow_fork: bool) -> None:
    """Changed data or settings need the user's word; another number of threads does not."""
    grave = [name for name in changed if name in {"run", "config", "data", "pixels", "test"}]
    if grave and not allow_fork:
        raise PrivacyError(
            f"the {' and '.join(grave)} of this run changed since it stopped: going on needs other noise, and repeated "
            "steps are charged again. Put the old state back, or resume with --fork."
        )


def went_back_before_fork(folder: RunFolder, checkpoint: Checkpoint) -> bool:
    """Whether newer checkpoints were lost, so that the run is now where its last fork had not begun yet."""
    begun = [entry.payload["step"] for entry in read_ledger(folder.ledger_path) if entry.kind == "fork"]
    return bool(begun) and checkpoint.step < begun[-1]


def note_forks(ledger: Ledger, bindings: tuple[dict[str, str], ...], checkpoint: Checkpoint) -> int:
    """Write every fork that the key knows into the ledger; a crash may have come between the two."""
    for number in range(ledger.forks + 1, len(bindings)):
        reason = ", ".join(differences(bindings[number - 1], bindings[number])) or "checkpoint"
        ledger.note("fork", {"fork": number, "step": checkpoint.step, "reason": f"changed: {reason}"})
    return len(bindings) - 1


@contextmanager
def checkpoint_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Word it as ours when a checkpoint is whole, but not one of this run."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, DPVisionError):
            raise
        raise TamperError(
            f"the checkpoint of step {checkpoint.step} is not one of this run: {brief(error)}. "
            "Put the right one in its place."
        ) from error


def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put the checkpoint's parameters and buffers in place."""
    prefix = "model/"
    state = {name.removeprefix(prefix): value for name, value in checkpoint.tensors.items() if name.startswith(prefix)}
    model.load_state_dict(state)


def restore(session: Session, checkpoint: Checkpoint) -> None:
    """Put the optimizer and the counters where the checkpoint says."""
    prefix = "optimizer/"
    tensors = {n.removeprefix(prefix): value for n, value in checkpoint.tensors.items() if n.startswith(prefix)}
    session.optimizer.load_state(tensors, checkpoint.values["optimizer"])
    session.step = checkpoint.step
    session.seconds = checkpoint.values["seconds"]
    session.curve = list(checkpoint.values["curve"])


def train(
    config: RunConfig,
    *,
    run: Path | str,
    seed: int | None = None,
    device: str = "cpu",
    callback: RunCallback | None = None,
) -> RunResult:
    """Train as ``config`` says and leave the run in the folder ``run``.

    ``seed`` replaces the operating system's entropy: repeatable, and stamped as not for release.
    From here on the process keeps up to half a gibibyte of freed memory, which makes steps of small models faster.

    Guarantee: the released weights are (epsilon, delta)-private for the unit and adjacency named in the certificate,
    under the assumptions of docs/concepts/guarantee.md.
    """
    callback = callback or RunCallback()
    session, prepared = start_run(config, Path(run), seed=seed, device=device, callback=callback)
    with session.folder:
        name = required(session.config.model, "model").name
        callback.started(name=name, steps=session.total_steps, done=0, choices=prepared.choices)
        for note in prepared.notes:
            callback.message(note)
        return _run_and_release(session, callback)


def resume_training(
    run: Path | str, *, allow_fork: bool = False, device: str = "cpu", callback: RunCallback | None = None
) -> RunResult:
    """Go on with the run in that folder where its newest whole checkpoint left it.

    Guarantee: steps that are repeated exactly release nothing new and are not charged twice; if anything changed on
    which their bits depend, they get other noise and are charged again.
    """
    callback = callback or RunCallback()
    session, notes = resume_run(Path(run), allow_fork=allow_fork, device=device, callback=callback)
    with session.folder:
        name = required(session.config.model, "model").name
        callback.started(name=name, steps=session.total_steps, done=session.step, choices=())
        for note in notes:
            callback.message(note)
        return _run_and_release(session, callback)


def _run_and_release(session: Session, callback: RunCallback) -> RunResult:
    keep_freed_memory()
    with stop_on_signals() as stop:
        try:
            outcome = run_steps(session, callback, stop)
            session.final = session.final or measure(session)  # the last step of a plan is evaluated already
            session.save_checkpoint()
            return write_release(session, outcome=outcome)
        finally:
            callback.finished()
