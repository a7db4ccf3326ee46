"""What leaves the house at the end of a run: weights, certificate, metrics."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

from torch import Tensor

from dpvision.privacy.ledger import read_ledger
from dpvision.release.build import ReleaseFacts, build_certificate
from dpvision.release.certificate_page import render_certificate_page
from dpvision.release.model_card import model_card
from dpvision.storage.files import sha256_hex, weights_bytes
from dpvision.storage.run_folder import CARD, CERTIFICATE_PAGE, EXAMPLES
from dpvision.training.trainer import Outcome, Session, example_file

_FIRST_FIGURES = (
    "accuracy",
    "top5",
    "dice",
    "iou",
    "dice_per_patient",
    "iou_per_patient",
    "baseline_dice",
    "loss",
    "raw_weights",
)


@final
@dataclass(frozen=True)
class RunResult:
    """A run that came to its end or was stopped."""

    run: Path
    outcome: Outcome
    certificate: dict[str, Any]
    metrics: dict[str, Any]
    train_seconds: float

    def figures(self) -> dict[str, Any]:
        """The figures that people ask for first."""
        final_metrics = self.metrics["final"]
        return {
            **{name: final_metrics[name] for name in _FIRST_FIGURES if name in final_metrics},
            "epsilon": self.certificate["epsilon"],
            "epsilon_rdp": self.certificate["epsilon_rdp"],
            "delta": self.certificate["delta"],
            "steps": self.certificate["steps_taken"],
            "privacy_unit": self.certificate["privacy_unit"],
            "for_release": self.certificate["for_release"],
            "train_seconds": round(self.train_seconds, 3),
            "outcome": self.outcome,
        }


def write_release(session: Session, *, outcome: Outcome) -> RunResult:
    """Write the release folder.

    Guarantee: refused if a parameter moved by any other way than the private step path.
    """
    session.optimizer.check_untouched()
    weights = weights_bytes(released_weights(session))
    config = session.config.public().to_json()
    certificate = build_certificate(
        ledger=read_ledger(session.folder.ledger_path),
        mechanism=session.config.mechanism if session.config.privacy.enabled else None,
        hand_seeded=session.keys.hand_seeded,
        release=ReleaseFacts(
            weights_sha256=sha256_hex(weights),
            config_sha256=sha256_hex(config.encode()),
            data=public_description(session),
            software=software(),
        ),
    )
    metrics = metrics_of(session)
    pages = {
        CERTIFICATE_PAGE: render_certificate_page(certificate),
        CARD: model_card(certificate, metrics=metrics, config=json.loads(config)),
    }
    session.folder.write_release(weights=weights, certificate=certificate, metrics=metrics, config=config, pages=pages)
    shown = example_file(session)
    if shown is not None:
        session.folder.add_to_release(EXAMPLES, shown)
    # How long the draws took depends on their sizes, which are private: not part of the release.
    session.folder.write_unsafe("timing", {"train_seconds": session.seconds})
    return RunResult(session.folder.root, outcome, certificate, metrics, session.seconds)


def public_description(session: Session) -> dict[str, Any]:
    """What may be said of the data: declared facts, and nothing that was counted in it."""
    return {
        "source": session.config.data.name,
        "class_names": list(session.splits.train.class_names),
        "image_shape": list(session.splits.train.image_shape),
        "num_units": session.config.plan.num_units,
    }


def released_weights(session: Session) -> dict[str, Tensor]:
    """Parameters (averaged ones where there are any) and buffers."""
    state = dict(session.model.state_dict())
    averaged = session.optimizer.averaged_parameters()
    return state if averaged is None else {**state, **averaged}


def software() -> dict[str, str]:
    """Versions of what computed the run."""
    names = ("dpvision", "torch", "dp-accounting", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def metrics_of(session: Session) -> dict[str, Any]:
    """The figures on the public test split."""
    averaged = session.optimizer.averaged_parameters() is not None
    final_metrics = {} if session.final is None else session.final.to_dict()
    last = session.curve[-1] if session.curve else {}
    raw = {"raw_weights": last["raw"]} if last.get("step") == session.step and "raw" in last else {}
    return {
        "task": session.config.task,
        "curve": session.curve,
        "final": {
            **final_metrics,
            "evaluated_on": f"{session.splits.test.name}, declared public",
            "weights": "averaged" if averaged else "raw",
            **raw,
        },
    }
