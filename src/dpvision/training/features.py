"""The features of a run's pictures: computed once, or read from the disk."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from dpvision import native
from dpvision.config import RunConfig
from dpvision.data import Features, ImageStore, Normalisation, cache_folder, extract, kept_features
from dpvision.grads.forward import quick_forward
from dpvision.training.binding import code_digest
from dpvision.training.phases import Phase
from dpvision.training.prepare import Pictures

Say = Callable[[str], None]
_TOLD = 5


@final
@dataclass(frozen=True)
class RunFeatures:
    """Features of both splits: ``train`` is as private as the pictures, ``test`` is declared public."""

    train: Features
    test: Features


def run_features(
    phase: Phase, config: RunConfig, pictures: Pictures, *, normalisation: Normalisation, device: str, say: Say
) -> RunFeatures | None:
    """The features that the phase trains on, or None where it trains on pictures.

    Guarantee: nothing is released. A row's features are a function of its own picture and of public numbers.
    """
    if phase.front is None:
        return None
    front = copy.deepcopy(phase.front).eval()
    front.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (faster convolutions on a CPU)

    def of(store: ImageStore, *, mirrored: bool) -> Features:
        def compute() -> Features:
            told = _Told(store.name, say)
            made_up = normalisation.apply(_made_up(store.images).to(device))
            with quickly(front, made_up, config.feature_precision) as look:
                return extract(
                    look,
                    store.images,
                    normalisation,
                    mirrored=mirrored,
                    dtype=phase.dtype,
                    device=device,
                    progress=told.progress,
                )

        if config.cache_features != "disk":
            return compute()
        how = f"{phase.dtype} {mirrored} {config.feature_precision} {native.identity()}"
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
        with quick_forward(front, made_up) as look:
            yield look


@final
class _Told:
    """Says now and then how far it is."""

    def __init__(self, name: str, say: Say) -> None:
        self._name, self._say, self._share = name, say, 0

    def progress(self, what: str, done: int, total: int) -> None:
        """Every fifth of the way, once."""
        share = done * _TOLD // max(1, total)
        if share > self._share:
            self._share = share
            self._say(f"{what} of {self._name}: {share * 100 // _TOLD} %")


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
