"""The study of decision 0018: defaults for networks that the user names, the rule before against the rule now.

    python -m benchmarks.own_models fit --seeds 2 > fit.jsonl
    python -m benchmarks.own_models kept_out --seeds 2 > kept_out.jsonl
    python -m benchmarks.own_models table fit.jsonl kept_out.jsonl

Images are pooled to 14 or 16 pixels, so that a cell takes seconds on one core. Clipped sums are the package's own.
Sampling, and noise from torch's generator, are simulated: the accuracy is that of a private run, without its ledger.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.own_data.sources import BY_NAME, load_source
from dpvision.accounting import calibrate_noise_multiplier
from dpvision.config import Performance, parse_config
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.models import create
from dpvision.training.defaults import Facts, fill_open_settings, propose_steps

MOST_TEST = 1000
OLD: Final = ("nadam", 1e-3, 1.5)  # update rule, rate, clip norm
OLD_SHOEFIT: Final = ("sgd", 4.0, 0.5)
LOSS = nn.CrossEntropyLoss(reduction="none")


def _conv(inputs: int, outputs: int, *, stride: int = 1, act: type[nn.Module] | None = nn.ReLU) -> list[nn.Module]:
    """A 3×3 convolution, GroupNorm in groups of four channels, an activation."""
    norm = nn.GroupNorm(outputs // 4, outputs)
    return [nn.Conv2d(inputs, outputs, 3, stride, 1), norm, *([] if act is None else [act()])]


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Apply(nn.Module):
    """A function without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _attend(x: Tensor) -> Tensor:
    """Single-head attention of (N, tokens, query + key + value)."""
    query, key, value = x.chunk(3, -1)
    return (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1) @ value


def _next(width: int) -> nn.Module:
    """A ConvNeXt block."""
    depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
    wide = [nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1)]
    return Residual(depthwise, nn.GroupNorm(1, width), *wide)


