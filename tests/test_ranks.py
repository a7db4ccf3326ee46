"""The processes of one run: who is who, shares of work, and processes of an earlier start."""

from __future__ import annotations

import secrets
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dpvision import ranks as module
from dpvision.errors import ArgumentError
from dpvision.ranks import ALONE, RankError, Ranks, job_name, job_size, usual_partial_sums
from rank_processes import run_ranks, values_of


def joined(store: Any, size: int, *, seconds: float = 20.0) -> list[tuple[str, int] | None]:
    """Let ``size`` ranks find each other in a store.

    Returns:
        For each rank what rank 0 wrote into the part of the store that the rank took, and how many times a process of
        this rank has entered that part.
    """
    found: list[tuple[str, int] | None] = [None] * size

    def join(rank: int) -> None:
        try:
            part = module._of_these_processes(store, rank, size, seconds)
        except RuntimeError:
            return
        if rank == 0:
            part.set("name", secrets.token_hex(16))
        found[rank] = (part.get("name").decode(), part.add(f"entered/{rank}", 1))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_restarted_processes_never_meet_those_that_ended() -> None:
    """The store of torchrun outlives the processes: what they left must not be read by the next ones."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    for _ in range(4):
        found = joined(store, 3)
        assert found[0] is not None
        assert found == [(found[0][0], 1)] * 3


def test_a_rank_that_died_while_it_joined_leaves_nothing_behind() -> None:
    store = dist.HashStore()
    store.set("hello/1", "name of a process that has ended")
    store.set("hello/2", "another one")
    found = joined(store, 3)
    assert found[0] is not None
    assert found == [(found[0][0], 1)] * 3


def test_a_rank_that_does_not_come_ends_the_wait_in_time() -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="rank 1 of 2 did not come"):
        module._of_these_processes(store, 0, 2, 0.2)


def test_shares_of_work_cover_everything_once() -> None:
    for size in range(1, 9):
        for count in (0, 1, 5, 8, 100):
            owned = [piece for rank in range(size) for piece in Ranks(rank, size).share(count)]
            assert owned == list(range(count))


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.of_this_job() is ALONE
    assert (job_size(), job_name(), usual_partial_sums()) == (1, None, 1)


@pytest.mark.parametrize(("size", "sums"), [(1, 8), (4, 8), (8, 8), (9, 16), (100, 128)])
def test_there_are_partial_sums_for_all_processes(monkeypatch: pytest.MonkeyPatch, size: int, sums: int) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(size))
    assert usual_partial_sums() == sums


def test_a_job_has_the_name_that_torchrun_was_given_or_that_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tuesday")
    assert job_name() == "tuesday"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert str(job_name()).split()[1].isdigit()


@pytest.mark.parametrize("given", ["soon", "0", "-3", "nan"])
def test_a_timeout_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(module.TIMEOUT, given)
    with pytest.raises(ArgumentError, match="must be a number of seconds above zero"):
        module._timeout()


def test_each_process_of_a_machine_takes_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for local in ("0", "1", "2", ""):
        monkeypatch.setenv("LOCAL_RANK", local)
        module._take_own_gpu()
    assert taken == [0, 1, 0]


def test_facts_that_differ_stop_every_rank(tmp_path: Path) -> None:
    def script(rank: int) -> list[str]:
        ranks, found = Ranks.of_this_job(), []
        ranks.agree({"code": "a", "data": "b"})
        for facts in ({"code": "a", "data": str(rank == 2)}, {"code": "a"} if rank else {"code": "a", "seed": "1"}):
            with pytest.raises(RankError) as caught:
                ranks.agree(facts)
            found.append(str(caught.value))
        with pytest.raises(RankError, match="does not agree with rank 0 on the step") as caught:
            ranks.settle(None, 7, int(rank == 1))
        ranks.settle(None, 7, 7)
        return [*found, str(caught.value)]

    found = values_of(run_ranks(3, script, tmp_path))
    assert all("rank 2 of 3: data differ from rank 0 (data: True here, False on rank 0)" in each[0] for each in found)
    assert all("seed differ from rank 0" in each[1] for each in found)
    assert all("rank 1 of 3 does not agree" in each[2] for each in found)


def test_what_rank_0_tells_and_spreads_arrives_bit_for_bit(tmp_path: Path) -> None:
    def script(rank: int) -> list[Any]:
        ranks = Ranks.of_this_job()
        told = ranks.tell({"text": "ü" * 70_000, "number": 0.1} if ranks.leads else None)
        values = torch.tensor([0.1, float("nan"), -0.0, 1e-310], dtype=torch.float64)
        mine = values.clone() if ranks.leads else torch.zeros(4, dtype=torch.float64)
        ranks.spread([mine, torch.empty(0)])
        rows = torch.arange(10.0)[:, None] if rank == 1 else torch.zeros(10, 1)
        ranks.collect(rows, size=3)
        return [len(told["text"]), told["number"], mine.view(torch.int64).tolist(), rows[:, 0].tolist()]

    first, second = values_of(run_ranks(2, script, tmp_path))
    assert first[:3] == second[:3]
    assert first[3] == [0, 0, 0, 0, 0, 0, 6, 7, 8, 9]


def test_one_of_several_processes_ends_without_the_interpreters_cleaning_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of gloo abort a process that lets the interpreter end first."""
    calls: list[object] = []
    joined = SimpleNamespace(cache_info=lambda: SimpleNamespace(currsize=1))
    monkeypatch.setattr(module, "_joined", joined)
    monkeypatch.setattr(module, "_leave", lambda: calls.append("left"))
    monkeypatch.setattr(module.os, "_exit", calls.append)
    with pytest.raises(SystemExit):  # what follows where the end of the process is a stub
        module.end_process(3)
    assert calls == ["left", 3]


def test_a_process_alone_ends_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "_exit", lambda code: pytest.fail("the interpreter was skipped"))
    with pytest.raises(SystemExit) as end:
        module.end_process(2)
    assert end.value.code == 2
