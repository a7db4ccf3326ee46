"""Breakages of keys, draws, statistics, noise and optimizers."""

from __future__ import annotations

from tools.mutations.mutation import mutations

NOISE = (
    *mutations(
        "privacy/test_privatize",
        "privacy/noise.py",
        ("noise x 0.93", "steps_per_normal=grid.noise_stddev", "steps_per_normal=0.93 * grid.noise_stddev"),
        ("noise / sqrt 2", "steps_per_normal=grid.noise_stddev", "steps_per_normal=0.707 * grid.noise_stddev"),
        ("noise without the clip norm", "noise_multiplier * sensitivity)", "noise_multiplier)"),
        (
            "sets of parameters share noise",
            'self._keys.derive("noise", first, steps, index, *self._sizes)',
            'self._keys.derive("noise", first, steps, index)',
        ),
        (
            "all steps of a large model share noise",
            'self._keys.derive("noise", first, steps, index, *self._sizes)',
            'self._keys.derive("noise", steps, index, *self._sizes)',
        ),
        (
            "all parts of a long parameter share noise",
            'self._keys.derive("noise", first, steps, index, *self._sizes)',
            'self._keys.derive("noise", first, steps, *self._sizes)',
        ),
        ("steps of a small model share noise", "start = (self._step - first) * count\n", "start = 0\n"),
        (
            "steps of a small model overlap",
            "start = (self._step - first) * count\n",
            "start = (self._step - first) * (count - 1)\n",
        ),
        (
            "noise is drawn ahead once for all steps",
            'normals = standard_normals(keys.derive("noise", first, steps, *facts), count)',
            'normals = standard_normals(keys.derive("noise", 0, steps, *facts), count)',
        ),
        (
            "other parameters of a small model share noise",
            'normals = standard_normals(keys.derive("noise", first, steps, *facts), count)',
            'normals = standard_normals(keys.derive("noise", first, steps), count)',
        ),
        ("sizes do not change the noise", "for fact in (name, each.numel()))", "for fact in (name,))"),
        ("what was drawn can be changed", "    normals.flags.writeable = False\n", ""),
        ("the order of parameters changes their noise", "dict(sorted(sizes.items()))", "dict(sizes)"),
        ("a sum clipped to less passes", "if not clipped.clip_norm ==", "if clipped.clip_norm >"),
        ("a sum that is not finite passes", "    if not finite:", "    if False:"),
        (
            "numpy releases without noise",
            "            released += np.rint(normals_here",
            "            _ = np.rint(normals_here",
        ),
        ("numpy releases what is not finite", "finite &= bool(np.isfinite(sums).all())", "finite &= True"),
        ("a later part may be infinite", "finite &= release(", "finite = release("),
        ("anything passes as a clipped sum", "if type(clipped) is not ClippedSum:", "if False:"),
        ("a sum is released twice", "sums = clipped.take()", "sums = dict(clipped.gradients)"),
    ),
    *mutations(
        "privacy/test_privatize",
        "privacy/values.py",
        ("a released sum is released anew as nothing", "if self.taken:", "if False:"),
    ),
    *mutations(
        "privacy/test_noise",
        "privacy/noise.py",
        (
            "the far tail repeats words of the middle",
            "stream.take(len(tails))",
            "WordStream(key).take(len(tails))",
        ),
        ("the far tail is cut off", "        radii[tails[first:last] - start] = tail_radii[first:last]\n", ""),
        ("variance 1 % too small", "    radii *= -2.0\n", "    radii *= -1.98\n"),
        ("radius and angle from the same words", "words[:pairs], words[pairs:]", "words[:pairs], words[:pairs]"),
    ),
    *mutations(
        "privacy/test_randomness",
        "privacy/randomness.py",
        ("only 32 bits of a seed count", "str(seed).encode()", "str(seed % 2**32).encode()"),
        ("keys are not bound to the run", '_frame("dpvision/1", self.context, stream,', '_frame("dpvision/1", stream,'),
        ("sampling and noise share a key", '"dpvision/1", self.context, stream, ', '"dpvision/1", self.context, '),
        ("the secret is printed", "secret: bytes = field(repr=False)", "secret: bytes = field()"),
        (
            "a hand seed is not stamped",
            "return Keys(secret, context, hand_seeded=True)",
            "return Keys(secret, context)",
        ),
    ),
)
OPTIMIZERS = (
    *mutations(
        "privacy/test_optimizer",
        "privacy/optimizer.py",
        ("an ordinary gradient passes as private", "if type(grad) is not self._takes:", "if False:"),
        ("a step can be repeated", "if grad.step != self._steps_taken:", "if grad.step > self._steps_taken:"),
        ("a parameter may be left out", "        if missing or unknown:", "        if unknown:"),
    ),
    *mutations(
        "privacy/test_optimizer_integrity",
        "privacy/optimizer.py",
        ("weights moved by hand pass", "        self.check_untouched()\n", ""),
        ("moving buffers pass", "TamperGuard(model, buffers=private)", "TamperGuard(model, buffers=False)"),
        (
            "what code adds to the state dict is not watched",
            "isinstance(saved, Tensor) and id(saved) not in known",
            "name in dict(self._model.named_buffers())",
        ),
    ),
    *mutations(
        "privacy/test_optimizer_integrity",
        "privacy/optimizer.py",
        (
            "only version counters are watched",
            "torch.equal(self._left[name], _summary(now[name]))",
            "now[name]._version == 0",
        ),
    ),
    *mutations(
        "privacy/test_optimizer_fingerprint",
        "privacy/optimizer.py",
        ("large weights moved by hand pass", "return fingerprint(tensor) if", "return tensor.new_zeros(1) if"),
        ("moved weights are saved", "        self.check()\n        return {name", "        return {name"),
    ),
    *mutations(
        "privacy/test_optimizer_fingerprint",
        "privacy/optimizer.py",
        (
            "the last words of a large tensor are not watched",
            "sums_R[-1] = (rest * keys_W[: rest.numel()]).sum()",
            "sums_R[-1] = 0",
        ),
        ("all words have one key", "some_RW * keys_W, 1", "some_RW * keys_W[0], 1"),
        ("even keys forget high bits", "dtype=np.int64) | 1", "dtype=np.int64) << 32"),
    ),
    *mutations(
        "privacy/test_optimizer_fingerprint",
        "privacy/optimizer.py",
        (
            "gradients stay for the next part",
            "                    self._parameters[name].grad = None\n",
            "                    pass\n",
        ),
    ),
    *mutations(
        "privacy/test_schedules",
        "config.py",
        ("plateau on private metrics", 'if self.kind == "plateau" and not self.public_metric:', "if False:"),
    ),
)
DATA = (
    *mutations(
        "privacy/test_sampling",
        "privacy/sampling.py",
        ("rate x 1.02", "bernoulli(words, self.sample_rate)", "bernoulli(words, self.sample_rate * 1.02)"),
        (
            "batches of a fixed size",
            "np.flatnonzero(bernoulli(words, self.sample_rate))",
            "np.sort(np.argsort(words)[: round(self.sample_rate * self.num_units)])",
        ),
        ("every step draws the same", 'self.num_units, "sampling", step)', 'self.num_units, "sampling")'),
    ),
    *mutations(
        "data/test_batches",
        "data/batches.py",
        (
            "rate read off the data",
            "sample_rate=mechanism.sample_rate,",
            "sample_rate=mechanism.expected_batch_size / max(1, store.num_units),",
        ),
        ("rows of a unit are summed", "(there_UR / count_U).astype(np.float32)", "there_UR.astype(np.float32)"),
        ("padding shows an image", "    if len(absent):", "    if False:"),
    ),
    *mutations(
        "data/test_normalisation",
        "data/normalisation.py",
        ("statistics divided by the true count", "noisy / num_units, 2)", "noisy / store.num_units, 2)"),
        ("statistics without their bound", "noise_multiplier * unit_bound(channels)", "noise_multiplier"),
        ("statistics charged at half price", "Event(sample_rate=1.0,", "Event(sample_rate=0.5,"),
    ),
    *mutations(
        "data/test_store",
        "data/store.py",
        ("the key is not bound to the units", "self.labels, self.unit_of_row)", "self.labels)"),
    ),
    *mutations(
        "data/test_store",
        "privacy/sampling.py",
        (
            "the hold-out depends on the number of units",
            "bernoulli(np.array(words, dtype=np.uint64), fraction)",
            "np.arange(len(words)) < fraction * len(words)",
        ),
    ),
)
