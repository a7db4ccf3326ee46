"""A PostgreSQL server that a test starts for itself, with a password."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PASSWORD = "s3cret-of-the-database"  # noqa: S105


def _program(name: str) -> str | None:
    found = shutil.which(name)
    return found or next((str(path) for path in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))), None)


def _owner() -> str | None:
    """The user that runs the server, which refuses to run as root."""
    if os.getuid() != 0:
        return None
    names = [entry.pw_name for entry in pwd.getpwall()]
    return next((name for name in ("postgres", "nobody") if name in names), None)


@contextmanager
def postgres_url() -> Iterator[str]:
    """The URL of a new database on a free port of this machine; skips where no server is installed."""
    initdb, postgres = _program("initdb"), _program("postgres")
    if initdb is None or postgres is None:
        pytest.skip("PostgreSQL is not installed")
    pytest.importorskip("psycopg2")
    user = _owner()
    folder = Path(tempfile.mkdtemp(prefix="dpvision-postgres-"))
    try:
        (folder / "password").write_text(PASSWORD)
        if user is not None:
            shutil.chown(folder, user)
            shutil.chown(folder / "password", user)
        data = folder / "data"
        make = [initdb, "-D", data, "-U", "dpvision", "--auth=scram-sha-256", f"--pwfile={folder / 'password'}"]
        subprocess.run(make, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)
        server, port = _started([postgres, "-D", str(data), "-h", "127.0.0.1", "-k", str(folder)], user, folder)
        try:
            yield f"postgresql+psycopg2://dpvision:{PASSWORD}@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # does not wait for open connections
            server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _started(command: list[str], user: str | None, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start the server on a free port, and on another one if another process took it; wait until it answers."""
    for _ in range(5):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        server = subprocess.Popen(
            [*command, "-p", str(port)],
            user=user,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if _answers(server, port):
            return server, port
        server.kill()
        server.wait()
    raise TimeoutError("the database did not start")


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait for an answer, at most two minutes; False if there is none, or if the server has ended."""
    import psycopg2

    began = time.monotonic()
    while server.poll() is None and time.monotonic() - began < 120:
        try:
            psycopg2.connect(host="127.0.0.1", port=port, user="dpvision", password=PASSWORD, dbname="postgres").close()
        except psycopg2.OperationalError:
            time.sleep(0.1)
        else:
            return True
    return False
