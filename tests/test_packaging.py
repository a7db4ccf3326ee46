"""What is installed: a small core, wheels with and without kernels, and the plain route on other systems."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "dpvision"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PREBUILT = {f"dpvision/kernels/prebuilt/{name}" for name in ("kernels-avx2.so", "kernels-avx512.so", "manifest.json")}

READELF = shutil.which("readelf")


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0].lower().replace("_", "-")


# ---- The core


def test_the_core_installs_these_packages_and_no_others() -> None:
    """A new dependency is a decision: everyone installs it."""
    assert {name_of(each) for each in PROJECT["dependencies"]} == {
        *("torch", "dp-accounting", "numpy", "scipy", "pillow", "safetensors", "cryptography", "pydantic"),
        *("typer", "rich", "matplotlib", "jinja2", "markupsafe", "packaging"),
    }


def imported_on_import(path: Path) -> Iterator[str]:
    """Top-level packages that are imported as soon as the module is, by the statements outside of functions."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0]
        waiting += ast.iter_child_nodes(node)


def test_no_module_needs_an_extra_to_be_imported() -> None:
    core = {name_of(each) for each in PROJECT["dependencies"]}
    owners = packages_distributions()
    needed = {
        (package, path.relative_to(SOURCE).as_posix())
        for path in SOURCE.rglob("*.py")
        for package in imported_on_import(path)
        if package not in sys.stdlib_module_names and package != "dpvision"
    }
    assert len(needed) > 100
    assert {pair for pair in needed if not {name_of(each) for each in owners.get(pair[0], ())} & core} == set()


def test_the_metadata_names_the_versions_of_python_that_are_supported() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    named = {each.rsplit(" ", 1)[1] for each in PROJECT["classifiers"] if "Python :: 3." in each}
    assert named == {"3.11", "3.12", "3.13"}


def test_every_package_that_is_required_directly_has_a_pinned_version() -> None:
    pins = {name_of(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = (each for group in PROJECT["optional-dependencies"].values() for each in group)
    assert {name_of(each) for each in (*PROJECT["dependencies"], *extras)} - pins == {"dpvision"}


# ---- Other systems

OTHER_SYSTEM = """
import importlib.util, os, platform, sys
platform.system = lambda: sys.argv[1]
platform.machine = lambda: sys.argv[2]
platform.libc_ver = lambda *_: ("", "")
del os.sched_getaffinity
from dpvision import kernels
assert not kernels.available()
assert kernels.identity() == "plain"
sys.argv = ["dpvision", "train", "digits", "--target-epsilon", "3", "--steps", "4", "--delta", "1e-3", "--json",
            "--model", "shoefit_cnn", "--image-size", "16", "--num-units", "1437", "--expected-batch-size", "64",
            "--output", sys.argv[3], "--anyway"]
from dpvision.cli import main
main()
"""


@pytest.mark.parametrize("place", [("Darwin", "arm64"), ("Linux", "aarch64")], ids=" ".join)
def test_a_system_without_kernels_trains_on_the_plain_route(tmp_path: Path, place: tuple[str, str]) -> None:
    """The system's answers are replaced; no machine of these kinds was available."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("DPVISION_NATIVE", None)
    command = [sys.executable, "-c", OTHER_SYSTEM, *place, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "release" / "certificate.json").is_file()
    assert not (tmp_path / "cache" / "dpvision" / "native").exists()


# ---- The Dockerfile, which no test builds


def test_the_image_runs_as_a_user_and_pins_its_packages() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    final = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM")) :]
    users = [number for number, line in enumerate(final) if line.startswith("USER ")]
    assert [final[number] for number in users] == ["USER dpvision"]
    assert not [line for line in final[users[0] :] if line.startswith("RUN")]
    assert [line for line in final if line.startswith("RUN pip install") and "-c /tmp/constraints.txt" in line]
    assert not [line for line in final if "g++" in line]  # the compiler stays in the first stage


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = [
        name
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    ]
    assert "src" in copied
    assert set(copied) == kept
    assert all((ROOT / name).exists() for name in copied)


def test_the_build_needs_only_the_files_that_the_image_copies() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert {PROJECT["readme"], *PROJECT["license-files"], "setup.py", "pyproject.toml", "src"} <= kept
    assert not any(fnmatchcase("runs", name) for name in kept)


# ---- Wheels


def copied_sources(folder: Path) -> Path:
    """The files that a build needs, in a folder of their own: a build leaves files beside its sources."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder


def build(sources: Path, kind: str, **environment: str) -> Path:
    """Run the build back-end as pip and build do, in an environment that has setuptools."""
    pytest.importorskip("setuptools", minversion="77")
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(sources / 'dist')!r}))"
    (sources / "dist").mkdir(exist_ok=True)
    variables = {**os.environ, "DPVISION_BUILD_KERNELS": "", **environment}
    variables.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=sources, capture_output=True, text=True, check=False, env=variables
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return sources / "dist" / done.stdout.split()[-1]


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with kernels, built from the source distribution."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64") or shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler on Linux on x86-64")
    folder = tmp_path_factory.mktemp("sources")
    archive = build(copied_sources(folder), "sdist")
    shutil.unpack_archive(archive, folder / "unpacked", filter="data")
    [sources] = (folder / "unpacked").iterdir()
    return build(sources, "wheel", DPVISION_BUILD_KERNELS="1")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the wheel's packages."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


