"""A user's own torch optimizer and scheduler, moved by private gradients and by nothing else."""

from __future__ import annotations

import inspect
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.optimizer import TamperGuard
from dpvision.privacy.values import PrivateGrad

_EXACT: Final = (torch.float32, torch.float64)


@final
class TorchOptimizer:
    """Fill ``.grad`` with a private gradient, take one step of the user's optimizer, and clear ``.grad``.

    Args:
        model: the model whose parameters the optimizer holds.
        rule: any torch optimizer that needs no closure and has taken no step.
        scheduler: stepped once after each step; a plateau schedule only by ``report_public_metric``.
        resuming: whether ``load_state`` follows, which replaces the optimizer's state.
        owned: names of the parameters that ``rule`` holds, where other processes move the others; default: all.

    Raises:
        ArgumentError: the optimizer needs a closure or a second gradient, has taken steps, or holds other parameters
            than the model's; the scheduler is not one of this optimizer.

    Guarantee: the parameters are a function of their initial values, public settings and ``PrivateGrad``\\ s, one per
    step in order. A step of ``rule`` or of ``scheduler`` outside is refused; a parameter or saved buffer that moved
    otherwise, a module that was added, removed or replaced, or a state of ``rule`` that was written (by torch's count
    of writes, which ``.data`` evades), is found before the next step and by ``check_untouched``. Settings of the
    optimizer (learning rate, weight decay) may be changed between steps: that they do not follow from private data is
    the caller's part.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        resuming: bool = False,
        owned: frozenset[str] | None = None,
    ) -> None:
        _require_rule(rule, resuming=resuming)
        _require_scheduler(scheduler, rule)
        self._model, self._rule = model, rule
        self._scheduler: Any = scheduler
        self._modules = _modules(model)
        self._guard = TamperGuard(model, buffers=True)
        self._inside, self._owned = False, owned
        self._divided: tuple[str, ...] = ()
        self._hook = rule.register_step_pre_hook(self._refuse_outside)
        self._schedule_left, self._state_left = self._schedule_now(), self._state_now()
        self.steps_taken = 0
        try:
            trained = tuple(self.trainable())
        except BaseException:
            self.close()
            raise
        if owned is not None:
            self._divided = trained

    @property
    def name(self) -> str:
        """The name of the update rule."""
        return type(self._rule).__name__

    def _refuse_outside(self, *_: object) -> None:
        if not self._inside:
            raise PrivacyError("optimizer.step() outside of PrivateRun.step is not private. Call run.step alone.")

    def _held(self) -> list[nn.Parameter]:
        return [p for group in self._rule.param_groups for p in group["params"]]

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that require gradients now.

        Raises:
            ArgumentError: there is none, one is of half precision, the optimizer does not hold one of them, or it holds
                parameters of another model, or they were divided among processes and are others now.
        """
        found = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        held, own = {id(p) for p in self._held()}, {id(p) for p in self._model.parameters()}
        if not held <= own:
            raise ArgumentError("the optimizer holds parameters that are not the model's. Make it for this model.")
        missing = [name for name, p in found.items() if id(p) not in held and self._is_owned(name)]
        if missing or not found:
            raise ArgumentError(
                f"the optimizer must hold every parameter that requires gradients; missing: {', '.join(missing[:5])}. "
                "Add them, or freeze them (requires_grad_(False))."
            )
        if self._divided and self._divided != tuple(found):
            raise ArgumentError(
                "parameters can't be frozen or unfrozen while a ShardedOptimizer divides them among the processes. Use "
                "the optimizer without it."
            )
        for name, p in self._model.named_parameters():
            if p.is_meta or p.is_inference():
                kind = "on the meta device, which holds no values" if p.is_meta else "made in torch.inference_mode"
                raise ArgumentError(f"{name} is {kind}. Make the model outside of it, with values.")
        rough = [f"{name} is {p.dtype}" for name, p in found.items() if p.dtype not in _EXACT]
        if rough:
            raise ArgumentError(
                f"trained parameters must be float32 or float64, which norms and sums are exact enough in; {rough[0]}. "
                "Call model.float(); frozen parameters may stay as they are."
            )
        return found

    def _is_owned(self, name: str) -> bool:
        return self._owned is None or name in self._owned

    def require_ready(self) -> None:
        """Raise if the model, the schedule or a ``.grad`` was changed by other means than ``step``."""
        self.check_untouched()
        self.trainable()
        if self._schedule_left != self._schedule_now():
            raise PrivacyError(
                "the scheduler was stepped outside: PrivateRun.step steps it, and a plateau schedule is stepped by "
                "report_public_metric, with a metric of public data. Remove your call."
            )
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
        parameters = {name: p for name, p in self.trainable().items() if self._is_owned(name)}
        if type(grad) is not PrivateGrad or grad.step != self.steps_taken or grad.gradients.keys() != parameters.keys():
            raise PrivacyError(f"the next step is {self.steps_taken}, and takes the PrivateGrad of this model only.")
        self.check_untouched()
        held = {id(p) for p in self._held()}
        try:
            for name, parameter in parameters.items():
                parameter.grad = grad.gradients[name].to(parameter)
            self._inside = True
            self._rule.step()
        finally:
            self._inside = False
            for parameter in self._model.parameters():
                parameter.grad = None
        self._guard.accept({n: p for n, p in self._model.named_parameters() if id(p) in held})
        self._state_left = self._state_now()
        self.steps_taken += 1
        if self._scheduler is not None and not isinstance(self._scheduler, ReduceLROnPlateau):
            self._step_schedule()

    def accept_received(self) -> None:
        """Take the present weights, buffers included, as those of the last step: other processes moved some of them."""
        self._guard.accept(self._guard.tensors())

    def report_public_metric(self, value: float) -> None:
        """Feed a plateau schedule with a metric that was declared public.

        Raises:
            ArgumentError: there is no plateau schedule.
        """
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            raise ArgumentError("only a ReduceLROnPlateau schedule takes a metric, and this run has none.")
        self._step_schedule(value)

    def _step_schedule(self, *metric: float) -> None:
        self._scheduler.step(*metric)
        self._schedule_left = self._schedule_now()

    def _schedule_now(self) -> object:
        """What each step of a schedule changes."""
        return getattr(self._scheduler, "last_epoch", None)

    def _state_now(self) -> dict[tuple[int, str], object]:
        """Which tensors the update rule keeps, and how often each was written; its numbers as they are."""
        held: dict[Tensor, int] = {parameter: place for place, parameter in enumerate(self._held())}
        return {
            (held.get(parameter, -1), str(name)): (id(value), value._version)
            if isinstance(value, Tensor)
            else repr(value)
            for parameter, values in self._rule.state.items()
            for name, value in values.items()
        }

    def _check_state(self) -> None:
        """Raise ``PrivacyError`` if the state of the update rule was changed by other means than ``step``."""
        state = self._state_now()
        written = {key[1] for key in {**self._state_left, **state} if self._state_left.get(key) != state.get(key)}
        if written:
            raise PrivacyError(
                f"the optimizer's state was changed outside of PrivateRun.step: {', '.join(sorted(written))}. The next "
                "weights would follow from it without noise: begin a new run."
            )

    def check_untouched(self) -> None:
        """Raise ``PrivacyError`` naming each tensor or module that was changed by other means than ``step``."""
        self._check_state()
        now = _modules(self._model)
        changed = [name for name in {**self._modules, **now} if self._modules.get(name) is not now.get(name)]
        if changed:
            raise PrivacyError(
                f"the model was changed: {', '.join(map(repr, changed[:5]))} was added, removed or replaced. A run "
                "certifies the model that it was given: begin a new run."
            )
        self._guard.check()

    def state_by_place(self) -> dict[int, Any]:
        """Return the update rule's state of each owned parameter, by its place among the trainable ones.

        Raises:
            PrivacyError: a watched tensor was changed.
        """
        self._check_state()
        places = self._places()
        return {places[index]: state for index, state in self._rule.state_dict()["state"].items()}

    def _places(self) -> list[int]:
        """The places of the owned parameters among the trainable ones, in the order of the update rule."""
        return [place for place, name in enumerate(self.trainable()) if self._is_owned(name)]

    def _whole(self, others: Mapping[int, Any]) -> dict[str, Any]:
        """The update rule's state as that of a rule that holds all trainable parameters."""
        states = {**self.state_by_place(), **others}
        (group,) = self._rule.state_dict()["param_groups"]
        numbers = list(range(len(self.trainable())))
        return {
            "state": {place: states[place] for place in sorted(states)},
            "param_groups": [{**group, "params": numbers}],
        }

    def load_part(self, state: Mapping[str, Any]) -> None:
        """Continue from the parts of what ``load_state`` returned that this process owns.

        Raises:
            ArgumentError: the state is of a rule of several groups or of other parameters.
        """
        (group, *others), places = state["param_groups"], self._places()
        if others or len(group["params"]) != len(self.trainable()):
            raise ArgumentError(
                "the checkpoint's optimizer has several groups or other parameters, which a sharded one can't hold. "
                "Resume with the optimizer that the run was begun with."
            )
        states = {index: state["state"][place] for index, place in enumerate(places) if place in state["state"]}
        fresh = self._rule.state_dict()["state"]  # of a rule that makes its state at once
        groups = [{**group, "params": list(range(len(places)))}]
        self._rule.load_state_dict({"state": {**fresh, **states}, "param_groups": groups})
        if self._scheduler is not None:
            self._scheduler.load_state_dict(dict(state["schedule"]))
        self._schedule_left, self.steps_taken = self._schedule_now(), int(state["steps_taken"])
        self._state_left = self._state_now()

    def state(self, others: Mapping[int, Any] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and plain values from which ``load_state`` continues.

        Args:
            others: the states of parameters that other processes own, by their places.

        Raises:
            PrivacyError: a watched tensor was changed.
            ArgumentError: the state of the optimizer or the scheduler holds what no checkpoint can hold.
        """
        self._check_state()
        tensors: dict[str, Tensor] = {}
        values = {
            "steps_taken": self.steps_taken,
            "left_by_last_step": self._guard.digests(),
            "kinds": [type(self._rule).__name__, type(self._scheduler).__name__],
            "rule": packed(
                self._rule.state_dict() if self._owned is None else self._whole(others or {}), tensors, name="rule"
            ),
            "schedule": None
            if self._scheduler is None
            else packed(self._scheduler.state_dict(), tensors, name="schedule"),
        }
        return tensors, values

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
        """Continue from ``state``; the model holds the weights of that moment already.

        Returns:
            The state of the whole rule and of the schedule, for ``load_part`` of other processes.

        Raises:
            ArgumentError: the state is of an optimizer or a scheduler of another kind.
            PrivacyError: the model's parameters or saved buffers are not those of that moment.
        """
        kinds = [type(self._rule).__name__, type(self._scheduler).__name__]
        if kinds != values["kinds"]:
            raise ArgumentError(
                f"the run has the optimizer {values['kinds'][0]} and the scheduler {values['kinds'][1]}, got "
                f"{kinds[0]} and {kinds[1]}. Make them as before; their state is restored."
            )
        self._guard.accept_saved(values["left_by_last_step"])
        schedule = None if self._scheduler is None else unpacked(values["schedule"], tensors)
        whole = {**unpacked(values["rule"], tensors), "schedule": schedule, "steps_taken": values["steps_taken"]}
        if self._owned is not None:
            self.load_part(whole)
            return whole
        self._rule.load_state_dict({name: whole[name] for name in ("state", "param_groups")})
        if self._scheduler is not None:
            self._scheduler.load_state_dict(schedule)
        self._schedule_left, self.steps_taken = self._schedule_now(), values["steps_taken"]
        self._state_left = self._state_now()
        return whole

    def close(self) -> None:
        """Let the optimizer go."""
        self._hook.remove()


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def _require_rule(rule: torch.optim.Optimizer, *, resuming: bool) -> None:
    """Refuse optimizers that need the data more than once in a step, or that were used before."""
    name = type(rule).__name__
    needed = list(inspect.signature(type(rule).step).parameters.values())[1:]
    if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed):
        raise ArgumentError(f"{name} needs a closure, which reads the data again in a step. Choose another.")
    if hasattr(rule, "first_step") and hasattr(rule, "second_step"):
        raise ArgumentError(
            f"{name} takes a gradient at a second point in each step, which would be another release. Choose another."
        )
    # Some optimizers (Adagrad) make their state at once, with a count of zero.
    if not resuming and any(float(state.get("step", 1)) > 0 for state in rule.state.values()):
        raise ArgumentError("the optimizer has taken steps already: make a new one for the private run.")


def _require_scheduler(scheduler: object, rule: torch.optim.Optimizer) -> None:
    if scheduler is None:
        return
    if not isinstance(scheduler, LRScheduler):
        raise ArgumentError(
            f"scheduler must be one of torch.optim.lr_scheduler, got {type(scheduler).__name__}. Or leave it out and "
            "set the learning rate of optimizer.param_groups between steps."
        )
    if getattr(scheduler, "optimizer", rule) is not rule:
        raise ArgumentError("the scheduler belongs to another optimizer. Make it for the one that the run is given.")


_MAPPINGS: Final[dict[str, Callable[[Any], Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def packed(value: Any, tensors: dict[str, Tensor], *, name: str) -> Any:
    """Write the state of an optimizer or a scheduler as JSON, without pickle; its tensors go into ``tensors``.

    Args:
        value: numbers, texts, None, tensors, and dicts, lists and tuples of them.
        tensors: where tensors are put, under names that begin with ``name``.
        name: of the value, for messages too.

    Raises:
        ArgumentError: it holds anything else.
    """
    kind = type(value).__name__
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) or (hasattr(value, "item") and hasattr(value, "dtype")):
        number = value if isinstance(value, float) else value.item()
        return number if not isinstance(number, float) or math.isfinite(number) else {"float": str(number)}
    if isinstance(value, (list, tuple)):
        parts = [packed(each, tensors, name=f"{name}/{i}") for i, each in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    if kind in _MAPPINGS:
        items = [
            [packed(k, tensors, name=f"{name}/key"), packed(v, tensors, name=f"{name}/{k}")] for k, v in value.items()
        ]
        return {kind: items}
    raise ArgumentError(
        f"the state of the optimizer or scheduler holds a {kind} ({name}), which no checkpoint can hold: numbers, "
        "texts, tensors, and dicts, lists and tuples of them can be saved."
    )


def unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert ``packed``."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({unpacked(k, tensors): unpacked(v, tensors) for k, v in content})
    parts = [unpacked(each, tensors) for each in content]
    return tuple(parts) if kind == "tuple" else parts
