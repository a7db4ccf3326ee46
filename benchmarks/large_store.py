"""Draws from a store that is larger than the memory of the process: ``python -m benchmarks.large_store``.

A store of random images is written below ``--folder`` and deleted at the end (``--keep`` leaves it there). One process,
or several that torchrun starts (``--processes``), open it under a hard limit on memory (a quarter of the store by
default) and take private steps of Poisson draws. Reported are: images per second, the anonymous memory (RssAnon) of
rank 0 after every step, the time of a draw alone and of reading alone, and tests of the draws.

There are two kinds of limit. RLIMIT_DATA bounds the anonymous and private writable memory of each process, but not the
system's page cache, which holds pages of the shards as long as there is free memory; ``--cold`` evicts them before each
step, so that every image comes from the disk. ``--memory-group FOLDER`` makes a control group of that path instead (of
version 1 or 2, as in /sys/fs/cgroup/memory/large-store), which bounds the memory of all processes together, page cache
included. It needs the privilege to make one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

CLASSES = 10
CLIP_NORM, NOISE = 1.0, 1.0


def main() -> None:
    """Write the store, measure in a child process, print JSON."""
    flags = _flags()
    if flags.measure:
        _measure(flags)
        return
    store, seconds = flags.folder / "store", 0.0
    if not (store / "store.json").exists():
        seconds = _write(store, flags)
    size = sum(path.stat().st_size for path in store.iterdir())
    limit = int(size * flags.limit)
    command = [sys.executable, "-m", "benchmarks.large_store", "--measure", *sys.argv[1:]]
    if flags.processes > 1:
        command[1:2] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={flags.processes}", "-m"]
    try:
        _evict(store)  # pages that the writer left in the cache would not count against the limit
        with _memory_group(flags.memory_group, limit) as group:
            join = _limit_data if group is None else _join
            measured = subprocess.run(
                command, check=True, capture_output=True, text=True, preexec_fn=lambda: join(group or limit)
            )
            most = _most_memory(group)
        results = {
            "store_bytes": size,
            "limit_bytes": limit,
            "limit": "RLIMIT_DATA" if group is None else "control group, page cache included",
            "most_memory_of_group_bytes": most,
            "write_seconds": round(seconds, 1),
        }
        print(json.dumps(results | json.loads(measured.stdout), indent=2))
    except subprocess.CalledProcessError as error:
        sys.exit(f"the child process failed under a limit of {limit} bytes:\n{error.stderr[-2000:]}")
    finally:
        if not flags.keep:
            shutil.rmtree(store)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dpvision-large-store"))  # noqa: S108
    parser.add_argument("--images", type=int, default=1_281_167)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--draws", type=int, default=200, help="Draws for the tests of the sampler.")
    parser.add_argument("--microbatch-size", type=int, default=512)
    parser.add_argument("--model", default="linear")
    parser.add_argument("--limit", type=float, default=0.25, help="Limit of memory, as a share of the store.")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="Threads of each process.")
    parser.add_argument("--memory-group", type=Path, help="Control group to make, which bounds the page cache too.")
    parser.add_argument("--cold", action="store_true", help="Evict the shards from the page cache before each step.")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _limit_data(limit: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _join(group: Any) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def _memory_group(group: Path | None, limit: int) -> Iterator[Path | None]:
    """Make a control group with this limit, and remove it at the end; None without one."""
    if group is None:
        yield None
        return
    group.mkdir()
    try:
        (group / _file_of(group, "memory.max", "memory.limit_in_bytes")).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def _most_memory(group: Path | None) -> int | None:
    """The most memory that the group had at a time, page cache included."""
    if group is None:
        return None
    return int((group / _file_of(group, "memory.peak", "memory.max_usage_in_bytes")).read_text())


def _file_of(group: Path, newer: str, older: str) -> str:
    return newer if (group / newer).exists() else older


def _write(store: Path, flags: argparse.Namespace) -> float:
    """Write images of noise that differ in their numbers; the first rows of pixels tell the class."""
    from dpvision.data.normalisation import fixed_normalisation
    from dpvision.data.packed_store import HEADER, Header
    from dpvision.data.packing import SHARD_BYTES, StoreWriter
    from dpvision.data.store import ImageStore, numbered_rows, store_of_arrays
    from dpvision.storage.files import json_bytes, write_atomically

    start = time.perf_counter()
    store.mkdir(parents=True, mode=0o700)
    writer, shape = StoreWriter(store, SHARD_BYTES), (3, flags.side, flags.side)
    rows, rng = SHARD_BYTES // math.prod(shape), np.random.default_rng(0)
    labels = np.arange(flags.images) % CLASSES
    pixels = rng.integers(0, 256, (rows, *shape), dtype=np.uint8)  # one block of noise; each image gets its own number
    for number, first in enumerate(range(0, flags.images, rows)):
        count = min(rows, flags.images - first)
        pixels[:count, :, :8] = (labels[first : first + count] * 25)[:, None, None, None]
        numbers = np.arange(first, first + count, dtype=np.int64).view(np.uint8).reshape(count, 8)
        pixels[:count, 0, -1, -8:] = numbers
        writer.add("train", number, pixels[:count], [None] * count)
    names = tuple(f"class {number}" for number in range(CLASSES))
    train = ImageStore(
        images=writer.mapped("train"),
        labels=torch.from_numpy(labels),
        class_names=names,
        unit_of_row=torch.arange(flags.images),
        name="generated",
        row_names=numbered_rows(flags.images),
    )
    some = np.zeros((CLASSES, *shape), np.uint8)
    test = store_of_arrays(images=some, labels=np.arange(CLASSES), class_names=names, name="generated test")
    header = Header(
        packed_from="0" * 64,
        image_shape=shape,
        class_names=names,
        settings={},
        normalisation=fixed_normalisation(3).to_dict(),
        train=writer.finish("train", train),
        test=writer.finish("test", test),
    )
    write_atomically(store / HEADER, json_bytes(header.model_dump(mode="json")))
    return time.perf_counter() - start


def _measure(flags: argparse.Namespace) -> None:
    """Open the store and take steps; what is printed is JSON."""
    from dpvision.config import OptimizerSettings, Performance
    from dpvision.data import ImageBatches, load
    from dpvision.gradients.clipped_sum import assist_clipped_sum, clipped_sum_of_batch
    from dpvision.models import create, entry
    from dpvision.models.losses import classification_loss
    from dpvision.privacy.mechanism import Mechanism
    from dpvision.privacy.noise import noisy_mean
    from dpvision.privacy.optimizer import Optimizer
    from dpvision.privacy.randomness import Keys
    from dpvision.ranks import Ranks

    torch.set_num_threads(flags.threads)
    ranks = Ranks.of_this_job()
    store, start = flags.folder / "store", time.perf_counter()
    splits = load(store)
    opened = time.perf_counter() - start
    start = time.perf_counter()
    fingerprint = splits.train.fingerprint()
    fingerprinted = time.perf_counter() - start
    mechanism = Mechanism(
        num_units=flags.images,
        expected_batch_size=flags.batch,
        clip_norm=CLIP_NORM,
        noise_multiplier=NOISE,
        steps=flags.steps,
    )
    told = ranks.decided(lambda: {"secret": secrets.token_hex(32)})
    keys = Keys(bytes.fromhex(told["secret"]), "large store")
    batches = ImageBatches(mechanism=mechanism, store=splits.train, normalisation=splits.normalisation, keys=keys)
    options = {"image_size": flags.side} if "image_size" in entry(flags.model).options else {}
    model = create(flags.model, num_classes=CLASSES, in_channels=3, seed=0, **options)
    settings = OptimizerSettings(name="sgd", learning_rate=0.1)
    optimizer = Optimizer(model, settings=settings, total_steps=flags.steps, private=True)
    performance = Performance(microbatch_size=flags.microbatch_size, partial_sums=8)
    options = {"clip_norm": CLIP_NORM, "performance": performance, "own_code": False, "ranks": ranks}
    seconds, drawn, memory = [], [], []
    for step in range(flags.steps):
        if flags.cold and ranks.leads:
            _evict(store)
        start = time.perf_counter()
        if ranks.leads:
            clipped = clipped_sum_of_batch(model, classification_loss, batches.batch(step), **options)
            optimizer.step(noisy_mean(clipped, mechanism, keys, step=step))
        else:
            assist_clipped_sum(model, classification_loss, batches.batch(step), **options)
        ranks.spread(list(model.parameters()))
        seconds.append(time.perf_counter() - start)
        drawn.append(len(batches.units(step)))
        memory.append(_status("RssAnon"))
    if not ranks.leads:
        return
    if flags.cold:
        _evict(store)
    start = time.perf_counter()
    for _ in batches.batch(flags.steps).microbatches(flags.microbatch_size):
        pass
    reading = time.perf_counter() - start
    usual = float(np.median(seconds[1:]))
    results: dict[str, Any] = {
        "images": flags.images,
        "side": flags.side,
        "batch": flags.batch,
        "model": flags.model,
        "cold": flags.cold,
        "processes": ranks.size,
        "threads": torch.get_num_threads(),
        "open_seconds": round(opened, 2),
        "fingerprint_seconds": round(fingerprinted, 2),
        "fingerprint": fingerprint[:8],
        "step_seconds": [round(each, 2) for each in seconds],
        "images_per_second": round(flags.batch / usual),
        "read_only_images_per_second": round(flags.batch / reading),
        "drawn": drawn,
        "rss_anon_bytes": memory,
        "peak_rss_bytes": _status("VmHWM"),
        "rss_file_bytes": _status("RssFile"),
        "draws": _test_draws(batches, mechanism.sample_rate, flags),
    }
    print(json.dumps(results))


def _test_draws(batches: Any, rate: float, flags: argparse.Namespace) -> dict[str, float]:
    """Compare inclusion counts with independent Bernoulli draws; each value is a standard normal if they are."""
    draws, images = flags.draws, flags.images
    per_unit, sizes, together = np.zeros(images, dtype=np.int64), [], 0
    before = np.zeros(images, dtype=bool)
    start = time.perf_counter()
    for step in range(10_000, 10_000 + draws):
        units = batches.units(step)
        now = np.zeros(images, dtype=bool)
        now[units] = True
        per_unit[units] += 1
        together += int((now & before).sum()) if step > 10_000 else 0
        sizes.append(len(units))
        before = now
    seconds = (time.perf_counter() - start) / draws
    total = sum(sizes)
    spread = images * rate * (1 - rate)
    # Variances of counts: of a chi-square statistic with draws·images terms, and of pairs in neighbouring steps.
    of_sizes = sum((size - images * rate) ** 2 for size in sizes) / spread
    of_units = float(((per_unit - draws * rate) ** 2).sum()) / (draws * rate * (1 - rate))
    kurtosis = 2 + (1 - 6 * rate * (1 - rate)) / (draws * rate * (1 - rate))
    pairs = images * (draws - 1)
    pair_rate = rate * rate
    # Pairs that share a step are not independent of each other, which adds 2·q³(1 - q) for each inner step.
    pair_spread = pairs * pair_rate * (1 - pair_rate) + 2 * images * (draws - 2) * rate**3 * (1 - rate)
    return {
        "draws": draws,
        "seconds_per_draw": round(seconds, 4),
        "z_of_total": round((total - draws * images * rate) / math.sqrt(draws * spread), 2),
        "z_of_variance_of_sizes": round((of_sizes - draws) / math.sqrt(2 * draws), 2),
        "z_of_variance_of_units": round((of_units - images) / math.sqrt(kurtosis * images), 2),
        "z_of_neighbouring_steps": round((together - pairs * pair_rate) / math.sqrt(pair_spread), 2),
    }


def _evict(store: Path) -> None:
    """Drop the pages of the shards that no process uses."""
    for path in store.glob("train-*.npy"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _status(name: str) -> int:
    """Read a value of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
