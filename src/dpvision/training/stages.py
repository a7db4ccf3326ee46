"""What learns in which steps, and what the engine runs to train it.

The features of a run's pictures: computed once, or read from the disk.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from dpvision import kernels
from dpvision.config import RunConfig, ViewsConfig, required
from dpvision.data import Features, ImageStore, Normalisation, cache_folder, extract, kept_features
from dpvision.gradients.ordinary import fused_forward
from dpvision.models import split
from dpvision.training.callbacks import RunCallback
from dpvision.training.initial_weights import trained_names
from dpvision.training.prepare import RunSplits
from dpvision.training.run_fingerprint import code_digest

FEATURE_BYTES = 4 * 2**30
"""More than this is not kept in memory as features: a public limit, so that no row count decides how it is computed."""


@final
@dataclass(frozen=True, eq=False)
class Stage:
    """Steps that train the same parameters. ``network`` is what is trained: on pictures, or on what ``front`` makes
    of them, in numbers of ``dtype``. Its parameters are the model's own, under the model's names.
    """

    first_step: int
    trained: frozenset[str]
    network: nn.Module
    backbone: nn.Module | None = None
    dtype: torch.dtype = torch.float32
    mirrored: bool = False


def training_stages(model: nn.Module, config: RunConfig, example: Tensor) -> tuple[Stage, ...]:
    """The phases of a run, whose model is left with the first one's parameters to train.

    ``example`` is a few made-up rows. What a front makes of pictures is kept only where pictures are shown as they
    are, or each with its mirror image; a random view is another picture every time. Only the first phase uses it.
    """
    (first_step, trained), *later = _stretches(model, config)
    first = _phase(model, config, example, first_step, trained)
    set_trained(model, first)
    # The engine keeps one plan per module: a further phase, which runs the whole model again, needs one of its own.
    return (first, *(Stage(step, names, copy.copy(model)) for step, names in later))


def set_trained(model: nn.Module, phase: Stage) -> None:
    """Let exactly the phase's parameters require gradients."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in phase.trained)


def stage_at(phases: Sequence[Stage], step: int) -> Stage:
    """The phase that takes ``step``, counted from zero."""
    return [phase for phase in phases if phase.first_step <= step][-1]


def mirrored(views: ViewsConfig) -> bool:
    """Whether a picture is shown with its mirror image, both in every step: two views that differ by a flip alone."""
    return views.count == 2 and views.flip > 0 and views == ViewsConfig(count=2, flip=views.flip, padding=views.padding)


def _stretches(model: nn.Module, config: RunConfig) -> list[tuple[int, frozenset[str]]]:
    """First step and trained parameters of each phase."""
    transfer = config.transfer
    if transfer is None:
        return [(0, frozenset(name for name, value in model.named_parameters() if value.requires_grad))]
    if transfer.trained == "head_then_all":
        return [(0, trained_names(model, "head")), (transfer.head_steps or 0, trained_names(model, "all"))]
    return [(0, trained_names(model, transfer.trained, stages=transfer.stages))]


def _phase(model: nn.Module, config: RunConfig, example: Tensor, first: int, trained: frozenset[str]) -> Stage:
    whole = Stage(first, trained, model)
    as_it_is = config.views == ViewsConfig(padding=config.views.padding)
    # Maps are as large as pictures: there is nothing to gain from keeping them.
    if config.task == "segmentation" or config.cache_features == "off" or not (as_it_is or mirrored(config.views)):
        return whole
    set_trained(model, whole)
    cut = split(model, example)
    if cut is None:
        return whole
    dtype = _dtype(features_of(cut.backbone, example)[0].numel() * config.views.count, config)
    if dtype is None:
        return whole
    return Stage(first, trained, cut.rest, cut.backbone, dtype, mirrored(config.views))


def features_of(front: nn.Module, inputs: Tensor) -> Tensor:
    """What the front makes of inputs, in evaluation mode; the front is left as it was."""
    with torch.no_grad():
        return copy.deepcopy(front).eval()(inputs)


def _dtype(numbers_per_row: int, config: RunConfig) -> torch.dtype | None:
    """How precisely features are kept: in full, in half, or not at all. Decided by declared numbers only."""
    numbers = numbers_per_row * required(config.privacy.num_units, "num_units")
    numbers *= required(config.data.rows_per_unit, "rows_per_unit")
    if 4 * numbers <= FEATURE_BYTES:
        return torch.float32
    return torch.float16 if 2 * numbers <= FEATURE_BYTES else None


@final
@dataclass(frozen=True)
class RunFeatures:
    """Features of both splits: ``train`` is as private as the pictures, ``test`` is declared public."""

    train: Features
    test: Features


def run_features(
    phase: Stage,
    config: RunConfig,
    pictures: RunSplits,
    *,
    normalisation: Normalisation,
    device: str,
    callback: RunCallback,
) -> RunFeatures | None:
    """The features that the phase trains on, or None where it trains on pictures.

    Guarantee: nothing is released. A row's features are a function of its own picture and of public numbers.
    """
    if phase.backbone is None:
        return None
    front = copy.deepcopy(phase.backbone).eval()
    front.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (faster convolutions on a CPU)

    def of(store: ImageStore, *, mirrored: bool) -> Features:
        def compute() -> Features:
            made_up = normalisation.apply(_made_up(store.images).to(device))
            with quickly(front, made_up, config.feature_precision) as look:
                return extract(
                    look,
                    store.images,
                    normalisation,
                    mirrored=mirrored,
                    dtype=phase.dtype,
                    device=device,
                    progress=lambda what, done, total: callback.progressed(
                        f"{what} of {store.name}", done=done, total=total
                    ),
                )

        if config.cache_features != "disk":
            return compute()
        how = f"{phase.dtype} {mirrored} {config.feature_precision} {kernels.identity()}"
        key = _key(front, config, store, normalisation, how)
        return kept_features(_folder(config), key, compute)

    with config.performance.chosen_kernels():
        return RunFeatures(of(pictures.train, mirrored=phase.mirrored), of(pictures.test, mirrored=False))


def _made_up(images: Tensor) -> Tensor:
    """Two pictures of that shape out of nothing, on which ways to the features are compared: no private one decides."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (2, *images.shape[1:]), generator=generator, dtype=torch.uint8)


@contextmanager
def quickly(front: nn.Module, made_up: Tensor, precision: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """What to call for the front's outputs: its fast layers where they agree with it, or bfloat16 if asked for."""
    half = precision == "bfloat16"
    with torch.autocast(made_up.device.type, dtype=torch.bfloat16, enabled=half):
        if half:
            yield front
            return
        with fused_forward(front, made_up) as look:
            yield look


def _folder(config: RunConfig) -> Path:
    place = cache_folder() if config.data.data_dir is None else Path(config.data.data_dir)
    return place / "features"


def _key(front: nn.Module, config: RunConfig, store: ImageStore, normalisation: Normalisation, kind: str) -> str:
    """A digest of all that the features follow from; threads and processor have a say in their last bits alone."""
    model = "" if config.model is None else config.model.model_dump_json()
    facts = (code_digest(), torch.__version__, model, str(front), store.fingerprint(), str(normalisation), kind)
    digest = hashlib.sha256("\n".join(facts).encode())
    for name, value in (*front.named_parameters(), *front.named_buffers()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
