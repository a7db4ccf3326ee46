"""NIfTI volumes, cut into slices.

The header is untrusted: what it promises is checked against limits and against the file's size before memory is
allocated. nibabel (extra ``medical``) interprets the header alone; extensions are skipped unread, and voxels are read
here.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpvision.data.images import mask_bytes, resized, resized_masks, windowed, with_channels
from dpvision.data.options import LoadOptions
from dpvision.data.safe_read import open_unpacked, read_exactly, reading
from dpvision.errors import BadFile, DataError, require_memory, shown

SUFFIXES = (".nii.gz", ".nii")
# 512 × 512 pixels in 1,024 slices: more is a mistake or a bomb.
MAX_VOXELS = 2**28
MAX_OFFSET = 2**26
PERCENTILES = (1, 99)
_HEADER_BYTES = {348: "n+1", 540: "n+2"}
_SILENT = logging.Logger("nothing is printed of odd headers", level=logging.CRITICAL)


@final
@dataclass(frozen=True, eq=False)
class Volume:
    """The voxels of one file as they are stored. Sensitive.

    Attributes:
        voxels: real numbers (X, Y, Z).
        slope: an intensity is ``slope`` times the voxel plus ``intercept``.
        intercept: see ``slope``.
        affine: (4, 4), from voxel indices to positions in the body.
    """

    voxels: NDArray[Any]
    slope: float
    intercept: float
    affine: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"Volume({self.voxels.shape}, sensitive)"

    def slices(self, axis: int) -> NDArray[Any]:
        """Return the stored voxels as (slices, height, width), cut along ``axis``; the other two axes keep their
        order.
        """
        return np.moveaxis(self.voxels, axis, 0)

    def own_window(self) -> tuple[float, float]:
        """The 1st and the 99th percentile of the volume's own intensities."""
        if self.voxels.dtype.kind == "f" and not np.isfinite(self.voxels).all():
            raise BadFile("NaN or infinite voxels")
        low, high = sorted(np.percentile(self.voxels, PERCENTILES) * self.slope + self.intercept)
        return float(low), float(high)


def is_volume(path: Path) -> bool:
    """Whether the file's name is that of a NIfTI volume; hidden files do not count."""
    return path.name.lower().endswith(SUFFIXES) and not path.name.startswith(".")


def require_nibabel() -> None:
    """Raise ``DataError`` if nibabel is not installed."""
    _nibabel()


def read_volume(path: Path) -> Volume:
    """Read a NIfTI file.

    Args:
        path: a .nii or .nii.gz file with header and voxels in one.

    Raises:
        DataError: if it is not such a file, or is damaged or too large.
    """
    with reading(path):
        return open_volume(path)


def open_volume(path: Path) -> Volume:
    """Read a NIfTI file, and raise ``BadFile`` without its name if it can't be used."""
    with open_unpacked(path) as (file, most):
        header = _header(file)
        shape, dtype = _shape(header), header.get_data_dtype()
        offset, needed = int(header.get_data_offset()), math.prod(shape) * dtype.itemsize
        if dtype.kind not in "iuf" or dtype.itemsize > 8:
            raise BadFile(f"voxels must be real numbers, got {dtype}")
        if not 352 <= offset <= MAX_OFFSET or offset + needed > most:
            raise BadFile(f"its header promises {needed} bytes of voxels after {offset}, its size says otherwise")
        require_memory(needed, path)
        read_exactly(file, offset - header.structarr.dtype.itemsize)
        voxels = np.frombuffer(read_exactly(file, needed), dtype=dtype).reshape(shape, order="F")
        file.read(1)  # at the end of a packed file its checksum is checked
        slope, intercept = header.get_slope_inter()
        affine = np.asarray(header.get_best_affine(), dtype=np.float64)
    scale = (1.0 if slope is None else float(slope), 0.0 if intercept is None else float(intercept))
    if not (np.isfinite(scale).all() and np.isfinite(affine).all()):
        raise BadFile("the header's scale or place is not finite")
    return Volume(voxels, *scale, affine)


def volume_shape(path: Path) -> tuple[int, int, int]:
    """Read the shape of a volume from its header."""
    with open_unpacked(path) as (file, _):
        return _shape(_header(file))


