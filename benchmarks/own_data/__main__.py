"""Entry point: ``python -m benchmarks.own_data fit|kept_out|pretrained|one_shot|page``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.own_data.page import write_page
from benchmarks.own_data.sources import SOURCES
from benchmarks.own_data.study import Cell, run_cells, run_one_shot

EPSILONS = (1.0, 3.0, 8.0)
UNITS = {
    "mnist": (300, 1000, 3000),
    "cifar10": (300, 1000, 3000),
    "tiny_imagenet": (300, 1000, 3000),
    "cats_dogs": (300, 1000, 3000),
    "mnist_4_9": (300, 1000, 3000),
    "imagenette": (300, 1000, 1500),
    "digits": (300, 1000, 1437),
    "chest_xray": (300, 500, 800),
    "fashionmnist": (300, 1000, 3000),
    "cifar100_coarse": (300, 1000, 3000),
    "people_vehicles": (300, 1000, 3000),
    "sign_digits": (300, 1000, 1566),
    "trashnet": (300, 1000, 2091),
    "liver_tumour": (300, 1000, 1500),
}
LOG = Path("runs/own_data.jsonl")


def cells(part: str) -> Iterator[Cell]:
    """The cells of a part, the cheap ones first."""
    named = "kept_out" if part == "pretrained" else part
    sources = [source.name for source in SOURCES if source.part == named]
    if part == "pretrained":
        sources = ["chest_xray", "sign_digits", "trashnet"]
    for place in range(3):
        for name in sources:
            for epsilon in EPSILONS:
                yield Cell(name, UNITS[name][place], epsilon, pretrained=part == "pretrained")


def main() -> None:
    """Run what is not in the log yet, or write the page."""
    parser = argparse.ArgumentParser(description="How good the defaults for own images are.")
    parser.add_argument("what", choices=("fit", "kept_out", "pretrained", "one_shot", "page"))
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--no-grid", action="store_true", help="the default run alone")
    parser.add_argument(
        "--again", nargs="*", metavar="DATASET", help="run the default of these again: the rules changed"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/defaults.md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "page":
        write_page(given.log, given.output)
        return
    given.log.parent.mkdir(parents=True, exist_ok=True)
    if given.what == "one_shot":
        run_one_shot([*cells("kept_out"), *cells("fit")], given.log)
        return
    wanted = [cell for cell in cells(given.what) if given.again is None or cell.source in given.again]
    run_cells(wanted, given.log, grid=not given.no_grid and given.again is None, again=given.again is not None)


if __name__ == "__main__":
    main()
