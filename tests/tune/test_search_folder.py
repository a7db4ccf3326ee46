"""The folder of a search: locks, a ledger that cannot be rolled back, and no passwords."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpvision.errors import TamperError
from dpvision.privacy.ledger import read_ledger
from dpvision.privacy.mechanism import Event
from dpvision.privacy.randomness import Keys
from dpvision.tune.search_folder import SearchFolder, redacted

HEADER = {
    "run_id": "ab",
    "privacy_unit": "example",
    "adjacency": "add_remove",
    "num_units": 100,
    "delta": 1e-3,
    "price": "composition",
}
RELEASES = [(Event(sample_rate=0.1, noise_multiplier=2.0), 5)]


def made(path: Path) -> SearchFolder:
    place = SearchFolder(path / "search")
    place.create(Keys.from_seed(1, "search"), values={"settings": {}}, header=HEADER)
    return place


def test_the_key_is_private_and_comes_back(tmp_path: Path) -> None:
    place = made(tmp_path)
    assert place.load_keys() == Keys.from_seed(1, "search")
    for path in place.private.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_trial_belongs_to_one_process_until_that_ends(tmp_path: Path) -> None:
    place = made(tmp_path)
    lock = place.try_trial(3)
    assert lock is not None
    assert place.try_trial(3) is None
    os.close(lock)
    again = place.try_trial(3)
    assert again is not None
    os.close(again)


def test_a_charge_is_on_disk_and_a_shorter_ledger_is_refused(tmp_path: Path) -> None:
    place = made(tmp_path)
    before = place.ledger_path.read_bytes()
    with place.locked(), place.ledger() as ledger:
        ledger.charge_trial(RELEASES, trial=0)
    assert len(read_ledger(place.ledger_path)) == 2
    place.ledger_path.write_bytes(before)
    with pytest.raises(TamperError, match="rolled back"), place.ledger():
        pass


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://anna:pass@host/db",
        "could not connect to postgresql+psycopg2://anna:p%40ss@host:5432/db?sslmode=require today",
        "mysql://anna:pa:ss@host",
        "postgresql://host/db?user=anna&password=pass",
        "postgresql:///db?host=x&sslpassword=pass",
    ],
)
def test_no_user_and_no_password_of_a_url_is_shown(text: str) -> None:
    shown = redacted(text)
    assert "pass" not in shown.replace("sslpassword=", "").replace("password=", "")
    assert "p%40ss" not in shown
    assert "pa:ss" not in shown
    assert "anna" not in shown
