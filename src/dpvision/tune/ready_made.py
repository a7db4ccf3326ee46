"""Ready-made searches: those of the papers, and cheaper ones. Each is a set of defaults for ``SearchSettings``."""

from __future__ import annotations

from typing import Any, Final

from dpvision.errors import ArgumentError, did_you_mean

_GROUPS = "choice:32,8,16,64,2048"  # 2048 is instance norm: no layer has more channels

READY_MADE: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "rate_and_batch": (
        "learning rate × batch on a grid (ScaleNorm thesis, figure 5.1)",
        {
            "space": {"learning_rate": "log:0.0001:0.1:4", "expected_batch_size": "choice:256,512,1024,2048"},
            "sampler": "grid",
        },
    ),
    "group_sizes": (
        "number of groups, the same in every stage: 32, then 8 to 64, then instance norm (ScaleNorm thesis)",
        {"space": {"option.groups": _GROUPS}, "sampler": "grid"},
    ),
    "group_sizes_by_stage": (
        "number of groups in each of four stages, 15 of 625 combinations (ScaleNorm thesis); for ResNet-9",
        {
            "space": {f"option.groups.{stage}": _GROUPS for stage in range(1, 5)},
            "sampler": "tpe",
            "trials": 15,
            "budget_share": 0.5,
        },
    ),
    "clip_and_epochs": (
        "clip norm × epochs by a Bayesian search of 15 runs (SmoothNets)",
        {
            "space": {"clip_norm": "float:0.1:20", "epochs": "choice:90,120,180"},
            "sampler": "tpe",
            "trials": 15,
            "budget_share": 0.5,
        },
    ),
    "component_study": (
        "clip norm × epochs for one change to a network: 15 runs, ended after 15 looks without progress (SmoothNets)",
        {
            "space": {"clip_norm": "float:0.1:10", "epochs": "choice:15,30"},
            "sampler": "tpe",
            "trials": 15,
            "budget_share": 0.5,
            "pruner": "patience",
        },
    ),
    "mean_var": (
        "ten draws of Mean-Var initial weights, compared after a tenth of their steps (Making the shoe fit); "
        "needs --transfer-weights, --trained all and --initialisation mean_var",
        {"space": {"transfer.draw": "int:0:9:10"}, "sampler": "grid", "early": 0.1, "budget_share": 0.2},
    ),
    "linear_scaling": (
        "rate × steps as one number: two stages at small epsilons, extrapolated (Panda et al.)",
        {
            "space": {"learning_rate": "times:0.1:10"},
            "sampler": "grid",
            "trials": 6,
            "rule": "linear_scaling",
            "budget_share": 0.2,
        },
    ),
    "tan": (
        "learning rate at a sixteenth of the batch and the noise, on public --search-data (TAN)",
        {"space": {"learning_rate": "times:0.1:10"}, "sampler": "random", "trials": 10, "batch_divisor": 16.0},
    ),
}
"""What each is for, and its settings; flags replace them one by one."""


def ready_made(name: str) -> dict[str, Any]:
    """Return the settings of a ready-made search.

    Args:
        name: a key of ``READY_MADE``.

    Raises:
        ArgumentError: there is no such search.
    """
    if name not in READY_MADE:
        raise ArgumentError(f"there is no ready-made search {name!r}. {did_you_mean(name, READY_MADE)}")
    return dict(READY_MADE[name][1])
