"""Breakages of ledger, run folder, certificate and verification."""

from __future__ import annotations

from tools.mutations.mutation import mutations

LEDGER = (
    *mutations(
        "privacy/test_ledger",
        "storage/files.py",
        (
            "charges are not flushed",
            "        yield descriptor\n        os.fsync(descriptor)\n",
            "        yield descriptor\n",
        ),
    ),
    *mutations(
        "privacy/test_ledger",
        "privacy/ledger.py",
        (
            "a reopened ledger is not flushed",
            '        with disk_errors(f"write {path}"), synced(path) as descriptor:\n            os.ftruncate(descriptor, contents.whole_bytes)\n',
            "",
        ),
        (
            "nobody asks what was there before",
            "            require_mark(contents.entries, length=at_least[0], head=at_least[1], path=path)\n        # Also",
            "            pass\n        # Also",
        ),
        ("a shorter ledger passes", "    if len(entries) < length:", "    if False:"),
        ("another history passes", "    if length < 1 or entries[length - 1].hash != head:", "    if length < 1:"),
        ("a charged step changes its price", "        elif known != event:", "        elif False:"),
        ("replays are charged twice", "        if known is None:\n", "        if True:\n"),
        ("charging goes on after a failed write", "        self._broken = True\n", ""),
        ("an edited line passes", "    _require(hashlib.sha256(body).hexdigest() == claimed,", "    _require(True,"),
        ("spliced lines pass", "            _require(entry.prev == prev,", "            _require(True,"),
        ("numbers may jump", "            _require(entry.seq == seq,", "            _require(True,"),
        ("a key may be there twice", "    _require(canonical,", "    _require(True,"),
        ("steps may have gaps", "        _require(step in allowed,", "        _require(True,"),
        ("steps may be skipped ahead", "        _require(step in allowed,", "        _require(step >= min(allowed),"),
        (
            "charges go to any fork",
            '        _require(fork == len(self.forks), f"fork must',
            '        _require(True, f"fork must',
        ),
        (
            "unknown fields pass",
            'ConfigDict(strict=True, extra="forbid")',
            'ConfigDict(strict=True, extra="ignore")',
        ),
        (
            "equal charges count once in a ledger",
            "        self._counts[event] = self._counts.get(event, 0) + 1",
            "        self._counts[event] = 1",
        ),
        (
            "a torn line passes",
            '    if contents.torn:\n        raise TamperError(f"{path}, line',
            '    if False:\n        raise TamperError(f"{path}, line',
        ),
        ("a second writer is not noticed", "    if size != expected_size:", "    if False:"),
        (
            "a ledger may have any number of kinds of charges",
            "event in self._counts or len(self._counts) < MOST_KINDS",
            "event in self._counts or len(self._counts) >= 0",
        ),
        (
            "an old commitment counts after further charges",
            "        self.released = None\n        if self.header is None:",
            "        if self.header is None:",
        ),
        ("half a line counts as written", "    if written != len(line):", "    if False:"),
        ("the certificate outlives its ledger", "            self._before_growth()\n", ""),
        (
            "any delta passes in a ledger",
            "delta: Annotated[float, Field(gt=0, lt=1)] | None",
            "delta: float | None",
        ),
    ),
    *mutations(
        "privacy/test_ledger",
        "privacy/mechanism.py",
        (
            "any noise passes",
            '        problems.positive("noise_multiplier", self.noise_multiplier)\n        problems.raise_if_any()\n\n\n@final\n@dataclass(frozen=True, kw_only=True)\nclass CountedUnits',
            "        problems.raise_if_any()\n\n\n@final\n@dataclass(frozen=True, kw_only=True)\nclass CountedUnits",
        ),
    ),
    *mutations(
        "storage/test_run_folder",
        "storage/run_folder.py",
        (
            "the certificate is not withdrawn",
            "        return Ledger.open(self.ledger_path, at_least=longest, before_growth=self.withdraw_release)",
            "        return Ledger.open(self.ledger_path, at_least=longest)",
        ),
        ("a resume forgets the ledger's length", "at_least=longest, ", ""),
        ("the shorter memory counts", "longest = max(self", "longest = min(self"),
        (
            "a certificate of a shorter ledger is written",
            '        if certificate["ledger"] != {"length": len(entries), "head": entries[-1].hash}:',
            "        if False:",
        ),
        (
            "a certificate of other weights is written",
            '        if certificate["weights_sha256"] != sha256_hex(weights) or',
            "        if",
        ),
        (
            "an old manifest stays during a release",
            "        self._require_true(certificate, weights=weights, config=text.encode())\n        self.withdraw_release()\n",
            "        self._require_true(certificate, weights=weights, config=text.encode())\n",
        ),
        (
            "a withdrawn certificate is forgotten",
            "                os.replace(self.release / CERTIFICATE, self._withdrawn)",
            "                (self.release / CERTIFICATE).unlink()",
        ),
        ("two processes write one run", "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", ""),
        (
            "the secret is readable by all",
            'json_bytes({**values, "sha256": _digest(values)}), mode=0o600)',
            'json_bytes({**values, "sha256": _digest(values)}))',
        ),
        ("a changed key passes", "        if claimed != _digest(values):", "        if False:"),
        (
            "changed weights are loaded",
            "        if sha256 != sha256_hex(content):",
            "        if False:",
        ),
    ),
    *mutations(
        "storage/test_run_folder",
        "storage/checkpoint.py",
        ("a damaged checkpoint is used", "        if file_sha256(path) != path.name[-76:-12]:", "        if False:"),
        (
            "a renamed checkpoint is used",
            '        if stored["step"] != step or mark is None:',
            "        if mark is None:",
        ),
        ("only damaged checkpoints is a fresh start", "    if damaged:\n", "    if False:\n"),
        ("one checkpoint is kept", "KEPT = 2", "KEPT = 1"),
    ),
    *mutations(
        "release/test_build",
        "release/build.py",
        (
            "a hand seed is not stamped on a certificate",
            "mechanism, hand_seeded=hand_seeded, version=version, searched",
            "mechanism, hand_seeded=False, version=version, searched",
        ),
        ("everything is for release", "        for_release=not stamps,", "        for_release=True,"),
        (
            "only the first charge is certified",
            "    charges = charges_of(ledger)\n    steps",
            "    charges = charges_of(ledger)[:1]\n    steps",
        ),
        ("any mechanism is certified", "    _require_same_facts(header, mechanism)\n", ""),
        ("gaps are not listed", "not_covered=not_covered_by(ledger, version=version)", "not_covered=[]"),
    ),
    *mutations(
        "release/test_build",
        "release/statements.py",
        ("no privacy is not stamped", "[*stamps, NO_PRIVACY]", "stamps"),
        (
            "a changed mechanism is not stamped",
            "    if any(event != mechanism.step_event for event, _ in trained):",
            "    if False:",
        ),
        (
            "declarations are not listed",
            '    found += [(note["what"], note["how"]) for note in declared if note["what"] != NOT_FOR_RELEASE]\n',
            "",
        ),
        (
            "delta of 1/n passes",
            'if header["delta"] is not None and not header["delta"] < 1 / header["num_units"]:',
            'if header["delta"] is not None and not header["delta"] <= 1 / header["num_units"]:',
        ),
    ),
    *mutations(
        "release/test_build privacy/test_rounding",
        "privacy/mechanism.py",
        ("epsilon is shown rounded down", "rounding=ROUND_CEILING)", 'rounding="ROUND_FLOOR")'),
    ),
    *mutations(
        "release/test_verify",
        "release/verify.py",
        (
            "a smaller claim passes",
            "    enough = claimed >= known * (1 - MAY_CLAIM_LESS)",
            "    enough = claimed >= 0 * known * (1 - MAY_CLAIM_LESS)",
        ),
        (
            "a smaller claim by RDP passes",
            '"epsilon_of_this_run_alone", "epsilon_rdp", "mu"',
            '"epsilon_of_this_run_alone", "mu"',
        ),
        (
            "items of lists are not compared",
            "            _compare(label, one, other, findings)",
            "            pass",
        ),
        (
            "a certificate of another ledger passes",
            "        require_mark(entries, length=certificate.ledger.length, head=certificate.ledger.head, path=Path(LEDGER))\n",
            "        pass\n",
        ),
        (
            "other values pass",
            '        findings.require(same, f"certificate: {name} is {brief(claimed)}, the ledger gives',
            '        findings.require(True, f"certificate: {name} is {brief(claimed)}, the ledger gives',
        ),
        (
            "charges and steps are not compared",
            'if name not in ("mechanism", "ledger", "attachments") and name in claimed:',
            'if name not in ("mechanism", "ledger", "attachments", "charged", "steps_taken") and name in claimed:',
        ),
        ("missing items pass", "    for item in missing:", "    for item in ():"),
        (
            "for release in spite of stamps passes",
            'if name not in ("mechanism", "ledger", "attachments") and name in claimed:',
            'if name not in ("mechanism", "ledger", "attachments", "for_release") and name in claimed:',
        ),
        ("a larger claim passes", "    fitting = claimed <= known", "    fitting = True or claimed <= known"),
    ),
    *mutations(
        "release/test_verify",
        "release/verify.py",
        (
            "verify ignores the checkpoints",
            "            _check_private(place.run, entries, certificate, findings)",
            "            pass",
        ),
        ("verify ignores the manifest", "_check_manifest(place.release, findings) if place.whole else None", "None"),
        ("verify ignores the weights", "            _check_files(place, certificate, findings)", "            pass"),
    ),
    *mutations(
        "release/test_verify",
        "release/verify.py",
        ("added files pass", "    for name in sorted(present - hashes.keys()):", "    for name in ():"),
        ("missing files pass", "    for name in sorted(hashes.keys() - present):", "    for name in ():"),
        (
            "a reformatted manifest passes",
            '    findings.require(_rewritten(dict(sorted(hashes.items()))) == content, f"{path} is not as it was written.")\n',
            "",
        ),
        ("a hidden hand seed passes", "    if certificate is not None and key.keys.hand_seeded:", "    if False:"),
    ),
    *mutations(
        "release/test_verify",
        "release/verify.py",
        ("a reformatted certificate passes", "    if _rewritten(values) != content:", "    if False:"),
    ),
    *mutations(
        "release/test_commitment",
        "release/verify.py",
        (
            "what the ledger commits to is not compared",
            "        same = claimed[name] == committed[name]\n",
            "        same = True\n",
        ),
        (
            "class names and image shape are not compared with the ledger",
            '    "data_sha256": "facts about the data (class names, image shape)",\n',
            "",
        ),
        ("a ledger without commitment passes", "    if committed is None:\n", "    if False:\n"),
        (
            "an older certificate escapes the commitment",
            '    if header["format"] < COMMITTING_FORMAT:',
            "    if certificate.format < 4:",
        ),
        (
            "an empty folder passes",
            "    for folder in empty_folders(release):",
            "    for folder in ():",
        ),
    ),
    *mutations(
        "release/test_commitment",
        "storage/run_folder.py",
        (
            "the owner keeps no mark of the release",
            "CERTIFICATE, self._withdrawn, self._released):",
            "CERTIFICATE, self._withdrawn):",
        ),
    ),
    *mutations(
        "storage/test_run_folder",
        "storage/run_folder.py",
        (
            "a release is written without commitment",
            "committed_release(entries) != released:",
            "False:",
        ),
    ),
    *mutations(
        "storage/test_run_folder",
        "storage/files.py",
        ("files are not flushed", "            os.fsync(file.fileno())\n", ""),
    ),
)
