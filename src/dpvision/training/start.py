"""Start a new run.

The order of ``start_run``, and what each part reads and charges:

1. Prepare (``training.prepare``): loads the data, counts the units with noise, calibrates. Nothing is written.
2. Build the model and check on synthetic images that units do not mix. Reads no private data.
3. Draw the initial weights. They depend on the key and on public files.
4. Create the folder and the ledger. The ledger's first line shows the number of units, so a noisy count is charged
   with it; what is public is declared next.
5. Pixel constants: fixed or published, or released from the private images with noise. Charged before they are drawn.
6. Features of a frozen backbone: computed from the private images, kept in private memory or files. No charge. A run
   without privacy chooses its learning rate on them.
7. Bind the key again, now to the pixel constants and the features too; the training steps use this key.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpvision.config import AveragingSettings, RunConfig, ScheduleSettings, required
from dpvision.data import Normalisation, released_normalisation
from dpvision.data.loading import require_given
from dpvision.data.splits import RunSplits, constant_normalisation, holdout_keys
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.own_code import NO_CODE, RunCode
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.noise import standard_normals
from dpvision.privacy.randomness import Keys
from dpvision.ranks import ALONE, Ranks, in_a_job, job_name, usual_partial_sums
from dpvision.storage.run_folder import RunFolder
from dpvision.training.baseline import (
    BASELINE,
    NEVER_PUBLISH,
    images_are_declared_public,
    record_baseline,
    tune_head,
    without_privacy,
)
from dpvision.training.callbacks import RunCallback
from dpvision.training.declarations import note_declarations
from dpvision.training.defaults import Choice
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
from dpvision.training.initial_weights import draw_weights
from dpvision.training.notebook import default_callback
from dpvision.training.prepare import Prepared, count_charges, load_run_code, prepare, statistics_charges
from dpvision.training.run_fingerprint import Binding, bound_keys, own_code_facts, run_binding
from dpvision.training.stages import (
    SplitFeatures,
    Stage,
    check_units_separate,
    choose_gradient_plans,
    loss_of,
    model_and_stages,
    set_trained,
    split_features,
    synthetic_like,
)
from dpvision.training.trainer import Session
from dpvision.training.write_release import RunResult, reported, run_to_release


def train(
    config: RunConfig,
    *,
    run: Path | str,
    seed: int | None = None,
    device: str = "cpu",
    callback: RunCallback | None = None,
    model: object | None = None,
    loss: object | None = None,
    data: object | None = None,
) -> RunResult:
    """Train a model and write its release and its report.

    The process keeps up to half a gibibyte of freed memory from here on, which makes steps of small models faster.

    Args:
        config: what to train on, and how; None fields are filled in.
        run: the folder of the run; it must not exist or be empty.
        seed: replaces the operating system's entropy: reproducible, and stamped as not for release.
        device: torch's name of the device.
        callback: told about progress. Default: a progress bar in a notebook, nothing elsewhere.
        model: the user's own model: FILE.py:FUNCTION, a function or class that makes it, or a module, which is copied
            and stays as it is. Default: the configured one.
        loss: the user's own loss: FILE.py:FUNCTION, or a function of outputs and targets that returns one value per
            row. Default: the configured one.
        data: images in Python, in the place of a file: a pair of images and labels (arrays or tensors), a dict of
            arrays named as in an .npz file, or a map-style Dataset of such pairs. ``config.data.source`` is its name.
            A private run takes its classes from ``class_names`` or from the test part of the dict, or from
            ``classes`` of the Dataset.

    Returns:
        The outcome, the certificate and the metrics.

    Raises:
        ArgumentError: the configuration or the user's own code is impossible, or the plan would spend more than its
            target epsilon, or it is hopeless and ``config.privacy.anyway`` is not set. Nothing is written then, but a
            charged count.
        PrivacyError: the model mixes units.
        DataError: the data can't be read.

    Guarantee: the released weights are (epsilon, delta)-private for the unit and adjacency named in the certificate,
    under the assumptions of docs/concepts/guarantee.md.

    In a program that torchrun starts, every process calls this with the same arguments. Rank 0 trains and writes; the
    others compute for it and return the same result.
    """
    ranks = Ranks.of_this_job()
    config, code = load_run_code(config, model=model, loss=loss)
    require_shareable(config, ranks)
    agree_on_start(ranks, asked=config, device=device, seed=seed)
    if not ranks.leads:
        return Follower(ranks, code_of=lambda _: code, device=device, data=data).follow()
    callback = callback or default_callback()
    with leading(ranks):
        session, prepared = start_run(
            with_partial_sums(config), Path(run), seed=seed, device=device, callback=callback, code=code, data=data
        )
        if config.baseline:
            train_baseline(session, config, callback=callback, code=code, data=data)
        result = run_to_release(session, callback, choices=prepared.choices, notes=prepared.notes)
        return share_end(ranks, reported(result))


def with_partial_sums(config: RunConfig) -> RunConfig:
    """Fill in the number of partial sums under torchrun, so that a resumed run adds up in the same order.

    It is no setting of a run that is started as one process: that adds up in one sum.
    """
    if config.performance.partial_sums is not None or not in_a_job() or not config.privacy.enabled:
        return config
    performance = config.performance.model_copy(update={"partial_sums": usual_partial_sums()})
    return config.model_copy(update={"performance": performance})


def request_digest(config: RunConfig) -> str:
    """Digest what the user asked for, with the hashes of own code: the same whatever the number of processes."""
    performance = config.performance.model_copy(update={"partial_sums": None})
    return config.model_copy(update={"performance": performance}).digest()


def train_baseline(
    session: Session,
    asked: RunConfig,
    *,
    callback: RunCallback,
    code: RunCode = NO_CODE,
    data: object | None = None,
) -> None:
    """Train the non-private baseline of a run that has not begun its steps, and keep it in the private folder.

    Args:
        session: the private run.
        asked: its configuration, as the user wrote it.
        callback: told about progress.
        code: the user's own model and loss, if there are any.
        data: images in Python, as for ``train``.

    Guarantee: nothing of the private run is read or changed but its list of held-out units.
    """
    stored = session.folder.load_key()
    callback.message("training the baseline without privacy first …")
    told = callback.of_baseline()  # results without noise are not for every log
    config = without_privacy(asked)
    prepared = prepare(config, holdout_keys(stored.keys, stored.run_id), data)
    path, keys = session.folder.private / BASELINE, Keys.from_os_entropy()
    other, prepared = write_first_state(
        config, prepared, path, keys=keys, device=session.device, callback=told, code=code
    )
    result = run_to_release(other, told, choices=prepared.choices)
    if result.outcome == "stopped":
        raise KeyboardInterrupt  # the user wants the whole command to end; the private run can be resumed
    record_baseline(session, other)
    if not images_are_declared_public(session.config):
        callback.message(f"the baseline's result is in {session.folder.private}: {NEVER_PUBLISH}.")


def start_run(
    config: RunConfig,
    path: Path,
    *,
    seed: int | None,
    device: str,
    callback: RunCallback | None = None,
    code: RunCode = NO_CODE,
    data: object | None = None,
) -> tuple[Session, Prepared]:
    """Make a new run in the order above. Nothing is written before data, plan and model have been checked."""
    RunFolder.require_new(path)
    require_given(data)
    keys = Keys.from_os_entropy() if seed is None else Keys.from_seed(seed)
    prepared = prepare(config, holdout_keys(keys, run_id_of(keys)), data)
    callback = callback or RunCallback()
    return write_first_state(
        config,
        prepared,
        path,
        keys=keys,
        device=device,
        callback=callback,
        code=code,
        ranks=Ranks.of_this_job(),
    )


def run_id_of(keys: Keys) -> str:
    """Return the public name of the run that has these keys."""
    return keys.derive("run")[:8].hex()


def write_first_state(
    asked: RunConfig,
    prepared: Prepared,
    path: Path,
    *,
    keys: Keys,
    device: str,
    callback: RunCallback,
    code: RunCode,
    ranks: Ranks = ALONE,
) -> tuple[Session, Prepared]:
    """Check the model of a resolved configuration, then write the run's folder with its state before the first step.

    ``asked`` is the configuration as the user wrote it. Of several processes this is rank 0.
    """
    run_id = run_id_of(keys)
    config, splits = prepared.config, prepared.splits
    if prepared.forecast is not None and prepared.forecast.hopeless and not config.privacy.anyway:
        refuse_hopeless(prepared, path, keys, run_id)

    model, stages = model_and_stages(config, splits, device, code)
    if config.privacy.enabled:
        set_trained(model, stages[-1])  # everything that is trained at all is trained in the last stage
        findings = check_units_separate(model, config, splits, device, code)
        prepared = replace(prepared, notes=(*prepared.notes, *map(str, findings)))
    facts = own_code_facts(code, model, loss_of(config, splits, code), synthetic_like(splits, device))
    choose_gradient_plans(model, stages, config, splits, device, code)
    if prepared.forecast is not None:
        callback.message(prepared.forecast.text)

    binding = run_binding(config, splits, run_id=run_id, device=device) | facts
    share_preparation(ranks, config, holdout_keys(keys, run_id), binding)
    first_keys = bound_keys(keys, binding, fork=0)
    draw_weights(model, config, splits, first_keys, code)

    folder = RunFolder.create(path)
    folder.save_key(keys, run_id=run_id, bindings=[binding])
    folder.note_start(job=job_name(), asked=request_digest(asked))
    header = ledger_header(config, run_id, hand_seeded=keys.hand_seeded)
    counted = [event for event, _ in count_charges(config)]  # the header shows the number: charged with it
    ledger = Ledger.create(folder.ledger_path, header, charges=counted)
    note_declarations(ledger, config, splits)

    normalisation = choose_normalisation(config, splits, first_keys, ledger)
    config = config.with_normalisation(normalisation.mean, normalisation.std)
    folder.write_whole_config(config.to_json())
    folder.write_config(config.public().to_json())

    share_weights(ranks, config, model)
    features = split_features(
        stages[0], config, splits, normalisation=normalisation, device=device, callback=callback, ranks=ranks
    )
    tuned = tuned_head(asked, config, stages[0], features, splits, normalisation=normalisation)
    if tuned is not None:
        config, choice = tuned
        folder.write_whole_config(config.to_json())
        folder.write_config(config.public().to_json())
        kept = tuple(each for each in prepared.choices if each.setting not in (choice.setting, "schedule"))
        prepared = replace(prepared, config=config, choices=(*kept, choice))
    binding = with_features(run_binding(config, splits, run_id=run_id, device=device) | facts, features)
    folder.save_key(keys, run_id=run_id, bindings=[binding])
    session = Session(
        config=config,
        splits=splits,
        normalisation=normalisation,
        folder=folder,
        ledger=ledger,
        keys=bound_keys(keys, binding, fork=0),
        device=device,
        model=model,
        stages=stages,
        features=features,
        code=code,
        ranks=ranks,
    )
    session.save_checkpoint()
    return share_keys(session), prepared


def tuned_head(
    asked: RunConfig,
    config: RunConfig,
    stage: Stage,
    features: SplitFeatures | None,
    splits: RunSplits,
    *,
    normalisation: Normalisation,
) -> tuple[RunConfig, Choice] | None:
    """Tune a linear head of a run without privacy that left its optimizer, schedule and averaging open.

    It is on kept features, or on the pixels themselves (model ``linear``).

    Guarantee: a private run is never tuned on its images.
    """
    open_settings = (None, ScheduleSettings(), AveragingSettings())
    left_open = (asked.optimizer, asked.schedule, asked.averaging) == open_settings
    on_pixels = config.model is not None and config.model.name == "linear"
    if config.privacy.enabled or not (features or on_pixels) or not left_open:
        return None
    if features is None:
        rows = normalisation.apply(splits.train.images[:]).flatten(1)
    else:
        rows = features.train.values_NWF[:, 0]
    return tune_head(config, stage.network, rows, splits.train.labels)


def refuse_hopeless(prepared: Prepared, path: Path, keys: Keys, run_id: str) -> None:
    """Refuse a plan that the forecast calls hopeless.

    Guarantee: with a declared number of units nothing is written, and the refusal follows from declared facts. With a
    counted one the refusal shows something of the noisy count, so the count is charged in a ledger first.

    Raises:
        ArgumentError: always.
    """
    config, found = prepared.config, required(prepared.forecast, "forecast")
    text = f"{found.text}. Nothing was trained; give --anyway to train all the same."
    counted = [event for event, _ in count_charges(config)]
    if counted:
        with RunFolder.create(path) as folder:
            header = ledger_header(config, run_id, hand_seeded=keys.hand_seeded)
            Ledger.create(folder.ledger_path, header, charges=counted)
        text += f" The noisy count of the units is charged in {path}; declare num_units to avoid it."
    raise ArgumentError(text)


def with_features(binding: Binding, features: SplitFeatures | None) -> Binding:
    """Add the digests of the kept features, whose bits enter every sum."""
    return binding if features is None else {**binding, "features": f"{features.train.digest} {features.test.digest}"}


def ledger_header(config: RunConfig, run_id: str, *, hand_seeded: bool) -> dict[str, Any]:
    """The public facts under which everything is charged: the whole plan, so that no later file can change it."""
    privacy, plan = config.privacy, config.plan
    private = privacy.enabled
    return {
        "run_id": run_id,
        "privacy_unit": required(privacy.privacy_unit, "privacy_unit"),
        "adjacency": privacy.adjacency,
        "num_units": required(privacy.num_units, "num_units"),
        "delta": privacy.delta if private else None,
        "expected_batch_size": plan.expected_batch_size,
        "clip_norm": privacy.clip_norm if private else None,
        "clipping": privacy.clipping if private else None,
        "unit_norm": privacy.unit_norm if private else None,
        "noise_multiplier": privacy.noise_multiplier if private else None,
        "steps": plan.steps,
        "target_epsilon": privacy.target_epsilon,
        **({} if privacy.target_risk is None else {"target_risk": privacy.target_risk}),
        "most_rows_per_owner": privacy.most_rows_per_owner if private else None,
        "units": config.data.units,
        "hand_seeded": hand_seeded,
    }


def choose_normalisation(config: RunConfig, splits: RunSplits, keys: Keys, ledger: Ledger) -> Normalisation:
    """Return the pixel constants.

    Guarantee: statistics of private images are charged before they are drawn, and at what they cost.
    """
    charges = statistics_charges(config)
    if not charges:
        return constant_normalisation(config, splits)
    ((event, _),) = charges
    ledger.charge(event, step=0)
    normalisation, drawn = released_normalisation(
        splits.train,
        num_units=config.mechanism.num_units,
        noise_multiplier=event.noise_multiplier,
        keys=keys,
        normals=standard_normals,
    )
    if drawn != event:
        raise PrivacyError(f"the statistics cost {drawn}, but {event} was charged.")
    return normalisation
