"""DICOM files: frames as bytes, the patient who owns them, and the number of frames. Needs pydicom.

Values pass through the modality's rescaling, then a window: the one that the run declares, else the file's own, else
the range of its bits or of the frame. MONOCHROME1 is inverted, so that more is brighter in every image.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dpvision.data.safe_read import open_regular
from dpvision.errors import BadFile, DataError, brief, shown

SUFFIXES = frozenset({".dcm", ".dicom", ".ima"})
MAX_FRAMES = 100_000
_MAGIC, _MAGIC_AT = b"DICM", 128
_DEFLATED = "1.2.840.10008.1.2.1.99"
_HEADER_TAGS = ["PatientID", "NumberOfFrames", "Rows", "Columns", "PhotometricInterpretation"]
_INTENSITY = ("MONOCHROME1", "MONOCHROME2")


@final
@dataclass(frozen=True)
class DicomHeader:
    """What is known of a file before its pixels are decoded. The patient is "" where the file names none."""

    height: int
    width: int
    frames: int
    grey: bool
    patient: str


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM: by its ending, or by its content where the name has no ending or ends in a number.

    Modalities write files without an ending; a DICOMDIR is an index and holds no image.
    """
    suffix = path.suffix.lower()
    if path.name.startswith(".") or path.name.upper() == "DICOMDIR":
        return False
    if suffix in SUFFIXES or (suffix and not suffix[1:].isdigit()):
        return suffix in SUFFIXES
    with contextlib.suppress(OSError, DataError), open_regular(path) as file:
        return file.read(_MAGIC_AT + len(_MAGIC))[_MAGIC_AT:] == _MAGIC
    return False


def read_dicom_header(path: Path) -> DicomHeader:
    """Read size, number of frames and patient.

    Args:
        path: the file.

    Raises:
        BadFile: if it is not DICOM with an image, or its numbers are impossible.
    """
    with _opened(path, pixels=False) as found:
        return _header(found)


def dicom_frame(path: Path, *, frame: int, window: tuple[float, float] | None) -> NDArray[np.uint8]:
    """Decode one frame.

    Args:
        path: the file.
        frame: its number, from 0.
        window: lowest and highest intensity, in the units of the modality (HU for CT); None takes the file's own.

    Returns:
        uint8 (H, W), or (H, W, 3) for colour.

    Raises:
        BadFile: if the pixels can't be decoded; pydicom may raise other exceptions too.

    Guarantee: the bytes depend on this file alone.
    """
    from dpvision.data.images import MAX_PIXELS, windowed

    with _opened(path, pixels=True) as found:
        header = _header(found)
        if header.height * header.width > MAX_PIXELS:
            raise BadFile(f"more than {MAX_PIXELS} pixels")
        if not frame < header.frames:
            raise BadFile(f"frame {frame + 1} of {header.frames} does not exist")
        pixels, kind = _decoded(found, frame), str(found.get("PhotometricInterpretation", ""))
        if kind not in _INTENSITY:
            if window is not None:
                raise BadFile("a window is for intensities, and this file has colours")
            return _colours(pixels, found, kind)
        group = _functional_groups(found, frame)
        values = _rescaled(pixels, found, group)
        low, high, values = _range(values, found, group, window)
        shown_as = windowed(values[None], (low, high))[0]
        return 255 - shown_as if kind == "MONOCHROME1" else shown_as


@contextlib.contextmanager
def _opened(path: Path, *, pixels: bool) -> Iterator[Any]:
    """Read the data set; of large files without pixels only the tags of the header."""
    try:
        import pydicom
        from pydicom.errors import InvalidDicomError
        from pydicom.filereader import read_file_meta_info
    except ImportError as error:
        raise DataError("DICOM files need pydicom: pip install 'dpvision[medical]'.") from error
    try:
        with open_regular(path) as file:
            # Before the data set is read: a deflated one is inflated as a whole, however large it becomes.
            if read_file_meta_info(path).get("TransferSyntaxUID") == _DEFLATED:
                raise BadFile("a deflated data set; store it without compression")
            tags: Any = None if pixels else list(_HEADER_TAGS)
            yield pydicom.dcmread(file, stop_before_pixels=not pixels, specific_tags=tags)
    except InvalidDicomError as error:
        raise BadFile("not a DICOM file" if path.stat().st_size else "empty file") from error


