"""Pictures that are arrays already: other sizes and numbers of channels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dpvision.checks import DataError
from dpvision.data.options import LoadOptions
from dpvision.data.store import ImageStore

CHUNK_ROWS = 1024
# The integer form of the ITU-R 601 weights, as Pillow uses it: an array and a picture file give the same grey.
GREY_WEIGHTS = (19595, 38470, 7471)


def fit(store: ImageStore, options: LoadOptions) -> ImageStore:
    """The store with the size and the channels that the options ask for."""
    images = _with_channels(store.images, options.channels)
    if options.size is not None and tuple(images.shape[2:]) != options.size:
        images = _resized(images, options.size, squash=options.squash)
    return store if images is store.images else replace(store, images=images)


def cover_box(height: int, width: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest central part (left, top, right, bottom) of a picture that has the proportions of ``size``."""
    scale = min(height / size[0], width / size[1])
    box_height, box_width = size[0] * scale, size[1] * scale
    top, left = (height - box_height) / 2, (width - box_width) / 2
    return left, top, left + box_width, top + box_height


def _with_channels(images: Tensor, channels: int | None) -> Tensor:
    found = images.shape[1]
    if channels is None or channels == found:
        return images
    if found == 1:
        return images.repeat(1, channels, 1, 1)
    if found == 3:
        return torch.cat([_grey(part) for part in images.split(CHUNK_ROWS)]) if len(images) else images[:, :1]
    raise DataError(f"pictures with {found} channels can't be shown with {channels}.")


def _grey(images: Tensor) -> Tensor:
    weights = torch.tensor(GREY_WEIGHTS, dtype=torch.int32).view(1, 3, 1, 1)
    total = (images.to(torch.int32) * weights).sum(1, keepdim=True, dtype=torch.int32)
    return ((total + 0x8000) >> 16).to(torch.uint8)


def _resized(images: Tensor, size: tuple[int, int], *, squash: bool) -> Tensor:
    if not len(images):
        return images.new_zeros((0, images.shape[1], *size))
    return torch.cat([_resized_chunk(part, size, squash=squash) for part in images.split(CHUNK_ROWS)])


def _resized_chunk(images: Tensor, size: tuple[int, int], *, squash: bool) -> Tensor:
    height, width = images.shape[2:]
    scale = max(size[0] / height, size[1] / width)
    cover = size if squash else (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
    scaled = interpolate(images.float(), size=cover, mode="bilinear", antialias=True, align_corners=False)
    top, left = (cover[0] - size[0]) // 2, (cover[1] - size[1]) // 2
    cropped = scaled[:, :, top : top + size[0], left : left + size[1]]
    return cropped.round().clamp(0, 255).to(torch.uint8)
