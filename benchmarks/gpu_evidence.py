"""What a private step does on a GPU: ``make gpu-evidence``, or ``python -m benchmarks.gpu_evidence --device cuda``.

For users who have one. It measures, on the machine where it runs, and writes ``docs/evidence/gpu.md``:

- whether the clipped sum is that of the CPU in float64, and whether any unit adds more than the clip norm;
- whether the same sum has the same bits a second time, and whether bfloat16 keeps a unit's bits wherever it stands;
- how often a step waits for the device;
- the time and the memory of a step in float32 and in bfloat16, beside ordinary training with PyTorch.

Images are synthetic. On the CPU it is a test of itself: it then writes only where ``--output`` says.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from dpvision import models
from dpvision.config import Performance, Precision
from dpvision.errors import DPVisionError
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.noise import noisy_mean
from dpvision.privacy.optimizer import TamperGuard
from dpvision.privacy.randomness import Keys

PAGE: Final = Path(__file__).parent.parent / "docs" / "evidence" / "gpu.md"
CLIP_NORM: Final = 1.0
ALONE: Final = 16  # units whose contribution is measured by itself
_OUT_OF_MEMORY: Final = "out of memory"


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        model: name in the registry.
        side: of the square colour images.
        batch: units of a step.
        repeats: timed steps.
    """

    model: str
    side: int
    batch: int
    repeats: int


Row = dict[str, str]


def main() -> None:
    """Measure, and write the page."""
    flags = _flags()
    device = torch.device(flags.device)
    if flags.output is None and device.type != "cuda":
        sys.exit(f"{PAGE.name} is for GPUs, and --device is {device}. Name another file with --output.")
    chosen = [Sizes(name, side, flags.batch, flags.repeats) for name, side in flags.models]
    text = page(device, chosen, command=f"python -m benchmarks.gpu_evidence {' '.join(sys.argv[1:])}".rstrip())
    output = flags.output or PAGE
    output.write_text(text)
    print(f"Wrote {output}.")


def _flags() -> argparse.Namespace:
    def model(text: str) -> tuple[str, int]:
        name, _, side = text.partition(":")
        return name, int(side or 32)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256, help="units of a step")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each kind")
    parser.add_argument("--output", type=Path, help="default: docs/evidence/gpu.md, for GPUs only")
    usual = ["scaleresnet9:32", "wrn16_4:32", "resnet50:224"]
    parser.add_argument("--models", type=model, nargs="+", default=[model(each) for each in usual], metavar="NAME:SIDE")
    return parser.parse_args()


def page(device: torch.device, chosen: list[Sizes], *, command: str) -> str:
    """Measure everything and return the page."""
    exact, speed = [], []
    for sizes in chosen:
        print(f"{sizes.model}, {sizes.side} pixels ...", file=sys.stderr)
        exact += [_exactness(sizes, device, precision) for precision in ("float32", "bfloat16")]
        speed += _speed(sizes, device)
    return "\n\n".join(
        [
            "# A private step on a GPU",
            f"Measured on: {_described(device)}. Command: `{command}`. Synthetic images, clip norm {CLIP_NORM:g}. "
            "Times are medians of n steps with their range, after two steps that are not counted.",
            "## Exactness\n\n"
            "*error*: of the clipped sum, against the CPU in float64, relative to it. *longest*: the largest norm that "
            f"one of {ALONE} units added by itself, in clip norms; above 1 is a failure. *again*: whether the same sum "
            "has the same bits a second time. *waits*: how often PyTorch reported that the clipped sum waited for the "
            "device, beside its micro-batches.",
            _table(exact),
            "## Time and memory\n\n"
            "*private step*: clipped sum, noise (on the CPU), update, and the comparison of the weights. *clipped "
            "sum*: that part alone. *ordinary*: forward, backward and update by PyTorch.",
            _table(speed),
        ]
    )


def _described(device: torch.device) -> str:
    facts = [f"{name.replace('_', ' ')} {value}" for name, value in machine().items()]
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts += [found.name, f"{found.total_memory / 2**30:.0f} GiB", f"CUDA {torch.version.cuda}"]
        facts.append(f"cuDNN {torch.backends.cudnn.version()}")
    return ", ".join([f"device {device.type}", *facts])


