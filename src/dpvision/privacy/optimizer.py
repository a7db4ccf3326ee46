"""A few numbers that tell whether a large tensor has changed, where a copy would take as much memory as the tensor.

Of every run of 4,096 words, the sum of the words times keys, modulo 2⁶⁴. Keys are random odd numbers of 64 bits that
nobody else has, words have at most 32 bits: a change of one word in a run always shows, because an odd key has an
inverse; any other change goes unseen with probability 2⁻³² at most, over the choice of keys. A float64 is two words.

Sees whether parameters moved in any way but through the optimizer's door.

An exact copy is kept and compared bit by bit; of a large tensor, a fingerprint with secret keys. Version counters miss
edits through ``.data``, sums of bits miss pairs of sign flips, and a cryptographic hash takes longer.

A thin door around torch's optimizers: one kind of gradient comes in, once per step, and nothing else moves.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from dpvision.config import AveragingSettings, OptimizerSettings, ScheduleSettings
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.schedules import Average, Schedule
from dpvision.privacy.values import OrdinaryGrad, PrivateGrad

# R runs, W words of a run


_RUN: Final = 4096
_AT_ONCE: Final = 64  # runs whose products stay in the cache
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def fingerprint(tensor: Tensor) -> Tensor:
    """One whole number for every run of the tensor's bits, in the order of its entries.

    Guarantee: two tensors of one shape and type that differ have different ones, but for a chance of 2⁻³².
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    whole = words.numel() // _RUN * _RUN
    keys_W = _keys(words.device)
    sums_R = torch.empty(whole // _RUN + 1, dtype=torch.int64, device=words.device)
    runs_RW = words[:whole].view(-1, _RUN)
    for first in range(0, runs_RW.shape[0], _AT_ONCE):
        some_RW = runs_RW[first : first + _AT_ONCE]
        torch.sum(some_RW * keys_W, 1, out=sums_R[first : first + some_RW.shape[0]])
    rest = words[whole:]
    sums_R[-1] = (rest * keys_W[: rest.numel()]).sum()
    return sums_R


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """Odd numbers, drawn once in a process."""
    words = np.frombuffer(secrets.token_bytes(8 * _RUN), dtype=np.int64) | 1
    return torch.from_numpy(words).to(device)


_LARGE = 1 << 18
"""Numbers from which on a copy's memory counts for more than a few more calls."""
_WORDS_of_watch = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REMEDY = "Nothing but Optimizer.step may move a model whose training is certified; begin a new run from these weights."


@final
class TamperGuard:
    """The parameters of one model, and its saved buffers if asked, as the last step left them.

    Guarantee: ``check`` fails if a watched tensor differs in one bit, was replaced, added or removed; a large tensor's
    changes in several places go unseen with a chance of 2⁻³². It does not see what was undone before the check.
    """

    def __init__(self, model: nn.Module, *, buffers: bool) -> None:
        self._model = model
        self._buffers = buffers
        self._tensors = dict(self._named_tensors())
        self._left = {name: _Snapshot(tensor) for name, tensor in self._tensors.items()}

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        buffers = dict(self._model.named_buffers()) if self._buffers else {}
        if buffers:
            saved = self._model.state_dict(keep_vars=True).keys()
            yield from ((name, buffer) for name, buffer in buffers.items() if name in saved)

    def check(self) -> None:
        """Raise ``PrivacyError`` naming every tensor that moved since ``accept``."""
        now = dict(self._named_tensors())
        moved = [name for name in {**self._tensors, **now} if not self._is_as_left(name, now)]
        if moved:
            raise PrivacyError(f"moved by other means than an optimizer step: {', '.join(moved)}. {_REMEDY}")

    def _is_as_left(self, name: str, now: Mapping[str, Tensor]) -> bool:
        if name not in now or name not in self._left:
            return False
        # Buffers are often replaced by their own module (``self.buffer = …``); parameters never are.
        same_object = now[name] is self._tensors[name] or not isinstance(now[name], nn.Parameter)
        return same_object and self._left[name].is_still(now[name])

    @torch.no_grad()
    def accept(self, names: Mapping[str, Tensor]) -> None:
        """Take these tensors' present values as rightly theirs."""
        for name, tensor in names.items():
            self._left[name].take(tensor)

    def digests(self) -> dict[str, str]:
        """SHA-256 of every watched tensor as the last step left it, for a checkpoint; raises as ``check`` does."""
        self.check()
        return {name: _digest(tensor) for name, tensor in self._named_tensors()}

    def accept_saved(self, digests: Mapping[str, str]) -> None:
        """Take over the model's present values if they are those of ``digests``; otherwise ``PrivacyError``."""
        now = dict(self._named_tensors())
        wrong = [name for name in {**now, **digests} if name not in now or digests.get(name) != _digest(now[name])]
        if wrong:
            raise PrivacyError(
                f"not what the saved step left: {', '.join(wrong)}. Load the checkpoint's weights into the model "
                "before the optimizer's state."
            )
        self.accept(now)


@final
class _Snapshot:
    """A tensor as it was left: its bits, or where they are many, their fingerprint."""

    __slots__ = ("_bits", "_kind")

    def __init__(self, tensor: Tensor) -> None:
        self._kind = _kind(tensor)
        self._bits = fingerprint(tensor) if _is_large(tensor) else tensor.detach().clone()

    def take(self, tensor: Tensor) -> None:
        """The tensor, which is of the same kind, has rightly moved."""
        self._bits.copy_(fingerprint(tensor) if _is_large(tensor) else tensor)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether this is how the tensor was left."""
        if _kind(tensor) != self._kind:
            return False
        return torch.equal(self._bits, fingerprint(tensor)) if _is_large(tensor) else _equal_bits(tensor, self._bits)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() >= _LARGE


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    words = _WORDS_of_watch.get(one.element_size())
    # Whole numbers, because NaN differs from itself and 0.0 equals -0.0.
    return torch.equal(one, other) if words is None else torch.equal(one.detach().view(words), other.view(words))


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


_RULE, _AVERAGE = "optimizer", "average"
_AT_ONCE_of_optimizer = 1 << 24
"""Numbers of parameters that are moved at once."""


@final
class Optimizer:
    """Moves the trainable parameters of one model, and keeps watch that nothing else does.

    Trainable are the parameters that require gradients when the optimizer is made; a shared one counts once, under
    its first name. Frozen ones are never touched. ``first_step`` is the step that it takes first.

    Guarantee: with ``private=True`` the parameters after any number of steps are a function of their initial values,
    public settings, public metrics and ``PrivateGrad``\\ s, one per step in order; the averages too. A parameter or
    saved buffer that moves otherwise is found before the next step and by ``check_untouched``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        settings: OptimizerSettings,
        schedule: ScheduleSettings | None = None,
        averaging: AveragingSettings | None = None,
        total_steps: int,
        private: bool,
        first_step: int = 0,
    ) -> None:
        self._parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        if not self._parameters:
            raise ArgumentError("the model has no trainable parameter. Unfreeze at least one (requires_grad_(True)).")
        self._settings = settings
        self._schedule = Schedule(
            schedule or ScheduleSettings(), base_rate=settings.learning_rate, total_steps=total_steps
        )
        self._average = Average(averaging or AveragingSettings(), self._parameters)
        self._together = _sets({name: value.numel() for name, value in self._parameters.items()})
        self._rule = _torch_optimizer(self._parameters.values(), settings)
        self._guard = TamperGuard(model, buffers=private)  # ordinary training may have moving BatchNorm statistics
        self._takes = PrivateGrad if private else OrdinaryGrad
        self._steps_taken = first_step

    @property
    def steps_taken(self) -> int:
        """How many steps were taken; also the index of the next one."""
        return self._steps_taken

    def learning_rate(self, step: int) -> float:
        """The rate used at ``step``, counted from zero."""
        return self._schedule.learning_rate(step)

    def report_public_metric(self, value: float) -> None:
        """Feed a plateau schedule with a metric that was declared public. Other schedules ignore it."""
        self._schedule.report_public_metric(value)

    def averaged_parameters(self) -> dict[str, Tensor] | None:
        """Copies of the averaged trainable parameters, or ``None`` without averaging."""
        return {name: value.clone() for name, value in self._average.values.items()} or None

    def check_untouched(self) -> None:
        """Raise ``PrivacyError`` naming each parameter or saved buffer that moved by other means than ``step``."""
        self._guard.check()

    def step(self, grad: PrivateGrad | OrdinaryGrad) -> None:
        """Take the next step. Refuses, before anything moves, what is not the next gradient of this very model."""
        self._require_next(grad)
        self._require_matching(grad.gradients)
        self.check_untouched()
        self._move(grad.gradients, self.learning_rate(self._steps_taken))
        self._average.update(self._parameters, self._steps_taken)
        self._guard.accept(self._parameters)
        self._steps_taken += 1

    def _require_next(self, grad: PrivateGrad | OrdinaryGrad) -> None:
        if type(grad) is not self._takes:
            raise PrivacyError(
                f"this optimizer takes a {self._takes.__name__} only, got {type(grad).__name__}. "
                "A private gradient comes from noise.privatize."
            )
        if grad.step != self._steps_taken:
            raise PrivacyError(
                f"the next step is {self._steps_taken}, got the gradient of step {grad.step}: each step is taken once, "
                "in order."
            )

    def _require_matching(self, gradients: Mapping[str, Tensor]) -> None:
        missing = [name for name in self._parameters if name not in gradients]
        unknown = [name for name in gradients if name not in self._parameters]
        if missing or unknown:
            raise PrivacyError(
                f"the gradient must name exactly the trainable parameters; missing: {', '.join(missing) or 'none'}; "
                f"unknown or frozen: {', '.join(unknown) or 'none'}. Use the model that the optimizer was made for."
            )
        for name, parameter in self._parameters.items():
            if gradients[name].shape != parameter.shape or not gradients[name].is_floating_point():
                raise PrivacyError(
                    f"the gradient of {name} must be floating-point numbers of shape {tuple(parameter.shape)}, got "
                    f"{gradients[name].dtype} of {tuple(gradients[name].shape)}. Use the model that the optimizer was "
                    "made for."
                )

    def _move(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        for group in self._rule.param_groups:
            group["lr"] = rate
        try:
            for names in self._together:
                for name in names:
                    self._parameters[name].grad = gradients[name].to(self._parameters[name])
                self._rule.step()  # moves what has a gradient
                for name in names:
                    self._parameters[name].grad = None
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors (copies) and plain values from which ``load_state`` continues bit for bit."""
        tensors = {f"{_AVERAGE}/{name}": value.clone() for name, value in self._average.values.items()}
        for name, parameter in self._parameters.items():
            for key, value in self._rule.state[parameter].items():
                if value is not None:
                    tensors[f"{_RULE}/{key}/{name}"] = value.detach().clone()
        values = {
            "optimizer": self._settings.name,
            "steps_taken": self._steps_taken,
            "schedule": self._schedule.state(),
            "left_by_last_step": self._guard.digests(),
        }
        return tensors, values

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from ``state``. The model must hold its weights of that moment already.

        Guarantee: refuses a model whose parameters or saved buffers are not what the saved step left.
        """
        keys = _state_keys(self._settings) if values["steps_taken"] else {}
        self._require_loadable(tensors, values, keys)
        self._guard.accept_saved(values["left_by_last_step"])
        self._schedule.load_state(values["schedule"])
        self._steps_taken = values["steps_taken"]
        for name, average in self._average.values.items():
            average.copy_(tensors[f"{_AVERAGE}/{name}"])
        for name, parameter in self._parameters.items():
            self._rule.state[parameter] = {
                key: tensors[f"{_RULE}/{key}/{name}"].to("cpu" if counter else parameter.device).clone()
                for key, counter in keys.items()
            }

    def _require_loadable(
        self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], keys: Mapping[str, bool]
    ) -> None:
        if values["optimizer"] != self._settings.name:
            raise ArgumentError(
                f"the saved state is of {values['optimizer']}, but the optimizer is {self._settings.name}."
            )
        shapes = {f"{_AVERAGE}/{name}": value.shape for name, value in self._average.values.items()}
        for name, parameter in self._parameters.items():
            for key, counter in keys.items():
                shapes[f"{_RULE}/{key}/{name}"] = torch.Size() if counter else parameter.shape
        wrong = [
            name for name in {**shapes, **tensors} if name not in tensors or shapes.get(name) != tensors[name].shape
        ]
        if wrong:
            raise ArgumentError(
                f"the saved state does not fit this model and these settings: {', '.join(wrong)} missing, unknown or "
                "of another shape. Resume with the settings of the saved run."
            )


