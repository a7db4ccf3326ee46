"""Every command and code block of the README and the documentation runs, page by page and in its order.

A page runs in a folder with small images, tables, masks and runs under the names that the pages use. Its Python blocks
share one namespace; a block that begins with ``# name.py`` is saved under that name and run. Commands get flags that
make them fast, never one that the page itself sets. Blocks marked ``text`` are output or the layout of a folder.
``NOT_RUN`` lists the commands that cannot run in a test, with the reason.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from dpvision.cli import app
from dpvision.papers.tables import all_tables
from fixed_keys import numbered_secrets
from page_folder import write_page_folder

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS: Final = ("dpvision", "python", "python3", "torchrun", "source", "pip", "make")

# Commands that no test runs, by their beginning, each with the reason.
NOT_RUN: Final = {
    "python3 -m venv": "creates an environment",
    "source .venv": "is for a shell",
    "pip install": "installs packages from the network",
    "make": "installs packages, and runs the tests that this is one of; the targets' existence is tested below",
    "python -m benchmarks": "measures for hours on an idle machine; tests/benchmarks runs the same code on small cases",
    "torchrun --nproc-per-node 2 --max-restarts 3 examples": "tests/examples runs it",
    "torchrun --nnodes 1:4": "waits for other machines; tests/training/test_torchrun.py runs an elastic job",
    "dpvision audit --reconstruction cifar10": "needs 5,149 public images; tests/audit runs the attack on small data",
    "dpvision analyze resnet9": "a quick recipe has synthetic images, which are private; analysing.md runs the command",
    "python -m tools.audit_table": "trains hundreds of models for hours; tests/audit runs the same functions",
}
# Flags that make a command fast, by its beginning; the longest beginning counts, and flags of the page itself stay.
_TINY: Final = "--steps 2 --delta 1e-3 --image-size 8 --model linear --anyway"
FAST: Final = {
    "train": f"{_TINY} --expected-batch-size 16 --num-units 50 --holdout 0.4",
    "train cifar10": "--steps 2 --expected-batch-size 4 --num-units 60 --delta 1e-3 --anyway",
    "train cifar10 --target-epsilon 3": "--steps 2 --expected-batch-size 4 --num-units 60 --delta 1e-3 --model linear",
    "train ./scans --target-epsilon 3 --unit": f"{_TINY} --expected-batch-size 8 --num-units 25 --holdout 0.4",
    "train scans.store": f"{_TINY.replace('--image-size 8 ', '')} --expected-batch-size 16 --num-units 50 --holdout .4",
    "train ./my-digits": "--steps 8 --expected-batch-size 256 --delta 1e-4 --image-size 8 --model linear "
    "--learning-rate 2 --clip-norm 1",
    "train ./my-digits/train": f"{_TINY} --expected-batch-size 50",
    "train study/labels.csv": f"{_TINY} --expected-batch-size 8 --num-units 25",
    "train --config": f"{_TINY} --expected-batch-size 8 --num-units 25 --holdout 0.4",
    "train --task segmentation": "--steps 2 --expected-batch-size 4 --num-units 8 --delta 1e-2 --image-size 16 "
    "--model unet9 --option width=2 --holdout 0.4 --anyway",
    "train --recipe": "--quick",
    "tune ./scans": f"{_TINY} --expected-batch-size 16 --num-units 50 --holdout 0.4 --trials 1",
    "train ./imagenette": "--quick",
    "reproduce": "--scale quick --repeats 1",
    "analyze": "--eigenvalues 1 --iterations 2 --lanczos 2 --probes 1",
}
# Finished runs that commands find under the names of their pages: how each is trained, and the names that need it.
_SMALL_NETWORK: Final = "./scans --steps 1 --expected-batch-size 8 --num-units 50 --delta 1e-3 --holdout 0.4 --anyway"
FINISHED: Final = {
    "finished": ("./scans", ()),
    "finished-2": ("./scans", ()),
    "finished-3": ("./scans", ()),
    "finished-masks": ("--task segmentation ./slices ./masks", ("runs/liver",)),
    "finished-resnet9": (f"{_SMALL_NETWORK} --model resnet9 --image-size 16", ("runs/resnet9-1",)),
    "finished-scaleresnet9": (f"{_SMALL_NETWORK} --model scaleresnet9 --image-size 16", ("runs/scaleresnet9-1",)),
}
# Pages that train many models.
SLOW: Final = {"docs/concepts/augmented-views.md", "docs/evidence/reproduce.md", "docs/evidence/results.md"} | {
    "docs/guides/segmentation.md",
    "docs/guides/transfer.md",
    "docs/reference/commands.md",
    "docs/reference/recipes.md",
}
# What a page's Python and commands print, as the page says.
PRINTED: Final = {
    "README.md": ["% at epsilon 3.00\n"],
    "docs/concepts/accounting.md": ["epsilon 3 at delta 1e-05 (add_remove of one example, PLD)\n"],
    "docs/concepts/tiers.md": ["epsilon 2 at delta 0.0001 (add_remove of one example, PLD)\n"],
    "docs/guides/own-loop.md": ["True", "3 0\n"],
    "docs/reference/data.md": ["Microbatch(inputs=(32, 1, 28, 28), sensitive)", "True torch.Size([60, 128, 128])\n"],
    "docs/reference/models.md": ["1: BatchNorm2d → GroupNorm(16 groups, 16 channels)"],
    "docs/tutorial.md": ["In order", "verified: True, epsilon 3.00 at delta 0.0001\n"],
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The lines of a block of commands, continued lines joined and comments left out."""
        lines = [re.sub(r"(?:^|\s)# .*$", "", line).strip() for line in self.text.replace("\\\n", " ").splitlines()]
        return [line for line in lines if line]


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text, found = page.read_text(), []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page.relative_to(ROOT).as_posix(), line, match[1], match[2]))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN_PAGES = sorted({block.page for block in BLOCKS if block.language in ("", "python")})


