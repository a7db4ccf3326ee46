"""What ``dpvision doctor`` finds, and that it says so when torch or something else is broken."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import dpvision
from dpvision import doctor
from dpvision.doctor import Problem, examine


def dpvision_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dpvision", "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environment},
    )


def torch_that(folder: Path, line: str) -> dict[str, str]:
    """An environment in which ``import torch`` does what ``line`` says."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(line + "\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def found_in(facts: dict[str, Any]) -> dict[str, Any]:
    """What ``probe`` finds on a machine that has everything, with ``facts`` in their places."""
    complete = {
        "torch": {"version": "2.13.0"},
        "devices": {"cpu": "AVX2", "cuda": []},
        "threads": {"torch": 1},
        "kernels": {"origin": "prebuilt", "reason": "", "cache": "/cache"},
        "data": {"folder": "/data", "datasets": {}},
    }
    return {**complete, **facts}


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Change this, and ``examine`` finds it."""
    facts = found_in({})
    monkeypatch.setattr(doctor, "_probe", lambda problems: facts)
    return facts


def problems_about(words: str) -> list[Problem]:
    return [problem for problem in examine().problems if words in problem.what]


def test_the_command_prints_what_is_there_and_ends_with_0(tmp_path: Path) -> None:
    began = time.monotonic()
    done = dpvision_doctor("--json", DPVISION_DATA=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["dpvision"]["version"] == dpvision.__version__
    assert found["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert found["data"]["folder"] == str(tmp_path)
    assert found["threads"]["torch"] >= 1
    assert set(found["extras"]) == {"demo", "medical", "tables", "pretrained", "tune", "export"}
    assert found["packages"]["torch"] == found["torch"]["version"]
    assert found["kernels"]["origin"] in ("prebuilt", "compiled", "plain")
    assert time.monotonic() - began < 120  # two seconds on an idle machine; it compiles nothing
    assert not list((tmp_path / "cache").glob("dpvision/native/*"))


def test_the_lines_for_people_name_every_subject() -> None:
    lines = dpvision_doctor().stdout.splitlines()
    for subject in ("python", "dpvision", "torch", "devices", "threads", "kernels", "data", "packages", "extras"):
        assert f"{subject}:" in lines
    assert lines[-1] == "everything required is there"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("raise ImportError('libtorch_cpu.so: undefined symbol')", "libtorch_cpu.so: undefined symbol"),
        ("raise OSError('no such file: libgomp')", "no such file: libgomp"),
        ("import os; os.abort()", "the process ended with SIGABRT"),
    ],
)
def test_a_broken_torch_is_named_with_the_command_that_mends_it(tmp_path: Path, line: str, said: str) -> None:
    done = dpvision_doctor("--json", **torch_that(tmp_path, line))
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert not found["ok"]
    first = found["problems"][0]
    assert said in first["what"]
    assert first["required"]
    assert first["fix"] == f"{doctor.PIP} --force-reinstall torch"


def test_a_torch_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(subprocess, "run", hang)
    found = examine()
    assert not found.ok
    assert "torch was not imported within" in found.problems[0].what


def test_a_missing_package_is_required_and_that_of_an_extra_is_not(
    monkeypatch: pytest.MonkeyPatch, probed: dict[str, Any]
) -> None:
    installed = doctor.importlib.metadata.version

    def version(name: str) -> str:
        if name in ("torch", "optuna"):
            raise PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    found = examine()
    assert not found.ok
    assert (found.facts["packages"]["torch"], found.facts["extras"]["tune"]["optuna"]) == (None, None)
    [torch] = [each for each in found.problems if each.what == "torch is not installed"]
    assert (torch.fix, torch.required) == (f"{doctor.PIP} 'torch>=2.6'", True)
    [optuna] = [each for each in found.problems if each.what == "optuna is not installed (extra tune)"]
    assert (optuna.fix, optuna.required) == (f"{doctor.PIP} 'optuna>=4.4'", False)


def test_a_package_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, probed: dict[str, Any]) -> None:
    installed = doctor.importlib.metadata.version
    monkeypatch.setattr(
        doctor.importlib.metadata, "version", lambda name: "1.26.4" if name == "numpy" else installed(name)
    )
    [numpy] = problems_about("numpy")
    assert (numpy.what, numpy.required) == ("numpy 1.26.4 is not >=2", True)


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("they are compiled on first use", doctor.COMPILE),
        ("no C++ compiler was found", "sudo apt install g++ (Debian, Ubuntu) or sudo dnf install gcc-c++ (Fedora)"),
        ("switched off by DPVISION_NATIVE=0", "unset DPVISION_NATIVE"),
        ("DPVISION_NATIVE=avx512 needs a processor with avx512f", "unset DPVISION_NATIVE"),
        ("kernels.so in the cache of kernels could have been changed by another user", "chmod -R go-w /cache"),
        ("there are kernels for Linux on x86-64 only, this is Darwin on arm64", ""),
    ],
)
def test_missing_kernels_come_with_what_brings_them(probed: dict[str, Any], reason: str, fix: str) -> None:
    probed["kernels"] = {"origin": "plain", "reason": reason, "cache": "/cache"}
    [problem] = problems_about("no kernels")
    assert problem == Problem(f"no kernels, so training is slower: {reason}", fix)


def test_every_reason_of_the_kernels_that_a_user_can_act_on_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are those of ``kernels.compile``: a reason that was reworded would lose its fix."""
    from dpvision.kernels import compile as building

    reasons = [building.NOT_YET]
    for value in ("0", "sse9"):
        monkeypatch.setenv("DPVISION_NATIVE", value)
        reasons.append(building.without_compiling().reason)
    for reason in reasons:
        problems: list[Problem] = []
        doctor._judge_kernels(problems, {"reason": reason})
        assert problems[0].fix, reason


