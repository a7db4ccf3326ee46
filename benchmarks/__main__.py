"""Entry point: ``python -m benchmarks``."""

from __future__ import annotations

from benchmarks.bench_command import main

main()
