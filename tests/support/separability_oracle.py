"""Is somebody's own model refused, or is its clipped sum exact and separable? The judge of the tables of models.

A case is called several times in a row on different rows, and once more so with one unit replaced in every batch. It
passes if it is refused in dpvision's own words, or if all of these hold.

- Exact: the sum is that of single units, each alone in front of a fresh model, in float64.
- Bounded: replacing one unit moves the sum by at most two clip norms, in every call; removing it by one.
- Separable where there is randomness: with the same draws, what a unit adds does not depend on the other units.
- One unit alone adds at most one clip norm, however large it is.
- The caller's rows, the model's parameters, buffers and attributes are as they were, and the model does what a fresh
  one does, wherever else it keeps state.

Nothing here uses the engine other than through ``dpvision.clipped_sum``. ``trusting_clipped_sum`` is an engine that
checks nothing, to show that the judge notices.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._pytree import tree_leaves, tree_map

import dpvision
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.values import ClippedSum
from model_cases import CLASSES, CLEANUP, Case, Own

Gradients = dict[str, Tensor]

EXTREMES = ((1.0, 10.0), (255.0, -255.0), (1.0, 255.0), (10.0, -10.0), (1e4, -1e4), (1.0, -1.0), (1.0, 1e4))
"""By what the inputs of one unit are multiplied in two neighbouring batches."""
FACTORS = (0.3, 1.0, 0.05, 3.0)
"""The clip norm, by the median norm of the units' gradients: clipping most, half, all or few of them."""
_FOREIGN = re.compile(
    r"\n|Traceback|TORCH_LOGS|SymInt|symint|FakeTensor|functorch|torch\._|torch\.export|proxy|dispatch|GuardOn|Dim\(|<built-in"
)
_NAMED = re.compile(r"loss|model|module|layer|operation|parameter|buffer|hook|inputs|targets|outputs|\w \(\w+\)|\w\.\w")
_REMEDY = re.compile(
    r"\b(use|replace|return|write|move|remove|call|put|give|pass|keep|draw|set|compute|choose|make|do not|divide|take|"
    r"store|build|convert|let|turn|train)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Trial:
    """One way to try a case.

    Attributes:
        weights: seed of the weights.
        data: seed of the rows.
        rows: rows of each batch.
        calls: calls in a row, each with other rows.
        rows_per_unit: rows of one unit; ``rows`` is a multiple of it.
    """

    weights: int = 0
    data: int = 0
    rows: int = 8
    calls: int = 3
    rows_per_unit: int = 1

    @property
    def units(self) -> int:
        """Units of each batch."""
        return self.rows // self.rows_per_unit

    @property
    def extremes(self) -> tuple[float, float]:
        """How the replaced unit differs between the two neighbouring batches."""
        return EXTREMES[(self.weights + self.data) % len(EXTREMES)]

    @property
    def factor(self) -> float:
        """The clip norm relative to the units' gradients."""
        return FACTORS[self.weights % len(FACTORS)]

    @property
    def replaced(self) -> slice:
        """The rows of the unit that is replaced."""
        return self.rows_of((self.weights + self.units // 2) % self.units)

    def rows_of(self, unit: int) -> slice:
        """Return the rows of a unit."""
        return slice(unit * self.rows_per_unit, (unit + 1) * self.rows_per_unit)


@dataclass
class Verdict:
    """What became of a case.

    Attributes:
        refusal: the message, if it was refused.
        problems: what is wrong; empty if the case passes.
    """

    refusal: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        """Whether sums were computed."""
        return self.refusal is None


def judge(case: Case, trial: Trial) -> Verdict:
    """Try a case and say what is wrong with what dpvision does; everything outside is as before afterwards."""
    with _everything_restored():
        return _judged(case, trial)


def _judged(case: Case, trial: Trial) -> Verdict:
    batches = [_rows(case, trial, call) for call in range(trial.calls)]
    units = [_unit_gradients(case, trial, call, batch) for call, batch in enumerate(batches)]
    norms = [_norm(g) for found in units for g in found or []]
    usual = statistics.median([norm for norm in norms if math.isfinite(norm) and norm > 0] or [0.1])
    clip_norm = trial.factor * usual

    verdict = Verdict()
    one = _Run(case, trial, clip_norm)
    sums = [one.call(call, _replaced(batch, trial.replaced, trial.extremes[0])) for call, batch in enumerate(batches)]
    two = _Run(case, trial, clip_norm)
    others = [two.call(call, _replaced(batch, trial.replaced, trial.extremes[1])) for call, batch in enumerate(batches)]
    verdict.refusal = one.refusal or two.refusal
    verdict.problems += one.problems + two.problems
    if (one.refusal is None) != (two.refusal is None):
        verdict.problems.append("whether it is refused depends on the data of one unit")
    limit = 2 * clip_norm * (1 + 1e-5)
    for call, (left, right) in enumerate(zip(sums, others, strict=True)):
        if left is not None and right is not None:
            moved = _norm(_minus(left, right)) - _rounding(case, left, right)
            if not moved <= limit:
                verdict.problems.append(f"call {call}: replacing a unit moves the sum by {moved / clip_norm:.2f} C")
    if verdict.refusal is not None:
        verdict.problems += _wrong_words(verdict.refusal)
        return verdict
    if case.refused:
        verdict.problems.append("accepted, though a trace freezes what it reads")
    if verdict.problems:
        return verdict

    exact = _Run(case, trial, clip_norm)
    for call, (batch, gradients) in enumerate(zip(batches, units, strict=True)):
        found = exact.call(call, batch)
        if found is not None and not case.random:
            verdict.problems += _inexact(case, call, found, gradients, clip_norm)
    verdict.problems += exact.problems
    if exact.refusal is not None:
        verdict.problems.append("whether it is refused depends on the data of one unit")
        return verdict
    verdict.problems += _not_removable(case, trial, exact, batches[-1]) if not case.random else []
    verdict.problems += _not_additive(case, trial, exact, batches) if case.random and len(batches) > 1 else []
    for scale in (1.0, 1e4):
        alone = exact.again(_replaced(_only(batches[-1], trial.replaced), slice(None), scale), units=1)
        if alone is not None and not _norm(alone) - _rounding(case, alone) <= clip_norm * (1 + 1e-6):
            verdict.problems.append(f"one unit alone adds {_norm(alone) / clip_norm:.7f} C")
    verdict.problems += [problem for problem in exact.problems if problem not in verdict.problems]
    verdict.problems += _not_fresh(case, trial, exact.own, batches[-1])
    return verdict


def trusting_clipped_sum(
    model: nn.Module, loss_fn: Any, inputs: Any, targets: Any, *, clip_norm: float, **_: int
) -> ClippedSum:
    """Clip and add the gradient of each loss of the batch, in the belief that it is one unit's."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses = loss_fn(_called(model, inputs), targets)
    found = [_gradient(loss, parameters) for loss in losses]
    total = _clipped_and_added(found, {name: p.detach() for name, p in parameters.items()}, clip_norm)
    return ClippedSum({name: value.to(parameters[name].dtype) for name, value in total.items()}, clip_norm)


class _Run:
    """One fresh copy of a case and its calls, until it is refused."""

    def __init__(self, case: Case, trial: Trial, clip_norm: float) -> None:
        self.trial, self.clip_norm = trial, clip_norm
        self.own = _fresh(case, trial)
        self.refusal: str | None = None
        self.problems: list[str] = []

    def call(self, call: int, batch: tuple[Any, Any]) -> Gradients | None:
        """Return one sum of the sequence; before the last one, the owner changes what he likes."""
        if call == self.trial.calls - 1:
            self.own.between(self.own.model, self.own.loss_fn)
        return self.again(batch, seed=call)

    def again(self, batch: tuple[Any, Any], *, seed: int = 0, units: int | None = None) -> Gradients | None:
        """Return one sum, with the same random draws for the same seed; None from the first refusal on."""
        if self.refusal is not None:
            return None
        inputs, targets = _copied(batch)
        before = _state(self.own.model)
        _seed(1000 * self.trial.data + seed)
        try:
            found = dpvision.clipped_sum(
                self.own.model,
                self.own.loss_fn,
                inputs,
                targets,
                clip_norm=self.clip_norm,
                rows_per_unit=self.trial.rows_per_unit,
                microbatch_size=units or self.trial.units,
            )
        except (PrivacyError, ArgumentError) as error:
            self.refusal = str(error)
            return None
        except Exception as error:  # noqa: BLE001 - whatever escapes is what the test is about
            self.refusal = "a foreign error"
            self.problems.append(f"a foreign error: {type(error).__name__}: {str(error)[:200]}")
            return None
        if not all(torch.equal(a, b) for a, b in zip(tree_leaves((inputs, targets)), tree_leaves(batch), strict=True)):
            self.problems.append("the caller's rows were changed")
        changed = _differences(before, _state(self.own.model))
        if changed:
            self.problems.append(f"the model was changed: {', '.join(changed)}")
        sums = {name: value.detach() for name, value in found.gradients.items()}
        if not all(torch.isfinite(value).all() for value in sums.values()):
            self.problems.append("the sum is not finite")
        return sums


def _state(model: nn.Module) -> dict[str, Any]:
    """Return copies of parameters and buffers, and the identities of attributes."""
    state: dict[str, Any] = {name: value.detach().clone() for name, value in _tensors(model)}
    for name, module in model.named_modules():
        values = {} if isinstance(module, torch.jit.ScriptModule) else vars(module)
        state.update({f"{name}.{key}": id(value) for key, value in values.items() if not key.startswith("_")})
    return state


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in tensors if not isinstance(tensor, UninitializedTensorMixin)]


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b

    return [name for name in {**before, **after} if not same(before.get(name), after.get(name))]


def _wrong_words(refusal: str) -> list[str]:
    """Say what is missing in a refusal."""
    if refusal == "a foreign error":
        return []
    problems = []
    if _FOREIGN.search(refusal):
        problems.append(f"the refusal quotes a foreign error: {refusal[:300]}")
    if not _NAMED.search(refusal):
        problems.append(f"the refusal names no place: {refusal[:300]}")
    if not _REMEDY.search(refusal):
        problems.append(f"the refusal names no remedy: {refusal[:300]}")
    return problems


def _inexact(case: Case, call: int, found: Gradients, units: list[Gradients] | None, clip_norm: float) -> list[str]:
    """Compare a sum with that of single units."""
    if units is None:
        return [f"call {call}: accepted, though a row by itself has no gradient"]
    true = _clipped_and_added(units, found, clip_norm)
    error, size = _norm(_minus(found, true)), max(_norm(true), clip_norm)
    if not error <= (1e-2 if case.half else 1e-4) * size:
        return [f"call {call}: the sum is {error / size:.2g} of its norm off"]
    return []


def _clipped_and_added(units: list[Gradients], like: Gradients, clip_norm: float) -> Gradients:
    """Return the sum of the units' gradients, each scaled to the clip norm at most, without those not finite."""
    total = {name: torch.zeros_like(value, dtype=_wide(value)) for name, value in like.items()}
    for gradient in units:
        norm = _norm(gradient)
        if math.isfinite(norm):
            factor = min(1.0, clip_norm / norm if norm else 1.0)
            total = {name: so_far + factor * gradient[name] for name, so_far in total.items()}
    return total


def _not_removable(case: Case, trial: Trial, run: _Run, batch: tuple[Any, Any]) -> list[str]:
    """Remove one unit: the sum moves by one clip norm at most."""
    removed = range(trial.rows)[trial.replaced]
    kept = [row for row in range(trial.rows) if row not in removed]
    before, after = run.again(batch), run.again(tree_map(lambda x: x[kept], batch))
    if before is None or after is None:
        return ["whether it is refused depends on the number of rows"]
    moved = _norm(_minus(before, after)) - _rounding(case, before, after)
    within = moved <= run.clip_norm * (1 + 1e-5)
    return [] if within else [f"removing a unit moves the sum by {moved / run.clip_norm:.2f} C"]


def _not_fresh(case: Case, trial: Trial, used: Own, batch: tuple[Any, Any]) -> list[str]:
    """Call the model itself, as its owner would, and compare it with a fresh one: the calls left no trace."""

    def losses(own: Own) -> Tensor:
        inputs, targets = _copied(batch)
        _seed(trial.data)
        return own.loss_fn(_called(own.model, inputs), targets).detach()

    try:
        found = losses(used)
        fresh = _fresh(case, trial)
        fresh.between(fresh.model, fresh.loss_fn)
        true = losses(fresh)
    except Exception as error:  # noqa: BLE001 - whatever escapes is a trace
        return [f"the model cannot be called any more: {type(error).__name__}"]
    return [] if torch.equal(found, true) else ["the model does not do what it did before the calls"]


def _not_additive(case: Case, trial: Trial, run: _Run, batches: list[tuple[Any, Any]]) -> list[str]:
    """With the same draws, what replacing a unit changes does not depend on the other units."""
    one, other = batches[:2]
    unit = trial.replaced
    changes: list[Gradients] = []
    for batch in (one, other):
        with_one, with_other = _with_unit(batch, unit, one), _with_unit(batch, unit, other)
        left, right = run.again(with_one, seed=7), run.again(with_other, seed=7)
        if left is None or right is None:
            return ["whether it is refused depends on the data of one unit"]
        changes.append(_minus(left, right))
    error = _norm(_minus(*changes))
    return (
        []
        if error <= 1e-4 * trial.rows * run.clip_norm
        else [f"what a unit adds differs by {error / run.clip_norm:.2g} C with other units beside it"]
    )


def _unit_gradients(case: Case, trial: Trial, call: int, batch: tuple[Any, Any]) -> list[Gradients] | None:
    """Return each unit's gradient, alone in front of a fresh model: in float64, or as it is where that fails."""
    for dtype in (torch.float64, None):
        try:
            units = (_only(batch, trial.rows_of(unit)) for unit in range(trial.units))
            return [_unit_gradient(case, trial, call, unit, dtype) for unit in units]
        except Exception:  # noqa: BLE001, S112 - a model may be unable to do either; the judge knows what that means
            continue
    return None


def _unit_gradient(case: Case, trial: Trial, call: int, unit: tuple[Any, Any], dtype: torch.dtype | None) -> Gradients:
    own = _fresh(case, trial)
    if call == trial.calls - 1:
        own.between(own.model, own.loss_fn)
    model, (inputs, targets) = own.model, _copied(unit)
    if dtype is not None:
        model = model.to(dtype) if not _is_complex(model) else model.double()
        inputs, targets = tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, (inputs, targets))
        if isinstance(own.loss_fn, nn.Module):
            own.loss_fn.to(dtype)
    _seed(1000 * trial.data + call)
    with _default_dtype(dtype):
        outputs = _called(model, inputs)
        loss = own.loss_fn(outputs, targets).mean()
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return _gradient(loss, parameters)


def _gradient(loss: Tensor, parameters: dict[str, nn.Parameter]) -> Gradients:
    """Return the gradient of one number in float64; the graph is kept for the next one."""
    found = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return {name: g.detach().to_dense().to(_wide(g)) for name, g in zip(parameters, found, strict=True)}


def _called(model: nn.Module, inputs: Any) -> Any:
    """Call a model as dpvision does: a dict by keyword, a tuple by position."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _fresh(case: Case, trial: Trial) -> Own:
    """Build a case with random weights, none of which is zero by design."""
    CLEANUP.close()
    _seed(trial.weights)
    own = case.make()
    generator = torch.Generator().manual_seed(trial.weights)
    with torch.no_grad():
        for parameter in own.model.parameters():
            if not isinstance(parameter, UninitializedTensorMixin):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return own


def _rows(case: Case, trial: Trial, call: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(10_000 * trial.data + 100 * trial.weights + call)
    return _fresh(case, trial).rows(trial.rows, generator)


def _replaced(batch: tuple[Any, Any], unit: slice, scale: float) -> tuple[Any, Any]:
    """Return the batch with another unit in one place: its inputs scaled, its target another one."""
    if scale == 1.0:
        return batch

    def inputs(x: Tensor) -> Tensor:
        x = x.clone()
        x[unit] = x[unit] * scale if x.is_floating_point() else (x[unit] + int(abs(scale)) + 1) % 10
        return x

    def targets(x: Tensor) -> Tensor:
        x = x.clone()
        if x.is_floating_point():
            x[unit] = x[unit].flip(-1)
        else:
            x[unit] = (x[unit] + 1) % (CLASSES if x.dim() == 1 else 2)
        return x

    return tree_map(inputs, batch[0]), tree_map(targets, batch[1])


def _only(batch: tuple[Any, Any], unit: slice) -> tuple[Any, Any]:
    return tree_map(lambda x: x[unit], batch)


def _with_unit(batch: tuple[Any, Any], unit: slice, other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the batch with one unit of another batch."""

    def changed(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        x[unit] = y[unit]
        return x

    return tree_map(changed, batch, other)


def _copied(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    return tree_map(lambda x: x.detach().clone(), batch)


def _minus(a: Gradients, b: Gradients) -> Gradients:
    assert list(a) == list(b)
    return {name: a[name].to(_wide(a[name])) - b[name].to(_wide(b[name])) for name in a}


def _norm(gradients: Gradients) -> float:
    return math.sqrt(sum(float(g.to(_wide(g)).abs().square().sum()) for g in gradients.values()))


def _rounding(case: Case, *sums: Gradients) -> float:
    """Return by how much sums in 16 bits may be rounded when they are handed out."""
    if not case.half:
        return 0.0
    eps = max(torch.finfo(value.dtype).eps for found in sums for value in found.values())
    return 2 * eps * sum(_norm(found) for found in sums)


def _wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _is_complex(model: nn.Module) -> bool:
    return any(parameter.is_complex() for parameter in model.parameters())


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _everything_restored() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            CLEANUP.close()
            random.setstate(python)
            np.random.set_state(numpy)
