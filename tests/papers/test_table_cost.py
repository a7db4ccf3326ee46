"""What ``dpvision reproduce`` says that all runs cost together: every ledger counts, and what voids is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dpvision.accounting import guarantee
from dpvision.errors import DPVisionError
from dpvision.papers.reproduce import RowResult, RunResult, reproduce
from dpvision.papers.table_cost import read_bills, released_together
from dpvision.papers.table_page import markdown, release_lines
from dpvision.papers.tables import Row
from dpvision.release.composition import UNREADABLE, Bill, composed
from dpvision.release.statements import HAND_SEEDED
from dpvision.storage.files import json_bytes
from dpvision.training.callbacks import RunCallback
from reproduce_runs import PLANNED, RELU, STEP, TANH, quick, spend


def cost(steps: int) -> float:
    return guarantee([(STEP, steps)], delta=1e-3).epsilon


def together(folder: Path) -> dict[str, dict[str, Any]]:
    return {each["source"]: each for each in released_together(read_bills(folder))["together"]}


def test_repeats_compose_to_what_all_their_charges_cost(tmp_path: Path) -> None:
    for repeat in "123":
        spend(tmp_path / "runs" / "a" / repeat)
    found = composed(read_bills(tmp_path))
    expected = {"runs": 3, "epsilon": pytest.approx(cost(9)), "delta": 1e-3, "adjacency": "add_remove", "void": None}
    assert found == expected
    assert found["epsilon"] > 1.2 * cost(3)


def test_runs_at_several_deltas_compose_at_the_largest() -> None:
    bills = [Bill(run=f"a/{d}", source="mnist", charges=((STEP, 3),), delta=d) for d in (1e-5, 1e-3, 1e-4)]
    found = composed(bills)
    assert (found["delta"], found["epsilon"]) == (1e-3, pytest.approx(cost(9)))


def test_a_run_without_privacy_voids_its_own_data_and_no_other(tmp_path: Path) -> None:
    spend(tmp_path / "runs" / "a" / "1")
    spend(tmp_path / "runs" / "a" / "2")
    spend(tmp_path / "runs" / "b" / "1", enabled=False)
    spend(tmp_path / "runs" / "c" / "1", source="cifar10")
    found = together(tmp_path)
    assert (found["mnist"]["runs"], found["mnist"]["epsilon"], found["mnist"]["delta"]) == (3, None, None)
    assert found["mnist"]["void"] == "run b/1: trained without privacy: no guarantee"
    assert (found["cifar10"]["epsilon"], found["cifar10"]["void"]) == (pytest.approx(cost(3)), None)
    values = released_together(read_bills(tmp_path))
    assert values["without_privacy"] == 1
    lines = list(release_lines(values))
    assert "- 3 runs on mnist: void, run b/1: trained without privacy: no guarantee" in lines
    assert sum("epsilon" in line and "mnist" in line for line in lines) == 0


def test_a_reason_against_a_release_voids_and_no_privacy_is_named_first(tmp_path: Path) -> None:
    spend(tmp_path / "runs" / "a" / "1", reasons=("its first weights are of these very pictures",))
    spend(tmp_path / "runs" / "a" / "2")
    assert together(tmp_path)["mnist"]["epsilon"] is None
    assert together(tmp_path)["mnist"]["void"] == "run a/1: its first weights are of these very pictures"
    spend(tmp_path / "runs" / "b" / "1", enabled=False)
    assert together(tmp_path)["mnist"]["void"] == "run b/1: trained without privacy: no guarantee (and 1 more)"


def test_more_steps_than_planned_void(tmp_path: Path) -> None:
    spend(tmp_path / "runs" / "a" / "1", steps=PLANNED + 1)
    assert "6 steps were charged, but 5 were planned" in together(tmp_path)["mnist"]["void"]


def test_parts_of_cifar100_are_cifar100(tmp_path: Path) -> None:
    spend(tmp_path / "runs" / "part" / "1", source="cifar100-min10-draw2.npz", enabled=False)
    spend(tmp_path / "runs" / "whole" / "1", source="cifar100")
    assert "part/1" in together(tmp_path)["cifar100"]["void"]


@pytest.mark.parametrize("other", [{"adjacency": "zero_out"}, {"privacy_unit": "patient"}])
def test_different_units_or_adjacencies_have_no_common_epsilon(other: dict[str, Any], tmp_path: Path) -> None:
    spend(tmp_path / "runs" / "a" / "1")
    spend(tmp_path / "runs" / "a" / "2", **other)
    found = together(tmp_path)["mnist"]
    assert found["epsilon"] is None
    assert "no common epsilon" in found["void"]


def test_an_epsilon_that_can_not_be_proved_is_none() -> None:
    found = composed([Bill(run="a/1", source="mnist", charges=((STEP, 3),), delta=1e-300)])
    assert found["epsilon"] is None
    assert "no finite epsilon" in found["void"]


def test_a_run_that_spent_nothing_costs_nothing(tmp_path: Path) -> None:
    spend(tmp_path / "runs" / "a" / "1", steps=0)
    (tmp_path / "runs" / "a" / "2" / "release").mkdir(parents=True)
    assert read_bills(tmp_path) == ()
    assert read_bills(tmp_path / "nowhere") == ()


def test_a_ledger_that_can_not_be_read_voids_everything(tmp_path: Path) -> None:
    spend(tmp_path / "runs" / "a" / "1")
    spend(tmp_path / "runs" / "c" / "1", source="cifar10")
    ledger = tmp_path / "runs" / "a" / "1" / "release" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"step":2', b'"step":3'))
    assert together(tmp_path)["cifar10"]["void"] == f"run a/1: {UNREADABLE}"
    (tmp_path / "runs" / "c" / "1" / "release" / "config.json").unlink()
    (only,) = released_together(read_bills(tmp_path))["together"]
    assert (only["source"], only["runs"], only["epsilon"]) == ("unknown data", 2, None)


def test_smoke_tests_compose_and_a_ledger_that_was_cut_or_taken_away_voids(tmp_path: Path) -> None:
    reproduce(quick(tmp_path, rows=(TANH,)))
    (bill,) = read_bills(tmp_path, smoke_test=True)
    assert (bill.run, bill.recipe, bill.voids) == (f"{TANH}/1", TANH, ())
    assert read_bills(tmp_path)[0].voids == (HAND_SEEDED,), "a seed set by hand voids elsewhere"
    release = tmp_path / "runs" / TANH / "1" / "release"
    whole = (release / "ledger.jsonl").read_bytes()
    (release / "ledger.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert read_bills(tmp_path)[0].voids == (UNREADABLE,)
    (release / "ledger.jsonl").unlink()
    assert read_bills(tmp_path)[0].voids == (UNREADABLE,)
    (release / "ledger.jsonl").write_bytes(whole)
    certificate = json.loads((release / "certificate.json").read_text())
    certificate["stamps"].append("a reason that only the certificate knows")
    (release / "certificate.json").write_bytes(json_bytes(certificate))
    assert read_bills(tmp_path, smoke_test=True)[0].voids == ("a reason that only the certificate knows",)


class Failing(RunCallback):
    """The first step ends in an error that tells a figure of the data."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        raise DPVisionError("picture 17 is too bright")

    def message(self, text: str) -> None:
        self.heard.append(text)


