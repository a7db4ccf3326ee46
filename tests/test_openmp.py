"""The bound on spinning threads is set before torch is imported, yields to the user and changes no result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpvision.cli import command_with_flags
from dpvision.openmp import SPIN_COUNT, VARIABLES, bound_spinning

_SHOWN = (
    "import os, sys; from dpvision.openmp import bound_spinning; print(bound_spinning(), "
    "os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
)
_STEP = """
from dpvision.openmp import bound_spinning
bound_spinning()
import hashlib
import torch
torch.set_num_threads(2)
from dpvision import models
from dpvision.config import Performance
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.noise import noisy_mean
from dpvision.privacy.randomness import Keys
model = models.create("resnet9", num_classes=10, in_channels=3, seed=0)
generator = torch.Generator().manual_seed(0)
rows = Rows(torch.randn(8, 3, 16, 16, generator=generator), torch.arange(8), 1)
loss = lambda outputs, targets: torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
clipped = clipped_sum_of_batch(model, loss, rows, clip_norm=1.0, performance=Performance())
facts = Mechanism(num_units=100, expected_batch_size=8, clip_norm=1.0, noise_multiplier=1.0, steps=1)
private = noisy_mean(clipped, facts, Keys.from_seed(0), step=0)
digest = hashlib.sha256()
for name in sorted(private.gradients):
    digest.update(private.gradients[name].numpy().tobytes())
print(digest.hexdigest())
"""


def run(code: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_bound_is_set_before_torch_is_imported() -> None:
    assert run(_SHOWN) == f"True {SPIN_COUNT} False"


def test_importing_the_library_sets_the_bound_unless_torch_came_first() -> None:
    shown = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"
    assert run(f"import dpvision; {shown}") == str(SPIN_COUNT)
    assert run(f"import torch; import dpvision; {shown}") == "None"
    assert run(f"import dpvision; {shown}", OMP_WAIT_POLICY="passive") == "None"


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_is_not_overridden(name: str) -> None:
    value = "ACTIVE" if name == "OMP_WAIT_POLICY" else "7"
    expected = "7" if name == "GOMP_SPINCOUNT" else "None"
    assert run(_SHOWN, **{name: value}) == f"False {expected} False"


def test_nothing_is_set_once_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert "torch" in sys.modules
    assert not bound_spinning()
    assert not set(VARIABLES) & os.environ.keys()


@pytest.mark.skipif(not list((Path(torch.__file__).parent / "lib").glob("libgomp*")), reason="torch has no libgomp")
def test_the_runtime_that_torch_loads_reads_the_bound_of_the_command() -> None:
    code = (
        "import sys, typer, dpvision.cli as cli\n"
        "program = typer.Typer()\n"
        "@program.command()\n"
        "def load(): import torch; torch.zeros(1)\n"
        "sys.argv = ['x']\n"
        "cli.run_program(program, name='x')"
    )
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in done.stderr


@pytest.mark.slow
def test_how_long_threads_spin_changes_no_bit_of_a_private_gradient() -> None:
    bits = {run(_STEP), run(_STEP, OMP_WAIT_POLICY="passive"), run(_STEP, GOMP_SPINCOUNT="300000")}
    assert len(bits) == 1


@pytest.mark.parametrize("name", ["train", "resume", "evaluate", "predict", "audit", "reproduce"])
def test_every_command_that_computes_takes_threads(name: str) -> None:
    assert "--threads" in {flag for parameter in command_with_flags(name).params for flag in parameter.opts}
