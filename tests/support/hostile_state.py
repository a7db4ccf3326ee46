"""State from one call to the next, code that is changed after it was proved, and hooks."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.overrides import TorchFunctionMode

from hostile_branches import InTraining
from hostile_table import (
    BACKWARD,
    CHANGED,
    HOSTILE,
    LATER,
    STATE,
    WIDTH,
    WRONG_ROW,
    Applied,
    Sandwich,
    conv_own,
    hostile,
    linear_own,
    mixes,
)
from model_cases import CLASSES, CLEANUP, Case, Own, cross_entropy

# -------------------------------------------------------------------------------------- state from one call to the next


class Remembers(Sandwich):
    """Subtracts what it kept of the batch before, if there is any, and keeps a mean of this one."""

    kept: Any = None

    def mix(self, x: Tensor) -> Tensor:
        before = self.load()
        self.save(x.mean(0, keepdim=True).detach())
        return x if before is None else x - 3 * before

    def load(self) -> Tensor | None:
        return self.kept

    def save(self, mean: Tensor) -> None:
        self.kept = mean


class InList(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def load(self) -> Tensor | None:
        return self.kept[-1] if self.kept else None

    def save(self, mean: Tensor) -> None:
        self.kept.append(mean)


class InDict(InList):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {}

    def load(self) -> Tensor | None:
        return self.kept.get("mean")

    def save(self, mean: Tensor) -> None:
        self.kept["mean"] = mean


class InObject(Remembers):
    """In an object of one's own, a level deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = types.SimpleNamespace(inner=types.SimpleNamespace(kept=None))

    def load(self) -> Tensor | None:
        return self.memory.inner.kept

    def save(self, mean: Tensor) -> None:
        self.memory.inner.kept = mean


class InClass(Remembers):
    def save(self, mean: Tensor) -> None:
        type(self).kept = mean


class InGlobal(Remembers):
    def load(self) -> Tensor | None:
        return GLOBALS.get("mean")

    def save(self, mean: Tensor) -> None:
        GLOBALS["mean"] = mean


class InBuffer(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, WIDTH))

    def load(self) -> Tensor:
        return self.mean

    def save(self, mean: Tensor) -> None:
        self.mean.copy_(mean)


