"""jax-privacy in the benchmark: the program it is given, the pipe it is driven by, and what happens when it fails."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks import Settings, Workload, run
from benchmarks.bench_command import app
from benchmarks.contender import CLIP_NORM, LEARNING_RATE
from benchmarks.contenders import ALL, default
from benchmarks.contenders_jax import JAX, WORKER, Worker, WorkerError, jax_privacy, write_setting
from benchmarks.machine import threads
from benchmarks.page import write_page
from benchmarks.suites import Item
from benchmarks.timing import Times, time_contenders
from dpvision.config import Performance
from dpvision.errors import ArgumentError
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch

pytestmark = pytest.mark.slow  # they measure, and start many processes

TINY = Workload.of("shoefit_cnn", batch=4)
# A step takes at least the seconds that the fake tells. Without the pause, a question and its answer take 8.5e-6 s when
# both processes share a core, and a fake that tells more than that is rightly refused.
TOLD = 2.0**-10
GOOD = f"""
print("ready 1e-5", flush=True)
for asked in sys.stdin:
    time.sleep({TOLD})
    print(4096 if asked == "memory\\n" else {TOLD}, flush=True)
"""
REAL = os.environ.get("DPVISION_JAX_PYTHON")
needs_jax = pytest.mark.skipif(REAL is None, reason="DPVISION_JAX_PYTHON names no Python that has jax_privacy")

FakePython = Callable[[str], Path]


@pytest.fixture
def fake_python(tmp_path: Path) -> FakePython:
    """A "Python" that claims to have jax_privacy and runs another script instead of the real worker."""

    def make(worker: str) -> Path:
        (tmp_path / "worker.py").write_text(f"import os, sys, time\n{worker}")
        python = tmp_path / "python"
        script = f'#!/bin/sh\n[ "$1" = -c ] && echo 2.0.0 && exit\nexec {sys.executable} {tmp_path}/worker.py "$2"\n'
        python.write_text(script)
        python.chmod(0o755)
        return python

    return make


@pytest.fixture
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes do not read it, and writing it takes most of a test's time."""
    monkeypatch.setattr("benchmarks.contenders_jax.write_setting", lambda *_: None)


def dpvision(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def timed(python: Path) -> Times:
    return time_contenders([jax_privacy(python)], TINY, repeats=2, progress=lambda _: None)


@pytest.fixture(autouse=True)
def no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.measure.peak_flops", lambda: 1e9)


def test_it_takes_part_where_its_python_is_named_with_its_own_seconds_and_memory(
    fake_python: FakePython, tmp_path: Path
) -> None:
    arguments = ("--batch", "4", "--repeats", "2", "--contenders", "eager", "--no-breakdown", "--json")
    result = dpvision(*arguments, "--jax-python", fake_python(GOOD))
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    rows = {row["contender"]: row for row in figures["results"][0]["rows"]}
    assert list(rows) == ["eager", JAX]
    row = rows[JAX]
    assert (row["label"], row["kind"], row["fails"]) == ("jax-privacy 2.0.0", "peer", None)
    assert (row["all_seconds"], row["memory_bytes"]) == ([TOLD, TOLD], 4096), "what it told, not how long we waited"
    assert str(tmp_path) not in result.stdout


def test_it_stays_out_unless_its_python_is_named() -> None:
    assert JAX in {one.name for one in ALL}
    assert JAX not in {one.name for one in default(compile_=True)}


def test_a_page_with_it_names_the_option_and_shows_a_dash_where_it_has_no_such_model(
    fake_python: FakePython, tmp_path: Path
) -> None:
    settings = Settings(contenders=("eager",), repeats=1, memory=False, breakdown=False)
    settings = replace(settings, jax_python=fake_python('print("no wrn16_4")'))
    told: list[str] = []
    figures = run([Item(suite="x", workload=TINY)], settings, told.append)
    row = figures.results[0].row(JAX)
    assert row is not None
    assert (row.all_seconds, row.fails, row.seconds) == ((), None, None)
    assert any("jax-privacy: no such model here (wrn16_4)" in line for line in told)
    write_page(figures, tmp_path / "x.md")
    text = (tmp_path / "x.md").read_text()
    assert "--jax-python PYTHON" in text
    assert "| workload | eager | jax-privacy |" in text
    assert "| shoefit_cnn, 28 px, batch 4 | 1.00 | – |" in text
    assert "### What failed" not in text


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        ('sys.exit("no such thing")', "ended with exit code 1: no such thing"),
        ("sys.exit(3)", "ended with exit code 3: no word"),
        ('print("hello")', "began with 'hello'"),
        ('print("ready soon")', "began with 'ready soon'"),
        ("print('x' * 10**5)", "began with 'xxx"),
        ('print("ready 0.0011")', "outputs must equal PyTorch's up to 0.001, got 0.0011"),
        ('print("ready nan")', "outputs must equal PyTorch's"),
        ('print("ready 0", flush=True); sys.stdin.readline(); print("soon\\x1b")', r"answered 'soon\\x1b' to 'step'"),
        ('print("ready 0", flush=True); sys.stdin.readline(); sys.exit("out of memory")', "code 1: out of memory"),
        ('print("ready 0", flush=True)', "ended with exit code 0"),
        (GOOD.replace(f"else {TOLD}", "else 1e5"), "told 100000 seconds"),
        (GOOD.replace(f"else {TOLD}", "else 0.0"), "told 0 seconds"),
        (GOOD.replace(f"else {TOLD}", "else 'nan'"), "told nan seconds"),
    ],
)
@pytest.mark.usefixtures("no_setting")
def test_a_worker_that_dies_or_talks_nonsense_is_a_row_that_says_so(
    worker: str, told: str, fake_python: FakePython, tmp_path: Path
) -> None:
    times = timed(fake_python(worker))
    assert told in times.failures[JAX]
    assert JAX not in times.seconds
    assert str(tmp_path) not in times.failures[JAX]


