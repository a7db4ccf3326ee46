"""Breakages of own training loops: draws, resumes, counts, and what surrounds a step."""

from __future__ import annotations

from tools.mutations.mutation import mutations

PRIVATE_RUN = (
    *mutations(
        "training/test_private_run",
        "training/private_run.py",
        (
            "a batch is used twice",
            "        if batch.step != self.steps_taken:\n            raise",
            "        if False:\n            raise",
        ),
        ("a batch of another run passes", "or not batch.comes_from(draws)", ""),
        ("own loop: threads step at once", "    @_alone()\n", ""),
        ("own loop: a step may call a step", "    if threading.get_ident() in _stepping:", "    if False:"),
        ("batches may be passed over", "            if self.steps_taken == step:", "            if False:"),
        (
            "own loop: a resumed run repeats its noise",
            'ledger.header["run_id"], f"fork={fork}"),',
            'ledger.header["run_id"], "fork=0"),',
        ),
        ("own loop: a resumed run is no fork", "fork, seed = ledger.forks + 1,", "fork, seed = ledger.forks,"),
        (
            "own loop: an interrupted step can be repeated",
            "if state.ledger.has_charge(step=batch.step, fork=state.fork):",
            "if False:",
        ),
        ("own loop: lost steps are given back", "privatizer.planned - privatizer.spent))", "privatizer.planned))"),
        ("own loop: the seed is released", 'if name != "seed"}', "}"),
        (
            "own loop: a count is not charged",
            "charges = [] if counted is None else [counted.event]",
            "charges = []",
        ),
        (
            "own loop: a count of another folder passes",
            "    if counted is None and claimed is not None:",
            "    if False:",
        ),
        (
            "own loop: a folder's count is ignored",
            "    if counted is not None and (claimed, mechanism.num_units) != ",
            "    if False and (claimed, mechanism.num_units) != ",
        ),
        ("own loop: units are counted again", "    if known is not None:\n        return known\n", ""),
    ),
    *mutations(
        "training/test_private_run",
        "privacy/mechanism.py",
        (
            "own loop: a count is not in the plan",
            "extra=() if counted is None else ((counted.event, 1),),",
            "extra=(),",
        ),
    ),
    *mutations(
        "training/test_private_run",
        "privacy/torch_optimizer.py",
        ("an optimizer step outside passes", "        if not self._inside:", "        if False:"),
        ("leftover gradients pass", "        if filled:", "        if False:"),
        ("own loop: foreign parameters are moved", "        if not held <= own:", "        if False:"),
        ("own loop: half precision is trained", "        if rough:", "        if False:"),
        (
            "own loop: a schedule is stepped outside",
            "        if self._schedule_left != self._schedule_now():",
            "        if False:",
        ),
        ("own loop: a changed model passes", "        if changed:", "        if False:"),
        ("own loop: a written state of the optimizer passes", "        if written:", "        if False:"),
        (
            "own loop: optimizers take a second gradient",
            '    if hasattr(rule, "first_step") and hasattr(rule, "second_step"):',
            "    if False:",
        ),
    ),
    *mutations(
        "privacy/test_private_step",
        "privacy/private_step.py",
        ("own loop: a copy repeats the noise", "    def __reduce__(self)", "    def reduced(self)"),
    ),
    *mutations(
        "training/test_private_run",
        "gradients/plan.py",
        ("own loop: a step may pay for noise alone", "    _require_gradients(network, rows)\n", ""),
    ),
    *mutations(
        "data/test_dataset_batches",
        "data/dataset_batches.py",
        (
            "own rows: rows and views of a unit are summed",
            "(there_UR / np.maximum(there_UR.sum(1, keepdims=True), 1))",
            "(there_UR * 1.0)",
        ),
        ("own rows: views share random numbers", "            _seed_generators(seed)\n", ""),
        (
            "own rows: all steps have the same views",
            'most * views, "augmentation", step)',
            'most * views, "augmentation")',
        ),
        (
            "own rows: workers give other draws",
            "            if self._requests.waiting is not requests:",
            "            if False:",
        ),
        ("own rows: reading moves the loop's generators", "        torch.set_rng_state(states[0])\n", ""),
        (
            "own rows: one owner may have two names",
            "    if len({type(name) for name in names}) > 1:",
            "    if False:",
        ),
        ("own rows: a missing owner is an owner", "    if isinstance(value, int):\n", "    if True:\n"),
        (
            "own rows: whole numbers with a point are other owners",
            "        value = int(value)  # as",
            "        pass  # as",
        ),
        ("own rows: collate may make more rows", "        if number_of_rows(tree) != 1:", "        if False:"),
    ),
    *mutations(
        "gradients/test_clipped_sum",
        "gradients/devices.py",
        (
            "own loop: a step computes in half precision",
            "            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):",
            "            if False:",
        ),
    ),
)
