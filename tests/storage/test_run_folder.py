"""A run on disk: whole files, one writer, and a newest checkpoint that is right (PITFALLS 11, 20, 29, 30)."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from dpvision.errors import ArgumentError, DataError, DPVisionError, PrivacyError, TamperError
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import Event
from dpvision.privacy.randomness import Keys
from dpvision.storage.files import json_bytes, sha256_hex, weights_bytes
from dpvision.storage.run_folder import CERTIFICATE, MANIFEST, SEARCH_LEDGER, WEIGHTS, RunFolder

HEADER = {"run_id": "r1", "privacy_unit": "example", "adjacency": "add_remove", "num_units": 1000, "delta": 1e-4}
STEP = Event(sample_rate=0.1, noise_multiplier=1.5)
CONFIG_TEXT = '{\n  "name": "run"\n}\n'


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model/weight": torch.full((3, 2), value), "count": torch.tensor(7), "empty": torch.zeros(0)}


def make_run(path: Path, *, steps: int = 4) -> tuple[RunFolder, Ledger]:
    folder = RunFolder.create(path)
    folder.save_key(Keys.from_seed(1), run_id="r1", bindings=[{"data": "a"}])
    folder.write_config(CONFIG_TEXT)
    ledger = Ledger.create(folder.ledger_path, HEADER)
    for step in range(steps):
        ledger.charge(STEP, step=step)
    return folder, ledger


def claim(ledger: Ledger, weights: bytes, *, committed: bool = True) -> dict[str, Any]:
    """As much of a certificate as the folder looks at; the ledger commits to it, unless told not to."""
    hashes = {"weights_sha256": sha256_hex(weights), "config_sha256": sha256_hex(CONFIG_TEXT.encode())}
    if committed:
        ledger.commit_release(**hashes, data={})
    return {"epsilon": 1.0, "ledger": ledger.mark, **hashes, "data": {}}


def finish(folder: RunFolder, ledger: Ledger) -> bytes:
    weights = weights_bytes(tensors(1.0))
    folder.write_release(weights=weights, certificate=claim(ledger, weights), metrics={"curve": []})
    return weights


def files_below(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_new_run_keeps_private_things_to_its_owner(tmp_path: Path) -> None:
    folder, _ = make_run(tmp_path / "run")
    folder.save_checkpoint(1, tensors(0.0), {"ledger": {"length": 1, "head": "0" * 64}})
    folder.write_unsafe("norms", {"mean": 1.0})
    assert folder.private.stat().st_mode & 0o777 == 0o700
    for path in folder.private.rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o777 == 0o600, path
    assert (folder.private / "unsafe_norms.json").exists()
    assert set(files_below(folder.release)) == {"ledger.jsonl", "config.json"}


def test_the_secret_is_nowhere_but_in_private(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    finish(folder, ledger)
    secret = Keys.from_seed(1).secret
    for name, content in files_below(folder.release).items():
        assert secret not in content, name
        assert secret.hex().encode() not in content, name


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"meow")
    with pytest.raises(ArgumentError, match="empty folder"):
        RunFolder.create(tmp_path / "photos")
    assert files_below(tmp_path) == {"photos/cat.png": b"meow"}
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty")
    with pytest.raises(ArgumentError, match="run folder"):
        RunFolder.open(tmp_path / "photos")


def test_the_key_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    keys = Keys.from_os_entropy("context")
    folder.save_key(keys, run_id="r1", bindings=[{"data": "a"}, {"data": "b"}])
    stored = RunFolder.open(tmp_path / "run").load_key()
    assert (stored.keys, stored.run_id, stored.bindings) == (keys, "r1", ({"data": "a"}, {"data": "b"}))
    assert folder.key_path.stat().st_mode & 0o777 == 0o600


def test_every_flipped_bit_of_the_key_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.save_key(Keys.from_os_entropy("c"), run_id="r1", bindings=[{"data": "a"}])
    content = folder.key_path.read_bytes()
    stored = folder.load_key()
    for bit in range(0, 8 * len(content), 13):
        folder.key_path.write_bytes(flipped(content, bit))
        try:
            assert folder.load_key() == stored, "only white space between the fields may differ"
        except TamperError:
            continue


def flipped(content: bytes, bit: int) -> bytes:
    return content[: bit // 8] + bytes([content[bit // 8] ^ (1 << bit % 8)]) + content[bit // 8 + 1 :]


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    assert folder.latest_checkpoint() is None
    values = {"seconds": 1.5, "curve": [{"step": 1}], "ledger": ledger.mark}
    path = folder.save_checkpoint(120, tensors(0.1), values)
    assert path.name == f"step-00000120-{sha256_hex(path.read_bytes())}.safetensors"
    found = folder.latest_checkpoint()
    assert found is not None
    assert (found.step, found.values, found.warnings) == (120, values, ())
    assert found.tensors.keys() == tensors(0.1).keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in tensors(0.1).items())


def test_equal_state_gives_an_equal_file(tmp_path: Path) -> None:
    names = []
    for name in ("a", "b"):
        folder, ledger = make_run(tmp_path / name)
        names.append(folder.save_checkpoint(1, tensors(0.1), {"b": 1, "a": 2, "ledger": ledger.mark}).name)
    assert names[0] == names[1]


def test_tensors_that_share_memory_or_are_views_can_be_saved(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    base = torch.arange(6.0).reshape(2, 3)
    folder.save_checkpoint(1, {"a": base, "b": base, "c": base.T}, {"ledger": ledger.mark})
    found = folder.latest_checkpoint()
    assert found is not None
    assert torch.equal(found.tensors["c"], base.T)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    (folder.checkpoints / ".step-00000001-x.safetensors.abc.tmp").write_bytes(b"left by a killed writer")
    for step in (10, 20, 30, 40):
        folder.save_checkpoint(step, tensors(step), {"ledger": ledger.mark})
    assert [p.name[5:13] for p in sorted(folder.checkpoints.iterdir())] == ["00000030", "00000040"]


def test_a_checkpoint_must_know_the_ledger(tmp_path: Path) -> None:
    folder, _ = make_run(tmp_path / "run")
    for values in ({}, {"ledger": None}, {"ledger": {"length": 0, "head": "0" * 64}}, {"ledger": {"length": 3}}):
        with pytest.raises(ArgumentError, match="ledger's mark"):
            folder.save_checkpoint(1, tensors(0.0), values)
    assert list(folder.checkpoints.iterdir()) == []


def test_a_damaged_newest_checkpoint_is_named_and_the_older_one_used(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    folder.save_checkpoint(10, tensors(1.0), {"ledger": ledger.mark})
    newest = folder.save_checkpoint(20, tensors(2.0), {"ledger": ledger.mark})
    content, rng = newest.read_bytes(), random.Random(5)
    for _ in range(60):
        bit = rng.randrange(8 * len(content))
        newest.write_bytes(rng.choice([flipped(content, bit), content[: bit // 8], content + b"\0"]))
        found = folder.latest_checkpoint()
        assert found is not None
        assert found.step == 10
        assert newest.name in found.warnings[0]
    folder.save_checkpoint(15, tensors(1.5), {"ledger": ledger.mark})
    found = folder.latest_checkpoint()
    assert found is not None
    assert (found.step, found.warnings) == (15, ())


def test_only_damaged_checkpoints_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    for step in (10, 20):
        folder.save_checkpoint(step, tensors(1.0), {"ledger": ledger.mark}).write_bytes(b"")
    with pytest.raises(TamperError, match=r"no whole checkpoint is left.*step-00000020.*step-00000010"):
        folder.latest_checkpoint()


def test_a_checkpoint_renamed_to_another_step_is_damaged(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    path = folder.save_checkpoint(10, tensors(1.0), {"ledger": ledger.mark})
    path.rename(path.with_name(path.name.replace("00000010", "00000099")))
    with pytest.raises(TamperError, match="do not agree"):
        folder.latest_checkpoint()


def test_of_two_checkpoints_of_one_step_the_one_that_knows_more_counts(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run", steps=2)
    first = folder.save_checkpoint(10, tensors(1.0), {"ledger": ledger.mark})
    kept = first.read_bytes()
    ledger.note("fork", {"fork": 1, "step": 10, "reason": "x"})
    folder.save_checkpoint(10, tensors(2.0), {"ledger": ledger.mark})
    first.write_bytes(kept)
    found = folder.latest_checkpoint()
    assert found is not None
    assert found.values["ledger"] == ledger.mark


def test_a_ledger_shorter_than_the_checkpoint_remembers_is_refused(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run", steps=6)
    lines = folder.ledger_path.read_bytes().splitlines(keepends=True)
    folder.save_checkpoint(6, tensors(1.0), {"ledger": ledger.mark})
    folder.open_ledger()
    folder.ledger_path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(TamperError, match="rolled back: 6 of 7"):
        folder.open_ledger()


def test_the_longer_of_checkpoint_and_certificate_counts(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run", steps=3)
    folder.save_checkpoint(3, tensors(1.0), {"ledger": ledger.mark})
    short = folder.ledger_path.read_bytes()
    ledger.charge(STEP, step=3)
    finish(folder, ledger)
    folder.ledger_path.write_bytes(short)
    with pytest.raises(TamperError, match="rolled back: 4 of 6"):
        folder.open_ledger()


def test_a_certificate_that_can_not_be_read_stops_a_resume(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    finish(folder, ledger)
    for content in (b"", b"{}", b'{"ledger": {"length": 5, "head": 3}}', b"\xff"):
        (folder.release / CERTIFICATE).write_bytes(content)
        with pytest.raises(TamperError, match="certificate"):
            folder.open_ledger()


def test_a_release_is_whole_and_listed(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    (folder.release / ".weights.safetensors.x.tmp").write_bytes(b"left by a killed writer")
    weights = finish(folder, ledger)
    found = files_below(folder.release)
    assert found.keys() == {
        "ledger.jsonl",
        "config.json",
        "weights.safetensors",
        "metrics.json",
        "certificate.json",
        "manifest.json",
    }
    manifest = json.loads(found.pop("manifest.json"))
    assert manifest == {name: sha256_hex(content) for name, content in found.items()}
    assert found[WEIGHTS] == weights
    loaded = RunFolder.open(tmp_path / "run").load_weights()
    assert all(torch.equal(loaded[name], value) for name, value in tensors(1.0).items())


def test_a_report_can_be_added_without_making_a_changed_file_right(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    finish(folder, ledger)
    old = json.loads((folder.release / MANIFEST).read_bytes())
    (folder.release / "metrics.json").write_bytes(b"{}")
    folder.add_to_release("report.html", b"<html>")
    new = json.loads((folder.release / MANIFEST).read_bytes())
    assert new == {**old, "report.html": sha256_hex(b"<html>")}
    for name in ("../evil", "a/b", ".hidden", "", "certificate.json", "manifest.json"):
        with pytest.raises(ArgumentError):
            folder.add_to_release(name, b"x")
    assert "evil" not in files_below(tmp_path)


def test_a_certificate_of_a_shorter_ledger_is_never_written(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    weights = weights_bytes(tensors(1.0))
    certificate = claim(ledger, weights)
    ledger.charge(STEP, step=4)
    with pytest.raises(PrivacyError, match="ledger as it is on disk"):
        folder.write_release(weights=weights, certificate=certificate, metrics={})
    with pytest.raises(PrivacyError, match="other weights"):
        folder.write_release(weights=b"other", certificate=claim(ledger, weights), metrics={})
    ledger.charge(STEP, step=5)
    with pytest.raises(PrivacyError, match="the ledger does not commit to these weights"):
        folder.write_release(weights=weights, certificate=claim(ledger, weights, committed=False), metrics={})
    assert not (folder.release / CERTIFICATE).exists()


def test_the_certificate_is_withdrawn_before_the_ledger_grows(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run", steps=4)
    finish(folder, ledger)
    folder.close()
    again = RunFolder.open(tmp_path / "run")
    longer = again.open_ledger()
    longer.charge(STEP, step=3)
    assert (folder.release / CERTIFICATE).exists(), "an exact replay changes nothing"
    longer.charge(STEP, step=4)
    assert not (folder.release / CERTIFICATE).exists()
    assert not (folder.release / MANIFEST).exists()
    again._released.unlink()  # runs of older versions have none: the withdrawn certificate remembers the length, too
    short = folder.ledger_path.read_bytes().splitlines(keepends=True)[:4]
    folder.ledger_path.write_bytes(b"".join(short))
    with pytest.raises(TamperError, match="rolled back: 4 of 6"):
        again.open_ledger()


def test_at_no_moment_does_a_certificate_claim_less_than_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look at the folder before and after every rename and removal, which is all that a crash can fall between."""
    folder, ledger = make_run(tmp_path / "run", steps=2)
    finish(folder, ledger)
    folder.close()
    seen = 0

    def look() -> None:
        nonlocal seen
        seen += 1
        if (folder.release / CERTIFICATE).exists():
            covered = json.loads((folder.release / CERTIFICATE).read_bytes())["ledger"]["length"]
            assert covered >= len(folder.ledger_path.read_bytes().splitlines())

    for name in ("replace", "fsync", "unlink"):
        real = getattr(os, name)

        def watched(*arguments: Any, real: Any = real, **options: Any) -> Any:
            look()
            result = real(*arguments, **options)
            look()
            return result

        monkeypatch.setattr(os, name, watched)
    again = RunFolder.open(tmp_path / "run")
    longer = again.open_ledger()
    for step in range(2, 5):
        longer.charge(STEP, step=step)
    finish(again, longer)
    assert seen > 20


