"""Custom autograd functions, operations of one's own, checkpoints and compiled submodules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hostile_table import (
    BACKWARD,
    HOSTILE,
    JIT,
    STATE,
    STATISTIC,
    WIDTH,
    WRONG_ROW,
    Mix,
    Sandwich,
    hostile,
    linear_own,
    mixes,
)
from model_cases import CLASSES, Case, Own

# -------------------------------------------------------------------------------------------- custom autograd functions


class Honest(torch.autograd.Function):
    """A sine, with its own derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


class MixingBackward(Honest):
    """An identity whose backward pass mixes rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.roll(1, 0)


class SumOfGradients(MixingBackward):
    """Every row receives the batch's gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.sum(0, keepdim=True).expand_as(gradient)


class StraightThrough(MixingBackward):
    """Rounds, and passes the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class MixingForward(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CustomVmap(torch.autograd.Function):
    """An identity, except under vmap."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x + x.roll(1, in_dims[0]), in_dims[0]


class VmapBackward(CustomVmap):
    """Its backward pass mixes rows by a function with a vmap rule of its own."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return CustomVmap.apply(gradient) + gradient.mean(0)


class Reversal(StraightThrough):
    """Gradient reversal, honest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.1 * gradient


class NormalisedGradient(StraightThrough):
    """Divides the gradient by the norm of the batch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-9)


class RememberingBackward(StraightThrough):
    """Adds the gradient of the call before."""

    kept: Any = None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        before, RememberingBackward.kept = RememberingBackward.kept, gradient.mean(0).detach()
        return gradient if before is None else gradient + 10 * before


for _name, _why, _function in [
    ("honest", "honest: its backward pass is code of its own", Honest),
    ("mixing backward", BACKWARD, MixingBackward),
    ("sum of gradients", BACKWARD, SumOfGradients),
    ("straight through", "honest: the gradient is not that of the forward pass", StraightThrough),
    ("mixing forward", "hidden in an opaque function", MixingForward),
    ("custom vmap rule", "mixes only where units are isolated by vmap", CustomVmap),
    ("custom vmap rule in the backward pass", BACKWARD, VmapBackward),
    ("gradient reversal", "honest: the gradient is not that of the forward pass", Reversal),
    ("normalised gradient", BACKWARD, NormalisedGradient),
]:
    mixes(f"autograd function: {_name}", _why, _function.apply)


@hostile("autograd function: remembering backward", STATE)
def remembering_backward() -> Own:
    RememberingBackward.kept = None
    return linear_own(Sandwich(RememberingBackward.apply))


def _penalised(x: Tensor, *, mixing: bool = False) -> Tensor:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        total = (y.sin() * y.roll(1, 0)).sum() if mixing else y.sin().sum()
        (slope,) = torch.autograd.grad(total, y, create_graph=True)
    return x + slope


mixes("gradient inside forward", "honest: a gradient penalty of each row", _penalised)
mixes("gradient inside forward, mixing", "the gradient of a product of rows", lambda x: _penalised(x, mixing=True))
mixes("vmap inside forward", "honest: rows mapped by vmap", torch.func.vmap(torch.tanh))
mixes(
    "vmap over columns inside forward",
    "each column is sorted over rows",
    torch.func.vmap(lambda c: c - c.mean(), 1, 1),
)


try:
    torch.library.define("dpvision_hostile::roll", "(Tensor x) -> Tensor")
    torch.library.impl("dpvision_hostile::roll", "CompositeExplicitAutograd", lambda x: x.roll(1, 0))
    torch.library.register_fake("dpvision_hostile::roll", torch.empty_like)
    torch.library.register_autograd("dpvision_hostile::roll", lambda ctx, g: g.roll(-1, 0))
except RuntimeError:
    pass  # defined by an earlier import of this file
mixes("operation of one's own", "no rule can know what it does", torch.ops.dpvision_hostile.roll)


# -------------------------------------------------------------------------------------------------- checkpoints and jit


class Checkpointed(Sandwich):
    """The second layer and what is around it computed again in the backward pass."""

    def __init__(self, mix: Mix, *, reentrant: bool) -> None:
        super().__init__(mix)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(checkpoint(lambda x: self.second(self.mix(x)), x, use_reentrant=self.reentrant))


class _Recomputed:
    """Honest at first, different when it is computed again."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls % 2 else x.roll(1, 0)


for _reentrant in (False, True):
    _kind = "reentrant" if _reentrant else "not reentrant"
    for _name, _why, _mix in [
        ("honest", "honest: the forward pass runs twice", lambda: lambda x: x.sin()),
        ("mixing", STATISTIC, lambda: lambda x: x - x.mean(0)),
        ("different when recomputed", "the gradient is of another function than the outputs", _Recomputed),
    ]:

        def _make(mix: Any = _mix, reentrant: bool = _reentrant) -> Own:
            return linear_own(Checkpointed(mix(), reentrant=reentrant))

        HOSTILE.append(Case(f"checkpoint, {_kind}: {_name}", _why, _make))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class PlainMixing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x + x.roll(1, 0)))


class PlainMoving(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.flip(0))).flip(0)


class ScriptedBranch(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            x = x + x.flip(0)
        return torch.tanh(self.layer(x))


def compiled(name: str, why: str, module: type[nn.Module], how: Callable[[nn.Module], nn.Module]) -> None:
    """Enter a sequence whose first part is compiled."""

    def make() -> Own:
        return linear_own(nn.Sequential(how(module()), nn.Linear(WIDTH, CLASSES)))

    HOSTILE.append(Case(name, why, make))


def _traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.randn(3, WIDTH))


compiled("jit: scripted, honest", f"honest: {JIT}", Plain, torch.jit.script)
compiled("jit: scripted, mixing", JIT, PlainMixing, torch.jit.script)
compiled("jit: scripted, rows moved and put back", WRONG_ROW, PlainMoving, torch.jit.script)
compiled("jit: scripted, mixing from 5 rows on", JIT, ScriptedBranch, torch.jit.script)
compiled("jit: traced, honest", f"honest: {JIT}", Plain, _traced)
compiled("jit: traced, mixing", JIT, PlainMixing, _traced)
compiled("jit: traced, rows moved and put back", WRONG_ROW, PlainMoving, _traced)
compiled("fx: traced, honest", "honest: a graph as a module", Plain, torch.fx.symbolic_trace)
compiled("fx: traced, mixing", "a graph as a module", PlainMixing, torch.fx.symbolic_trace)
