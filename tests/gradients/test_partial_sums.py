"""One order of additions for any number of processes: every micro-batch once, every bit the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpvision.gradients.partial_sums import Branch, Share, SumTree, receive_branches, send_branches

SIZES = range(1, 12)
COUNTS = (0, 1, 2, 3, 7, 8, 9, 40, 103)


class Wire:
    """Messages between ranks, as ``Ranks`` sends them."""

    def __init__(self, size: int) -> None:
        self.size, self.sender = size, 0
        self.sent: dict[int, list[Tensor]] = {rank: [] for rank in range(size)}

    def send(self, tensor: Tensor, *, to: int = 0) -> None:
        self.sent[self.sender].append(tensor.clone())

    def receive(self, tensor: Tensor, *, rank: int) -> Tensor:
        return tensor.copy_(self.sent[rank].pop(0))


def gradients(count: int) -> list[dict[str, Tensor]]:
    """Gradients whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(count)

    def values(*shape: int) -> Tensor:
        scale = 10 ** torch.randint(-8, 8, shape, generator=generator).double()
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    return [{"weight": values(5, 3), "bias": values(5)} for _ in range(count)]


def added_up(parts: int, size: int, each: list[dict[str, Tensor]]) -> dict[str, Tensor] | None:
    """Add up the gradients of micro-batches as ``size`` processes do."""
    wire: Any = Wire(size)
    parameters = {"weight": nn.Parameter(torch.zeros(5, 3)), "bias": nn.Parameter(torch.zeros(5))}
    trees = []
    for rank in range(size):
        share, tree = Share(parts, rank, size), SumTree()
        for part in share.own_parts:
            total: dict[str, Tensor] | None = None
            for number in range(share.start(part, len(each)), share.start(part + 1, len(each))):
                assert number in share.own_microbatches(len(each))
                assert share.part_of(number, len(each)) == part
                total = {n: (g.clone() if total is None else total[n].add_(g)) for n, g in each[number].items()}
            tree.push(Branch(part, 1, total))
        trees.append(tree)
        wire.sender = rank
        if rank:
            send_branches(tree, wire)
    receive_branches(trees[0], wire, parameters, Share(parts, 0, size), len(each))
    assert not any(wire.sent.values()), "every message is received"
    return trees[0].total()


def test_what_was_not_sent_is_not_a_number() -> None:
    """Gloo takes a message that is too short without a word, and leaves what was in memory before."""

    class Short(Wire):
        def receive(self, tensor: Tensor, *, rank: int) -> Tensor:
            message = self.sent[rank].pop(0)
            tensor[: message.numel()] = message
            return tensor

    wire: Any = Short(2)
    wire.sender, tree = 1, SumTree()
    tree.push(Branch(1, 1, {"weight": torch.ones(4, dtype=torch.float64)}))
    send_branches(tree, wire)
    whole = SumTree()
    whole.push(Branch(0, 1, None))
    parameters = {"weight": nn.Parameter(torch.zeros(4)), "bias": nn.Parameter(torch.zeros(3))}
    receive_branches(whole, wire, parameters, Share(2, 0, 2), 2)
    found = whole.total()
    assert found is not None
    assert found["weight"].tolist() == [1.0] * 4
    assert bool(found["bias"].isnan().all())


@pytest.mark.parametrize("parts", [1, 2, 8, 16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_each_micro_batch_belongs_to_one_process(parts: int, size: int, count: int) -> None:
    owned = [n for rank in range(size) for n in Share(parts, rank, size).own_microbatches(count)]
    assert owned == list(range(count))


@pytest.mark.parametrize("parts", [1, 2, 8, 16])
@pytest.mark.parametrize("count", COUNTS)
def test_the_sum_has_the_same_bits_for_any_number_of_processes(parts: int, count: int) -> None:
    each = gradients(count)
    alone = added_up(parts, 1, each)
    for size in SIZES:
        together = added_up(parts, size, each)
        assert (alone is None) == (together is None) == (count == 0)
        if alone is not None and together is not None:
            assert all(torch.equal(alone[name], together[name]) for name in alone)


def test_the_order_matters_for_these_gradients() -> None:
    each = gradients(40)
    one, eight = added_up(1, 1, each), added_up(8, 1, each)
    assert one is not None
    assert eight is not None
    assert not torch.equal(one["weight"], eight["weight"])
    torch.testing.assert_close(one["weight"], eight["weight"], rtol=1e-9, atol=1e-4)  # terms of up to 1e8
