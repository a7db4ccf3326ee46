"""The fuzzer runs clean on a few hundred cases, and notices what it is there to notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISDEEDS = {
    "writes elsewhere": "open(root / 'elsewhere', 'w').close()",
    "follows a link to elsewhere": "open(box / 'link', 'w').close()",
    "removes elsewhere": "(root / 'victim').unlink()",
    "starts a program": "import subprocess; subprocess.run(['true'])",
    "unpickles": "import pickle; pickle.loads(pickle.dumps(Path))",
    "asks the network": "import socket; socket.getaddrinfo('localhost', 1)",
    "takes memory": "b = bytearray(700 * 2**20); b[::4096] = b'x' * len(b[::4096])",
    "hangs": "while True: pass",
    "waits": "import os; os.mkfifo(box / 'p'); open(box / 'p')",
}
PROGRAM = """
import os, sys
from pathlib import Path
from tools.fuzz import guard
guard.PATIENCE = 1
root = Path(sys.argv[1]); box = root / "box"; box.mkdir()
(box / "link").symlink_to(root / "elsewhere"); (root / "victim").write_text("")
watcher = guard.Guard(box, seconds=float(sys.argv[3]))
with watcher.watching():
    (box / "fine").write_text("x")
assert watcher.violations == [], watcher.violations
try:
    with watcher.watching():
        exec(sys.argv[2])
except guard.Hang:
    watcher.violations.append("hang")
print("noticed" if watcher.violations else "missed")
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the guard reads /proc")
@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_the_guard_notices_what_no_case_may_do(tmp_path: Path, misdeed: str) -> None:
    seconds = "1" if misdeed in ("hangs", "waits") else "60"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), MISDEEDS[misdeed], seconds]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "noticed", ended.stderr


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the guard reads /proc")
def test_a_few_hundred_hostile_cases_end_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.fuzz", "--cases", "400", "--seed", "5", "--folder", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\n0 failures" in ended.stdout
    assert "all                400" in ended.stdout
