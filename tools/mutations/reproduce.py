"""Breakages of what several runs claim together, of logs, and of what a plan shows."""

from __future__ import annotations

from tools.mutations.mutation import mutations

REPRODUCE = (
    *mutations(
        "papers/test_table_cost",
        "papers/table_cost.py",
        ("failed and stopped runs are free", "if path.is_dir())", 'if (path / "certificate.json").exists())'),
        ("unknown data is nobody's", "composed([*group, *unknown])", "composed(group)"),
        (
            "parts of a dataset are another one",
            '"cifar100" if source is not None and subset_of(source) is not None else source',
            "source",
        ),
        ("every run saw its own data", "setdefault(bill.source, [])", "setdefault(bill.run, [])"),
    ),
    *mutations(
        "papers/test_table_cost",
        "release/composition.py",
        (
            "no stamp voids",
            "voids=tuple(stamp for stamp in stamps if stamp not in passed),\n            run_id",
            "voids=(),\n            run_id",
        ),
        ("a certificate's own stamps are not read", "    if path.exists():\n", "    if False:\n"),
        (
            "a ledger that was cut is believed",
            "            require_mark(entries, length=length, head=head, path=folder.ledger_path)\n",
            "            pass\n",
        ),
        (
            "what can't be read is free",
            "        return Bill(run=name, source=None, voids=(UNREADABLE,))\n",
            "        return None\n",
        ),
        ("a ledger that was taken away is free", "if not marks and not folder", "if not folder"),
        ("only the first run counts", "charge for bill in bills for", "charge for bill in bills[:1] for"),
        (
            "adjacencies are mixed",
            "    if len({(bill.adjacency, bill.privacy_unit) for bill in bills}) > 1:\n",
            "    if False:\n",
        ),
    ),
    *mutations(
        "release/test_composition",
        "release/composition.py",
        ("different data never add up", "    if not disjoint:\n", "    if False:\n"),
        ("disjoint data cost the least", "worst = max(groups", "worst = min(groups"),
        ("unknown data is disjoint from all", "if bill.source in (name, None)]", "if bill.source == name]"),
        ("a sum is below its parts", "delta = min(deltas", "delta = max(deltas"),
        ("earlier private runs are free", "if run not in known]", "if False]"),
        ("a disjoint void is forgotten", 'or everything["void"] is not None:\n', "or False:\n"),
    ),
    *mutations(
        "release/test_run_states",
        "release/comparison_page.py",
        ("a release that does not verify counts", "    if not problems:\n        return run\n", "    return run\n"),
        ("the same images pass for disjoint", "and data == other_data:", "and False:"),
    ),
    *mutations(
        "release/test_run_states",
        "release/run_states.py",
        ("a damaged run is free", "voids=(UNREADABLE,)) if spent else None", "voids=()) if False else None"),
        ("a run that is not for release is finished", '        return "unsafe", reasons[0]\n', "        pass\n"),
    ),
    *mutations(
        "training/test_run_logs",
        "training/run_logs.py",
        ("a log takes unsafe values", '        and not name.startswith("unsafe_")\n', ""),
        (
            "events have times",
            'b"\\x09" + struct.pack("<d", self._time)',
            'b"\\x09" + struct.pack("<d", time.time())',
        ),
        (
            "services are told at once",
            '        self._points.append((int(point["step"]), values))\n',
            '        self._points.append((int(point["step"]), values))\n        self.finished()\n',
        ),
    ),
    *mutations(
        "training/test_run_logs",
        "training/start.py",
        ("the baseline is logged", "told = callback.of_baseline()", "told = callback"),
    ),
    *mutations(
        "training/test_resume_elsewhere",
        "storage/run_folder.py",
        (
            "a damaged release is finished",
            "        if release_files(self.release) != sorted(hashes):\n",
            "        if False:\n",
        ),
    ),
    *mutations(
        "papers/test_reproduce papers/test_table_cost",
        "papers/reproduce.py",
        ("a run without its last steps is a figure", '    if outcome != "finished":\n', "    if False:\n"),
        ("a smoke test passes for a release", 'seed = repeat if job.scale == "quick" else None', "seed = None"),
        ("no ledger is read", "    bills = read_bills(", "    bills = () and read_bills("),
        ("a seed set by hand passes", "smoke_test=job.scale ==", "smoke_test=job.scale !="),
    ),
    *mutations(
        "papers/test_reproduce papers/test_table_cost",
        "papers/reproduce.py",
        ("reasons are written down", '"kind": self.kind', '"kind": self.reason'),
        ("a changed release is a figure", "    if not found.ok:\n", "    if False:\n"),
        (
            "a stopped run is a finished one",
            'return bool(curve) and curve[-1].get("step") == config.privacy.steps',
            "return True",
        ),
    ),
    *mutations(
        "papers/test_reproduce papers/test_table_cost",
        "papers/table_page.py",
        ("a table rounds to the nearest", "else rounded_up(value)", 'else f"{value:.4g}"'),
        ("no row is marked", '"" if all(run["for_release"] for run in row["runs"]) else', '"" if True else'),
        ("a void row looks free", 'return "void" if together["void"] else', 'return "0" if together["void"] else'),
    ),
    *mutations(
        "cli/test_plan_chart accounting/test_budget_plan",
        "cli/plan_command.py",
        (
            "the search's cost is rounded to the nearest",
            "{rounded_up(values['search']['epsilon'])} by itself",
            "{values['search']['epsilon']:.4g} by itself",
        ),
        (
            "a scaled epsilon is rounded to the nearest",
            'rounded_up(v) if name == "epsilon" else _short(v)',
            "_short(v)",
        ),
        (
            "papers are counted by add_remove always",
            "replace(each.mechanism, adjacency=spent.adjacency)",
            "each.mechanism",
        ),
    ),
    *mutations(
        "papers/test_recipe",
        "cli/train_command.py",
        (
            "a quick run is not stamped",
            "seed = 0 if flags.quick and flags.unsafe_seed is None else flags.unsafe_seed",
            "seed = flags.unsafe_seed",
        ),
    ),
)