def _header(found: Any) -> DicomHeader:
    """Check the numbers of the header."""
    height, width, frames = (found.get(name) for name in ("Rows", "Columns", "NumberOfFrames"))
    try:
        sides, count = (int(height or 0), int(width or 0)), int(frames or 1)
    except (TypeError, ValueError) as error:
        raise BadFile("size or number of frames is not a number") from error
    if min(sides) < 1:
        raise BadFile("holds no image")
    if not 1 <= count <= MAX_FRAMES:
        raise BadFile(f"{count} frames, the limit is {MAX_FRAMES}")
    grey = str(found.get("PhotometricInterpretation", "")) in _INTENSITY
    return DicomHeader(sides[0], sides[1], count, grey, str(found.get("PatientID") or "").strip())


def _decoded(found: Any, frame: int) -> NDArray[Any]:
    """Decode the pixels of one frame; pydicom turns YBR colours into RGB."""
    from pydicom.pixels.utils import pixel_array

    try:
        return pixel_array(found, index=frame)
    except (AttributeError, ValueError, RuntimeError, NotImplementedError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadFile(f"can't be decoded: {brief(reason, most=60)}") from error


def _colours(pixels: NDArray[Any], found: Any, kind: str) -> NDArray[np.uint8]:
    """Bring colours to 8 bits."""
    from pydicom.pixels.processing import apply_color_lut

    if kind == "PALETTE COLOR":
        pixels = apply_color_lut(pixels, found)
    if pixels.ndim != 3 or pixels.shape[2] < 3 or pixels.dtype not in (np.uint8, np.uint16):
        raise BadFile(f"{shown(kind or 'no photometric interpretation')} can't be shown as colours")
    return pixels[..., :3] if pixels.dtype == np.uint8 else (pixels[..., :3] >> 8).astype(np.uint8)


def _functional_groups(found: Any, frame: int) -> list[Any]:
    """The places that may state slope and window: groups of this frame, of all frames, and the file itself."""
    own: list[Any] = list(found.get("PerFrameFunctionalGroupsSequence") or ())[frame : frame + 1]
    shared: list[Any] = list(found.get("SharedFunctionalGroupsSequence") or ())[:1]
    names = ("PixelValueTransformationSequence", "FrameVOILUTSequence")
    groups: list[Any] = [*own, *shared]
    inner = [item for group in groups for name in names for item in (group.get(name) or ())]
    return [*inner, found]


def _rescaled(pixels: NDArray[Any], found: Any, groups: list[Any]) -> NDArray[Any]:
    """Apply the modality's table, or its slope and intercept."""
    from pydicom.pixels.processing import apply_modality_lut

    if found.get("ModalityLUTSequence"):
        return apply_modality_lut(pixels, found)
    for group in groups:
        slope, intercept = group.get("RescaleSlope"), group.get("RescaleIntercept")
        if slope is not None and intercept is not None:
            return pixels.astype(np.float64) * float(slope) + float(intercept)
    return pixels


def _range(
    values: NDArray[Any], found: Any, groups: list[Any], window: tuple[float, float] | None
) -> tuple[float, float, NDArray[Any]]:
    """Return the intensities that become 0 and 255, and the values that they are about."""
    from pydicom.pixels.processing import apply_voi

    if window is not None:
        return *window, values
    for group in groups:
        centres, widths = group.get("WindowCenter"), group.get("WindowWidth")
        if centres is not None and widths is not None:
            centre, width = float(np.ravel(centres)[0]), float(np.ravel(widths)[0])
            if not (math.isfinite(centre) and math.isfinite(width)):
                raise BadFile(f"a window of centre {centre} and width {width} is none")
            if group.get("VOILUTFunction") in ("LINEAR_EXACT", "SIGMOID"):
                return centre - width / 2, centre + width / 2, values
            return centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2, values
    if found.get("VOILUTSequence"):
        depth = int(found.VOILUTSequence[0].LUTDescriptor[2])
        return 0.0, float(2**depth - 1), apply_voi(values.astype(np.int64), found)
    bits = int(found.get("BitsStored") or 16)
    if bits <= 8 and values.dtype == np.uint8:
        return 0.0, float(2**bits - 1), values
    low, high = np.percentile(values, (1, 99))
    return float(low), float(high), values