def test_more_threads_than_cores_are_a_problem(probed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cores", lambda: 2)
    probed["threads"] = {"torch": 64}
    [problem] = problems_about("64 threads on 2 cores")
    assert problem.fix == "export OMP_NUM_THREADS=2"
    probed["threads"] = {"torch": 2}
    assert not problems_about("threads")


def test_a_dataset_that_is_not_here_is_fetched_on_first_use(probed: dict[str, Any]) -> None:
    probed["data"] = {"folder": "/data", "datasets": {"mnist": None, "cifar10": "/data/cifar10"}}
    [problem] = problems_about("is not in /data")
    assert problem == Problem("mnist is not in /data", "dpvision train mnist --target-epsilon 3")


def test_a_system_without_file_locks_cannot_train(probed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_has_file_locks", lambda: False)
    [problem] = problems_about("file locks")
    assert problem.required
    assert "WSL 2" in problem.fix


@pytest.mark.parametrize(("rank", "lines"), [("0", ["compiling"]), ("1", [])])
def test_a_command_says_once_that_it_compiles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, lines: list[str]
) -> None:
    from dpvision import cli

    monkeypatch.setenv("RANK", rank)
    logger = logging.getLogger("dpvision.kernels")
    before = (logger.level, list(logger.handlers))
    logger.handlers = []  # of commands that ran before
    try:
        cli._say_when_kernels_are_compiled()
        logger.info("compiling")
    finally:
        logger.level, logger.handlers = before
    assert capsys.readouterr().err.splitlines() == lines


def test_commands_call_python_only_where_that_is_this_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = str(Path(sys.executable).parent / "python")
    for found, shown in ((here, "python"), ("/usr/bin/python", sys.executable), (None, sys.executable)):
        monkeypatch.setattr(doctor.shutil, "which", lambda _, found=found: found)
        assert doctor.this_python() == shown
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my env" / "python"))
    assert doctor.this_python() == f"'{tmp_path / 'my env' / 'python'}'"
