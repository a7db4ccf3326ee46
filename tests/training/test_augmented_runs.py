"""Runs with views: resumed, replayed on neighbours, without privacy, evaluated, and asked for on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import dpvision.data.batches as draws_module
import dpvision.training.stages as stages_module
import dpvision.training.trainer as loop_module
from dpvision.cli import app
from dpvision.config import parse_config
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.values import Batch, Microbatch
from dpvision.release.verify import verify
from dpvision.training import resume_training, train
from dpvision.training.start import start_run
from dpvision.training.trainer import measure, take_step
from frozen_runs import EXTRA_IMAGES, released_files, run_frozen
from tiny_runs import interrupt_run, tiny_config, write_images

VIEWS = {"count": 3, "crop_padding": 2, "padding": "symmetric", "flip": 0.5, "rotation": 10.0, "erasing": 0.3}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures.npz")


def with_views(pictures: Path, **changes: Any) -> Any:
    config = tiny_config(pictures, **changes)
    return config.model_copy(update={"views": config.views.model_copy(update=VIEWS)})


def weights_of(run: Path) -> bytes:
    return (run / "release" / "weights.safetensors").read_bytes()


def test_an_interrupted_run_with_views_equals_an_uninterrupted_one(tmp_path: Path, pictures: Path) -> None:
    config = with_views(pictures)
    result = train(config, run=tmp_path / "whole", seed=3)
    interrupt_run(tmp_path / "cut", config, after=7)
    assert resume_training(tmp_path / "cut").outcome == "finished"
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    assert verify(tmp_path / "cut").ok
    assert "views" in json.dumps(result.certificate["declared"])
    # Views cost nothing, and are not a way to train as without them.
    plain = train(tiny_config(pictures), run=tmp_path / "plain", seed=3)
    assert result.certificate["epsilon"] == plain.certificate["epsilon"]
    assert weights_of(tmp_path / "whole") != weights_of(tmp_path / "plain")


def test_other_views_are_another_configuration_and_need_a_fork(tmp_path: Path, pictures: Path) -> None:
    interrupt_run(tmp_path / "run", with_views(pictures), after=7)
    path = tmp_path / "run" / "private" / "config.json"
    values = json.loads(path.read_text())
    values["views"]["count"] = 4
    path.write_text(json.dumps(values))
    with pytest.raises(PrivacyError, match="config"):
        resume_training(tmp_path / "run")


@pytest.mark.parametrize("extra", ["ordinary", "extreme"])
def test_neighbours_with_views_differ_in_the_clipped_sum_alone_and_by_at_most_clip_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    monkeypatch.setattr("frozen_runs.tiny_config", with_views)
    one, _, run = run_frozen(tmp_path / "a", monkeypatch, None)
    other, _, neighbour = run_frozen(tmp_path / "b", monkeypatch, EXTRA_IMAGES[extra])
    moved = [
        sum(float((a[n].double() - b[n].double()).square().sum()) for n in a) ** 0.5
        for a, b in zip(one.sums, other.sums, strict=True)
    ]
    assert len(moved) == 12
    assert max(moved) <= 0.7 * (1 + 1e-5)  # float32 sums of up to 61 units
    assert sum(m > 0 for m in moved) >= 1, "the extra picture was never drawn: the test shows nothing"
    # A step in which the extra picture was not drawn has the same sum, bit for bit: nobody else's views moved.
    assert sum(m == 0 for m in moved) >= 1
    assert released_files(run) == released_files(neighbour)


def test_ordinary_training_gets_the_same_views(tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Microbatch] = []
    original = loop_module.ordinary_gradient

    def watched(model: Any, loss: Any, batch: Batch, **settings: Any) -> Any:
        seen.extend(batch.microbatches(60))
        return original(model, loss, batch, **settings)

    monkeypatch.setattr(loop_module, "ordinary_gradient", watched)
    privacy = {"enabled": False, "noise_multiplier": None, "clip_norm": None, "delta": None}
    train(with_views(pictures, privacy=privacy), run=tmp_path / "run", seed=3)
    assert {piece.row_weights_UR.shape for piece in seen} == {(60, 3)}
    first = seen[0].inputs.unflatten(0, (60, 3))
    assert not np.array_equal(first[0, 0].numpy(), first[0, 1].numpy())


def test_evaluation_never_sees_views(tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = draws_module.make_views

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr(draws_module, "make_views", counted)
    session, _ = start_run(with_views(pictures), tmp_path / "run", seed=3, device="cpu")
    with session.folder:
        take_step(session)
        made = len(calls)
        assert made > 0
        measure(session)
    assert len(calls) == made


def test_the_plan_is_settled_on_as_many_rows_as_a_unit_has(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    original = stages_module.plan_for

    def watched(model: Any, loss: Any, like: Microbatch, performance: Any, *, own_code: bool) -> Any:
        shapes.append(tuple(like.row_weights_UR.shape))
        return original(model, loss, like, performance, own_code=own_code)

    monkeypatch.setattr(stages_module, "plan_for", watched)
    config = with_views(pictures, data={"rows_per_unit": 2})
    session, _ = start_run(config, tmp_path / "run", seed=3, device="cpu")
    with session.folder:
        assert shapes == [(1, 6)]


def test_equal_views_are_refused(pictures: Path) -> None:
    with pytest.raises(ArgumentError, match="4 views of an image would be equal"):
        parse_config({**tiny_config(pictures).model_dump(mode="json"), "views": {"count": 4}})


def test_the_command_line_takes_views(tmp_path: Path, pictures: Path) -> None:
    arguments = f"train {pictures} --model linear --target-epsilon 4 --delta 1e-3 --steps 4 --expected-batch-size 20"
    chosen = "--views 2 --crop-padding 1 --padding zeros --flip 0.5 --rotation 5 --erasing 0.1"
    result = CliRunner().invoke(app, [*arguments.split(), *chosen.split(), "--output", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    expected = {"count": 2, "crop_padding": 1, "padding": "zeros", "flip": 0.5, "rotation": 5.0, "erasing": 0.1}
    assert json.loads((tmp_path / "run" / "release" / "config.json").read_text())["views"] == expected
    refused = CliRunner().invoke(app, [*arguments.split(), "--flip", "2", "--output", str(tmp_path / "other")])
    assert refused.exit_code == 2
    assert "views.flip" in refused.output
