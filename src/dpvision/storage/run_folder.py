"""The folder of one run: ``release/`` may be given away, ``private/`` may not.

``RunFolder`` decides who may write (one process at a time) and in which order files appear, so that at no moment there
is a certificate that claims less than the ledger. The module also reads and writes the example images of a release,
which are public test images only. It does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, final, get_args

import numpy as np
from numpy.typing import NDArray

from dpvision.errors import ArgumentError, DPVisionError, PrivacyError, TamperError, brief
from dpvision.privacy.ledger import (
    COMMITTING_FORMAT,
    Entry,
    Ledger,
    committed_release,
    read_ledger,
    release_payload,
)
from dpvision.privacy.mechanism import CountedUnits
from dpvision.privacy.randomness import Keys
from dpvision.storage.checkpoint import Checkpoint, inspect_checkpoints, latest_checkpoint, save_checkpoint
from dpvision.storage.files import (
    disk_errors,
    file_sha256,
    json_bytes,
    ledger_mark,
    parse_object,
    read_file,
    sha256_hex,
    sync_folder,
    tensors_of,
    write_atomically,
)

# Shapes: K examples, C channels, H × W pixels.


EXAMPLES = "examples.safetensors"
Rank = Literal["best", "median", "worst"]
Pixels = NDArray[np.uint8]
_MOST_EXAMPLES = 32


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One public test image with its mask and the prediction.

    Attributes:
        rank: which of the examples it is, by Dice score.
        dice: the Dice score, 0 to 1.
        owner: the patient, if known.
        image_CHW: bytes.
        truth_HW: the class of every pixel.
        predicted_HW: the predicted class of every pixel.
    """

    rank: Rank
    dice: float
    owner: str | None
    image_CHW: Pixels
    truth_HW: Pixels
    predicted_HW: Pixels


def examples_bytes(examples: Sequence[Example]) -> bytes:
    """Write examples as a safetensors file; equal examples give equal bytes."""
    from safetensors.numpy import save

    words = [{"rank": each.rank, "dice": each.dice, "owner": each.owner} for each in examples]
    arrays = {
        "images": np.stack([each.image_CHW for each in examples]),
        "truth": np.stack([each.truth_HW for each in examples]),
        "predicted": np.stack([each.predicted_HW for each in examples]),
    }
    return save(arrays, {"examples": json.dumps(words, allow_nan=False)})


def parse_examples(content: bytes, *, name: str) -> tuple[Example, ...]:
    """Read examples; ``TamperError`` if the bytes are not what ``examples_bytes`` writes."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(content)
        header = parse_object(content[8 : 8 + int.from_bytes(content[:8], "little")], name=name)
        words = json.loads(header["__metadata__"]["examples"])
        images, truth, predicted = (_bytes_of(arrays[key]) for key in ("images", "truth", "predicted"))
        _require(len(words) <= _MOST_EXAMPLES and len(images) == len(truth) == len(predicted) == len(words))
        _require(images.ndim == 4 and images.shape[1] in (1, 3) and 0 not in images.shape)
        _require(truth.shape == predicted.shape == (len(words), *images.shape[2:]))
        parts = zip(words, images, truth, predicted, strict=True)
        return tuple(_example(each, *pixels) for each, *pixels in parts)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise TamperError(f"{name} is not what dpvision writes: {brief(error)}.") from error


def _example(words: dict[str, Any], image: Pixels, truth: Pixels, predicted: Pixels) -> Example:
    """Check the facts of one example."""
    rank, dice, owner = words["rank"], words["dice"], words["owner"]
    _require(rank in get_args(Rank) and type(dice) is float and 0 <= dice <= 1)
    _require(owner is None or isinstance(owner, str))
    return Example(rank=rank, dice=dice, owner=owner, image_CHW=image, truth_HW=truth, predicted_HW=predicted)


def _bytes_of(array: NDArray[Any]) -> Pixels:
    """Require an array of bytes."""
    _require(array.dtype == np.uint8)
    return array


def _require(holds: bool) -> None:
    """Raise ``ValueError`` unless a rule holds."""
    if not holds:
        raise ValueError("its examples don't fit together")


if TYPE_CHECKING:
    from torch import Tensor

LEDGER, CONFIG, WEIGHTS, METRICS = "ledger.jsonl", "config.json", "weights.safetensors", "metrics.json"
REPORT, CERTIFICATE, MANIFEST = "report.html", "certificate.json", "manifest.json"
CERTIFICATE_PAGE, CARD, SIGNATURE = "certificate.md", "model_card.md", "signature.json"
SEARCH_LEDGER = "search.jsonl"
"""The ledger of the search that a released run is the result of."""
OWN_LOOP = "training loop"
"""The task in the configuration of a run of ``PrivateRun``."""
_OWN_FILES = frozenset(
    {LEDGER, SEARCH_LEDGER, CONFIG, WEIGHTS, METRICS, CERTIFICATE, MANIFEST, CERTIFICATE_PAGE, CARD, SIGNATURE}
)
_OF_A_START = frozenset({"lock", "checkpoints", "key.json", "started-in.json", CONFIG, LEDGER})
"""What a run has written before its first checkpoint."""
_TEMPORARY = re.compile(r"\..+\.tmp")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@final
@dataclass(frozen=True)
class StoredKey:
    """The run's secret and what it is bound to, one binding per fork."""

    keys: Keys
    run_id: str
    bindings: tuple[dict[str, str], ...]


