"""The folder of a search: its key, its settings, its ledger, and the locks that let several processes share it.

``SEARCH/release`` holds the ledger of the search and, at the end, the release of the winner. ``SEARCH/private`` holds
everything else: the key, the trials (each a run folder), their scores and Optuna's journal. Any number of processes may
work in one folder; what they do to the ledger is serialised by one lock, and each trial is locked by its process. The
system drops the locks of a process that was killed.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from dpvision.errors import ArgumentError, TamperError
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.randomness import Keys
from dpvision.storage.files import disk_errors, json_bytes, ledger_mark, parse_object, read_file, write_atomically
from dpvision.storage.run_folder import SEARCH_LEDGER, RunFolder

_PASSWORD = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://)[^/?#\s]*@")
_SECRET_QUERY = re.compile(
    r"([?&;]\s*(?:password|passfile|sslpassword|sslkey|user|passwd|pwd|token)\s*=)[^&;\s'\"]*", re.I
)


def redacted(text: str) -> str:
    """Return a text without the user names and passwords of URLs in it."""
    return _SECRET_QUERY.sub(r"\1…", _PASSWORD.sub(r"\g<scheme>…@", text))


@final
class SearchFolder:
    """The files of one search."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.release = root / "release"
        self.private = root / "private"
        self.trials = self.private / "trials"
        self.ledger_path = self.release / SEARCH_LEDGER
        self.journal_path = self.private / "journal.log"
        self.workers_log = self.private / "workers.log"
        self._settings = self.private / "search.json"
        self._key = self.private / "search-key.json"
        self._mark = self.private / "search-mark.json"

    @staticmethod
    def is_search(path: Path) -> bool:
        """Whether a folder is that of a search."""
        return (path / "private" / "search.json").is_file()

    def create(self, keys: Keys, *, values: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        """Make the folder with its key, settings and ledger; the settings are written last.

        A process that is killed here leaves a folder that is not a search, and nothing spent.
        """
        with RunFolder.create(self.root), disk_errors(f"make the folder {self.root}"):
            self.trials.mkdir(mode=0o700)
            key = {"secret": keys.secret.hex(), "hand_seeded": keys.hand_seeded}
            write_atomically(self._key, json_bytes(key), mode=0o600)
            ledger = Ledger.create(self.ledger_path, dict(header))
            write_atomically(self._mark, json_bytes({"ledger": ledger.mark}), mode=0o600)
            write_atomically(self._settings, json_bytes(values), mode=0o600)

    def read_settings(self) -> dict[str, Any]:
        """Return what ``create`` was given."""
        if not self.is_search(self.root):
            raise ArgumentError(f"{self.root} must be the folder of a search: give what dpvision tune made.")
        return parse_object(read_file(self._settings), name=str(self._settings))

    def load_keys(self) -> Keys:
        """Return the key of the search."""
        values = parse_object(read_file(self._key), name=str(self._key))
        try:
            return Keys(bytes.fromhex(values["secret"]), "search", hand_seeded=values["hand_seeded"] is not False)
        except (KeyError, TypeError, ValueError) as error:
            raise TamperError(f"{self._key} is not the key of a search: put the old one back.") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for, and hold, the lock of the search: on its ledger, its list of trials and its release."""
        with disk_errors(f"lock {self.root}"):
            descriptor = os.open(self.private / "search.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def try_trial(self, number: int) -> int | None:
        """Lock one trial for this process; None if another process has it. Close the descriptor to let it go."""
        path = self.trials / f"{number:04d}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    @contextmanager
    def ledger(self) -> Iterator[Ledger]:
        """Open the ledger for writing, under ``locked``. A release is withdrawn before the ledger grows.

        Guarantee: a ledger that is shorter than it was is refused.
        """
        mark = ledger_mark(parse_object(read_file(self._mark), name=str(self._mark)).get("ledger"))
        opened = Ledger.open(self.ledger_path, at_least=mark, before_growth=self._withdraw)
        yield opened
        write_atomically(self._mark, json_bytes({"ledger": opened.mark}), mode=0o600)

    def _withdraw(self) -> None:
        with RunFolder(self.root) as folder:
            folder.withdraw_release()

    def trial_path(self, number: int, attempt: int) -> Path:
        """Return the run folder of one attempt at a trial."""
        return self.trials / f"{number:04d}-{attempt}"

    def started_path(self, number: int, attempt: int) -> Path:
        """Return the file that says that an attempt may have taken steps: without its folder, it is charged again."""
        return self.trials / f"{number:04d}-{attempt}.started"

    def begun(self) -> set[tuple[int, int]]:
        """Return number and attempt of all trials that may have taken steps."""
        return {
            (int(number), int(attempt))
            for number, _, attempt in (path.stem.partition("-") for path in self.trials.glob("*.started"))
        }

    def score_path(self, number: int) -> Path:
        """Return the file with the score of a trial."""
        return self.trials / f"{number:04d}-score.json"

    def write_score(self, number: int, values: Mapping[str, Any]) -> None:
        """Write the score of a trial that ended."""
        write_atomically(self.score_path(number), json_bytes(values), mode=0o600)

    def read_score(self, number: int) -> dict[str, Any] | None:
        """Return the score of a trial; None if it has not ended."""
        path = self.score_path(number)
        return parse_object(read_file(path), name=str(path)) if path.exists() else None
