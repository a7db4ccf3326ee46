"""A run is resumed from any directory, and one that is finished says so and stays as it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpvision.cli import app
from dpvision.errors import DataError, PrivacyError
from dpvision.release.verify import verify
from dpvision.storage.run_folder import RunFolder
from dpvision.training import RunCallback, resume_training, train
from tiny_runs import interrupt_run, tiny_config, write_images


class Heard(RunCallback):
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.steps = 0

    def message(self, text: str) -> None:
        self.messages.append(text)

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        self.steps += 1


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run on ``scans.npz``, named by a relative path, that stopped after step 6 of 12."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    write_images(Path("scans.npz"))
    interrupt_run(Path("elsewhere/run"), tiny_config(Path("scans.npz")), after=6, seed=None)
    return tmp_path / "home"


def no_forks(run: Path) -> bool:
    return b'"kind":"fork"' not in (run / "release" / "ledger.jsonl").read_bytes()


def test_a_run_resumes_from_another_directory_without_a_fork(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_images(other / "scans.npz", train=66)  # of the same name, but other images
    monkeypatch.chdir(other)
    assert resume_training(home / "elsewhere" / "run").outcome == "finished"
    assert no_forks(home / "elsewhere" / "run")
    assert verify(home / "elsewhere" / "run").ok


def test_a_run_that_was_moved_with_its_data_resumes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home.rename(tmp_path / "moved")
    assert resume_training(tmp_path / "moved" / "elsewhere" / "run").outcome == "finished"
    assert no_forks(tmp_path / "moved" / "elsewhere" / "run")


def test_other_data_of_the_same_name_is_refused_as_before(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(home / "elsewhere" / "run", tmp_path / "run")
    (home / "scans.npz").unlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no longer there: scans\.npz, looked for in .* Move it back"):
        resume_training(tmp_path / "run")
    write_images(tmp_path / "scans.npz", train=66)
    with pytest.raises(PrivacyError, match="the data of this run changed"):
        resume_training(tmp_path / "run")


def test_a_finished_run_says_so_and_nothing_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(write_images(tmp_path / "scans.npz"))
    result = train(config, run=tmp_path / "run")
    (tmp_path / "scans.npz").unlink()  # nothing is read
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (tmp_path / "run").rglob("*")}
    heard = Heard()
    again = resume_training(tmp_path / "run", callback=heard)
    assert heard.messages == [f"{tmp_path / 'run'} is finished: all 12 steps are done. Nothing was changed."]
    assert (again.outcome, again.certificate, again.metrics) == ("finished", result.certificate, result.metrics)
    after = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (tmp_path / "run").rglob("*")}
    assert after == before
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["resume", "run"])
    assert shown.exit_code == 0
    assert "run is finished: all 12 steps are done" in shown.stderr
    assert verify(tmp_path / "run").ok


def test_a_finished_run_whose_release_is_damaged_is_released_again(tmp_path: Path) -> None:
    config = tiny_config(write_images(tmp_path / "scans.npz"))
    train(config, run=tmp_path / "run")
    (tmp_path / "run" / "release" / "manifest.json").unlink()
    assert not RunFolder.open(tmp_path / "run").release_is_whole()
    heard = Heard()
    assert resume_training(tmp_path / "run", callback=heard).outcome == "finished"
    assert heard.steps == 0
    assert verify(tmp_path / "run").ok
    (tmp_path / "run" / "release" / ".metrics.json.x1.tmp").write_text("half")  # of a writer that was killed
    assert resume_training(tmp_path / "run").outcome == "finished"
    assert verify(tmp_path / "run").ok


def test_the_directory_of_the_start_is_recorded_in_private_alone(home: Path) -> None:
    run = home / "elsewhere" / "run"
    assert RunFolder.open(run).started_in() == home
    assert os.fsencode(home) not in b"".join(path.read_bytes() for path in (run / "release").iterdir())
    (run / "private" / "started-in.json").unlink()
    assert RunFolder.open(run).started_in() is None