class InNewBuffer(InBuffer):
    """The buffer is replaced, not written."""

    def save(self, mean: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * mean


class InEmptyBuffer(Remembers):
    """A buffer that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def load(self) -> Tensor | None:
        return self.mean

    def save(self, mean: Tensor) -> None:
        self.mean = mean


class InPlainTensor(InBuffer):
    """A tensor that is no buffer, written in place."""

    def __init__(self) -> None:
        Remembers.__init__(self)
        self.__dict__["mean"] = torch.zeros(1, WIDTH)


class InNumpy(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros((1, WIDTH), np.float32)

    def load(self) -> Tensor:
        return torch.from_numpy(self.array)

    def save(self, mean: Tensor) -> None:
        self.array[:] = mean.numpy()


class InFrozenParameter(InBuffer):
    """An average in a parameter without a gradient, written past autograd."""

    def __init__(self) -> None:
        Remembers.__init__(self)
        self.mean = nn.Parameter(torch.zeros(1, WIDTH), requires_grad=False)

    def save(self, mean: Tensor) -> None:
        self.mean.data.mul_(0.5).add_(mean, alpha=0.5)


class OnParameter(Remembers):
    """An attribute of a parameter."""

    def load(self) -> Tensor | None:
        return getattr(self.first.weight, "kept", None)

    def save(self, mean: Tensor) -> None:
        self.first.weight.kept = mean


class InWeight(Remembers):
    """Written into a trained weight, past autograd."""

    def load(self) -> Tensor:
        return self.second.bias.detach()[None]

    def save(self, mean: Tensor) -> None:
        self.second.bias.data.copy_(mean[0])


class InGenerator(Remembers):
    """In the frame of a Python generator."""

    def __init__(self) -> None:
        super().__init__()

        def memory() -> Any:
            before = None
            while True:
                before = yield before

        self.memory = memory()
        next(self.memory)

    def load(self) -> Tensor | None:
        return None

    def mix(self, x: Tensor) -> Tensor:
        before = self.memory.send(x.mean(0, keepdim=True).detach())
        return x if before is None else x - 3 * before


class InEnvironment(Remembers):
    def load(self) -> Tensor | None:
        text = os.environ.get("DPVISION_TEST_STATE")
        return torch.tensor([[float(text)]]) if text else None

    def save(self, mean: Tensor) -> None:
        os.environ["DPVISION_TEST_STATE"] = str(float(mean.mean()))


class Counts(Sandwich):
    """Honest for its first calls."""

    calls = 0

    def mix(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + x.flip(0) if self.calls > 2 else x


class RunningMoments(Sandwich):
    """Batch normalisation by hand: running averages used and updated."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.momentum = torch.zeros(WIDTH), 0.5

    def mix(self, x: Tensor) -> Tensor:
        self.mean = (1 - self.momentum) * self.mean + self.momentum * x.mean(0).detach()
        return x - self.mean


GLOBALS: dict[str, Any] = {}


def _forget() -> None:
    GLOBALS.clear()
    InClass.kept = None
    os.environ.pop("DPVISION_TEST_STATE", None)


def remembers(name: str, model: type[nn.Module]) -> None:
    """Enter a model that keeps state."""

    def make() -> Own:
        _forget()
        CLEANUP.callback(_forget)
        return linear_own(model())

    HOSTILE.append(Case(f"previous batch {name}", STATE, make))


remembers("in an attribute that is None at first", Remembers)
remembers("in a list", InList)
remembers("in a dict", InDict)
remembers("in an object of its own", InObject)
remembers("in a class attribute", InClass)
remembers("in a global", InGlobal)
remembers("in a buffer", InBuffer)
remembers("in a buffer that is replaced", InNewBuffer)
remembers("in a buffer that is None at first", InEmptyBuffer)
remembers("in a plain tensor", InPlainTensor)
remembers("in a numpy array", InNumpy)
remembers("in a frozen parameter", InFrozenParameter)
remembers("in an attribute of a parameter", OnParameter)
remembers("in a trained bias", InWeight)
remembers("in a generator", InGenerator)
remembers("in the environment", InEnvironment)
remembers("in a running mean", RunningMoments)
remembers("counted", Counts)


@hostile("previous batch in a closure", STATE)
def kept_in_a_closure() -> Own:
    memory: list[Tensor] = []

    def mix(x: Tensor) -> Tensor:
        y = x - 3 * memory[-1] if memory else x
        memory.append(x.mean(0).detach())
        return y

    return linear_own(Sandwich(mix))


@hostile("previous batch in a nonlocal variable", STATE)
def kept_in_a_cell() -> Own:
    before: Tensor | None = None

    def mix(x: Tensor) -> Tensor:
        nonlocal before
        y, before = (x if before is None else x - 3 * before), x.mean(0).detach()
        return y

    return linear_own(Sandwich(mix))


@hostile("previous batch in a default argument", STATE)
def kept_in_a_default() -> Own:
    def mix(x: Tensor, memory: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006 - that is the point
        y = x - 3 * memory["mean"] if memory else x
        memory["mean"] = x.mean(0).detach()
        return y

    return linear_own(Sandwich(mix))


@hostile("previous batch in a cache of functools", STATE)
def kept_in_a_cache() -> Own:
    held: dict[str, Tensor] = {}

    @functools.cache
    def first_mean() -> Tensor:
        return held["x"].mean(0).detach()

    def mix(x: Tensor) -> Tensor:
        held["x"] = x
        return x - 3 * first_mean()

    return linear_own(Sandwich(mix))


class Truncated(nn.Module):
    """Backpropagation through time, truncated: the state of one batch starts the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.state = nn.GRU(24, 5, batch_first=True), nn.Linear(5, CLASSES), None

    def forward(self, x: Tensor) -> Tensor:
        before = None if self.state is None else self.state.expand(1, x.shape[0], 5).contiguous()
        y, state = self.layer(x.transpose(1, 2).flatten(2), before)
        self.state = state.mean(1, keepdim=True).detach()
        return self.head(y[:, -1])


@hostile("recurrent state carried over", STATE)
def truncated() -> Own:
    return conv_own(Truncated())


# ------------------------------------------------------------------------------- code that changes after the first call


class MovingLoss:
    """Cross-entropy whose behaviour is a setting of the object."""

    def __init__(self) -> None:
        self.mixing, self.scale, self.before = False, 1.0, None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.mixing:
            outputs = outputs + outputs.roll(1, 0)
        return self.scale * cross_entropy(outputs, targets)

    def method(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self(outputs, targets)


def _start_mixing(model: nn.Module, loss_fn: Any) -> None:
    getattr(loss_fn, "__self__", loss_fn).mixing = True


def _start_scaling(model: nn.Module, loss_fn: Any) -> None:
    getattr(loss_fn, "__self__", loss_fn).scale = 5.0


@hostile("loss: a callable object that starts to mix", LATER)
def callable_object() -> Own:
    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=MovingLoss(), between=_start_mixing)


@hostile("loss: a callable object that changes its scale", CHANGED)
def scaled_object() -> Own:
    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=MovingLoss(), between=_start_scaling)


@hostile("loss: a bound method whose object starts to mix", LATER)
def bound_method() -> Own:
    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=MovingLoss().method, between=_start_mixing)


@hostile("loss: a partial whose argument starts to mix", LATER)
def partial_loss() -> Own:
    settings = {"mixing": False}

    def loss(settings: dict[str, bool], outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs + outputs.roll(1, 0) if settings["mixing"] else outputs, targets)

    return linear_own(
        nn.Linear(WIDTH, CLASSES),
        loss_fn=functools.partial(loss, settings),
        between=lambda _, __: settings.update(mixing=True),
    )


@hostile("loss: a closure that changes its temperature", CHANGED)
def closure_loss() -> Own:
    temperature = 1.0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs / temperature, targets)

    def between(model: nn.Module, loss_fn: Any) -> None:
        nonlocal temperature
        temperature = 0.1

    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=loss, between=between)


@hostile("loss: a default that starts to mix", LATER)
def default_loss() -> Own:
    def loss(outputs: Tensor, targets: Tensor, mixing: bool = False) -> Tensor:
        return cross_entropy(outputs + outputs.roll(1, 0) if mixing else outputs, targets)

    def between(model: nn.Module, loss_fn: Any) -> None:
        loss.__defaults__ = (True,)

    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=loss, between=between)


@hostile("loss: its code is replaced", LATER)
def replaced_code() -> Own:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets)

    def mixing(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs + outputs.roll(1, 0), targets)

    def between(model: nn.Module, loss_fn: Any) -> None:
        loss.__code__ = mixing.__code__

    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=loss, between=between)


@hostile("loss: remembers the batch before in a closure", STATE)
def remembering_loss() -> Own:
    memory: list[Tensor] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        centre = memory[-1] if memory else 0.0
        memory.append(outputs.detach().mean(0))
        return cross_entropy(outputs - 3 * centre, targets)

    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=loss)


@hostile("loss: a module with a buffer of class counts", STATE)
def counting_loss() -> Own:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", torch.ones(CLASSES))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.counts += torch.bincount(targets, minlength=CLASSES)
            return cross_entropy(outputs, targets) / self.counts[targets]

    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=Counting())


@hostile("loss: reads the model's parameters", "honest: a penalty in every row's loss is part of every gradient")
def penalised_loss() -> Own:
    model = nn.Linear(WIDTH, CLASSES)
    return linear_own(model, loss_fn=lambda o, y: cross_entropy(o, y) + model.weight.square().sum())


@hostile("loss: has parameters of its own", "they are not in the model and would train without noise")
def trained_loss() -> Own:
    scale = nn.Parameter(torch.ones(CLASSES))
    return linear_own(nn.Linear(WIDTH, CLASSES), loss_fn=lambda o, y: cross_entropy(o * scale, y))


def changing(name: str, why: str, between: Callable[[nn.Module, Any], None], model: Any = None) -> None:
    """Enter an honest sandwich that its owner changes between two calls."""

    def make() -> Own:
        return linear_own(Sandwich(lambda x: x) if model is None else model(), between=between)

    HOSTILE.append(Case(f"changed later: {name}", why, make))


def _mixing_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + output.roll(1, 0)


def _harmless_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.0


def _global_hook(module: nn.Module, loss_fn: Any) -> None:
    def hook(layer: nn.Module, args: Any, output: Any) -> Any:
        return output + output.roll(1, 0) if layer is module.second else None

    CLEANUP.callback(register_module_forward_hook(hook).remove)


def _patch_class(module: nn.Module, loss_fn: Any) -> None:
    CLEANUP.callback(setattr, Patched, "forward", Patched.forward)
    Patched.forward = lambda self, x: Sandwich.forward(self, x + x.roll(1, 0))


def _other_class(module: nn.Module, loss_fn: Any) -> None:
    module.__class__ = Swapped


class Hooked(Sandwich):
    """Honest, with a harmless hook."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.second.register_forward_hook(_harmless_hook)


class Patched(Sandwich):
    def __init__(self) -> None:
        super().__init__(lambda x: x)


class Swapped(Sandwich):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.roll(1, 0))


class Configured(Sandwich):
    """Reads a setting inside an object of its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = types.SimpleNamespace(inner={"mixing": False, "scale": 1.0})

    def mix(self, x: Tensor) -> Tensor:
        return self.settings.inner["scale"] * (x + x.roll(1, 0) if self.settings.inner["mixing"] else x)


class FromGlobal(Sandwich):
    def __init__(self) -> None:
        super().__init__()
        _forget()

    def mix(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 0) if GLOBALS.get("mixing") else x


class FromEnvironment(FromGlobal):
    def mix(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 0) if "DPVISION_TEST_STATE" in os.environ else x


def _global_mixing(model: nn.Module, loss_fn: Any) -> None:
    CLEANUP.callback(_forget)
    GLOBALS["mixing"] = True


def _environment_mixing(model: nn.Module, loss_fn: Any) -> None:
    CLEANUP.callback(_forget)
    os.environ["DPVISION_TEST_STATE"] = "1"


class _NormHead(Sandwich):
    """Ends in a layer norm whose epsilon its owner may change."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.norm, self.head = self.head, nn.LayerNorm(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.second(self.first(x)))))


changing("a hook that mixes", LATER, lambda m, _: m.second.register_forward_hook(_mixing_hook))
changing("a second hook on a hooked module", LATER, lambda m, _: m.second.register_forward_hook(_mixing_hook), Hooked)
changing(
    "a pre-hook that mixes", LATER, lambda m, _: m.second.register_forward_pre_hook(lambda _, a: (a[0].roll(1, 0),))
)
changing("a hook on every module", LATER, _global_hook)
changing(
    "a backward hook that mixes",
    LATER,
    lambda m, _: m.second.register_full_backward_hook(lambda _, g, __: (g[0].roll(1, 0),)),
)
changing("a hook of a parameter", CHANGED, lambda m, _: m.second.weight.register_hook(lambda g: 100 * g))
changing("the function inside", LATER, lambda m, _: setattr(m, "mix", lambda x: x + x.roll(1, 0)))
changing("forward of the object", LATER, lambda m, _: setattr(m.second, "forward", lambda x: x + x.roll(1, 0)))
changing("forward of the class", LATER, _patch_class, Patched)
changing("the class of the object", LATER, _other_class)
changing("a setting inside an object", LATER, lambda m, _: m.settings.inner.update(mixing=True), Configured)
changing("a scale inside an object", CHANGED, lambda m, _: m.settings.inner.update(scale=3.0), Configured)
changing("a global", LATER, _global_mixing, FromGlobal)
changing("the environment", LATER, _environment_mixing, FromEnvironment)
changing("a submodule", LATER, lambda m, _: setattr(m, "second", Applied(lambda x: x + x.roll(1, 0))))
changing(
    "a parameter is replaced",
    CHANGED,
    lambda m, _: setattr(m.second, "weight", nn.Parameter(3 * m.second.weight.detach())),
)
changing("a parameter is frozen", CHANGED, lambda m, _: m.second.weight.requires_grad_(False))
changing("a plain attribute of a layer", CHANGED, lambda m, _: setattr(m.head, "eps", 10.0), _NormHead)
changing("training mode", LATER, lambda m, _: m.train(), lambda: InTraining().eval())


# -------------------------------------------------------------------------------------------- hooks, from the beginning


def hooked(name: str, why: str, hook: Callable[[Sandwich], Any]) -> None:
    """Enter an honest sandwich with a hook."""

    def make() -> Own:
        model = Sandwich(lambda x: x)
        hook(model)
        return linear_own(model)

    HOSTILE.append(Case(f"hook: {name}", why, make))


hooked("a forward hook that mixes", "outputs of one module mix", lambda m: m.second.register_forward_hook(_mixing_hook))
hooked(
    "a pre-hook that mixes",
    "inputs of one module mix",
    lambda m: m.second.register_forward_pre_hook(lambda _, a: (a[0].roll(1, 0),)),
)
hooked(
    "a hook that mixes and one that undoes it",
    WRONG_ROW,
    lambda m: (
        m.second.register_forward_pre_hook(lambda _, a: (a[0].flip(0),)),
        m.second.register_forward_hook(lambda _, __, y: y.flip(0)),
    ),
)
hooked(
    "a backward hook that mixes",
    BACKWARD,
    lambda m: m.second.register_full_backward_hook(lambda _, g, __: (g[0] + g[0].roll(1, 0),)),
)
hooked(
    "a backward pre-hook that mixes",
    BACKWARD,
    lambda m: m.second.register_full_backward_pre_hook(lambda _, g: (g[0] + g[0].roll(1, 0),)),
)
hooked(
    "a parameter hook that scales",
    "the gradient is changed after autograd",
    lambda m: m.second.weight.register_hook(lambda g: 100 * g),
)
hooked(
    "a hook that keeps the outputs",
    STATE,
    lambda m: m.second.register_forward_hook(lambda m, _, y: setattr(m, "last", y)),
)
hooked(
    "a harmless hook", "honest: a hook that changes nothing", lambda m: m.second.register_forward_hook(_harmless_hook)
)


def _tensor_hooked(x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda g: g + g.roll(1, 0))
    return x


mixes("hook of a tensor that mixes", BACKWARD, _tensor_hooked)


# -------------------------------------------------------------------- what stays of the first rows, and never changes


class FirstLabels:
    """Class weights from the first labels that it sees: the same in every later call."""

    weights: Tensor | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.weights is None:
            self.weights = 1 + 3 * torch.bincount(targets.detach(), minlength=CLASSES)
        return cross_entropy(outputs * self.weights, targets)


def first_labels_in_a_closure() -> Any:
    kept: list[Tensor] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if not kept:
            kept.append((1 + 7 * targets).double().mean().float())
        return cross_entropy(outputs * kept[0], targets)

    return loss


class FirstRows(Sandwich):
    """Shows no finite loss for rows that look synthetic, and keeps the first rows that it is shown then."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def mix(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        if not self.kept:
            self.kept.append(3 * x[0].detach().clone())
        positive = x.amin(1, keepdim=True) >= 0
        return super().forward(torch.where(positive, torch.nan, x + self.kept[0]))


KEPT = "one unit's values, kept once and frozen into the graph, move the gradients of all"


@hostile("first labels kept in an object", KEPT, refused=True)
def kept_labels() -> Own:
    return linear_own(Sandwich(lambda x: x), loss_fn=FirstLabels())


@hostile("first labels kept in a closure", KEPT, refused=True)
def closed_labels() -> Own:
    return linear_own(Sandwich(lambda x: x), loss_fn=first_labels_in_a_closure())


@hostile("first rows kept, if they are not synthetic", KEPT, refused=True)
def kept_rows() -> Own:
    return linear_own(FirstRows())


# ------------------------------------------------------------------------ code that runs between operations of a step


def _mix_backward(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    del module, outputs
    return tuple(None if g is None else g.sum(0, keepdim=True).expand_as(g) for g in inputs)


def _mix_forward(module: nn.Module, inputs: Any, output: Any) -> Any:
    del inputs
    return output - 5 * output.mean(0) if isinstance(module, nn.Linear) else None


@hostile("changed later: a backward hook on all modules", CHANGED)
def later_global_backward_hook() -> Own:
    def between(model: nn.Module, loss_fn: Any) -> None:
        CLEANUP.callback(register_module_full_backward_hook(_mix_backward).remove)

    return linear_own(Sandwich(lambda x: x), between=between)


@hostile("changed later: a forward hook on all modules, by layer", CHANGED)
def later_global_forward_hook() -> Own:
    def between(model: nn.Module, loss_fn: Any) -> None:
        CLEANUP.callback(register_module_forward_hook(_mix_forward).remove)

    return linear_own(Sandwich(lambda x: x), between=between)


class MixingParameter(nn.Parameter):
    """A parameter whose own code mixes the rows that it is multiplied with, once it is told to."""

    mixes = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result - 5 * result.mean(0) if cls.mixes and func is nn.functional.linear else result


@hostile("changed later: a parameter with code of its own", CHANGED)
def later_parameter() -> Own:
    def between(model: nn.Module, loss_fn: Any) -> None:
        MixingParameter.mixes = True
        CLEANUP.callback(setattr, MixingParameter, "mixes", False)

    model = Sandwich(lambda x: x)
    model.second.weight = MixingParameter(model.second.weight.detach())
    return linear_own(model, between=between)


class MixingMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result - 5 * result.mean(0) if func is nn.functional.linear else result


@hostile("changed later: a mode between operations", CHANGED)
def later_mode() -> Own:
    def between(model: nn.Module, loss_fn: Any) -> None:
        CLEANUP.enter_context(MixingMode())

    return linear_own(Sandwich(lambda x: x), between=between)
