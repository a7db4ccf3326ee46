"""What the first weights bring along from the runs and files before them: words, sums and reasons against a release.

Where a run's first weights come from: a file, a known set, or the release of an earlier run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from pydantic import ValidationError
from torch import Tensor, nn

from dpvision.config import ModelConfig, PriorRelease, RunConfig, TransferConfig
from dpvision.data import Normalisation
from dpvision.errors import ArgumentError, TamperError
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import rounded_up
from dpvision.release.schema import Certificate
from dpvision.release.statements import HISTORY, NOT_FOR_RELEASE, TRAINING_DATA, history_digest
from dpvision.release.verify import require_verified
from dpvision.storage.files import parse_object, read_file, sha256_hex
from dpvision.storage.run_folder import CERTIFICATE, CONFIG, LEDGER, RunFolder
from dpvision.training.initial_weights import KNOWN_WEIGHTS, draw_mean_var, find_known, fit, known_by_hash, read_weights

FIRST_WEIGHTS = "first weights"
_OF_A_STAMPED_RUN = "the first weights are of a run that is not for release: "


def lineage(transfer: TransferConfig | None) -> Iterator[TransferConfig]:
    """Where the weights of this run came from, then where those of that run came from, and so on."""
    while transfer is not None:
        yield transfer
        transfer = None if transfer.prior is None else transfer.prior.transfer


def transfer_declarations(config: RunConfig, *, planned_epsilon: float | None) -> list[tuple[str, str]]:
    """What the certificate says of the first weights, of all that came before them, and of what learns."""
    if config.transfer is None:
        return []
    found = [
        (FIRST_WEIGHTS if back == 0 else f"{FIRST_WEIGHTS}, runs back: {back}", _origin_text(transfer))
        for back, transfer in enumerate(lineage(config.transfer))
    ]
    composed = _composition(config, planned_epsilon)
    if composed is not None:
        found.append(("first weights and this run together", composed))
    found.append(("what learns", _what_learns(config.transfer)))
    return found


def note_ancestry(ledger: Ledger, config: RunConfig) -> None:
    """Write what no later file can take back then: the name of the data, and the reasons against a release."""
    ledger.note("declare", {"what": TRAINING_DATA, "how": config.data.name})
    history = history_digest(config.public().model_dump(mode="json")["transfer"])
    if history is not None:
        ledger.note("declare", {"what": HISTORY, "how": f"SHA-256 {history}"})
    for stamp in transfer_stamps(config):
        ledger.note("declare", {"what": NOT_FOR_RELEASE, "how": stamp})


def transfer_stamps(config: RunConfig) -> tuple[str, ...]:
    """Reasons against a release that the first weights bring along, from however far back."""
    if not config.privacy.enabled:
        return ()
    data = config.data.name
    found = [stamp for transfer in lineage(config.transfer) for stamp in _stamps_of(transfer, data)]
    return tuple(dict.fromkeys(found))


def _stamps_of(transfer: TransferConfig, data: str) -> Iterator[str]:
    prior, known = transfer.prior, known_by_hash(transfer.sha256)
    if known is not None and known.covers(data):
        yield f"the first weights were trained without privacy on {known.source}, which {data} is a part of"
    if prior is None:
        return
    if prior.epsilon is not None:
        yield from (f"{_OF_A_STAMPED_RUN}{stamp.removeprefix(_OF_A_STAMPED_RUN)}" for stamp in prior.stamps)
    elif data in prior.data:
        yield f"the first weights come from a run without privacy on {data}, the data of this very run"
    if _is_gap(prior):
        yield f"the first weights come from run {prior.run_id}, and what that run began with is not known"


def _is_gap(prior: PriorRelease) -> bool:
    """Whether the run began with weights from elsewhere of which its configuration does not tell."""
    return prior.began_elsewhere and prior.transfer is None


def _origin_text(transfer: TransferConfig) -> str:
    licence = f", licence {transfer.licence}" if transfer.licence else ", licence not stated"
    known = known_by_hash(transfer.sha256)
    trained_on = transfer.source if known is None else known.source
    if transfer.prior is not None:
        trained_on = ", ".join(transfer.prior.data)
    if transfer.source not in (None, trained_on):
        trained_on = f"{trained_on} (whoever configured the run adds: {transfer.source})"
    file = f"{Path(transfer.weights).name} (SHA-256 {transfer.sha256}), trained on {trained_on}{licence}"
    return f"{file}: {_standing(transfer.prior)}"


def _standing(prior: PriorRelease | None) -> str:
    gap = "; what it began with itself is not known" if prior is not None and _is_gap(prior) else ""
    if prior is None or prior.epsilon is None or prior.delta is None:
        made = "" if prior is None else f"by run {prior.run_id}, without privacy; "
        return f"{made}declared public, and this run's epsilon protects none of that data{gap}"
    return (
        f"the release of run {prior.run_id}, private for {_protects(prior.privacy_unit, prior.adjacency)} at epsilon "
        f"{rounded_up(prior.epsilon)}, delta {rounded_up(prior.delta)}; charged there, not here{gap}"
    )


def _protects(privacy_unit: str | None, adjacency: str | None) -> str:
    return f"one {privacy_unit} ({adjacency or 'adjacency not known'})"


def _composition(config: RunConfig, planned_epsilon: float | None) -> str | None:
    """Basic composition with every private run before this one, for whoever is in the data of all of them."""
    runs = [transfer.prior for transfer in lineage(config.transfer) if transfer.prior is not None]
    private = [(run, run.epsilon, run.delta) for run in runs if run.epsilon is not None and run.delta is not None]
    own_delta = config.privacy.delta
    if not private or planned_epsilon is None or own_delta is None:
        return None
    if any(_is_gap(run) for run in runs):
        return "no common figure: not all the runs are known that the first weights come from"
    kinds = [_protects(run.privacy_unit, run.adjacency) for run, _, _ in private]
    kinds.append(_protects(config.privacy.privacy_unit, config.privacy.adjacency))
    if len(set(kinds)) > 1:
        return f"no common figure: the runs protect {', '.join(kinds)}, and such epsilons don't add up"
    epsilons = [epsilon for _, epsilon, _ in private]
    total = rounded_up(math.fsum([*epsilons, planned_epsilon]))
    delta = rounded_up(math.fsum([*(delta for _, _, delta in private), own_delta]))
    nobody = "; whoever is in the data of a run without privacy has no guarantee" if len(private) < len(runs) else ""
    return (
        f"whoever is in the data of this run and of {len(private)} before it is protected by their sum: epsilon at "
        f"most {total} at delta {delta} (basic composition of {', '.join(map(rounded_up, epsilons))} and this run's "
        f"plan of {rounded_up(planned_epsilon)}); this certificate's own epsilon counts this run alone{nobody}"
    )


def _what_learns(transfer: TransferConfig) -> str:
    words = {
        "head": "the head alone, drawn anew; all else stays as it was loaded",
        "last": f"the last {transfer.stages} stages, the head drawn anew; all else stays as it was loaded",
        "all": "everything, the head drawn anew",
        "head_then_all": f"the head, drawn anew, for {transfer.head_steps} steps, then everything",
    }
    if transfer.initialisation == "mean_var":
        return "everything, each layer drawn with the mean and variance that it has in the first weights"
    return words[transfer.trained]


MOST_RUNS = 50
"""As far back as a history is carried along; a longer one is nobody's, and could not be written any more."""


