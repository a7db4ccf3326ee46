"""Where a run's first weights come from: a file, a known set, or the release of an earlier run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor, nn

from dpvision.certificate import parse_certificate
from dpvision.checks import ArgumentError, TamperError
from dpvision.config import ModelConfig, PriorRelease, RunConfig, TransferConfig
from dpvision.data import Normalisation
from dpvision.ledger import read_ledger
from dpvision.runfolder import CERTIFICATE, RunFolder, parse_object, read_file, sha256_hex
from dpvision.transfer import KNOWN_WEIGHTS, draw_mean_var, find_known, fit, read_weights

FIRST_WEIGHTS = "first weights"


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


def _of_run(path: Path, transfer: TransferConfig) -> Origin:
    folder = RunFolder.open(path)
    at = folder.release / CERTIFICATE
    certificate = parse_certificate(parse_object(read_file(at), name=str(at)))
    header = read_ledger(folder.ledger_path)[0].payload
    data = str(certificate.data.get("source", "unknown"))
    return Origin(
        tensors=folder.load_weights(),
        rename=transfer.rename,
        sha256=certificate.weights_sha256,
        source=transfer.source or data,
        licence=transfer.licence,
        prior=PriorRelease(
            run_id=str(header["run_id"]),
            data=data,
            privacy_unit=certificate.privacy_unit,
            epsilon=certificate.epsilon,
            delta=certificate.delta,
            stamps=tuple(certificate.stamps),
            began_elsewhere=any(item.what == FIRST_WEIGHTS for item in certificate.declared),
        ),
    )


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


def transfer_declarations(config: RunConfig, *, planned_epsilon: float | None) -> list[tuple[str, str]]:
    """What the certificate says of the first weights and of what learns."""
    transfer = config.transfer
    if transfer is None:
        return []
    name = Path(transfer.weights).name
    licence = f", licence {transfer.licence}" if transfer.licence else ", licence not stated"
    file = f"{name} (SHA-256 {transfer.sha256}), trained on {transfer.source}{licence}"
    found = [(FIRST_WEIGHTS, f"{file}: {_standing(transfer.prior)}")]
    composed = _composition(config, planned_epsilon)
    if composed is not None:
        found.append(("first weights and this run together", composed))
    found.append(("what learns", _what_learns(transfer)))
    return found


def transfer_stamps(config: RunConfig) -> tuple[str, ...]:
    """Reasons against a release that the first weights bring along."""
    prior = None if config.transfer is None else config.transfer.prior
    if prior is None or not config.privacy.enabled:
        return ()
    if prior.epsilon is not None:
        return tuple(f"the first weights are of a run that is not for release: {stamp}" for stamp in prior.stamps)
    if prior.data == Path(config.data.source).name:
        return (f"the first weights were trained without privacy on {prior.data}, the data of this very run",)
    return ()


def _standing(prior: PriorRelease | None) -> str:
    if prior is None or prior.epsilon is None:
        made = "" if prior is None else f"by run {prior.run_id}, without privacy; "
        return f"{made}declared public, and this run's epsilon protects none of that data"
    more = "; it began with earlier weights itself, see its certificate" if prior.began_elsewhere else ""
    return (
        f"the release of run {prior.run_id}, private for one {prior.privacy_unit} at epsilon {_up(prior.epsilon)}, "
        f"delta {prior.delta:g}; charged there, not here{more}"
    )


def _composition(config: RunConfig, planned_epsilon: float | None) -> str | None:
    """Basic composition with the earlier run, for whoever is in both sets of data."""
    prior = None if config.transfer is None else config.transfer.prior
    own_delta = config.privacy.delta
    if prior is None or prior.epsilon is None or prior.delta is None or planned_epsilon is None or own_delta is None:
        return None
    return (
        f"whoever is in the data of both is protected by their sum: epsilon at most "
        f"{_up(prior.epsilon + planned_epsilon)} at delta {prior.delta + own_delta:g} (basic composition of "
        f"{_up(prior.epsilon)} and this run's plan of {_up(planned_epsilon)}); this certificate's own epsilon counts "
        "this run alone"
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


def _up(value: float) -> str:
    """Rounded up: a bound that is shown must be one."""
    return f"{math.ceil(value * 1e4) / 1e4:g}"


def _data_dir(config: RunConfig) -> Path | None:
    return None if config.data.data_dir is None else Path(config.data.data_dir)
