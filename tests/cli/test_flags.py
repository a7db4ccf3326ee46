"""Flags: derived from the configuration, frozen by a list, and named in every error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import dpvision
from dpvision.cli import app, command_with_flags
from dpvision.cli.flags import OTHER_NAMES, named_by_flags, run_settings
from dpvision.cli.train_command import build_config
from dpvision.config import KNOWN_DATASETS, RunConfig, Settings, parse_config
from dpvision.data import dataset_names
from dpvision.errors import ArgumentError, DataError

FLAGS = {
    "train": """--accountant
        --adjacency --anyway --averaging --averaging-decay --averaging-start-step --baseline --cache-features
        --channels --checkpoint-every --classes --clip-norm --clipping --config --count-noise-multiplier
        --crop-padding --data-dir --delta --device --draw --epochs --erasing --evaluations --expected-batch-size
        --feature-precision --file-column --findings --findings-columns --flip --frames --head-steps --holdout
        --image-folder --image-size --initialisation --json --kernels --label-column --learning-rate --licence
        --log --loss --mask-classes --memory-mib --microbatch-size --model --momentum --most-rows-per-owner
        --name --nesterov --no-channels-last --no-pretrained --no-privacy --noise-multiplier --normalisation
        --num-units --only-foreground --optimizer --option --output --padding --partial-sums --precision
        --privacy-unit --public-classes --public-data --quick --recipe --rotation --rows-per-unit --scale --schedule
        --schedule-every-steps --schedule-factor --schedule-final-fraction --skip-bad --split-column --stages
        --statistics-noise-multiplier --steps --target-epsilon --target-risk --task --test --test-findings
        --test-masks --threads --trained --transfer-source --transfer-weights --unit-column --unit-csv
        --unit-folder-level --unit-norm --unit-pattern --units --unsafe-seed --validation --views --volume-axis
        --warmup-steps --watch --weight-decay --window""",
    "resume": "--device --fork --json --log --loss --model --threads --watch",
    "tune": """--accountant
        --adjacency --anyway --averaging --averaging-decay --averaging-start-step --baseline --batch-divisor
        --budget --budget-share --cache-features --channels --checkpoint-every --classes --clip-norm --clipping
        --config --count-noise-multiplier --crop-padding --data-dir --delta --device --draw --early --epochs --erasing
        --evaluations --expected-batch-size --feature-precision --figures --file-column --findings --findings-columns
        --flip --frames --head-steps --holdout --image-folder --image-size --initialisation --json --kernels
        --label-column --learning-rate --licence --loss --mask-classes --memory-mib --microbatch-size --model
        --momentum --most-rows-per-owner --name --nesterov --no-channels-last --no-pretrained --no-privacy
        --noise-multiplier --normalisation --num-units --only-foreground --optimizer --option --output --padding
        --partial-sums --precision --price --privacy-unit --prune-below --pruner --public-classes --public-data --resume
        --rotation --rows-per-unit --sampler --schedule --schedule-every-steps --schedule-factor
        --schedule-final-fraction --score --score-noise --search --search-data --skip-bad --space --space-file
        --split-column --stages --statistics-noise-multiplier --steps --stopping --storage --target-epsilon
        --target-risk --task --test --test-findings --test-masks --threads --timeout --trained --transfer-source
        --transfer-weights --trials --unit-column --unit-csv --unit-folder-level --unit-norm --unit-pattern
        --units --unsafe-seed
        --validation --validation-fraction --views --volume-axis --warmup-steps --weight-decay --window
        --workers""",
    "pack": """--channels --classes --data-dir --file-column --findings --findings-columns --frames --image-folder
        --image-size --json --label-column --mask-classes --masks --only-foreground --public-classes --skip-bad
        --split-column --unit-column --unit-csv --unit-folder-level --unit-pattern --units --verify
        --volume-axis --window""",
    "plan": """--adjacency --curves --delta --epochs --expected-batch-size --image-size --in-channels --json --model
        --needed-steps --noise-multiplier --num-classes --num-units --option --plot --scale-down --scale-up
        --steps --target-epsilon --target-risk --threads --views""",
    "epsilon": """--adjacency --delta --epochs --expected-batch-size --json --most-rows-per-owner --noise-multiplier
        --num-units --steps --trials""",
    "calibrate": """--accountant
        --adjacency --delta --epochs --expected-batch-size --json --noise-multiplier --num-units --steps
        --target-epsilon --target-risk""",
    "evaluate": """--data-dir --device --groups --json --model --operating-point --positive --test --test-findings
        --test-masks --threads""",
    "predict": "--csv --device --force --json --model --output --skip-bad --threads --window",
    "export": "--force --json --model --output --threads --to",
    "verify": "--json --key",
    "audit": """--black-box --canaries --confidence --epsilons --json --mechanism --members --model --no-attach
        --non-members --option --ordinary-shadows --output --recipe --reconstruction --shadows --targets
        --threads""",
    "analyze": """--data-dir --device --eigenvalues --images --iterations --json --lanczos --model --output --probes
        --test --test-masks --threads --unsafe-training-data --what""",
    "sign": "--json --key",
    "keygen": "--json --password",
    "report": "--json --output",
    "runs": "--json",
    "compare": "--disjoint --json --output",
    "check": "--image-size --in-channels --json --num-classes --option",
    "models": "--json",
    "recipes": "--json",
    "reproduce": "--device --json --list --output --own-sources --repeats --rows --scale --threads",
    "doctor": "--json",
}


def command(name: str) -> Any:
    return command_with_flags(name)


def dpvision_errors(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dpvision", *arguments], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_the_commands_are_these() -> None:
    group: Any = typer.main.get_command(app)
    assert list(group.commands) == list(FLAGS)


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_of_a_command_are_these(name: str) -> None:
    found = [flag for parameter in command(name).params for flag in parameter.opts if flag.startswith("--")]
    assert sorted(found) == FLAGS[name].split()


def sections(section: type[Settings]) -> list[tuple[str, Any]]:
    found = []
    for name, field in section.model_fields.items():
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)]
        found += sections(inner[0]) if inner and name != "prior" else [(f"{section.__name__}.{name}", field)]
    return found


@pytest.mark.parametrize(("name", "field"), sections(RunConfig), ids=[name for name, _ in sections(RunConfig)])
def test_every_setting_is_described_in_a_sentence(name: str, field: Any) -> None:
    if name.split(".")[0] != "RunConfig" or field.description is not None:
        assert field.description is not None
        assert field.description.rstrip().endswith(".")


def test_every_flag_of_train_has_help_and_a_panel_or_is_for_beginners() -> None:
    parameters = command("train").params
    assert all(parameter.help for parameter in parameters if parameter.name != "help")
    first = [each for each in parameters if each.rich_help_panel is None and each.opts[0].startswith("--")]
    assert len(first) == 10


def test_a_flag_left_out_is_not_given() -> None:
    assert {setting.parameter().default for setting in run_settings()} == {None, False}


def test_flags_reach_their_section_of_the_configuration() -> None:
    line = "train digits --target-epsilon 3 --no-privacy --views 4 --option a=1 --option b=x --window 0 9 --skip-bad"
    context = command("train").make_context("train", [*line.split()[1:], "--schedule", "cosine"])
    assert (context.params["views"], context.params["window"]) == (4, (0.0, 9.0))
    from dpvision.cli.flags import _nested

    given = _nested(run_settings(), context.params)
    assert given == {
        "data": {"source": "digits", "window": (0.0, 9.0), "skip_bad": True},
        "privacy": {"target_epsilon": 3.0, "enabled": False},
        "views": {"count": 4},
        "model": {"options": {"a": 1, "b": "x"}},
        "schedule": {"kind": "cosine"},
    }


def test_flags_replace_settings_of_a_file_and_keep_the_others(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\nsource = "digits"\n[privacy]\nnoise_multiplier = 2.0\ndelta = 1e-3\n[views]\ncount = 2\n')
    config = build_config({"privacy": {"target_epsilon": 3.0}, "views": {"flip": 0.5}}, file=file)
    assert (config.privacy.target_epsilon, config.privacy.noise_multiplier, config.privacy.delta) == (3.0, None, 1e-3)
    assert (config.views.count, config.views.flip) == (2, 0.5)
    assert config.name == "digits"


@pytest.mark.parametrize(("given", "meant"), OTHER_NAMES.items())
def test_a_name_of_other_programs_is_answered_with_ours(given: str, meant: str) -> None:
    assert meant in FLAGS["train"].split()
    assert given not in FLAGS["train"].split()


def test_a_wrong_flag_is_answered_with_the_one_that_was_meant() -> None:
    assert "Did you mean --target-epsilon?" in dpvision_errors("train", "digits", "--epsilon", "3")
    assert "Did you mean --clip-norm?" in dpvision_errors("train", "digits", "--clip-nrm", "3")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--target-epsilon -1", "--target-epsilon (privacy.target_epsilon): Input should be greater than 0"),
        ("", "needs --target-epsilon, --target-risk or --noise-multiplier"),
        ("--target-epsilon 3 --momentum 1.5", "--momentum (optimizer.momentum): Input should be less than 1"),
        ("--target-epsilon 3 --steps 5 --epochs 2", "steps and epochs exclude each other"),
        ("--target-epsilon 3 --clipping round", "--clipping (privacy.clipping): Input should be 'flat'"),
        ("--target-epsilon 3 --transfer-weights x --trained last", "with --trained last"),
    ],
)
def test_an_error_names_the_flag(arguments: str, named: str) -> None:
    result = CliRunner().invoke(app, ["train", "digits", *arguments.split()])
    assert result.exit_code == 2
    assert named in result.stderr


def test_only_names_of_flags_are_replaced_in_a_message() -> None:
    flags = {"steps": "--steps", "clip_norm": "--clip-norm", "views.count": "--views", "trained": "--trained"}
    message = "steps: clip_norm and views.count need trained=last in /clip_norm/x.clip_norm, not other_name"
    expected = (
        "steps: --clip-norm and --views (views.count) need --trained last in /clip_norm/x.clip_norm, not other_name"
    )
    assert named_by_flags(message, flags) == expected


def test_a_wrong_path_is_refused_before_torch_is_imported() -> None:
    code = """
