"""The proof of a user's own code: what it refuses and in which words, and what it runs in the code's place."""

from __future__ import annotations

import random
import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpvision import kernels, models
from dpvision.config import Performance
from dpvision.errors import PrivacyError
from dpvision.gradients import clipped_sum as summing
from dpvision.gradients import plan as planning
from dpvision.gradients import proved_graph as proving
from dpvision.gradients.clipped_sum import Rows, clipped_sum, clipped_sum_of_batch
from dpvision.gradients.ownership import OwnershipOverrides
from dpvision.gradients.plan import check_faithful, plan_for
from dpvision.gradients.proved_graph import prove
from dpvision.gradients.separability import blind_batch
from dpvision.models.losses import loss_for
from dpvision.models.scattering import Scattering
from dpvision.privacy.values import Microbatch
from hostile_table import Applied

WIDTH, CLASSES = 6, 4


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(WIDTH))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Cnn(nn.Module):
    """Convolution, GroupNorm and ReLU, as a plain network has them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def rows(number: int = 3, seed: int = 0) -> Microbatch:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(number, WIDTH, generator=generator), torch.randint(CLASSES, (number,), generator=generator)
    return Microbatch(x, y, torch.ones(number, 1, dtype=torch.float64))


def image_rows(number: int = 2, side: int = 8, channels: int = 3) -> Microbatch:
    x, y = torch.rand(number, channels, side, side), torch.arange(number) % 2
    return Microbatch(x, y, torch.ones(number, 1, dtype=torch.float64))


def refusal(between: Callable[[Tensor], Tensor], loss_fn: Any = cross_entropy) -> str:
    with pytest.raises(PrivacyError) as caught:
        prove(Between(between), loss_fn, rows())
    return str(caught.value)


# What is refused, and how


class Mixer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_a_refusal_names_module_operation_line_and_remedy() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixer(), nn.Linear(WIDTH, CLASSES))
    with pytest.raises(PrivacyError) as caught:
        prove(model, cross_entropy, rows())
    line = Mixer.forward.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"1 (Mixer): mean (test_proved_graph.py, line {line}) works across the rows, so it is not proved that units do "
        "not mix. Treat each row by itself."
    )


def test_a_refusal_of_the_loss_names_it() -> None:
    text = refusal(lambda x: x, lambda outputs, targets: cross_entropy(outputs - outputs.mean(0), targets))
    assert text.startswith("loss_fn or the model itself: mean works across the rows, ")


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda x: x if x.shape[0] > 5 else -x, "treats batches of different sizes differently"),
        (lambda x: x if x.max() > 5 else -x, "branches on values"),
        (lambda x: x * float(x.max()), "branches on values"),
        (lambda x: torch.from_numpy(np.asarray(x.detach())), "can't be traced"),
        (lambda x: x * x.shape[0], "computes with the number of rows"),
        (lambda x: torch.linalg.svd(x)[0] @ x, "not an operation that can be followed"),
        (lambda x: x + torch.empty(WIDTH), "reads memory that is not initialised"),
        (lambda x: x * torch.arange(x.shape[0])[:, None], "computes with the numbers of the rows"),
    ],
    ids=["size", "branch", "number", "numpy", "count", "no rule", "memory", "place"],
)
def test_a_refusal_says_in_our_words_what_is_wrong(between: Callable[[Tensor], Tensor], words: str) -> None:
    text = refusal(between)
    assert words in text
    assert text.endswith(".")
    assert not re.search(r"\n|Traceback|SymInt|FakeTensor|torch\._|torch\.export|GuardOn|Dim\(", text)


def caught(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A step that hides what the tracer says about it."""

    def between(x: Tensor) -> Tensor:
        try:
            return x / 255 if read(x) else x
        except Exception:  # noqa: BLE001
            return x

    return between


@pytest.mark.parametrize(
    "read",
    [lambda x: x.max() > 5, lambda x: torch.equal(x, x.clamp(max=5)), lambda x: len(x[x > 5])],
    ids=["branch", "equal", "count"],
)
def test_code_that_reads_values_and_hides_the_tracers_error_is_refused(read: Callable[[Tensor], Any]) -> None:
    assert "branches on values" in refusal(caught(read))


