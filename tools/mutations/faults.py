"""Breakages of counts, of what is written when, and of the keys of the noise."""

from __future__ import annotations

from tools.mutations.mutation import mutations

FAULTS = (
    *mutations(
        "privacy/test_rounding",
        "privacy/mechanism.py",
        ("epsilon is rounded to the nearest", "ROUND_CEILING)", "ROUND_HALF_EVEN)"),
    ),
    *mutations(
        "properties/test_neighbours",
        "privacy/noise.py",
        ("units are counted without noise", "+ noise_multiplier * float(normal)", "+ 0 * float(normal)"),
        (
            "units are counted with less noise",
            "+ noise_multiplier * float(normal)",
            "+ 0.9 * noise_multiplier * float(normal)",
        ),
    ),
    *mutations(
        "properties/test_neighbours",
        "training/prepare.py",
        ("counting costs nothing", "return ((counted.event, 1),)", "return ()"),
    ),
    *mutations(
        "properties/test_neighbours",
        "training/start.py",
        (
            "a count is never charged",
            "ledger = Ledger.create(folder.ledger_path, header, charges=counted)",
            "ledger = Ledger.create(folder.ledger_path, header)",
        ),
    ),
    *mutations(
        "properties/test_neighbours",
        "privacy/ledger.py",
        ("first charges are left out", "for event in charges]", "for event in ()]"),
    ),
    *mutations(
        "properties/test_faults",
        "storage/run_folder.py",
        (
            "a run without its release is no run",
            'if any(folder.checkpoints.glob("*.safetensors")):',
            "if False:",
        ),
    ),
    *mutations(
        "properties/test_tamper",
        "release/verify.py",
        ("a manifest in another order", "_rewritten(dict(sorted(hashes.items())))", "_rewritten(hashes)"),
    ),
    *mutations(
        "privacy/test_noise_strength",
        "privacy/randomness.py",
        ("forks share their noise", '"dpvision/1", self.context, stream,', '"dpvision/1", stream,'),
        ("steps share their noise", "*map(str, index))", "*map(str, index[1:]))"),
        ("a byte of the secret is not used", "hmac.new(self.secret, message", "hmac.new(self.secret[:31], message"),
    ),
    *mutations(
        "privacy/test_noise_strength",
        "privacy/noise.py",
        (
            "noise is one per cent too small",
            "noise_stddev=mechanism.noise_multiplier * sensitivity)",
            "noise_stddev=0.99 * mechanism.noise_multiplier * sensitivity)",
        ),
    ),
)