@final
@dataclass(frozen=True)
class Origin:
    """Weights from elsewhere, and what is known of them."""

    tensors: Mapping[str, Tensor]
    rename: Mapping[str, str]
    sha256: str
    source: str | None
    licence: str | None
    model: ModelConfig | None = None
    normalisation: Normalisation | None = None
    prior: PriorRelease | None = None


def origin_of(transfer: TransferConfig, data_dir: Path | None) -> Origin:
    """Read the weights and all that is known of them. What the configuration itself says goes first."""
    known = KNOWN_WEIGHTS.get(transfer.weights)
    path = Path(transfer.weights) if known is None else find_known(known, data_dir)
    if path.is_dir():
        found = _of_run(path, transfer)
    else:
        if not path.is_file():
            names = ", ".join(KNOWN_WEIGHTS)
            raise ArgumentError(f"weights must be a file, a run's folder or one of {names}, got {transfer.weights!r}.")
        _require_no_run(path)
        tensors, content = read_weights(path)
        found = Origin(
            tensors=tensors,
            rename={**({} if known is None else known.rename), **transfer.rename},
            sha256=sha256_hex(content),
            source=transfer.source or (None if known is None else known.source),
            licence=transfer.licence or (None if known is None else known.licence),
            model=None if known is None else ModelConfig(name=known.model, options=dict(known.options)),
            normalisation=None if known is None else known.normalisation,
        )
    expected = transfer.sha256 or (None if known is None else known.sha256)
    if expected not in (None, found.sha256):
        raise TamperError(f"{path} is not the file that was meant: its SHA-256 is {found.sha256}, not {expected}.")
    if found.source is None:
        raise ArgumentError("source must say what the weights were trained on: the certificate declares it public.")
    return found