@pytest.mark.parametrize(
    ("between", "source"),
    [
        (lambda x: x * random.random(), "random numbers of Python or NumPy"),
        (lambda x: x * np.random.rand(), "random numbers of Python or NumPy"),
        (lambda x: x * time.time(), "a clock"),
        (lambda x: x * time.perf_counter(), "a clock"),
    ],
    ids=["random", "numpy", "time", "perf_counter"],
)
def test_code_that_reads_clocks_or_other_random_numbers_is_refused(between: Any, source: str) -> None:
    before = random.getstate(), numpy_state()
    assert source in refusal(between)
    assert before == (random.getstate(), numpy_state())


def numpy_state() -> list[int]:
    state: Any = np.random.get_state()
    return state[1].tolist()


class Writes(Between):
    """Writes into something that outlives the call."""

    def __init__(self, what: str) -> None:
        super().__init__(lambda x: x)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.what == "its inputs":
                x.mul_(2)
            elif self.what == "scale":
                self.scale.mul_(2)
            else:
                self.first.weight.mul_(2)
        return super().forward(x)


@pytest.mark.parametrize("what", ["its inputs", "scale", "first.weight"])
def test_code_that_writes_into_inputs_buffers_or_parameters_is_refused(what: str) -> None:
    with pytest.raises(PrivacyError, match=f"writes into {what}, which the next rows would see"):
        prove(Writes(what), cross_entropy, rows())


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda outputs, targets: cross_entropy(outputs, targets).mean(),
        lambda outputs, targets: outputs,
        lambda outputs, targets: torch.ones(3),
        lambda outputs, targets: (cross_entropy(outputs, targets), 1),
    ],
    ids=["mean", "outputs", "constants", "tuple"],
)
def test_a_loss_that_is_not_one_value_per_row_is_refused(loss_fn: Any) -> None:
    with pytest.raises(PrivacyError):
        prove(Between(lambda x: x), loss_fn, rows())


