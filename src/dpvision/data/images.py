"""Image files and arrays into uint8 tensors of one shape: decoding, resizing, intensities and the values of masks.

A file is untrusted until it is decoded: its header is checked against limits first, and every failure is reported
with the file's name. Arrays (from .npz files and volumes) take the same path from values to bytes and from one size to
another.
"""

from __future__ import annotations

import io
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate

from dpvision.data.dicom import dicom_frame, is_dicom, read_dicom_header
from dpvision.data.options import LoadOptions, MaskClasses, Progress
from dpvision.data.safe_read import open_regular, reading
from dpvision.data.store import ImageStore, MappedImages
from dpvision.errors import ArgumentError, BadFile, DataError, bad_files_text, printable, require_memory, shown

MAX_CLASSES = 200
BACKGROUND = "background"


def windowed(
    values: NDArray[Any], window: tuple[float, float], *, slope: float = 1.0, intercept: float = 0.0
) -> NDArray[np.uint8]:
    """Map intensities to bytes by a window.

    Args:
        values: real numbers of any shape; the first axis is processed slice by slice.
        window: the lowest and the highest intensity, which become 0 and 255; values outside are clamped. A window
            without
            width gives zeros.
        slope: an intensity is ``slope`` times the value plus ``intercept``.
        intercept: see ``slope``.

    Returns:
        uint8 of the same shape.

    Raises:
        BadFile: if the values are not real numbers, or not finite.
    """
    if values.dtype.kind not in "iuf":
        raise BadFile(f"intensities must be real numbers, got {values.dtype}")
    low, high = window
    width = high - low if high > low else math.inf
    found = np.empty(values.shape, dtype=np.uint8)
    # Slice by slice: in float64 a volume would be eight times as large.
    for piece, out in zip(values, found, strict=True):
        if piece.dtype.kind == "f" and not np.isfinite(piece).all():
            raise BadFile("NaN or infinite intensities")
        share = (np.clip(piece.astype(np.float64) * slope + intercept, low, high) - low) / width
        out[...] = np.rint(share * 255)
    return found


def mask_bytes(values: NDArray[Any], mask_classes: MaskClasses) -> NDArray[np.uint8]:
    """Turn the values of a mask into classes.

    Args:
        values: whole numbers >= 0, of any numeric type.
        mask_classes: "merged" makes every value but 0 foreground; "classes" keeps the values as class numbers.

    Returns:
        uint8 of the same shape.

    Raises:
        BadFile: if the values are not such numbers, or a class number is ``MAX_CLASSES`` or more.
    """
    if values.dtype.kind not in "biuf":
        raise BadFile(f"a mask must hold whole numbers, got {values.dtype}")
    if values.dtype.kind == "f" and not (np.isfinite(values).all() and (values == np.floor(values)).all()):
        raise BadFile("a mask must hold whole numbers, got fractions, NaN or infinity")
    if values.size and values.min() < 0:
        raise BadFile(f"a mask must hold numbers >= 0, got {values.min()}")
    if mask_classes == "merged":
        return (values != 0).astype(np.uint8)
    top = int(values.max(initial=0))
    if top >= MAX_CLASSES:
        raise BadFile(f"a mask with the value {top} has no such class (0 to {MAX_CLASSES - 1}); merge the classes")
    return values.astype(np.uint8)


def mask_class_names(masks: Sequence[NDArray[Any]], mask_classes: MaskClasses) -> tuple[str, ...]:
    """Name the classes of masks that bring no names: by number, up to the largest value found."""
    if mask_classes == "merged":
        return BACKGROUND, "foreground"
    top = max((int(each.max(initial=0)) for each in masks), default=0)
    return BACKGROUND, *(str(number) for number in range(1, max(top, 1) + 1))


CHUNK_ROWS = 1024
# The integer form of the ITU-R 601 weights, as Pillow uses it: an array and an image file give the same grey.
GREY_WEIGHTS = (19595, 38470, 7471)


def fit(store: ImageStore, options: LoadOptions) -> ImageStore:
    """Bring a store to the size and the channels that the options ask for; masks are resized with their images."""
    size = options.size or store.image_shape[1:]
    if isinstance(store.images, MappedImages):
        wanted = (options.channels or store.image_shape[0], *size)
        if wanted != store.image_shape:
            raise DataError(f"{shown(store.name)} is packed as {store.image_shape}, not as {wanted}: pack it again.")
        return store
    images = resized(with_channels(store.images, options.channels), size, squash=options.squash)
    if images is store.images:
        return store
    labels = resized_masks(store.labels, size, squash=options.squash) if store.per_pixel else store.labels
    return replace(store, images=images, labels=labels)


