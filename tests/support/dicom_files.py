"""Small DICOM files for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def write_dicom(path: Path, pixels: np.ndarray, *, patient: str = "P1", **tags: Any) -> Path:
    """Write grey (H, W), colour (H, W, 3) or several frames (N, H, W), uncompressed; ``tags`` are set last."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    colour = pixels.ndim == 3 and pixels.shape[2] == 3
    frames = pixels.shape[0] if pixels.ndim == 3 and not colour else 1
    height, width = pixels.shape[:2] if colour or pixels.ndim == 2 else pixels.shape[1:3]
    made, bits = Dataset(), 8 * pixels.dtype.itemsize
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.SOPClassUID = made.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    made.SOPInstanceUID = made.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    made.PatientID, made.Rows, made.Columns = patient, height, width
    made.SamplesPerPixel, made.PhotometricInterpretation = (3, "RGB") if colour else (1, "MONOCHROME2")
    if colour:
        made.PlanarConfiguration = 0
    if frames > 1:
        made.NumberOfFrames = frames
    made.BitsAllocated, made.BitsStored, made.HighBit = bits, bits, bits - 1
    made.PixelRepresentation = int(pixels.dtype.kind == "i")
    made.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(made, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(path, enforce_file_format=True)
    return path
