"""There is one path to the noise: outside of ``privacy/`` nothing clips for release, charges a step or draws noise.

``dpvision train`` and ``PrivateRun`` both call ``private_step`` with a ``Privatizer``; the two other releases, the
count of units and the pixel statistics, are listed by name. A new caller anywhere must be added here, on purpose.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dpvision

SOURCE = Path(dpvision.__file__).parent
PUBLIC = "__init__.py"  # names, not calls
AUDIT = "audit/mechanism_check.py"  # attacks the step with synthetic images, and releases nothing
TIMING = "training/step_time.py"  # measures the step on synthetic rows, in a temporary folder
SCORE = "tune/trial.py"  # the score of a trial on a private split, which the search has charged

USERS: dict[str, set[str]] = {
    # The step: clip, charge, noise, update.
    "private_step": {"privacy/private_step.py", "training/trainer.py", "training/private_run.py", TIMING, PUBLIC},
    "Privatizer": {
        "privacy/private_step.py",
        "privacy/sharded_step.py",
        "training/trainer.py",
        "training/private_run.py",
        AUDIT,
        TIMING,
        PUBLIC,
    },
    "noisy_mean": {"privacy/private_step.py", "privacy/sharded_step.py", "privacy/noise.py"},
    "PROOF_OF_NOISE": {"privacy/noise.py", "privacy/values.py"},
    "PrivateGrad": {
        "privacy/noise.py",
        "privacy/optimizer.py",
        "privacy/private_step.py",
        "privacy/sharded_step.py",
        "privacy/torch_optimizer.py",
        "privacy/values.py",
        AUDIT,
        PUBLIC,
    },
    "clipped_sum_of_batch": {"privacy/private_step.py", "privacy/sharded_step.py", "gradients/clipped_sum.py", AUDIT},
    "Clipper": {"privacy/clipping.py", "gradients/clipped_sum.py"},
    "ClippedSum": {
        "gradients/clipped_sum.py",
        "privacy/noise.py",
        "privacy/private_step.py",
        "privacy/sharded_step.py",
        "privacy/values.py",
        AUDIT,
        PUBLIC,
    },
    # Noise: of steps, of the count, of the pixel statistics.
    "standard_normals": {"privacy/noise.py", "training/start.py"},
    "noisy_count": {"privacy/noise.py", "training/prepare.py", "training/private_run.py", SCORE},
    "released_normalisation": {"data/normalisation.py", "data/__init__.py", "training/start.py"},
    "WordStream": {"privacy/randomness.py", "privacy/noise.py"},
    # Charges: the count in the ledger's first lines, the statistics, and each step.
    "CountedUnits": {
        "privacy/mechanism.py",
        "privacy/noise.py",
        "storage/run_folder.py",
        "training/prepare.py",
        "training/private_run.py",
    },
}
DRAWS = {"randn", "randn_like", "normal_", "normal", "standard_normal", "multivariate_normal"}


def modules() -> list[tuple[str, ast.Module]]:
    paths = sorted(SOURCE.rglob("*.py"))
    return [(path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())) for path in paths]


TREES = modules()


def names_in(tree: ast.AST) -> set[str]:
    """Every identifier of a module: names, attributes, imported names; texts and comments do not count."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.name for alias in node.names}
    return found


def calls_of(tree: ast.AST, method: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == method]


@pytest.mark.parametrize("name", USERS)
def test_only_these_modules_use(name: str) -> None:
    assert {path for path, tree in TREES if name in names_in(tree)} <= USERS[name]


def test_a_charge_is_written_by_the_step_and_by_the_statistics_alone() -> None:
    assert {path for path, tree in TREES if calls_of(tree, "charge")} == {
        "privacy/private_step.py",
        "privacy/sharded_step.py",
        "training/start.py",
    }


def test_a_ledger_is_begun_by_the_starts_of_runs_and_searches_alone() -> None:
    begun = {
        path
        for path, tree in TREES
        for call in calls_of(tree, "create")
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "Ledger"
    }
    audited = "audit/audited_runs.py"  # canaries among synthetic images, in a temporary folder
    assert begun == {"training/start.py", "training/private_run.py", "tune/search_folder.py", audited, TIMING}


def test_a_clipped_sum_is_opened_by_the_noise_alone() -> None:
    opened = {
        path
        for path, tree in TREES
        for call in calls_of(tree, "take")
        if isinstance(call.func, ast.Attribute) and "clipped" in ast.unparse(call.func.value)
    }
    assert opened == {"privacy/noise.py"}


def test_both_ways_to_train_and_the_timing_call_the_same_step() -> None:
    callers = {
        path
        for path, tree in TREES
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "private_step"
    }
    assert callers == {"training/trainer.py", "training/private_run.py", TIMING}


def test_the_privacy_path_draws_from_no_other_generator() -> None:
    """Torch's and numpy's normals cut their tails: none is drawn where noise could come from."""
    synthetic = {"training/stages.py", TIMING}  # synthetic images for checks and measurements before a run
    for path, tree in TREES:
        if path not in synthetic and path.split("/")[0] in {"privacy", "training", "accounting", "storage", "release"}:
            assert not [name for name in DRAWS if calls_of(tree, name)], path


def test_the_scan_sees_a_second_path() -> None:
    hidden = ast.parse(
        "from dpvision.privacy import noise as n\ngrad = n.noisy_mean(s, m, k, step=1)\nledger.charge(e)"
    )
    assert "noisy_mean" in names_in(hidden)
    assert calls_of(hidden, "charge")
