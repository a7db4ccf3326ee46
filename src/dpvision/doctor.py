"""What this installation has and lacks: versions, devices, threads, kernels, data, optional packages.

For everything that is missing there is a ``Problem`` with the command that fixes it. What needs torch is examined in a
process of its own (``probe``), because a broken torch may end the process that imports it. No private data is read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

from dpvision import __version__
from dpvision.errors import brief
from dpvision.openmp import VARIABLES, is_bounded

_FOR_DEVELOPERS: Final = ("dev", "dist", "docs")
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_DYNAMIC", *VARIABLES)
_SECONDS: Final = 120
_EXTRA: Final = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")


def this_python() -> str:
    """How to call this interpreter in a shell: "python" only where that is this one."""
    found = shutil.which("python")
    ours = found is not None and Path(found).parent == Path(sys.executable).parent
    return "python" if ours else shlex.quote(sys.executable)


PIP: Final = f"{this_python()} -m pip install"
COMPILE: Final = f"{this_python()} -c 'from dpvision import kernels; kernels.available()'"


@final
@dataclass(frozen=True)
class Problem:
    """Something that is missing or broken.

    Attributes:
        what: What, in one line.
        fix: The command or the step that fixes it; empty if there is none.
        required: Whether nothing works without it.
    """

    what: str
    fix: str
    required: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found.

    Attributes:
        facts: Names and values by subject: python, dpvision, torch, devices, threads, kernels, data, packages, extras.
        problems: What is missing, the required things first.
    """

    facts: Mapping[str, Mapping[str, Any]]
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything required is there."""
        return not any(problem.required for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """The examination as JSON."""
        return {"ok": self.ok, **self.facts, "problems": [asdict(problem) for problem in self.problems]}

    def lines(self) -> list[str]:
        """The examination for people: the facts by subject, then what is missing and how to fix it."""
        lines = []
        for subject, facts in self.facts.items():
            shown = [(name, _shown(value)) for name, value in facts.items() if value not in (None, "", [], {})]
            lines += [f"{subject}:", *(f"  {name}: {value}" for name, value in shown)]
        for title, required in (("broken", True), ("missing, not required", False)):
            found = [problem for problem in self.problems if problem.required == required]
            lines += [f"{title}:"] if found else []
            lines += [f"  {each.what}{f'  ->  {each.fix}' if each.fix else ''}" for each in found]
        return [*lines, "everything required is there" if self.ok else "something required is broken: see above"]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {'-' if each is None else each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def examine() -> Examination:
    """Look at this installation; nothing is compiled or downloaded."""
    problems: list[Problem] = []
    facts: dict[str, dict[str, Any]] = {
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": _platform()},
        "dpvision": {"version": __version__, "path": str(Path(__file__).parent)},
    }
    if not _has_file_locks():
        fix = "use WSL 2 on Windows, which is Linux on x86-64"
        problems.append(Problem("this system has no POSIX file locks, which run folders need", fix, required=True))
    packages, extras = _packages(problems)
    found = _probe(problems)
    facts |= {subject: found.get(subject, {}) for subject in ("torch", "devices", "threads", "kernels", "data")}
    facts["threads"] = {**facts["threads"], **_thread_settings(problems, facts["threads"].get("torch"))}
    _judge_kernels(problems, facts["kernels"])
    _judge_data(problems, facts["data"])
    facts |= {"packages": packages, "extras": extras}
    return Examination(facts=facts, problems=sorted(problems, key=lambda problem: not problem.required))


def _platform() -> str:
    library = " ".join(platform.libc_ver())
    return f"{platform.system()} {platform.machine()}{f', {library}' if library.strip() else ''}"


def _has_file_locks() -> bool:
    return importlib.util.find_spec("fcntl") is not None


# ---- Packages


def _packages(problems: list[Problem]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Versions of what dpvision requires, and of what each extra adds; None for a package that is not installed."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        problems.append(Problem("packaging is not installed", f"{PIP} packaging", required=True))
        return {}, {}
    try:
        declared = importlib.metadata.metadata("dpvision")
    except importlib.metadata.PackageNotFoundError:
        problems.append(Problem("dpvision is not installed, only found on the path", f"{PIP} ."))
        return {}, {}
    wanted = declared["Requires-Python"]
    if wanted and not Requirement(f"python{wanted}").specifier.contains(platform.python_version(), prereleases=True):
        problems.append(Problem(f"python {platform.python_version()} is not {wanted}", "", required=True))
    packages: dict[str, Any] = {}
    extras: dict[str, Any] = {}
    for line in declared.get_all("Requires-Dist") or ():
        requirement, extra = Requirement(line), _EXTRA.search(line)
        if extra is not None and extra[1] in _FOR_DEVELOPERS:
            continue
        version = _installed(requirement.name)
        (packages if extra is None else extras.setdefault(extra[1], {}))[requirement.name] = version
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            state = "is not installed" if version is None else f"{version} is not {requirement.specifier}"
            purpose = "" if extra is None else f" (extra {extra[1]})"
            fix = f"{PIP} '{requirement.name}{requirement.specifier}'"
            problems.append(Problem(f"{requirement.name} {state}{purpose}", fix, required=extra is None))
    return packages, extras


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- What needs torch


def probe() -> dict[str, Any]:
    """Collect what only torch knows. ``examine`` calls it in a process of its own."""
    import torch

    from dpvision.data.datasets import DATASETS, DIGITS, cache_folder, locate
    from dpvision.data.options import LoadOptions
    from dpvision.errors import DataError
    from dpvision.kernels import compile

    found = compile.without_compiling()
    kernels = {
        "origin": found.origin,
        "target": found.target,
        "identity": found.identity,
        "reason": found.reason,
        "prebuilt": found.passed_over,
        "cache": str(compile.cache_folder()),
    }
    data: dict[str, str | None] = {DIGITS: None if _installed("scikit-learn") is None else "in scikit-learn"}
    for name, dataset in DATASETS.items():
        try:
            data[name] = str(locate(dataset, LoadOptions(download=False)))
        except DataError:
            data[name] = None  # not a fault: it is downloaded on first use
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda, "path": str(Path(torch.__file__).parent)},
        "devices": {"cpu": torch.backends.cpu.get_cpu_capability(), "cuda": gpus},
        "threads": {"torch": torch.get_num_threads()},
        "kernels": kernels,
        "data": {"folder": str(cache_folder()), "datasets": data},
    }


def _probe(problems: list[Problem]) -> dict[str, Any]:
    """Run ``probe`` in a process of its own; a failure is a problem."""
    program = "import json; from dpvision.doctor import probe; print(json.dumps(probe()))"
    reinstall = f"{PIP} --force-reinstall torch"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        problems.append(Problem(f"torch was not imported within {_SECONDS} s", reinstall, required=True))
        return {}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = brief((done.stderr.strip().splitlines() or ["no message"])[-1], most=200)
    if done.returncode < 0:
        last = f"the process ended with {signal.Signals(-done.returncode).name}"
    if _installed("torch") is not None:  # a torch that is not installed is named already
        problems.append(Problem(f"torch or a package that it needs is broken: {last}", reinstall, required=True))
    return {}


def _thread_settings(problems: list[Problem], threads: int | None) -> dict[str, Any]:
    """The cores that this process may use, and the settings of OpenMP."""
    cores = _cores()
    if threads is not None and threads > cores:
        what = f"torch uses {threads} threads on {cores} cores"
        problems.append(Problem(what, f"export OMP_NUM_THREADS={cores}"))
    settings = {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ}
    return {"cores": cores, "settings": settings, "idle threads": "bounded by dpvision" if is_bounded() else ""}


def _cores() -> int:
    """Cores for this process: its affinity, and the limit of its control group, which containers set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.is_file():
        quota, _, period = limit.read_text().partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def _judge_kernels(problems: list[Problem], kernels: Mapping[str, Any]) -> None:
    """Say how to get kernels, where there are none and can be."""
    reason = kernels.get("reason", "")
    if not reason:
        return
    fixes = {
        "on first use": COMPILE,
        "no C++ compiler": "sudo apt install g++ (Debian, Ubuntu) or sudo dnf install gcc-c++ (Fedora)",
        "switched off by": "unset DPVISION_NATIVE",
        "DPVISION_NATIVE": "unset DPVISION_NATIVE",
        "another user": f"chmod -R go-w {kernels.get('cache', '')}",
        "could not be built": f"make wheel, then {PIP} --force-reinstall --no-deps dist/*.whl",
    }
    fix = next((fix for words, fix in fixes.items() if words in reason), "")
    problems.append(Problem(f"no kernels, so training is slower: {reason}", fix))


def _judge_data(problems: list[Problem], data: Mapping[str, Any]) -> None:
    """Name the datasets that are not here: scikit-learn's by its package, the others come on first use."""
    for name, place in data.get("datasets", {}).items():
        if place is None and name != "digits":
            problems.append(Problem(f"{name} is not in {data['folder']}", f"dpvision train {name} --target-epsilon 3"))
