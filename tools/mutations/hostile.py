"""Breakages of what stands between hostile files and the machine."""

from __future__ import annotations

from tools.mutations.mutation import mutations

HOSTILE = (
    *mutations(
        "properties/test_hostile_files",
        "data/safe_read.py",
        ("a device is read", "if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):", "if False:"),
    ),
    *mutations(
        "data/test_npz",
        "data/safe_read.py",
        ("a small file becomes gigabytes", "member.compress_size * MAX_LARGE_RATIO)", "2**62)"),
    ),
    *mutations(
        "data/test_npz",
        "data/npz.py",
        (
            "private labels decide the classes",
            "if part is not parts[0] or options.public or options.classes_are_public]",
            "]",
        ),
    ),
    *mutations(
        "properties/test_hostile_files",
        "data/safe_read.py",
        ("arrays of nothing", "dtype.itemsize == 0 or ", ""),
    ),
    *mutations(
        "properties/test_hostile_files",
        "data/mnist_cifar.py",
        ("an archive unpacks without end", "if self._left < 0:", "if False:"),
    ),
    *mutations(
        "properties/test_hostile_files",
        "config.py",
        ("a name leads out of the folder", 'pattern=r"^[^/\\\\\\x00]{1,200}$"', "min_length=1"),
    ),
    *mutations(
        "properties/test_hostile_files",
        "storage/run_folder.py",
        ("the lock is a link", " | os.O_NOFOLLOW | os.O_NONBLOCK", " | os.O_NONBLOCK"),
        ("a part of the run lies elsewhere", "if folder.is_symlink():", "if False:"),
    ),
    *mutations(
        "properties/test_hostile_files",
        "privacy/ledger.py",
        (
            "the ledger is a link",
            "path.is_symlink() or (path.exists() and not path.is_file())",
            "path.exists() and not path.is_file()",
        ),
    ),
)
