"""Breakages of the proof that rows of own code do not influence each other, and of what runs after it."""

from __future__ import annotations

from tools.mutations.mutation import mutations

SEPARABILITY = (
    *mutations(
        "gradients/test_batch_axis",
        "gradients/batch_axis.py",
        (
            "proof: an operation may work across the rows",
            "    if isinstance(state, Rows) and state.dim in dims:\n        raise MixesRows",
            "    if False:\n        raise MixesRows",
        ),
        (
            "proof: a constant may be written by the mask of another row",
            "    if call.state_of(mask) != state:\n",
            "    if False:\n",
        ),
        (
            "proof: rows may be written by a mask",
            'constant = call.state("values") == FREE and all(size == 1 for size in call.shape_of(values))',
            "constant = True",
        ),
        (
            "proof: the dots of einsum are counted from the front",
            "letters[most - n :]",
            "letters[:n]",
        ),
        ("proof: a negative dimension is another one", "return dim + rank if dim < 0 else dim", "return dim"),
        (
            "proof: no dimension means none",
            "        return set(range(rank))\n",
            "        return set()\n",
        ),
        (
            "proof: a reshape may fold rows",
            "    if rest or parts or inner * math.prod(new[dim + 1 :]) != after:\n",
            "    if False:\n",
        ),
        (
            "proof: blocks of rows may lie in any order",
            "    return Rows(dim, outer, inner)\n",
            "    return Rows(dim, 1, entries)\n",
        ),
        (
            "proof: a repetition lies beside its row",
            "state.outer * times[state.dim + shift], state.inner)",
            "state.outer, state.inner * times[state.dim + shift])",
        ),
        ("proof: products may sum over the rows", "    if any(summed):\n", "    if False:\n"),
        (
            "proof: products may bring rows together",
            "    if len(places) > 1:\n        raise MixesRows",
            "    if False:\n        raise MixesRows",
        ),
        (
            "proof: einsum may bring rows together",
            "        if letters.count(letter) != wanted:\n"
            '            raise MixesRows("brings rows together with other rows")\n'
            "    if len(found) > 1 or result.count(letter) != 1:\n",
            "        del letters, wanted\n    if result.count(letter) != 1:\n",
        ),
        (
            "proof: elements of other rows may meet",
            '    if len(found) > 1:\n        raise MixesRows("combines rows of one argument with other rows of another")\n'
            "    return _for_each_result",
            "    return _for_each_result",
        ),
        (
            "proof: arguments with rows elsewhere may meet",
            '        if len(found) > 1:\n            raise MixesRows("combines rows of one argument with other rows of '
            'another")\n        return next(iter(found), None)',
            "        return next(iter(found), None)",
        ),
        (
            "proof: rows may be taken by an index",
            "    if state.dim in dims or any(",
            "    if any(",
        ),
        (
            "proof: rows may take entries of others",
            '        raise MixesRows("takes rows by an index")\n    return Rows(0)\n',
            "        pass\n    return Rows(0)\n",
        ),
        (
            "proof: a table may be made of rows",
            "    if state != FREE or len(indices) != 1 or",
            "    if len(indices) != 1 or",
        ),
        (
            "proof: zeros like row numbers are row numbers",
            "    if isinstance(state, RowNumbers):\n        return Rows(0)\n",
            "",
        ),
        (
            "proof: row numbers may be overwritten",
            '    if isinstance(before, RowNumbers):\n        raise MixesRows("overwrites the numbers of the rows")\n',
            "",
        ),
        (
            "proof: any operation may compute with row numbers",
            '        if isinstance(state, RowNumbers):\n            raise MixesRows("computes with',
            '        if False:\n            raise MixesRows("computes with',
        ),
        (
            "proof: the number of rows is a number like others",
            "    if operation_name(target) not in _SIZED and any(",
            "    if False and any(",
        ),
        (
            "proof: any memory may be read",
            '        if isinstance(state, Unset):\n            raise MixesRows("reads memory',
            '        if False:\n            raise MixesRows("reads memory',
        ),
        (
            "proof: memory that grows holds nothing",
            ' and not stateful and name not in ("set", "as_strided")',
            "",
        ),
        (
            "proof: rows may be written anywhere",
            "        if before != state:\n            raise MixesRows",
            "        if False:\n            raise MixesRows",
        ),
        ("proof: the traced shape is not compared", "        if place != expected:\n", "        if False:\n"),
        (
            "proof: attention to keys of another rank",
            "    if len(states) != 1 or len(ranks) != 1 or (",
            "    if len(states) != 1 or (",
        ),
        (
            "proof: attention over the rows",
            " or (isinstance(state, Rows) and state.dim >= rank - 2):",
            ":",
        ),
        (
            "proof: a layer takes rows in any dimension",
            "    if state.dim != 0 or (rank is not None and call.rank(name) != rank):\n",
            "    if rank is not None and call.rank(name) != rank:\n",
        ),
        (
            "proof: a layer takes rows of a single image",
            "    if state.dim != 0 or (rank is not None and call.rank(name) != rank):\n",
            "    if state.dim != 0:\n",
        ),
        (
            "proof: batch norm may use statistics of the batch",
            '    if call["training"] or call["running_mean"] is None or call["running_var"] is None:\n',
            "    if False:\n",
        ),
        (
            "proof: a loss may be averaged over the rows",
            '    if call["reduction"] != 0:\n',
            "    if False:\n",
        ),
        (
            "proof: slopes are drawn as rows like",
            '    if call["training"]:\n        raise MixesRows("draws more',
            '    if False:\n        raise MixesRows("draws more',
        ),
        (
            "proof: every operation without a rule is one of elements",
            "    return elementwise if torch.Tag.pointwise in target.tags else None\n",
            "    return elementwise\n",
        ),
    ),
    *mutations(
        "gradients/test_proved_graph",
        "gradients/proved_graph.py",
        (
            "proof: code may write into its inputs",
            '            if root.op == "placeholder":\n                spec',
            "            if False:\n                spec",
        ),
        (
            "proof: code may hide that it reads values",
            "    if read:  # and",
            "    if False:  # and",
        ),
        (
            "proof: rows may write into memory that they share",
            "            if isinstance(self._states[node], Rows) and self._states[root] == FREE:\n",
            "            if False:\n",
        ),
        (
            "proof: a view that does not say so may be written",
            "        return self._memory.setdefault(value.untyped_storage()._cdata, node)\n",
            "        return node\n",
        ),
        (
            "proof: an argument that is returned as it is may be written",
            "        if operation_name(node.target) in _MAY_RETURN_ITS_ARGUMENT and not draws_random(node):\n",
            "        if False:\n",
        ),
        (
            "proof: losses need not have a row",
            "        if self._states[losses] != Rows(0) or losses.meta",
            "        if losses.meta",
        ),
        (
            "proof: the graph is for one number of rows",
            "dynamic_shapes=(tuple({0: rows} for _ in examples),)",
            "dynamic_shapes=None",
        ),
        (
            "proof: a single row is not doubled",
            "        if microbatch.rows < LEAST_ROWS:\n",
            "        if False:\n",
        ),
        (
            "proof: clocks and other random numbers are frozen",
            "    if read or random.getstate() != python or before[2]",
            "    if False and before[2]",
        ),
    ),
    *mutations(
        "gradients/test_proved_graph",
        "gradients/batch_axis.py",
        (
            "proof: any operation of weights will do",
            "    return is_aten and ",
            "    return ",
        ),
        (
            "proof: rows may share random numbers",
            "    if draws_random(call.node) and FREE in ",
            "    if False and FREE in ",
        ),
        (
            "proof: a batch of constants may keep statistics",
            '"empty", "resize", "batch_norm", "instance_norm")',
            '"empty", "resize")',
        ),
    ),
    *mutations(
        "gradients/test_proved_graph",
        "gradients/plan.py",
        (
            "proof: the code runs instead of the graph",
            "        return model if self.proof is None else self.proof.network\n",
            "        return model\n",
        ),
        (
            "proof: own code is shown private rows",
            "        batch = blind_batch(microbatch, units=units, classes=classes)\n",
            "        batch = repeat_units(microbatch, units=units)\n",
        ),
        (
            "proof: what code keeps is frozen",
            "            if key[0] != plan_key(model, loss_fn, microbatch, performance):\n",
            "            if False:\n",
        ),
        (
            "proof: a plan stays when the code changes",
            "    return model_key(model), rows, frozen_callable(loss_fn), speed\n",
            "    return model_key(model)[:2], rows, speed\n",
        ),
        (
            "proof: code may differ from its graph",
            "    if unfaithful(model, loss_fn, losses, microbatch):\n",
            "    if False:\n",
        ),
        (
            "proof: random code may have other gradients",
            "        refuse(other_gradients(model, unfaithful_gradients(code, network, rows)))\n",
            "        pass\n",
        ),
        (
            "proof: a network may leak to other units",
            "        if layers:\n            raise PrivacyError",
            "        if False:\n            raise PrivacyError",
        ),
    ),
    *mutations(
        "gradients/test_proved_graph",
        "gradients/fast/rewrite.py",
        (
            "proof: closures are not part of the key",
            "_cell(cell, depth + 1) for cell in function.__closure__ or ()",
            "_cell(cell, depth + 1) for cell in ()",
        ),
        (
            "proof: hooks are not part of the key",
            "    yield from ((name, tuple(map(id, vars(module).get(name, {}).values()))) for name in _HOOKS)\n",
            "",
        ),
        (
            "proof: settings are not part of the key",
            "    yield from ((name, _frozen(value)) for name, value in vars(module).items() if name not in _OWN)\n",
            "",
        ),
    ),
    *mutations(
        "gradients/test_proved_graph",
        "gradients/clipped_sum.py",
        (
            "proof: a step may write into what its graph keeps",
            "    if before != [tensor._version for tensor in watched]:\n",
            "    if False:\n",
        ),
        ("proof: hooks on all modules run in a step", "    refuse(outside_code())\n", ""),
        (
            "proof: modes run between the operations of a step",
            "            with no_outside_code(), _unwritten(plan, arranged):\n",
            "            with _unwritten(plan, arranged):\n",
        ),
    ),
    *mutations(
        "gradients/test_proved_graph",
        "gradients/separability.py",
        (
            "proof: parameters may bring code of their own",
            "    kinds = [name for name, tensor in model_state(model) if _has_own_code(tensor)]\n",
            "    kinds = []\n",
        ),
        (
            "proof: leaks to other units are not seen",
            "                if parts.numel() and bool(parts[others].ne(0).any()):\n",
            "                if False:\n",
        ),
    ),
)
