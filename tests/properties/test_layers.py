"""Modules import only from lower layers; no two modules share a name; some modules never import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "dpvision"
LAYERS = (
    ("errors", "openmp"),
    ("storage.files", "privacy.mechanism", "privacy.randomness", "own_code", "scoring", "ranks"),
    ("privacy.sampling",),
    ("privacy.values", "accounting", "kernels"),
    ("config",),
    ("models",),
    ("data", "privacy.clipping", "privacy.noise", "privacy.ledger", "privacy.schedules"),
    ("gradients", "privacy.optimizer", "storage"),
    ("privacy",),
    ("release", "inference"),
    ("exports",),
    ("training",),
    ("analyze",),
    ("papers", "audit", "compat", "tune", "doctor"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in modules()}


def layer_of(module: str) -> str:
    """The longest entry of ``LAYERS`` that holds the module."""
    while module not in LEVEL:
        module, _, last = module.rpartition(".")
        assert last, "a module without a layer"
    return module


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dpvision":
            package = node.module.removeprefix("dpvision").removeprefix(".")
            for alias in node.names:
                inner = f"{package}.{alias.name}".removeprefix(".")
                found.add(inner if inner in NAMES else package)
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("dpvision.") for alias in node.names if alias.name.startswith("dpvision.")
            }
    return found - {""}


def type_checking_only(path: Path) -> set[str]:
    blocks = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    found = [inner for block in blocks for inner in block.body if isinstance(inner, ast.ImportFrom) and inner.module]
    return {inner.module.removeprefix("dpvision.") for inner in found if inner.module}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_module_imports_only_from_lower_layers(path: Path) -> None:
    module = name_of(path)
    if module == "":
        return
    own = layer_of(module)
    for other in imported(path) - type_checking_only(path):
        layer = layer_of(other)
        assert layer == own or LEVEL[layer] < LEVEL[own], f"{module} imports {other}"


def test_no_two_modules_share_a_basename() -> None:
    counts = Counter(path.stem for path in modules() if path.stem not in {"__init__", "__main__"})
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".privacy.randomness",
        ".privacy.mechanism",
        ".accounting",
        ".privacy.ledger",
        ".config",
        ".openmp",
        ".ranks",
        ".own_code",
        ".scoring",
        ".release",
        ".release.verify",
        ".doctor",
        ".kernels",
        ".cli",
    ],
)
def test_these_modules_import_without_torch(name: str) -> None:
    code = f"import sys, dpvision{name}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
