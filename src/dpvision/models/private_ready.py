"""A user's own model made ready for private training: a changed copy, and a list of what changed and why.

Only modules are inspected. ``dpvision.gradients.plan.check_model`` decides whether the copy is ready, and
``output_problem`` says whether a model gives scores at all.
"""

from __future__ import annotations

import copy
import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from dpvision.errors import ArgumentError, Problems
from dpvision.models.backbone import FrozenBatchNorm
from dpvision.models.scale_norm import Change, add_scale_norms

BatchNormTo = Literal["group", "frozen"]


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
        ready, added = add_scale_norms(ready, example, groups=groups)
        changes += added
    return ready, changes


def _replace_batch_norms(model: nn.Module, to: BatchNormTo, groups: int, changes: list[Change]) -> nn.Module:
    """Replace every kind of BatchNorm in place; a norm that is used twice stays one norm. Returns the model."""
    replaced: dict[int, nn.Module] = {}
    everywhere = list(model.named_modules(remove_duplicate=False))
    for name, module in ((name, module) for name, module in everywhere if isinstance(module, _BatchNorm)):
        if id(module) not in replaced:
            replaced[id(module)], what = _substitute(name, module, to, groups)
            why = "BatchNorm mixes the units of a batch, so no unit's influence is bounded"
            changes.append(Change(module=name, what=what, why=why))
        if not name:
            return replaced[id(module)]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced[id(module)])
    return model


def output_problem(
    model: nn.Module, inputs_NCHW: Tensor, num_classes: int, *, maps: bool | None = None
) -> tuple[str, str] | None:
    """Run a copy of a model once, in evaluation mode, and say what is wrong with its outputs.

    Args:
        model: a user's own model, which stays as it is.
        inputs_NCHW: a few synthetic images.
        num_classes: number of scores for an image, or for each of its pixels.
        maps: whether the outputs are (N, classes, H, W) instead of (N, classes); None allows both.

    Returns:
        (problem, remedy), the problem without a final full stop; None if the outputs are scores.
    """
    rows, shape = inputs_NCHW.shape[0], "×".join(map(str, inputs_NCHW.shape[1:]))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = copy.deepcopy(model).eval()(inputs_NCHW)
    except Exception as error:  # noqa: BLE001 - a user's forward may raise anything.
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        return f"can't be run on float32 images of {shape}: {reason}", "Make it for images of this shape."
    wanted = {True: "(images, classes, height, width)", False: "(images, classes)"}
    expected = wanted[maps] if maps is not None else f"{wanted[False]}, or {wanted[True]} for maps"
    if not isinstance(outputs, Tensor):
        return f"returns a {type(outputs).__name__}, not a tensor of scores", f"Return only the scores, of {expected}."
    found = tuple(outputs.shape)
    dims = (2, 4) if maps is None else (4,) if maps else (2,)
    if len(found) not in dims or found[0] != rows or (maps and found[2:] != tuple(inputs_NCHW.shape[2:])):
        return f"returns shape {found} for {rows} images of {shape}", f"Return {expected}."
    if found[1] != num_classes:
        remedy = "Change its last layer; the function that makes it may take num_classes."
        return f"returns {found[1]} scores for an image, but there are {num_classes} classes", remedy
    return None


def _substitute(name: str, module: _BatchNorm, to: BatchNormTo, groups: int) -> tuple[nn.Module, str]:
    """What takes a BatchNorm's place, and how the list of changes calls it."""
    kind = type(module).__name__
    if to == "frozen":
        return _frozen(name, module), f"{kind} → FrozenBatchNorm from its running statistics"
    channels = module.num_features
    # BatchNorm1d also takes (N, C), where a group of one channel would hold one number and normalise it to zero.
    count = 1 if isinstance(module, nn.BatchNorm1d) else math.gcd(groups, channels)
    norm = nn.GroupNorm(count, channels, eps=module.eps, affine=module.affine).train(module.training)
    if module.affine:
        norm.weight, norm.bias = module.weight, module.bias
    return norm, f"{kind} → GroupNorm({count} groups, {channels} channels)"


def _frozen(name: str, module: _BatchNorm) -> FrozenBatchNorm:
    """A frozen norm with a BatchNorm's statistics and affine weights."""
    if module.running_mean is None or module.running_var is None:
        raise ArgumentError(f"{name} has no running statistics to freeze. Use batch_norm='group'.")
    frozen = FrozenBatchNorm(module.num_features, eps=module.eps).to(module.running_mean).train(module.training)
    frozen.load_state_dict(module.state_dict(), strict=False)
    return frozen


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
