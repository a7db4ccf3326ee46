"""A user's own code: which files are hashed, that exactly these are executed, and what is refused before."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from dpvision.errors import ArgumentError, PrivacyError
from dpvision.own_code import code_of, is_own, load_code, named_again, read_source


def write(folder: Path, **files: str) -> Path:
    """Write ``name.py`` for each name, with __ as a folder's slash; the folder."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def make_nothing() -> None:
    """A function of a test file."""


def test_the_hash_of_one_file_is_what_sha256sum_prints(tmp_path: Path) -> None:
    write(tmp_path, mine="import math\nimport torch\n")
    assert read_source(tmp_path / "mine.py").sha256 == hashlib.sha256(b"import math\nimport torch\n").hexdigest()


def test_the_hash_of_several_files_is_that_of_their_sha256sum_lines(tmp_path: Path) -> None:
    files = {"mine": "from parts import a\n", "parts": "a = 1\n", "unused": "b = 2\n"}
    write(tmp_path, **files)
    lines = "".join(f"{hashlib.sha256(files[n].encode()).hexdigest()}  {n}.py\n" for n in ("mine", "parts"))
    assert read_source(tmp_path / "mine.py").sha256 == hashlib.sha256(lines.encode()).hexdigest()


IMPORTS = {
    "import": "import parts\n",
    "from": "from parts import a\n",
    "inside a function": "def make():\n    import parts\n    return parts\n",
    "of a package": "import package.inner\n",
    "from a package": "from package import inner\n",
    "through another": "import between\n",
    "relative, in a package": "import package\n",
    "of a folder without __init__": "from plain.deep import a\n",
}


@pytest.mark.parametrize("text", IMPORTS.values(), ids=IMPORTS)
def test_a_change_of_an_imported_module_beside_the_file_changes_the_hash(tmp_path: Path, text: str) -> None:
    write(tmp_path, parts="a = 1\n", package__inner="a = 1\n", package____init__="", between="import parts\n")
    write(tmp_path, package__init="", plain__deep="a = 1\n", mine=text)
    (tmp_path / "package" / "__init__.py").write_text("from . import inner\n")
    before = read_source(tmp_path / "mine.py").sha256
    write(tmp_path, parts="a = 2\n", package__inner="a = 2\n", plain__deep="a = 2\n")
    assert read_source(tmp_path / "mine.py").sha256 != before


def test_nothing_is_executed_while_it_is_hashed(tmp_path: Path) -> None:
    write(tmp_path, mine="raise RuntimeError('executed')\n")
    assert len(read_source(tmp_path / "mine.py").sha256) == 64


def test_what_was_hashed_is_executed_although_the_file_changed_since(tmp_path: Path) -> None:
    write(tmp_path, mine="import parts\n\n\ndef make():\n    return parts.a\n", parts="a = 1\n")
    source = read_source(tmp_path / "mine.py")
    write(tmp_path, mine="def make():\n    return 3\n", parts="a = 2\n")
    with source.importable():
        assert source.executed().make() == 1


def test_a_module_of_a_computed_name_is_not_found_beside_the_file(tmp_path: Path) -> None:
    write(tmp_path, mine="import importlib\nimportlib.import_module('hidden_beside')\n", hidden_beside="a = 1\n")
    with pytest.raises(ArgumentError, match="No module named 'hidden_beside'"):
        load_code(f"{tmp_path / 'mine.py'}:make", kind="model")


def test_modules_of_one_name_in_two_folders_do_not_meet(tmp_path: Path) -> None:
    text = "from parts import a\n\n\ndef make():\n    import parts\n    return a, parts.a\n"
    one = write(tmp_path / "one", mine=text, parts="a = 1\n")
    two = write(tmp_path / "two", mine=text, parts="a = 2\n")
    first, second = (load_code(f"{folder / 'mine.py'}:make", kind="model") for folder in (one, two))
    for code, expected in ((second, 2), (first, 1)):
        with code.importable():
            assert code.value() == (expected, expected)


def test_a_users_torch_or_random_does_not_take_the_place_of_the_real_one(tmp_path: Path) -> None:
    write(tmp_path, torch="", random="", mine="import torch, random\n\n\ndef make():\n    return torch, random\n")
    code = load_code(f"{tmp_path / 'mine.py'}:make", kind="model")
    assert code.value() == (sys.modules["torch"], sys.modules["random"])


