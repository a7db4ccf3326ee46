"""Predictions: a model's outputs, class probabilities, masks, and the mask files that ``dpvision predict`` writes.

``predict`` takes files, arrays or tensors, and prepares them as the training images were prepared.

Every metric and every prediction goes through ``outputs_of``: batch by batch, in evaluation mode, with fused layers
where they agree; the model is left unchanged.

Shapes: N rows, M maps (one for two classes, else one per class), S slices, C channels, H × W pixels.
"""

from __future__ import annotations

import copy
import gzip
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from dpvision.data.images import (
    cover_box,
    decode,
    files_of,
    is_image,
    load_images,
    read_each,
    read_header,
    resized,
    with_channels,
)
from dpvision.data.nifti import SUFFIXES, is_volume, open_volume, volume_images
from dpvision.data.normalisation import Normalisation
from dpvision.data.npz import image_bytes
from dpvision.data.splits import load_options
from dpvision.data.store import MappedImages
from dpvision.errors import ArgumentError, DataError, bad_files_text, printable, shown, some_of
from dpvision.gradients.ordinary import fused_forward
from dpvision.inference.load import ReleasedModel
from dpvision.ranks import ALONE, Ranks
from dpvision.storage.files import disk_errors, write_atomically

BATCH_SIZE: Final = 64
"""Rows that go through the model together: few enough for their activations to stay in the cache."""
IMAGES_WITH_MASKS: Final = 32
"""The same where every pixel has an output."""
_COMPARED: Final = 4
Mask = NDArray[np.uint8]
_LARGEST_SIDE_OF_NIFTI1 = 32767


def outputs_of(
    model: nn.Module,
    rows: Tensor | MappedImages,
    prepare: Callable[[Tensor], Tensor],
    *,
    parameters: Mapping[str, Tensor] | None = None,
    batch_size: int = BATCH_SIZE,
    only: range | None = None,
) -> Iterator[Tensor]:
    """Yield the model's outputs, batch by batch, on the device of the model.

    Args:
        model: left unchanged.
        rows: images or features.
        prepare: turns a batch of ``rows`` into inputs of the model.
        parameters: replaces the model's own parameters where given, such as averaged ones.
        batch_size: memory only.
        only: numbers of the batches to yield, from zero; all by default.

    Raises:
        ArgumentError: the model has no parameter of such a name.
    """
    network = copy.deepcopy(model).eval()
    own = dict(itertools.chain(network.named_parameters(remove_duplicate=False), network.named_buffers()))
    unknown = sorted((parameters or {}).keys() - own.keys())
    if unknown:
        raise ArgumentError(f"parameters must be the model's own, got unknown names: {', '.join(unknown)}.")
    network.load_state_dict(dict(parameters or {}), strict=False)
    device = next((tensor.device for tensor in own.values()), torch.device("cpu"))
    first = prepare(rows[:batch_size].to(device))
    with fused_forward(network, first[:_COMPARED]) as forward:
        for number, part in enumerate(rows.split(batch_size)):
            if only is not None and number not in only:
                continue
            with torch.no_grad():
                outputs = forward(first if number == 0 else prepare(part.to(device)))
            yield outputs


