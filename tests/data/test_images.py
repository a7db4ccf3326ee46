"""Single images: every kind that people have, upright and in bytes; hostile ones refused."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.data import load_images
from dpvision.data.images import ImageHeader, cover_box, decode, read_header, scaled
from dpvision.errors import ArgumentError, DataError

GRADIENT = np.linspace(0, 255, 12 * 10).reshape(12, 10).astype(np.uint8)
COLOUR = np.stack([GRADIENT, 255 - GRADIENT, np.full_like(GRADIENT, 60)], axis=-1)
GREY_SHAPE, COLOUR_SHAPE = (1, 12, 10), (3, 12, 10)
# JPEG and lossy WebP change values; a smooth image changes by a few.
LOSSY = 12


def luma(colour: np.ndarray) -> np.ndarray:
    return colour @ np.array([0.299, 0.587, 0.114])


def palette_image() -> Image.Image:
    return Image.fromarray(GRADIENT // 64 * 64).convert("P", palette=Image.Palette.ADAPTIVE)


KINDS: dict[str, tuple[Image.Image, dict[str, Any], np.ndarray, float]] = {
    "grey.png": (Image.fromarray(GRADIENT), {}, GRADIENT, 0),
    "colour.png": (Image.fromarray(COLOUR), {}, COLOUR, 0),
    "grey.jpg": (Image.fromarray(GRADIENT), {"quality": 95}, GRADIENT, LOSSY),
    "colour.jpeg": (Image.fromarray(COLOUR), {"quality": 95, "subsampling": 0}, COLOUR, LOSSY),
    "cmyk.jpg": (Image.fromarray(COLOUR).convert("CMYK"), {"quality": 95}, COLOUR, LOSSY),
    "colour.bmp": (Image.fromarray(COLOUR), {}, COLOUR, 0),
    "grey.bmp": (Image.fromarray(GRADIENT), {}, GRADIENT, 0),
    "colour.tif": (Image.fromarray(COLOUR), {}, COLOUR, 0),
    "packed.tiff": (Image.fromarray(COLOUR), {"compression": "tiff_lzw"}, COLOUR, 0),
    "cmyk.tif": (Image.fromarray(COLOUR).convert("CMYK"), {}, COLOUR, 1),
    "colour.webp": (Image.fromarray(COLOUR), {"lossless": True}, COLOUR, 0),
    "lossy.webp": (Image.fromarray(COLOUR), {"quality": 95}, COLOUR, 2 * LOSSY),
    "palette.png": (palette_image(), {}, np.asarray(palette_image().convert("RGB")), 0),
    "bilevel.png": (Image.fromarray(GRADIENT > 99), {}, np.where(GRADIENT > 99, 255, 0), 0),
    "sixteen.png": (Image.fromarray(GRADIENT.astype(np.uint16) * 257), {}, GRADIENT, 0),
    "sixteen.tif": (Image.fromarray(GRADIENT.astype(np.uint16) * 257), {}, GRADIENT, 0),
    "long.tif": (Image.fromarray(GRADIENT.astype(np.int32) * 257), {}, GRADIENT, 0),
    "rgba.png": (Image.fromarray(np.dstack([COLOUR, np.full_like(GRADIENT, 255)])), {}, COLOUR, 0),
    "rgba.webp": (Image.fromarray(np.dstack([COLOUR, np.full_like(GRADIENT, 255)])), {"lossless": True}, COLOUR, 0),
    "la.png": (Image.fromarray(np.dstack([GRADIENT, np.full_like(GRADIENT, 255)]), "LA"), {}, GRADIENT, 0),
}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_of_image_becomes_the_same_bytes(tmp_path: Path, name: str) -> None:
    image, settings, expected, tolerance = KINDS[name]
    image.save(tmp_path / name, **settings)
    grey = decode(tmp_path / name, image_shape=GREY_SHAPE)[0].astype(float)
    colour = decode(tmp_path / name, image_shape=COLOUR_SHAPE).transpose(1, 2, 0).astype(float)
    as_colour = expected if expected.ndim == 3 else np.repeat(expected[:, :, None], 3, axis=2)
    assert np.abs(colour - as_colour).max() <= tolerance
    # Making grey rounds once more.
    assert np.abs(grey - luma(as_colour)).max() <= tolerance + 1
    assert read_header(tmp_path / name) == ImageHeader(
        12, 10, grey=name.split(".")[0] in {"grey", "bilevel", "sixteen", "long", "la"}
    )


def test_transparent_parts_lie_over_black(tmp_path: Path) -> None:
    alpha = np.zeros_like(GRADIENT)
    alpha[:6] = 255
    Image.fromarray(np.dstack([COLOUR, alpha])).save(tmp_path / "a.png")
    pixels = decode(tmp_path / "a.png", image_shape=COLOUR_SHAPE)
    np.testing.assert_array_equal(pixels[:, :6].transpose(1, 2, 0), COLOUR[:6])
    assert (pixels[:, 6:] == 0).all()
    palette = palette_image()
    palette.save(tmp_path / "b.png", transparency=int(np.asarray(palette)[0, 0]))
    assert (decode(tmp_path / "b.png", image_shape=COLOUR_SHAPE)[:, 0, 0] == 0).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "tif", "png", "webp"])
def test_images_are_turned_upright_by_their_exif(tmp_path: Path, orientation: int, suffix: str) -> None:
    upright = np.zeros((12, 20), dtype=np.uint8)
    upright[:6, :10] = 250
    upright[6:, :10] = 120
    turned = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: upright.T[::-1],
        7: upright[::-1, ::-1].T,
        8: upright.T[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(np.ascontiguousarray(turned)).save(path, exif=exif)
    pixels = decode(path, image_shape=(1, 12, 20))[0].astype(float)
    assert np.abs(pixels - upright).mean() < LOSSY
    assert (read_header(path).height, read_header(path).width) == (12, 20)


def test_odd_sizes_cover_the_shape_and_are_cropped_in_the_middle(tmp_path: Path) -> None:
    wide = np.zeros((20, 60), dtype=np.uint8)
    wide[:, 20:40] = 200
    Image.fromarray(wide).save(tmp_path / "a.png")
    cropped = decode(tmp_path / "a.png", image_shape=(1, 10, 10))[0]
    # The smoothing filter reaches a little beyond the cut.
    assert (cropped[:, 1:-1] == 200).all()
    assert cropped.min() > 150
    squashed = decode(tmp_path / "a.png", image_shape=(1, 10, 12), squash=True)[0]
    assert squashed[:, 5:7].min() == 200
    assert squashed[:, :2].max() == 0
    enlarged = decode(tmp_path / "a.png", image_shape=(3, 40, 40))
    assert enlarged.shape == (3, 40, 40)


@pytest.mark.parametrize("side", [8, 28, 32, 48, 64, 96, 128, 192, 224])
def test_the_part_that_is_kept_lies_within_an_image_of_any_size(side: int) -> None:
    # In floats 224 * (450 / 224) is above 450: one image in several hundred sizes was refused by Pillow.
    for height in range(1, 1201, 7):
        for width in (*range(1, 1201, 113), height, side):
            left, top, right, bottom = cover_box(height, width, (side, side))
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            assert abs((right - left) - (bottom - top)) < 1e-9
            assert abs(right - left - min(height, width)) < 1e-9


@pytest.mark.parametrize(("height", "width"), [(450, 600), (600, 450), (116, 116), (29, 29)])
def test_images_whose_kept_part_was_rounded_outside_are_read(height: int, width: int) -> None:
    image = Image.new("L", (width, height), 90)
    assert np.all(np.asarray(scaled(image, (224, 224), squash=False, method=Image.Resampling.BILINEAR)) == 90)


def test_a_file_with_the_wrong_suffix_is_read_by_its_content(tmp_path: Path) -> None:
    Image.fromarray(COLOUR).save(tmp_path / "a.bmp")
    (tmp_path / "a.bmp").rename(tmp_path / "a.jpg")
    np.testing.assert_array_equal(decode(tmp_path / "a.jpg", image_shape=COLOUR_SHAPE).transpose(1, 2, 0), COLOUR)


# --- hostile files ---------------------------------------------------------------------------------------------------


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


def saved(image: Image.Image, form: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **settings)
    return file.getvalue()


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
HOSTILE = {
    "empty.png": (b"", "empty file"),
    "text.png": (b"hello", "not an image of a known format"),
    "cut.png": (saved(NOISE, "PNG")[:3000], "truncated|Truncated|broken"),
    "cut.jpg": (saved(NOISE, "JPEG")[:1500], "truncated"),
    "cut.bmp": (saved(NOISE, "BMP")[:1500], "truncated"),
    "cut.tif": (saved(NOISE, "TIFF")[:6000], "."),
    "cut.webp": (saved(NOISE, "WEBP")[:1500], "."),
    "headless.jpg": (b"\xff\xd8\xff\xe0", "."),
    "bomb.png": (png_header(20_000, 20_000), "more than 89478485 pixels"),
    "big.png": (png_header(10_000, 10_000), "more than 89478485 pixels"),
    "hollow.png": (png_header(5_000, 5_000), "."),
    "gif.png": (saved(NOISE.convert("P"), "GIF"), "not an image of a known format"),
    "eps.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image of a known format"),
    "moving.webp": (saved(NOISE, "WEBP", save_all=True, append_images=[NOISE.rotate(90)]), "2 frames or pages"),
    "moving.png": (saved(NOISE, "PNG", save_all=True, append_images=[NOISE.rotate(90)]), "2 frames or pages"),
    "float.tif": (saved(Image.fromarray(GRADIENT.astype(np.float32)), "TIFF"), "floating-point pixels"),
    "wide.tif": (saved(Image.fromarray(GRADIENT.astype(np.int32) * 10**6), "TIFF"), "outside 16 bits"),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_image_is_named_with_its_reason(tmp_path: Path, name: str) -> None:
    content, reason = HOSTILE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"1 of 1 images can't be read: .*{name} \(.*({reason})") as caught:
        load_images([tmp_path / name], image_shape=(3, 8, 8))
    assert str(caught.value).isprintable()


def test_random_damage_gives_pixels_or_a_reason_and_nothing_else(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    small = NOISE.resize((12, 12))
    for number in range(240):
        form = ("PNG", "JPEG", "BMP", "TIFF", "WEBP")[number % 5]
        data = bytearray(saved(small, form))
        for place in rng.integers(0, min(len(data), 200), 3):
            data[place] = rng.integers(0, 256)
        (tmp_path / f"{number}.png").write_bytes(bytes(data))
    pixels, names, skipped = load_images([tmp_path], image_shape=(3, 8, 8), skip_bad=True)
    assert len(names) + len(skipped) == 240
    assert pixels.shape == (len(names), 3, 8, 8)
    assert all(reason.isprintable() for _, reason in skipped)


def test_a_missing_file_and_a_folder_in_disguise_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.png does not exist"):
        load_images([tmp_path / "none.png"], image_shape=(3, 8, 8))
    with pytest.raises(DataError, match="no images given"):
        load_images([tmp_path], image_shape=(3, 8, 8))
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(DataError, match="no images given"):
        load_images([tmp_path], image_shape=(3, 8, 8))
    Image.fromarray(GRADIENT).save(tmp_path / "a.png")
    with pytest.raises(ArgumentError, match="image_shape must be"):
        load_images([tmp_path / "a.png"], image_shape=(2, 8, 8))


def test_images_for_prediction_come_in_the_order_given_with_folders_opened(tmp_path: Path) -> None:
    for name, value in (("b.png", 2), ("f/z.png", 9), ("f/a.png", 8), ("a.png", 1)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (5, 5), value).save(tmp_path / name)
    (tmp_path / "f" / "notes.txt").write_text("no image")
    wanted = [tmp_path / "b.png", tmp_path / "f", tmp_path / "a.png"]
    pixels, names, skipped = load_images(wanted, image_shape=(1, 4, 4))
    assert pixels[:, 0, 0, 0].tolist() == [2, 8, 9, 1]
    assert pixels.dtype == torch.uint8
    assert [Path(name).name for name in names] == ["b.png", "a.png", "z.png", "a.png"]
    assert skipped == ()
