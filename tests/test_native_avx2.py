"""What the compiler makes of the hot kernels for a processor with AVX2 and nothing wider.

A vector type that is wider than the registers is put into memory after every operation: ten to twenty times as slow,
with the right results. Only the instructions tell.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dpvision.native import build

COMPILER = shutil.which("g++")
KERNELS = Path(build.__file__).parent / "kernels"

pytestmark = pytest.mark.skipif(
    COMPILER is None or platform.machine() != "x86_64", reason="needs g++ that compiles for x86-64"
)


@pytest.mark.parametrize("name", ["windows", "winograd_convolve", "winograd_gradient"])
def test_products_stay_in_registers(name: str) -> None:
    flags = [flag for flag in build._FLAGS if flag != "-march=native"]
    command = [str(COMPILER), *flags, "-march=haswell", "-S", "-o", "-", str(KERNELS / f"{name}.cpp")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    products = len(re.findall(r"\tvfmadd\d+ps\t.*%ymm", listing))
    put_aside = len(re.findall(r"\tvmov[au]ps\t%ymm\d+, -?\d*\(%r[sb]p\)", listing))
    assert products >= 50
    assert put_aside < 0.65 * products  # 0.1 to 0.5; with vectors of 64 bytes 0.8 to 1
