"""Kill a short run at random moments, resume it each time, and compare with the run that was left alone.

Usage: python -m tools.kill_runs [--kills 50] [--folder DIR]

Prints one line a kill and a summary. Fails unless final weights and ledger are equal bit for bit, and unless the
ledger on disk, at every moment it is looked at, covers each noisy gradient that had been drawn.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dpvision.ledger import Ledger

DELAY = 0.1
"""Seconds that a step is made longer by, so that most kills hit between charge and checkpoint."""
RUNNER = """
import hashlib, shutil, sys, time
from pathlib import Path
import dpvision.training.loop as loop
from dpvision.config import parse_config
from dpvision.training import resume, train
run, config, drawn, delay = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
original = loop.privatize
def noted(clipped, mechanism, keys, *, step):
    time.sleep(delay)
    noisy = original(clipped, mechanism, keys, step=step)
    digest = hashlib.sha256(b"".join(g.numpy().tobytes() for g in noisy.gradients.values())).hexdigest()
    with drawn.open("a") as file:
        file.write(f"{step}:{digest}\\n")
    return noisy
loop.privatize = noted
print("ready", flush=True)
if (run / "private" / "checkpoints").is_dir() and any((run / "private" / "checkpoints").glob("step-*")):
    resume(run)
else:
    shutil.rmtree(run, ignore_errors=True)  # killed before the first checkpoint: nothing was drawn yet
    train(parse_config(config.read_text()), run=run, seed=11)
print("finished")
"""


def write_inputs(folder: Path, *, steps: int) -> Path:
    """Made-up pictures and the configuration of a short run."""
    from dpvision.config import parse_config

    generator = np.random.default_rng(0)
    labels = np.arange(90) % 3
    images = generator.integers(0, 256, size=(90, 1, 8, 8), dtype=np.uint8)
    pictures = folder / "pictures.npz"
    np.savez(pictures, x_train=images[:60], y_train=labels[:60], x_test=images[60:], y_test=labels[60:])
    config = parse_config(
        {
            "name": "killed",
            "data": {"source": str(pictures)},
            "model": {"name": "linear", "options": {"image_size": 8}},
            "privacy": {
                "noise_multiplier": 1.0,
                "delta": 1e-3,
                "num_units": 60,
                "expected_batch_size": 20.0,
                "steps": steps,
                "clip_norm": 0.5,
            },
            "optimizer": {"name": "adam", "learning_rate": 0.01},
            "averaging": {"kind": "ema", "decay": 0.9},
            "evaluations": 4,
            "checkpoint_every": 5,
        }
    )
    path = folder / "config.json"
    path.write_text(config.to_json())
    return path


def start(run: Path, config: Path, drawn: Path, *, delay: float) -> subprocess.Popen[str]:
    """A process that begins or resumes the run, noting each noisy gradient after it was drawn."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUNNER, str(run), str(config), str(drawn), str(delay)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def seconds_after_imports(process: subprocess.Popen[str]) -> float:
    """How long a whole run takes once its imports are over."""
    if process.stdout is not None:
        process.stdout.readline()
    started = time.perf_counter()
    process.communicate()
    return time.perf_counter() - started


def charged_steps(run: Path) -> int:
    """Training steps in the ledger on disk; a torn last line counts as not written."""
    path = run / "release" / "ledger.jsonl"
    if not path.exists():
        return 0
    content = path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "ledger.jsonl"
        copy.write_bytes(content)
        return sum(count for _, count in Ledger.open(copy).charges())


def drawn_steps(drawn: Path) -> int:
    """How many different noisy gradients have existed: two for one step, if a replay was not exact."""
    return len(set(drawn.read_text().splitlines())) if drawn.exists() else 0


def kill_and_resume(folder: Path, *, kills: int, steps: int = 60, seed: int = 0) -> dict[str, int]:
    """The experiment: how many kills hit, and how often something was wrong."""
    config = write_inputs(folder, steps=steps)
    alone, killed = folder / "alone", folder / "killed"
    undisturbed = start(alone, config, folder / "alone.drawn", delay=DELAY)
    lifetime = seconds_after_imports(undisturbed)
    if undisturbed.returncode != 0:
        raise SystemExit("the undisturbed run failed")
    chance = random.Random(seed)  # noqa: S311 - moments of killing, not secrets
    counts = {"kills": 0, "under_reported": 0, "failed_resumes": 0}
    while True:
        process = start(killed, config, folder / "drawn", delay=DELAY)
        if counts["kills"] < kills and process.stdout is not None:
            process.stdout.readline()  # imports are over
            time.sleep(chance.uniform(0.0, lifetime))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
                counts["kills"] += 1
        _, errors = process.communicate()
        drawn, charged = drawn_steps(folder / "drawn"), charged_steps(killed)
        counts["under_reported"] += drawn > charged
        print(f"kill {counts['kills']:3}: {drawn:3} noisy gradients seen, {charged:3} charged", flush=True)
        if process.returncode == 0:
            if counts["kills"] >= kills:
                break
            killed, counts = _next_life(folder, killed, counts)
        elif process.returncode != -signal.SIGKILL:
            counts["failed_resumes"] += 1
            raise SystemExit(f"resume failed: {errors.strip().splitlines()[-1:]}")
    counts["weights_equal"] = int(same(alone, killed, "weights.safetensors"))
    counts["ledger_equal"] = int(same(alone, killed, "ledger.jsonl"))
    return counts


def _next_life(folder: Path, killed: Path, counts: dict[str, int]) -> tuple[Path, dict[str, int]]:
    """The run finished before all kills were spent: check it, then kill another one."""
    if not (same(folder / "alone", killed, "weights.safetensors") and same(folder / "alone", killed, "ledger.jsonl")):
        raise SystemExit(f"{killed} differs from the run that was left alone")
    (folder / "drawn").unlink(missing_ok=True)
    return folder / f"killed-after-{counts['kills']}", counts


def same(one: Path, other: Path, name: str) -> bool:
    """Whether two runs released the same bytes."""
    return (one / "release" / name).read_bytes() == (other / "release" / name).read_bytes()


def main() -> int:
    """Run the experiment and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    counts = kill_and_resume(folder, kills=arguments.kills, seed=arguments.seed)
    print(counts)
    return 0 if counts["weights_equal"] and counts["ledger_equal"] and not counts["under_reported"] else 1


if __name__ == "__main__":
    sys.exit(main())
