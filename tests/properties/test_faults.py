"""A disk that fails, a clock that jumps, a second process: one clear line, and a run that can go on or says why not.

docs/concepts/faults.md has the table; tests of single files are in test_run_folder.py and test_ledger.py.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dpvision.privacy.private_step as step_module
from dpvision.cli import app
from dpvision.errors import DPVisionError
from dpvision.privacy.ledger import Ledger, read_ledger
from dpvision.release.verify import verify
from dpvision.storage.run_folder import RunFolder
from dpvision.training import resume_training, train
from dpvision.training.callbacks import RunCallback
from tiny_runs import tiny_config, write_images

STEPS = 4
PLAN = {"privacy": {"steps": STEPS}, "evaluations": 1, "checkpoint_every": 2}
RELEASED = {**PLAN, "data": {"normalisation": "released"}}
OPERATIONS = ("open", "write", "fsync", "replace", "mkdir", "ftruncate")
FIRST_STEPS = "before its first checkpoint"


class DiskFails(RunCallback):
    """Lets every ``os`` operation below a folder pass but one."""

    def __init__(self, root: Path, *, at: int | None, error: int) -> None:
        self.root, self.at, self.error, self.count = str(root), at, error, 0

    def _check(self, target: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        if not str(path).startswith(self.root):
            return
        if self.count == self.at:
            self.count += 1
            raise OSError(self.error, os.strerror(self.error))
        self.count += 1

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, the disk is a bad one."""
        real = {name: getattr(os, name) for name in OPERATIONS}

        def guarded(name: str) -> Callable[..., Any]:
            def operation(target: Any, *arguments: Any, **options: Any) -> Any:
                if name != "mkdir" or not os.path.isdir(target):  # whether it is there is only asked
                    self._check(target)
                return real[name](target, *arguments, **options)

            return operation

        with pytest.MonkeyPatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(os, name, guarded(name))
            yield


class Drawn:
    """Counts the noisy gradients that have existed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[bytes] = set()
        real = step_module.noisy_mean

        def noted(*arguments: Any, **options: Any) -> Any:
            noisy = real(*arguments, **options)
            self.seen.add(b"".join(value.numpy().tobytes() for value in noisy.gradients.values()))
            return noisy

        monkeypatch.setattr(step_module, "noisy_mean", noted)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("pictures") / "pictures.npz")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    """The run left alone: only read from."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("alone") / "run"
    train(tiny_config(pictures, **PLAN), run=path, seed=3)
    return path


@pytest.fixture
def run(tmp_path: Path, alone: Path) -> Path:
    """A finished run to do things to."""
    return Path(shutil.copytree(alone, tmp_path / "run"))


def end_of(run: Path) -> tuple[bytes, ...]:
    return tuple((run / "release" / name).read_bytes() for name in ("weights.safetensors", "ledger.jsonl"))


def story_of(run: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(entry.kind, entry.payload) for entry in read_ledger(run / "release" / "ledger.jsonl")]


def failure_of(attempt: Callable[[], Any]) -> str | None:
    """The one line that the user sees; None if nothing failed. Anything else than one line is a test failure."""
    said = None
    try:
        attempt()
    except DPVisionError as error:
        said = str(error)
    assert "\n" not in (said or "")
    return said


def charged(run: Path) -> int:
    path = run / "release" / "ledger.jsonl"
    if not path.exists():
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(path, folder))
        return sum(count for event, count in Ledger.open(copy).charges() if event.purpose == "training step")


def check_every_operation(
    folder: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, *, every: int, error: int, first: int = 0
) -> int:
    """Let the disk fail once, at each ``every``-th of the operations of a run; how many of them could be resumed."""
    config = tiny_config(pictures, **RELEASED)
    alone, counting = folder / "alone", DiskFails(folder, at=None, error=error)
    with counting.here():
        train(config, run=alone, seed=3)
    assert counting.count > 100
    resumed = 0
    for at in range(first, counting.count, every):
        run, drawn = folder / f"run-{at}", Drawn(monkeypatch)
        with DiskFails(folder, at=at, error=error).here():
            said = failure_of(lambda run=run: train(config, run=run, seed=3))
        assert said is not None, f"operation {at} failed and nobody heard of it"
        assert os.strerror(error) in said
        assert charged(run) >= len(drawn.seen), f"operation {at}: a noisy gradient without its charge"
        said = failure_of(lambda run=run: resume_training(run))
        if said is None:
            assert end_of(run) == end_of(alone), f"operation {at}"
            assert verify(run).ok
            resumed += 1
        else:
            assert FIRST_STEPS in said or "must be a run folder" in said, said
            assert not drawn.seen
        shutil.rmtree(run, ignore_errors=True)
    return resumed


