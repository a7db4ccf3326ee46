"""Breakages of the loop, its wall, its keys and what it declares."""

from __future__ import annotations

from tools.mutations.mutation import mutations

TRAINING = (
    *mutations(
        "training/test_forecast",
        "training/start.py",
        ("a refused count is not charged", "header, charges=counted)\n        text", "header)\n        text"),
        ("a hopeless plan is trained", "prepared.forecast.hopeless and not config.privacy.anyway:", "False:"),
    ),
    *mutations(
        "training/test_forecast",
        "training/prepare.py",
        (
            "the forecast knows the rows",
            "expected = forecast(config,",
            'expected = forecast(_updated(config, "privacy", {"num_units": train.num_units}),',
        ),
    ),
    *mutations(
        "training/test_defaults",
        "training/defaults.py",
        (
            "counted epochs have no limit",
            "MOST_PROPOSED_STEPS if config.privacy.count_noise_multiplier is not None else 10**9",
            "10**9",
        ),
        (
            "defaults follow the rows",
            "return privacy.num_units or two_digits(facts.num_units)",
            "return facts.num_units",
        ),
    ),
    *mutations(
        "training/test_trainer properties/test_replay",
        "privacy/private_step.py",
        ("noise before the charge", "    privatizer.charge(batch.sampling, step=step)\n", ""),
    ),
    *mutations(
        "training/test_trainer properties/test_replay",
        "training/trainer.py",
        ("a step is not counted", "    session.step += 1\n", "    session.step += 2\n"),
        ("random layers are not replayed", 'seed=keys.seed("views", step)):', "seed=None):"),
    ),
    *mutations(
        "training/test_trainer",
        "privacy/private_step.py",
        ("the wall has a gap", "self.spent >= self.planned", "self.spent > self.planned"),
        ("there is no wall", "self.spent >= self.planned", "False"),
    ),
    *mutations(
        "training/test_trainer",
        "training/run_fingerprint.py",
        ("the key is not bound to the data", '        "data": data_fingerprint,\n', ""),
        ("the key is not bound to the configuration", '        "config": config_digest,\n', ""),
        ("other threads, same noise", '        "threads": str(torch.get_num_threads()),\n', ""),
        ("a fork keeps its key", 'f"fork={fork}"', '"fork"'),
    ),
    *mutations(
        "training/test_run_fingerprint",
        "training/run_fingerprint.py",
        ("other code, same noise", '        "code": code_digest(),\n', ""),
        ("only the first folder's code counts", '("data", "gradients",', '("data",) or ("gradients",'),
    ),
    *mutations(
        "training/test_trainer",
        "training/write_release.py",
        ("weights moved by hand are certified", "    session.optimizer.check_untouched()\n", ""),
    ),
    *mutations(
        "training/test_trainer",
        "training/prepare.py",
        ("a plan may cross its target", "planned.epsilon > privacy.target_epsilon", "False"),
        (
            "statistics are not composed",
            "    if config.privacy.enabled and config.data.normalisation",
            "    if False and config",
        ),
    ),
    *mutations(
        "training/test_trainer",
        "training/start.py",
        ("statistics are not charged", "    ledger.charge(event, step=0)\n", ""),
    ),
    *mutations(
        "training/test_trainer",
        "training/resume.py",
        ("changed data goes on unasked", "    if grave and not allow_fork:", "    if False:"),
    ),
    *mutations(
        "privacy/test_private_step",
        "privacy/private_step.py",
        ("any sampler passes", '    if sampling.method != "poisson":', "    if False:"),
        ("any rate passes", "    if sampling.sample_rate != mechanism.sample_rate:", "    if False:"),
        ("a step is released without a charge", "if self._charged is None or step != self._charged:", "if False:"),
        ("a charged step is released twice", "        self._charged = None  # also", "        # also"),
        (
            "a step is charged and released again",
            "step <= self._last_charged or (known and not self._replays)",
            "False",
        ),
        ("fresh keys replay a charged step", "replays and keys is not None", "replays"),
    ),
    *mutations(
        "properties/test_one_path",
        "training/trainer.py",
        (
            "a second path to the noise",
            "            session.optimizer.step(OrdinaryGrad(mean, step))\n",
            "            session.optimizer.step(noisy_mean(mean, session.config.mechanism, session.keys, step=step))\n",
        ),
        (
            "a second place charges steps",
            "    session.step += 1\n",
            "    session.step += 1\n    session.ledger.charge(session.config.mechanism.step_event, step=session.step)\n",
        ),
    ),
    *mutations(
        "privacy/test_values",
        "privacy/values.py",
        ("anybody makes a private gradient", "        if proof is not PROOF_OF_NOISE:", "        if False:"),
    ),
    *mutations(
        "training/test_trainer",
        "training/prepare.py",
        ("constants of the private pictures pass", "source.startswith(constants.lower())", "False"),
    ),
    *mutations(
        "training/test_run_fingerprint",
        "gradients/plan.py",
        (
            "plain plans are made anew at the run's weights",
            "    with performance.chosen_kernels():\n        return",
            "    if True:\n        return",
        ),
    ),
)