def test_a_block_is_commands_python_settings_or_marked_as_text() -> None:
    for block in BLOCKS:
        assert block.language in ("", "python", "toml", "text"), block.place
        starts = [line.split()[0] in COMMANDS for line in block.commands]
        if not block.language:
            assert all(starts), f"{block.place} has a line that is no command: mark output as ```text"
        if block.language == "text":
            assert not any(starts), f"{block.place} is marked as output but has a command"


def test_every_fence_is_closed_and_no_block_is_indented() -> None:
    for page in PAGES:
        fences = re.findall(r"^\s*```", page.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks_of(page)), page


def reason_not_to_run(command: str) -> str | None:
    """Why a command is not run, if it is on the list."""
    return next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)


def test_every_command_that_is_not_run_is_of_a_page() -> None:
    shown = [command for block in BLOCKS if not block.language for command in block.commands]
    for start in NOT_RUN:
        assert any(command.startswith(start) for command in shown), f"no page has {start}: take it off the list"


def test_every_target_of_make_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for block in BLOCKS:
        for command in block.commands if not block.language else ():
            if command.startswith("make "):
                assert f"\n{command.split()[1]}:" in makefile, block.place


def faster(arguments: list[str]) -> list[str]:
    """A command's arguments with the flags that make it fast; its own flags stay, but for scale and repeats."""
    if arguments[0] == "reproduce" and not {"--rows", "--list"} & set(arguments):
        (table,) = [table for table in all_tables() if table.name == arguments[1]]
        arguments = [*arguments, "--rows", table.rows[0].name]
    if not (matching := [start for start in FAST if " ".join(arguments).startswith(start)]):
        return arguments
    extra, added = shlex.split(FAST[max(matching, key=len)]), list[str]()
    while extra:
        flag = extra.pop(0)
        values = [extra.pop(0)] if extra and not extra[0].startswith("--") else []
        if arguments[0] == "reproduce" or flag not in arguments:
            added += [flag, *values]
    return [*arguments, *added]


def run_command(block: Block, command: str) -> str:
    """Run a command of dpvision in this process; return what it prints."""
    program, *arguments = shlex.split(command)
    if program == "torchrun":
        start = arguments.index("dpvision") + 1
        joined = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments[:start]]
        done = subprocess.run(
            [*joined, *faster(arguments[start:])], capture_output=True, text=True, check=False, cwd=Path.cwd()
        )
        assert done.returncode == 0, f"{block.place}: {command}\n{done.stderr}"
        return done.stdout
    result = CliRunner().invoke(app, faster(arguments))
    assert result.exit_code == 0, f"{block.place}: {command}\n{result.output}\n{result.exception!r}"
    return result.stdout


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that pages name, and finished runs."""
    folder = tmp_path_factory.mktemp("page")
    write_page_folder(folder)
    for name, text in re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs" / "guides" / "own-model.md").read_text(), re.DOTALL
    ):
        (folder / name).write_text(text)
    (toml,) = [block.text for block in BLOCKS if block.language == "toml"]
    (folder / "run.toml").write_text(toml)
    with pytest.MonkeyPatch.context() as patch, numbered_secrets("finished runs"):
        patch.chdir(folder)
        for name, (arguments, _) in FINISHED.items():
            command = ["train", *arguments.split(), "--output", name, "--target-epsilon", "3"]
            result = CliRunner().invoke(app, faster(command))
            assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a page: a copy of the files."""
    place = tmp_path / "page"
    shutil.copytree(template, place, symlinks=True)
    monkeypatch.chdir(place)
    monkeypatch.setenv("DPVISION_DATA", str(place / "data"))
    monkeypatch.setenv("DPVISION_KEY_PASSWORD", "a password")
    monkeypatch.syspath_prepend(place)
    before = set(sys.modules)
    with numbered_secrets("a page"):  # of few images none might be held out
        yield place
    for name in ("my_model", "my_loss"):
        if name not in before:
            sys.modules.pop(name, None)


def add_missing_runs(command: str) -> None:
    """Put finished runs, each another one, where a command expects some that no command of its page makes."""
    plain = iter([run for run, (_, names) in FINISHED.items() if not names])
    for name in re.findall(r"\bRUN\b|\bruns/[\w-]+", command):
        if not Path(name).exists() and f"--output {name}" not in command:
            shutil.copytree(
                next((run for run, (_, names) in FINISHED.items() if name in names), None) or next(plain), name
            )


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in RUN_PAGES]
)
def test_every_block_of_a_page_runs_in_its_order(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for block in [block for block in BLOCKS if block.page == page]:
        if block.language == "python":
            for name in re.findall(r'"(runs/[\w-]+)"', block.text):
                if re.search(r"load\(|write_report", block.text) and not block.text.count("run="):
                    add_missing_runs(name)
            if named := re.match(r"# (\w+\.py)\n", block.text):
                (folder / named[1]).write_text(block.text)
                runpy.run_path(str(folder / named[1]))
            else:
                exec(compile(block.text, block.place, "exec"), names)  # noqa: S102 - our own page
            printed += capsys.readouterr().out
        elif not block.language:
            for command in block.commands:
                if reason_not_to_run(command) is None:
                    add_missing_runs(command)
                    printed += run_command(block, command)
    for text in PRINTED.get(page, []):
        assert text in printed, f"{page} does not print {text!r}:\n{printed}"
