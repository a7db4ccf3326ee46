"""Entry point: ``python -m benchmarks.own_data fit|kept_out|pretrained|one_shot|forecast|page``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.own_data.forecast_curves import covered, curves
from benchmarks.own_data.page import read_rows, write_page
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
    "fashionmnist": (300, 1000, 3000, 10_000, 50_000),
    "cifar100_coarse": (300, 1000, 3000, 10_000),
    "people_vehicles": (300, 1000, 3000),
    "sign_digits": (300, 1000, 1566),
    "trashnet": (300, 1000, 2091),
    "liver_tumour": (300, 1000, 1500),
}
PRETRAINED_UNITS = {
    "chest_xray": (300, 800),
    "sign_digits": (300, 1000),
    "trashnet": (300, 1000),
    "people_vehicles": (300, 1000),
    "liver_tumour": (300, 1000),
    "fashionmnist": (300, 1000),
    "cifar100_coarse": (300, 1000),
}
"""Kept out of the fit, but for chest X-rays."""
LOG = Path(__file__).parent / "results.jsonl"


def cells(part: str) -> Iterator[Cell]:
    """The cells of a part, the cheap ones first."""
    named = "kept_out" if part == "pretrained" else part
    sources = [source.name for source in SOURCES if source.part == named]
    units = UNITS
    if part == "pretrained":
        units = PRETRAINED_UNITS
        sources = list(units)
    for place in range(max(len(units[name]) for name in sources)):
        for name in [each for each in sources if place < len(units[each])]:
            for epsilon in EPSILONS:
                yield Cell(name, units[name][place], epsilon, pretrained=part == "pretrained")


def main() -> None:
    """Run what is not in the log yet, or write the page."""
    parser = argparse.ArgumentParser(description="How good the defaults for own images are.")
    parser.add_argument("what", choices=("fit", "kept_out", "pretrained", "one_shot", "forecast", "page"))
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--no-grid", action="store_true", help="the default run alone")
    parser.add_argument("--only", nargs="+", metavar="DATASET", help="these datasets alone")
    parser.add_argument("--units", nargs="+", type=int, metavar="N", help="these sizes alone")
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/defaults.md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "page":
        write_page(given.log, given.output)
        return
    if given.what == "forecast":
        rows = read_rows(given.log)
        found = curves(rows)
        for name, (most, half) in found.items():
            print(f"{name} = ({most}, {half})")
        print(f"{covered(rows, found)} of {len(rows)} cells within the range")
        return
    given.log.parent.mkdir(parents=True, exist_ok=True)
    asked = cells(given.what) if given.what != "one_shot" else (*cells("kept_out"), *cells("fit"))
    wanted = [cell for cell in asked if given.only is None or cell.source in given.only]
    wanted = [cell for cell in wanted if given.units is None or cell.num_units in given.units]
    if given.what == "one_shot":
        run_one_shot(wanted, given.log)
        return
    run_cells(wanted, given.log, grid=not given.no_grid)


if __name__ == "__main__":
    main()
