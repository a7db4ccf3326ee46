"""Breakages of runs in several processes: shares, what must be the same everywhere, and who may release."""

from __future__ import annotations

from tools.mutations.mutation import Mutation, mutations

_RUNS = "tests/training/test_distributed.py"

RANKS = (
    *mutations(
        "gradients/test_partial_sums",
        "gradients/partial_sums.py",
        (
            "ranks: shares overlap",
            "range(self.rank * self.parts // self.size, (self.rank + 1) * self.parts // self.size)",
            "range(self.rank * self.parts // self.size, min(self.parts, (self.rank + 1) * self.parts // self.size + 1))",
        ),
        (
            "ranks: a share is left out",
            "    for rank in range(1, ranks.size):\n        for first",
            "    for rank in range(1, min(ranks.size, 5)):\n        for first",
        ),
        (
            "ranks: sums are added in the order of ranks",
            "if left.size != branch.size or left.first % (2 * left.size):",
            "if left.size != branch.size:",
        ),
        ("ranks: what was not sent is what was in memory", "names),), torch.nan, dtype", "names),), 0.0, dtype"),
        ("ranks: sums are sent in single precision", "sums.pop(name).view(-1)", "sums.pop(name).float().view(-1)"),
    ),
    *mutations(
        "test_ranks",
        "ranks.py",
        ("ranks: facts may differ", "if differing else None", "if False else None"),
        ("ranks: draws and weights may differ", "if problem is None and other:", "if False and other:"),
        (
            "ranks: restarted processes meet those that ended",
            "own, deadline = secrets.token_hex(16), ",
            'own, deadline = f"rank {rank}", ',
        ),
        (
            "ranks: pieces of work belong to two ranks",
            "-(-(rank + 1) * count // self.size))",
            "min(count, 1 - (-(rank + 1) * count // self.size)))",
        ),
    ),
    Mutation(
        "ranks: noise of every rank is summed",
        "gradients/clipped_sum.py",
        "    send_branches(tree, ranks)\n",
        "    for branch in tree.branches:\n"
        "        for value in (branch.sums or {}).values():\n"
        "            value.add_(torch.randn_like(value), alpha=0.7 * clip_norm)\n"
        "    send_branches(tree, ranks)\n",
        (f"{_RUNS}::test_the_variance_of_the_noise_does_not_grow_with_processes",),
    ),
    Mutation(
        "ranks: a step is charged while another rank fails",
        "gradients/clipped_sum.py",
        "    if ranks.several:\n        rounded",
        "    if ranks.several and problem is None:\n        rounded",
        (f"{_RUNS}::test_an_error_in_one_process_is_raised_in_all_charges_nothing_and_can_be_repeated",),
    ),
    Mutation(
        "ranks: weights that differ are summed",
        "gradients/clipped_sum.py",
        "2 * int(words.sum(dtype=torch.int64))",
        "2 * int(words.numel())",
        (f"{_RUNS}::test_weights_that_differ_between_processes_are_not_summed",),
    ),
    Mutation(
        "ranks: random layers depend on the number of ranks",
        "gradients/clipped_sum.py",
        "            torch.manual_seed(seeds[part])\n",
        "",
        (f"{_RUNS}::test_an_own_loop_has_the_same_bits_for_one_two_and_four_processes",),
    ),
    Mutation(
        "ranks: own loops of other rows are summed",
        "training/followed_run.py",
        '        ranks.agree({"data": found})\n',
        "",
        (_RUNS,),
    ),
    Mutation(
        "ranks: processes may draw other rows",
        "gradients/clipped_sum.py",
        "        sizes.first = int.from_bytes(rows_digest(first.inputs, first.targets)[:7])",
        "        sizes.first = 0",
        (_RUNS,),
    ),
    Mutation(
        "ranks: followers may have other data and code",
        "training/follower.py",
        "        self._ranks.agree(binding)\n\n    def _take",
        "\n    def _take",
        (f"{_RUNS}::test_a_process_with_other_data_stops_all_before_anything_is_written",),
    ),
    Mutation(
        "ranks: other data is trained on",
        "training/follower.py",
        "    ranks.settle()\n    ranks.agree(binding)",
        '    ranks.settle()\n    ranks.agree({"run": binding["run"]})',
        (f"{_RUNS}::test_a_process_with_other_data_stops_all_before_anything_is_written",),
    ),
    Mutation(
        "ranks: other settings pass",
        "training/follower.py",
        '"settings": "" if asked is None else asked.digest(),',
        '"settings": "",',
        (f"{_RUNS}::test_a_process_with_other_settings_stops_all",),
    ),
    Mutation(
        "ranks: a step without a lost share is charged",
        "ranks.py",
        "        except (RuntimeError, OSError) as error:  # torch's network errors are RuntimeErrors\n            self._lost(error)",
        "        except (RuntimeError, OSError):\n            pass",
        (f"{_RUNS}::test_a_process_that_hangs_stops_the_run_within_the_timeout",),
    ),
    Mutation(
        "ranks: sums of another kind of processor are replayed",
        "training/run_fingerprint.py",
        '        "processor": processor(),\n',
        "",
        ("tests/training/test_run_fingerprint.py",),
    ),
    Mutation(
        "ranks: a job continues a run with other settings",
        "cli/train_command.py",
        "if found.asked_for() != request_digest(",
        "if False and found.asked_for() != request_digest(",
        ("tests/cli/test_train_command.py::test_a_job_does_not_continue_a_run_with_other_settings_or_of_another_job",),
    ),
    Mutation(
        "ranks: a job continues the run of another",
        "cli/train_command.py",
        "or found.started_by() not in (job_name(), None):",
        "or False:",
        ("tests/cli/test_train_command.py::test_a_job_does_not_continue_a_run_with_other_settings_or_of_another_job",),
    ),
    Mutation(
        "ranks: a lost start that charged is removed",
        "storage/run_folder.py",
        "        if not charged and self._is_start():",
        "        if self._is_start():",
        ("tests/training/test_private_run.py::test_what_a_lost_start_charged_is_not_removed",),
    ),
    Mutation(
        "ranks: files that are not of a run are removed",
        "storage/run_folder.py",
        "        if not self._is_start():\n            return\n        self.lock()\n",
        "        self.lock()\n",
        ("tests/storage/test_run_folder.py::test_files_that_are_not_of_a_run_are_never_removed",),
    ),
    Mutation(
        "ranks: two restarts hold the lock of a run",
        "storage/run_folder.py",
        "        if not path.exists() or not os.path.samestat(",
        "        if False and not os.path.samestat(",
        ("tests/storage/test_run_folder.py::test_a_lock_that_was_removed_meanwhile_locks_nothing",),
    ),
    Mutation(
        "ranks: every file of a folder belongs to a lost start",
        "storage/run_folder.py",
        "        return all(name in known or (",
        "        return all(name or (",
        ("tests/storage/test_run_folder.py::test_files_that_are_not_of_a_run_are_never_removed",),
    ),
    Mutation(
        "ranks: memory takes the place of sums that were not sent",
        "gradients/clipped_sum.py",
        " + parameter.requires_grad) % 2**62",
        ") % 2**62",
        (f"{_RUNS}::test_a_layer_that_one_process_alone_freezes_stops_the_step",),
    ),
    Mutation(
        "ranks: a step is charged that the owners of its parameters can't take",
        "privacy/torch_optimizer.py",
        "        if self._divided and self._divided != tuple(found):",
        "        if False:",
        ("tests/training/test_sharded_state.py::test_a_layer_that_is_frozen_on_the_way_is_refused_before_the_charge",),
    ),
    Mutation(
        "ranks: a script continues a run of another plan",
        "training/private_run.py",
        "                if or_start is not None:\n",
        "                if False and or_start is not None:\n",
        ("tests/training/test_private_run.py::test_a_script_that_asks_for_another_plan_does_not_continue_the_run",),
    ),
    *mutations(
        "training/test_sharded_state",
        "privacy/sharded_step.py",
        (
            "parts of a step are released again",
            "        if step != self.next_step:\n",
            "        if step < 0:\n",
        ),
        (
            "an owner draws noise before rank 0 has charged",
            "    told = ranks.decided(charged)\n",
            '    told = {"charged": step}\n    if ranks.leads:\n        charged()\n',
        ),
        (
            "parameters of one draw of noise have two owners",
            "        owners |= dict.fromkeys(names, owner)\n",
            "        owners |= {name: (owner + place) % ranks for place, name in enumerate(names)}\n",
        ),
        ("noise is keyed by the parts", "step=step, sizes=sizes)\n\n\ndef", "step=step)\n\n\ndef"),
    ),
    *mutations(
        "gradients/test_devices",
        "gradients/devices.py",
        ("products of float32 may round", "        if _rounds_products(device):\n", "        if False:\n"),
    ),
    *mutations(
        "gradients/test_devices",
        "gradients/per_unit.py",
        (
            "norms of 16 bits",
            '            if precision != "float32":\n                call.widen()\n',
            "",
        ),
    ),
    *mutations(
        "gradients/test_devices",
        "gradients/plan.py",
        (
            "bits of a unit may depend on its place in 16 bits",
            "        if not torch.equal(one[units_there], two[list(places)]):\n",
            "        if False:\n",
        ),
    ),
)
