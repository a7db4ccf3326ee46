"""A thin door around torch's optimizers: one kind of gradient comes in, once per step, and nothing else moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from dpvision.checks import ArgumentError, PrivacyError
from dpvision.flow import OrdinaryGrad, PrivateGrad
from dpvision.optim.averaging import Average
from dpvision.optim.schedules import Schedule
from dpvision.optim.settings import AveragingSettings, OptimizerSettings, ScheduleSettings
from dpvision.optim.watch import Watch

_RULE, _AVERAGE = "optimizer", "average"
_AT_ONCE = 1 << 24
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
        self._watch = Watch(model, buffers=private)  # ordinary training may have moving BatchNorm statistics
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
        self._watch.check()

    def step(self, grad: PrivateGrad | OrdinaryGrad) -> None:
        """Take the next step. Refuses, before anything moves, what is not the next gradient of this very model."""
        self._require_next(grad)
        self._require_matching(grad.gradients)
        self.check_untouched()
        self._move(grad.gradients, self.learning_rate(self._steps_taken))
        self._average.update(self._parameters, self._steps_taken)
        self._watch.accept(self._parameters)
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
            "left_by_last_step": self._watch.digests(),
        }
        return tensors, values

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from ``state``. The model must hold its weights of that moment already.

        Guarantee: refuses a model whose parameters or saved buffers are not what the saved step left.
        """
        keys = _state_keys(self._settings) if values["steps_taken"] else {}
        self._require_loadable(tensors, values, keys)
        self._watch.accept_saved(values["left_by_last_step"])
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
        if sets[-1] and numbers + size > _AT_ONCE:
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