def shared_outputs(
    model: nn.Module,
    rows: Tensor | MappedImages,
    prepare: Callable[[Tensor], Tensor],
    *,
    parameters: Mapping[str, Tensor] | None = None,
    ranks: Ranks = ALONE,
) -> Tensor:
    """Return the model's outputs of all rows, on the CPU, computed by all ranks, each its share of the batches.

    Args:
        model: left unchanged; the same on every rank.
        rows: the same on every rank.
        prepare: as for ``outputs_of``.
        parameters: as for ``outputs_of``.
        ranks: processes that call this at the same time.

    Returns:
        The outputs of all rows on rank 0; elsewhere those of the other ranks are missing.
    """
    own = ranks.share(-(-len(rows) // BATCH_SIZE))
    with ranks.settling():
        found = [each.cpu() for each in outputs_of(model, rows, prepare, parameters=parameters, only=own)]
        if not ranks.several:
            return torch.cat(found)
        shape = found[0].shape[1:] if found else outputs_shape(model, rows, prepare)
        outputs = torch.zeros((len(rows), *shape))
        if found:
            outputs[own.start * BATCH_SIZE : own.stop * BATCH_SIZE] = torch.cat(found)
    ranks.collect(outputs, size=BATCH_SIZE)
    return outputs


def outputs_shape(model: nn.Module, rows: Tensor | MappedImages, prepare: Callable[[Tensor], Tensor]) -> torch.Size:
    """Return the shape of one row's outputs."""
    return next(outputs_of(model, rows[:1], prepare)).shape[1:]


def predict_probabilities(
    model: nn.Module, images: Tensor, normalisation: Normalisation, *, findings: bool = False
) -> Tensor:
    """Predict class probabilities of uint8 images (N, C, H, W): float32 (N, classes) on the CPU.

    Args:
        model: left unchanged.
        images: the images.
        normalisation: the pixel constants that the model was trained with.
        findings: whether several classes, or none, can hold: then each has a probability of its own.
    """
    logits = torch.cat(list(outputs_of(model, images, normalisation.apply))).double().cpu()
    return (logits.sigmoid() if findings else logits.softmax(dim=1)).float()


def predict_masks(
    model: nn.Module,
    images: Tensor,
    normalisation: Normalisation,
    *,
    parameters: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Predict the class of every pixel of uint8 images (N, C, H, W): uint8 (N, H, W) on the CPU.

    Args:
        model: left unchanged.
        images: the images.
        normalisation: the pixel constants that the model was trained with.
        parameters: replaces the model's own where given.
    """
    outputs = outputs_of(model, images, normalisation.apply, parameters=parameters, batch_size=IMAGES_WITH_MASKS)
    return torch.cat([classes_of(maps).cpu() for maps in outputs])


def classes_of(maps_NMHW: Tensor) -> Tensor:
    """Choose classes: one map is foreground where it is positive (a probability above 1/2), of several the largest."""
    if maps_NMHW.shape[1] == 1:
        return (maps_NMHW[:, 0] > 0).to(torch.uint8)
    return maps_NMHW.argmax(1).to(torch.uint8)


@final
@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model says of some images.

    Attributes:
        names: the files, or the numbers of the images.
        class_names: the classes, in the order of ``probabilities``.
        probabilities: float32 (N, classes); of a model of findings each by itself, else they add up to 1. Empty for
            masks.
        masks: of a segmentation model, one array of class numbers for each image or volume, at its own size.
        findings: whether several classes, or none, can hold.
        skipped: (file, reason) of every file that could not be read.
    """

    names: tuple[str, ...]
    class_names: tuple[str, ...]
    probabilities: NDArray[np.float32]
    masks: tuple[Mask, ...] = ()
    findings: bool = False
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def found(self) -> tuple[tuple[str, ...], ...]:
        """For each image the classes that hold: of findings those with probability 1/2 or more, else the likeliest."""
        if not self.findings:
            return tuple((self.class_names[int(row.argmax())],) for row in self.probabilities)
        pairs = [zip(self.class_names, row, strict=True) for row in self.probabilities]
        return tuple(tuple(name for name, p in row if p >= 0.5) for row in pairs)

    @property
    def classes(self) -> tuple[str, ...]:
        """The same as one text for each image; "none" where no finding holds."""
        return tuple(", ".join(present) or "none" for present in self.found)


Picture = Path | str | Tensor | NDArray[Any] | Image.Image
"""One image: a file, an array or a tensor."""


def predict(
    released: ReleasedModel, images: Picture | Sequence[Picture], *, skip_bad: bool = False, device: str = "cpu"
) -> Predictions:
    """Predict classes or masks of images that are prepared as the training images were.

    Args:
        released: the model.
        images: files and folders (for masks also volumes); or an array or tensor of a batch, (N, H, W, C) or
            (N, C, H, W); or one image, (H, W), (H, W, C) or (C, H, W); or several of these images in a list, also of
            different sizes. 8 or 16 bits, or numbers in 0..1; a run with an intensity window applies it.
        skip_bad: continue without files that can't be read.
        device: torch's name of the device.

    Raises:
        DataError: there are no images, or some can't be read or have another layout.
        ArgumentError: files and arrays are mixed.
    """
    several = list(images) if isinstance(images, (list, tuple)) else [images]
    files = [Path(each) for each in several if isinstance(each, (str, Path))]
    if files and len(files) != len(several):
        raise ArgumentError("images must be files or arrays, not both.")
    released.model.to(device)
    if released.config.task == "segmentation":
        return _predict_masks_of(released, files, several, skip_bad=skip_bad)
    names: tuple[str, ...]
    if files:
        pixels, names, skipped = load_images(
            files, image_shape=released.image_shape, skip_bad=skip_bad, window=released.file_window
        )
    else:
        seen = _given(released, several)
        pixels, skipped = torch.cat([each.images_SCHW for each in seen]), ()
        names = tuple(str(number) for number in range(len(pixels)))
    findings = released.config.data.findings is not None
    rows = predict_probabilities(released.model, pixels, released.normalisation, findings=findings)
    return Predictions(names, released.class_names, rows.numpy(), findings=findings, skipped=skipped)


def _predict_masks_of(
    released: ReleasedModel, files: Sequence[Path], arrays: Sequence[object], *, skip_bad: bool
) -> Predictions:
    """Predict a mask for each image or volume."""
    skipped: list[tuple[str, str]] = []
    if files:
        sources = [each for file in files for each in _images_and_volumes(file)]
        read = [(printable(source), _seen_or_reason(released, source)) for source in sources]
        skipped = [(name, seen) for name, seen in read if isinstance(seen, str)]
        pairs = [(name, seen) for name, seen in read if not isinstance(seen, str)]
        if skipped and not (skip_bad and pairs):
            raise DataError(f"{len(skipped)} of {len(read)} files can't be read: {bad_files_text(skipped)}.")
    else:
        pairs = [(str(number), seen) for number, seen in enumerate(_given(released, arrays))]
    masks = tuple(_mask_of(released, seen) for _, seen in pairs)
    none = np.zeros((0, len(released.class_names)), dtype=np.float32)
    names = tuple(name for name, _ in pairs)
    return Predictions(names, released.class_names, none, masks=masks, skipped=tuple(skipped))


def _given(released: ReleasedModel, images: Sequence[object]) -> list[_Seen]:
    """Prepare arrays and tensors: a batch, or one image each."""
    channels, *size = released.image_shape
    seen: list[_Seen] = []
    for each in images:
        values = each.detach().cpu().numpy() if isinstance(each, Tensor) else np.asarray(each)
        if values.ndim == 4 and len(images) > 1:
            raise DataError(f"each of several images must be (H, W), (H, W, C) or (C, H, W), got {values.shape}.")
        batch = values if values.ndim == 4 else values[None]
        # A copy: the array may belong to a Pillow image, which can't be written to.
        pixels = torch.from_numpy(image_bytes(batch, released.config.data.window, Path("images")).copy())
        height, width = pixels.shape[2:]
        fitted = resized(with_channels(pixels, channels), (size[0], size[1]), squash=False)
        seen += [_Seen(row[None], height, width) for row in fitted]
    if not seen:
        raise DataError("no images given.")
    return seen


@final
@dataclass(frozen=True)
class MaskFile:
    """A mask as it will be written; ``shares`` is the share of pixels of each class but the background."""

    source: Path
    path: Path
    content: bytes
    shares: dict[str, float]


@final
@dataclass(frozen=True)
class _Job:
    source: Path
    path: Path


@final
@dataclass(frozen=True, eq=False)
class _Seen:
    """The model's input for one image or all slices of a volume, and the original size and geometry."""

    images_SCHW: Tensor
    height: int
    width: int
    affine: NDArray[Any] | None = None
    axis: int = 0


def write_masks(
    released: ReleasedModel,
    sources: Sequence[Path],
    folder: Path,
    *,
    force: bool = False,
    skip_bad: bool = False,
    device: str = "cpu",
) -> tuple[list[MaskFile], list[tuple[str, str]]]:
    """Predict and write ``NAME_mask.png`` (or .nii, .nii.gz) for each image (or volume).

    Nothing is written before everything has been predicted, and nothing outside ``folder``.

    Args:
        released: a segmentation model.
        sources: images, volumes, or folders of them.
        folder: where masks are written, in the sub-folders of their images.
        force: overwrite existing files.
        skip_bad: continue without files that can't be read.
        device: torch's name of the device.

    Returns:
        The masks, and (file, reason) of every file that was skipped.

    Raises:
        ArgumentError: two masks would have one name, or a file exists already.
        DataError: a file can't be read, without ``skip_bad``.
    """
    jobs = [job for source in sources for job in _jobs(source, folder)]
    _require_free(jobs, folder, force=force)
    released.model.to(device)
    files: list[MaskFile] = []
    bad: list[tuple[str, str]] = []
    for job in jobs:
        seen = _seen_or_reason(released, job.source)
        if isinstance(seen, str):
            bad.append((str(job.source), seen))
        else:
            files.append(_mask_file(released, job, seen))
    if bad and not skip_bad:
        raise DataError(f"{len(bad)} of {len(jobs)} files can't be read: {bad_files_text(bad)}. Nothing was written.")
    for file in files:
        with disk_errors(f"write {shown(file.path)}"):
            write_atomically(file.path, file.content)
    return files, bad


def at_own_size(mask_HW: Mask, height: int, width: int) -> Mask:
    """Scale a mask to the size of its image by nearest neighbour.

    The image was scaled to cover the model's input and cropped in the middle: the cropped borders are background.
    """
    left, top, right, bottom = cover_box(height, width, (mask_HW.shape[0], mask_HW.shape[1]))
    rows, seen_rows = _nearest(height, top, bottom, mask_HW.shape[0])
    columns, seen_columns = _nearest(width, left, right, mask_HW.shape[1])
    return mask_HW[rows[:, None], columns] * (seen_rows[:, None] & seen_columns)


def _nearest(length: int, start: float, stop: float, size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each of ``length`` pixels: its cell among ``size`` from ``start`` to ``stop``, and whether it has one."""
    place = (np.arange(length) + 0.5 - start) / (stop - start)
    return np.clip((place * size).astype(np.int64), 0, size - 1), (place >= 0) & (place <= 1)


def _images_and_volumes(source: Path) -> list[Path]:
    files = files_of(source, lambda file: is_image(file) or is_volume(file))
    if not files:
        raise DataError(f"{shown(source)} has no images or volumes.")
    return files


def _jobs(source: Path, folder: Path) -> list[_Job]:
    files = _images_and_volumes(source)
    below = source if source.is_dir() else source.parent
    return [_Job(file, folder / file.relative_to(below).parent / _mask_name(file)) for file in files]


def _mask_name(source: Path) -> str:
    ending = next((suffix for suffix in SUFFIXES if source.name.lower().endswith(suffix)), None)
    if ending is None:
        return f"{source.stem}_mask.png"
    return f"{source.name[: -len(ending)]}_mask{ending}"


def _require_free(jobs: Sequence[_Job], folder: Path, *, force: bool) -> None:
    """Refuse early: two masks of one name, a name in use, or a link that leads out of the folder."""
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"--output must be a folder, got the file {shown(folder)}.")
    first: dict[Path, Path] = {}
    for job in jobs:
        other = first.setdefault(job.path, job.source)
        if other != job.source:
            raise ArgumentError(
                f"{shown(other)} and {shown(job.source)} would both give {shown(job.path.name)}. Give them one by one, "
                "with an --output each, or the folder that holds both."
            )
        if not job.path.parent.resolve().is_relative_to(folder.resolve()):
            raise ArgumentError(f"{shown(job.path.parent)} leads out of {shown(folder)}. Choose another --output.")
    taken = [job.path for job in jobs if job.path.exists() or job.path.is_symlink()]
    if taken and not force:
        raise ArgumentError(f"{some_of(taken)} exist already. Choose another --output, or replace with --force.")


def _seen_or_reason(released: ReleasedModel, source: Path) -> _Seen | str:
    """Read an image or volume, or return why it can't be read."""
    read = _read_volume if is_volume(source) else _read_image
    (found,) = read_each(lambda _: read(released, source), 1, what="reading", workers=1)
    return found


def _read_image(released: ReleasedModel, source: Path) -> _Seen:
    looks, image_CHW = read_header(source), decode(source, image_shape=released.image_shape)
    return _Seen(torch.from_numpy(image_CHW.copy())[None], looks.height, looks.width)


def _read_volume(released: ReleasedModel, source: Path) -> _Seen:
    volume, options = open_volume(source), load_options(released.config)
    images_SCHW = volume_images(volume, image_shape=released.image_shape, options=options)
    height, width = volume.slices(options.volume_axis).shape[1:]
    return _Seen(images_SCHW, height, width, volume.affine, options.volume_axis)


def _mask_of(released: ReleasedModel, seen: _Seen) -> Mask:
    """Predict the mask of an image, or of a volume in its own order of axes."""
    masks = predict_masks(released.model, seen.images_SCHW, released.normalisation)
    masks_SHW = np.stack([at_own_size(mask.numpy(), seen.height, seen.width) for mask in masks])
    return masks_SHW[0] if seen.affine is None else np.moveaxis(masks_SHW, 0, seen.axis)


def _mask_file(released: ReleasedModel, job: _Job, seen: _Seen) -> MaskFile:
    mask, names = _mask_of(released, seen), released.class_names
    shares = {name: float((mask == number).mean()) for number, name in enumerate(names) if number > 0}
    if seen.affine is None:
        content = _png_bytes(mask, black_and_white=len(names) == 2)
    else:
        packed = job.source.name.lower().endswith(".gz")
        content = _nifti_bytes(mask, seen.affine, packed=packed)
    return MaskFile(job.source, job.path, content, shares)


def _png_bytes(mask_HW: Mask, *, black_and_white: bool) -> bytes:
    """Encode two classes as black and white, more as their numbers."""
    content = io.BytesIO()
    Image.fromarray(mask_HW * np.uint8(255) if black_and_white else mask_HW).save(content, "PNG")
    return content.getvalue()


def _nifti_bytes(mask: Mask, affine: NDArray[Any], *, packed: bool) -> bytes:
    import nibabel  # an optional extra; it has just read the volume

    kind = nibabel.Nifti1Image if max(mask.shape) <= _LARGEST_SIDE_OF_NIFTI1 else nibabel.Nifti2Image
    content = kind(np.asfortranarray(mask), affine).to_bytes()
    return gzip.compress(content, mtime=0) if packed else content