@pytest.mark.slow
def test_a_wheel_from_the_source_distribution_has_all_files_and_kernels(wheel: Path) -> None:
    assert re.fullmatch(r"dpvision-[\d.]+-py3-none-linux_x86_64\.whl", wheel.name)
    names = names_in(wheel)
    expected = {
        path.relative_to(ROOT / "src").as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected | PREBUILT <= names
    assert {name for name in names if ".dist-info/" not in name} == expected | PREBUILT


@pytest.mark.slow
@pytest.mark.skipif(READELF is None, reason="needs readelf")
@pytest.mark.parametrize("name", ["kernels-avx2.so", "kernels-avx512.so"])
def test_kernels_of_a_wheel_need_only_what_every_linux_has(installed: Path, name: str) -> None:
    command = [str(READELF), "-dVW", str(installed / "dpvision" / "kernels" / "prebuilt" / name)]
    environment = {**os.environ, "LC_ALL": "C"}
    listing = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", listing))
    assert needed <= {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
    glibc = {tuple(map(int, each.split("."))) for each in re.findall(r"Name: GLIBC_([\d.]+)", listing)}
    runtime = {tuple(map(int, each.split("."))) for each in re.findall(r"Name: GLIBCXX_([\d.]+)", listing)}
    assert max(glibc) <= (2, 28)  # manylinux_2_28, which torch's wheels need too
    assert max(runtime) <= (3, 4, 24)


@pytest.mark.slow
def test_an_installed_wheel_trains_with_kernels_and_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs a processor with AVX2")
    program = (
        "import sys; from dpvision.kernels import compile; found = compile.build(); "
        "assert found.origin == 'prebuilt', found; assert found.target in ('avx2', 'avx512'); "
        "sys.argv[1:] = ['train', '--recipe', 'demo', '--quick', '--output', 'run']; "
        "from dpvision.cli import main; main()"
    )
    environment = {"HOME": str(tmp_path), "PATH": str(tmp_path), "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "release" / "certificate.json").is_file()
    assert not (tmp_path / ".cache" / "dpvision" / "native").exists()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_kernels_of_a_wheel_pass_the_tests_of_all_kernels(installed: Path, level: str) -> None:
    from dpvision.kernels import compile as building

    if not building._NEEDED[level] <= set(building._processor().split()):
        pytest.skip(f"needs a processor with {level}")
    suites = [
        str(ROOT / "tests" / "kernels" / f"test_{name}.py")
        for name in ("ops", "conv_gradients", "winograd", "norm_act", "unit_sums", "scatter")
    ]
    environment = {**os.environ, "DPVISION_NATIVE": level, "CXX": "/nothing", "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *suites]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:]
    assert " skipped" not in done.stdout  # they did run


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [{"DPVISION_BUILD_KERNELS": "0"}, {"PATH": "/nowhere"}, {"CXX": "/nothing"}], ids=str
)
def test_without_a_compiler_the_wheel_is_for_every_system(tmp_path: Path, environment: dict[str, str]) -> None:
    built = build(copied_sources(tmp_path), "wheel", **environment)
    assert re.fullmatch(r"dpvision-[\d.]+-py3-none-any\.whl", built.name)
    names = names_in(built)
    assert not names & PREBUILT
    assert "dpvision/kernels/cpp/winograd.h" in names  # for a compiler that comes later


@pytest.mark.slow
def test_kernels_that_were_asked_for_and_cannot_be_compiled_stop_the_build(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nothing"):
        build(copied_sources(tmp_path), "wheel", DPVISION_BUILD_KERNELS="1", CXX="/nothing")
