"""Compiles the kernels into the wheel, where there is a compiler for them; everything else is in pyproject.toml.

DPVISION_BUILD_KERNELS decides: 1 for a wheel with kernels or an error, 0 for a wheel of Python alone. Without it, a
wheel has kernels if it is built on Linux on x86-64 with a C++ compiler. Neither torch nor numpy is needed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

sys.path.insert(0, str(Path(__file__).parent / "src"))
from dpvision.kernels.compile import write_prebuilt

SWITCH = "DPVISION_BUILD_KERNELS"
FOLDER = "dpvision/kernels/prebuilt"


class BuildKernels(Command):
    """Put the compiled kernels beside the modules."""

    description = "compile the kernels of the wheel"
    editable_mode = False
    user_options: list[tuple[str, str, str]] = []  # noqa: RUF012

    def initialize_options(self) -> None:
        """Take the folder of the build from the command for modules."""
        self.build_lib = ""

    def finalize_options(self) -> None:
        """Take the folder of the build from the command for modules."""
        self.build_lib = self.get_finalized_command("build_py").build_lib

    def run(self) -> None:
        """Compile, unless it is switched off or, where nothing was asked for, impossible."""
        folder, asked = Path(self.build_lib) / FOLDER, os.environ.get(SWITCH, "")
        shutil.rmtree(folder, ignore_errors=True)
        possible = platform.system() == "Linux" and platform.machine() == "x86_64"
        if self.editable_mode or asked == "0" or not (possible or asked):
            return
        print("compiling the C++ kernels for AVX2 and AVX-512 (up to a minute)", flush=True)
        try:
            write_prebuilt(folder)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            if asked:
                raise
            print(f"warning: a wheel without kernels: {error}", flush=True)

    def get_source_files(self) -> list[str]:
        """The sources are data of the package."""
        return []

    def get_outputs(self) -> list[str]:
        """Name the files that were written."""
        return [str(path) for path in sorted((Path(self.build_lib) / FOLDER).glob("*"))]

    def get_output_mapping(self) -> dict[str, str]:
        """No file of the build is a file of the sources."""
        return {}


class Wheel(bdist_wheel):
    """A wheel for one platform if it has kernels, and for any if it has none; for every Python 3."""

    def run(self) -> None:
        """Build, then decide."""
        self.run_command("build")
        has_kernels = (Path(self.get_finalized_command("build").build_lib) / FOLDER).is_dir()
        self.root_is_pure = not has_kernels
        self.distribution.has_ext_modules = lambda: has_kernels  # whether files go to the folder of a platform
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Name the platform only: the kernels are called through ctypes."""
        return ("py3", "none", super().get_tag()[2])


class Build(build):
    """Modules, then kernels."""

    sub_commands = [*build.sub_commands, ("build_kernels", None)]  # noqa: RUF012


setup(cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": Wheel})
