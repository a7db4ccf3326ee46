"""Breakages of a user's own model and loss: code that nobody named, other code, and what the release says of it."""

from __future__ import annotations

from tools.mutations.mutation import mutations

OWN_CODE = (
    *mutations(
        "test_own_code training/test_own_models",
        "own_code.py",
        ("own code: its hash is not compared", "source is not None and sha256 not in (None, source.sha256)", "False"),
        ("own code: the hash of a Python object is not compared", "if sha256 not in (None, digest):", "if False:"),
        (
            "own code: a release executes what it names itself",
            "    if given is None:\n",
            "    given = given or name\n    if given is None:\n",
        ),
        (
            "own code: modules beside the file are not hashed",
            "    waiting = list(_imports(main, ",
            "    waiting = [] and list(_imports(main, ",
        ),
        ("own code: any function of the file will do", "!= function and not may_differ", "!= function and False"),
        (
            "own code: what is on the disk now is executed",
            "exec(compile(file.content, ",
            "exec(compile(file.path.read_bytes(), ",
        ),
        ("own code: an object counts as repeatable", "all(code is None or code.repeatable", "all(code is None or True"),
    ),
    *mutations(
        "training/test_own_models",
        "training/prepare.py",
        (
            "own code: other code is accepted without a fork",
            'kind="model", may_differ=allow_fork)',
            'kind="model", may_differ=True)',
        ),
        (
            "own code: a hash in the settings is ignored",
            "None if config.model is None else config.model.sha256",
            "None",
        ),
        ("own code: a fork keeps the old hash", "own_model is not None and own_model.sha256 != chosen.sha256", "False"),
    ),
    *mutations(
        "training/test_own_models",
        "training/run_fingerprint.py",
        ("own code: other behaviour, same noise", '{**facts, "own behaviour": content.hexdigest()}', "facts"),
    ),
    *mutations(
        "training/test_own_models",
        "training/stages.py",
        ("own code: outputs are not looked at", "        if problem is not None:\n", "        if False:\n"),
        ("own code: features of own frozen layers are kept", "        own\n        or config", "        config"),
        (
            "own code: the loss is not the user's",
            "        return code.loss.value\n",
            "        return classification_loss\n",
        ),
    ),
    *mutations(
        "training/test_own_models",
        "release/verify.py",
        (
            "own code: the release may name other code",
            "is_noted_own_code(own_code_declarations(config), entries)",
            "True",
        ),
    ),
    *mutations(
        "training/test_own_models",
        "training/declarations.py",
        (
            "own code: it is not declared",
            '    found += own_code_declarations(config.public().model_dump(mode="json"))\n',
            "",
        ),
    ),
)
