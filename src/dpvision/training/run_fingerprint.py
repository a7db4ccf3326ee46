"""Run fingerprint: the facts that a run's key is bound to.

Noise is a function of the key, the facts and the step. A resumed run with the same facts replays its steps bit for bit.
When any fact changed, it is a fork: other noise, and repeated steps are charged again.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import platform
from pathlib import Path
from typing import Any, Final

import numpy
import torch
from torch import Tensor, nn

from dpvision import __version__, kernels
from dpvision.config import RunConfig
from dpvision.data.splits import RunSplits
from dpvision.models.initialisation import seeded
from dpvision.models.losses import RowLoss
from dpvision.own_code import RunCode, code_errors
from dpvision.privacy.noise import generator_fingerprint
from dpvision.privacy.randomness import Keys

Binding = dict[str, str]
_CODE: Final = (
    "*.py",
    *(f"{part}/**/*.py" for part in ("data", "gradients", "kernels", "models", "privacy", "training")),
)
"""Modules that affect a released gradient: another order of summation is another rounding."""


def run_binding(config: RunConfig, splits: RunSplits, *, run_id: str, device: str) -> Binding:
    """Collect the facts of a run as they are now.

    Args:
        config: the resolved configuration; ``pixels`` are its constants, which are None before they are released.
        splits: the data, by their fingerprints.
        run_id: the run's identifier.
        device: torch's name of the device.
    """
    return current_binding(
        run_id=run_id,
        config_digest=config.digest(),
        data_fingerprint=splits.train.fingerprint(),
        device=device,
        test=splits.test.fingerprint(),
        pixels=f"{config.data.mean} {config.data.std}",
    )


def current_binding(*, run_id: str, config_digest: str, data_fingerprint: str, device: str, **more: str) -> Binding:
    """Every fact on which the bits of a released gradient depend; ``more`` are facts of the run itself."""
    return {
        **more,
        "run": run_id,
        "config": config_digest,
        "data": data_fingerprint,
        "device": device,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "generator": generator_fingerprint(),
        "dpvision": __version__,
        "code": code_digest(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "processor": processor(),
        "kernels": kernels.identity(),
    }


def own_code_facts(code: RunCode, model: nn.Module, loss: RowLoss, rows: tuple[Tensor, Tensor]) -> Binding:
    """Add what a run with own code depends on; nothing for a run without.

    The hashes cover the user's files. What these import from elsewhere can change too, so the losses and gradients of
    synthetic rows belong to the facts: other values are a fork.

    Args:
        code: the user's own model and loss.
        model: the model with the public weights that every run of this code starts from.
        loss: the loss, one value per row.
        rows: synthetic inputs and targets.
    """
    if code.model is None and code.loss is None:
        return {}
    facts = {f"{kind} code": str(own and own.sha256) for kind, own in (("model", code.model), ("loss", code.loss))}
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.requires_grad_(parameter.is_floating_point())  # whatever is trained now
    with code_errors("the model or the loss can't be run on synthetic images"), seeded(0), torch.enable_grad():
        values = loss(copied(rows[0]), rows[1])
        values.sum().backward()
    content = hashlib.sha256()
    for tensor in (values, *(each.grad for each in copied.parameters() if each.grad is not None)):
        content.update(tensor.detach().to("cpu", torch.float64).contiguous().numpy().data)
    return {**facts, "own behaviour": content.hexdigest()}


@functools.cache
def processor() -> str:
    """Return the model of this machine's processor: libraries choose their order of summation by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


@functools.cache
def code_digest(package: Path = Path(__file__).parent.parent) -> str:
    """Digest the Python code that draws, computes and sums; compiled kernels have their own identity."""
    content = hashlib.sha256()
    for source in sorted(path for pattern in _CODE for path in package.glob(pattern)):
        content.update(f"{source.relative_to(package).as_posix()}\0{source.stat().st_size}\0".encode())
        content.update(source.read_bytes())
    return content.hexdigest()


def bound_keys(keys: Keys, binding: Binding, fork: int) -> Keys:
    """Derive the key for these facts and this fork.

    Guarantee: another fact or another fork gives independent noise.
    """
    return keys.bind(*(f"{name}={value}" for name, value in sorted(binding.items())), f"fork={fork}")


def differences(old: dict[str, Any], new: Binding) -> list[str]:
    """Name the facts that changed."""
    return sorted(name for name in new if old.get(name) != new[name])
