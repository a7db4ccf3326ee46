"""The optimizer: one private gradient per step moves the weights, and nothing else does.

``Optimizer`` wraps one of torch's update rules. It accepts only ``PrivateGrad``, once per step and in order, so that
the weights are a function of public settings and noisy gradients. ``TamperGuard`` finds weights that were changed by
other means. It compares small tensors bit by bit with a copy, and of large ones a fingerprint: a copy would take as
much memory as the model, version counters miss edits through ``.data``, plain sums miss pairs of sign flips, and a
cryptographic hash takes longer.

Shapes: R runs, W words of a run.
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

from dpvision.config import AveragingSettings, OptimizerSettings, ScheduleSettings, required
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.schedules import Average, Schedule
from dpvision.privacy.values import OrdinaryGrad, PrivateGrad, groups_by_size

_RUN: Final = 4096  # words under one sum of a fingerprint
_RUNS_AT_ONCE: Final = 64  # runs whose products stay in the cache
_LARGE: Final = 1 << 18  # numbers from which on a tensor is watched by its fingerprint
_NUMBERS_AT_ONCE: Final = 1 << 24  # parameters that are moved at once, which bounds the memory of their gradients
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_RULE, _AVERAGE = "optimizer", "average"


def fingerprint(tensor: Tensor) -> Tensor:
    """Summarise a tensor's bits in a few numbers that change whenever the tensor does.

    Of every run of 4,096 words, the sum of words times keys, modulo 2⁶⁴. Keys are random odd numbers of 64 bits that
    are drawn once per process and never leave it; words have at most 32 bits (a float64 is two words).

    Args:
        tensor: of any floating-point, integer or complex type.

    Returns:
        One int64 per run, in the order of the tensor's entries.

    Guarantee: a change of one word in a run always shows, because an odd key has an inverse. Any other change goes
    unseen with probability at most 2⁻³² over the choice of keys.
    """
    words = _words(tensor)
    whole = words.numel() // _RUN * _RUN
    keys_W = _keys(words.device)
    sums_R = torch.empty(whole // _RUN + 1, dtype=torch.int64, device=words.device)
    runs_RW = words[:whole].view(-1, _RUN)
    for first in range(0, runs_RW.shape[0], _RUNS_AT_ONCE):
        some_RW = runs_RW[first : first + _RUNS_AT_ONCE]
        torch.sum(some_RW * keys_W, 1, out=sums_R[first : first + some_RW.shape[0]])
    rest = words[whole:]
    sums_R[-1] = (rest * keys_W[: rest.numel()]).sum()
    return sums_R


def _words(tensor: Tensor) -> Tensor:
    """View the bits as whole numbers in one row, because NaN differs from itself and 0.0 equals -0.0."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_WORDS[flat.element_size()])


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """Draw the odd multipliers, once in a process."""
    words = np.frombuffer(secrets.token_bytes(8 * _RUN), dtype=np.int64) | 1
    return torch.from_numpy(words).to(device)


@final
class TamperGuard:
    """The parameters of one model, and what else it saves if asked, as the last step left them.

    Args:
        model: the model to watch.
        buffers: whether to watch all other tensors of its state dict too: buffers, and what code adds to them.

    Guarantee: ``check`` fails if a watched tensor differs in one bit, was replaced, added or removed; a large tensor's
    changes in several places go unseen with a chance of 2⁻³². It does not see what was undone before the check.
    """

    def __init__(self, model: nn.Module, *, buffers: bool) -> None:
        self._model = model
        self._buffers = buffers
        self._tensors = dict(self._named_tensors())
        self._kinds = {name: _kind(tensor) for name, tensor in self._tensors.items()}
        self._left = {name: _summary(tensor).clone() for name, tensor in self._tensors.items()}

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, and all else that the state dict would release: buffers, extra state, other values."""
        parameters = dict(self._model.named_parameters())
        yield from parameters.items()
        if not self._buffers:
            return
        known = {id(parameter) for parameter in parameters.values()}
        for name, saved in self._model.state_dict(keep_vars=True).items():
            if isinstance(saved, Tensor) and id(saved) not in known:
                yield (f"{name} in its state_dict" if name in parameters else name), saved

    def tensors(self) -> dict[str, Tensor]:
        """Return the watched tensors, by name."""
        return dict(self._named_tensors())

    def check(self) -> None:
        """Raise ``PrivacyError`` naming every tensor that changed since it was accepted."""
        now = dict(self._named_tensors())
        moved = [name for name in {**self._tensors, **now} if not self._is_as_left(name, now)]
        if moved:
            raise PrivacyError(
                f"moved by other means than an optimizer step: {', '.join(moved)}. Nothing but Optimizer.step may move "
                "a model whose training is certified; begin a new run from these weights."
            )

    def _is_as_left(self, name: str, now: Mapping[str, Tensor]) -> bool:
        if name not in now or name not in self._left or _kind(now[name]) != self._kinds[name]:
            return False
        # Buffers are often replaced by their own module (``self.buffer = …``); parameters never are.
        same_object = now[name] is self._tensors[name] or not isinstance(now[name], nn.Parameter)
        return same_object and torch.equal(self._left[name], _summary(now[name]))

    @torch.no_grad()
    def accept(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these tensors' present values as legitimate."""
        for name, tensor in tensors.items():
            self._left[name].copy_(_summary(tensor))

    def digests(self) -> dict[str, str]:
        """Return SHA-256 of every watched tensor, for a checkpoint; raises as ``check`` does."""
        self.check()
        return {name: _digest(tensor) for name, tensor in self._named_tensors()}

    def accept_saved(self, digests: Mapping[str, str]) -> None:
        """Accept the model's present values if they are those of ``digests``; otherwise raise ``PrivacyError``."""
        now = dict(self._named_tensors())
        wrong = [name for name in {**now, **digests} if name not in now or digests.get(name) != _digest(now[name])]
        if wrong:
            raise PrivacyError(
                f"not what the saved step left: {', '.join(wrong)}. Load the checkpoint's weights into the model "
                "before the optimizer's state."
            )
        self.accept(now)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _summary(tensor: Tensor) -> Tensor:
    """Return what is compared: the bits, or where they are many, their fingerprint."""
    return fingerprint(tensor) if tensor.numel() >= _LARGE else _words(tensor)


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


