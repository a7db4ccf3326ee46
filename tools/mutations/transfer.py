"""Breakages of kept features, of weights from elsewhere, and of what learns."""

from __future__ import annotations

from tools.mutations.mutation import mutations

TRANSFER = (
    *mutations(
        "test_features",
        "data/features.py",
        ("padding rows carry the first picture's features", "        if len(absent):\n", "        if False:\n"),
        (
            "each way of looking has a whole share",
            "row_weights(rows_UR, self.ways)",
            "row_weights(rows_UR, self.ways) * self.ways",
        ),
        ("the mirror image is the picture", "of_picture * self.ways + torch", "of_picture * self.ways + 0 * torch"),
        ("half precision overflows", "            if dtype == torch.float16:\n", "            if False:\n"),
        ("damaged features are taken", 'path.name == f"{key}-{found.digest}.npy"', "found.ways"),
        ("others may list the features", "exist_ok=True, mode=0o700)", "exist_ok=True)"),
    ),
    *mutations(
        "test_features",
        "models/splitting.py",
        ("dropout is computed once", " or not _same_in_both_modes(front, example)", ""),
        ("a front may mix rows", " or not _rows_apart(front, example)", ""),
        ("any module is a chain", "chain if torch.equal(one(example), other(example)) else None", "chain"),
    ),
    *mutations(
        "test_features",
        "training/phases.py",
        ("random views are computed once", " or not (as_it_is or mirrored(config.views))", ""),
        (
            "features are always kept in full",
            "return torch.float16 if 2 * numbers <= FEATURE_BYTES else None",
            "return torch.float32",
        ),
        ("mirror images are left out", "cut.front, dtype, mirrored(config.views))", "cut.front, dtype)"),
    ),
    *mutations(
        "test_features",
        "training/start.py",
        ("the key is not bound to the features", "binding if features is None else {", "binding if True else {"),
    ),
    *mutations(
        "test_features",
        "training/features.py",
        ("other pictures have the same features", "store.fingerprint(), ", ""),
        ("other constants have the same features", "str(normalisation), ", ""),
    ),
    *mutations(
        "test_transfer",
        "training/phases.py",
        ("everything learns", "requires_grad_(name in phase.trained)", "requires_grad_(True)"),
        ("the phases share a plan", "Phase(step, names, copy.copy(model))", "Phase(step, names, model)"),
    ),
    *mutations(
        "test_transfer",
        "training/session.py",
        (
            "nobody looks between two phases",
            "        self.optimizer.check_untouched()  # the next one takes what it finds for granted\n",
            "",
        ),
        (
            "a resumed run changes phase too early",
            "phase_at(learner.phases, max(0, taken - 1))",
            "phase_at(learner.phases, taken)",
        ),
    ),
    *mutations(
        "test_transfer",
        "optim/optimizer.py",
        (
            "a later optimizer counts from zero",
            "        self._steps_taken = first_step\n",
            "        self._steps_taken = 0\n",
        ),
    ),
    *mutations(
        "test_transfer",
        "transfer/fit.py",
        ("the old head stays", "if (head or not name.startswith(head_name)) and not", "if not"),
        ("what is missing stays as drawn", "if missing or unexpected or misshapen:", "if unexpected or misshapen:"),
    ),
    *mutations(
        "test_transfer",
        "transfer/weights.py",
        ("weight files may execute", 'map_location="cpu", weights_only=True', 'map_location="cpu", weights_only=False'),
        ("arrays may execute", "allow_pickle=False", "allow_pickle=True"),
    ),
    *mutations(
        "test_transfer",
        "training/origin.py",
        ("any file will do", "if expected not in (None, found.sha256):", "if False:"),
        ("nobody says what weights were trained on", "    if found.source is None:\n", "    if False:\n"),
        ("earlier stamps are forgotten", "for stamp in prior.stamps)", "for stamp in prior.stamps[:0])"),
        (
            "weights of the same data pass for public",
            "    if prior.data == Path(config.data.source).name:\n",
            "    if False:\n",
        ),
        ("the earlier epsilon is not added", "{_up(prior.epsilon + planned_epsilon)}", "{_up(planned_epsilon)}"),
        ("the sum is rounded down", "math.ceil(value * 1e4)", "math.floor(value * 1e4)"),
    ),
    *mutations(
        "test_transfer",
        "config.py",
        ("the path of the weights is released", 'update={"weights": Path(self.transfer.weights).name}', "update={}"),
    ),
)
