"""Damaged input for every reader ends in a value or in one clear line; the guard notices what no reader may do.

``make fuzz`` runs 10,000 new examples. In the suite, a few fixed examples of each kind are run.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hostile_files
import hostile_runs
from dpvision.errors import DPVisionError
from hostile_files import Case, Draw
from hostile_guard import CANARY, Guard, Hang
from hostile_seeds import Seeds, make_seeds

ROOT = Path(__file__).resolve().parents[2]
DEEP = settings.get_current_profile_name() == "fuzz"
EXAMPLES = settings.default.max_examples if DEEP else 20
LONGEST_MESSAGE = 4000
TARGETS: tuple[Callable[[Draw, Seeds, Path], Case], ...] = (
    hostile_files.image,
    hostile_files.folder,
    hostile_files.idx,
    hostile_files.cifar,
    hostile_files.archive,
    hostile_files.npz,
    hostile_files.arrays,
    hostile_files.weights,
    hostile_files.features,
    hostile_files.volume,
    hostile_files.pairs,
    hostile_files.table,
    hostile_files.dicom,
    hostile_runs.json_config,
    hostile_runs.toml_config,
    hostile_runs.certificate,
    hostile_runs.ledger,
    hostile_runs.run_folder,
    hostile_runs.arguments,
    hostile_runs.training,
    hostile_runs.training_on_files,
    hostile_runs.commands,
)
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the guard reads /proc")


@final
class Sandbox:
    """A folder for one case at a time, and the guard that watches it. After a crash the folder holds the input."""

    def __init__(self, folder: Path) -> None:
        (folder / "seeds").mkdir()
        self._folder = folder
        self._seeds = make_seeds(folder / "seeds")
        self._guard = Guard(folder / "box")

    def run(self, target: Callable[[Draw, Seeds, Path], Case], draw: Draw) -> None:
        """Make a case and run it. Fails on anything but a value or an error of one clear line."""
        for place in ("box", "outside"):
            shutil.rmtree(self._folder / place, ignore_errors=True)
            (self._folder / place).mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = target(draw, self._seeds, self._folder / "box")
            message = ""
            try:
                with self._guard.watching():
                    case()
            except DPVisionError as error:
                message = str(error)
            except Hang:
                pytest.fail("the case takes too long")
        assert self._guard.violations == []
        assert "\n" not in message
        assert len(message) < LONGEST_MESSAGE


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / f"{CANARY}.py").write_text("def run(*_): raise SystemError('a file was executed')\n")
    importlib.import_module("matplotlib.font_manager")  # it asks programs for fonts when it is first imported
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("DPVISION_DATA", str(folder / "cache"))
        yield Sandbox(folder)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
@settings(
    max_examples=EXAMPLES,
    derandomize=not DEEP,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_hostile_input_is_read_or_refused_in_one_clear_line(
    target: Callable[[Draw, Seeds, Path], Case], sandbox: Sandbox, data: st.DataObject
) -> None:
    sandbox.run(target, data.draw)


# ---- the guard

MISDEEDS = {
    "writes elsewhere": "open(root / 'elsewhere', 'w').close()",
    "follows a link to elsewhere": "open(box / 'link', 'w').close()",
    "removes elsewhere": "(root / 'victim').unlink()",
    "starts a program": "import subprocess; subprocess.run(['true'])",
    "unpickles": "import pickle; pickle.loads(pickle.dumps(Path))",
    "asks the network": "import socket; socket.getaddrinfo('localhost', 1)",
    "takes memory": "b = bytearray(700 * 2**20); b[::4096] = b'x' * len(b[::4096])",
    "imports a module that a file names": f"import {CANARY}",
    "hangs": "while True: pass",
    "waits": "import os; os.mkfifo(box / 'p'); open(box / 'p')",
    "takes address space": "import mmap\ntry: mmap.mmap(-1, 2**33)\nexcept OSError: watcher.violations.append('x')",
}
PROGRAM = f"""
import os, resource, sys
from pathlib import Path
import hostile_guard as guard
guard.PATIENCE = 1
root = Path(sys.argv[1]); box = root / "box"; box.mkdir()
(box / "link").symlink_to(root / "elsewhere"); (root / "victim").write_text("")
(root / "{CANARY}.py").write_text(""); sys.path.insert(0, str(root)); sys.dont_write_bytecode = True
watcher = guard.Guard(box, seconds=float(sys.argv[3]))
limits = resource.getrlimit(resource.RLIMIT_AS)
with watcher.watching():
    (box / "fine").write_text("x")
assert watcher.violations == [], watcher.violations
try:
    with watcher.watching():
        exec(sys.argv[2])
except guard.Hang:
    watcher.violations.append("hang")
assert resource.getrlimit(resource.RLIMIT_AS) == limits
print("noticed" if watcher.violations else "missed")
"""


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_the_guard_notices_what_no_case_may_do(tmp_path: Path, misdeed: str) -> None:
    seconds = "1" if misdeed in ("hangs", "waits") else "60"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), MISDEEDS[misdeed], seconds]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "noticed", ended.stderr
