"""Kernels of the installation: which are loaded, and what happens where they can't be."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpvision import kernels
from dpvision.kernels import compile as building

# Calls the OpenMP runtime, which the library does not name: torch's must be found.
SOURCE = """
extern "C" int dpvision_answer() {
    int threads = 0;
#pragma omp parallel num_threads(2) reduction(+ : threads)
    threads += 1;
    return threads > 0 ? 42 : 0;
}
"""
PROCESSOR = "flags : fpu sse2"
WITH_AVX2 = f"{PROCESSOR} {' '.join(sorted(building._NEEDED['avx2']))}"
WITH_AVX512 = f"{WITH_AVX2} {' '.join(sorted(building._NEEDED['avx512']))}"

pytestmark = [
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="wheels have kernels for Linux on x86-64"
    ),
    pytest.mark.skipif(building._compiler() is None, reason="needs a compiler, to write what is loaded without one"),
    pytest.mark.skipif(not building._openmp(), reason="torch brings no libgomp here"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources, and what a build of the wheel makes of them."""
    folder = tmp_path_factory.mktemp("installation")
    (folder / "cpp").mkdir()
    (folder / "cpp" / "answer.cpp").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(building, "_SOURCES", folder / "cpp")
        building.write_prebuilt(folder / "prebuilt")
    return folder


