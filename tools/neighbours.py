"""Random neighbouring datasets through the real step path: how far does one unit move the clipped sum?

Usage: python -m tools.neighbours [--pairs 10000] [--seed 0]

Each setting is a small random network (convolutions of all kinds, norms, weight standardisation, tied layers, layers
without a rule, a segmentation network), a way of clipping, a number of rows and views a unit, kernels on or off, a
micro-batch size, and weights and images that may be extreme. Units are drawn by ``ImageBatches`` and summed by
``clipped_sum_of_batch``, as a training step does it, once without and once with one more unit. Prints the largest
distance of two neighbouring sums in units of ``clip_norm``, and fails if it exceeds 1 + 1e-5, or if a unit that was not
drawn moved anything at all.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from dpvision import models
from dpvision.config import Performance
from dpvision.data import ImageBatches, ImageStore, Normalisation, ViewsConfig
from dpvision.gradients.clipped_sum import clipped_sum_of_batch
from dpvision.gradients.plan import plan_for
from dpvision.models.layers import ScalarGain, WSConv2d
from dpvision.models.losses import RowLoss, loss_for
from dpvision.privacy.mechanism import CLIPPINGS, Clipping, Mechanism
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import ClippedSum, Microbatch

ALLOWED = 1 + 1e-5
SIDE, SIDE_OF_MASKS, CHANNELS, CLASSES = 8, 16, 2, 3
MOST_ROWS, MANY_UNITS, EXTRAS_PER_DRAW = 24, 300, 5


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """One network and all that surrounds it."""

    name: str
    network: nn.Module
    loss: RowLoss
    per_pixel: bool
    clip_norm: float
    clipping: Clipping
    rows_per_unit: int
    views: ViewsConfig
    performance: Performance
    normalisation: Normalisation
    sample_rate: float

    @property
    def side(self) -> int:
        """Pixels of a picture on each side."""
        return SIDE_OF_MASKS if self.per_pixel else SIDE


@final
@dataclass
class Found:
    """What was seen. ``farthest`` is in units of the clip norm."""

    pairs: int = 0
    joined: int = 0
    clipped: int = 0
    silent: int = 0
    farthest: float = 0.0
    failures: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


# ---- networks


class Token(nn.Module):
    """A bare parameter: no rule knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4, 1, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        """Scaled by the parameter."""
        return x * self.token


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Both of them."""
        return self.second(torch.tanh(self.first(x)))


class Residual(nn.Module):
    """A sum of a block and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        return x + self.inner(x)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "conv 5×5": lambda: nn.Conv2d(4, 4, 5, padding=2, bias=False),
    "conv 1×1": lambda: nn.Conv2d(4, 4, 1),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "strided": lambda: nn.Sequential(nn.Conv2d(4, 6, 2, stride=2), nn.ConvTranspose2d(6, 4, 2, stride=2)),
    "standardised": lambda: WSConv2d(4, 4, 3),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "norm and activation": lambda: nn.Sequential(nn.GroupNorm(1, 4), nn.Mish()),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "layer norm": lambda: nn.LayerNorm([SIDE, SIDE]),
    "columns": lambda: nn.Linear(SIDE, SIDE),
    "prelu": lambda: nn.PReLU(4),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gain": lambda: ScalarGain(0.5),
    "pool": lambda: nn.MaxPool2d(3, stride=1, padding=1),
    "residual": Residual,
    "tied": Tied,
    "token": Token,
}


def random_network(chance: random.Random) -> tuple[str, nn.Module, bool]:
    """Its name, the network, and whether it gives one answer a pixel."""
    kind = chance.choice(("blocks", "blocks", "blocks", "blocks", "linear", "features", "masks"))
    if kind == "linear":
        return kind, nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * SIDE * SIDE, CLASSES)), False
    if kind == "features":
        hidden = chance.choice((5, 64))
        wide = nn.Linear(CHANNELS * SIDE * SIDE, hidden)
        return kind, nn.Sequential(nn.Flatten(), wide, nn.Tanh(), nn.Linear(hidden, CLASSES)), False
    if kind == "masks":
        name = chance.choice(("unet9", "scalelinknet9"))
        options: dict[str, Any] = {"width": 4, "head": "conv"}
        return name, models.create(name, num_classes=1, in_channels=CHANNELS, seed=0, **options), True
    names = [chance.choice(sorted(BLOCKS)) for _ in range(chance.randint(1, 5))]
    layers = [nn.Conv2d(CHANNELS, 4, 3, padding=1), *(BLOCKS[name]() for name in names)]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)]
    return ", ".join(names), nn.Sequential(*layers, *head), False


