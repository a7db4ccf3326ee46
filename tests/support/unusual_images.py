"""Image files whose size, mode, orientation or transparency a naive script gets wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def write_unusual_images(folder: Path) -> list[Path]:
    """Write one image of each kind, 34 by 21 pixels; only ``sixteen.png`` has 16 bits."""
    values = np.random.default_rng(3).integers(0, 256, (21, 34, 4)).astype(np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    colour = Image.fromarray(values[..., :3])
    colour.save(folder / "turned.png", exif=turned)
    colour.quantize(16).save(folder / "palette.png", transparency=3)
    Image.fromarray(values).save(folder / "over_black.png")
    Image.fromarray(values[..., 0].astype(np.uint16) * 97).save(folder / "sixteen.png")
    Image.fromarray(values[..., 0] > 90).save(folder / "one_bit.png")
    colour.convert("CMYK").save(folder / "print.jpg")
    return sorted(folder.iterdir())
