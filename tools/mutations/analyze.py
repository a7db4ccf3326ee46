"""Breakages of the analyses: each lets values of private images out."""

from __future__ import annotations

from tools.mutations.mutation import Mutation, mutations

ANALYZE: tuple[Mutation, ...] = (
    *mutations(
        "analyze/test_analysed_run",
        "analyze/analysed_run.py",
        ("any test images are public enough", "    if not test_is_public(config):", "    if False:"),
        (
            "the released name of the data decides",
            "require_public_test(parse_config(RunFolder.open(run).read_whole_config()))",
            "require_public_test(released.config)",
        ),
        (
            "results on private images have no stamp",
            "*((UNSAFE_STAMP,) if self.unsafe else ())",
            "*(() if self.unsafe else ())",
        ),
        (
            "weights without privacy have no stamp",
            "*(() if private else (NO_PRIVACY_STAMP,))",
            "*((NO_PRIVACY_STAMP,) if private else ())",
        ),
    ),
    *mutations(
        "analyze/test_analysed_run",
        "analyze/analyses.py",
        (
            "results on private images go anywhere",
            "    _require_private(runs, output)\n",
            "",
        ),
        (
            "files about private images are readable by all",
            "mode=0o600 if unsafe else 0o644",
            "mode=0o644",
        ),
    ),
    *mutations(
        "analyze/test_analysed_run",
        "data/splits.py",
        (
            "test images that came with private ones are watched",
            "splits.test.images if test_is_public(config) and not splits.held_out else None",
            "splits.test.images",
        ),
    ),
    *mutations(
        "analyze/test_analysed_run",
        "training/trainer.py",
        (
            "a callback gets the weights themselves",
            "model=copy.deepcopy(session.model).eval()",
            "model=session.model.eval()",
        ),
    ),
)
