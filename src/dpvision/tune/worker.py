"""One more process for a search that has begun: ``python -m dpvision.tune.worker SEARCH [TIMEOUT]``.

It runs trials until none is left and prints nothing but errors. The final run and the release are left to the first
process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dpvision.training.callbacks import RunCallback
from dpvision.tune.search import OpenSearch
from dpvision.tune.search_folder import SearchFolder
from dpvision.tune.search_plan import SearchLimits


def work(folder: Path, *, timeout: float | None = None) -> None:
    """Run trials of the search in ``folder`` until none is left.

    Args:
        folder: the folder of the search.
        timeout: seconds after which no trial is started.
    """
    OpenSearch(SearchFolder(folder), callback=RunCallback(), limits=SearchLimits(timeout=timeout)).run_all()


if __name__ == "__main__":
    work(Path(sys.argv[1]), timeout=float(sys.argv[2]) if len(sys.argv) > 2 else None)
