"""Breakages of certificates, signatures, and the accounting of groups and searches."""

from __future__ import annotations

from tools.mutations.mutation import Mutation, mutations

TRUST: tuple[Mutation, ...] = (
    *mutations(
        "test_accounting_profile",
        "accounting/profile.py",
        (
            "mu between the points is not proved",
            "np.append(profile.epsilons[1:], profile.epsilons[-1])",
            "profile.epsilons",
        ),
        ("mu is whatever comes first", "low, high = 0.0, profile.most_mu", "low, high = 0.0, profile.most_mu / 3"),
        ("attacks without delta", "* false_positive_rate + profile.deltas", "* false_positive_rate"),
    ),
    *mutations(
        "test_accounting_profile",
        "accounting/pld.py",
        (
            "a Gaussian's second term is left out",
            "return -np.expm1(np.minimum(second - first, 0.0)) * np.exp(first)",
            "return np.exp(first)",
        ),
    ),
    *mutations(
        "test_accounting_groups",
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
        "test_accounting_tuning",
        "accounting/tuning.py",
        ("trials are not multiplied", "(event, count * trials) for", "(event, count) for"),
        ("the number of trials is free", "penalty = math.log(mean_trials) / (orders - 1)", "penalty = 0 * orders"),
        ("the shape is forgotten", "return (1 + shape) * float", "return float"),
        ("poisson costs no delta", "penalty += mean_trials * _deltas_of_one", "penalty += 0 * _deltas_of_one"),
    ),
    *mutations(
        "test_certificate",
        "certificate/figures.py",
        (
            "owners get the figure of a row",
            "most_rows=most_rows, delta=delta, adjacency=adjacency)",
            "most_rows=1, delta=delta, adjacency=adjacency)",
        ),
        ("slices pass for patients", 'ROW_UNITS = ("example", "slice")', 'ROW_UNITS = ("example",)'),
    ),
    *mutations(
        "test_verify",
        "verify/claims.py",
        ("a smaller mu passes", '    _compare("gaussian_dp.mu", claimed.mu, known.mu, findings)\n', ""),
        (
            "a mu may go further",
            '"gaussian_dp.epsilon_up_to", known.epsilon_up_to, claimed.epsilon_up_to',
            '"gaussian_dp.epsilon_up_to", known.epsilon_up_to, known.epsilon_up_to',
        ),
        (
            "other units are not recomputed",
            '_compare(f"epsilon for {one.unit}", one.epsilon, other.epsilon, findings)',
            "pass",
        ),
        ("another divisor passes", "findings.require(certificate.divisor == divisor", "findings.require(True"),
        ("another trust model passes", "same = certificate.deployment == deployment(header)", "same = True"),
    ),
    *mutations(
        "test_verify",
        "verify/files.py",
        ("a rewritten history passes", "        same = told == noted_history(entries)", "        same = True"),
    ),
    *mutations(
        "test_signing",
        "verify/files.py",
        (
            "a missing signature will do",
            "        if signature is None:\n            lacks",
            "        if False:\n            lacks",
        ),
        ("any key will do", "            same = signature.public_key == key\n", "            same = True\n"),
        (
            "attachments are not checked",
            "                same = file_sha256(path) == attachment.sha256",
            "                same = True",
        ),
    ),
    *mutations(
        "test_signing",
        "signing.py",
        ("signatures are not checked", ".verify(signature, _CONTEXT + manifest)", ""),
        ("a private key is for everybody", "private, mode=0o600)", "private)"),
        ("keys are overwritten", "        if taken.exists() or taken.is_symlink():", "        if False:"),
    ),
    *mutations(
        "test_signing",
        "verify/check.py",
        ("a broken release is signed", "    require_verified(path)\n    release", "    release"),
    ),
    *mutations(
        "test_signing",
        "runfolder/folder.py",
        ("a signed release takes more files", "        if (self.release / SIGNATURE).exists():", "        if False:"),
        ("an old signature stays", "for name in (SIGNATURE, MANIFEST):", "for name in (MANIFEST,):"),
    ),
    *mutations(
        "test_training",
        "training/start.py",
        (
            "declarations of a fork are not written",
            "    note_declarations(ledger, config, pictures)  # a fork may have brought other data or settings\n",
            "",
        ),
    ),
    *mutations(
        "test_card",
        "card.py",
        ("a name may become a key", "    return json.dumps(text)", "    return text"),
        ("a stamp is hidden", "    if certificate.stamps:", "    if False:"),
    ),
    *mutations(
        "test_signing",
        "verify/files.py",
        ("a release vouches for what lies around it", "        if also:\n", "        if False:\n"),
    ),
    *mutations(
        "test_signing",
        "attach.py",
        (
            "the key is attached to the release",
            'if file.resolve().is_relative_to((run / "private").resolve()):',
            "if False:",
        ),
    ),
    *mutations(
        "test_signing",
        "runfolder/folder.py",
        ("an old report stays under a new certificate", "CARD, REPORT, EXAMPLES, *self._attachments())", "CARD)"),
    ),
    *mutations(
        "test_certificate",
        "certificate/claims.py",
        ("the plan of the claim is not the ledger's", '("steps", "expected_batch_size", "noise_multiplier")', "()"),
    ),
    *mutations(
        "test_accounting_groups",
        "accounting/pld.py",
        ("an epsilon below zero", "return max(0.0, shift**2 / 2", "return max(-9.0, shift**2 / 2"),
    ),
)
