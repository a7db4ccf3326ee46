"""Messages are one safe line; foreign errors become dpvision's own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import BaseModel, ValidationError

from dpvision.errors import (
    ArgumentError,
    DataError,
    DPVisionError,
    PrivacyError,
    brief,
    did_you_mean,
    printable,
    shown,
    translated_errors,
    validation_message,
)


def test_unprintable_characters_are_escaped_everywhere() -> None:
    for write in (printable, brief, shown):
        text = write("a\x1b[2J\n\udcff\u202eb")
        assert text.isprintable()
        assert text.startswith("a\\x1b[2J\\n")


def test_a_long_value_loses_its_end_and_a_long_name_its_beginning() -> None:
    assert brief("a" + "x" * 500) == "a" + "x" * 119 + "…"
    assert shown("x" * 500 + "z") == "…" + "x" * 119 + "z"


def test_a_misspelt_name_gets_the_close_choices_or_all() -> None:
    assert did_you_mean("resnet8", ["resnet9", "wrn_16_4"]) == "Did you mean resnet9?"
    assert did_you_mean("zebra", ["resnet9", "wrn_16_4"]) == "There are: resnet9, wrn_16_4."


def test_foreign_errors_become_one_line_of_the_chosen_type() -> None:
    with (
        pytest.raises(DataError, match=r"^the file cannot be read: bad header\.$"),
        translated_errors(RuntimeError, saying="the file cannot be read", to=DataError),
    ):
        raise RuntimeError("bad header.\nsecond line")


def test_own_errors_and_other_foreign_errors_pass_unchanged() -> None:
    mine: list[DPVisionError] = [PrivacyError("as it is"), ArgumentError("as it is")]
    for error in mine:
        with pytest.raises(type(error), match=r"^as it is$"), translated_errors(Exception, saying="no", to=DataError):
            raise error
    with pytest.raises(KeyError), translated_errors(RuntimeError, saying="no"):
        raise KeyError("other")


def test_a_pydantic_error_is_one_line_with_place_and_value() -> None:
    class Settings(BaseModel):
        a: int
        b: float

    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"a": "x\n", "b": "y"})
    message = validation_message(caught.value)
    assert message.isprintable()
    assert message.startswith("a: ")
    assert r"got 'x\\n'; b: " in message or r"got 'x\n'; b: " in message
    assert validation_message(caught.value, most=1).endswith("and 1 more")


def test_errors_need_neither_torch_nor_pydantic() -> None:
    code = "import sys, dpvision.errors; sys.exit(bool({'torch', 'pydantic'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
