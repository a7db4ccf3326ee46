"""A module imports only from layers below it; siblings are strangers; some modules stay free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "dpvision"
LAYERS = (
    ("checks", "rounding", "keys", "files"),
    ("mechanism", "flow"),
    ("accounting", "data", "models", "native", "losses"),
    ("grads", "noise", "optim", "ledger"),
    ("config", "runfolder", "evaluate", "certificate", "transfer"),
    ("signing", "card"),  # what a release is made of
    ("verify",),  # training checks what it begins with
    ("training", "attach"),
    ("recipes", "report", "bench", "audit"),
    ("reproduce",),  # tables are made of recipes
    ("cli", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Named exceptions inside layers 0 and 1, which are single files: everything may use the wording of errors, and
# the values that flow name the mechanism.
ALLOWED_SIBLINGS = {("__main__", "cli"), ("keys", "checks"), ("files", "checks"), ("flow", "mechanism")}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dpvision"):
            pieces = node.module.split(".")
            found |= {pieces[1]} if len(pieces) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dpvision.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_module_imports_only_from_lower_layers(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    for other in imported_parts(path) - {part, "__version__"}:
        assert LEVEL[other] < LEVEL[part] or (part, other) in ALLOWED_SIBLINGS, f"{part} imports {other}"


def test_every_module_has_a_layer() -> None:
    assert {part_of(path) for path in modules()} - {"__init__"} == set(LEVEL)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_file_grows_past_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize(
    "name", ["", ".keys", ".mechanism", ".accounting", ".ledger", ".certificate", ".verify", ".cli"]
)
def test_these_modules_import_without_torch(name: str) -> None:
    code = f"import sys, dpvision{name}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
