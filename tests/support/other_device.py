"""A device that is neither the CPU nor CUDA, with values: PyTorch's slot for devices from outside (PrivateUse1).

Its tensors are computed on the CPU, but say that they are on ``elsewhere:0``. An operation on tensors of both devices
fails, as on CUDA, unless the one of the CPU is a single number. Copies to the CPU and reads of values are counted: on a
real device each of them waits for everything before it.

The slot belongs to the whole process, so this is a program: it prints what it measured as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from dpvision.config import Performance
from dpvision.errors import PrivacyError
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.private_step import Privatizer
from dpvision.privacy.sampling import Sampling
from dpvision.privacy.torch_optimizer import TorchOptimizer
from dpvision.privacy.values import ClippedSum
from grads_support import cross_entropy

NAME = "elsewhere"
WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select")
COPIES = ("aten::_to_copy", "aten::copy_")

waits: Counter[str] = Counter()


class Elsewhere(Tensor):
    """A tensor of the device, around one of the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=torch.device(NAME, 0)
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"Elsewhere({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        strangers = [x for x in tensors if not isinstance(x, Elsewhere) and x.dim()]
        if strangers and name not in COPIES:
            raise RuntimeError(f"{func} got tensors of two devices: {[tuple(x.shape) for x in strangers]}")
        to_cpu = "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        if name in WAITS or to_cpu or (name == "aten::copy_" and not isinstance(args[0], Elsewhere)):
            waits[name.removeprefix("aten::")] += 1
        inside = tree_map_only(Elsewhere, lambda x: x.inner, (args, kwargs))
        result = func(*inside[0], **inside[1])
        if func._schema.is_mutable:
            return kwargs.get("out", args[0])
        return result if to_cpu else tree_map_only(Tensor, Elsewhere, result)


def _module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    values = {"is_available": True, "is_initialized": True, "_is_in_bad_fork": False, "device_count": 1}
    for name, value in {**values, "current_device": 0, "get_amp_supported_dtype": [torch.bfloat16]}.items():
        setattr(module, name, lambda value=value: value)
    for name in ("manual_seed", "manual_seed_all", "set_device", "synchronize"):
        setattr(module, name, lambda *_: None)
    module.get_rng_state = lambda device=0: torch.zeros(1)  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device=0: None  # type: ignore[attr-defined]
    return module


def register() -> torch.library.Library:
    """Make the device known, and the functions that make tensors from nothing on it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_module())
    library = torch.library.Library("aten", "IMPL")
    makers = {
        "empty.memory_format": torch.empty,
        "empty_strided": torch.empty_strided,
        "zeros": torch.zeros,
        "ones": torch.ones,
        "full": torch.full,
    }
    for name, make in makers.items():

        def made(*sizes: Any, make: Any = make, dtype: Any = None, **_: Any) -> Elsewhere:
            return Elsewhere(make(*sizes, dtype=dtype))

        library.impl(name, made, "PrivateUse1")

    def copied(source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
        Elsewhere.__torch_dispatch__(torch.ops.aten.copy_.default, (), (into, source))
        return into

    library.impl("_copy_from", copied, "PrivateUse1")
    return library


def moved(model: nn.Module) -> nn.Module:
    """Put a model on the device."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(Elsewhere(parameter.detach().clone())))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, Elsewhere(buffer.clone()))
    return model


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gain = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) * self.gain


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Convolutions with every way to their norms, normalisation, attention, and a module without a rule."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2)]
    many_channels = [nn.Conv2d(8, 64, 3, stride=3), nn.Mish(), nn.Flatten(), nn.Linear(256, 3)]
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return {
        "convolutions": (nn.Sequential(*convolutions, *many_channels), (2, 8, 8)),
        "attention": (nn.Sequential(attention, nn.Flatten(), nn.Linear(40, 3)), (5, 8)),
        "no rule": (nn.Sequential(nn.Embedding(9, 6), _Plain(), nn.Flatten(), nn.Linear(24, 3)), (4,)),
    }


def rows(shape: tuple[int, ...], count: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    whole = len(shape) == 1
    inputs = torch.randint(9, (count, *shape), generator=generator) if whole else torch.randn(count, *shape)
    return inputs, torch.arange(count) % 3


PLAIN = Performance(microbatch_size=3, kernels="plain", channels_last=False)


def clipped(model: nn.Module, inputs: Tensor, targets: Tensor, performance: Performance = PLAIN) -> ClippedSum:
    batch = Rows(inputs, targets, 1)
    return clipped_sum_of_batch(model, cross_entropy, batch, clip_norm=0.5, performance=performance, own_code=False)


def measured(name: str) -> dict[str, Any]:
    """Compute a clipped sum on both devices; the second one there has its plan, as every further step."""
    model, shape = networks()[name]
    inputs, targets = rows(shape)
    here = clipped(model, inputs, targets).gradients
    there = moved(networks()[name][0])
    first = clipped(there, Elsewhere(inputs), Elsewhere(targets))
    waits.clear()
    second = clipped(there, Elsewhere(inputs), Elsewhere(targets))
    counted = dict(waits)
    apart = max(float((here[each] - second.gradients[each].inner).norm()) for each in here)
    return {
        "microbatches": 3,
        "waits": counted,
        "apart": apart,
        "norm": float(sum(value.square().sum() for value in here.values()) ** 0.5),
        "kinds": sorted({type(value).__name__ for value in (*first.gradients.values(), *second.gradients.values())}),
    }


def whole_step() -> dict[str, Any]:
    """Charge, release and apply a sum of the device; count what each waits for."""
    model = moved(networks()["convolutions"][0])
    names = [name for name, _ in model.named_parameters()]
    optimizer = TorchOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = rows((2, 8, 8))
    mechanism = Mechanism(
        num_units=14, expected_batch_size=7.0, clip_norm=0.5, noise_multiplier=1.0, steps=2, delta=1e-3
    )
    found: dict[str, Any] = {"parameters": len(names)}
    with tempfile.TemporaryDirectory() as folder:
        header = {
            **mechanism.to_dict(),
            "run_id": "0" * 16,
            "delta": 1e-3,
            "target_epsilon": None,
            "hand_seeded": False,
        }
        privatizer = Privatizer(mechanism, Ledger.create(Path(folder) / "ledger.jsonl", header))
        for step in range(2):
            total = clipped(model, Elsewhere(inputs), Elsewhere(targets))
            privatizer.charge(Sampling("poisson", mechanism.sample_rate), step=step)
            waits.clear()
            private = privatizer.release(total, step=step)
            found["release"] = dict(waits)
            waits.clear()
            optimizer.step(private)
            found["optimizer"] = dict(waits)
    found["kinds"] = sorted({type(value).__name__ for value in private.gradients.values()})
    return found


def refused() -> str:
    """Ask for a precision that the device has no operations for; return the refusal."""
    model, (inputs, targets) = moved(networks()["convolutions"][0]), rows((2, 8, 8))
    try:
        clipped(model, Elsewhere(inputs), Elsewhere(targets), PLAIN.model_copy(update={"precision": "bfloat16"}))
    except PrivacyError as error:
        return str(error)
    return ""


def main() -> None:
    library = register()
    found = {name: measured(name) for name in networks()}
    found["bfloat16"] = refused()
    found["step"] = whole_step()
    json.dump(found, sys.stdout)
    del library


if __name__ == "__main__":
    main()
