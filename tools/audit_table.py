"""Does the audit find broken training? Every breakage is planted many times, and each part of the audit has its say.

    python -m tools.audit_table --repeats 20

A breakage is planted from outside, by replacing one function of the step path while an audit runs: there is no switch
for it in the package. The model is linear, on synthetic images of 8×8 pixels. A repeat of all cases
takes about twenty seconds of a core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from dpvision.audit.audited_runs import Subject, config_of_model, subject_of_config
from dpvision.audit.canaries import CanaryAudit, audit_with_canaries
from dpvision.audit.mechanism_check import check_mechanism
from dpvision.config import ViewsConfig
from dpvision.data.batches import DrawnBatch
from dpvision.privacy import private_step, values
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.private_step import Privatizer
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import ClippedSum, Microbatch, PrivateGrad

CANARIES = 1600
NOISE_DRAWS = 10_000
PAIRS = 3


@contextmanager
def correct() -> Iterator[None]:
    """Nothing is broken."""
    yield


@contextmanager
def noise_divided(factor: float) -> Iterator[None]:
    """Less noise than was charged; none at all if the factor is infinite."""
    real = private_step.noisy_mean

    def weaker(clipped: ClippedSum, mechanism: Mechanism, keys: Keys, **more: Any) -> PrivateGrad:
        if factor == float("inf"):
            means = {name: value / mechanism.divisor for name, value in clipped.gradients.items()}
            return PrivateGrad(means, more["step"], proof=values.PROOF_OF_NOISE)  # pyright: ignore[reportPrivateUsage]
        less = replace(mechanism, noise_multiplier=mechanism.noise_multiplier / factor)
        return real(clipped, less, keys, **more)

    with mock.patch.object(private_step, "noisy_mean", weaker):
        yield


@contextmanager
def clip_ignored() -> Iterator[None]:
    """Units are let through up to ten times the clip norm."""
    real = private_step.clipped_sum_of_batch

    def looser(*arguments: Any, clip_norm: float, **settings: Any) -> ClippedSum:
        return ClippedSum(real(*arguments, clip_norm=10 * clip_norm, **settings).gradients, clip_norm)

    with mock.patch.object(private_step, "clipped_sum_of_batch", looser):
        yield


@contextmanager
def drawn_too_often(rate: Callable[[float], float]) -> Iterator[None]:
    """Units join more often than was charged."""
    from dpvision.privacy import sampling

    real = sampling.bernoulli
    with mock.patch.object(sampling, "bernoulli", lambda words, charged: real(words, rate(charged))):
        yield


@contextmanager
def charges_lost() -> Iterator[None]:
    """Every other step is not charged: twice as many steps as the ledger knows."""
    real = Privatizer.charge

    def forgetful(self: Privatizer, sampling: Any, *, step: int) -> None:
        if step % 2 == 0:  # numbered as if nothing were missing: the ledger refuses gaps
            real(self, sampling, step=step // 2)
        self._charged = step

    with mock.patch.object(Privatizer, "charge", forgetful):
        yield


@contextmanager
def views_one_by_one() -> Iterator[None]:
    """Every view of an image is clipped by itself."""
    real = DrawnBatch.microbatches

    def apart(self: DrawnBatch, units: int) -> Iterator[Microbatch]:
        for piece in real(self, units):
            alone = piece.row_weights_UR.ne(0).to(piece.row_weights_UR.dtype).reshape(-1, 1)
            yield replace(piece, row_weights_UR=alone)

    with mock.patch.object(DrawnBatch, "microbatches", apart):
        yield


@dataclass(frozen=True)
class Case:
    """A breakage, and the settings that it needs to show."""

    name: str
    breakage: Callable[[], Any]
    steps: int = 1
    views: int = 1

    def subject(self) -> Subject:
        """The small plan of ``config_of_model``, with as many more steps and views."""
        config = config_of_model("linear", {})
        privacy = config.privacy.model_copy(update={"steps": self.steps * (config.privacy.steps or 0)})
        views = ViewsConfig(count=self.views, flip=0.5) if self.views > 1 else ViewsConfig()
        return subject_of_config(config.model_copy(update={"privacy": privacy, "views": views}))


CASES = (
    Case("correct", correct),
    Case("no noise", lambda: noise_divided(float("inf"))),
    Case("noise ÷ 16", lambda: noise_divided(16)),
    Case("sensitivity × 10", clip_ignored),
    Case("q = 1, charged q", lambda: drawn_too_often(lambda _: 1.0)),
    Case("noise ÷ √2", lambda: noise_divided(2**0.5)),
    Case("q × 2", lambda: drawn_too_often(lambda rate: min(1.0, 2 * rate))),
    Case("steps × 2", charges_lost, steps=2),
    Case("4 views clipped one by one", views_one_by_one, views=4),
)


def with_canaries(case: Case, seed: int) -> dict[str, Any]:
    """The canary audit of one broken run."""
    with case.breakage():
        return _canary_figures(audit_with_canaries(case.subject(), canaries=CANARIES, keys=Keys.from_seed(seed)))


def with_checks(case: Case, seed: int) -> dict[str, Any]:
    """The mechanism test of the same."""
    with case.breakage():
        checks = check_mechanism(case.subject(), keys=Keys.from_seed(seed), draws=NOISE_DRAWS, pairs=PAIRS)
    return {"failed": [check.name for check in checks if not check.passed]}


PARTS = {"canaries": with_canaries, "mechanism": with_checks}


def _canary_figures(audit: CanaryAudit) -> dict[str, Any]:
    return {
        "claimed": audit.epsilon_claimed,
        "epsilon_lower": audit.bound.epsilon_lower,
        "largest_refutable": audit.bound.largest_refutable,
        "mu": audit.estimate.mu,
        "mu_lower": audit.estimate.mu_lower,
        "mu_claimed": audit.mu_claimed,
        "refuted": audit.refuted,
        "suspicious": audit.suspicious,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: how often each part of the audit found the breakage."""
    lines = [
        "| run | claimed ε | one-run bound: median (refuted) | claimed μ | estimate: median of μ and of its lower "
        "limit (above the claim) | mechanism test fails | checks that failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        own = [row for row in rows if row["case"] == case.name]
        runs, tests = ([row for row in own if row["part"] == part] for part in PARTS)
        if not runs:
            continue
        bound, mu, limit = (float(np.median([row[key] for row in runs])) for key in ("epsilon_lower", "mu", "mu_lower"))
        refuted, above, failed = (sum(bool(row[key]) for row in of) for key, of in _counted(runs, tests))
        names = sorted({name for row in tests for name in row["failed"]})
        lines.append(
            f"| {case.name} | {runs[0]['claimed']:.2f} | {bound:.2f} ({refuted} of {len(runs)}) "
            f"| {runs[0]['mu_claimed']:.2f} | {mu:.2f}, {limit:.2f} ({above} of {len(runs)}) "
            f"| {failed} of {len(tests)} | {', '.join(names) or 'none'} |"
        )
    largest = [row["largest_refutable"] for row in rows if row["part"] == "canaries"]
    if largest:
        lines.append(f"\nThe largest epsilon that the one-run bound could have refuted: {min(largest):.2f}.")
    return "\n".join(lines)


def _counted(runs: list[dict[str, Any]], tests: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    return [("refuted", runs), ("suspicious", runs), ("failed", tests)]


def main() -> None:
    """Run all cases; each finished repeat is kept in ``--log``, from which a second call goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="The first repeat: parts of a table can be made apart.")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--log", type=Path, default=Path("audit_table.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in arguments.log.read_text().splitlines()] if arguments.log.exists() else []
    done = {(row["part"], row["case"], row["seed"]) for row in rows}
    seeds = range(arguments.first, arguments.first + arguments.repeats)
    wanted = ((part, seed, case) for part in arguments.parts for seed in seeds for case in CASES)
    with arguments.log.open("a") as log:
        for part, seed, case in wanted:
            if (part, case.name, seed) not in done:
                rows.append({"part": part, "case": case.name, "seed": seed, **PARTS[part](case, seed)})
                log.write(json.dumps(rows[-1]) + "\n")
                log.flush()
    print(table(rows))


if __name__ == "__main__":
    main()
