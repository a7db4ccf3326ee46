"""What torchrun starts in ``tools.kill_ranks``: it asks a warm process for a fork that is the rank, and ends with it.

Imports of a rank take seconds, which a hundred kills would wait for again and again. This program imports next to
nothing. Usage: rank_stub.py SOCKET DESCRIPTION
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main() -> int:
    """Ask for the fork, pass SIGTERM on to it, and return its exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        asked = {"environment": dict(os.environ), "stub": os.getpid(), "description": sys.argv[2]}
        server.sendall(json.dumps(asked).encode() + b"\n")
        answers = server.makefile()
        worker = int(answers.readline())
        signal.signal(signal.SIGTERM, lambda *_: os.kill(worker, signal.SIGTERM))
        code = int(answers.readline() or 1)  # an empty line: the server has ended
        return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
