"""A user's own model made ready for private training: a changed copy, and a list of what changed and why.

Only modules are inspected. ``dpvision.gradients.plan.check_model`` decides whether the copy is ready.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from dpvision.errors import ArgumentError, Problems
from dpvision.models.scale_norm import add_scale_norms

BatchNormTo = Literal["group", "frozen"]


@final
@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that ``make_private_ready`` did: to which module, what, and why."""

    module: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.what} ({self.why})"


@final
class FrozenAffine(nn.Module):
    """What BatchNorm computes in evaluation, as fixed numbers: ``x · scale + shift`` per channel.

    Guarantee: rows don't mix and nothing moves. The numbers must come from public training.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale_C: Tensor, shift_C: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale_C.clone())
        self.register_buffer("shift", shift_C.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Channels are dimension 1, as in BatchNorm."""
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return x * self.scale.view(shape) + self.shift.view(shape)


def make_private_ready(
    model: nn.Module,
    *,
    batch_norm: BatchNormTo = "group",
    groups: int = 32,
    scale_norm: bool = False,
    example: Tensor | None = None,
) -> tuple[nn.Module, list[Change]]:
    """A copy of ``model`` that can be trained privately, and the changes; ``model`` itself stays as it is.

    BatchNorm becomes GroupNorm with its affine weights (``batch_norm`` "group"; gcd(``groups``, C) groups), or a
    frozen affine map made of its running statistics ("frozen"). In-place activations become ordinary ones. With
    ``scale_norm`` every residual addition is followed by a norm; that needs ``example``, a small batch of inputs.

    Guarantee: none by itself. What is not a module (functional in-place calls, hand-written batch statistics) stays;
    ``dpvision.gradients.plan.check_model`` finds it.
    """
    problems = Problems()
    problems.require(batch_norm in ("group", "frozen"), f"batch_norm must be group or frozen, got {batch_norm!r}.")
    problems.count("groups", groups)
    problems.require(not scale_norm or example is not None, "scale_norm needs example, a small batch of inputs.")
    for name, module in model.named_modules():
        waits = any(is_lazy(tensor) for tensor in (*module.parameters(False), *module.buffers(False)))
        problems.require(not waits, f"{name or 'the model'} is lazy and has no size yet: run the model once before.")
    problems.raise_if_any()
    ready = copy.deepcopy(model)
    changes: list[Change] = []
    ready = _replace_batch_norms(ready, batch_norm, groups, changes)
    changes += _stop_instance_statistics(ready)
    changes += _undo_inplace(ready)
    if scale_norm and example is not None:
        ready, places = add_scale_norms(ready, example, groups=groups)
        changes += [Change(module=place.module, what=place.what, why=place.why) for place in places]
    return ready, changes


def _replace_batch_norms(model: nn.Module, to: BatchNormTo, groups: int, changes: list[Change]) -> nn.Module:
    """Replace every kind of BatchNorm in place; a norm that is used twice stays one norm. Returns the model."""
    replaced: dict[int, nn.Module] = {}
    found = [(name, module) for name, module in _named_places(model) if isinstance(module, _BatchNorm)]
    for name, module in found:
        if id(module) not in replaced:
            replaced[id(module)], what = _substitute(name, module, to, groups)
            why = "BatchNorm mixes the units of a batch, so no unit's influence is bounded"
            changes.append(Change(module=name, what=what, why=why))
        if not name:
            return replaced[id(module)]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced[id(module)])
    return model


def _named_places(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every place of every module, a shared module at each of its places."""
    return model.named_modules(remove_duplicate=False)


def _substitute(name: str, module: _BatchNorm, to: BatchNormTo, groups: int) -> tuple[nn.Module, str]:
    """What takes a BatchNorm's place, and how the list of changes calls it."""
    kind = type(module).__name__
    if to == "frozen":
        return _frozen(name, module), f"{kind} → FrozenAffine from its running statistics"
    channels = module.num_features
    # BatchNorm1d also takes (N, C), where a group of one channel would hold one number and normalise it to zero.
    count = 1 if isinstance(module, nn.BatchNorm1d) else math.gcd(groups, channels)
    norm = nn.GroupNorm(count, channels, eps=module.eps, affine=module.affine)
    norm = norm.train(module.training)
    if module.affine:
        norm.weight, norm.bias = module.weight, module.bias
    return norm, f"{kind} → GroupNorm({count} groups, {channels} channels)"


def _frozen(name: str, module: _BatchNorm) -> FrozenAffine:
    """``(x − running mean) / sqrt(running variance + eps) · weight + bias`` with all of it folded into two numbers."""
    if module.running_mean is None or module.running_var is None:
        raise ArgumentError(f"{name} has no running statistics to freeze. Use batch_norm='group'.")
    with torch.no_grad():
        scale_C = torch.rsqrt(module.running_var + module.eps)
        if module.affine:
            scale_C = scale_C * module.weight
        shift_C = -module.running_mean * scale_C
        if module.affine:
            shift_C = shift_C + module.bias
    return FrozenAffine(scale_C, shift_C).train(module.training)


def _stop_instance_statistics(model: nn.Module) -> list[Change]:
    """InstanceNorm may keep running statistics; without them it normalises each row by itself, also in evaluation."""
    changes = []
    for name, module in model.named_modules():
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
            what, why = "running statistics removed", "they would move with private data, uncharged"
            changes.append(Change(module=name, what=what, why=why))
    return changes


def _undo_inplace(model: nn.Module) -> list[Change]:
    """Whatever has a switch called ``inplace``, activations and dropout alike."""
    changes = []
    for name, module in model.named_modules():
        if getattr(module, "inplace", False) is True:
            module.__dict__["inplace"] = False
            why = "in-place layers overwrite tensors that per-unit gradients need"
            changes.append(Change(module=name, what=f"{type(module).__name__}(inplace=True) → inplace=False", why=why))
    return changes