@pytest.mark.parametrize(
    ("text", "function", "words"),
    [
        (None, ":make", "there is no file"),
        ("", "", "must name a function of the file, as in"),
        ("", ":", "must name a function of the file, as in"),
        ("def make(:\n", ":make", "mine.py is not Python, line 1"),
        ("a = 1\0\n", ":make", "mine.py is not Python"),
        ("def other():\n    pass\n", ":make", "has no 'make'. It has: other."),
        ("raise KeyError('gone\\nmore')\n", ":make", "can't import .*: KeyError"),
        ("import sys\nsys.exit(3)\n", ":make", "can't import .*: SystemExit: 3"),
        ("import no_such_module_at_all\n", ":make", "No module named 'no_such_module_at_all'"),
    ],
)
def test_code_that_cannot_be_had_is_refused_in_one_line(
    tmp_path: Path, text: str | None, function: str, words: str
) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ArgumentError, match=words) as refused:
        load_code(f"{tmp_path / 'mine.py'}{function}", kind="model")
    assert len(str(refused.value).splitlines()) == 1


def test_another_hash_is_refused_before_anything_is_executed(tmp_path: Path) -> None:
    write(tmp_path, mine=f"open({str(tmp_path / 'executed')!r}, 'w').close()\nmake = 1\n")
    with pytest.raises(PrivacyError, match="is not the source that was meant"):
        load_code(f"{tmp_path / 'mine.py'}:make", kind="model", sha256="0" * 64)
    assert not (tmp_path / "executed").exists()


def test_code_of_a_run_is_executed_only_if_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, mine=f"open({str(tmp_path / 'executed')!r}, 'w').close()\n\n\ndef make():\n    pass\n")
    monkeypatch.chdir(tmp_path)  # where the run's own name would be found
    sha256 = read_source(tmp_path / "mine.py").sha256
    with pytest.raises(ArgumentError, match=f"name it again with --model mine.py:make .SHA-256 {sha256}"):
        named_again("mine.py:make", sha256, None, kind="model")
    assert not (tmp_path / "executed").exists()
    code = named_again("mine.py:make", sha256, f"{tmp_path / 'mine.py'}:make", kind="model")
    assert code is not None
    assert (tmp_path / "executed").exists()


def test_code_is_named_again_only_where_there_is_some() -> None:
    assert named_again("linear", None, None, kind="model") is None
    with pytest.raises(ArgumentError, match="is linear, which is not own code"):
        named_again("linear", None, "mine.py:make", kind="model")


def test_another_function_of_the_same_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, mine="def make():\n    pass\n\n\ndef other():\n    pass\n")
    sha256 = read_source(tmp_path / "mine.py").sha256
    with pytest.raises(ArgumentError, match="is made by make, got"):
        named_again("mine.py:make", sha256, f"{tmp_path / 'mine.py'}:other", kind="model")


def test_python_objects_are_hashed_by_the_file_that_defines_them() -> None:
    code = code_of(make_nothing, kind="model")
    assert code.name == "test_own_code.py:make_nothing"
    assert code.sha256 == read_source(Path(__file__)).sha256
    assert code.repeatable
    assert code_of(make_nothing, kind="model", sha256=code.sha256).sha256 == code.sha256
    with pytest.raises(PrivacyError, match="the model is not the one that was meant"):
        code_of(make_nothing, kind="model", sha256="0" * 64)


def test_an_object_without_source_is_not_hashed_and_not_repeatable() -> None:
    space: dict[str, type] = {}
    exec("class Net:\n    pass\n", space)  # noqa: S102
    for given in (space["Net"], space["Net"]()):
        code = code_of(given, kind="model")
        assert (code.name, code.sha256, code.repeatable) == ("python:Net", None, False)


def test_an_object_with_a_state_is_not_repeatable_although_its_class_is_hashed() -> None:
    code = code_of(Path(), kind="model")
    assert code.sha256 is not None
    assert not code.repeatable


@pytest.mark.parametrize(("name", "own"), [("linear", False), ("a.py:make", True), ("a.py", True), (None, False)])
def test_own_names_have_a_colon_or_end_in_py(name: str | None, own: bool) -> None:
    assert is_own(name) is own