def test_changed_weights_are_not_loaded(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    weights = finish(folder, ledger)
    rng = random.Random(6)
    for _ in range(100):
        bit = rng.randrange(8 * len(weights))
        (folder.release / WEIGHTS).write_bytes(rng.choice([flipped(weights, bit), weights[: bit // 8], weights + b"x"]))
        with pytest.raises(TamperError, match="not the file that the certificate names"):
            folder.load_weights()


def test_two_processes_can_not_write_one_run(tmp_path: Path) -> None:
    folder, _ = make_run(tmp_path / "run")
    code = f"""
        from pathlib import Path
        from dpvision.errors import DPVisionError
        from dpvision.storage.run_folder import RunFolder
        folder = RunFolder.open(Path({str(tmp_path / "run")!r}))
        folder.read_config()
        try:
            folder.open_ledger()
        except DPVisionError as error:
            print(error)
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert f"is in use by process {os.getpid()}." in done.stdout
    folder.close()
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == ""
    with RunFolder.open(tmp_path / "run") as again:
        again.lock()
    RunFolder.open(tmp_path / "run").lock()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from dpvision.storage.run_folder import RunFolder
        folder = RunFolder.create(Path({str(tmp_path / "run")!r}))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    RunFolder.open(tmp_path / "run").lock()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_can_not_be_written_is_one_line_and_leaves_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    folder, ledger = make_run(tmp_path / "run")
    folder.save_checkpoint(1, tensors(1.0), {"ledger": ledger.mark})
    weights = weights_bytes(tensors(1.0))
    certificate = claim(ledger, weights)
    before = files_below(tmp_path)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(error, os.strerror(error))

    attempts = (
        lambda: folder.save_checkpoint(2, tensors(2.0), {"ledger": ledger.mark}),
        lambda: folder.write_release(weights=weights, certificate=certificate, metrics={}),
        lambda: folder.write_unsafe("norms", {}),
        lambda: folder.save_key(Keys.from_seed(2), run_id="r2", bindings=[]),
        lambda: RunFolder.create(tmp_path / "other"),
    )
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            for attempt in attempts[: 5 if name == "fsync" else 4]:
                with pytest.raises(DPVisionError, match=os.strerror(error)) as caught:
                    attempt()
                assert "\n" not in str(caught.value)
    assert {name: content for name, content in files_below(tmp_path).items() if content} == before


def test_a_run_folder_below_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(DPVisionError, match="can't make the run folder"):
        RunFolder.create(tmp_path / "file" / "run")


def test_links_and_pipes_in_place_of_files_are_refused(tmp_path: Path) -> None:
    folder, ledger = make_run(tmp_path / "run")
    finish(folder, ledger)
    (tmp_path / "secret").write_bytes(b"x")
    (folder.release / WEIGHTS).unlink()
    (folder.release / WEIGHTS).symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match="ordinary file"):
        folder.load_weights()
    (folder.release / WEIGHTS).unlink()
    os.mkfifo(folder.release / WEIGHTS)
    with pytest.raises(DataError, match="ordinary file"):
        folder.load_weights()


def test_values_that_are_not_json_are_refused(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf"), {1, 2}, torch.zeros(1)):
        with pytest.raises(ArgumentError, match="not JSON"):
            json_bytes({"value": value})


@pytest.mark.parametrize("kept", ["nothing", "a charge", "the ledger of a search"])
def test_only_a_run_that_spent_nothing_is_removed_for_a_restart(tmp_path: Path, kept: str) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        path = folder.release / SEARCH_LEDGER if kept == "the ledger of a search" else folder.ledger_path
        Ledger.create(path, HEADER, charges=[STEP] if kept == "a charge" else [])
    RunFolder(tmp_path / "run").remove_unspent()
    assert path.exists() is (kept != "nothing")


@pytest.mark.parametrize("inside", ["private/thesis.tex", "private/config.json", "private/checkpoints/best.pt"])
@pytest.mark.parametrize("of_a_run", [False, True])
def test_files_that_are_not_of_a_run_are_never_removed(tmp_path: Path, inside: str, of_a_run: bool) -> None:
    """Someone who names a folder of his own as that of the run, by mistake, loses nothing."""
    if of_a_run:
        RunFolder.create(tmp_path / "run").close()
    path = tmp_path / "run" / inside
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("years of work")
    (tmp_path / "run" / "release").mkdir(exist_ok=True)
    RunFolder(tmp_path / "run").remove_unspent()
    assert path.exists() is not (of_a_run and path.name == "config.json")
    assert of_a_run or not (tmp_path / "run" / "private" / "lock").exists()


def test_a_lock_that_was_removed_meanwhile_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two restarts of one job at once: the slower one must not remove what the faster one has begun."""
    import fcntl

    flock, begun = fcntl.flock, list[RunFolder]()

    def slowly(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        RunFolder(tmp_path / "run").remove_unspent()
        begun.append(RunFolder.create(tmp_path / "run"))
        flock(descriptor, how)

    RunFolder.create(tmp_path / "run").close()
    monkeypatch.setattr(fcntl, "flock", slowly)
    with pytest.raises(DPVisionError, match="begun again by another process"):
        RunFolder(tmp_path / "run").remove_unspent()
    assert begun[0].checkpoints.is_dir()


def test_what_a_crash_left_of_a_start_is_removed(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config("{}")
        folder.write_whole_config("{}")
        (folder.private / ".key.json.a1b2.tmp").write_bytes(b"half")
        folder.note_start(job="a job")
    RunFolder(tmp_path / "run").remove_unspent()
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "run" / "private" / "checkpoints").mkdir(parents=True)  # killed before its lock
    RunFolder(tmp_path / "run").remove_unspent()
    assert list((tmp_path / "run").iterdir()) == []
