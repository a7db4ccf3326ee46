"""NIfTI volumes into slices. The header is hostile: its promises are checked against limits and the file's size.

nibabel interprets the header alone. Extensions are skipped unread, and voxels are read here, to the promised byte.
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
from dpvision.data.safe_read import open_unpacked, read_exactly, reading, require_memory
from dpvision.errors import BadFile, DataError, shown

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
    """Voxels of one file as they are stored: an intensity is ``slope`` times the voxel plus ``intercept``. Sensitive.

    ``affine`` says where the voxels lie in the body.
    """

    voxels: NDArray[Any]
    slope: float
    intercept: float
    affine: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"Volume({self.voxels.shape}, sensitive)"

    def slices(self, axis: int) -> NDArray[Any]:
        """The stored voxels (slices, height, width), cut along an axis: the other two keep their order."""
        return np.moveaxis(self.voxels, axis, 0)

    def own_window(self) -> tuple[float, float]:
        """The 1st and the 99th percentile of the volume's own intensities."""
        if self.voxels.dtype.kind == "f" and not np.isfinite(self.voxels).all():
            raise BadFile("NaN or infinite voxels")
        low, high = sorted(np.percentile(self.voxels, PERCENTILES) * self.slope + self.intercept)
        return float(low), float(high)


def is_volume(path: Path) -> bool:
    """Whether the name is that of a NIfTI volume; hidden files are none."""
    return path.name.lower().endswith(SUFFIXES) and not path.name.startswith(".")


def require_nibabel() -> None:
    """Refuse volumes where the optional extra that reads them is missing."""
    _nibabel()


def read_volume(path: Path) -> Volume:
    """The voxels of a NIfTI file; whatever is wrong with it is one line."""
    with reading(path):
        return open_volume(path)


def open_volume(path: Path) -> Volume:
    """The same, for whoever reads many files."""
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
    """The shape of a volume, from its header."""
    with open_unpacked(path) as (file, _):
        return _shape(_header(file))


def volume_images(volume: Volume, *, image_shape: tuple[int, int, int], options: LoadOptions) -> Tensor:
    """The slices as uint8 (S, C, H, W), by the options' window, or by the volume's own if they have none."""
    channels, *size = image_shape
    window = volume.own_window() if options.window is None else options.window
    slices = windowed(volume.slices(options.volume_axis), window, slope=volume.slope, intercept=volume.intercept)
    images = resized(torch.from_numpy(slices)[:, None], (size[0], size[1]), squash=options.squash)
    return with_channels(images, channels)


def volume_masks(volume: Volume, *, size: tuple[int, int], options: LoadOptions) -> Tensor:
    """The classes of the slices' pixels as uint8 (S, H, W)."""
    as_stored = (volume.slope, volume.intercept) == (1.0, 0.0)
    pieces = (
        piece if as_stored else piece.astype(np.float64) * volume.slope + volume.intercept
        for piece in volume.slices(options.volume_axis)
    )
    masks = np.stack([mask_bytes(piece, options.mask_classes) for piece in pieces])
    return resized_masks(torch.from_numpy(masks), size, squash=options.squash)


def require_same_place(volume: Volume, mask: Volume) -> None:
    """A mask must have its volume's shape, and no corner of it may lie half a voxel away."""
    shape = volume.voxels.shape
    if shape != mask.voxels.shape:
        raise BadFile(f"the volume has {shape} voxels, its mask {mask.voxels.shape}")
    corners = np.stack(np.meshgrid(*((0, side) for side in shape), [1.0], indexing="ij")).reshape(4, -1)
    apart = np.abs((volume.affine - mask.affine) @ corners).max()
    voxel = np.linalg.norm(volume.affine[:3, :3], axis=0).min()
    if apart > voxel / 2:
        raise BadFile(f"the mask lies {apart:.3g} away from its volume (affines differ); resample it to the volume")


def _header(file: BinaryIO) -> Any:
    """The header, without extensions, mended by nibabel where that is harmless, or refused."""
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
    """The module, which is an optional extra, and what it raises."""
    try:
        import nibabel
        from nibabel.spatialimages import HeaderDataError, HeaderTypeError
    except ImportError as error:
        raise DataError("NIfTI volumes need nibabel: pip install 'dpvision[medical]'.") from error
    return nibabel, (HeaderDataError, HeaderTypeError, ValueError, TypeError, KeyError, OverflowError)


def _shape(header: Any) -> tuple[int, int, int]:
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
