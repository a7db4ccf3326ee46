"""Run a session to its end and write the release: weights, certificate, metrics, and example masks.

Everything in the release is public: the private weights, declared facts, and metrics and images of the test split.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from dpvision.config import required
from dpvision.data import ImageStore
from dpvision.data.splits import may_show_images
from dpvision.errors import ArgumentError, DPVisionError
from dpvision.inference import dice_of_images, predict_masks
from dpvision.inference.load import load_model
from dpvision.kernels.memory import keep_freed_memory
from dpvision.privacy.ledger import Ledger, read_ledger
from dpvision.privacy.mechanism import Mechanism
from dpvision.release.build import ReleaseFacts, build_certificate
from dpvision.release.certificate_page import render_certificate_page
from dpvision.release.model_card import model_card
from dpvision.storage.files import sha256_hex, weights_bytes
from dpvision.storage.run_folder import (
    CARD,
    CERTIFICATE_PAGE,
    EXAMPLES,
    REPORT,
    Example,
    Rank,
    RunFolder,
    examples_bytes,
)
from dpvision.training.baseline import released_baseline
from dpvision.training.callbacks import RunCallback, stop_on_signals
from dpvision.training.declarations import own_test_images
from dpvision.training.defaults import Choice
from dpvision.training.notebook import ShownCertificate, result_table
from dpvision.training.trainer import Outcome, Session, measure, run_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIRST_FIGURES = (
    "accuracy",
    "mean_auc",
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
    """The result of a run that ended or was stopped.

    Attributes:
        run: the run folder.
        outcome: whether the plan was finished, the budget spent or the run stopped.
        certificate: content of ``certificate.json``.
        metrics: content of ``metrics.json``.
        train_seconds: time spent in steps.
        own_model: the code of the user's own model, if it was given to this call.
    """

    run: Path
    outcome: Outcome
    certificate: dict[str, Any]
    metrics: dict[str, Any]
    train_seconds: float
    own_model: object | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        """Name the run with its most important values; the whole content is in the attributes."""
        values = ", ".join(f"{name}={_shown(value)}" for name, value in self.figures().items() if _is_short(value))
        return f"RunResult(run={str(self.run)!r}, {values})"

    @property
    def report(self) -> Path:
        """The HTML report, release/report.html; written if it is not there yet."""
        from dpvision.release.report import write_report  # imports matplotlib

        page = self.run / "release" / REPORT
        return page if page.is_file() else write_report(self.run)

    @property
    def model(self) -> nn.Module:
        """The released model, loaded from the run: ``dpvision.load(run).model``.

        Raises:
            ArgumentError: the run was resumed, or trained in several processes, and its model is the user's own: name
                it in ``dpvision.load(run, model=…)``. Or the model was trained in an own loop: use the object itself.
        """
        return load_model(self.run, model=self.own_model).model

    def plot(self) -> Figure:
        """Draw the score on public test data over epsilon, or over steps without privacy, as a matplotlib figure.

        Raises:
            ArgumentError: nothing was measured while the run trained.
        """
        from matplotlib.figure import Figure

        curve = [point for point in self.metrics["curve"] if any(name in point for name in _CURVES)]
        if not curve:
            raise ArgumentError("nothing was measured while the run trained, so there is no curve to plot.")
        name = next(name for name in _CURVES if name in curve[0])
        x = "step" if self.certificate["epsilon"] is None else "epsilon"
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.add_subplot(xlabel=x, ylabel=f"test {name.replace('_', ' ')}")
        axes.plot([point[x] for point in curve], [point[name] for point in curve], "o-")
        return figure

    def _repr_html_(self) -> str:
        """Show the result in a notebook."""
        return result_table(self.certificate, self.metrics, {"report": self.report, "run": self.run})

    def figures(self) -> dict[str, Any]:
        """The most important values: metrics, epsilon, delta, steps, outcome."""
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


_CURVES = ("accuracy", "dice", "mean_auc")


def _is_short(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def reported(result: RunResult) -> RunResult:
    """Write the report of a result, and return the result."""
    from dpvision.release.report import write_report  # imports matplotlib

    write_report(result.run)
    return result


def run_to_release(
    session: Session, callback: RunCallback, *, choices: tuple[Choice, ...] = (), notes: Iterable[str] = ()
) -> RunResult:
    """Take the remaining steps and write the release; the folder is unlocked afterwards.

    Args:
        session: a started or resumed run.
        callback: told about progress.
        choices: settings that were filled in, for the callback.
        notes: messages for the callback before the first step.
    """
    with session.folder:
        name = required(session.config.model, "model").name
        callback.started(name=name, steps=session.total_steps, done=session.step, choices=choices)
        for note in notes:
            callback.message(note)
        keep_freed_memory()
        session.folder.failure_path.unlink(missing_ok=True)
        with stop_on_signals() as stop:
            try:
                outcome = run_steps(session, callback, stop)
                session.final = session.final or measure(session)  # the last step of a plan is evaluated already
                session.save_checkpoint()
                return write_release(session, outcome=outcome)
            except DPVisionError as error:
                session.folder.write_unsafe("failure", {"error": str(error)})  # shows `dpvision runs` that it failed
                raise
            finally:
                callback.finished()


def write_release(session: Session, *, outcome: Outcome) -> RunResult:
    """Write the release folder.

    Guarantee: refused if a parameter was changed by anything but the private step.
    """
    session.optimizer.check_untouched()
    metrics = metrics_of(session)
    certificate = publish(
        session.folder,
        session.ledger,
        mechanism=session.config.mechanism if session.config.privacy.enabled else None,
        hand_seeded=session.keys.hand_seeded,
        weights=released_weights(session),
        config=session.config.public().to_json(),
        data=public_description(session),
        metrics=metrics,
    )
    shown = example_file(session)
    if shown is not None:
        session.folder.add_to_release(EXAMPLES, shown)
    # How long the draws took depends on their sizes, which are private: not part of the release.
    session.folder.write_unsafe("timing", {"train_seconds": session.seconds})
    own_model = None if session.code.model is None else session.code.model.value
    return RunResult(session.folder.root, outcome, ShownCertificate(certificate), metrics, session.seconds, own_model)


def publish(
    folder: RunFolder,
    ledger: Ledger,
    *,
    mechanism: Mechanism | None,
    hand_seeded: bool,
    weights: dict[str, Tensor],
    config: str,
    data: dict[str, Any],
    metrics: dict[str, Any],
) -> dict[str, Any]:
    """Commit the ledger to the release, build the certificate, and write the release folder; return the certificate."""
    content = weights_bytes(weights)
    released = ReleaseFacts(
        weights_sha256=sha256_hex(content), config_sha256=sha256_hex(config.encode()), data=data, software=software()
    )
    ledger.commit_release(
        weights_sha256=released.weights_sha256, config_sha256=released.config_sha256, data=released.data
    )
    certificate = build_certificate(
        ledger=read_ledger(folder.ledger_path), mechanism=mechanism, hand_seeded=hand_seeded, release=released
    )
    pages = {
        CERTIFICATE_PAGE: render_certificate_page(certificate),
        CARD: model_card(certificate, metrics=metrics, config=json.loads(config)),
    }
    folder.write_release(weights=content, certificate=certificate, metrics=metrics, config=config, pages=pages)
    return certificate


def public_description(session: Session) -> dict[str, Any]:
    """Declared facts about the data; nothing that was counted in it."""
    return {
        "source": session.config.data.name,
        "class_names": list(session.splits.train.class_names),
        "image_shape": list(session.splits.train.image_shape),
        "num_units": session.config.plan.num_units,
    }


def released_weights(session: Session) -> dict[str, Tensor]:
    """Parameters (averaged ones where there are any) and buffers by name."""
    state = dict(session.model.state_dict())
    averaged = session.optimizer.averaged_parameters()
    return state if averaged is None else {**state, **averaged}


def software() -> dict[str, str]:
    """Versions of the software that computed the run."""
    names = ("dpvision", "torch", "dp-accounting", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def metrics_of(session: Session) -> dict[str, Any]:
    """Metrics on the public test split, and the curve."""
    averaged = session.optimizer.averaged_parameters() is not None
    final_metrics = {} if session.final is None else session.final.to_dict()
    last = session.curve[-1] if session.curve else {}
    compared = released_baseline(session.folder, session.config)
    raw = {"raw_weights": last["raw"]} if last.get("step") == session.step and "raw" in last else {}
    own = own_test_images(session.config, session.splits)
    whose = "own images without an epsilon" if own else "declared public"
    return {
        "task": session.config.task,
        "curve": session.curve,
        "final": {
            **final_metrics,
            "evaluated_on": f"{session.splits.test.name}, {whose}",
            "weights": "averaged" if averaged else "raw",
            **raw,
        },
        **({} if compared is None else {"baseline": compared}),
    }


MOST_OF_A_RANK = 3
_AT_A_TIME = 32


def example_file(session: Session) -> bytes | None:
    """Encode example images with their masks, of a run that may show any; None otherwise.

    Guarantee: every pixel comes from the test set that the user named, or from the released weights applied to it.
    """
    test = session.splits.test
    if not may_show_images(session.config) or session.splits.held_out or not test.per_pixel:
        return None
    dice = torch.cat(
        [
            dice_of_images(_predicted(session, test.images[start : start + _AT_A_TIME]), truth, test.num_classes)
            for start, truth in zip(range(0, test.num_rows, _AT_A_TIME), test.labels.split(_AT_A_TIME), strict=True)
        ]
    )
    chosen = choose_rows(dice, test)
    rows = [row for _, row in chosen]
    predicted = _predicted(session, test.images[rows])
    return examples_bytes(
        [
            Example(
                rank=rank,
                dice=float(dice[row]),
                owner=None if test.owners is None else str(test.owners[row]),
                image_CHW=test.images[row].numpy(),
                truth_HW=test.labels[row].numpy(),
                predicted_HW=mask.numpy(),
            )
            for (rank, row), mask in zip(chosen, predicted, strict=True)
        ]
    )


def choose_rows(dice: Tensor, test: ImageStore) -> list[tuple[Rank, int]]:
    """Choose the best, median and worst rows by Dice: up to three of each, none twice, of different owners if possible.

    Rows with an empty mask are used only if there are no others: predicting nothing is perfect on them.

    Args:
        dice: Dice of each row, (N,).
        test: the public test split.
    """
    full: list[int] = test.labels.flatten(1).any(1).nonzero()[:, 0].tolist() or list(range(test.num_rows))
    order = sorted(full, key=lambda row: (-float(dice[row]), row))
    place = {row: number for number, row in enumerate(order)}
    count = max(1, min(MOST_OF_A_RANK, len(order) // 3))
    owners = test.owners
    best = _of_different_owners(order, owners, count)
    left = [row for row in order if row not in best]
    worst = _of_different_owners(left[::-1], owners, count)
    left = [row for row in left if row not in worst]
    nearest = sorted(left, key=lambda row: (abs(place[row] - len(order) // 2), row))
    median = sorted(_of_different_owners(nearest, owners, count), key=place.__getitem__)
    ranks: list[tuple[Rank, list[int]]] = [("best", best), ("median", median), ("worst", worst)]
    return [(rank, row) for rank, rows in ranks for row in rows]


def _of_different_owners(rows: Sequence[int], owners: Sequence[str] | None, count: int) -> list[int]:
    """Take the first ``count`` rows; a second row of an owner only if no other owner is in the first quarter."""
    if owners is None:
        return list(rows[:count])
    near = rows[: max(count, len(rows) // 4)]
    seen: set[str] = set()
    first, again = [], []
    for row in near:
        (again if owners[row] in seen else first).append(row)
        seen.add(owners[row])
    return [*first, *again][:count]


def _predicted(session: Session, images: Tensor) -> Tensor:
    """Masks of the released weights, (N, H, W)."""
    averaged = session.optimizer.averaged_parameters()
    return predict_masks(session.model, images, session.normalisation, parameters=averaged)