def cover_box(height: int, width: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Find the largest central part (left, top, right, bottom) of an image that has the proportions of ``size``.

    It lies within the image exactly: Pillow refuses an edge that rounding puts a billionth of a pixel outside.
    """
    scale = min(height / size[0], width / size[1])
    box_height, box_width = min(float(height), size[0] * scale), min(float(width), size[1] * scale)
    top, left = (height - box_height) / 2, (width - box_width) / 2
    return left, top, min(float(width), left + box_width), min(float(height), top + box_height)


def with_channels(images: Tensor, channels: int | None) -> Tensor:
    """Convert images (N, C, H, W) between grey and colour; None keeps the channels."""
    found = images.shape[1]
    if channels is None or channels == found:
        return images
    if found == 1:
        return images.repeat(1, channels, 1, 1)
    if found == 3:
        return torch.cat([_grey(part) for part in images.split(CHUNK_ROWS)]) if len(images) else images[:, :1]
    raise DataError(f"images with {found} channels can't be shown with {channels}.")


def _grey(images: Tensor) -> Tensor:
    """Weigh the colours as Pillow does, so that an array and an image file give the same grey."""
    weights = torch.tensor(GREY_WEIGHTS, dtype=torch.int32).view(1, 3, 1, 1)
    total = (images.to(torch.int32) * weights).sum(1, keepdim=True, dtype=torch.int32)
    return ((total + 0x8000) >> 16).to(torch.uint8)


def resized(images_NCHW: Tensor, size: tuple[int, int], *, squash: bool) -> Tensor:
    """Resize images (N, C, H, W).

    Args:
        images_NCHW: uint8 images.
        size: height and width in pixels.
        squash: scale to ``size`` exactly, instead of covering it and cropping the middle.

    Returns:
        uint8 images, bilinear with antialiasing.
    """
    if tuple(images_NCHW.shape[2:]) == size:
        return images_NCHW
    if not len(images_NCHW):
        return images_NCHW.new_zeros((0, images_NCHW.shape[1], *size))
    return torch.cat([_resized_chunk(part, size, squash=squash) for part in images_NCHW.split(CHUNK_ROWS)])


def resized_masks(masks_NHW: Tensor, size: tuple[int, int], *, squash: bool) -> Tensor:
    """Resize masks (N, H, W) as ``resized`` does images: each pixel takes the class of the nearest one, never a
    mixture.
    """
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
    """Return the size to scale to, which covers ``size``, and the corner of the crop in its middle."""
    scale = max(size[0] / height, size[1] / width)
    cover = size if squash else (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
    return cover, ((cover[0] - size[0]) // 2, (cover[1] - size[1]) // 2)


SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"})
# A JPEG that holds several views ("MPO", as many phones write) comes with JPEG.
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP")
# An image of this many pixels is a decompression bomb or a mistake; it is Pillow's own warning limit.
MAX_PIXELS = 89_478_485
# Decoding takes up to 16 bytes a pixel: larger images wait for each other, to save memory.
LARGE_PIXELS = 1 << 23
GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"})
SIXTEEN_BIT = frozenset({"I", "I;16", "I;16B", "I;16L", "I;16N"})
_ORIENTATION_TAG = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
MAX_WORKERS = 8
_ONE_LARGE = threading.Lock()
Result = TypeVar("Result")
BadFiles = tuple[tuple[str, str], ...]  # (name, reason) of each
Place = Path | Callable[[], bytes]
"""Where an image is: a file, or a function that returns its bytes, for images inside a table."""


@final
@dataclass(frozen=True)
class ImageHeader:
    """Size in pixels and kind of an image, as its header states them; its frames or pages, and its DICOM patient."""

    height: int
    width: int
    grey: bool
    frames: int = 1
    patient: str | None = None


def is_image(path: Path) -> bool:
    """Whether the file's name ends like that of an image; hidden files do not count."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def is_readable(path: Path) -> bool:
    """Whether a file is an image of a format that Pillow reads, or DICOM."""
    return is_image(path) or is_dicom(path)


def has_frames(path: Path) -> bool:
    """Whether a file may hold several images, or name its patient: its header is read first."""
    return path.suffix.lower() in (".tif", ".tiff") or is_dicom(path)


def read_header(place: Place, *, frames: bool = False) -> ImageHeader:
    """Read the size and the kind of an image without decoding its pixels. The EXIF orientation is applied.

    Args:
        place: the image.
        frames: accept several frames or pages.
    """
    if isinstance(place, Path) and is_dicom(place):
        found = read_dicom_header(place)
        return ImageHeader(found.height, found.width, found.grey, found.frames, found.patient)
    with opened(place, frame=0 if frames else None) as image:
        width, height = image.size
        if _orientation(image) >= 5:
            width, height = height, width
        return ImageHeader(height, width, image.mode in GREY_MODES, getattr(image, "n_frames", 1) if frames else 1)


def decode(
    place: Place,
    *,
    image_shape: tuple[int, int, int],
    squash: bool = False,
    frame: int | None = None,
    window: tuple[float, float] | None = None,
) -> NDArray[np.uint8]:
    """Decode one image.

    Args:
        place: the image.
        image_shape: channels (1 or 3), height and width of the result.
        squash: scale to that size exactly, instead of covering it and cropping the middle.
        frame: which frame or page, from 0; None refuses an image that has several.
        window: intensities that become 0 and 255, for DICOM and for 16-bit grey images.

    Returns:
        uint8 (C, H, W), upright. Transparent parts are laid over black; 16-bit values are scaled from their full range,
        or by the window.

    Raises:
        BadFile: if the file is not a usable image; decoders may raise other exceptions too.
    """
    channels, *size = image_shape
    mode = "L" if channels == 1 else "RGB"
    if isinstance(place, Path) and is_dicom(place):
        flat = Image.fromarray(dicom_frame(place, frame=frame or 0, window=window)).convert(mode)
    else:
        with opened(place, frame=frame) as image:
            image.load()
            flat = upright(_flattened(image, window).convert(mode), image)
    flat = scaled(flat, (size[0], size[1]), squash=squash, method=Image.Resampling.BILINEAR)
    return np.asarray(flat).reshape(*size, channels).transpose(2, 0, 1)


def upright(flat: Image.Image, image: Image.Image) -> Image.Image:
    """Turn ``flat`` as the EXIF orientation of ``image``, from which it was made, asks for."""
    turn = _TURNS.get(_orientation(image))
    return flat if turn is None else flat.transpose(turn)


def scaled(flat: Image.Image, size: tuple[int, int], *, squash: bool, method: Image.Resampling) -> Image.Image:
    """Scale an image to cover (height, width) and crop the middle, or squash it to that size."""
    if (flat.height, flat.width) == size:
        return flat
    box = (0, 0, flat.width, flat.height) if squash else cover_box(flat.height, flat.width, size)
    return flat.resize((size[1], size[0]), method, box=box)


def read_each(
    read: Callable[[int], Result],
    count: int,
    *,
    what: str,
    progress: Progress | None = None,
    workers: int = MAX_WORKERS,
) -> list[Result | str]:
    """Read files in a few threads.

    Args:
        read: reads one file, given its number.
        count: how many files there are.
        what: the name of the work, for ``progress``.
        progress: called after each file, in order.
        workers: most threads at a time.

    Returns:
        For each number, in order, the result, or a text that says why the file can't be used.
    """
    results: list[Result | str] = []
    with _strict_pillow(), ThreadPoolExecutor(min(workers, os.cpu_count() or 1), "dpvision-images") as pool:
        try:
            for result in pool.map(lambda row: _tried(read, row), range(count)):
                results.append(result)
                if progress is not None:
                    progress(what, len(results), count)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return results


def usable(
    results: Sequence[Result | str], names: Sequence[str], *, skip_bad: bool, what: str = "images can't be read"
) -> tuple[list[Result], list[int], BadFiles]:
    """Separate the files that could be read from the others.

    Args:
        results: from ``read_each``.
        names: the names of the files.
        skip_bad: leave out bad files, as long as there are good ones.
        what: what is wrong with bad files, for the message.

    Returns:
        The results of the good files, their numbers, and (name, reason) of the bad ones.

    Raises:
        DataError: there are bad files and ``skip_bad`` is off, or all are bad.
    """
    bad = tuple((name, why) for name, why in zip(names, results, strict=True) if isinstance(why, str))
    if bad and (not skip_bad or len(bad) == len(results)):
        raise DataError(
            f"{len(bad)} of {len(results)} {what}: {bad_files_text(bad)}. "
            "Repair or remove them, or leave some of them out with skip_bad."
        )
    good = [number for number, result in enumerate(results) if not isinstance(result, str)]
    return [result for result in results if not isinstance(result, str)], good, bad


def decode_all(
    paths: Sequence[Place],
    names: Sequence[str],
    *,
    image_shape: tuple[int, int, int],
    squash: bool = False,
    skip_bad: bool = False,
    progress: Progress | None = None,
    frames: Sequence[int | None] | None = None,
    window: tuple[float, float] | None = None,
) -> tuple[Tensor, list[int], BadFiles]:
    """Decode many images in parallel.

    Args:
        paths: where they are.
        names: what to call them in messages.
        image_shape: channels, height and width of every image.
        squash: see ``decode``.
        skip_bad: leave out files that can't be decoded, instead of refusing all.
        progress: called after each file.
        frames: the frame or page of each; by default a file with several is refused.
        window: see ``decode``.

    Returns:
        The images as uint8 (N, C, H, W); the numbers of the files that they come from; (name, reason) of the skipped
        ones.

    Raises:
        DataError: see ``usable``; or the images do not fit into memory.
    """
    pixels, results = decode_rows(
        paths, image_shape=image_shape, squash=squash, progress=progress, frames=frames, window=window
    )
    _, good, bad = usable(results, names, skip_bad=skip_bad)
    return torch.from_numpy(pixels[good] if bad else pixels), good, bad


def decode_rows(
    paths: Sequence[Place],
    *,
    image_shape: tuple[int, int, int],
    squash: bool,
    progress: Progress | None,
    frames: Sequence[int | None] | None,
    window: tuple[float, float] | None,
) -> tuple[NDArray[np.uint8], list[str | None]]:
    """Decode images in parallel, as ``decode_all`` does.

    Returns:
        The images, zeros where one can't be decoded, and for each None or the reason why it can't.
    """
    if len(image_shape) != 3 or image_shape[0] not in (1, 3) or min(image_shape) < 1:
        raise ArgumentError(f"image_shape must be (1 or 3, height, width), got {image_shape}.")
    what = f"{len(paths)} images of {image_shape}"
    require_memory(
        len(paths) * math.prod(image_shape), what, remedy="Use smaller or fewer images, or pack them: dpvision pack."
    )
    with reading(what):
        pixels = np.zeros((len(paths), *image_shape), dtype=np.uint8)

    def fill(row: int) -> None:
        frame = None if frames is None else frames[row]
        pixels[row] = decode(paths[row], image_shape=image_shape, squash=squash, frame=frame, window=window)

    return pixels, read_each(fill, len(paths), what="reading images", progress=progress)


def load_images(
    paths: Sequence[Path | str],
    *,
    image_shape: tuple[int, int, int],
    squash: bool = False,
    skip_bad: bool = False,
    window: tuple[float, float] | None = None,
) -> tuple[Tensor, tuple[str, ...], BadFiles]:
    """Load image files, and all images below folders.

    Args:
        paths: files, which are decoded whatever their suffix, or folders, in which the suffix decides.
        image_shape: channels (1 or 3), height and width of every image.
        squash: see ``decode``.
        skip_bad: leave out files that can't be decoded, instead of refusing all.
        window: see ``decode``.

    Returns:
        The images as uint8 (N, C, H, W), one for each frame or page; their names; (name, reason) of the skipped ones.

    Raises:
        DataError: if there are no images or some can't be decoded.
        ArgumentError: if ``image_shape`` is not possible.
    """
    found = []
    for path in paths:
        with reading(path):
            found += files_of(Path(path), is_readable)
    if not found:
        raise DataError(f"no images given: name files or folders with {', '.join(sorted(SUFFIXES))} or DICOM files.")
    names = [printable(path) for path in found]
    images = expand_frames(found, names, skip_bad=skip_bad)
    pixels, good, bad = decode_all(
        [found[file] for file in images.files],
        images.names,
        image_shape=image_shape,
        squash=squash,
        skip_bad=skip_bad,
        frames=images.frames,
        window=window,
    )
    return pixels, tuple(images.names[row] for row in good), images.bad + bad


@final
@dataclass(frozen=True)
class FrameList:
    """The images in a list of files: of each the number of its file, its frame and its name.

    Attributes:
        files: the number of the file of each image.
        frames: the frame or page of each image; None in a file of a format that holds one.
        names: what to call each image in messages.
        patients: the patient of each image, "" where a DICOM file names none, None in other files.
        bad: (name, reason) of files whose header can't be read.
    """

    files: list[int]
    frames: list[int | None]
    names: list[str]
    patients: list[str | None]
    bad: BadFiles = ()


def expand_frames(
    places: Sequence[Place],
    names: Sequence[str],
    *,
    first_only: bool = False,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> FrameList:
    """List the frames and pages of TIFF and DICOM files; other files hold one image each, and are not opened.

    Args:
        places: the files.
        names: what to call them.
        first_only: take the first frame of each.
        skip_bad: leave out files whose header can't be read.
        progress: called after each file.

    Raises:
        DataError: see ``usable``.
    """
    looked = [n for n, place in enumerate(places) if isinstance(place, Path) and has_frames(place)]
    results = read_each(
        lambda n: read_header(places[looked[n]], frames=True), len(looked), what="looking at images", progress=progress
    )
    headers, good, bad = usable(results, [names[n] for n in looked], skip_bad=skip_bad)
    known = dict(zip((looked[n] for n in good), headers, strict=True))
    found = FrameList([], [], [], [], bad)
    for number in sorted({*range(len(places))} - {*looked} | known.keys()):
        header = known.get(number)
        count = 1 if header is None or first_only else header.frames
        for frame in range(count):
            found.files.append(number)
            found.frames.append(None if header is None else frame)
            found.names.append(names[number] if count == 1 else f"{names[number]}#{frame + 1}")
            found.patients.append(None if header is None else header.patient)
    return found


def files_of(source: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """List the wanted files below a folder, sorted, or the file itself."""
    if source.is_dir():
        return sorted(file for file in source.rglob("*") if wanted(file) and file.is_file())
    if not source.exists():
        raise DataError(f"{shown(source)} does not exist.")
    return [source]


def _tried(read: Callable[[int], Result], row: int) -> Result | str:
    """Call ``read`` and return its result, or the reason why the file is bad."""
    try:
        return read(row)
    except (BadFile, DataError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - decoders raise anything on hostile bytes; the reason is reported
        return shown(f"{type(error).__name__}: {error}")


@contextmanager
def _strict_pillow() -> Iterator[None]:
    """Make decompression bombs errors and silence other warnings of Pillow and pydicom, in all threads; set once,
    around the pool.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(PIL|pydicom)(\.|$)")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


@contextmanager
def opened(place: Place, *, frame: int | None = None) -> Iterator[Image.Image]:
    """Open an image and check its header against the limits; its pixels are not decoded yet.

    Args:
        place: the image.
        frame: which of its frames or pages; None refuses an image that has several.
    """
    # By its content, not by its name: Pillow maps a named raw TIFF into memory and garbles it when it is turned.
    with open_regular(place) if isinstance(place, Path) else io.BytesIO(place()) as file, _identified(file) as image:
        frames = getattr(image, "n_frames", 1) if image.format != "MPO" else 1
        if frame is None and frames > 1:
            raise BadFile(f"{frames} frames or pages; store each as an image of its own, or take --frames all or first")
        if frame:
            image.seek(frame)
        if image.width * image.height > MAX_PIXELS:
            raise BadFile(f"more than {MAX_PIXELS} pixels")
        with _ONE_LARGE if image.width * image.height > LARGE_PIXELS else nullcontext():
            yield image


def _identified(file: BinaryIO | io.BytesIO) -> Image.Image:
    """Recognise the format by the content, or raise ``BadFile``."""
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise BadFile("not an image of a known format" if file.seek(0, 2) else "empty file") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadFile(f"more than {MAX_PIXELS} pixels") from error


def _orientation(image: Image.Image) -> int:
    # Pillow turns a TIFF by itself. A PNG tells its EXIF only after decoding unless it comes first.
    """Read the EXIF orientation, 1 to 8."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    value: Any = image.getexif().get(_ORIENTATION_TAG, 1)
    return value if isinstance(value, int) else 1


def _flattened(image: Image.Image, window: tuple[float, float] | None = None) -> Image.Image:
    """Convert an image to 8 bits without transparency."""
    if window is not None:
        if image.mode not in SIXTEEN_BIT:
            raise BadFile("a window is for DICOM and 16-bit grey images")
        return Image.fromarray(windowed(np.asarray(image)[None], window)[0])
    if image.mode == "F":
        raise BadFile("floating-point pixels, whose range is not known; store 8 or 16 bits")
    if image.mode in SIXTEEN_BIT:
        return _eight_bits(image)
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, (0, 0, 0, 255)), layer)
    return image if image.mode in ("L", "RGB") else image.convert("L" if image.mode == "1" else "RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit values from their full range to bytes."""
    values = np.asarray(image).astype(np.int32)
    if values.min() < 0 or values.max() > 65535:
        raise BadFile("pixels outside 16 bits")
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