def test_a_failed_run_is_charged_and_its_reason_is_said_but_not_written(tmp_path: Path) -> None:
    callback = Failing()
    (result,) = reproduce(quick(tmp_path, rows=(TANH,)), callback=callback).results
    assert [failure.to_dict() for failure in result.failures] == [{"repeat": 1, "kind": "DPVisionError"}]
    assert any("picture 17 is too bright" in text for text in callback.heard)
    written = {path.name: path.read_text() for path in tmp_path.glob("table.*")}
    assert written.keys() == {"table.json", "table.md", "table.svg"}
    assert not any("picture 17" in text for text in written.values())
    assert "failed: tanh, run 1: DPVisionError" in written["table.md"]
    values = json.loads(written["table.json"])
    (everything,) = values["together"]
    assert everything["runs"] == 1
    assert everything["epsilon"] > 0
    assert values["rows"][0]["together"]["epsilon"] == everything["epsilon"]


class Interrupting(RunCallback):
    """Ctrl-C twice, after the first step."""

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        raise KeyboardInterrupt


def test_interrupted_runs_earlier_repeats_and_other_rows_count(tmp_path: Path) -> None:
    assert reproduce(quick(tmp_path, rows=(RELU,)), callback=Interrupting()).interrupted
    reproduce(quick(tmp_path, rows=(TANH,), repeats=2))
    values = reproduce(quick(tmp_path, rows=(TANH,), repeats=1)).to_dict()
    (row,) = values["rows"]
    (everything,) = values["together"]
    assert (row["n"], row["together"]["runs"], everything["runs"]) == (1, 2, 3)
    bills = read_bills(tmp_path)
    assert sorted((bill.run, sum(count for _, count in bill.charges)) for bill in bills) == [
        (f"{RELU}/1", 1),
        (f"{TANH}/1", 2),
        (f"{TANH}/2", 2),
    ]


def test_a_run_that_forks_out_of_its_budget_is_a_failure_not_a_figure(tmp_path: Path) -> None:
    assert reproduce(quick(tmp_path, rows=(TANH,)), callback=Interrupting()).interrupted
    torch.set_num_threads(torch.get_num_threads() + 1)
    for _ in range(2):  # asked again, it is still none
        (result,) = reproduce(quick(tmp_path, rows=(TANH,))).results
        assert result.runs == ()
        assert [failure.kind for failure in result.failures] == ["Unfinished"]
        assert "| failed |" in (tmp_path / "table.md").read_text()
        assert [sum(count for _, count in bill.charges) for bill in read_bills(tmp_path)] == [2]


def row_values(name: str, *, stamps: tuple[str, ...] = (), bill: Bill | None = None) -> dict[str, Any]:
    certificate = {"epsilon": 2.0, "delta": 1e-5, "steps_taken": 5, "for_release": not stamps, "stamps": list(stamps)}
    run = RunResult(repeat=1, run="runs/1", accuracy=70.0, top5=None, certificate=certificate)
    return RowResult(row=Row(name, TANH), runs=(run,), bills=() if bill is None else (bill,)).to_dict()


def test_the_page_marks_rows_that_are_not_for_release() -> None:
    void = Bill(run="b/1", source="mnist", delta=1e-3, charges=((STEP, 1),), voids=("weights of the same data",))
    rows = [row_values("good"), row_values("bad", stamps=("weights of the same data",), bill=void)]
    head = {"table": "t", "title": "A title", "scale": "cpu", "smoke_test": None, "repeats": 1}
    head |= {"interrupted": False, "own_sources": False}
    page = markdown({**head, "rows": rows, "sources": [], **released_together([void])})
    good, bad = (line for line in page.splitlines() if line.startswith(("| good", "| bad")))
    assert good.startswith("| good |")
    assert bad.startswith("| bad (not for release) |")
    assert bad.endswith("| void |")
    assert "- not for release: bad: weights of the same data" in page
    assert "- 1 run on mnist: void, run b/1: weights of the same data" in page
    assert rows[1]["runs"][0]["stamps"] == ["weights of the same data"]
