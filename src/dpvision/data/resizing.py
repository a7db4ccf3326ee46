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
    """The store with the size and the channels that the options ask for; masks are resized with their pictures."""
    size = options.size or store.image_shape[1:]
    images = resized(with_channels(store.images, options.channels), size, squash=options.squash)
    if images is store.images:
        return store
    labels = resized_masks(store.labels, size, squash=options.squash) if store.per_pixel else store.labels
    return replace(store, images=images, labels=labels)


def cover_box(height: int, width: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest central part (left, top, right, bottom) of a picture that has the proportions of ``size``."""
    scale = min(height / size[0], width / size[1])
    box_height, box_width = size[0] * scale, size[1] * scale
    top, left = (height - box_height) / 2, (width - box_width) / 2
    return left, top, left + box_width, top + box_height


def with_channels(images: Tensor, channels: int | None) -> Tensor:
    """Grey pictures in colour, or the other way round."""
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


def resized(images_NCHW: Tensor, size: tuple[int, int], *, squash: bool) -> Tensor:
    """Pictures scaled to cover ``size`` and cropped in the middle, or squashed to it."""
    if tuple(images_NCHW.shape[2:]) == size:
        return images_NCHW
    if not len(images_NCHW):
        return images_NCHW.new_zeros((0, images_NCHW.shape[1], *size))
    return torch.cat([_resized_chunk(part, size, squash=squash) for part in images_NCHW.split(CHUNK_ROWS)])


def resized_masks(masks_NHW: Tensor, size: tuple[int, int], *, squash: bool) -> Tensor:
    """The same for numbers of classes: each pixel takes the class of the nearest one."""
    height, width = masks_NHW.shape[1:]
    cover, (top, left) = _cover(height, width, size, squash=squash)
    # Where the middle of each new pixel lies among the old ones.
    y, x = (
        ((torch.arange(new) + 0.5) * (old / new)).long().clamp(max=old - 1)
        for old, new in zip((height, width), cover, strict=True)
    )
    return masks_NHW[:, y[top : top + size[0], None], x[left : left + size[1]]]


def _resized_chunk(images: Tensor, size: tuple[int, int], *, squash: bool) -> Tensor:
    cover, (top, left) = _cover(images.shape[2], images.shape[3], size, squash=squash)
    scaled = interpolate(images.float(), size=cover, mode="bilinear", antialias=True, align_corners=False)
    cropped = scaled[:, :, top : top + size[0], left : left + size[1]]
    return cropped.round().clamp(0, 255).to(torch.uint8)


def _cover(height: int, width: int, size: tuple[int, int], *, squash: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """The size to scale to, which covers ``size``, and the corner of the crop in its middle."""
    scale = max(size[0] / height, size[1] / width)
    cover = size if squash else (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
    return cover, ((cover[0] - size[0]) // 2, (cover[1] - size[1]) // 2)
