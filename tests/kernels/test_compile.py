"""Kernels are built once; where they can't be, there is a reason and no exception."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpvision import kernels
from dpvision.kernels import compile as building

# Builds a small source of its own: what is tested is the building, and the kernels take half a minute.
SOURCE = 'extern "C" int dpvision_answer() { return 42; }\n'
HEADER = "// no content\n"
HAS_AVX2 = sys.platform == "linux" and building._NEEDED["avx2"] <= set(building._processor().split())


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.cpp").write_text(SOURCE)
    (sources / "answer.h").write_text(HEADER)
    monkeypatch.setattr(building, "_SOURCES", sources)
    monkeypatch.setattr(building, "_PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DPVISION_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    building._built.cache_clear()
    yield
    building._built.cache_clear()


def compiler_script(tmp_path: Path, lines: str) -> str:
    """A compiler that knows its version and then does what ``lines`` say."""
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\n{lines}\n')
    script.chmod(0o755)
    return str(script)


def built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "dpvision" / "native").iterdir())


def require_compiler() -> None:
    if not kernels.available():
        pytest.skip(f"no native kernels: {kernels.reason()}")


def assert_nothing_but_a_reason(expected: str) -> None:
    found = building.build()
    assert found.library is None
    assert found.identity == "plain"
    assert expected in found.reason
    assert "\n" not in found.reason
    assert (kernels.available(), kernels.identity(), kernels.reason()) == (False, "plain", found.reason)


def test_the_switch_turns_kernels_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPVISION_NATIVE", "0")
    assert_nothing_but_a_reason("DPVISION_NATIVE=0")
    assert not (tmp_path / "cache").exists()


def test_a_switch_that_says_anything_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPVISION_NATIVE", "sse9")
    assert_nothing_but_a_reason("DPVISION_NATIVE must be one of 0, 1, compile, avx2, avx512, got 'sse9'")


def test_kernels_for_avx2_need_a_processor_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    monkeypatch.setenv("DPVISION_NATIVE", "avx2")
    monkeypatch.setattr(building, "_processor", lambda: "flags : fpu sse2 fma")
    building._built.cache_clear()
    assert_nothing_but_a_reason("DPVISION_NATIVE=avx2 needs a processor with abm, avx2, bmi1, bmi2, f16c, movbe")


@pytest.mark.skipif(not HAS_AVX2, reason="no AVX2 here")
def test_kernels_for_avx2_are_others_than_the_processors_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    own = building.build().identity
    monkeypatch.setenv("DPVISION_NATIVE", "avx2")
    building._built.cache_clear()
    assert building.build().library is not None
    assert building.build().identity != own
    assert len(built(tmp_path)) == 2


def test_a_compiler_that_is_not_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert_nothing_but_a_reason("could not be built")


def test_no_compiler_at_all_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_nothing_but_a_reason("no C++ compiler was found")


def test_a_compiler_that_fails_is_a_reason_with_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "echo warning: a cloud >&2\necho error: it rains >&2\necho note: still >&2\nexit 1"
    monkeypatch.setenv("CXX", compiler_script(tmp_path, lines))
    assert_nothing_but_a_reason("error: it rains")
    assert built(tmp_path) == []


def test_a_compiler_that_fails_without_a_word_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler_script(tmp_path, "exit 1"))
    assert_nothing_but_a_reason("could not be built")


def test_a_compiler_that_writes_nonsense_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler_script(tmp_path, "echo nonsense > kernels.so"))
    assert_nothing_but_a_reason("could not be built")


def test_a_source_that_does_not_compile_is_a_reason(tmp_path: Path) -> None:
    require_compiler()
    (tmp_path / "sources" / "answer.cpp").write_text("this is not C++\n")
    building._built.cache_clear()
    assert_nothing_but_a_reason("error")


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    building._built.cache_clear()
    assert_nothing_but_a_reason("could not be built")


def test_kernels_are_loaded_and_named() -> None:
    require_compiler()
    found = building.build()
    assert found.library is not None
    assert found.library.dpvision_answer() == 42
    assert found.reason == ""
    assert kernels.identity() == found.identity != "plain"


def test_what_was_built_is_used_again(tmp_path: Path) -> None:
    require_compiler()
    before = [(path, path.stat().st_mtime_ns) for path in built(tmp_path)]
    assert [path.suffix for path, _ in before] == [".so"]
    identity = building.build().identity
    building._built.cache_clear()
    assert building.build().identity == identity
    assert [(path, path.stat().st_mtime_ns) for path in built(tmp_path)] == before


@pytest.mark.parametrize("name", ["answer.cpp", "answer.h"])
def test_another_source_is_another_build(tmp_path: Path, name: str) -> None:
    require_compiler()
    identity = building.build().identity
    with (tmp_path / "sources" / name).open("a") as file:
        file.write("// changed\n")
    building._built.cache_clear()
    assert building.build().identity != identity
    assert len(built(tmp_path)) == 2


def test_two_processes_that_build_at_once_end_well(tmp_path: Path) -> None:
    require_compiler()
    for path in built(tmp_path):
        path.unlink()
    program = (
        "import sys, pathlib\n"
        "from dpvision.kernels import compile as building\n"
        "building._SOURCES = pathlib.Path(sys.argv[1])\n"
        "building._PREBUILT = pathlib.Path('none')\n"
        "print(building.build().library.dpvision_answer(), building.build().identity)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "sources")]
    processes = [subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert outputs == [f"42 {kernels.identity()}"] * 2
    assert len(built(tmp_path)) == 1


def _writable_by_all(path: Path) -> None:
    path.chmod(0o777)


def _a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("tamper", [_writable_by_all, _a_link])
@pytest.mark.parametrize("folder", [False, True], ids=["the file", "the folder"])
def test_kernels_that_another_user_could_have_put_there_are_not_loaded(
    tmp_path: Path, tamper: Callable[[Path], None], folder: bool
) -> None:
    require_compiler()
    assert building.build().library is not None
    [library] = built(tmp_path)
    tamper(library.parent if folder else library)
    building._built.cache_clear()
    assert_nothing_but_a_reason("could have been changed by another user")


def test_a_generous_umask_does_not_keep_us_from_our_own_kernels(tmp_path: Path) -> None:
    require_compiler()
    before = os.umask(0o000)
    try:
        building._built.cache_clear()
        for file in built(tmp_path):
            file.unlink()
        assert building.build().library is not None
    finally:
        os.umask(before)


def test_compiling_is_announced_and_loading_is_not(caplog: pytest.LogCaptureFixture) -> None:
    require_compiler()
    building._built.cache_clear()
    for expected in (0, 1):
        for file in building.cache_folder().iterdir() if expected else ():
            file.unlink()
        building._built.cache_clear()
        caplog.clear()
        with caplog.at_level("INFO", logger="dpvision.kernels"):
            assert building.build().library is not None
        assert [record.getMessage()[:25] for record in caplog.records] == ["compiling the C++ kernels"] * expected