@final
class RunFolder:
    """The folder of one run. The first method that writes locks it against other processes; ``close`` lets it go."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.release = root / "release"
        self.private = root / "private"
        self.checkpoints = self.private / "checkpoints"
        self.ledger_path = self.release / LEDGER
        self.key_path = self.private / "key.json"
        self.count_path = self.private / "counted-units.json"
        self.failure_path = self.private / "unsafe_failure.json"
        self._started_in = self.private / "started-in.json"
        self._withdrawn = self.private / "withdrawn-certificate.json"
        self._released = self.private / "released-ledger.json"
        self._unlock: weakref.finalize[[int], RunFolder] | None = None

    @staticmethod
    def create(path: Path) -> RunFolder:
        """A new, empty run folder, locked. A folder that holds anything already is left alone."""
        folder = RunFolder(path)
        RunFolder.require_new(path)
        with disk_errors(f"make the run folder {path}"):
            path.mkdir(parents=True, exist_ok=True)
            folder._claim()
            folder.release.mkdir(exist_ok=True)
            folder.checkpoints.mkdir(mode=0o700, exist_ok=True)
            sync_folder(path)
        folder.lock()
        return folder

    @staticmethod
    def require_new(path: Path) -> None:
        """Refuse a folder that holds anything already; nothing is made."""
        with disk_errors(f"make the run folder {path}"):
            if path.is_dir() and any(path.iterdir()):
                raise ArgumentError(f"{path} must be a new or an empty folder. Choose another one, or resume that run.")

    def _claim(self) -> None:
        """Make ``private/``: of several processes that try to begin a run here, one succeeds."""
        try:
            self.private.mkdir(mode=0o700)
        except FileExistsError as error:
            raise ArgumentError(f"another run has just begun in {self.root}. Choose another folder.") from error

    @staticmethod
    def open(path: Path) -> RunFolder:
        """Open an existing run folder for reading; it is locked when it is first written to.

        Raises:
            ArgumentError: if the folder is not that of a run.
            TamperError: if ``release/``, which held the ledger, is gone.
            DPVisionError: if the run stopped before its first checkpoint.
        """
        folder = RunFolder(path)
        if folder.release.is_dir():
            return folder
        if any(folder.checkpoints.glob("*.safetensors")):
            raise TamperError(f"{folder.release} is missing: the ledger was in it. Put it back.")
        if folder.private.is_dir():
            raise DPVisionError(
                f"{path} stopped before its first checkpoint: start again in another folder. Nothing was spent."
            )
        raise ArgumentError(f"{path} must be a run folder: it has no release/. Give what dpvision train made.")

    @staticmethod
    def open_release(path: Path) -> RunFolder:
        """Open a run folder, or a copy of its release folder under any name, to read the release alone."""
        if (path / "release").is_dir() or not (path / CERTIFICATE).is_file():
            return RunFolder.open(path)
        folder = RunFolder(path)
        folder.release, folder.ledger_path = path, path / LEDGER
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def lock(self) -> None:
        """Keep other processes from writing here, until ``close`` or the end of this process."""
        if self._unlock is None:
            # A folder that was copied from elsewhere may hold links, which would lead what is written here out of it.
            for folder in (self.release, self.private, self.checkpoints):
                if folder.is_symlink():
                    raise TamperError(f"{folder} must be a folder, not a link to one. Put the real one there.")
            with disk_errors(f"lock {self.root}"):
                self._unlock = weakref.finalize(self, os.close, _locked(self.private / "lock", self.root))

    def in_use(self) -> bool:
        """Whether a process has locked the folder."""
        import fcntl

        try:
            descriptor = os.open(self.private / "lock", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def close(self) -> None:
        """Let other processes write here."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def save_key(self, keys: Keys, *, run_id: str, bindings: Iterable[Mapping[str, str]]) -> None:
        """Store the secret for resuming, readable by its owner only."""
        values = {
            "secret": keys.secret.hex(),
            "context": keys.context,
            "hand_seeded": keys.hand_seeded,
            "run_id": run_id,
            "bindings": [dict(binding) for binding in bindings],
        }
        self._write(self.key_path, json_bytes({**values, "sha256": _digest(values)}), mode=0o600)

    def load_key(self) -> StoredKey:
        """Load the secret; ``TamperError`` if any bit changed, because other noise would pass for the charged one."""
        values = parse_object(read_file(self.key_path), name=str(self.key_path))
        claimed = values.pop("sha256", None)
        if claimed != _digest(values):
            raise TamperError(f"{self.key_path} was changed: its hash does not fit. Put the old one back.")
        try:
            _require_key(values)
            keys = Keys(bytes.fromhex(values["secret"]), values["context"], hand_seeded=values["hand_seeded"])
            return StoredKey(keys, values["run_id"], tuple(values["bindings"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TamperError(f"{self.key_path} is not what dpvision writes: {error}.") from error

    def save_count(self, counted: CountedUnits) -> None:
        """Record a noisy count before it is used, so that a run has one."""
        self._write(self.count_path, json_bytes(asdict(counted)), mode=0o600)

    def load_count(self) -> CountedUnits | None:
        """Return the recorded count; None if nothing was counted."""
        if not self.count_path.exists():
            return None
        try:
            return CountedUnits(**parse_object(read_file(self.count_path), name=str(self.count_path)))
        except (TypeError, ArgumentError) as error:
            raise TamperError(f"{self.count_path} is not what dpvision writes: {error}") from error

    def require_loop(self, *, own: bool) -> None:
        """Refuse a run of the other kind: one of ``PrivateRun`` has no configuration that a command could follow.

        Args:
            own: whether the caller continues a user's own training loop.

        Raises:
            ArgumentError: the run is of the other kind.
        """
        path = next((p for p in (self.private / CONFIG, self.release / CONFIG) if p.exists()), None)
        if path is None:
            return  # the caller says what is missing
        is_own = parse_object(read_file(path), name=str(path)).get("task") == OWN_LOOP
        if is_own and not own:
            raise ArgumentError(
                f"{self.root} was trained in a loop of your own (PrivateRun): only your program has the model and the "
                "data. verify and report work. Resume it with PrivateRun.resume; to use the model, load "
                f"release/{WEIGHTS} into it."
            )
        if own and not is_own:
            raise ArgumentError(f"{self.root} was made by dpvision train: continue it with dpvision resume.")

    def open_ledger(self) -> Ledger:
        """Open the ledger for writing. It must hold everything that a checkpoint or a certificate states of it.

        Guarantee: before it grows, the certificate of the shorter ledger is withdrawn.
        """
        self.lock()
        longest = max(self.known_marks().values(), default=None)
        return Ledger.open(self.ledger_path, at_least=longest, before_growth=self.withdraw_release)

    def known_marks(self) -> dict[str, tuple[int, str]]:
        """(length, head) of the ledger in each whole checkpoint, each certificate and the last release, by file."""
        files = inspect_checkpoints(self.checkpoints)
        marks = {file.path.name: file.ledger for file in files if file.problem is None}
        for path in (self.release / CERTIFICATE, self._withdrawn, self._released):
            if path.exists() or path.is_symlink():
                mark = ledger_mark(parse_object(read_file(path), name=str(path)).get("ledger"))
                if mark is None:
                    raise TamperError(f"{path} does not say how long the ledger was. Put the old one back.")
                marks[path.name] = mark
        return marks

    def save_checkpoint(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Path:
        """Write a checkpoint and keep the last two. ``values["ledger"]`` is ``Ledger.mark`` at this moment."""
        self.lock()
        with disk_errors(f"write a checkpoint into {self.checkpoints}"):
            return save_checkpoint(self.checkpoints, step, tensors, values)

    def latest_checkpoint(self) -> Checkpoint | None:
        """Load the newest whole checkpoint; None before the first, ``TamperError`` if only damaged ones are left."""
        return latest_checkpoint(self.checkpoints)

    def write_config(self, text: str) -> None:
        """Write the released configuration, which is public from the start."""
        self._write(self.release / CONFIG, text.encode())

    def write_whole_config(self, text: str) -> None:
        """Write the configuration with its paths, for resuming."""
        self._write(self.private / CONFIG, text.encode(), mode=0o600)

    def read_whole_config(self) -> str:
        """Read the configuration with its paths."""
        return read_file(self.private / CONFIG).decode(errors="replace")

    def note_start(self, *, job: str | None = None, asked: str | None = None) -> None:
        """Record the present directory, from which relative paths are meant, the job of torchrun, if any, and a digest
        of the configuration that was asked for.
        """
        noted = {"folder": str(Path.cwd()), "job": job, "asked": asked}
        self._write(self._started_in, json_bytes(noted), mode=0o600)

    def remove_unspent(self) -> None:
        """Remove a run that stopped before its first checkpoint, if it charged nothing; else leave it as it is.

        Guarantee: nothing is removed but what a run writes before that checkpoint: the folder may be another one, whose
        owner keeps files in a ``private`` and a ``release`` too.
        """
        if not self._is_start():
            return
        self.lock()
        charged = self.ledger_path.exists() and any(entry.kind == "charge" for entry in read_ledger(self.ledger_path))
        if not charged and self._is_start():
            with disk_errors(f"remove {self.root}"):
                for folder in (self.release, self.checkpoints):
                    shutil.rmtree(folder, ignore_errors=True)
                # The lock goes last: until then no other process can begin a run here.
                for path in sorted(self.private.iterdir(), key=lambda path: path.name == "lock"):
                    path.unlink()
                self.private.rmdir()
        self.close()

    def _is_start(self) -> bool:
        """Whether there is nothing but what a run writes before its first checkpoint; the lock is its first file."""
        known = _OF_A_START if (self.private / "lock").is_file() else frozenset({self.checkpoints.name})
        with disk_errors(f"look into {self.root}"):
            folders = [each for each in (self.release, self.private, self.checkpoints) if each.is_dir()]
            found = {path.name for folder in folders for path in folder.iterdir()}
        return all(name in known or (len(known) > 1 and _TEMPORARY.fullmatch(name)) for name in found)

    def started_by(self) -> str | None:
        """Return the job of torchrun that started the run; None if there was none."""
        return self._noted("job")

    def asked_for(self) -> str | None:
        """Return the digest of the configuration that the run was started with; None for a run of an older version."""
        return self._noted("asked")

    def _noted(self, name: str) -> str | None:
        """Return a value of ``note_start``."""
        if not self._started_in.exists():
            return None
        value = parse_object(read_file(self._started_in), name=str(self._started_in)).get(name)
        return value if isinstance(value, str) else None

    def started_in(self) -> Path | None:
        """Return the directory in which the run was started; None for a run of an older version."""
        if not self._started_in.exists():
            return None
        folder = parse_object(read_file(self._started_in), name=str(self._started_in)).get("folder")
        return Path(folder) if isinstance(folder, str) else None

    def read_config(self) -> str:
        """Read the released configuration."""
        return read_file(self.release / CONFIG).decode(errors="replace")

    def write_unsafe(self, name: str, values: Mapping[str, Any]) -> None:
        """Write metrics that were computed from private data without noise: never part of the release."""
        self._write(self.private / f"unsafe_{_plain(name)}.json", json_bytes(values), mode=0o600)

    def write_release(
        self,
        *,
        weights: bytes,
        certificate: Mapping[str, Any],
        metrics: Mapping[str, Any],
        config: str | None = None,
        pages: Mapping[str, str] | None = None,
    ) -> None:
        """Write the files that may be given away: the certificate near the end, the manifest last.

        Args:
            weights: the safetensors file.
            certificate: made from the ledger, these weights and this configuration.
            metrics: of the final model.
            config: the released configuration; by default the one already there.
            pages: texts about the certificate, by file name.

        Raises:
            PrivacyError: if the certificate was made from another ledger, weights or configuration.

        Guarantee: at no moment is there a certificate that claims less than the ledger. It is checked against the
        ledger on
        disk, and an old one is withdrawn first.
        """
        text = self.read_config() if config is None else config
        self._require_true(certificate, weights=weights, config=text.encode())
        self.withdraw_release()
        # Someone who rewrites the ledger's last entry, the certificate and the manifest does not have this mark.
        self._write(self._released, json_bytes({"ledger": certificate["ledger"]}), mode=0o600)
        self.write_config(text)
        self._write(self.release / WEIGHTS, weights)
        self._write(self.release / METRICS, json_bytes(metrics))
        for name, page in (pages or {}).items():
            self._write(self.release / _plain(name), page.encode())
        self._write(self.release / CERTIFICATE, json_bytes(certificate))
        # The manifest does not cover files that others put there.
        own = [name for name in release_files(self.release) if name in _OWN_FILES or name in (pages or {})]
        hashes = {name: file_sha256(self.release / name) for name in own}
        self._write(self.release / MANIFEST, json_bytes(hashes))

    def release_is_whole(self) -> bool:
        """Whether there is a certificate, and the files are those of the manifest, with the hashes that it states."""
        path = self.release / MANIFEST
        if not path.exists() or not (self.release / CERTIFICATE).exists():
            return False
        hashes = parse_object(read_file(path), name=str(path))
        if release_files(self.release) != sorted(hashes):
            return False
        return all(file_sha256(self.release / name) == known for name, known in hashes.items())

    def _require_of_ledger(self, certificate: Mapping[str, Any]) -> tuple[Entry, ...]:
        """Require a certificate that was made from the ledger as it is on disk, and return the ledger's entries."""
        entries = read_ledger(self.ledger_path)
        if certificate["ledger"] != {"length": len(entries), "head": entries[-1].hash}:
            raise PrivacyError("the certificate was not made from the ledger as it is on disk. Build it again.")
        return entries

    def _require_true(self, certificate: Mapping[str, Any], *, weights: bytes, config: bytes) -> None:
        """Require a certificate of this ledger, these weights and this configuration, to which the ledger commits."""
        entries = self._require_of_ledger(certificate)
        if certificate["weights_sha256"] != sha256_hex(weights) or certificate["config_sha256"] != sha256_hex(config):
            raise PrivacyError("the certificate was made for other weights or another configuration. Build it again.")
        names = ("weights_sha256", "config_sha256", "data")
        released = release_payload(**{name: certificate[name] for name in names})
        if entries[0].payload["format"] >= COMMITTING_FORMAT and committed_release(entries) != released:
            raise PrivacyError(
                "the ledger does not commit to these weights, this configuration and this description of the data. "
                "Call Ledger.commit_release, then build the certificate."
            )

    def withdraw_release(self) -> None:
        """Remove the certificate, the manifest and everything that refers to them from ``release/``; keep their marks.

        A page, a report or an audit of the shorter run must not be covered by the manifest of the longer one.
        """
        self.lock()
        spoken = (SIGNATURE, MANIFEST, CERTIFICATE_PAGE, CARD, REPORT, EXAMPLES, *self._attachments())
        with disk_errors(f"withdraw the certificate in {self.release}"):
            if (self.release / CERTIFICATE).exists():
                os.replace(self.release / CERTIFICATE, self._withdrawn)
                sync_folder(self.private)
            for name in spoken:
                (self.release / name).unlink(missing_ok=True)
            self._clear_leftovers()
            sync_folder(self.release)

    def _attachments(self) -> list[str]:
        """List the files that the certificate names; none if there is no whole certificate."""
        try:
            values = parse_object(read_file(self.release / CERTIFICATE), name=CERTIFICATE)
            named = [str(each["name"]) for each in values.get("attachments", [])]
        except (DPVisionError, TypeError, KeyError):
            return []  # a damaged certificate names nothing: verify will find what is left
        return [name for name in named if _PLAIN_NAME.fullmatch(name) and name not in _OWN_FILES]

    def add_to_release(self, name: str, content: bytes) -> None:
        """Add one more file (a report, a model card) to a finished release and to its manifest.

        The other files keep their hashes: adding a file does not make a changed one right.
        """
        self._require_free(name)
        self._grow({name: content})

    def attach(self, name: str, content: bytes, *, certificate: Mapping[str, Any], pages: Mapping[str, str]) -> None:
        """Add one more file that the certificate names, with the certificate, its pages and the manifest.

        A crash leaves a manifest that does not match; ``dpvision resume`` then writes the release again.
        """
        self._require_free(name)
        self._require_of_ledger(certificate)
        texts = {page: text.encode() for page, text in pages.items()}
        self._grow({name: content, **texts, CERTIFICATE: json_bytes(certificate)})

    def write_signature(self, content: bytes, release: Path) -> None:
        """Write a signature beside the manifest in ``release``, which may be away from its run and have another
        name.
        """
        if release == self.release and self.private.is_dir():
            self.lock()
        with disk_errors(f"write {release / SIGNATURE}"):
            write_atomically(release / SIGNATURE, content)

    def _require_free(self, name: str) -> None:
        """Refuse names of the run's own files, and any file in a signed release."""
        if _plain(name) in _OWN_FILES:
            raise ArgumentError(f"{name} is written by the run itself. Choose another name.")
        if (self.release / SIGNATURE).exists():
            raise ArgumentError(
                f"{self.release} is signed, and one more file would break the signature. Delete {SIGNATURE}, and sign "
                "again after this."
            )

    def _grow(self, files: Mapping[str, bytes]) -> None:
        """Write files into the release and their hashes into the manifest."""
        path = self.release / MANIFEST
        hashes = parse_object(read_file(path), name=str(path))
        self._clear_leftovers()
        for name, content in files.items():
            self._write(self.release / name, content)
        hashes |= {name: sha256_hex(content) for name, content in files.items()}
        self._write(path, json_bytes(dict(sorted(hashes.items()))))

    def _clear_leftovers(self) -> None:
        """Delete temporary files of a process that was killed."""
        self.lock()
        for path in (*self.release.glob(".*.tmp"), *self.private.glob(".*.tmp")):
            path.unlink(missing_ok=True)

    def load_weights(self, *, sha256: str | None = None) -> dict[str, Tensor]:
        """Load the released weights.

        Args:
            sha256: their digest; by default the one in the certificate.

        Raises:
            TamperError: if the file has another digest.
        """
        if sha256 is None:
            certificate = parse_object(read_file(self.release / CERTIFICATE), name=str(self.release / CERTIFICATE))
            sha256 = certificate.get("weights_sha256")
        path = self.release / WEIGHTS
        content = read_file(path, limit=None)
        if sha256 != sha256_hex(content):
            raise TamperError(f"{path} is not the file that the certificate names. Get the release again.")
        return tensors_of(content, name=str(path))

    def _write(self, path: Path, content: bytes, *, mode: int = 0o644) -> None:
        """Write one file atomically, under the lock."""
        self.lock()
        with disk_errors(f"write {path}"):
            write_atomically(path, content, mode=mode)


def release_files(release: Path) -> list[str]:
    """List every file below ``release/`` but the manifest and its signature, links included, by relative name."""
    files = (path for path in release.rglob("*") if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(release).as_posix() for path in files)
    return sorted(name for name in names if name not in {MANIFEST, SIGNATURE})


def empty_folders(release: Path) -> list[str]:
    """List every empty folder below ``release/``, by relative name; a run writes none."""
    folders = (path for path in release.rglob("*") if path.is_dir() and not path.is_symlink())
    return sorted(path.relative_to(release).as_posix() for path in folders if not any(path.iterdir()))


def _locked(path: Path, root: Path) -> int:
    """Return a descriptor that holds the lock; the system releases it when the process ends, however it ends."""
    import fcntl  # not on every system; reading needs no lock

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            # Another process removed the run between the two calls above; this lock is of a file that is gone.
            raise DPVisionError(f"{root} was removed and begun again by another process.")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
        os.close(descriptor)
        raise DPVisionError(f"{root} is in use by process {owner}. Wait until it ends, or stop it.") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_key(values: dict[str, Any]) -> None:
    """Check the fields' types: who can write the file can correct its hash too."""
    bindings = values["bindings"]
    facts = [each for binding in bindings for each in binding.items()] if bindings else []
    texts = [values["context"], values["run_id"], *(part for fact in facts for part in fact)]
    if not (facts and isinstance(bindings, list) and all(isinstance(text, str) for text in texts)):
        raise ValueError("its fields are not texts")
    if not (type(values["hand_seeded"]) is bool and "".join(texts).isascii()):
        raise ValueError("its fields are not plain texts")


def _digest(values: dict[str, Any]) -> str:
    """The hash of the key file's values."""
    return sha256_hex(json.dumps(values, sort_keys=True).encode())


def _plain(name: str) -> str:
    """Refuse a file name that could lead elsewhere."""
    if not _PLAIN_NAME.fullmatch(name):
        raise ArgumentError(f"a file name must be plain letters, digits, dots and dashes, got {name!r}.")
    return name
