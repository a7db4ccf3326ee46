"""Breakages of certificates, signatures, and the accounting of groups and searches."""

from __future__ import annotations

from tools.mutations.mutation import Mutation, mutations

TRUST: tuple[Mutation, ...] = (
    *mutations(
        "accounting/test_tradeoff",
        "accounting/tradeoff.py",
        (
            "mu between the points is not proved",
            "np.append(profile.epsilons[1:], profile.epsilons[-1])",
            "profile.epsilons",
        ),
        ("mu is whatever comes first", "low, high = 0.0, profile.most_mu", "low, high = 0.0, profile.most_mu / 3"),
        ("attacks without delta", "* false_positive_rate + profile.deltas", "* false_positive_rate"),
    ),
    *mutations(
        "accounting/test_tradeoff",
        "accounting/pld.py",
        (
            "a Gaussian's second term is left out",
            "return -np.expm1(np.minimum(second - first, 0.0)) * np.exp(first)",
            "return np.exp(first)",
        ),
    ),
    *mutations(
        "accounting/test_groups",
        "accounting/groups.py",
        (
            "an owner joins with one row at most",
            "sensitivities=[float(rows) for rows in joined]",
            "sensitivities=[min(1.0, float(rows)) for rows in joined]",
        ),
        (
            "a full release is moved by one row",
            "event.noise_multiplier / most_rows, NeighboringRelation",
            "event.noise_multiplier, NeighboringRelation",
        ),
        (
            "a changed slice is a missing patient",
            'adjacency="replace_one", privacy_unit=row',
            "adjacency=adjacency, privacy_unit=row",
        ),
        ("rare draws are forgotten", "    if joined[-1] < most_rows:", "    if False:"),
    ),
    *mutations(
        "accounting/test_selection",
        "accounting/selection.py",
        ("trials are not multiplied", "(event, count * trials) for", "(event, count) for"),
        ("the number of trials is free", "penalty = math.log(mean_trials) / (orders - 1)", "penalty = 0 * orders"),
        ("the shape is forgotten", "return (1 + shape) * float", "return float"),
        ("poisson costs no delta", "penalty += mean_trials * _deltas_of_one", "penalty += 0 * _deltas_of_one"),
    ),
    *mutations(
        "release/test_build",
        "release/build.py",
        (
            "owners get the figure of a row",
            "most_rows=most_rows, delta=delta, adjacency=adjacency)",
            "most_rows=1, delta=delta, adjacency=adjacency)",
        ),
    ),
    *mutations(
        "release/test_build",
        "release/statements.py",
        ("slices pass for patients", 'ROW_UNITS = ("example", "slice")', 'ROW_UNITS = ("example",)'),
    ),
    *mutations(
        "release/test_verify",
        "release/verify.py",
        ("a smaller mu passes", '"epsilon_rdp", "mu", "true', '"epsilon_rdp", "true'),
        (
            "a mu may go further",
            "_compare_bounds(name, known, claimed, findings)  # here",
            "_compare_bounds(name, known, known, findings)  # here",
        ),
        (
            "other units are not recomputed",
            'if name not in ("mechanism", "ledger", "attachments") and name in claimed:',
            'if name not in ("mechanism", "ledger", "attachments", "other_units") and name in claimed:',
        ),
        (
            "another divisor passes",
            'if name not in ("mechanism", "ledger", "attachments") and name in claimed:',
            'if name not in ("mechanism", "ledger", "attachments", "divisor") and name in claimed:',
        ),
        (
            "another trust model passes",
            "if isinstance(claimed, dict) and isinstance(known, dict) and claimed.keys() == known.keys():\n        for key in known:",
            "if isinstance(claimed, dict) and isinstance(known, dict) and claimed.keys() == known.keys():\n        for key in ():",
        ),
    ),
    *mutations(
        "release/test_verify",
        "release/verify.py",
        (
            "a rewritten history passes",
            'same = history_digest(config.get("transfer")) == noted_history(entries)',
            "same = True",
        ),
    ),
    *mutations(
        "release/test_sign",
        "release/verify.py",
        (
            "a missing signature will do",
            "        if signature is None:\n            lacks",
            "        if False:\n            lacks",
        ),
        ("any key will do", "            same = signature.public_key == key\n", "            same = True\n"),
        (
            "attachments are not checked",
            "                same = file_sha256(path) == sha256",
            "                same = True",
        ),
    ),
    *mutations(
        "release/test_sign",
        "release/sign.py",
        ("signatures are not checked", ".verify(signature, _CONTEXT + manifest)", ""),
        ("a private key is for everybody", "private, mode=0o600)", "private)"),
        ("keys are overwritten", "        if taken.exists() or taken.is_symlink():", "        if False:"),
    ),
    *mutations(
        "release/test_sign",
        "release/amend.py",
        ("a broken release is signed", "    examined.require_ok()\n", ""),
    ),
    *mutations(
        "release/test_sign",
        "storage/run_folder.py",
        ("a signed release takes more files", "        if (self.release / SIGNATURE).exists():", "        if False:"),
        ("an old signature stays", "spoken = (SIGNATURE, MANIFEST,", "spoken = (MANIFEST,"),
    ),
    *mutations(
        "training/test_trainer",
        "training/resume.py",
        (
            "declarations of a fork are not written",
            "    note_declarations(ledger, config, splits)  # a fork may have brought other data or settings\n",
            "",
        ),
    ),
    *mutations(
        "release/test_model_card",
        "release/model_card.py",
        ("a name may become a key", "    return json.dumps(text)", "    return text"),
        ("a stamp is hidden", "    if certificate.stamps:", "    if False:"),
    ),
    *mutations(
        "exports/test_formats",
        "exports/formats.py",
        (
            "a release that does not verify is exported",
            "    certificate, _ = examined.require_ok()\n",
            "    certificate = examined.certificate\n",
        ),
        (
            "an export holds lines of source code",
            '        node.meta.pop("stack_trace", None)\n',
            '        node.meta.get("stack_trace", None)\n',
        ),
        (
            "an export is not compared",
            "        if not (off <= TOLERANCE and off_logits <= allowed):",
            "        if False:",
        ),
        ("a stamp is left behind", "    if not certificate.for_release:", "    if False:"),
        (
            "an export counts the training data",
            '        "privacy_unit": certificate.privacy_unit,\n',
            '        "privacy_unit": certificate.privacy_unit,\n        "num_units": str(certificate.data["num_units"]),\n',
        ),
    ),
    *mutations(
        "release/test_sign",
        "release/verify.py",
        ("a release vouches for what lies around it", "        if also:\n", "        if False:\n"),
    ),
    *mutations(
        "release/test_sign",
        "release/amend.py",
        (
            "the key is attached to the release",
            'if file.resolve().is_relative_to((run / "private").resolve()):',
            "if False:",
        ),
    ),
    *mutations(
        "release/test_sign",
        "storage/run_folder.py",
        ("an old report stays under a new certificate", "CARD, REPORT, EXAMPLES, *self._attachments())", "CARD)"),
    ),
    *mutations(
        "release/test_build",
        "release/build.py",
        ("the plan of the claim is not the ledger's", '("steps", "expected_batch_size", "noise_multiplier")', "()"),
    ),
    *mutations(
        "accounting/test_groups",
        "accounting/pld.py",
        ("an epsilon below zero", "return max(0.0, shift**2 / 2", "return max(-9.0, shift**2 / 2"),
    ),
    *mutations(
        "release/test_verify_release",
        "release/verify.py",
        (
            "a setting that is not the ledger's passes",
            "same = claimed == known and isinstance(claimed, bool) == isinstance(known, bool)",
            "same = True",
        ),
        ("a number passes for a yes", " and isinstance(claimed, bool) == isinstance(known, bool)", ""),
        ("privacy may be off in the configuration", "findings.require(enabled is private,", "findings.require(True,"),
        (
            "noise of counts is not compared",
            "same = noise == event.noise_multiplier and (event.sample_rate, count) == (1.0, 1)",
            "same = True",
        ),
        (
            "looks that nobody paid for pass",
            "for purpose in configured.keys() - {event.purpose for event, _ in charged}:",
            "for purpose in ():",
        ),
        (
            "other data in the configuration pass",
            'findings.require(not names or source in names, f"config',
            'findings.require(True, f"config',
        ),
    ),
    *mutations(
        "release/test_verify_release",
        "release/verify.py",
        ("any page passes", "same = read_file(path) in pages", "same = True"),
        ("any card passes", "same = read_file(card) in [page.encode() for page in made]", "same = True"),
        ("a cheap curve passes", "same = known * (1 - MAY_CLAIM_LESS) <= claimed <= whole", "same = claimed <= whole"),
        ("the end of a long curve is not looked at", "curve[:: -max(", "curve[:: max("),
        ("final figures may be others", "findings.require(_close(measured, claimed), text)", "pass"),
        (
            "a class may have any accuracy",
            'findings.require(_close(mean, final.get("accuracy")), text)',
            "pass",
        ),
        ("another task passes", "findings.require(task == known,", "findings.require(True,"),
    ),
    *mutations(
        "release/test_verify",
        "release/verify.py",
        ("added items pass", "    for item in added:", "    for item in ():"),
        ("an item that is there twice passes", "findings.require(bool(missing or added),", "findings.require(True,"),
        ("another number of units passes", 'same = data.get("num_units") == num_units', "same = True"),
        (
            "anything may be said of the data",
            'findings.require(same, f"certificate: data must',
            'findings.require(True, f"certificate: data must',
        ),
        (
            "a stamp that nobody gave passes",
            'if name not in ("mechanism", "ledger", "attachments") and name in claimed:',
            'if name not in ("mechanism", "ledger", "attachments", "stamps", "for_release") and name in claimed:',
        ),
    ),
    *mutations(
        "release/test_sign",
        "release/amend.py",
        (
            "another manifest is signed than was checked",
            "signature_bytes(manifest, key)",
            'signature_bytes((release / "manifest.json").read_bytes(), key)',
        ),
    ),
    *mutations(
        "release/test_build",
        "release/certificate_page.py",
        (
            "mu has no end",
            "(Gaussian differential privacy, mu).{_WHERE_MU_ENDS}",
            "(Gaussian differential privacy, mu).",
        ),
    ),
    *mutations(
        "release/test_build",
        "release/statements.py",
        (
            "held-out units pass for covered",
            "if any(note.what == TEST_SPLIT and",
            "if False and any(note.what == TEST_SPLIT and",
        ),
        ("several volumes of a patient are not named", "    if unit == VOLUME:", "    if False:"),
    ),
    *mutations(
        "data/test_units",
        "training/prepare.py",
        ("a file passes for a patient", "usual = VOLUME if by_file else ", "usual = "),
    ),
    *mutations(
        "data/test_units",
        "data/splits.py",
        (
            "a public test may lie among the private pictures",
            "if around or test.is_relative_to(private):",
            "if around:",
        ),
        (
            "a public test may lie around the private pictures",
            "if around or test.is_relative_to(private):",
            "if test.is_relative_to(private) and test != private:",
        ),
        (
            "a training part is its own public test",
            "private = split_folders(source)[0].resolve() if source.is_dir() else source",
            "private = source",
        ),
    ),
    *mutations(
        "privacy/test_sampling",
        "privacy/sampling.py",
        (
            "a counted number is called declared",
            'origin = "was counted with noise" if counted else "is declared"',
            'origin = "is declared"',
        ),
    ),
    *mutations(
        "training/test_counting",
        "training/prepare.py",
        ("whoever is told does not hear of the count", "config.mechanism, counted=counted)", "config.mechanism)"),
    ),
    *mutations(
        "training/test_counting",
        "training/prepare.py",
        (
            "a refusal tells the count",
            '    require_plan_for_any_count(_updated(config, "privacy", {"count_noise_multiplier": noise}))\n',
            "",
        ),
        ("a plan is refused after the count", '    calibrate(_updated(config, "privacy", worst))\n', ""),
        (
            "little noise is refused by the count",
            "refuse_little_noise=not count_charges(config)",
            "refuse_little_noise=True",
        ),
    ),
    *mutations(
        "training/test_counting",
        "training/start.py",
        (
            "units are counted for an occupied folder",
            "    RunFolder.require_new(path)\n    require_given",
            "    require_given",
        ),
    ),
)