@final
class Optimizer:
    """Moves the trainable parameters of one model, and checks that nothing else does.

    Trainable are the parameters that require gradients when the optimizer is made; a shared one counts once, under
    its first name. Frozen ones are never touched.

    Args:
        model: the model.
        settings: the update rule.
        schedule: the learning rate over steps; constant if None.
        averaging: averages of the parameters; none if None.
        total_steps: the steps of the whole run, for the schedule.
        private: whether to accept only ``PrivateGrad`` and to watch buffers too.
        first_step: the index of the step that this optimizer takes first.

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
            schedule or ScheduleSettings(),
            base_rate=required(settings.learning_rate, "learning_rate"),
            total_steps=total_steps,
        )
        self._average = Average(averaging or AveragingSettings(), self._parameters)
        sizes = {name: value.numel() for name, value in self._parameters.items()}
        # Each parameter moves by itself, so that moving them in groups changes nothing but memory.
        self._groups = list(groups_by_size(sizes, most=_NUMBERS_AT_ONCE))
        self._rule = _torch_optimizer(self._parameters.values(), settings)
        self._guard = TamperGuard(model, buffers=private)  # ordinary training may have moving BatchNorm statistics
        self._takes = PrivateGrad if private else OrdinaryGrad
        self._steps_taken = first_step

    @property
    def steps_taken(self) -> int:
        """Number of steps taken; also the index of the next one."""
        return self._steps_taken

    def learning_rate(self, step: int) -> float:
        """Return the rate used at ``step``, counted from zero."""
        return self._schedule.learning_rate(step)

    def report_public_metric(self, value: float) -> None:
        """Feed a plateau schedule with a metric that was declared public. Other schedules ignore it."""
        self._schedule.report_public_metric(value)

    def averaged_parameters(self) -> dict[str, Tensor] | None:
        """Return copies of the averaged trainable parameters, or None without averaging."""
        return {name: value.clone() for name, value in self._average.values.items()} or None

    def check_untouched(self) -> None:
        """Raise ``PrivacyError`` naming each parameter or saved buffer that moved by other means than ``step``."""
        self._guard.check()

    def step(self, grad: PrivateGrad | OrdinaryGrad) -> None:
        """Take the next step.

        Args:
            grad: the gradient of exactly the next step, for exactly the trainable parameters.

        Raises:
            PrivacyError: the gradient is of another kind, step or model, or a watched tensor was changed. Nothing has
                moved then.
        """
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
                "A private gradient comes from Privatizer.release."
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
            gradient = gradients[name]
            if gradient.shape != parameter.shape or not gradient.is_floating_point():
                raise PrivacyError(
                    f"the gradient of {name} must be floating-point numbers of shape {tuple(parameter.shape)}, got "
                    f"{gradient.dtype} of {tuple(gradient.shape)}. Use the model that the optimizer was made for."
                )

    def _move(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Let torch's rule move the parameters, a group at a time; no ``.grad`` is left behind."""
        for group in self._rule.param_groups:
            group["lr"] = rate
        try:
            for names in self._groups:
                for name in names:
                    self._parameters[name].grad = gradients[name].to(self._parameters[name])
                self._rule.step()  # moves what has a gradient
                for name in names:
                    self._parameters[name].grad = None
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors (copies) and plain values from which ``load_state`` continues bit for bit.

        Raises:
            PrivacyError: a watched tensor was changed.
        """
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
        """Continue from ``state``.

        Args:
            tensors: the tensors of ``state``.
            values: its plain values.

        Raises:
            ArgumentError: the state is of another rule, model or settings.
            PrivacyError: the model's parameters or saved buffers are not what the saved step left. Load the
                checkpoint's weights into the model first.
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


def _torch_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Make torch's optimizer with ``foreach=False``: plain loops, whose order of operations is the documented one."""
    common: dict[str, Any] = {
        "lr": required(settings.learning_rate, "learning_rate"),
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
    """Return the names of the tensors that torch keeps per parameter, and whether each is a counter (on the CPU)."""
    example = nn.Parameter(torch.zeros(1))
    example.grad = torch.zeros(1)
    rule = _torch_optimizer([example], settings)
    rule.step()
    return {key: value.dim() == 0 for key, value in rule.state[example].items() if value is not None}