def network(name: str, classes: int, channels: int, side: int) -> nn.Module:
    """The networks of the study; a name that is none of them is one of the catalogue."""
    half, quarter, w = (side + 1) // 2, (side + 3) // 4, 32
    place = torch.randn(1, (side // 4) ** 2, w, generator=torch.Generator().manual_seed(0))  # fixed positions
    flat, pool = nn.Flatten(), [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    parts: dict[str, Callable[[], list[nn.Module]]] = {
        "tutorial": lambda: [*_conv(channels, 16, stride=2, act=nn.Tanh), flat, nn.Linear(16 * half**2, classes)],
        "gn_cnn": lambda: [
            *_conv(channels, 16), nn.MaxPool2d(2), *_conv(16, 32), nn.MaxPool2d(2), *_conv(32, 64),
            nn.AdaptiveAvgPool2d(2), flat, nn.Linear(256, classes),
        ],
        "tanh_cnn": lambda: [
            nn.Conv2d(channels, 16, 5, 2, 2), nn.Tanh(), nn.Conv2d(16, 32, 3, 2, 1), nn.Tanh(), flat,
            nn.Linear(32 * quarter**2, 32), nn.Tanh(), nn.Linear(32, classes),
        ],
        "mlp": lambda: [
            flat, nn.Linear(channels * side**2, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes)
        ],
        "resnet": lambda: [
            *_conv(channels, 16, stride=2, act=nn.Mish), Residual(*_conv(16, 16), *_conv(16, 16, act=nn.Mish)),
            *_conv(16, 32, stride=2, act=nn.Mish), Residual(*_conv(32, 32), *_conv(32, 32, act=nn.Mish)),
            *pool, nn.Linear(32, classes),
        ],
        "convnext": lambda: [
            nn.Conv2d(channels, w, 4, 4), nn.GroupNorm(1, w), _next(w), _next(w), *pool, nn.LayerNorm(w),
            nn.Linear(w, classes),
        ],
        "lenet": lambda: [
            nn.Conv2d(channels, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(),
            nn.MaxPool2d(2), flat, nn.Linear(16 * (side // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, classes),
        ],
        "vit": lambda: [
            nn.Conv2d(channels, w, 4, 4), Apply(lambda x: x.flatten(2).transpose(1, 2)), Apply(lambda x: x + place),
            *[part for _ in range(2) for part in (
                Residual(nn.LayerNorm(w), nn.Linear(w, 3 * w), Apply(_attend), nn.Linear(w, w)),
                Residual(nn.LayerNorm(w), nn.Linear(w, 2 * w), nn.GELU(), nn.Linear(2 * w, w)),
            )],
            nn.LayerNorm(w), Apply(lambda x: x.mean(1)), nn.Linear(w, classes),
        ],
    }  # fmt: skip
    if name in parts:
        return nn.Sequential(*parts[name]())
    options = {"image_size": side} if name == "shoefit_cnn" else {}
    return create(name, num_classes=classes, in_channels=channels, seed=int(torch.randint(2**31, ())), **options)


@cache
def images(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Training and test images at about 16 pixels with a mean of 0 and a deviation of about 1, and class numbers."""
    source = BY_NAME[name]
    side = {"mnist": 28, "fashionmnist": 28, "digits": 8}.get(source.place, 32)
    data = load_source(source, side=side)
    parts = [(x.float() / 255 - 0.4) / 0.28 for x in (data.train_x[:10_000], data.test_x[:MOST_TEST])]
    train, test = parts if side == 8 else [functional.avg_pool2d(x, 2) for x in parts]
    train_y, test_y = torch.as_tensor(data.train_y[:10_000]), torch.as_tensor(data.test_y[:MOST_TEST])
    return train, train_y, test, test_y, data.num_classes


def run(net: str, source: str, units: int, epsilon: float, *, rule: str, seed: int) -> dict[str, Any]:
    """Train one network on one dataset by the rule "old" or "new"; test accuracy in percent."""
    x, y, test_x, test_y, classes = images(source)
    units = min(units, len(x))
    x, y = x[:units], y[:units]
    shape = (x.shape[1], x.shape[2], x.shape[3])
    named = net if net in ("shoefit_cnn", "resnet9") else f"{net}.py:make"
    asked = {"target_epsilon": epsilon, "num_units": units}
    config = parse_config({"data": {"source": "own"}, "model": {"name": named}, "privacy": asked})
    filled, _ = fill_open_settings(config, Facts(num_units=units, num_classes=classes, image_shape=shape))
    privacy, chosen = filled.privacy, filled.optimizer
    batch, steps, clip_norm, delta = privacy.expected_batch_size, privacy.steps, privacy.clip_norm, privacy.delta
    assert batch and steps and clip_norm and delta and chosen and chosen.learning_rate  # noqa: PT018
    kind, rate = chosen.name, chosen.learning_rate
    if rule == "old":
        kind, rate, clip_norm = OLD_SHOEFIT if net == "shoefit_cnn" else OLD
        steps = propose_steps(units, batch, epsilon)
    noise = calibrate_noise_multiplier(
        num_units=units, expected_batch_size=batch, steps=steps, target_epsilon=epsilon, delta=delta
    )
    torch.manual_seed(seed)
    model = network(net, classes, shape[0], shape[1])
    weights = dict(model.named_parameters())
    if kind == "sgd":
        momentum = 0.7 if rule == "old" else chosen.momentum
        optimizer = torch.optim.SGD(weights.values(), lr=rate, momentum=momentum)
    else:
        optimizer = torch.optim.NAdam(weights.values(), lr=rate)
    average = {name: value.detach().clone() for name, value in weights.items()}
    for step in range(steps):
        rows = (torch.rand(units) < batch / units).nonzero()[:, 0]
        drawn = Rows(x[rows], y[rows], 1)
        found = clipped_sum_of_batch(
            model, LOSS, drawn, clip_norm=clip_norm, performance=Performance(microbatch_size=128), own_code=False
        )
        for name, value in weights.items():
            value.grad = (found.gradients[name].float() + noise * clip_norm * torch.randn_like(value)) / batch
        optimizer.step()
        for name, value in weights.items():
            average[name].lerp_(value.detach(), 1 - min(0.95, (1 + step) / (10 + step)))
    model.load_state_dict(average, strict=False)
    with torch.no_grad():
        hits = 100 * float(model(test_x).argmax(1).eq(test_y).float().mean())
    return {"net": net, "source": source, "units": units, "epsilon": epsilon, "rule": rule, "seed": seed, "acc": hits}


def cells(part: str) -> list[tuple[str, str, int, float]]:
    """(network, dataset, units, epsilon) of a part of the study."""
    if part == "kept_out":
        nets = ("vit", "lenet", "tanh_cnn", "gn_cnn")
        plans = [("sign_digits", 1566, 3.0), ("fashionmnist", 1000, 3.0), ("fashionmnist", 300, 8.0)]
        plans += [("trashnet", 2000, 3.0), ("cifar100_coarse", 1000, 8.0), ("fashionmnist", 3000, 1.0)]
        return [(net, *plan) for plan in plans for net in nets]
    nets = ("tutorial", "gn_cnn", "tanh_cnn", "mlp", "resnet", "convnext", "shoefit_cnn")
    plans = [("mnist", 1000, 3.0), ("cifar10", 1000, 3.0), ("mnist", 300, 1.0), ("digits", 1000, 3.0)]
    plans += [("mnist_4_9", 300, 3.0), ("imagenette", 1000, 8.0)]
    return [(net, *plan) for plan in plans for net in nets]


def table(logs: list[Path]) -> str:
    """Markdown: for each dataset and plan, the mean accuracy of every network by the rule before and now."""
    found: dict[tuple[str, int, float], dict[str, dict[str, list[float]]]] = {}
    for row in (json.loads(line) for log in logs for line in log.read_text().splitlines()):
        nets = found.setdefault((row["source"], row["units"], row["epsilon"]), {})
        nets.setdefault(row["net"], {"old": [], "new": []})[row["rule"]].append(row["acc"])
    lines = []
    for (source, units, epsilon), nets in found.items():
        shown = [f"{net} {mean(by['old']):.0f} → {mean(by['new']):.0f}" for net, by in nets.items() if all(by.values())]
        lines.append(f"| {source}, {units:,} units, epsilon {epsilon:g} | {', '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Run a part of the study, or show the logs of earlier runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("fit", "kept_out", "table"))
    parser.add_argument("logs", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    if asked.what == "table":
        print(table(asked.logs))
        return
    torch.set_num_threads(1)
    for seed in range(asked.seeds):
        for cell in cells(asked.what):
            for rule in ("old", "new"):
                print(json.dumps(run(*cell, rule=rule, seed=seed)), flush=True)


if __name__ == "__main__":
    main()
