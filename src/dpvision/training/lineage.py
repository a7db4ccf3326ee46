"""Lineage of a run's initial weights: the earlier runs they come from, what those spent, and what forbids a release.

An earlier run is verified before its weights are used. Its own initial weights are followed back as far as its
configuration tells, so that the certificate states every data set and the composed epsilon. What is not known is a gap:
the release is stamped, and no sum is stated. The sentences are part of certificates and ledgers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from dpvision.config import PriorRelease, RunConfig, TransferConfig
from dpvision.errors import ArgumentError, TamperError
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import rounded_up
from dpvision.release.statements import HISTORY, NOT_FOR_RELEASE, TRAINING_DATA, history_digest
from dpvision.release.verify import require_verified
from dpvision.storage.files import parse_object, read_file, sha256_hex
from dpvision.storage.run_folder import CERTIFICATE, CONFIG, LEDGER, RunFolder
from dpvision.training.pretrained import known_by_hash

MOST_RUNS = 50
"""Longest chain of earlier runs that is recorded; a longer one counts as unknown."""
FIRST_WEIGHTS = "first weights"
_OF_A_STAMPED_RUN = "the first weights are of a run that is not for release: "


def lineage(transfer: TransferConfig | None) -> Iterator[TransferConfig]:
    """Follow initial weights back: those of this run, of the run that released them, and so on."""
    while transfer is not None:
        yield transfer
        transfer = None if transfer.prior is None else transfer.prior.transfer


def transfer_declarations(config: RunConfig, *, planned_epsilon: float | None) -> list[tuple[str, str]]:
    """Pairs of (what, how) that the certificate declares: initial weights, earlier runs, and what is trained.

    Args:
        config: the resolved configuration.
        planned_epsilon: epsilon of this run's whole plan; None without privacy.
    """
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


def note_lineage(ledger: Ledger, config: RunConfig) -> None:
    """Record the name of the data, the digest of the history and the stamps, so that no later file can drop them."""
    ledger.note("declare", {"what": TRAINING_DATA, "how": config.data.name})
    history = history_digest(config.public().model_dump(mode="json")["transfer"])
    if history is not None:
        ledger.note("declare", {"what": HISTORY, "how": f"SHA-256 {history}"})
    for stamp in transfer_stamps(config):
        ledger.note("declare", {"what": NOT_FOR_RELEASE, "how": stamp})


def transfer_stamps(config: RunConfig) -> tuple[str, ...]:
    """Reasons against a release that follow from the initial weights, over the whole lineage."""
    if not config.privacy.enabled:
        return ()
    data = config.data.name
    found = [stamp for transfer in lineage(config.transfer) for stamp in _stamps_of(transfer, data)]
    return tuple(dict.fromkeys(found))


def _stamps_of(transfer: TransferConfig, data: str) -> Iterator[str]:
    """Stamps that one link of the lineage causes for a run on ``data``."""
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
    """Whether the run had initial weights that its configuration does not describe."""
    return prior.began_elsewhere and prior.transfer is None


def _origin_text(transfer: TransferConfig) -> str:
    """State the file, its training data, its licence and its privacy."""
    licence = f", licence {transfer.licence}" if transfer.licence else ", licence not stated"
    known = known_by_hash(transfer.sha256)
    trained_on = transfer.source if known is None else known.source
    if transfer.prior is not None:
        trained_on = ", ".join(transfer.prior.data)
    if transfer.source not in (None, trained_on):
        trained_on = f"{trained_on} (the person who configured the run adds: {transfer.source})"
    file = f"{Path(transfer.weights).name} (SHA-256 {transfer.sha256}), trained on {trained_on}{licence}"
    return f"{file}: {_standing(transfer.prior)}"


def _standing(prior: PriorRelease | None) -> str:
    """State whether the weights are private, at which epsilon, and whether their own history is known."""
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
    """State the basic composition with every earlier private run, for a unit in the data of all of them."""
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
    nobody = "; a person in the data of a run without privacy has no guarantee" if len(private) < len(runs) else ""
    return (
        f"a person in the data of this run and of {len(private)} before it is protected by their sum: epsilon at "
        f"most {total} at delta {delta} (basic composition of {', '.join(map(rounded_up, epsilons))} and this run's "
        f"plan of {rounded_up(planned_epsilon)}); this certificate's own epsilon counts this run alone{nobody}"
    )


def _what_learns(transfer: TransferConfig) -> str:
    """State which parameters are trained."""
    words = {
        "head": "the head alone, initialised again; all else stays as it was loaded",
        "last": f"the last {transfer.stages} stages, the head initialised again; all else stays as it was loaded",
        "all": "everything, the head initialised again",
        "head_then_all": f"the head, initialised again, for {transfer.head_steps} steps, then everything",
    }
    if transfer.initialisation == "mean_var":
        return "everything, each layer drawn with the mean and variance that it has in the first weights"
    return words[transfer.trained]


def read_earlier_run(path: Path) -> tuple[dict[str, Tensor], str, PriorRelease]:
    """Read the released weights of an earlier run, verified as ``dpvision verify`` does.

    Returns:
        The weights, their SHA-256, and what the certificate says about the run.

    Raises:
        TamperError: the release does not verify, or a file changed after the check.
    """
    folder = RunFolder.open(path)
    certificate, ledger = require_verified(path)
    config_path = folder.release / CONFIG
    content = read_file(config_path)
    if sha256_hex(content) != certificate.config_sha256:
        raise TamperError(f"{config_path} is not the file that the certificate names. Get the release again.")
    own = parse_object(content, name=str(config_path)).get("transfer")
    # The ledger's names stay when a fork continues with other data; an old ledger has none.
    noted = tuple(item.how for item in certificate.declared if item.what == TRAINING_DATA)
    prior = PriorRelease(
        run_id=str(ledger[0].payload["run_id"]),
        data=noted or (str(certificate.data.get("source", "unknown")),),
        privacy_unit=certificate.privacy_unit,
        adjacency=certificate.adjacency,
        epsilon=certificate.epsilon,
        delta=certificate.delta,
        stamps=tuple(certificate.stamps),
        began_elsewhere=own is not None or any(item.what == FIRST_WEIGHTS for item in certificate.declared),
        transfer=_parsed(own),
    )
    return folder.load_weights(sha256=certificate.weights_sha256), certificate.weights_sha256, prior


def _parsed(own: object) -> TransferConfig | None:
    """Parse the earlier run's own ``transfer``; None where it has none or this version can't read it (a gap)."""
    try:
        found = TransferConfig.model_validate(own)
    except ValidationError:
        return None
    return found if len(list(lineage(found))) <= MOST_RUNS else None


def require_outside_runs(path: Path) -> None:
    """Refuse a weight file inside a run folder: without the run's certificate it would pass for public."""
    for folder in path.resolve().parents[:3]:  # a run's deepest files are private/checkpoints/*
        if (folder / CERTIFICATE).exists() or (folder / "release" / LEDGER).exists():
            run = folder.parent if folder.name == "release" else folder
            raise ArgumentError(
                f"weights must be a run's folder where they are of a run, got a file in {run}. Give the folder that "
                "holds release/, so that its certificate counts."
            )
