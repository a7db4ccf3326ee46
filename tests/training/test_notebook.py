"""Results in a notebook: tables of public values, a progress bar, the report, the model and a figure."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dpvision
from dpvision.errors import ArgumentError
from dpvision.training import notebook
from dpvision.training.callbacks import RunCallback

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = dpvision.RunConfig(
        data={"source": "digits"},
        model={"name": "linear"},
        privacy={"target_epsilon": 3.0, "delta": 1e-4, "expected_batch_size": 256, "steps": 3, "clip_norm": 1.0},
        optimizer={"name": "sgd", "learning_rate": 2.0},
        evaluations=6,
    )
    return dpvision.train(config, run=tmp_path_factory.mktemp("notebook") / "<run>")


def test_training_writes_the_report_and_the_release_still_verifies(result: Any) -> None:
    assert result.report == result.run / "release" / "report.html"
    assert result.report.stat().st_size > 10_000
    assert dpvision.verify(result.run).ok


def test_a_missing_report_is_written_when_it_is_asked_for(result: Any) -> None:
    page = result.report.read_bytes()
    result.report.unlink()
    assert result.report.read_bytes() == page


def test_a_result_is_a_table_of_what_the_command_prints(result: Any) -> None:
    table = result._repr_html_()
    for text in ("accuracy", "epsilon", "guarantee in order", "better than chance", "report.html"):
        assert text in table
    assert "&lt;run&gt;" in table
    assert "<run>" not in table


def test_a_certificate_is_a_table_and_still_a_dict(result: Any) -> None:
    assert isinstance(result.certificate, dict)
    table = result.certificate._repr_html_()
    assert str(result.certificate["epsilon"]) in table
    assert "privacy unit" in table


def test_the_model_is_the_released_one_and_ready_to_use(result: Any) -> None:
    assert result.model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_a_printed_result_or_model_is_one_short_line(result: Any) -> None:
    for text in (repr(result), repr(dpvision.load(result.run))):
        assert len(text) < 500
        assert "epsilon=" in text
        assert "\n" not in text


def test_the_figure_shows_the_score_over_epsilon(result: Any) -> None:
    (axes,) = result.plot().axes
    (line,) = axes.lines
    assert len(line.get_xdata()) == len(result.metrics["curve"]) > 1
    assert axes.get_xlabel() == "epsilon"
    object.__setattr__(result, "metrics", {**result.metrics, "curve": []})
    with pytest.raises(ArgumentError, match="nothing was measured"):
        result.plot()


def test_progress_is_shown_in_a_notebook_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(notebook.default_callback()) is RunCallback
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)
    shell = SimpleNamespace(kernel=object())

    def display(page: str, *, display_id: bool) -> Any:
        shown.append(page)
        return handle

    fake: Any = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    bar = notebook.default_callback()
    assert isinstance(bar, notebook.NotebookProgress)
    bar.started(name="<model>", steps=1000, done=0, choices=())
    bar.evaluated({"accuracy": 0.5})
    for done in range(1, 1001):
        bar.stepped(done=done, epsilon_bound=1.5)
    assert len(shown) == 101
    assert '<progress value="1000" max="1000">' in shown[-1]
    assert "&lt;model&gt;: step 1000 of 1000, epsilon at most 1.50, test score 50.0%" in shown[-1]


def test_an_own_loop_has_a_table_too(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    mechanism = dpvision.Mechanism.calibrated(
        target_epsilon=3.0, delta=1e-3, num_units=20, expected_batch_size=5, steps=1, clip_norm=1.0
    )
    run = dpvision.PrivateRun(model, torch.optim.SGD(model.parameters(), lr=0.1), mechanism, tmp_path / "run")
    for batch in run.batches((torch.rand(20, 4), torch.zeros(20, dtype=torch.long))):
        run.step(batch, torch.nn.CrossEntropyLoss(reduction="none"))
    released = run.release()
    assert "epsilon" in released._repr_html_()
    with pytest.raises(ArgumentError):
        _ = released.model
