"""What the engine holds in memory: no more of a model's activations at once than the work at hand needs.

Tensors alive are counted from inside the model, at the end of each of its forward passes, in activations of one unit.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from dpvision.config import Performance
from dpvision.gradients import clipped_sum, plan, separability
from dpvision.gradients.clipped_sum import Accumulator, Rows, clipped_sum_of_batch, unclipped_sum_of_batch
from dpvision.gradients.layer_gradient import LayerGradient, MaterialisedGradient
from dpvision.gradients.per_unit import UnitGradients
from dpvision.gradients.plan import find_plan
from dpvision.gradients.rules import weight_standardisation
from dpvision.gradients.rules.weight_standardisation import Standardisation
from dpvision.gradients.separability import find_mixing, synthetic_batch
from dpvision.kernels import memory
from dpvision.privacy.values import Microbatch
from grads_support import cross_entropy

LAYERS: Final = 6
SHAPE: Final = (3, 16, 17)  # of one unit, between any two layers; nothing else here looks like it
PLAIN: Final = Performance(microbatch_size=2, kernels="plain", channels_last=False)


@pytest.fixture(autouse=True)
def _only_new_objects() -> Iterator[None]:
    """Let the collector know of what is made from here on alone: looking through all of torch takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@dataclass(eq=False)
class Census:
    """How many activations of single units were alive at the end of each pass."""

    counts: list[int] = field(default_factory=list)

    def take(self) -> None:
        alive = [x for x in gc.get_objects() if type(x) is Tensor and tuple(x.shape[1:]) == SHAPE]
        storages = {x.untyped_storage().data_ptr(): x.shape[0] for x in alive}
        self.counts.append(sum(storages.values()))


class Counted(nn.Module):
    """Layers that each keep the shape of what they get, and a count before the last one."""

    def __init__(self, census: Census) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 3, 3, padding=1) for _ in range(LAYERS)])
        self.head = nn.Linear(3, 4)
        self._census = [census]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self._census[0].take()
        return self.head(x.mean((2, 3)))


def rows(units: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    return Rows(torch.randn(units, *SHAPE, generator=generator), torch.arange(units) % 4, 1)


def test_looking_for_mixing_holds_one_pass_and_no_copies_of_what_went_through_it() -> None:
    census = Census()
    synthetic = synthetic_batch(next(rows(2).microbatches(2)), units=2)
    assert find_mixing(Counted(census), cross_entropy, synthetic) is None
    assert census.counts
    # The batch, the changed batch and the last output, of two units each. Copies would be two more for each layer.
    assert max(census.counts) <= 2 * 4


def test_the_search_for_a_plan_holds_the_activations_of_one_pass_at_a_time() -> None:
    census = Census()
    synthetic = synthetic_batch(next(rows(2).microbatches(2)), units=2)
    found = find_plan(Counted(census), cross_entropy, synthetic, evaluate=False, channels_last=False)
    assert found.proved
    assert not found.wrong
    # The largest pass is of three units, each layer's input held for its gradient, beside the synthetic itself.
    assert max(census.counts) <= 3 * (LAYERS + 1) + 2 * 2


@pytest.mark.parametrize("clipped", [True, False])
def test_a_micro_batch_is_gone_before_the_next_one_is_run(clipped: bool) -> None:
    census = Census()
    model = Counted(census)
    add_up = (
        functools.partial(clipped_sum_of_batch, clip_norm=1.0, own_code=False) if clipped else unclipped_sum_of_batch
    )
    add_up(model, cross_entropy, rows(2), performance=PLAIN)  # finds the plan
    census.counts.clear()
    add_up(model, cross_entropy, rows(8), performance=PLAIN)
    assert len(census.counts) == 4
    assert max(census.counts) == census.counts[0]


class Watched(LayerGradient):
    """A share that sees, whenever one is worked on, how many are alive."""

    def __init__(self, everyone: weakref.WeakSet[Watched], alive: list[int]) -> None:
        self._everyone, self._alive = everyone, alive
        everyone.add(self)

    def norms_sq(self) -> Tensor:
        self._alive.append(len(self._everyone))
        return torch.ones(2, dtype=torch.float64)

    def weighted_sum(self, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        self._alive.append(len(self._everyone))
        return torch.ones(3)

    def per_unit(self) -> Tensor:
        raise NotImplementedError


def test_what_a_share_holds_is_gone_before_the_next_one_is_added() -> None:
    everyone, alive = weakref.WeakSet[Watched](), list[int]()
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    layer_gradients: dict[nn.Parameter, LayerGradient] = {
        parameter: Watched(everyone, alive) for parameter in parameters
    }
    Accumulator().add(layer_gradients, dict.fromkeys(parameters, torch.ones(2, dtype=torch.float64)), None)
    assert alive == [4, 3, 2, 1]


def test_what_a_share_made_of_itself_is_gone_before_the_next_one_is_compared_for_the_last_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everyone, alive = weakref.WeakSet[Watched](), list[int]()
    model = nn.ParameterList([torch.zeros(3) for _ in range(4)])
    layer_gradients: dict[nn.Parameter, LayerGradient] = {
        parameter: Watched(everyone, alive) for parameter in model.parameters()
    }

    def alone(*_: object) -> dict[nn.Parameter, Tensor]:
        return {value: torch.zeros_like(value) for value in model.parameters()}

    monkeypatch.setattr(separability, "_gradients_alone", alone)
    synthetic = next(rows(2).microbatches(2))
    reference = separability.Reference(model, cross_entropy, synthetic)
    separability.compare_with_single_units(reference, UnitGradients(layer_gradients, 0))
    assert alive == [4] * 8 + [4, 3, 2, 1]  # all norms, then sums for one unit and for the other


def test_a_total_leaves_when_it_is_asked_for() -> None:
    layer = nn.Linear(3, 2)
    totals = Accumulator()
    layer_gradients: dict[nn.Parameter, LayerGradient] = {
        layer.weight: MaterialisedGradient(torch.randn(4, 2, 3)),
        layer.bias: MaterialisedGradient(torch.randn(4, 2)),
    }
    ones = torch.ones(4, dtype=torch.float64)
    totals.add(layer_gradients, {layer.weight: ones, layer.bias: ones}, None)
    first = totals.gradients(dict(layer.named_parameters()))
    assert all(bool(value.any()) for value in first.values())
    assert not any(bool(value.any()) for value in totals.gradients(dict(layer.named_parameters())).values())


def test_a_pull_back_in_pieces_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Standardisation.from_layer(torch.randn(7, 3, 2, 2), torch.rand(7) + 0.5, 1e-4)
    e_OD = torch.randn(7, 12, dtype=torch.float64)
    whole = facts.pull_back(e_OD)
    for numbers in (1, 25, 10**6):  # a filter at a time, two at a time, all at once
        monkeypatch.setattr(weight_standardisation, "_NUMBERS_AT_ONCE", numbers)
        assert torch.equal(facts.pull_back_in_place(e_OD.clone()), whole)


def test_a_large_model_gives_memory_back_and_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))
    batch = Rows(torch.randn(6, 3, 2, 2), torch.arange(6) % 3, 1)
    performance = Performance(microbatch_size=2)
    small = clipped_sum_of_batch(model, cross_entropy, batch, clip_norm=0.5, performance=performance)
    given: list[bool] = []
    monkeypatch.setattr(clipped_sum, "_LARGE", 1)
    monkeypatch.setattr(clipped_sum, "give_back_freed_memory", lambda: given.append(True))
    large = clipped_sum_of_batch(model, cross_entropy, batch, clip_norm=0.5, performance=performance)
    assert given == [True]  # once a step
    assert all(torch.equal(small.gradients[name], large.gradients[name]) for name in small.gradients)


