"""What a run's key is bound to. When any of it changes, a resumed run is a fork: other noise, charged again."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path
from typing import Any, Final

import numpy
import torch

from dpvision import __version__, kernels
from dpvision.privacy.noise import generator_fingerprint
from dpvision.privacy.randomness import Keys

Binding = dict[str, str]
_CODE: Final = (
    "*.py",
    *(f"{part}/**/*.py" for part in ("data", "gradients", "kernels", "models", "privacy", "training")),
)
"""Modules that have a hand in a released gradient: another order of adding up is another rounding."""


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
        "kernels": kernels.identity(),
    }


@functools.cache
def code_digest(package: Path = Path(__file__).parent.parent) -> str:
    """A digest of the code that draws, computes and adds up; that of native kernels is in their own identity."""
    content = hashlib.sha256()
    for source in sorted(path for pattern in _CODE for path in package.glob(pattern)):
        content.update(f"{source.relative_to(package).as_posix()}\0{source.stat().st_size}\0".encode())
        content.update(source.read_bytes())
    return content.hexdigest()


def bound_keys(keys: Keys, binding: Binding, fork: int) -> Keys:
    """The secret bound to these facts and this fork."""
    return keys.bind(*(f"{name}={value}" for name, value in sorted(binding.items())), f"fork={fork}")


def differences(old: dict[str, Any], new: Binding) -> list[str]:
    """Names of the facts that are not as they were."""
    return sorted(name for name in new if old.get(name) != new[name])