import sys
from dpvision.cli.train_command import build_config
from dpvision.errors import DataError
try:
    build_config({"data": {"source": "nowhere"}, "privacy": {"target_epsilon": 3.0}})
except DataError as error:
    print(error)
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"nowhere is neither a file or folder nor one of {', '.join(KNOWN_DATASETS)}.\n"


@pytest.mark.parametrize("key", ["source", "test", "masks", "test_masks"])
def test_every_path_of_the_data_must_exist(key: str) -> None:
    data = {"source": "digits", key: "nowhere"}
    with pytest.raises(DataError, match="nowhere is neither"):
        build_config({"task": "segmentation", "data": data, "privacy": {"target_epsilon": 3.0}})


def test_known_datasets_are_those_that_can_be_loaded() -> None:
    assert dataset_names() == KNOWN_DATASETS


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"dpvision {dpvision.__version__}\n")


def test_threads_are_set_and_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from dpvision.cli.flags import set_threads

    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    set_threads(3)
    set_threads(None)
    assert asked == [3]
    result = CliRunner().invoke(app, ["train", "digits", "--target-epsilon", "3", "--threads", "0"])
    assert result.exit_code == 2
    assert "--threads must be from 1 to 4096, got 0." in result.stderr
    with pytest.raises(ArgumentError, match="from 1 to 4096"):
        set_threads(10**23)


