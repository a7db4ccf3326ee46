"""Where a run's first weights come from: a file, a known set, or the release of an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from pydantic import ValidationError
from torch import Tensor, nn

from dpvision.certificate import TRAINING_DATA, Certificate
from dpvision.checks import ArgumentError, TamperError
from dpvision.config import ModelConfig, PriorRelease, RunConfig, TransferConfig
from dpvision.data import Normalisation
from dpvision.runfolder import CERTIFICATE, CONFIG, LEDGER, RunFolder, parse_object, read_file, sha256_hex
from dpvision.training.ancestry import FIRST_WEIGHTS, lineage
from dpvision.transfer import KNOWN_WEIGHTS, draw_mean_var, find_known, fit, read_weights
from dpvision.verify import require_verified

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
