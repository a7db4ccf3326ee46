"""Run each script on Opacus and on dpvision: ``python -m benchmarks.opacus_scripts [--runs 3]`` prints the table."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = ("mnist", "cifar10", "memory_manager")
LIBRARIES = ("opacus", "dpvision.compat")


def changed(script: str, library: str) -> str:
    """Return a script with the library in its imports; nothing else changes."""
    return re.sub(r"^from opacus\b", f"from {library}", (HERE / f"{script}.py").read_text(), flags=re.MULTILINE)


def run(script: str, library: str, seed: int) -> dict[str, Any]:
    """Run one script in a process of its own, with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{script}.py"
        file.write_text(changed(script, library))
        roots = (str(HERE.parents[1]), os.environ.get("PYTHONPATH", ""))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(roots)}
        command = [sys.executable, "-W", "ignore", str(file), str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table as Markdown."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--script", action="append", choices=SCRIPTS, help="may be repeated; default: all")
    chosen = arguments.parse_args()
    runs = chosen.runs
    print("| script | library | epsilon | accuracy, % | CPU seconds of the loop | wall seconds |")
    print("|---|---|---|---|---|---|")
    for script in chosen.script or SCRIPTS:
        found: dict[str, list[dict[str, Any]]] = {library: [] for library in LIBRARIES}
        for seed in range(runs):
            for library in LIBRARIES:  # in turns, so that what else the machine does falls on both
                found[library].append(run(script, library, seed))
        for library, results in found.items():
            accuracy = [100 * result["accuracy"] for result in results]
            spread = f" ± {stdev(accuracy):.1f}" if runs > 1 else ""
            times = [f"{median(r[kind] for r in results):.1f}" for kind in ("cpu_seconds", "seconds")]
            epsilon = max(result["epsilon"] for result in results)
            print(
                f"| {script} | {library} | {epsilon:.3f} | {mean(accuracy):.1f}{spread} | {' | '.join(times)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
