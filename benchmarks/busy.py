"""A private and an ordinary step on idle and on busy cores, by how long threads spin: ``python -m benchmarks.busy``.

The OpenMP runtime reads its settings when it is loaded, so every setting has a process of its own. All processes stay
alive and take one step at a time, in a new order every round. Each round is taken once on idle cores and once beside
one busy process per core, which is stopped and continued.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Annotated, Any, Final

import typer

from dpvision.cli import run_program
from dpvision.cli.console import print_results
from dpvision.cli.flags import as_command
from dpvision.errors import DPVisionError, Problems
from dpvision.openmp import SPIN_COUNT, VARIABLES

PRIVATE: Final = "dpvision-native"
EAGER: Final = "eager"
UNBOUNDED: Final = "runtime's own"
BOUNDED: Final = "bounded"
SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    UNBOUNDED: {"KMP_LIBRARY": "throughput"},  # its default, without effect on libgomp: dpvision then sets no bound
    "passive": {"OMP_WAIT_POLICY": "passive"},
    BOUNDED: {"GOMP_SPINCOUNT": str(SPIN_COUNT)},
}
_WARM_UP: Final = 2
_SERVE: Final = "--serve"
Seconds = dict[tuple[str, str, str], list[float]]
"""By setting of the threads, contender, and "idle" or "busy"."""


class Stepper:
    """A process that takes one step of a contender whenever it is asked."""

    def __init__(self, asked: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "OMP_NUM_THREADS")}
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.busy", _SERVE, json.dumps(asked)]
        self.process = subprocess.Popen(
            command, env={**inherited, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def seconds(self, contender: str) -> float:
        """Return the time of one step."""
        assert self.process.stdin is not None
        print(contender, file=self.process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise DPVisionError(f"a process that takes steps ended with exit code {self.process.wait()}.")
        return line

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def serve(asked: Mapping[str, Any]) -> None:
    """Answer every name of a contender on stdin with the seconds of one of its steps."""
    import torch

    from benchmarks.contenders import contender
    from benchmarks.workload import Workload
    from dpvision.kernels.memory import keep_freed_memory

    torch.set_num_threads(asked["threads"])
    keep_freed_memory()  # as in training
    workload = Workload.of(asked["model"], batch=asked["batch"])
    steps = {name: contender(name).make(workload) for name in (PRIVATE, EAGER)}
    for step in steps.values():
        for _ in range(_WARM_UP):
            step()
    print("ready", flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        steps[line.strip()]()
        print(time.perf_counter() - started, flush=True)


@contextmanager
def busy_cores(cores: Sequence[int]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One process per core that computes without end; stopped at first."""
    code = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True:\n    pass"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(core)]) for core in cores]
    try:
        _switch(processes, busy=False)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _switch(processes: Sequence[subprocess.Popen[bytes]], *, busy: bool) -> None:
    for process in processes:
        process.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)


def measure(*, model: str, batch: int, repeats: int) -> dict[str, Any]:
    """Time all settings, interleaved.

    Args:
        model: name of a registered model.
        batch: privacy units in a step, >= 1.
        repeats: rounds, >= 1.

    Returns:
        Medians and all seconds, the ratios that the targets are about, and the load of the machine before the first
        round.
    """
    problems = Problems()
    problems.count("batch", batch)
    problems.count("repeats", repeats)
    problems.raise_if_any()
    from benchmarks.machine import machine

    cores, order = sorted(os.sched_getaffinity(0)), random.Random(0)  # noqa: S311 - an order of turns
    asked = {"model": model, "batch": batch, "threads": len(cores)}
    load, seconds = os.getloadavg()[0], Seconds()
    with ExitStack() as stack:
        steppers = {name: Stepper(asked, given) for name, given in SETTINGS.items()}
        for stepper in steppers.values():
            stack.callback(stepper.close)
        processes = stack.enter_context(busy_cores(cores))
        turns = [(name, contender) for name in steppers for contender in (PRIVATE, EAGER)]
        for _ in range(repeats):
            for state in ("idle", "busy"):
                _switch(processes, busy=state == "busy")
                order.shuffle(turns)
                for name, contender in turns:
                    seconds.setdefault((name, contender, state), []).append(steppers[name].seconds(contender))
    facts = {**asked, "repeats": repeats, "load_before": load, "machine": machine()}
    return {**facts, "rows": rows_of(seconds), "bounded": ratios_of(seconds)}


def rows_of(seconds: Seconds) -> list[dict[str, Any]]:
    """The median and all seconds of every combination."""
    return [
        {"threads": key[0], "contender": key[1], "state": key[2], "seconds": median(each), "all_seconds": each}
        for key, each in sorted(seconds.items())
    ]


def ratios_of(seconds: Seconds) -> dict[str, float]:
    """The ratios of medians that the targets are about, for a bounded spin.

    Returns:
        "busy_to_idle": a private step on busy cores in units of one on idle cores. "to_eager": in units of an ordinary
        step with the runtime's own setting on busy cores. "idle_cost": what the bound adds on idle cores.
    """
    middle = {key: median(each) for key, each in seconds.items()}
    busy, idle = middle[BOUNDED, PRIVATE, "busy"], middle[BOUNDED, PRIVATE, "idle"]
    return {
        "busy_to_idle": busy / idle,
        "to_eager": busy / middle[UNBOUNDED, EAGER, "busy"],
        "to_eager_bounded": busy / middle[BOUNDED, EAGER, "busy"],
        "idle_cost": idle / middle[UNBOUNDED, PRIVATE, "idle"] - 1,
    }


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """The result as a Markdown table and a line of ratios."""
    cells = {(row["threads"], row["contender"], row["state"]): row["seconds"] for row in result["rows"]}
    lines = ["| waiting threads | private, idle | private, busy | × | eager, idle | eager, busy | × |"]
    lines.append("| --- | --: | --: | --: | --: | --: | --: |")
    for name in SETTINGS:
        pairs = [(cells[name, contender, "idle"], cells[name, contender, "busy"]) for contender in (PRIVATE, EAGER)]
        shown = [f"{idle:.3f} s | {busy:.3f} s | {busy / idle:.2f}" for idle, busy in pairs]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    found = result["bounded"]
    lines.append(
        f"bounded: busy {found['busy_to_idle']:.2f} × idle, {found['to_eager']:.2f} × eager (bounded as well: "
        f"{found['to_eager_bounded']:.2f}), idle cost {found['idle_cost']:+.1%}; "
        f"load before {result['load_before']:.2f}"
    )
    return lines


def busy(
    model: Annotated[str, typer.Option(help="Model of the step.")] = "resnet9",
    batch: Annotated[int, typer.Option(help="Privacy units in a step, >= 1.")] = 64,
    repeats: Annotated[int, typer.Option(help="Interleaved rounds, >= 1.")] = 15,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time a private and an ordinary step on idle cores and beside one busy process per core.

    Example: python -m benchmarks.busy --repeats 15
    """
    result = measure(model=model, batch=batch, repeats=repeats)
    print_results(result, lines_of(result), json=json_)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(as_command(busy))

if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:  # not through the program, which sets a bound of its own
        serve(json.loads(sys.argv[2]))
    else:
        run_program(app, name="python -m benchmarks.busy")