def test_a_refusal_prints_nothing(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    for between in (lambda x: x - x.mean(0), lambda x: x if x.max() > 5 else -x, lambda x: x[: x.shape[0] // 2]):
        refusal(between)
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


def test_an_operation_of_weights_alone_must_be_atens_too() -> None:
    @torch.library.custom_op("dpvision_test::doubled", mutates_args=())
    def doubled(weight: Tensor) -> Tensor:
        return 2 * weight

    doubled.register_fake(torch.empty_like)
    model = Between(lambda x: x)
    model.between = lambda x: x * doubled(model.scale)
    with pytest.raises(PrivacyError, match="is not an operation that can be followed"):
        prove(model, cross_entropy, rows())


# What runs


@pytest.mark.parametrize("number", [2, 3, 17, 64])
def test_the_graph_gives_the_losses_of_the_code_for_any_number_of_rows(number: int) -> None:
    model = Between(torch.tanh)
    proof, batch = prove(model, cross_entropy, rows()), rows(number, seed=1)
    found = proof.network(*proof.microbatch(batch).inputs)
    torch.testing.assert_close(found, cross_entropy(model(batch.inputs), batch.targets))


def test_a_single_row_is_run_beside_a_copy_without_weight() -> None:
    model = Between(torch.tanh)
    proof, batch = prove(model, cross_entropy, rows()), rows(1)
    doubled = proof.microbatch(batch)
    assert doubled.row_weights_UR.tolist() == [[1.0], [0.0]]
    losses = proof.network(*doubled.inputs)
    torch.testing.assert_close(losses, cross_entropy(model(batch.inputs), batch.targets).expand(2))


SHOWN: deque[Tensor] = deque()  # lists are looked at: code may not keep anything in them
"""What own code was shown outside of a trace. Not in a closure: code that keeps something in one is refused."""


def look(x: Tensor) -> Tensor:
    if type(x) is Tensor:
        SHOWN.append(x.detach().clone())
    return x


def test_own_code_is_shown_no_private_value() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, look(targets))

    SHOWN.clear()
    model = nn.Sequential(Applied(look), nn.Linear(WIDTH, CLASSES))
    batch = Rows(torch.full((4, WIDTH), 500.5), torch.full((4,), CLASSES - 1), 1)
    clipped_sum_of_batch(model, loss, batch, clip_norm=1.0, performance=Performance())
    assert SHOWN
    assert not {500.5, float(CLASSES - 1)} & {float(value) for x in SHOWN for value in x.flatten()}


def test_a_later_step_runs_the_graph_and_never_the_code() -> None:
    model, batch = nn.Sequential(Applied(look), nn.Linear(WIDTH, CLASSES)), rows(8)
    clipped_sum(model, cross_entropy, batch.inputs, batch.targets, clip_norm=1.0)
    SHOWN.clear()
    clipped_sum(model, cross_entropy, batch.inputs, batch.targets, clip_norm=1.0)
    assert not SHOWN


def test_code_that_keeps_something_in_a_closure_is_refused() -> None:
    kept: list[Tensor] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        kept.append(targets.detach())
        return cross_entropy(outputs, targets)

    batch = rows(4)
    with pytest.raises(PrivacyError, match="keeps something from one call to the next"):
        clipped_sum(Between(torch.tanh), loss, batch.inputs, batch.targets, clip_norm=1.0)


def test_synthetic_rows_of_own_code_depend_on_no_value() -> None:
    one, two = (blind_batch(rows(4, seed=seed), units=3, classes=2) for seed in (1, 2))
    assert torch.equal(one.inputs, two.inputs)  # pyright: ignore[reportArgumentType]
    assert torch.equal(one.targets, two.targets)  # pyright: ignore[reportArgumentType]


def test_a_cached_proof_is_made_again_when_the_code_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = planning.prove
    monkeypatch.setattr(planning, "prove", lambda *given: (made.append(1), real(*given))[1])
    scale = [1.0]
    model = Between(lambda x: x * scale[0])

    def step() -> int:
        batch = rows(4)
        clipped_sum(model, cross_entropy, batch.inputs, batch.targets, clip_norm=1.0)
        return len(made)

    assert [step(), step()] == [1, 1]
    scale[0] = 2.0
    assert [step(), step()] == [2, 2]
    model.second.register_forward_hook(lambda module, args, output: output.mul(2))
    assert [step(), step()] == [3, 3]
    model.between = lambda x: x.tanh()
    assert [step(), step()] == [4, 4]


@pytest.mark.skipif(not kernels.available(), reason="native kernels are not available")
def test_a_plain_network_runs_as_a_fused_copy_of_its_graph() -> None:
    plan = plan_for(Cnn(), cross_entropy, image_rows(4))
    assert plan.proof is not None
    assert plan.fused_copy is not None
    assert any(type(module).__name__ == "FusedNorm" for module in plan.fused_copy.modules())


# The lines behind the proof


class Reversed(torch.autograd.Function):
    """Gradient reversal: a backward pass that is not in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


@pytest.mark.parametrize("drop", [0.0, 0.1], ids=["same numbers", "random numbers"])
def test_code_with_a_backward_pass_of_its_own_is_refused(drop: float) -> None:
    model, batch = Between(lambda x: F.dropout(Reversed.apply(x), drop)), rows(4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PrivacyError):
        clipped_sum(model, cross_entropy, batch.inputs, batch.targets, clip_norm=1.0)


def test_code_that_gives_other_losses_than_its_graph_is_refused() -> None:
    model, batch = Between(torch.tanh), rows(4)
    proof = prove(model, cross_entropy, batch)
    check_faithful(model, cross_entropy, proof, batch)
    model.between = torch.sigmoid
    with pytest.raises(PrivacyError, match="gives other results when it is called again"):
        check_faithful(model, cross_entropy, proof, batch)


def test_code_is_compared_with_its_graph_at_every_microbatch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(summing, "check_faithful", lambda *given: compared.append(given[-1].rows))
    model, batch = Between(torch.tanh), rows(40)
    for size in (5, 5, 30):
        clipped_sum(model, cross_entropy, batch.inputs, batch.targets, clip_norm=1.0, microbatch_size=size)
    assert compared == [5, 30]


def test_rows_may_not_write_into_memory_that_they_share() -> None:
    def write(x: Tensor) -> Tensor:
        shared = torch.zeros(1, WIDTH)
        shared.expand_as(x).masked_fill_(x > 0, 1.0)
        return x + shared

    assert "writes rows into memory that they share" in refusal(write)


KEPT = torch.zeros(WIDTH)
HIDDEN = deque([torch.zeros(WIDTH)])  # where the check of what code keeps does not look


@pytest.mark.parametrize(
    "view",
    [
        lambda kept: torch.einsum("i->i", kept),
        lambda kept: kept.type_as(kept),
        lambda kept: F.dropout(kept, 0.5, training=False),
        lambda kept: torch.broadcast_tensors(torch.zeros(1), kept)[1],
        lambda kept: torch.unsafe_chunk(kept, 1)[0],
    ],
    ids=["einsum", "type_as", "dropout", "broadcast_tensors", "unsafe_chunk"],
)
def test_a_view_that_does_not_say_so_may_not_be_written(view: Callable[[Tensor], Tensor]) -> None:
    def write(x: Tensor) -> Tensor:
        hidden = view(KEPT)
        read_later = hidden.view(-1)
        hidden.add_(1)
        return x + KEPT + read_later

    assert "writes into lifted_tensor_" in refusal(write)


def test_a_graph_that_writes_into_what_it_keeps_is_refused_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving._Builder, "_refuse_writes", lambda *_: None)

    def write(x: Tensor) -> Tensor:
        HIDDEN[0].view(-1).add_(1)
        return x * torch.where(HIDDEN[0][0] > 1e6, 5.0, 1.0)

    batch = rows(8)
    with pytest.raises(PrivacyError, match="into a tensor that it keeps"):
        clipped_sum(Between(write), cross_entropy, batch.inputs, batch.targets, clip_norm=1.0)


def test_dropout_may_be_followed_by_an_operation_in_place() -> None:
    prove(Between(lambda x: F.relu_(F.dropout(x, 0.5))), cross_entropy, rows())


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x * (torch.rand(1, WIDTH) < 0.5),
        lambda x: x + torch.empty(1, 1).bernoulli_(0.5) * x.tanh(),
        lambda x: x * F.dropout(torch.ones(WIDTH), 0.5),
    ],
    ids=["mask", "stochastic depth of the batch", "dropout of a constant"],
)
def test_random_numbers_that_rows_share_are_refused(between: Callable[[Tensor], Tensor]) -> None:
    assert "draws random numbers that rows share; draw them for each row" in refusal(between)


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda x: x + torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)), "a generator of its own"),
        (lambda x: (torch._foreach_add_([KEPT], 1.0), x)[1], "writes into its argument self"),
        (lambda x: x * F.batch_norm(torch.ones(2, WIDTH), KEPT, torch.ones(WIDTH), training=True)[0], "statistics"),
    ],
    ids=["generator", "several at once", "running statistics of constants"],
)
def test_state_outside_of_the_rows_is_refused_by_name(between: Callable[[Tensor], Tensor], words: str) -> None:
    assert words in refusal(between)


def test_autocast_inside_of_a_model_is_refused_with_its_remedy() -> None:
    def half(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ torch.eye(WIDTH)).float()

    assert re.search(r"computes in another precision.*Remove autocast\.$", refusal(half))


def test_a_lazy_model_is_refused_until_it_has_shapes() -> None:
    batch = rows(8)
    with pytest.raises(PrivacyError, match=r"has no shape yet\. Call the model once"):
        clipped_sum(nn.LazyLinear(CLASSES), cross_entropy, batch.inputs, batch.targets, clip_norm=1.0)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_full_backward_hook])
def test_a_hook_on_the_modules_of_every_model_is_refused(register: Any) -> None:
    model, batch = Between(torch.tanh), rows(4)
    clipped_sum(model, cross_entropy, batch.inputs, batch.targets, clip_norm=1.0)
    handle = register(lambda *given: None)
    try:
        with pytest.raises(PrivacyError, match="hook on the modules of every model"):
            clipped_sum(model, cross_entropy, batch.inputs, batch.targets, clip_norm=1.0)
    finally:
        handle.remove()


class Silent(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_between_operations_is_refused_and_a_default_device_is_not() -> None:
    model, batch = Between(torch.tanh), rows(4)
    with Silent(), pytest.raises(PrivacyError, match="TorchFunctionMode is active"):
        clipped_sum(model, cross_entropy, batch.inputs, batch.targets, clip_norm=1.0)
    with torch.device("cpu"):
        clipped_sum(model, cross_entropy, batch.inputs, batch.targets, clip_norm=1.0)


class Counting(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is torch.ops.aten.sin.default  # for which there is no layer of ours
        return func(*args, **(kwargs or {}))


def test_no_mode_sees_the_operations_of_a_step() -> None:
    model, batch = Between(torch.sin), rows(11)
    performance = Performance(microbatch_size=11)

    def step() -> None:
        clipped_sum_of_batch(
            model, cross_entropy, Rows(batch.inputs, batch.targets, 1), clip_norm=1.0, performance=performance
        )

    step()
    with Counting() as mode:
        step()
    assert mode.seen == 0


class OwnCode(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_parameter_with_code_of_its_own_is_refused() -> None:
    model, batch = Between(torch.tanh), rows(4)
    model.second.weight = OwnCode(model.second.weight.detach())
    with pytest.raises(PrivacyError, match=r"second\.weight is of a tensor type with code of its own"):
        clipped_sum(model, cross_entropy, batch.inputs, batch.targets, clip_norm=1.0)


def test_a_network_in_which_a_unit_reaches_another_is_refused() -> None:
    network, batch = Between(lambda x: x + x.roll(1, 0)), rows(4)

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(self.network(x), y)

    given = Microbatch((batch.inputs, batch.targets), batch.targets, batch.row_weights_UR)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PrivacyError, match=r"first \(Linear\): a unit's loss depends on the rows of another unit"):
        planning._refuse_leaks(Losses(), given, OwnershipOverrides())


# Our own models

LONG = 3_000_000
IN_PARTS = ("scatter_linear", "scatter_cnn")
"""Their fixed features are made for a few images at a time; the tracer takes the number of parts for a branch."""
SMALL = [entry for entry in models.catalogue() if entry.parameters < LONG]
LARGE = [entry for entry in models.catalogue() if LONG <= entry.parameters < 50_000_000]
"""The three larger ones differ from these in their numbers of blocks and channels only."""


def prove_entry(entry: models.Entry) -> None:
    masks = entry.family == "segmentation"
    side = entry.image_size if entry.image_size <= 32 else 64
    model = models.create(entry.name, num_classes=1 if masks else CLASSES, in_channels=entry.in_channels, seed=0)
    batch = image_rows(2, side, entry.in_channels)
    loss = loss_for("classification", "cross_entropy", CLASSES)
    if masks:
        loss = loss_for("segmentation", "dice_cross_entropy", 2)
        batch = Microbatch(batch.inputs, torch.randint(2, (2, side, side)), batch.row_weights_UR)
    proof = prove(model, loss, batch)
    with torch.no_grad():
        torch.testing.assert_close(
            proof.network(batch.inputs, batch.targets), loss(model(batch.inputs), batch.targets), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("entry", SMALL, ids=lambda entry: entry.name)
def test_a_small_model_of_the_catalogue_is_proved_to_keep_rows_apart(
    entry: models.Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    if entry.name in IN_PARTS:
        monkeypatch.setattr(Scattering, "forward", Scattering._scattered)  # all images at once
    prove_entry(entry)


@pytest.mark.slow
@pytest.mark.parametrize("entry", LARGE, ids=lambda entry: entry.name)
def test_a_large_model_of_the_catalogue_is_proved_to_keep_rows_apart(entry: models.Entry) -> None:
    prove_entry(entry)


def test_a_check_names_the_line_of_statistics_written_by_hand() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) - x.flatten(1).mean(0)

    model = nn.Sequential(Centred(), nn.Linear(4, 3))
    found = planning.check_model(
        model, loss_for("classification", "cross_entropy", 3), torch.randn(4, 1, 2, 2), torch.zeros(4).long()
    )
    assert any(re.search(r"mean \(test_proved_graph.py, line \d+\) works across the rows", str(f)) for f in found)
