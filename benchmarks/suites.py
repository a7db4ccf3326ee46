"""Named lists of workloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from benchmarks.figures import Target
from benchmarks.workload import Workload
from dpvision import models
from dpvision.errors import ArgumentError

_FEW: Final = ("eager", "channels-last", "dpvision-native", "opacus-hooks", "opacus-ghost")
# Batches for which everybody fits into 16 GiB together and a step takes a few seconds at most on two cores.
_USUAL_BATCH: Final = 64
_CATALOGUE_BATCH: Final = {
    "linear": 1024,
    "shoefit_cnn": 256,
    "doermann_cnn": 256,
    "scatter_linear": 256,
    "scatter_cnn": 256,
    "wrn40_4": 32,
    "wrn28_10": 16,
    "resnet34": 16,
    "resnet50": 8,
    "scaleresnet50": 8,
    "densenet121": 8,
    "efficientnet_b0": 8,
    "efficientnet_lite0": 8,
    "smoothnet": 32,
    "wrn16_4": 32,
    "scalewrn16_4": 32,
    "nf_resnet50": 8,
    "nf_resnet101": 8,
    "nf_resnet152": 4,
    "nf_resnet200": 4,
    "nfnet_f0": 4,
    "nfnet_f3": 4,
    "unet9": 8,
    "scaleunet9": 8,
    "linknet9": 8,
    "scalelinknet9": 8,
}
_CATALOGUE_SIZE: Final = {"unet9": 64, "scaleunet9": 64, "linknet9": 64, "scalelinknet9": 64, "nfnet_f3": 160}
_SCALED_BATCHES: Final = (256, 1024, 4096, 16_384)


@final
@dataclass(frozen=True, kw_only=True)
class Item:
    """One workload of a suite, what is demanded of it, and who takes part (None: everybody)."""

    suite: str
    workload: Workload
    target: Target | None = None
    contenders: tuple[str, ...] | None = None


def suite(name: str) -> tuple[Item, ...]:
    """The workloads of that name."""
    if name not in _SUITES:
        raise ArgumentError(f"suite must be one of {', '.join(_SUITES)}, got {name!r}.")
    return _SUITES[name]()


def _targets() -> tuple[Item, ...]:
    # Peers take minutes a step at these sizes: suite "peers" has them at smaller ones.
    ours = ("eager", "channels-last", "dpvision-native", "dpvision-unclipped")

    def item(target: Target, model: str, *, batch: int, views: int = 1, **picture: int) -> Item:
        workload = Workload.of(model, batch=batch, views=views, **picture)
        chosen = ours if target.plain_ratio is None else (*ours, "dpvision-plain")
        return Item(suite="targets", workload=workload, target=target, contenders=None if batch >= 512 else chosen)

    return (
        item(Target(ratio=0.40, memory_ratio=0.8, plain_ratio=1.15), "scaleresnet9", batch=256),
        item(Target(ratio=0.55, memory_ratio=0.8, plain_ratio=1.3), "wrn16_4", batch=256),
        item(Target(ratio=0.60, memory_ratio=0.8), "wrn16_4", batch=64, views=4),
        item(Target(ratio=0.80, memory_ratio=1.0), "smoothnet", batch=256),
        item(Target(ratio=0.70, memory_ratio=1.0), "resnet9", batch=32, image_size=160),
        item(Target(ratio=0.70, memory_ratio=1.0), "unet9", batch=32, image_size=128),
        item(Target(ratio=1.0), "shoefit_cnn", batch=256),
        item(Target(ratio=1.0), "linear", batch=4096, image_size=1, in_channels=2048),
    )


def _peers() -> tuple[Item, ...]:
    sizes = {"shoefit_cnn": 256, "scaleresnet9": 64, "wrn16_4": 32}
    return tuple(
        Item(
            suite="peers",
            workload=Workload.of(model, batch=batch),
        )
        for model, batch in sizes.items()
    )


def _catalogue() -> tuple[Item, ...]:
    return tuple(
        Item(
            suite="catalogue",
            workload=Workload.of(
                entry.name,
                batch=_CATALOGUE_BATCH.get(entry.name, _USUAL_BATCH),
                image_size=_CATALOGUE_SIZE.get(entry.name),
            ),
            contenders=_FEW,
        )
        for entry in models.catalogue()
    )


def _scaling() -> tuple[Item, ...]:
    return tuple(
        Item(
            suite="scaling",
            workload=Workload.of("shoefit_cnn", batch=batch),
            contenders=("eager", "channels-last", "dpvision-plain", "dpvision-native"),
        )
        for batch in _SCALED_BATCHES
    )


def _quick() -> tuple[Item, ...]:
    return (
        Item(suite="quick", workload=Workload.of("shoefit_cnn", batch=64), contenders=_FEW),
        Item(suite="quick", workload=Workload.of("scaleresnet9", batch=8), contenders=_FEW),
    )


_SUITES: Final[dict[str, Callable[[], tuple[Item, ...]]]] = {
    "targets": _targets,
    "peers": _peers,
    "catalogue": _catalogue,
    "scaling": _scaling,
    "quick": _quick,
}
SUITES: Final = tuple(_SUITES)