@pytest.mark.usefixtures("no_setting")
def test_one_that_dies_in_a_timed_round_has_no_seconds_either(fake_python: FakePython) -> None:
    short_lived = GOOD.replace("sys.stdin:", "(sys.stdin.readline() for _ in range(2)):")
    times = timed(fake_python(short_lived))
    assert times.seconds == {}
    assert "ended with exit code 0" in times.failures[JAX]


def test_a_silent_worker_is_not_waited_for_for_ever(fake_python: FakePython, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"said nothing for 0\.2 seconds"):
        Worker(fake_python("time.sleep(60)"), tmp_path, seconds=0.2)


def test_the_process_ends_with_its_step(fake_python: FakePython, tmp_path: Path) -> None:
    worker = Worker(fake_python(GOOD.replace("4096", "os.getpid()")), tmp_path)
    process = int(worker.ask("memory"))
    os.kill(process, 0)
    del worker
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_it_has_as_many_threads_as_torch_and_no_more_cores(
    fake_python: FakePython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 3, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: confined.append(cores))
    with threads(2):
        worker = Worker(fake_python(GOOD.replace("4096", "os.environ['NPROC']")), tmp_path)
    assert worker.ask("memory") == 2
    assert confined == [[3, 5]]


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("echo \"ModuleNotFoundError: No module named 'jax_privacy'\" >&2; exit 1", "No module named 'jax_privacy'"),
        ("exit 0", "exit code 0"),
        ("echo hello", "exit code 0"),
    ],
)
def test_a_python_without_jax_privacy_is_one_line_with_exit_code_2(script: str, cause: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    assert_refused(dpvision("--batch", "4", "--jax-python", python), "--jax-python must be", cause)


def test_a_python_that_is_not_there_is_one_line_with_exit_code_2(tmp_path: Path) -> None:
    assert_refused(dpvision("--jax-python", tmp_path / "python"), "--jax-python must be", "No such file")
    assert_refused(dpvision("--jax-python", tmp_path), "--jax-python must be", "Permission denied")
    assert_refused(dpvision("--contenders", "jax-privacy"), "--jax-python")


def assert_refused(result: Result, *told: str) -> None:
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in told), line