def test_a_model_without_finite_gradients_is_thought_as_large_as_with_them() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 64, 2))
    synthetic = synthetic_batch(next(Rows(torch.randn(2, 3, 8, 8), torch.arange(2), 1).microbatches(2)), units=2)

    def endless(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) + (outputs.sum(1) * 0).sqrt()  # zero, of infinite slope

    found = [find_plan(model, loss, synthetic, evaluate=False) for loss in (cross_entropy, endless)]
    assert [one.proved for one in found] == [True, False]
    assert found[0].plan.bytes_per_unit == found[1].plan.bytes_per_unit


def test_memory_is_given_back_whenever_enough_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    monkeypatch.setattr(memory, "give_back_freed_memory", lambda: given.append(True))
    giving_back = memory.GivingBack()
    for _ in range(8):
        giving_back.replaced(1 << 27)  # half of what it takes
    assert len(given) == 4


def test_only_new_sums_give_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    monkeypatch.setattr(memory, "give_back_freed_memory", lambda: given.append(True))
    monkeypatch.setattr(memory, "_WORTH_GIVING_BACK", 1)
    layer, totals, ones = nn.Linear(3, 2), Accumulator(), torch.ones(4, dtype=torch.float64)
    for expected in (2, 2, 2):  # once for each parameter, in the first micro-batch alone
        layer_gradients: dict[nn.Parameter, LayerGradient] = {
            layer.weight: MaterialisedGradient(torch.randn(4, 2, 3)),
            layer.bias: MaterialisedGradient(torch.randn(4, 2)),
        }
        totals.add(layer_gradients, {layer.weight: ones, layer.bias: ones}, None)
        assert len(given) == expected


@pytest.mark.parametrize(
    ("held_bytes", "units"), [(1 << 20, 64), (50 << 20, 4), (100 << 20, 4), (400 << 20, 2), (3 << 30, 1)]
)
def test_a_few_units_of_a_large_model_may_take_as_much_as_its_sums(held_bytes: int, units: int) -> None:
    like = next(rows(1).microbatches(1))
    network = nn.Linear(1 << 10, 1 << 7)  # its sums take a MiB, which is nothing beside what a micro-batch may take
    found = plan.Plan(plan.OwnershipOverrides(), {}, held_bytes, channels_last=False)
    performance = Performance(memory_mib=64 if held_bytes == 1 << 20 else 256)
    assert clipped_sum._microbatch_size(found, network, like, performance) == units
    with torch.device("meta"):
        large = nn.Linear(1 << 14, 1 << 14)  # 2 GiB of sums
    expected = {1 << 20: 64, 50 << 20: 8, 100 << 20: 4, 400 << 20: 4, 3 << 30: 1}[held_bytes]
    assert clipped_sum._microbatch_size(found, large, like, performance) == expected


@pytest.mark.parametrize(("expected", "units"), [(None, 512), (4096.0, 512), (200.0, 232), (32.0, 48), (1.0, 8)])
def test_a_microbatch_is_no_larger_than_most_draws(expected: float | None, units: int) -> None:
    like = Microbatch(torch.zeros(2, 1, 8, 8), torch.zeros(2), torch.ones(2, 1))
    found = plan.Plan(plan.OwnershipOverrides(), {}, 1 << 10, channels_last=False)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3))
    assert clipped_sum._microbatch_size(found, network, like, Performance(), expected=expected) == units
    asked = Performance(microbatch_size=300)
    assert clipped_sum._microbatch_size(found, network, like, asked, expected=expected) == 300


@pytest.mark.parametrize("library", ["glibc", ""])
def test_freed_memory_is_given_back_where_the_c_library_can(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: (library, ""))
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=asked.append))
    memory.give_back_freed_memory()
    assert asked == ([0] if library else [])
