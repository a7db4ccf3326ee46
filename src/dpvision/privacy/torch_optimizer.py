"""A user's own torch optimizer and scheduler, moved by private gradients and by nothing else."""

from __future__ import annotations

import inspect
from typing import Any, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.optimizer import TamperGuard
from dpvision.privacy.values import PrivateGrad


@final
class TorchOptimizer:
    """Fill ``.grad`` with a private gradient, take one step of the user's optimizer, and clear ``.grad``.

    Args:
        model: the model whose parameters the optimizer holds.
        rule: any torch optimizer that needs no closure and has taken no step.
        scheduler: stepped once after each step; a plateau schedule only by ``report_public_metric``.

    Raises:
        ArgumentError: the optimizer needs a closure, has taken steps, or holds other parameters than the model's.

    Guarantee: the parameters are a function of their initial values, public settings and ``PrivateGrad``\\ s, one per
    step in order. A step of ``rule`` outside is refused; a parameter or saved buffer that moved otherwise is found
    before the next step and by ``check_untouched``.
    """

    def __init__(self, model: nn.Module, rule: torch.optim.Optimizer, scheduler: Any = None) -> None:
        needed = list(inspect.signature(type(rule).step).parameters.values())[1:]
        if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed):
            raise ArgumentError(
                f"{type(rule).__name__} needs a closure, which reads the data again in a step. Choose another."
            )
        # Some optimizers (Adagrad) make their state at once, with a count of zero.
        if any(float(state.get("step", 1)) > 0 for state in rule.state.values()):
            raise ArgumentError("the optimizer has taken steps already: make a new one for the private run.")
        held = [p for group in rule.param_groups for p in group["params"]]
        own = {id(p) for p in model.parameters()}
        if any(id(p) not in own for p in held):
            raise ArgumentError("the optimizer holds parameters that are not the model's. Make it for this model.")
        self._model, self._rule, self._scheduler, self._held = model, rule, scheduler, held
        self._guard = TamperGuard(model, buffers=True)
        self._inside = False
        self._hook = rule.register_step_pre_hook(self._refuse_outside)
        self.steps_taken = 0

    def _refuse_outside(self, *_: object) -> None:
        if not self._inside:
            raise PrivacyError("optimizer.step() outside of PrivateRun.step is not private. Call run.step alone.")

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that require gradients now.

        Raises:
            ArgumentError: there is none, or the optimizer does not hold one of them.
        """
        found = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        held = {id(p) for p in self._held}
        missing = [name for name, p in found.items() if id(p) not in held]
        if missing or not found:
            raise ArgumentError(
                f"the optimizer must hold every parameter that requires gradients; missing: {', '.join(missing[:5])}. "
                "Add them, or freeze them (requires_grad_(False))."
            )
        return found

    def require_ready(self) -> None:
        """Raise if a parameter moved, or a ``.grad`` is set, by other means than ``step``."""
        self.check_untouched()
        self.trainable()
        filled = [name for name, p in self._model.named_parameters() if p.grad is not None]
        if filled:
            raise PrivacyError(
                f"{filled[0]}.grad is set: PrivateRun.step alone fills .grad. Clear it (optimizer.zero_grad())."
            )

    def step(self, grad: PrivateGrad) -> None:
        """Take the next step.

        Raises:
            PrivacyError: the gradient is of another kind, step or model, or a watched tensor was changed.
        """
        parameters = self.trainable()
        if type(grad) is not PrivateGrad or grad.step != self.steps_taken or grad.gradients.keys() != parameters.keys():
            raise PrivacyError(f"the next step is {self.steps_taken}, and takes the PrivateGrad of this model only.")
        self.check_untouched()
        try:
            for name, parameter in parameters.items():
                parameter.grad = grad.gradients[name].to(parameter)
            self._inside = True
            self._rule.step()
        finally:
            self._inside = False
            for parameter in self._model.parameters():
                parameter.grad = None
        self._guard.accept({n: p for n, p in self._model.named_parameters() if any(p is h for h in self._held)})
        self.steps_taken += 1
        if isinstance(self._scheduler, LRScheduler) and not isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step()

    def report_public_metric(self, value: float) -> None:
        """Feed a plateau schedule with a metric that was declared public."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(value)

    def check_untouched(self) -> None:
        """Raise ``PrivacyError`` naming each parameter or saved buffer that moved by other means than ``step``."""
        self._guard.check()

    def close(self) -> None:
        """Let the optimizer go."""
        self._hook.remove()
