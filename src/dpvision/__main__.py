"""``python -m dpvision`` is the ``dpvision`` command."""

from __future__ import annotations

from dpvision.cli import main

main()