def _sets(sizes: Mapping[str, int]) -> list[list[str]]:
    """What is moved at once: all parameters of most models, and a large one's in parts.

    Each parameter moves by itself, so that this changes nothing but memory: gradients in the parameters' own type lie
    beside those that came in.
    """
    sets: list[list[str]] = [[]]
    numbers = 0
    for name, size in sizes.items():
        if sets[-1] and numbers + size > _AT_ONCE_of_optimizer:
            sets.append([])
            numbers = 0
        sets[-1].append(name)
        numbers += size
    return sets


def _torch_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """One parameter at a time (``foreach=False``): the plain loops, whose order of operations is the documented one."""
    common: dict[str, Any] = {
        "lr": settings.learning_rate,
        "weight_decay": settings.effective_weight_decay,
        "foreach": False,
    }
    adaptive = {**common, "betas": settings.betas, "eps": settings.eps}
    match settings.name:
        case "sgd":
            return torch.optim.SGD(parameters, momentum=settings.momentum, nesterov=settings.nesterov, **common)
        case "adam":
            return torch.optim.Adam(parameters, **adaptive)
        case "adamw":
            return torch.optim.AdamW(parameters, **adaptive)
        case "nadam":
            return torch.optim.NAdam(parameters, momentum_decay=settings.momentum_decay, **adaptive)
        case "rmsprop":
            own = {"alpha": settings.smoothing, "eps": settings.eps, "centered": settings.centered}
            return torch.optim.RMSprop(parameters, momentum=settings.momentum, **own, **common)


def _state_keys(settings: OptimizerSettings) -> dict[str, bool]:
    """The names of the tensors that torch keeps for each parameter, and whether each is a counter (kept on the CPU)."""
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    rule = _torch_optimizer([probe], settings)
    rule.step()
    return {key: value.dim() == 0 for key, value in rule.state[probe].items() if value is not None}
