"""Devices and precision: a step makes nothing on another device, waits where it says, and clips what it sums.

No GPU is needed: a device of PyTorch's slot for devices from outside has values, ``meta`` has the shapes of a whole
step, and fake tensors have CUDA's rules without autograd, which aborts for CUDA in a build for the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpvision import Mechanism, PrivateRun
from dpvision.config import Performance
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients import clipped_sum as engine
from dpvision.gradients.clipped_sum import Accumulator, Rows, clipped_sum_of_batch
from dpvision.gradients.devices import exact_float32, forked_generators, generator_states, require_device
from dpvision.gradients.layer_gradient import MaterialisedGradient
from dpvision.gradients.ownership import OwnershipOverrides, parameter_owners
from dpvision.gradients.plan import plan_for
from dpvision.gradients.rules import LayerCall
from dpvision.privacy.clipping import Clipper
from dpvision.privacy.noise import noisy_mean
from dpvision.privacy.randomness import Keys
from dpvision.release.verify import verify
from grads_support import PaddedDraw, cross_entropy, distance, relative_error, total_norm

SUPPORT = Path(__file__).parent.parent / "support"
PLAIN = Performance(microbatch_size=4, kernels="plain")
BFLOAT16 = PLAIN.model_copy(update={"precision": "bfloat16"})
ROUNDING = 1 + 1e-6
"""float32 sums of one micro-batch, relative to the bound."""


def images(count: int = 8, side: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn((count, 2, side, side), generator=generator), torch.arange(count) % 3


def network(*, dropout: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.Dropout(0.4) if dropout else nn.Identity()
    head = nn.Linear(288, 3)
    layers = [nn.Conv2d(2, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), middle, nn.Conv2d(8, 8, 3, padding=1), nn.Flatten()]
    return nn.Sequential(*layers, head)


def summed(model: nn.Module, rows: tuple[Tensor, Tensor], performance: Performance, clip_norm: float = 0.3) -> Any:
    batch = PaddedDraw(*rows)
    return clipped_sum_of_batch(
        model, cross_entropy, batch, clip_norm=clip_norm, performance=performance, own_code=False
    ).gradients


# A device with values


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, Any]:
    """What the program of another device measured."""
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "other_device.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["convolutions", "attention", "no rule"])
def test_another_device_gives_the_sum_of_the_cpu(elsewhere: dict[str, Any], name: str) -> None:
    found = elsewhere[name]
    assert found["kinds"] == ["Elsewhere"]
    assert found["apart"] <= 1e-5 * found["norm"], "float32 sums in another order"


@pytest.mark.parametrize("name", ["convolutions", "attention", "no rule"])
def test_a_clipped_sum_waits_for_one_value_of_each_micro_batch(elsewhere: dict[str, Any], name: str) -> None:
    found = elsewhere[name]
    assert found["waits"] == {"_local_scalar_dense": found["microbatches"]}


def test_a_step_waits_once_for_each_parameter_in_release_and_comparison(elsewhere: dict[str, Any]) -> None:
    step = elsewhere["step"]
    assert step["release"] == {"copy_": step["parameters"]}
    assert step["optimizer"] == {"equal": step["parameters"]}
    assert step["kinds"] == ["Elsewhere"], "a private gradient is where its parameter is"


def test_a_precision_that_a_device_does_not_have_is_refused(elsewhere: dict[str, Any]) -> None:
    assert elsewhere["bfloat16"].endswith("Use float32.")


# meta: every operation of a step, and where its result is


class Watched(TorchDispatchMode):
    """Note where tensors are made, and answer what a device without values can't.

    Reads of a value are answered by True, copies to the CPU by zeros.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.waits, self.strays = device, Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        given = [leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "_local_scalar_dense" and self.device in given:
            self.waits[name] += 1
            return True
        if name == "copy_" and given[0] == "cpu" and self.device in given:
            self.waits["copy"] += 1
            return args[0].zero_()
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(each.device.type != self.device for each in made) and (self.device in given or not given):
            self.strays[name] += 1
        return result


def test_a_whole_step_on_meta_makes_every_tensor_where_its_inputs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets = images()
    performance = PLAIN.model_copy(update={"channels_last": False})
    model = network()
    batch = next(Rows(inputs, targets, 1).microbatches(4))
    plan = plan_for(model, cross_entropy, batch, performance, own_code=False)
    model = model.to("meta")
    monkeypatch.setattr(engine, "plan_for", lambda *_, **__: plan)  # its comparisons need values
    monkeypatch.setattr(engine, "no_outside_code", nullcontext)  # lets the mode see the engine's operations
    mechanism = Mechanism(num_units=16, expected_batch_size=8.0, clip_norm=0.3, noise_multiplier=1.0, steps=1)
    meta = Rows(inputs.to("meta"), targets.to("meta"), 1)
    with Watched("meta") as watched:
        total = clipped_sum_of_batch(model, cross_entropy, meta, clip_norm=0.3, performance=performance, own_code=False)
    assert {value.device.type for value in total.gradients.values()} == {"meta"}
    assert {value.dtype for value in total.gradients.values()} == {torch.float64}
    assert watched.waits == {"_local_scalar_dense": 2}, "one for each micro-batch"
    # The weights of the rows of each micro-batch, which ``Rows`` then moves; one more shows that there is no third.
    assert watched.strays == {"full": 3}
    sizes = len(total.gradients)
    with Watched("meta") as watched:
        private = noisy_mean(total, mechanism, Keys.from_seed(0), step=0)
    assert watched.waits == {"copy": sizes}, "one for each parameter, to the CPU, where noise is drawn"
    assert {value.device.type for value in private.gradients.values()} == {"meta"}


# Fake tensors: CUDA's rules for what is computed without autograd


class FakeCuda(FakeTensorMode):
    """Fake tensors; a read of a value is counted and answered by True, and what is made on the CPU is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.on_cpu = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.waits += 1
            return True
        result = super().__torch_dispatch__(func, kinds, args, kwargs or {})
        if any(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in tree_leaves(result)):
            self.on_cpu[func._schema.name] += 1
        return result


class Indexed(TorchFunctionMode):
    """Write indexing as operations: Python's own asks for the device of CUDA, which a build for the CPU has not."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
        dim = 0
        for each in index:
            if each is None:
                x, dim = x.unsqueeze(dim), dim + 1
            elif isinstance(each, int):
                x = x.select(dim, each)
            else:
                assert isinstance(each, slice)
                last = x.shape[dim] if each.stop is None else min(each.stop, x.shape[dim])
                x, dim = torch.ops.aten.slice.Tensor(x, dim, each.start or 0, last, each.step or 1), dim + 1
        return x


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (6, 5)),
    "linear over positions": (lambda: nn.Linear(300, 200), (6, 4, 300)),
    "convolution": (lambda: nn.Conv2d(2, 4, 3), (6, 2, 8, 8)),
    "convolution by Gram matrices": (lambda: nn.Conv2d(64, 64, 3), (6, 64, 4, 4)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 2, 2, stride=2), (6, 4, 5, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (6, 4, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(5), (6, 4, 5)),
    "learned slope": (lambda: nn.PReLU(4), (6, 4, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_norms_factors_and_sums_follow_the_rules_of_cuda(name: str) -> None:
    make, shape = LAYERS[name]
    module = make()
    with FakeCuda() as cuda, Indexed(), torch.no_grad():
        for place, parameter in list(module.named_parameters()):
            setattr(module, place, nn.Parameter(torch.empty(parameter.shape, device="cuda")))
        x = torch.empty(shape, device="cuda")
        (owner,) = parameter_owners(module, OwnershipOverrides())
        wanted = frozenset(each for owned in owner.parameters for each in owned.names)
        call = LayerCall(module, x, torch.empty_like(module(x)), 3, wanted, {}, None)
        by_name = owner.rule(call)
        found = {owned.parameter: by_name[owned.names[0]] for owned in owner.parameters}
        clip = Clipper.for_parameters(dict(module.named_parameters()), clip_norm=1.0)
        totals = Accumulator()
        cuda.on_cpu.clear()
        for _ in range(2):
            totals.add(dict(found), *clip.factors(found, torch.ones(3, dtype=torch.bool, device="cuda")))
        sums = totals.gradients(dict(module.named_parameters()))
    assert {value.device.type for value in sums.values()} == {"cuda"}
    assert {value.dtype for value in sums.values()} == {torch.float64}
    assert cuda.waits == 2, "one for each micro-batch"
    assert not cuda.on_cpu, "tensors made on the CPU"


def test_the_rules_of_cuda_refuse_a_factor_that_was_left_on_the_cpu() -> None:
    with FakeCuda(), torch.no_grad():
        gradient = MaterialisedGradient(torch.empty(3, 5, device="cuda"))
        with pytest.raises(RuntimeError, match="same device"):
            gradient.add_weighted_sum(None, torch.ones(3), None)


# Precision


@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
def test_no_unit_adds_more_than_the_clip_norm_in_bfloat16(dropout: bool) -> None:
    inputs, targets = images()
    for unit in range(8):
        alone = summed(network(dropout=dropout), (inputs[unit : unit + 1], targets[unit : unit + 1]), BFLOAT16)
        assert {value.dtype for value in alone.values()} == {torch.float64}
        assert 0.3 * (1 - 2e-5) <= total_norm(alone) <= 0.3, (
            "clipped to the norm of what is summed, to 4e-6 and a margin"
        )


@pytest.mark.parametrize("removed", [0, 3, 7])
def test_neighbours_in_bfloat16_differ_by_at_most_the_clip_norm(removed: int) -> None:
    inputs, targets = images()
    kept = [unit for unit in range(8) if unit != removed]
    model = network()
    one, other = (summed(model, rows, BFLOAT16) for rows in ((inputs, targets), (inputs[kept], targets[kept])))
    assert distance(one, other) <= 0.3 * ROUNDING, "every later unit is in another place, and has the same bits"


def test_a_gradient_in_bfloat16_is_that_of_float32_up_to_the_rounding_of_layers() -> None:
    rows = images()
    found, exact = (summed(network(), rows, each, clip_norm=1e6) for each in (BFLOAT16, PLAIN))
    assert 1e-4 < relative_error(found, exact) < 0.03, "products are rounded to 8 bits, 0.4 % each"


def test_sums_of_bfloat16_layers_are_float64_over_micro_batches() -> None:
    rows = images()
    by_two, by_four = (
        summed(network(), rows, BFLOAT16.model_copy(update={"microbatch_size": units})) for units in (2, 4)
    )
    assert relative_error(by_two, by_four) < 1e-5, "the same units' gradients; only sums in float32 are cut differently"


class Placed(nn.Module):
    """Adds to each row what depends on its place: as kernels do that divide rows among threads."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 1e-6 * torch.arange(len(x))).view(-1, *[1] * (x.dim() - 1))


def test_a_layer_whose_bits_depend_on_the_place_of_a_row_is_refused_in_bfloat16() -> None:
    model = nn.Sequential(Placed(), *network().children())
    summed(model, images(), PLAIN)  # float32: a rounding like any other
    with pytest.raises(PrivacyError, match=r"0 \(Conv2d\)|1 \(Conv2d\)") as refused:
        summed(model, images(), BFLOAT16)
    assert "in bfloat16 a unit's numbers change with its place among the 4 units" in str(refused.value)


def test_bfloat16_is_for_pytorchs_own_operations() -> None:
    for kernels in ("native", "compiled"):
        with pytest.raises(ValueError, match="kernels must be auto or plain"):
            Performance(kernels=kernels, precision="bfloat16")


def test_fast_products_of_float32_do_not_reach_a_step() -> None:
    rows = images()
    exact = summed(network(), rows, PLAIN)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        found = summed(network(), rows, PLAIN)
        assert torch.get_float32_matmul_precision() == "medium", "as the program had it"
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_tf32_is_off_inside_a_step_and_back_afterwards() -> None:
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = True
        with exact_float32(torch.device("cuda")):
            assert not torch.backends.cudnn.allow_tf32
            assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_an_own_loop_in_bfloat16_declares_it_and_verifies(tmp_path: Path) -> None:
    mechanism = Mechanism(
        num_units=8, expected_batch_size=4.0, clip_norm=0.3, noise_multiplier=1.0, steps=2, delta=1e-3
    )
    model = network(dropout=True)
    run = PrivateRun(model, torch.optim.SGD(model.parameters(), lr=0.1), mechanism, tmp_path / "run", seed=0)
    for batch in run.batches(images()):
        run.step(batch, cross_entropy, microbatch_size=4, precision="bfloat16")
    certificate = run.release().certificate
    said = [line["how"] for line in certificate["declared"] if line["what"] == "precision"]
    assert len(said) == 1
    assert "bfloat16" in said[0]
    assert verify(tmp_path / "run").ok


# Generators and float64


def test_generators_are_as_before_after_a_block_and_repeat_in_it() -> None:
    before = generator_states(torch.device("cpu"))
    drawn = []
    for _ in range(2):
        with forked_generators("cpu", seed=4):
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert all(map(torch.equal, before, generator_states(torch.device("cpu"))))


def test_a_device_without_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_float64(*_: object, **__: object) -> Tensor:
        raise TypeError("Cannot convert a tensor to float64 dtype as the framework doesn't support float64")

    require_device(torch.device("cpu"))
    monkeypatch.setattr(torch, "zeros", no_float64)
    with pytest.raises(ArgumentError, match="has no float64"):
        require_device(torch.device("mps"))
