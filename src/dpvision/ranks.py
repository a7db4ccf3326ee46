"""The processes of one run: rank 0 leads, the others compute clipped sums for it.

``torchrun`` starts the processes and says who is who; ``Ranks.of_this_job`` joins them. Everything that one process
does alone (charge, noise, optimizer step, files) stays with rank 0. What the ranks exchange are texts (JSON, no pickle)
and tensors, over gloo on the CPU, in an order that both sides know.

Every call here returns on all ranks, or raises ``RankError`` within the timeout: a process that ended is noticed at
once, one that hangs after ``DPVISION_RANK_TIMEOUT`` seconds. This module imports torch only when there are several
processes.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

from dpvision.errors import ArgumentError, DPVisionError, brief

if TYPE_CHECKING:
    from torch import Tensor

LEADER: Final = 0
TIMEOUT: Final = "DPVISION_RANK_TIMEOUT"
"""Environment variable: seconds that a rank waits for another."""
DEFAULT_TIMEOUT: Final = 900.0
USUAL_PARTIAL_SUMS: Final = 8
_MOST_PROBLEM: Final = 2000
_FACTS: Final = 4
_POLL: Final = 0.01


class RankError(DPVisionError):
    """Another process of the run failed or was lost.

    Attributes:
        told: whether rank 0 knows, so that this process need not say it.
    """

    def __init__(self, message: str, *, told: bool = False) -> None:
        super().__init__(message)
        self.told = told


@final
@dataclass(frozen=True)
class Ranks:
    """This process among those of its run.

    Attributes:
        rank: its number, from zero; rank 0 leads.
        size: the number of processes.
        timeout: seconds that it waits for another.
    """

    rank: int = 0
    size: int = 1
    timeout: float = DEFAULT_TIMEOUT
    _group: Any = field(default=None, repr=False)
    _store: Any = field(default=None, repr=False)
    _settled: list[BaseException] = field(default_factory=list, repr=False, compare=False)

    @staticmethod
    def of_this_job() -> Ranks:
        """Join the processes that torchrun, or an initialised ``torch.distributed``, started with this one.

        Returns:
            ``ALONE`` where there is one process.

        Raises:
            ArgumentError: the timeout is no number above zero.
            RankError: the others could not be reached.
        """
        return _joined() if job_size() > 1 else ALONE

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone charges, draws noise and writes files."""
        return self.rank == LEADER

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.size > 1

    def tell(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Give rank 0's values to all ranks.

        Args:
            values: plain values, on rank 0; the others pass nothing.

        Returns:
            Rank 0's values, on every rank.
        """
        import torch

        content = json.dumps(dict(values or {})).encode() if self.leads else b""
        size = torch.tensor([len(content)])
        self.spread([size])
        text = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        if not self.leads:
            text = torch.empty(int(size), dtype=torch.uint8)
        self.spread([text])
        return json.loads(bytes(text.tolist())) if not self.leads else dict(values or {})

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank 0's tensors into those of all ranks, which have the same shapes and types."""
        import torch
        import torch.distributed as dist

        if not self.several:
            return
        with self._reachable():
            for tensor in tensors:
                place = tensor.detach().cpu().contiguous()
                # Bytes: gloo knows few types, and no bit may change on the way.
                dist.broadcast(place.view(-1).view(torch.uint8), src=LEADER, group=self._group)
                if not self.leads and place.data_ptr() != tensor.data_ptr():
                    with torch.no_grad():
                        tensor.copy_(place)

    def send(self, tensor: Tensor, *, to: int = LEADER) -> None:
        """Send a tensor to another rank."""
        import torch
        import torch.distributed as dist

        with self._reachable():
            row = tensor.detach().cpu().contiguous().view(-1)
            dist.send(row.view(torch.uint8), dst=to, group=self._group)

    def receive(self, tensor: Tensor, *, rank: int) -> Tensor:
        """Receive into a contiguous tensor of the CPU what ``rank`` sends to this one; return it."""
        import torch
        import torch.distributed as dist

        with self._reachable():
            dist.recv(tensor.view(-1).view(torch.uint8), src=rank, group=self._group)
        return tensor

    def send_text(self, text: str, *, to: int = LEADER) -> None:
        """Send a text to another rank, which calls ``receive_text``."""
        import torch

        content = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        self.send(torch.tensor([len(content)]), to=to)
        self.send(content, to=to)

    def receive_text(self, *, rank: int) -> str:
        """Receive what ``rank`` sends with ``send_text``."""
        import torch

        size = int(self.receive(torch.zeros(1, dtype=torch.int64), rank=rank))
        return bytes(self.receive(torch.empty(size, dtype=torch.uint8), rank=rank).tolist()).decode()

    def share(self, count: int, rank: int | None = None) -> range:
        """Return which of ``count`` pieces of work belong to a rank (this one by default): contiguous, rank 0 first."""
        rank = self.rank if rank is None else rank
        return range(-(-rank * count // self.size), -(-(rank + 1) * count // self.size))

    def collect(self, rows: Tensor, *, size: int) -> None:
        """Bring each rank's pieces of ``size`` rows to rank 0, in place: piece i is rows ``i * size`` and following."""
        pieces = -(-len(rows) // size)
        for rank in range(1, self.size):
            own = self.share(pieces, rank)
            part = rows[own.start * size : own.stop * size]
            if self.leads and part.numel():
                self.receive(part, rank=rank)
            elif self.rank == rank and part.numel():
                self.send(part)

    def decided(self, decide: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Let rank 0 decide, and return what it decided on every rank.

        Raises:
            Exception: what ``decide`` raised, on rank 0.
            RankError: ``decide`` raised, on the others.
        """
        values, problem = {}, None
        if self.leads:
            try:
                values = dict(decide())
            except Exception as error:  # noqa: BLE001 - raised again below, on every rank
                problem = error
        self.settle(problem)
        return self.tell(values) if self.several else values

    def settle(self, problem: Exception | None = None, *facts: int, about: str = "the step") -> None:
        """Wait for all ranks, and raise on every rank if one has a problem or other facts than rank 0.

        Args:
            problem: what went wrong in this process.
            facts: up to four whole numbers of 63 bits that must be the same everywhere.
            about: what the facts are of.

        Raises:
            Exception: ``problem`` itself, where there is one.
            RankError: another rank has a problem, or the facts differ.
        """
        if not self.several:
            if problem is not None:
                raise problem
            return
        import torch
        import torch.distributed as dist

        count = self._store.add(f"settled/{self.rank}", 1)
        if problem is not None:
            self._store.set(f"problem/{count}/{self.rank}", str(problem)[:_MOST_PROBLEM])
        mine = torch.zeros(1 + _FACTS, dtype=torch.int64)
        mine[0] = problem is not None
        mine[1 : 1 + len(facts)] = torch.tensor(facts, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self._reachable():
            dist.all_gather(found, mine, group=self._group)
        failed = [rank for rank, theirs in enumerate(found) if theirs[0]]
        other = [rank for rank, theirs in enumerate(found) if not torch.equal(theirs, found[LEADER])]
        if problem is None and failed:
            with self._reachable():
                text = self._store.get(f"problem/{count}/{failed[0]}").decode(errors="replace")
            problem = RankError(f"rank {failed[0]} of {self.size}: {text}", told=True)
        if problem is None and other:
            problem = RankError(
                f"rank {other[0]} of {self.size} does not agree with rank 0 on {about}: all processes need the same "
                "code, settings and data.",
                told=True,
            )
        if problem is not None:
            self._settled[:] = [problem]
            raise problem

    def all_know(self, error: BaseException) -> bool:
        """Return whether this is the error that ``settle`` raised last, so that every rank raised one too."""
        return any(known is error for known in self._settled)

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Compute in the block, then ``settle``: an error in one process is raised in all."""
        problem = None
        try:
            yield
        except Exception as error:
            if not self.several:
                raise
            problem = error
        self.settle(problem)

    def agree(self, facts: Mapping[str, str]) -> None:
        """Require the same facts on every rank.

        Args:
            facts: texts by name, such as digests. They are sent to all ranks.

        Raises:
            RankError: on every rank, naming the facts that differ and the first rank that differs.
        """
        if not self.several:
            return
        expected = self.tell(facts if self.leads else None)
        differing = sorted(name for name in {**expected, **facts} if expected.get(name) != facts.get(name))
        problem = ArgumentError(_difference(differing, expected, facts)) if differing else None
        try:
            self.settle(problem)
        except ArgumentError as error:
            raise RankError(f"rank {self.rank} of {self.size}: {error}", told=True) from error

    def post(self, name: str, values: Mapping[str, Any]) -> None:
        """Leave values for the other ranks to fetch, without waiting for them."""
        if self.several:
            with self._reachable():
                self._store.set(f"post/{name}", json.dumps(dict(values)))

    def fetch(self, name: str) -> dict[str, Any]:
        """Wait until rank 0 has left values under this name, and return them."""
        with self._reachable():
            return json.loads(self._store.get(f"post/{name}"))

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Turn errors of the network into one line."""
        try:
            yield
        except (RuntimeError, OSError) as error:  # torch's network errors are RuntimeErrors
            self._lost(error)

    def _lost(self, error: Exception) -> NoReturn:
        raise RankError(
            f"rank {self.rank} of {self.size} lost contact with another process of this run, which ended or did not "
            f"answer within {self.timeout:g} s ({TIMEOUT}): {brief(error)}. Every charge is in the ledger; the run can "
            "be resumed, with any number of processes."
        ) from error


ALONE: Final = Ranks()
"""One process."""


def job_size() -> int:
    """Return the number of processes that were started together, by torchrun or by the program itself."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    try:
        return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    except ValueError as error:
        raise ArgumentError("WORLD_SIZE must be a whole number: start the processes with torchrun.") from error


def refuse_several_processes(what: str) -> None:
    """Refuse to run in several processes what is not shared among them.

    Raises:
        ArgumentError: torchrun, or the program itself, started several.
    """
    if job_size() > 1:
        raise ArgumentError(f"{what} runs in one process, and there are {job_size()}: start it without torchrun.")


def may_restart() -> bool:
    """Return whether torchrun restarts the processes of this job after a failure (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def job_name() -> str | None:
    """Return a name that the restarted processes of a job share, and no other job has; None without torchrun.

    It is torchrun's ``--rdzv-id``, or the torchrun process itself where none was given.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or name != "none":
        return name
    parent = os.getppid()
    try:
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = "?"
    return f"{platform.node()} {parent} {began}"


def in_a_job() -> bool:
    """Return whether torchrun started this process, be it alone."""
    return "RANK" in os.environ or job_size() > 1


def usual_partial_sums() -> int:
    """Return how many partial sums a new run has: one without torchrun, else eight or a power of two that is enough."""
    if not in_a_job():
        return 1
    return max(USUAL_PARTIAL_SUMS, 1 << (job_size() - 1).bit_length())


@functools.cache
def _joined() -> Ranks:
    """Join the process group, once in a process."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    seconds = _timeout()
    wait = timedelta(seconds=seconds)
    _take_own_gpu()
    try:
        if dist.is_initialized():  # the program's own, of any backend
            group = dist.new_group(backend="gloo", timeout=wait)
            store = dist.distributed_c10d._get_default_store()
        else:
            found, rank, size = next(iter(rendezvous("env://", timeout=wait)))
            store = _of_these_processes(found, rank, size, seconds)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
            atexit.register(_leave)
            group = None
        store = dist.distributed_c10d.PrefixStore("dpvision", store)
        store.set_timeout(wait)
    except (RuntimeError, ValueError, OSError) as error:
        raise RankError(
            f"the processes of this run did not find each other within {seconds:g} s: {brief(error)}."
        ) from error
    return Ranks(dist.get_rank(), dist.get_world_size(), seconds, group, store)


def _take_own_gpu() -> None:
    """Let "cuda" mean another GPU in each process of a machine; without GPUs, nothing happens."""
    import torch

    local = os.environ.get("LOCAL_RANK", "")
    if local.isdigit() and torch.cuda.is_available():
        torch.cuda.set_device(int(local) % torch.cuda.device_count())


def _of_these_processes(store: Any, rank: int, size: int, seconds: float) -> Any:
    """Return a part of the store that no earlier processes of the job have written to.

    torchrun keeps one store over its restarts, so that a process may read the address of one that has ended. Here each
    process leaves a fresh name, and waits until a living rank 0 answers to that name with a name for all of them.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    own, deadline = secrets.token_hex(16), time.monotonic() + seconds
    store.set_timeout(timedelta(seconds=seconds))
    if rank != LEADER:
        store.set(f"hello/{rank}", own)
        together = store.get(f"welcome/{own}").decode()
        store.set(f"ready/{together}/{rank}", "1")
        return PrefixStore(f"dpvision/{together}", store)
    answered, missing = set[str](), set(range(size)) - {LEADER}
    while missing:
        for other in sorted(missing):
            if store.check([f"hello/{other}"]):
                name = store.get(f"hello/{other}").decode()
                if name not in answered:  # it may be that of a process that has ended: the next one leaves another
                    store.set(f"welcome/{name}", own)
                    answered.add(name)
        missing = {other for other in missing if not store.check([f"ready/{own}/{other}"])}
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(missing)} of {size} did not come")
        time.sleep(_POLL if missing else 0)
    return PrefixStore(f"dpvision/{own}", store)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # a group in a cycle would go with the interpreter, whose end its threads must not see


def end_process(code: int) -> NoReturn:
    """End a process whose program is done; one of several ends without the interpreter's cleaning up.

    A thread of gloo that releases its last tensor while the interpreter ends aborts the process ("terminate called
    without an active exception"), and torchrun would call the finished run failed.

    Args:
        code: exit code of the process.
    """
    if _joined.cache_info().currsize:
        _leave()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    raise SystemExit(code)


def _timeout() -> float:
    given = os.environ.get(TIMEOUT, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ArgumentError(f"{TIMEOUT} must be a number of seconds above zero, got {brief(given)}.")
    return seconds


def _difference(names: Sequence[str], expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Say what differs; the first fact with its values, where they are short."""
    first = names[0]
    values = (str(expected.get(first)), str(found.get(first)))
    shown = f" ({first}: {values[1]} here, {values[0]} on rank 0)" if max(map(len, values)) <= 40 else ""
    return (
        f"{' and '.join(names)} differ from rank 0{shown}. All processes need the same code, settings, data and "
        "threads; nothing was spent."
    )
