"""A run on disk: ``release/`` may be given away, ``private/`` may not.

Every file is written whole or not at all, and nothing is written outside the folder. Torch is imported only where
tensors are turned into bytes or back, so that a run can be verified without it.
"""

from __future__ import annotations

from dpvision.runfolder.checkpoints import Checkpoint, CheckpointFile, inspect_checkpoints
from dpvision.runfolder.content import (
    file_sha256,
    json_bytes,
    parse_object,
    read_file,
    sha256_hex,
    tensors_of,
    weights_bytes,
)
from dpvision.runfolder.examples import EXAMPLES, Example, examples_bytes, parse_examples
from dpvision.runfolder.folder import (
    CARD,
    CERTIFICATE,
    CERTIFICATE_PAGE,
    CONFIG,
    LEDGER,
    MANIFEST,
    METRICS,
    REPORT,
    SIGNATURE,
    WEIGHTS,
    RunFolder,
    StoredKey,
    release_files,
)

__all__ = [
    "CARD",
    "CERTIFICATE",
    "CERTIFICATE_PAGE",
    "CONFIG",
    "EXAMPLES",
    "LEDGER",
    "MANIFEST",
    "METRICS",
    "REPORT",
    "SIGNATURE",
    "WEIGHTS",
    "Checkpoint",
    "CheckpointFile",
    "Example",
    "RunFolder",
    "StoredKey",
    "examples_bytes",
    "file_sha256",
    "inspect_checkpoints",
    "json_bytes",
    "parse_examples",
    "parse_object",
    "read_file",
    "release_files",
    "sha256_hex",
    "tensors_of",
    "weights_bytes",
]