@pytest.mark.parametrize(("recipe_has", "given"), [("steps = 50", {"epochs": 2.0}), ("epochs = 2.0", {"steps": 50})])
def test_steps_replace_epochs_of_a_file_and_the_other_way_round(
    tmp_path: Path, recipe_has: str, given: dict[str, float]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[data]\nsource = "digits"\n[privacy]\ntarget_epsilon = 3.0\n{recipe_has}\n')
    privacy = build_config({"privacy": given}, file=file).privacy
    assert {"steps": privacy.steps, "epochs": privacy.epochs} == {"steps": None, "epochs": None} | given


def test_an_example_in_a_message_is_not_taken_for_a_flag() -> None:
    result = CliRunner().invoke(app, ["train", "digits", "--target-epsilon", "3", "--option", "width"])
    assert "--option must look like NAME=VALUE, got 'width'." in result.stderr


def test_a_path_that_is_not_text_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"^data\.unit_csv must be text in UTF-8, got 'a\\udcff'\. Rename"):
        parse_config({"data": {"unit_csv": "a\udcff"}})


def test_a_broken_rule_is_told_without_the_words_of_pydantic(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\nsource = "digits"\n')
    with pytest.raises(ArgumentError, match=r"^privacy: steps and epochs exclude each other: give one of them$"):
        build_config({"privacy": {"target_epsilon": 3.0, "steps": 5, "epochs": 1.0}}, file=file)