def random_setting(chance: random.Random) -> Setting:
    """All choices of one setting."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(chance.randrange(2**31))
        name, network, per_pixel = random_network(chance)
        # Weights so large or small that gradients vanish, explode or overflow are weights, too.
        scale = chance.choice((1.0, 1.0, 1.0, 0.0, 1e-8, 30.0, 1e12, 1e30))
        with torch.no_grad():
            for parameter in network.parameters():
                if chance.random() < 0.5:
                    parameter.mul_(scale)
    views = chance.choice((0, 0, 2, 3))
    std = chance.choice((0.3, 0.3, 1e-4, 1e6))
    return Setting(
        name=f"{name} × {scale:g}",
        network=network.train(),
        loss=loss_for("segmentation", "dice_cross_entropy", 2) if per_pixel else _steep(chance.choice((1.0, 40.0))),
        per_pixel=per_pixel,
        clip_norm=10 ** chance.uniform(-4, 3),
        clipping=chance.choice(CLIPPINGS),
        rows_per_unit=chance.choice((1, 1, 2, 4)),
        views=ViewsConfig(count=views, crop_padding=1, flip=0.5, rotation=20.0) if views else ViewsConfig(),
        performance=Performance(
            kernels=chance.choice(("auto", "plain")), microbatch_size=chance.choice((None, 1, 3, 7, 40))
        ),
        normalisation=Normalisation(mean=(0.5,) * CHANNELS, std=(std,) * CHANNELS, source="fixed"),
        sample_rate=chance.choice((0.3, 0.8, 1.0)),
    )


def _steep(factor: float) -> RowLoss:
    plain = loss_for("classification", "cross_entropy", CLASSES)
    return plain if factor == 1 else lambda outputs, targets: factor * plain(outputs, targets)


# ---- data


def random_store(setting: Setting, owners: list[int], seed: int) -> ImageStore:
    """Pictures from ordinary to extreme, one row for each entry of ``owners``."""
    generator = torch.Generator().manual_seed(seed)
    rows, side = len(owners), setting.side
    images = torch.randint(0, 256, (rows, CHANNELS, side, side), generator=generator, dtype=torch.uint8)
    kinds = torch.randint(0, 4, (rows,), generator=generator)
    images[kinds == 0] = 0
    images[kinds == 1] = 255
    images[kinds == 2] = images[kinds == 2] // 128 * 255
    if setting.per_pixel:
        labels = torch.randint(0, 2, (rows, side, side), generator=generator, dtype=torch.uint8)
        labels[kinds == 0] = 0
    else:
        labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return ImageStore(
        images=images,
        labels=labels,
        class_names=("background", "foreground") if setting.per_pixel else ("a", "b", "c"),
        unit_of_row=torch.tensor(owners, dtype=torch.int64),
        name="made up",
        row_names=[str(row) for row in range(rows)],
    )


def joined(store: ImageStore, more: ImageStore) -> ImageStore:
    """The store and one unit more, at its end."""
    return ImageStore(
        images=torch.cat([store.images, more.images]),
        labels=torch.cat([store.labels, more.labels]),
        class_names=store.class_names,
        unit_of_row=torch.cat([store.unit_of_row, torch.full((len(more.images),), store.num_units)]),
        name=store.name,
        row_names=[str(row) for row in range(len(store.images) + len(more.images))],
    )


# ---- the step


def sum_of(setting: Setting, store: ImageStore, keys: Keys, step: int) -> tuple[ClippedSum, int]:
    """The clipped sum of one draw, as a training step makes it, and who joined last."""
    mechanism = Mechanism(
        num_units=100,
        expected_batch_size=100 * setting.sample_rate,
        clip_norm=setting.clip_norm,
        noise_multiplier=1.0,
        steps=1000,
        clipping=setting.clipping,
    )
    draws = ImageBatches(
        mechanism=mechanism,
        store=store,
        normalisation=setting.normalisation,
        keys=keys,
        rows_per_unit=setting.rows_per_unit,
        views=setting.views,
    )
    clipped = clipped_sum_of_batch(
        setting.network,
        setting.loss,
        draws.batch(step),
        clip_norm=mechanism.clip_norm,
        clipping=mechanism.clipping,
        performance=setting.performance,
    )
    units = draws.units(step)
    return clipped, int(units[-1]) if len(units) else -1


def settle(setting: Setting) -> None:
    """Let the engine decide on made-up rows how it computes, as a run does before it begins."""
    generator = torch.Generator().manual_seed(0)
    rows, side = setting.rows_per_unit * setting.views.count, setting.side
    inputs = torch.randn((1, CHANNELS, side, side), generator=generator).repeat_interleave(rows, 0)
    targets = torch.zeros((rows, side, side) if setting.per_pixel else (rows,), dtype=torch.int64)
    weights = torch.full((1, rows), 1 / rows, dtype=torch.float64)
    plan_for(setting.network, setting.loss, Microbatch(inputs, targets, weights), setting.performance)


def distance(one: ClippedSum, other: ClippedSum) -> float:
    """L2 over all parameters together; infinite where anything is not finite."""
    squares = [(one.gradients[name] - other.gradients[name]).double().square().sum() for name in one.gradients]
    found = math.sqrt(float(sum(squares)))
    return found if math.isfinite(found) else math.inf


def try_setting(setting: Setting, chance: random.Random, found: Found, *, pairs: int) -> None:
    """Up to ``pairs`` neighbouring pairs under one setting."""
    settle(setting)
    keys = Keys.from_seed(chance.randrange(2**62))
    rows = setting.rows_per_unit * setting.views.count * (8 if setting.per_pixel else 1)
    many = rows == 1 and chance.random() < 0.3
    units = range(chance.randint(1, MANY_UNITS if many else max(2, MOST_ROWS // rows)))
    owners = [unit for unit in units for _ in range(chance.randint(1, 2 * setting.rows_per_unit))]
    store = random_store(setting, owners, chance.randrange(10**9))
    for step in range(0, pairs, EXTRAS_PER_DRAW):
        without, _ = sum_of(setting, store, keys, step)
        for _ in range(min(EXTRAS_PER_DRAW, pairs - step)):
            more = random_store(setting, [0] * chance.randint(1, 2 * setting.rows_per_unit), chance.randrange(10**9))
            with_one, last = sum_of(setting, joined(store, more), keys, step)
            note(found, setting, distance(with_one, without) / setting.clip_norm, joins=last == store.num_units)


def note(found: Found, setting: Setting, moved: float, *, joins: bool) -> None:
    """Count one pair."""
    found.pairs += 1
    found.joined += joins
    found.clipped += joins and moved > 0.999
    found.silent += joins and moved == 0
    found.farthest = max(found.farthest, moved)
    found.kinds[f"{setting.clipping}, {setting.performance.kernels}"] += 1
    if not moved <= (ALLOWED if joins else 0.0):
        described = f"{setting.name}; {setting.clipping}; {setting.rows_per_unit} rows; {setting.views}"
        found.failures.append(f"moved by {moved:.9f} clip norms, joined: {joins}; {described}; {setting.performance}")


def experiment(*, pairs: int, seed: int = 0, pairs_per_setting: int = 80, say: Callable[[str], None] = print) -> Found:
    """Pairs under ever new settings."""
    from dpvision.errors import PrivacyError

    chance, found, settings = random.Random(seed), Found(), 0  # noqa: S311 - networks, not secrets
    while found.pairs < pairs:
        setting = random_setting(chance)
        settings += 1
        try:
            try_setting(setting, chance, found, pairs=min(pairs_per_setting, pairs - found.pairs))
        except PrivacyError as error:
            say(f"refused: {setting.name}: {error}")  # a network that can't be trained privately sums nothing
        if settings % 20 == 0:
            seen = f"farthest {found.farthest:.9f}, failures {len(found.failures)}"
            say(f"{settings} settings, {found.pairs} pairs, {seen}")
    return found


def main() -> int:
    """Run the experiment and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = experiment(pairs=arguments.pairs, seed=arguments.seed, say=lambda text: print(text, flush=True))
    for failure in found.failures[:20]:
        print(failure)
    print(
        f"{found.pairs} neighbouring pairs; the unit joined {found.joined} times, {found.clipped} times at full length;"
    )
    print(f"{found.silent} times its gradient was zero or not finite, and it moved nothing.")
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(found.kinds.items())))
    print(f"farthest: {found.farthest:.9f} clip norms; beyond {ALLOWED}: {len(found.failures)}")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
