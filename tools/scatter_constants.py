"""Write the channel constants that come with the package: mean and std of scattering features of public pictures.

Example: python -m tools.scatter_constants cifar100
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dpvision import models
from dpvision.data import load

FOLDER = Path(__file__).parents[1] / "src" / "dpvision" / "models" / "constants"
PICTURES = 10_000


def main() -> None:
    """Compute the constants of one known dataset's first training pictures, pixels in 0..1."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("source", help="a known dataset whose training pictures are public, such as cifar100")
    source: str = parser.parse_args().source
    pictures = load(source).train.images[:PICTURES].float() / 255
    mean, std = models.channel_constants(models.Scattering((pictures.shape[2], pictures.shape[3])), pictures)
    table = {name: [float(f"{value:.6g}") for value in values] for name, values in (("mean", mean), ("std", std))}
    (FOLDER / f"{source}.json").write_text(json.dumps(table) + "\n")


if __name__ == "__main__":
    main()