def volume_images(volume: Volume, *, image_shape: tuple[int, int, int], options: LoadOptions) -> Tensor:
    """Turn the slices of a volume into images.

    Args:
        volume: from ``read_volume``.
        image_shape: channels, height and width of every image.
        options: the axis to cut along and the window of intensities; without one, the volume's own.

    Returns:
        uint8 (slices, C, H, W).
    """
    channels, *size = image_shape
    window = volume.own_window() if options.window is None else options.window
    slices = windowed(volume.slices(options.volume_axis), window, slope=volume.slope, intercept=volume.intercept)
    images = resized(torch.from_numpy(slices)[:, None], (size[0], size[1]), squash=options.squash)
    return with_channels(images, channels)


def volume_masks(volume: Volume, *, size: tuple[int, int], options: LoadOptions) -> Tensor:
    """Turn the slices of a mask volume into classes, uint8 (slices, H, W)."""
    as_stored = (volume.slope, volume.intercept) == (1.0, 0.0)
    pieces = (
        piece if as_stored else piece.astype(np.float64) * volume.slope + volume.intercept
        for piece in volume.slices(options.volume_axis)
    )
    masks = np.stack([mask_bytes(piece, options.mask_classes) for piece in pieces])
    return resized_masks(torch.from_numpy(masks), size, squash=options.squash)


def require_same_place(volume: Volume, mask: Volume) -> None:
    """Refuse a mask of another shape than its volume, or of which a corner is half a voxel or more away."""
    shape = volume.voxels.shape
    if shape != mask.voxels.shape:
        raise BadFile(f"the volume has {shape} voxels, its mask {mask.voxels.shape}")
    corners = np.stack(np.meshgrid(*((0, side) for side in shape), [1.0], indexing="ij")).reshape(4, -1)
    apart = np.abs((volume.affine - mask.affine) @ corners).max()
    voxel = np.linalg.norm(volume.affine[:3, :3], axis=0).min()
    if apart > voxel / 2:
        raise BadFile(f"the mask lies {apart:.3g} away from its volume (affines differ); resample it to the volume")


def _header(file: BinaryIO) -> Any:
    """Read the header without extensions; nibabel corrects harmless errors, others are refused."""
    nibabel, problems = _nibabel()
    start = read_exactly(file, 4)
    size = next((n for n in _HEADER_BYTES if n in (int.from_bytes(start, order) for order in ("little", "big"))), None)
    if size is None:
        raise BadFile("not a NIfTI file")
    block = start + read_exactly(file, size - 4)
    kind = nibabel.Nifti1Header if size == 348 else nibabel.Nifti2Header
    magic = block[344:347] if size == 348 else block[4:7]
    if magic != _HEADER_BYTES[size].encode():
        raise BadFile("not a NIfTI file of header and voxels in one")
    try:
        header = kind(bytes(block), check=False)
        header.check_fix(logger=_SILENT)
        for read in (header.get_slope_inter, header.get_best_affine, header.get_data_dtype, header.get_data_offset):
            read()
    except problems as error:
        raise BadFile(f"its header makes no sense: {shown(error)}") from error
    return header


def _nibabel() -> tuple[Any, tuple[type[Exception], ...]]:
    """Import nibabel, and name the exceptions that it raises."""
    try:
        import nibabel
        from nibabel.spatialimages import HeaderDataError, HeaderTypeError
    except ImportError as error:
        raise DataError("NIfTI volumes need nibabel: pip install 'dpvision[medical]'.") from error
    return nibabel, (HeaderDataError, HeaderTypeError, ValueError, TypeError, KeyError, OverflowError)


def _shape(header: Any) -> tuple[int, int, int]:
    """Check the shape: three axes, at least one voxel, at most ``MAX_VOXELS``; trailing axes of length 1 are
    dropped.
    """
    shape = tuple(int(side) for side in header.get_data_shape())
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) > 3:
        raise BadFile(f"{len(shape)} dimensions {shape}; store each time or channel as a volume of its own")
    if len(shape) != 3 or min(shape) < 1:
        raise BadFile(f"a volume needs three dimensions of at least one voxel, got {shape}")
    if math.prod(shape) > MAX_VOXELS:
        raise BadFile(f"{shape} are more than {MAX_VOXELS} voxels")
    return shape[0], shape[1], shape[2]