def _table(rows: list[Row]) -> str:
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([row[head] for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per row."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _rows(sizes: Sizes, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn((count, 3, sizes.side, sizes.side), generator=generator)
    return images, torch.arange(count) % 10


def _network(sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    return models.create(sizes.model, num_classes=10, in_channels=3, seed=0).to(device, dtype)


def _clipped(
    network: nn.Module, rows: tuple[Tensor, Tensor], precision: Precision, *, units: int | None = None
) -> dict[str, Tensor]:
    performance = Performance(kernels="plain", precision=precision, microbatch_size=units)
    batch = Rows(*rows, 1)
    total = clipped_sum_of_batch(
        network, cross_entropy, batch, clip_norm=CLIP_NORM, performance=performance, own_code=False
    )
    return total.take()


def _norm(sums: dict[str, Tensor]) -> float:
    return float(torch.stack([value.double().cpu().square().sum() for value in sums.values()]).sum().sqrt())


def _exactness(sizes: Sizes, device: torch.device, precision: Precision) -> Row:
    units = min(sizes.batch, 2 * ALONE)
    row = {"model": f"{sizes.model}, {sizes.side} px", "precision": precision}
    images, labels = _rows(sizes, units)
    there = images.to(device), labels.to(device)
    network = _network(sizes, device)
    try:
        first = _clipped(network, there, precision, units=units // 2)
        again = _clipped(network, there, precision, units=units // 2)
        longest = max(
            _norm(_clipped(network, (there[0][[unit]], there[1][[unit]]), precision))
            for unit in range(min(units, ALONE))
        )
        waits = _waits(lambda: _clipped(network, there, precision, units=units // 2), device)
    except (DPVisionError, RuntimeError) as error:
        return row | dict.fromkeys(("error", "longest", "again"), "–") | {"waits": f"refused: {_one_line(error)}"}
    cpu = torch.device("cpu")
    exact = _clipped(_network(sizes, cpu, torch.float64), (images.double(), labels), "float32", units=4)
    apart = {name: first[name].double().cpu() - exact[name] for name in exact}
    return row | {
        "error": f"{_norm(apart) / _norm(exact):.1e}",
        "longest": f"{longest / CLIP_NORM:.7f}",
        "again": "same bits" if all(torch.equal(first[name], again[name]) for name in first) else "other bits",
        "waits": waits,
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).replace("|", "/")[:160]


def _waits(step: Callable[[], object], device: torch.device) -> str:
    """Count PyTorch's warnings about operations that wait for the device."""
    if device.type != "cuda":
        return "counted on cuda only"
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return f"{sum('synchroniz' in str(each.message) for each in found)} in 2 micro-batches"


def _speed(sizes: Sizes, device: torch.device) -> list[Row]:
    rows = tuple(each.to(device) for each in _rows(sizes, sizes.batch))
    kinds: dict[str, Callable[[], Callable[[], object]]] = {
        "private step, float32": lambda: _private_step(sizes, device, rows, "float32"),
        "private step, bfloat16": lambda: _private_step(sizes, device, rows, "bfloat16"),
        "clipped sum, float32": lambda: _sum_alone(sizes, device, rows, "float32"),
        "clipped sum, bfloat16": lambda: _sum_alone(sizes, device, rows, "bfloat16"),
        "ordinary, float32": lambda: _ordinary_step(sizes, device, rows, "float32"),
        "ordinary, bfloat16": lambda: _ordinary_step(sizes, device, rows, "bfloat16"),
    }
    return [
        {"model": f"{sizes.model}, {sizes.side} px, batch {sizes.batch}", "what": kind, **_timed(make, sizes, device)}
        for kind, make in kinds.items()
    ]


def _timed(make: Callable[[], Callable[[], object]], sizes: Sizes, device: torch.device) -> Row:
    seconds: list[float] = []
    try:
        step = make()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for index in range(sizes.repeats + 2):
            _synchronise(device)
            began = time.perf_counter()
            step()
            _synchronise(device)
            seconds += [time.perf_counter() - began] if index >= 2 else []
    except (DPVisionError, RuntimeError) as error:
        reason = _OUT_OF_MEMORY if _OUT_OF_MEMORY in str(error) else f"refused: {_one_line(error)}"
        return {"n": "0", "ms": reason, "peak MiB": "–"}
    peak = f"{torch.cuda.max_memory_allocated(device) / 2**20:.0f}" if device.type == "cuda" else "–"
    middle, least, most = (1000 * each for each in (statistics.median(seconds), min(seconds), max(seconds)))
    return {"n": str(len(seconds)), "ms": f"{middle:.1f} ({least:.1f}–{most:.1f})", "peak MiB": peak}


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _sum_alone(
    sizes: Sizes, device: torch.device, rows: tuple[Tensor, ...], precision: Precision
) -> Callable[[], object]:
    network = _network(sizes, device)
    return lambda: _clipped(network, (rows[0], rows[1]), precision)


def _private_step(
    sizes: Sizes, device: torch.device, rows: tuple[Tensor, ...], precision: Precision
) -> Callable[[], object]:
    """A step with everything but ledger and sampler: synthetic rows are not private."""
    network = _network(sizes, device)
    optimizer, guard = torch.optim.SGD(network.parameters(), lr=0.1), TamperGuard(network, buffers=False)
    size = float(sizes.batch)
    mechanism = Mechanism(
        num_units=10 * sizes.batch, expected_batch_size=size, clip_norm=CLIP_NORM, noise_multiplier=1.0, steps=10**6
    )
    keys, steps = Keys.from_seed(0), iter(range(10**6))

    def step() -> None:
        guard.check()
        performance = Performance(kernels="plain", precision=precision)
        total = clipped_sum_of_batch(
            network,
            cross_entropy,
            Rows(rows[0], rows[1], 1),
            clip_norm=CLIP_NORM,
            performance=performance,
            own_code=False,
        )
        private = noisy_mean(total, mechanism, keys, step=next(steps))
        parameters = dict(network.named_parameters())
        for name, value in private.gradients.items():
            parameters[name].grad = value.to(parameters[name])
        optimizer.step()
        optimizer.zero_grad()
        guard.accept(parameters)

    return step


def _ordinary_step(
    sizes: Sizes, device: torch.device, rows: tuple[Tensor, ...], precision: Precision
) -> Callable[[], object]:
    network = copy.deepcopy(_network(sizes, device))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            loss = nn.functional.cross_entropy(network(rows[0]), rows[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