@pytest.fixture(autouse=True)
def installation(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation with kernels, on a machine without a compiler."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    for file in (written / "prebuilt").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(building, "_SOURCES", written / "cpp")
    monkeypatch.setattr(building, "_PREBUILT", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DPVISION_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    building._built.cache_clear()
    yield folder
    building._built.cache_clear()


def here(name: str) -> None:
    if not building._NEEDED[name] <= set(building._processor().split()):
        pytest.skip(f"needs a processor with {name}")


def assert_passed_over(reason: str) -> None:
    found = building.build()
    assert (found.origin, found.library, found.identity) == ("plain", None, "plain")
    assert found.reason == "no C++ compiler was found"
    assert reason in found.passed_over


def test_kernels_of_the_installation_need_no_compiler_and_no_cache(tmp_path: Path) -> None:
    here("avx2")
    found = building.build()
    assert found.library is not None
    assert found.library.dpvision_answer() == 42
    assert found.origin == "prebuilt"
    assert (found.reason, found.passed_over) == ("", "")
    assert kernels.available()
    assert not (tmp_path / "cache").exists()
    assert building.without_compiling().identity == found.identity


@pytest.mark.parametrize(("processor", "name"), [(WITH_AVX2, "avx2"), (WITH_AVX512, "avx512")])
def test_the_widest_kernels_that_the_processor_can_execute_are_loaded(
    monkeypatch: pytest.MonkeyPatch, processor: str, name: str
) -> None:
    here(name)
    monkeypatch.setattr(building, "_processor", lambda: processor)
    found = building.build()
    assert (found.origin, found.target) == ("prebuilt", name)
    assert found.identity.startswith(f"prebuilt {name} ")


@pytest.mark.parametrize("lacking", sorted(building._NEEDED["avx2"]))
def test_a_processor_that_lacks_one_instruction_set_gets_none_of_them(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.setattr(building, "_processor", lambda: WITH_AVX512.replace(f" {lacking}", " other"))
    assert_passed_over("need a processor with avx2")


@pytest.mark.parametrize("lacking", sorted(building._AVX512 - building._AVX2))
def test_a_processor_that_lacks_a_part_of_avx512_gets_avx2(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    here("avx2")
    monkeypatch.setattr(building, "_processor", lambda: WITH_AVX512.replace(f" {lacking}", ""))
    assert building.build().target == "avx2"


def test_the_switch_chooses_among_the_kernels_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    here("avx512")
    monkeypatch.setenv("DPVISION_NATIVE", "avx2")
    assert (building.build().origin, building.build().target) == ("prebuilt", "avx2")
    building._built.cache_clear()
    monkeypatch.setenv("DPVISION_NATIVE", "compile")
    assert_passed_over("DPVISION_NATIVE=compile")


def _flip(folder: Path) -> None:
    for path in folder.glob("*.so"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def _cut(folder: Path) -> None:
    for path in folder.glob("*.so"):
        path.write_bytes(path.read_bytes()[:1000])


def _delete(folder: Path) -> None:
    for path in folder.glob("*.so"):
        path.unlink()


def _nonsense_with_its_own_hash(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    for path in folder.glob("*.so"):
        path.write_bytes(b"nonsense")
    manifest["libraries"] = dict.fromkeys(manifest["libraries"], hashlib.sha256(b"nonsense").hexdigest())
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _bad_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def _empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


def _list_for_a_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flip, "is damaged"),
        (_cut, "is damaged"),
        (_delete, "could not be loaded"),
        (_nonsense_with_its_own_hash, "could not be loaded"),
        (_no_manifest, "the installation has no kernels"),
        (_bad_manifest, "could not be loaded"),
        (_empty_manifest, "could not be loaded"),
        (_list_for_a_manifest, "could not be loaded"),
    ],
)
def test_a_damaged_installation_is_passed_over(installation: Path, damage: Callable[[Path], None], reason: str) -> None:
    here("avx2")
    damage(installation)
    assert_passed_over(reason)


def test_kernels_of_other_sources_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpp").mkdir()
    (tmp_path / "cpp" / "answer.cpp").write_text(SOURCE + "// changed\n")
    monkeypatch.setattr(building, "_SOURCES", tmp_path / "cpp")
    assert_passed_over("were compiled from other sources")


def test_a_torch_with_another_openmp_runtime_gets_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    here("avx2")
    monkeypatch.setattr(building, "_openmp", list)
    assert_passed_over("torch brings no libgomp")


def test_where_they_do_not_fit_kernels_are_compiled(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(building, "_SOURCES", installation.parent / "cpp")
    monkeypatch.setattr(building, "_PREBUILT", installation)
    monkeypatch.setenv("XDG_CACHE_HOME", str(installation.parent / "cache"))
    (installation.parent / "cpp").mkdir()
    (installation.parent / "cpp" / "answer.cpp").write_text(SOURCE)
    _flip(installation)
    building._built.cache_clear()
    waiting = building.without_compiling()
    assert (waiting.reason, waiting.origin) == (building.NOT_YET, "plain")
    found = building.build()
    assert found.library is not None
    assert (found.origin, found.target, found.library.dpvision_answer()) == ("compiled", "native", 42)
    assert "damaged" in found.passed_over


def test_libraries_know_neither_torch_nor_the_name_of_an_openmp_runtime(installation: Path) -> None:
    """They work with any version of torch, and with the OpenMP runtime of any of its distributions."""
    for path in installation.glob("*.so"):
        content = path.read_bytes()
        assert b"GOMP_parallel" in content
        assert b"torch" not in content
        assert b"libgomp" not in content


def test_the_identity_that_binds_a_runs_keys_tells_kernels_and_processors_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a run that is resumed with other kernels would use its noise again on sums that differ."""
    here("avx512")
    identities = []
    for processor in (WITH_AVX2, WITH_AVX512, f"{WITH_AVX512} amx"):
        monkeypatch.setattr(building, "_processor", lambda processor=processor: processor)
        building._built.cache_clear()
        identities.append(kernels.identity())
    assert len(set(identities)) == 3
    assert "plain" not in identities


def test_the_identity_names_the_content_of_the_library(installation: Path) -> None:
    here("avx2")
    before = building.build()
    path = installation / f"kernels-{before.target}.so"
    path.write_bytes(path.read_bytes() + b"\0")
    manifest = json.loads((installation / "manifest.json").read_text())
    manifest["libraries"][before.target] = hashlib.sha256(path.read_bytes()).hexdigest()
    (installation / "manifest.json").write_text(json.dumps(manifest))
    building._built.cache_clear()
    assert building.build().origin == "prebuilt"
    assert building.build().identity != before.identity


@pytest.mark.parametrize(
    "place", [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "aarch64"), ("Darwin", "x86_64")]
)
def test_other_systems_use_plain_pytorch(monkeypatch: pytest.MonkeyPatch, place: tuple[str, str]) -> None:
    monkeypatch.setattr(platform, "system", lambda: place[0])
    monkeypatch.setattr(platform, "machine", lambda: place[1])
    found = building.build()
    assert (found.library, found.identity) == (None, "plain")
    assert found.reason == f"there are kernels for Linux on x86-64 only, this is {place[0]} on {place[1]}"


def test_a_build_without_a_compiler_is_an_error_for_the_build_only(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        building.write_prebuilt(tmp_path / "elsewhere")
