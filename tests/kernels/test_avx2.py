"""What the compiler makes of the hot kernels for a processor with AVX2 and nothing wider.

A vector type that is wider than the registers is put into memory after every operation: ten to twenty times as slow,
with the right results. Only the instructions tell.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpvision import kernels
from dpvision.kernels import compile

COMPILER = shutil.which("g++")
NATIVE = Path(compile.__file__).parent
TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    COMPILER is None or platform.machine() != "x86_64", reason="needs g++ that compiles for x86-64"
)

has_avx2 = pytest.mark.skipif(
    not {"avx2", "fma", "bmi2"} <= set(compile._processor().split()), reason="needs a processor with AVX2"
)


@pytest.mark.parametrize("name", ["windows", "winograd_convolve", "winograd_convolve_raw", "winograd_gradient"])
def test_products_stay_in_registers(name: str) -> None:
    command = [str(COMPILER), *compile.flags("avx2"), "-S", "-o", "-", str(NATIVE / "cpp" / f"{name}.cpp")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    products = len(re.findall(r"\tvfmadd\d+ps\t.*%ymm", listing))
    put_aside = len(re.findall(r"\tvmov[au]ps\t%ymm\d+, -?\d*\(%r[sb]p\)", listing))
    assert products >= 50
    assert put_aside < 0.65 * products  # 0.1 to 0.5; with vectors of 64 bytes 0.8 to 1


@pytest.mark.parametrize("source", sorted((NATIVE / "cpp").glob("*.cpp")), ids=lambda path: path.stem)
def test_kernels_compile_without_a_warning_for_wider_registers(source: Path) -> None:
    """A warning would be an error on the user's machine, and everything would go PyTorch's own way."""
    flags = [flag for flag in compile.flags("avx2") if not flag.startswith("-march")]
    command = [str(COMPILER), *flags, "-march=skylake-avx512", "-c", "-o", os.devnull, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@has_avx2
@pytest.mark.skipif("DPVISION_NATIVE" in os.environ, reason="DPVISION_NATIVE says which kernels there are")
def test_there_are_kernels_where_there_is_a_compiler() -> None:
    """Without them every test of a kernel skips, and all would look well."""
    assert kernels.available(), kernels.reason()


@has_avx2
def test_kernels_for_avx2_pass_the_tests_of_all_kernels() -> None:
    suites = [
        str(TESTS / "kernels" / f"test_{name}.py")
        for name in ("ops", "conv_gradients", "winograd", "norm_act", "unit_sums", "scatter")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *suites]
    environment = {**os.environ, "DPVISION_NATIVE": "avx2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-2000:]
    assert " skipped" not in done.stdout  # they did run