def _require_no_run(path: Path) -> None:
    """Refuse a file out of a run: its weights come with a certificate, and without it they would pass for public."""
    for folder in path.resolve().parents[:3]:  # a run's deepest files are private/checkpoints/*
        if (folder / CERTIFICATE).exists() or (folder / "release" / LEDGER).exists():
            run = folder.parent if folder.name == "release" else folder
            raise ArgumentError(
                f"weights must be a run's folder where they are of a run, got a file in {run}. Give the folder that "
                "holds release/, so that its certificate counts."
            )


def _of_run(path: Path, transfer: TransferConfig) -> Origin:
    """The release of an earlier run, checked as ``dpvision verify`` does, with the history that it tells."""
    folder = RunFolder.open(path)
    certificate, ledger = require_verified(path)
    # The ledger's names, which stay when a fork goes on with other data; an old ledger has none.
    noted = tuple(item.how for item in certificate.declared if item.what == TRAINING_DATA)
    data = noted or (str(certificate.data.get("source", "unknown")),)
    own = _own_transfer(folder, certificate)
    return Origin(
        tensors=folder.load_weights(sha256=certificate.weights_sha256),
        rename=transfer.rename,
        sha256=certificate.weights_sha256,
        source=transfer.source or ", ".join(data),
        licence=transfer.licence,
        prior=PriorRelease(
            run_id=str(ledger[0].payload["run_id"]),
            data=data,
            privacy_unit=certificate.privacy_unit,
            adjacency=certificate.adjacency,
            epsilon=certificate.epsilon,
            delta=certificate.delta,
            stamps=tuple(certificate.stamps),
            began_elsewhere=own is not None or any(item.what == FIRST_WEIGHTS for item in certificate.declared),
            transfer=_parsed(own),
        ),
    )


def _own_transfer(folder: RunFolder, certificate: Certificate) -> object:
    """What the earlier run's configuration says of its own first weights."""
    path = folder.release / CONFIG
    content = read_file(path)
    if sha256_hex(content) != certificate.config_sha256:
        raise TamperError(f"{path} is not the file that the certificate names. Get the release anew.")
    return parse_object(content, name=str(path)).get("transfer")


def _parsed(own: object) -> TransferConfig | None:
    """The same as a value; None where there is none or this version can't read it: the latter is a gap, and stamped."""
    try:
        found = TransferConfig.model_validate(own)
    except ValidationError:
        return None
    return found if len(list(lineage(found))) <= MOST_RUNS else None


def resolved_transfer(config: RunConfig) -> tuple[RunConfig, Normalisation | None]:
    """The configuration with all that the weights themselves say, and the constants that they want pixels scaled by."""
    if config.transfer is None:
        return config, None
    origin = origin_of(config.transfer, _data_dir(config))
    facts = {"sha256": origin.sha256, "source": origin.source, "licence": origin.licence, "prior": origin.prior}
    update: dict[str, object] = {"transfer": config.transfer.model_copy(update=facts)}
    if config.model is None and origin.model is not None:
        update["model"] = origin.model
    return config.model_copy(update=update), origin.normalisation


def put_weights(model: nn.Module, config: RunConfig, *, build: Callable[[], nn.Module], seed: int) -> None:
    """Copy the first weights into the model, whose head is drawn already; ``build`` makes one more of its kind."""
    if config.transfer is None:
        return
    origin = origin_of(config.transfer, _data_dir(config))
    if config.transfer.initialisation == "mean_var":
        draw_mean_var(model, build(), origin.tensors, rename=origin.rename, seed=seed)
    else:
        fit(model, origin.tensors, rename=origin.rename)


def _data_dir(config: RunConfig) -> Path | None:
    return None if config.data.data_dir is None else Path(config.data.data_dir)
