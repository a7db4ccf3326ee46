"""Breakages of kept features, of weights from elsewhere, and of what learns."""

from __future__ import annotations

from tools.mutations.mutation import mutations

TRANSFER = (
    *mutations(
        "data/test_features",
        "data/features.py",
        (
            "padding rows carry the first image's features",
            "as_microbatch(inputs, self._labels.index_select(0, of_image), rows_UR, self._ways)",
            "as_microbatch(inputs, self._labels.index_select(0, of_image), np.maximum(rows_UR, 0), self._ways)",
        ),
        ("the mirror image is the image", "images * self._ways + way", "images * self._ways + 0 * way"),
        ("half precision overflows", "            if dtype == torch.float16:\n", "            if False:\n"),
        ("damaged features are taken", 'path.name == f"{key}-{found.digest}.npy"', "found.ways"),
        ("others may list the features", "exist_ok=True, mode=0o700)", "exist_ok=True)"),
    ),
    *mutations(
        "data/test_features",
        "data/batches.py",
        (
            "each orientation has a whole share",
            "count_U = np.maximum(there_UR.sum(axis=1, keepdims=True), 1)",
            "count_U = np.maximum((rows_UR != NO_ROW).sum(axis=1, keepdims=True), 1)",
        ),
    ),
    *mutations(
        "data/test_features",
        "models/backbone.py",
        ("dropout is computed once", " and _same_in_both_modes(backbone, example)", ""),
        ("a front may mix rows", " and _rows_apart(backbone, example)", ""),
        ("any module is a chain", "chain if torch.equal(one(example), other(example)) else None", "chain"),
    ),
    *mutations(
        "data/test_features",
        "training/stages.py",
        ("random views are computed once", " or not (as_it_is or mirrored(config.views))", ""),
        (
            "features are always kept in full",
            "return torch.float16 if 2 * numbers <= FEATURE_BYTES else None",
            "return torch.float32",
        ),
        ("mirror images are left out", "cut.backbone, dtype, mirrored(config.views))", "cut.backbone, dtype)"),
    ),
    *mutations(
        "data/test_features",
        "training/start.py",
        ("the key is not bound to the features", "binding if features is None else {", "binding if True else {"),
    ),
    *mutations(
        "data/test_features",
        "training/stages.py",
        ("other pictures have the same features", "store.fingerprint(), ", ""),
        ("other constants have the same features", "str(normalisation), ", ""),
    ),
    *mutations(
        "training/test_initial_weights",
        "training/stages.py",
        ("everything learns", "requires_grad_(name in stage.trained)", "requires_grad_(True)"),
        ("the phases share a plan", '"all"), copy.copy(model))', '"all"), model)'),
    ),
    *mutations(
        "training/test_initial_weights",
        "training/trainer.py",
        (
            "nobody looks between two phases",
            "            self.optimizer.check_untouched()  # the next optimizer takes the weights as it finds them\n",
            "",
        ),
        (
            "a resumed run changes phase too early",
            "stage_at(self.stages, max(0, self.step - 1))",
            "stage_at(self.stages, self.step)",
        ),
    ),
    *mutations(
        "training/test_initial_weights",
        "privacy/optimizer.py",
        (
            "a later optimizer counts from zero",
            "        self._steps_taken = first_step\n",
            "        self._steps_taken = 0\n",
        ),
    ),
    *mutations(
        "training/test_initial_weights",
        "training/initial_weights.py",
        ("the old head stays", "if (head or not name.startswith(head_name)) and not", "if not"),
        (
            "what is missing stays as drawn",
            "if missing or unexpected or twice or misshapen:",
            "if unexpected or twice or misshapen:",
        ),
        ("the last of two tensors wins", "if times[name] > 1]", "if times[name] > 2]"),
    ),
    *mutations(
        "training/test_initial_weights",
        "training/initial_weights.py",
        ("weight files may execute", 'map_location="cpu", weights_only=True', 'map_location="cpu", weights_only=False'),
        ("weights may fill the memory", "    if size > MAX_GROWTH * len(content):\n", "    if False:\n"),
        ("the last of two arrays wins", "    if len(found) < len(members):\n", "    if False:\n"),
        ("a full memory is a crash", "    except MemoryError as error:", "    except BufferError as error:"),
    ),
    *mutations(
        "properties/test_hostile_files data/test_npz",
        "data/safe_read.py",
        ("arrays may execute", "    if dtype.hasobject:\n", "    if False:\n"),
        ("arrays may promise more", "    if promised != size - file.tell():", "    if False:"),
    ),
    *mutations(
        "training/test_initial_weights",
        "data/features.py",
        ("features are kept where others read", "    _require_own(folder)\n", "    folder.mkdir(exist_ok=True)\n"),
        ("features may be a link", "folder.lstat()", "folder.stat()"),
    ),
    *mutations(
        "training/test_initial_weights",
        "training/initial_weights.py",
        ("any file will do", "if expected not in (None, found.sha256):", "if False:"),
        ("nobody says what weights were trained on", "    if found.source is None:\n", "    if False:\n"),
    ),
    *mutations(
        "training/test_lineage",
        "training/initial_weights.py",
        ("a run's file passes for public", "        require_outside_runs(path)\n", ""),
    ),
    *mutations(
        "training/test_lineage",
        "training/lineage.py",
        ("a link hides the run", "path.resolve().parents", "path.absolute().parents"),
        ("grandparents are forgotten", "transfer=_parsed(own),", "transfer=None,"),
        (
            "hidden ancestors are none",
            "began_elsewhere=own is not None or any(item.what == FIRST_WEIGHTS for item in certificate.declared)",
            "began_elsewhere=own is not None",
        ),
        ("weights are swapped after the check", "load_weights(sha256=certificate.weights_sha256)", "load_weights()"),
        ("the history is swapped after the check", "if sha256_hex(content) != certificate.config_sha256:", "if False:"),
        ("the last name of the data counts", "data=noted or (", "data=noted[-1:] or ("),
    ),
    *mutations(
        "training/test_lineage",
        "training/lineage.py",
        ("ancestors end at the parent", "None if transfer.prior is None else transfer.prior.transfer", "None"),
        ("earlier stamps are forgotten", "for stamp in prior.stamps)", "for stamp in prior.stamps[:0])"),
        ("weights of the same data pass for public", "    elif data in prior.data:\n", "    elif False:\n"),
        ("known data pass for other data", "known is not None and known.covers(data)", "known is not None and False"),
        ("an unknown history is not stamped", "    if _is_gap(prior):\n        yield", "    if False:\n        yield"),
        ("an unknown history has a sum", "    if any(_is_gap(run) for run in runs):\n", "    if False:\n"),
        ("epsilons of all kinds add up", "    if len(set(kinds)) > 1:\n", "    if False:\n"),
        ("the sum knows one earlier run", "math.fsum([*epsilons, planned", "math.fsum([*epsilons[:1], planned"),
        (
            "the deltas of earlier runs are left out",
            "math.fsum([*(delta for _, _, delta in private), own_delta])",
            "own_delta",
        ),
        ("the user's words replace the run's", 'trained_on = ", ".join(transfer.prior.data)', "pass"),
        ("the ledger knows no stamp", '{"what": NOT_FOR_RELEASE,', '{"what": "first weights",'),
        (
            "the ledger knows no name of the data",
            '    ledger.note("declare", {"what": TRAINING_DATA, "how": config.data.name})\n',
            "",
        ),
    ),
    *mutations(
        "training/test_lineage",
        "training/resume.py",
        (
            "a fork to other data is not stamped",
            "    note_declarations(ledger, config, splits)  # a fork may have brought other data or settings\n",
            "",
        ),
    ),
    *mutations(
        "training/test_lineage",
        "release/statements.py",
        ("stamps of the ledger are left out", 'if note["what"] == NOT_FOR_RELEASE]', "if False]"),
    ),
    *mutations(
        "training/test_lineage",
        "privacy/mechanism.py",
        ("bounds are rounded to the nearest", "prec=digits, rounding=ROUND_CEILING", "prec=digits"),
    ),
    *mutations(
        "training/test_lineage",
        "release/verify.py",
        ("other data than the ledger's pass", 'not names or source in names, f"certificate', 'True, f"certificate'),
    ),
    *mutations(
        "training/test_lineage",
        "release/verify.py",
        (
            "a release that is not in order will do",
            "if problems or self.certificate is None",
            "if self.certificate is None",
        ),
    ),
    *mutations(
        "training/test_lineage",
        "training/pretrained.py",
        ("parts of ImageNet pass for other data", '"*imagenet*"', '"imagenet"'),
    ),
    *mutations(
        "training/test_pretrained",
        "training/pretrained.py",
        (
            "the default takes weights that were trained on the data",
            " and not KNOWN_WEIGHTS[DEFAULT].covers(config.data.name)",
            "",
        ),
        ("refused weights are used", "left_open = config.pretrained and config.model", "left_open = config.model"),
        ("a resumed run takes other weights", "    if found != transfer.sha256:\n", "    if False:\n"),
    ),
    *mutations(
        "training/test_finding_runs",
        "models/losses.py",
        (
            "a row with unknown labels is divided by the known ones",
            "return (each_NF * known_NF).sum(1) / outputs_NF.shape[1]",
            "return (each_NF * known_NF).sum(1) / known_NF.sum(1).clamp(min=1)",
        ),
        ("unknown labels count as absent", "(each_NF * known_NF).sum(1)", "each_NF.sum(1)"),
    ),
    *mutations(
        "training/test_finding_runs",
        "data/finding_table.py",
        ("uncertain labels count as absent", 'return float("nan")', "return 0.0"),
        ("an image without a row is trained on", "    if missing:\n", "    if False:\n"),
    ),
    *mutations(
        "training/test_baseline",
        "training/baseline.py",
        (
            "the baseline on private images is released",
            "return config.data.public_data or config.data.source in dataset_names()",
            "return True",
        ),
        (
            "the baseline's result is read without the declaration",
            "if not images_are_declared_public(config) or not path.is_file():",
            "if not path.is_file():",
        ),
        (
            "a private run is tuned on its own images",
            'if config.privacy.enabled:\n        raise PrivacyError("a rate',
            'if False:\n        raise PrivacyError("a rate',
        ),
        (
            "a private run's features are chosen on its own images",
            "if config.privacy.enabled or named or",
            "if named or",
        ),
    ),
    *mutations(
        "training/test_pretrained",
        "models/backbone.py",
        (
            "grey images fill one channel of three",
            "x_N1HW.repeat(1, COLOUR_CHANNELS, 1, 1)",
            "torch.cat([x_N1HW, 0 * x_N1HW, 0 * x_N1HW], 1)",
        ),
    ),
    *mutations(
        "training/test_initial_weights",
        "config.py",
        ("the path of the weights is released", 'update={"weights": Path(self.transfer.weights).name}', "update={}"),
    ),
)
