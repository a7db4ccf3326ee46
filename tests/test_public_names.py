"""The public names of the package are frozen: adding one is a decision, removing one breaks users."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dpvision

NAMES = [
    "ClippedSum",
    "Guarantee",
    "Keys",
    "Ledger",
    "Mechanism",
    "PoissonSampler",
    "PrivateGrad",
    "PrivateRun",
    "Privatizer",
    "RunConfig",
    "SearchSettings",
    "ShardedOptimizer",
    "__version__",
    "check_model",
    "clipped_sum",
    "count_units",
    "export",
    "load",
    "resume_training",
    "train",
    "tune",
    "verify",
]
PACKAGES = [
    "accounting",
    "analyze",
    "audit",
    "compat",
    "data",
    "exports",
    "gradients",
    "inference",
    "models",
    "papers",
    "privacy",
    "release",
    "training",
    "tune",
]


def test_the_public_names_are_these() -> None:
    assert dpvision.__all__ == NAMES
    assert dir(dpvision) == sorted([*NAMES, *PACKAGES])


@pytest.mark.parametrize("name", [*NAMES, *PACKAGES])
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(dpvision, name) is not None


def test_the_former_name_of_load_still_works() -> None:
    assert dpvision.load_model is dpvision.load


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = dpvision.nonsense


def test_importing_the_package_imports_neither_torch_nor_pydantic() -> None:
    heavy = "{'torch', 'pydantic', 'numpy'} & set(sys.modules)"
    code = f"import sys, dpvision; dir(dpvision); sys.exit(' '.join({heavy}) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
