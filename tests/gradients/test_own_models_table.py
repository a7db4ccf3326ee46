"""Every model of the tables: clean ones are accepted and exact, hostile ones refused, or exact and separable.

The fast tests try each kind of danger once. The slow ones try every hostile case with 30 random weights,
clean ones with 7, and batches of 2 to 64 rows, 5 of them in a row.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpvision
from clean_models import CLEAN
from hostile_models import HOSTILE
from hostile_table import Sandwich, linear_own
from model_cases import Case
from separability_oracle import Trial, Verdict, judge, trusting_clipped_sum

# Old ways of building models warn; what they compute is all that matters here.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = (8, 33, 2, 64, 3, 17, 5)
WEIGHTS = 30

QUICK_CLEAN = (
    "cnn", "cnn with dropout", "in-place activations", "resnet", "convnext", "stochastic depth",
    "u-net with Dice of each image", "vit", "lstm over image rows",
    "tied weights and a layer called twice", "loss by index",
)  # fmt: skip
QUICK_HOSTILE = (
    "rows flipped and put back", "rows sorted and put back",
    "rows by negative dimension", "pairs of rows folded", "flattened and convolved",
    "as_strided over rows", "batch mean", "batch maximum", "softmax over rows", "softmax without a dimension",
    "weights by place", "divided by the number of rows", "mixing from 2 rows on",
    "mixing from 33 rows on", "mixing from 5 rows on, by slicing",
    "branch on the maximum", "branch without a branch", "images scaled if one is bright",
    "mixing with gradients only", "mixing outside of an export", "mixup by Python's coin",
    "mixup with a random partner", "mixup by the clock", "batch-mean dropout",
    "previous batch in an attribute that is None at first", "previous batch in a list", "previous batch in a buffer",
    "previous batch in a closure", "batch norm", "batch norm by hand", "batch norm with momentum zero",
    "group norm of rows as channels", "loss: InfoNCE", "loss: weights by class frequency",
    "loss: the mean for every row", "loss: broadcast by mistake", "loss: a callable object that starts to mix",
    "loss: a default that starts to mix", "loss: a closure that changes its temperature",
    "changed later: a second hook on a hooked module", "changed later: a setting inside an object",
    "changed later: forward of the class", "hook: a backward hook that mixes", "hook of a tensor that mixes",
    "autograd function: mixing backward", "autograd function: straight through", "operation of one's own",
    "checkpoint, reentrant: honest", "checkpoint, not reentrant: mixing", "jit: scripted, mixing", "sparse embedding",
    "complex parameters", "parametrization: spectral norm", "bfloat16",
    "attention with batch_first forgotten", "attention of two dimensions", "a layer called twice, rows rolled between",
    "row numbers: zeros like them", "rolled by the number of rows", "attention to keys of another rank",
    "memory that is not filled", "written through an expanded view by a mask", "random slopes for negative entries",
    "first labels kept in an object", "first rows kept, if they are not synthetic",
    "changed later: a global", "changed later: the environment", "branch that hides an error",
    "changed later: a backward hook on all modules", "in-place sum of neighbours", "model writes into its inputs",
    "one mask for all rows", "depth that is stochastic for all rows at once", "written through a hidden expansion",
    "calls counted through a hidden view: einsum", "calls counted through a hidden view: type_as",
    "calls counted through a hidden view: dropout that is off",
    "running statistics of a constant, kept outside of the model",
)  # fmt: skip


def of(cases: list[Case], names: tuple[str, ...] | None = None) -> list[object]:
    """Return cases as parameters of a test."""
    chosen = cases if names is None else [case for case in cases if case.name in names]
    assert names is None or len(chosen) == len(names)
    return [pytest.param(case, id=case.name) for case in chosen]


def rows_for(case: Case) -> int:
    """Return a batch size that is large enough for the case to show."""
    return 64 if "33" in case.name else 8


@pytest.mark.parametrize("case", of(CLEAN, QUICK_CLEAN))
def test_a_clean_model_is_accepted_and_its_sum_is_exact(case: Case) -> None:
    verdict = judge(case, Trial())
    assert verdict == Verdict(), case.why


@pytest.mark.parametrize("case", of(CLEAN, ("cnn with dropout", "vit", "two inputs and two outputs")))
def test_a_clean_model_is_exact_for_units_of_several_rows(case: Case) -> None:
    assert judge(case, Trial(rows=12, rows_per_unit=3)) == Verdict(), case.why


@pytest.mark.parametrize("case", of(HOSTILE, QUICK_HOSTILE))
def test_a_hostile_model_is_refused_or_exact_and_separable(case: Case) -> None:
    assert judge(case, Trial(rows=rows_for(case))).problems == [], case.why


@pytest.mark.slow
@pytest.mark.parametrize("case", of(CLEAN))
def test_every_clean_model_is_accepted_with_any_weights_and_size(case: Case) -> None:
    for weights, rows in enumerate(SIZES):
        trial = Trial(weights=weights, data=weights % 5, rows=rows, calls=5)
        assert judge(case, trial) == Verdict(), trial


@pytest.mark.slow
@pytest.mark.parametrize("case", of(HOSTILE))
def test_every_hostile_model_is_refused_or_separable_with_any_weights(case: Case) -> None:
    refused = 0
    for weights in range(WEIGHTS):
        trial = Trial(weights=weights, data=weights % 5, rows=SIZES[weights % len(SIZES)], calls=5)
        verdict = judge(case, trial)
        assert verdict.problems == [], trial
        refused += not verdict.accepted
        if refused == 3:  # at 8, 33 and 2 rows: what refuses it is the code, which other weights and sizes share
            return


# ----------------------------------------------------------------------------------------------------- the judge itself

# An engine that trusts computes these right: they are honest, or they fool engines of other designs.
TRUSTED_WHY = ("honest", "the outputs are separable", "proved once, changed afterwards")
TRUSTED = (
    "autograd function: custom vmap rule", "mixing if not contiguous, convolutions", "mixing by the caller's name",
    "loss: rows in another order", "loss: losses sorted", "loss: has parameters of its own",
    "hook: a parameter hook that scales", "mixing by depth of the stack", "diagonal at the number of rows",
    "memory that is not filled",
)  # fmt: skip
FOUND = [case for case in HOSTILE if not (case.why.startswith(TRUSTED_WHY) or case.name in TRUSTED)]


def trusted(case: Case, trial: Trial, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """Judge an engine that checks nothing."""
    monkeypatch.setattr(dpvision, "clipped_sum", trusting_clipped_sum, raising=False)
    return judge(case, trial)


def sandwich(mix: object, **facts: bool) -> Case:
    return Case("a sandwich", "for this test", lambda: linear_own(Sandwich(mix)), **facts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("case", of(CLEAN, ("cnn", "cnn with dropout", "vit", "loss by gather")))
def test_the_judge_passes_a_trusting_engine_on_clean_models(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trusted(case, Trial(), monkeypatch) == Verdict()


@pytest.mark.parametrize(
    ("share", "is_found"), [(0.0, False), (1e-2, True), (0.5, True)], ids=["off", "a little", "half"]
)
def test_the_judge_finds_mixing_unless_it_is_switched_off(
    share: float, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = trusted(sandwich(lambda x: x + share * x.roll(1, 0)), Trial(), monkeypatch)
    assert verdict.accepted
    assert bool(verdict.problems) == is_found


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_judge_finds_mixing_under_dropout(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = lambda x: nn.functional.dropout(x, 0.3) + share * x.roll(1, 0)  # noqa: E731
    verdict = trusted(sandwich(mix, random=True), Trial(), monkeypatch)
    assert bool(verdict.problems) == bool(share)


@pytest.mark.parametrize(
    ("break_it", "word"),
    [
        (lambda sums, clip_norm: {name: 1.001 * value for name, value in sums.items()}, "off"),
        (lambda sums, clip_norm: {name: value / 0 for name, value in sums.items()}, "not finite"),
        (lambda sums, clip_norm: {name: 9 * clip_norm * torch.randn_like(g) for name, g in sums.items()}, "moves"),
    ],
    ids=["scaled", "infinite", "noisy"],
)  # fmt: skip
def test_the_judge_finds_a_wrong_sum(break_it: object, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, clip_norm: float, **settings: object) -> dpvision.ClippedSum:
        found = trusting_clipped_sum(*args, clip_norm=clip_norm, **settings)  # pyright: ignore[reportArgumentType]
        torch.seed()
        return dpvision.ClippedSum(break_it(found.gradients, clip_norm), clip_norm)  # pyright: ignore[reportCallIssue]

    monkeypatch.setattr(dpvision, "clipped_sum", wrong, raising=False)
    assert any(word in problem for problem in judge(sandwich(lambda x: x), Trial()).problems)


def test_the_judge_finds_foreign_errors_and_refusals_without_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: Exception) -> object:
        def refuse(*args: object, **settings: object) -> None:
            raise error

        return refuse

    for error, word in [
        (RuntimeError("size mismatch"), "a foreign error"),
        (dpvision.errors.PrivacyError("model: mixes units."), "no remedy"),
        (dpvision.errors.PrivacyError("model: GuardOnDataDependentSymNode. Use another."), "quotes a foreign error"),
    ]:
        monkeypatch.setattr(dpvision, "clipped_sum", raising(error), raising=False)
        problems = judge(sandwich(lambda x: x), Trial()).problems
        assert any(word in problem for problem in problems), problems
    good = dpvision.errors.PrivacyError("first (Linear): mixes units. Use one row at a time.")
    monkeypatch.setattr(dpvision, "clipped_sum", raising(good), raising=False)
    assert judge(sandwich(lambda x: x), Trial()).problems == []


@pytest.mark.slow
@pytest.mark.parametrize("case", of(FOUND))
def test_the_judge_finds_every_hostile_model_in_a_trusting_engine(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = (Trial(weights=w, data=w % 5, rows=rows, calls=3) for w, rows in enumerate((8, 33, 17, 64, 5, 8, 8, 8)))
    assert any(trusted(case, trial, monkeypatch).problems for trial in trials)


def test_the_tables_have_no_name_twice() -> None:
    names = [case.name for case in (*CLEAN, *HOSTILE)]
    assert len(names) == len(set(names))
    assert len(CLEAN) >= 25
    assert len(HOSTILE) >= 300