def test_the_worker_gets_weights_rows_by_unit_and_expected_outputs(tmp_path: Path) -> None:
    workload = replace(TINY, views=2)
    setting, arrays = written(workload, tmp_path)
    assert (setting["model"], setting["batch"]) == ("shoefit_cnn", 4)
    shapes = [arrays.pop(name).shape for name in ("rows", "targets", "expected")]
    assert shapes == [(4, 2, 1, 28, 28), (4, 2), (4, 2, 10)]
    assert {name: array.shape for name, array in arrays.items()} == {
        name: tuple(parameter.shape) for name, parameter in workload.make_model().named_parameters()
    }
    assert all(np.abs(array).max() > 0 for array in arrays.values()), "a forgotten bias must be seen"


def written(workload: Workload, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    write_setting(workload, folder)
    with np.load(folder / "arrays.npz") as arrays:
        return json.loads((folder / "setting.json").read_text()), dict(arrays)


def test_the_worker_imports_nothing_of_this_environment() -> None:
    lines = [line.split()[1] for line in WORKER.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert not {name.split(".")[0] for name in lines} & {"torch", "dpvision"}


@needs_jax
@pytest.mark.slow
@pytest.mark.parametrize("model", ["linear", "shoefit_cnn", "resnet9", "scaleresnet9"])
def test_jax_computes_what_torch_computes(model: str, tmp_path: Path) -> None:
    write_setting(Workload.of(model, batch=2), tmp_path)
    Worker(Path(REAL or ""), tmp_path)  # refuses what differs


@needs_jax
@pytest.mark.slow
def test_it_refuses_weights_that_are_not_the_models(tmp_path: Path) -> None:
    _, arrays = written(TINY, tmp_path)
    arrays["0.bias"] *= 0
    np.savez(tmp_path / "arrays.npz", **arrays)
    with pytest.raises(WorkerError, match="outputs must equal"):
        Worker(Path(REAL or ""), tmp_path)


@needs_jax
@pytest.mark.slow
@pytest.mark.parametrize("views", [1, 3])
def test_without_noise_its_step_is_ours(views: int, tmp_path: Path) -> None:
    workload = replace(TINY, views=views)
    setting, arrays = written(workload, tmp_path)
    (tmp_path / "setting.json").write_text(json.dumps({**setting, "noise_multiplier": 0.0}))
    code = f"""
import json, runpy, sys
import numpy as np, jax.numpy as jnp
worker = runpy.run_path({str(WORKER)!r})
setting = json.loads(open("setting.json").read())
weights = {{name: jnp.asarray(array) for name, array in np.load("arrays.npz").items()}}
rows, targets, _ = (weights.pop(name) for name in ("rows", "targets", "expected"))
optimizer, step = worker["private_step"](setting)
after, _ = step(weights, optimizer.init(weights), rows, targets)
np.savez("after.npz", **after)
"""
    subprocess.run([REAL or "", "-c", code], cwd=tmp_path, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    model = workload.make_model()
    model.load_state_dict({name: torch.from_numpy(arrays[name]) for name in model.state_dict()})
    rows = Rows(*workload.make_rows(), views)
    performance = Performance(kernels="plain")
    clipped = clipped_sum_of_batch(model, workload.row_losses, rows, clip_norm=CLIP_NORM, performance=performance)
    with np.load(tmp_path / "after.npz") as after:
        for name, ours in clipped.gradients.items():
            theirs = (arrays[name] - after[name]) * workload.batch / LEARNING_RATE
            # Of weights and their steps only seven digits are kept, hence 1e-4 of a sum of norm at most four.
            np.testing.assert_allclose(theirs, ours.numpy(), atol=4e-4)


@needs_jax
@pytest.mark.slow
def test_the_real_one_takes_steps_and_tells_its_memory() -> None:
    contender = jax_privacy(Path(REAL or ""))
    step = contender.make(TINY)
    step()
    assert (step() or 0) > 0
    assert contender.memory is not None
    assert contender.memory(TINY) > 0


def test_the_probe_needs_no_jax_here() -> None:
    with pytest.raises(ArgumentError, match="jax_python must be"):
        jax_privacy(Path("/bin/false"))