def test_a_disk_that_is_full_at_any_write_loses_nothing_that_was_charged(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_every_operation(tmp_path, pictures, monkeypatch, every=37, first=9, error=errno.ENOSPC) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_at_every_single_operation_loses_nothing_that_was_charged(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    assert check_every_operation(tmp_path, pictures, monkeypatch, every=1, error=error) >= 40


@pytest.mark.parametrize("most", [600, 2500, 3500])
def test_files_that_may_not_grow_end_in_one_line_and_a_run_that_goes_on(
    tmp_path: Path, pictures: Path, alone: Path, most: int
) -> None:
    """The operating system itself refuses: half of a file may have been written then."""
    config = tiny_config(pictures, **PLAN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        said = failure_of(lambda: train(config, run=tmp_path / "run", seed=3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said is not None
    assert "File too large" in said or "bytes went in" in said
    again = failure_of(lambda: resume_training(tmp_path / "run"))
    if again is None:
        assert end_of(tmp_path / "run") == end_of(alone)
    else:
        assert FIRST_STEPS in again


@pytest.mark.slow
def test_a_small_disk_that_is_really_full_ends_in_one_line_and_a_run_that_goes_on(tmp_path: Path) -> None:
    """A tmpfs of a few pages, made larger before the run is resumed."""
    mount = tmp_path / "disk"
    mount.mkdir()
    mounted = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=32k none {mount}"]
    if shutil.which("unshare") is None or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("making a small disk needs the right to mount one")
    write_images(tmp_path / "pictures.npz")
    code = f"""
        import subprocess, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        import torch
        from test_faults import FIRST_STEPS, PLAN, end_of, failure_of
        from tiny_runs import tiny_config
        from dpvision.training import resume_training, train
        torch.set_num_threads(1)
        folder, mount = Path({str(tmp_path)!r}), Path({str(mount)!r})
        config = tiny_config(folder / "pictures.npz", **PLAN)
        train(config, run=folder / "alone", seed=3)
        for size in (16, 24, 32, 40, 48, 56):
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={{size}}k", "none", str(mount)], check=True)
            said = failure_of(lambda: train(config, run=mount / "run", seed=3))
            assert said is not None and "No space left" in said, (size, said)
            subprocess.run(["mount", "-o", "remount,size=4m", str(mount)], check=True)
            said = failure_of(lambda: resume_training(mount / "run"))
            assert end_of(mount / "run") == end_of(folder / "alone") if said is None else FIRST_STEPS in said, said
            print(size, said or "resumed")
            subprocess.run(["umount", str(mount)], check=True)
    """
    command = ["unshare", "-m", sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resumed") >= 2


def dpvision(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_says_that_the_disk_is_full_in_one_line_and_exits_with_2(tmp_path: Path, pictures: Path) -> None:
    given = ("train", pictures, "--num-units", 60, "--target-epsilon", 8, "--steps", 2, "--model", "linear")
    for at in (0, 60):
        run = tmp_path / f"run-{at}"
        with DiskFails(tmp_path / f"run-{at}", at=at, error=errno.ENOSPC).here():
            done = dpvision(*given, "--option", "image_size=8", "--output", run)
        assert done.exit_code == 2, done.output
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert errors[0].endswith("No space left on device. Free some space and try again.")


def test_a_folder_that_can_not_be_written_is_named_and_nothing_is_left_in_it(tmp_path: Path, pictures: Path) -> None:
    parent = tmp_path / "shelf"
    parent.mkdir()
    with DiskFails(parent, at=0, error=errno.EROFS).here():
        said = failure_of(lambda: train(tiny_config(pictures, **PLAN), run=parent / "run", seed=3))
    assert said is not None
    assert said.startswith(f"can't make the run folder {parent / 'run'}: Read-only file system. Choose a folder")
    assert not list(parent.iterdir())


def test_a_release_on_a_read_only_disk_can_still_be_verified(run: Path) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "fsync", "replace", "mkdir", "unlink", "ftruncate"):
            patch.setattr(os, name, refuse)
        assert verify(run).ok
        assert failure_of(lambda: resume_training(run)) is None, "a finished run has nothing to write"
    (run / "release" / "manifest.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "fsync", "replace", "mkdir", "unlink", "ftruncate"):
            patch.setattr(os, name, refuse)
        said = failure_of(lambda: resume_training(run))
    assert said is not None
    assert "Read-only file system" in said


def test_a_clock_that_goes_backwards_changes_nothing(
    tmp_path: Path, pictures: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(pictures, **PLAN)
    ticks = iter(range(10**9, 0, -1))
    for name in ("time", "perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, lambda: float(next(ticks)))
    train(config, run=tmp_path / "run", seed=3)
    monkeypatch.undo()
    assert end_of(tmp_path / "run") == end_of(alone)
    assert verify(tmp_path / "run").ok
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (0, 0))  # files from 1970: nothing goes by their age
    resume_training(tmp_path / "run")
    assert end_of(tmp_path / "run") == end_of(alone)


def test_a_second_process_on_a_run_is_refused_and_the_first_goes_on(
    tmp_path: Path, pictures: Path, alone: Path
) -> None:
    heard: list[str] = []

    class Intruder(RunCallback):
        def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
            if done == 2:
                others = (
                    lambda: resume_training(tmp_path / "run"),
                    lambda: train(tiny_config(pictures, **PLAN), run=tmp_path / "run", seed=4),
                )
                heard.extend(failure_of(attempt) or "" for attempt in others)

    train(tiny_config(pictures, **PLAN), run=tmp_path / "run", seed=3, callback=Intruder())
    assert f"is in use by process {os.getpid()}. Wait until it ends" in heard[0]
    assert "must be a new or an empty folder" in heard[1]
    assert end_of(tmp_path / "run") == end_of(alone)


def test_a_signal_ends_a_run_between_two_steps_with_a_release_that_covers_them(
    tmp_path: Path, pictures: Path, alone: Path
) -> None:
    class Impatient(RunCallback):
        def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
            if done == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    stopped = train(tiny_config(pictures, **PLAN), run=tmp_path / "run", seed=3, callback=Impatient())
    assert stopped.outcome == "stopped"
    assert stopped.certificate["steps_taken"] == 3
    assert verify(tmp_path / "run").ok
    assert resume_training(tmp_path / "run").outcome == "finished"
    assert end_of(tmp_path / "run")[0] == end_of(alone)[0]
    # The ledger commits to the release of the stopped run, too; otherwise it is the same.
    early, late = story_of(tmp_path / "run"), story_of(alone)
    assert [entry for entry in early if entry[0] != "release"] == late[:-1]
    assert [kind for kind, _ in early].count("release") == 2
    assert early[-1] == late[-1]


def test_half_a_line_in_a_young_ledger_still_lets_the_run_say_what_it_spent(tmp_path: Path, pictures: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(pictures, **RELEASED), run=run, seed=3)
    for checkpoint in (run / "private" / "checkpoints").iterdir():
        checkpoint.unlink()
    for name in ("certificate.json", "manifest.json"):
        (run / "release" / name).unlink()
    ledger = run / "release" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes() + b'{"hash":"12')
    (run / "private" / "withdrawn-certificate.json").unlink(missing_ok=True)
    said = failure_of(lambda: resume_training(run))
    assert said is not None
    assert FIRST_STEPS in said
    assert "It did spend 1 × normalisation statistics (noise 8), 4 × training step (noise 1.3)" in said


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("release", "Put it back"),
        ("release/ledger.jsonl", "No such file"),
        ("private/key.json", "No such file"),
        ("private/config.json", "No such file"),
        ("private/checkpoints", FIRST_STEPS),
        ("private", "No such file"),
    ],
)
def test_a_part_of_the_run_that_was_deleted_is_named_when_it_is_needed(run: Path, missing: str, said: str) -> None:
    (run / "release" / "manifest.json").unlink()  # otherwise the run is finished, and nothing else is needed
    path = run / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    heard = failure_of(lambda: resume_training(run))
    assert heard is not None
    assert said in heard, heard


def test_a_checkpoint_of_something_else_is_named_in_one_line(run: Path) -> None:
    """Whole, with a fitting name, and not of this run."""
    folder = RunFolder.open(run)
    mark = folder.open_ledger().mark
    for tensors, values in (({}, {}), ({"model/weight": torch.zeros(3)}, {"optimizer": 3}), (None, {})):
        if tensors is None:
            checkpoint = folder.latest_checkpoint()
            assert checkpoint is not None
            tensors = checkpoint.tensors
        folder.save_checkpoint(STEPS, tensors, {**values, "ledger": mark})
        folder.close()
        said = failure_of(lambda: resume_training(run))
        assert said is not None
        assert "the checkpoint of step 4 is not one of this run" in said


def test_a_run_that_made_only_its_folders_says_that_nothing_was_spent(tmp_path: Path) -> None:
    (tmp_path / "run" / "private").mkdir(parents=True)
    said = failure_of(lambda: resume_training(tmp_path / "run"))
    assert said is not None
    assert said.endswith("stopped before its first checkpoint: start again in another folder. Nothing was spent.")


def test_what_a_killed_writer_left_is_cleared_away(run: Path) -> None:
    leftovers = [run / "release" / ".report.html.x.tmp", run / "private" / ".key.json.x.tmp"]
    for path in leftovers:
        path.write_bytes(b"half")
    assert not verify(run).ok
    with RunFolder.open(run) as folder:
        folder.add_to_release("report.html", b"<html></html>")
    assert not any(path.exists() for path in leftovers)
    assert verify(run).ok
