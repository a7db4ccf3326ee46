"""Views: each transform against a plain loop over one image, and what a unit's views may depend on."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy.stats import binomtest, chisquare
from torch import Tensor, nn

from dpvision.config import Performance
from dpvision.data import ImageBatches, ImageStore, Normalisation, ViewsConfig, erase_views, make_views
from dpvision.data.augmentation import Padding, pad, rotate
from dpvision.data.store import store_of_arrays
from dpvision.gradients.clipped_sum import clipped_sum_of_batch
from dpvision.privacy.randomness import Keys
from draws_support import draws_at_rate
from grads_support import cross_entropy, distance, relative_error, total_norm

FALSE_ALARM = 1e-6
KEYS = Keys.from_seed(4, "test of views")
NORMALISATION = Normalisation(mean=(0.3,), std=(0.2,), source="fixed")
EVERYTHING = ViewsConfig(count=3, crop_padding=2, padding="symmetric", flip=0.5, rotation=20.0, erasing=0.5)
PADDINGS: tuple[Padding, ...] = ("reflect", "symmetric", "zeros")
Words = NDArray[np.uint64]


def words_for(images: int, views: int, *, step: int = 0) -> Words:
    return KEYS.bits_by_unit(np.arange(images), views * 5, "augmentation", step).reshape(images, views, 5)


def random_images(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# --- one image at a time -------------------------------------------------------------------------------------------


def halves_of(words: Words) -> list[int]:
    return [half for word in words.tolist() for half in (word >> 32, word & 0xFFFFFFFF)]


def plain_crop(image: NDArray[Any], chosen: ViewsConfig, words: Words) -> NDArray[Any]:
    """Mirror, pad as numpy does, cut out."""
    halves, pixels = halves_of(words), chosen.crop_padding
    if halves[2] / 2**32 < chosen.flip:
        image = image[:, :, ::-1]
    mode = "constant" if chosen.padding == "zeros" else chosen.padding
    padded = np.pad(image, ((0, 0), (pixels, pixels), (pixels, pixels)), mode=mode)
    top, left = (halves[which] * (2 * pixels + 1) >> 32 for which in (0, 1))
    return padded[:, top : top + image.shape[1], left : left + image.shape[2]]


def plain_rotation(image: NDArray[Any], angle: float, *, outside: str) -> NDArray[np.float64]:
    """Each pixel of the result asks the four neighbours of the place where it came from."""
    channels, height, width = image.shape
    result = np.zeros((channels, height, width))
    for y in range(height):
        for x in range(width):
            dx, dy = x + 0.5 - width / 2, y + 0.5 - height / 2
            from_x = math.cos(angle) * dx + math.sin(angle) * dy + width / 2 - 0.5
            from_y = math.cos(angle) * dy - math.sin(angle) * dx + height / 2 - 0.5
            if outside == "reflection":
                from_x, from_y = mirrored(from_x, width), mirrored(from_y, height)
            left, top = math.floor(from_x), math.floor(from_y)
            for row, share_y in ((top, top + 1 - from_y), (top + 1, from_y - top)):
                for column, share_x in ((left, left + 1 - from_x), (left + 1, from_x - left)):
                    if 0 <= row < height and 0 <= column < width:
                        result[:, y, x] += share_y * share_x * image[:, row, column]
    return result


def mirrored(place: float, side: int) -> float:
    """Bounced off the outer edges of the first and the last pixel, and kept within their centres."""
    distance_from_edge = (place + 0.5) % (2 * side)
    return min(max(min(distance_from_edge, 2 * side - distance_from_edge) - 0.5, 0), side - 1)


def plain_box(words: Words, probability: float, height: int, width: int) -> tuple[int, int, int, int]:
    """Top, height, left and width of what is erased."""
    halves = halves_of(words)
    if halves[4] / 2**32 >= probability:
        return 0, 0, 0, 0
    area = (0.02 + 0.31 * halves[5] / 2**32) * height * width
    aspect = math.exp(math.log(0.3) + (math.log(3.3) - math.log(0.3)) * halves[6] / 2**32)
    high, wide = min(round(math.sqrt(area * aspect)), height), min(round(math.sqrt(area / aspect)), width)
    return halves[7] * (height - high + 1) >> 32, high, halves[8] * (width - wide + 1) >> 32, wide


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 3), st.sampled_from([1, 3]), st.integers(1, 7), st.integers(1, 7)),
    count=st.integers(1, 4),
    crop_padding=st.integers(0, 16),
    padding=st.sampled_from(PADDINGS),
    flip=st.sampled_from([0.0, 0.25, 1.0]),
    floating=st.booleans(),
)
def test_crops_and_mirror_images_are_those_of_a_plain_loop(
    shape: tuple[int, ...], count: int, crop_padding: int, padding: Padding, flip: float, floating: bool
) -> None:
    # Sides down to one pixel, and paddings of up to sixteen times the side.
    chosen = ViewsConfig(
        count=count if crop_padding or flip else 1, crop_padding=crop_padding, padding=padding, flip=flip
    )
    images, words = random_images(*shape), words_for(shape[0], chosen.count)
    images = images.astype(np.float32) if floating else images
    found = make_views(torch.from_numpy(images), chosen, words)
    expected = [plain_crop(p, chosen, w) for p, own in zip(images, words, strict=True) for w in own]
    assert found.dtype == (torch.float32 if floating else torch.uint8)
    np.testing.assert_array_equal(found.numpy(), np.stack(expected))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("side", [1, 2, 3, 8])
def test_padding_is_that_of_numpy_also_where_it_is_wider_than_the_image(padding: Padding, side: int) -> None:
    image = random_images(1, 2, side, side + 1)
    mode = "constant" if padding == "zeros" else padding
    for pixels in (0, 1, side, 3 * side + 1):
        expected = np.pad(image, ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels)), mode=mode)
        np.testing.assert_array_equal(pad(torch.from_numpy(image), pixels, padding).numpy(), expected)


@pytest.mark.parametrize("outside", ["zeros", "reflection"])
@pytest.mark.parametrize("shape", [(3, 6, 9), (1, 8, 8), (1, 1, 1), (2, 1, 5)])
def test_a_rotation_is_that_of_a_plain_loop(shape: tuple[int, ...], outside: Any) -> None:
    angles = np.deg2rad(np.array([0.0, 7.0, -15.0, 33.3, 90.0, 180.0]))
    images = random_images(len(angles), *shape)
    expected = np.stack([plain_rotation(p, a, outside=outside) for p, a in zip(images, angles, strict=True)])
    exact = rotate(torch.from_numpy(images).double(), angles, outside=outside)
    # Coordinates are float32: 1e-6 of an image's side, times 255 levels between neighbours.
    np.testing.assert_allclose(exact.numpy(), expected, atol=5e-3)
    whole = rotate(torch.from_numpy(images), angles, outside=outside)
    assert whole.dtype == torch.uint8
    assert np.abs(whole.numpy() - expected).max() <= 0.5 + 5e-3
    np.testing.assert_array_equal(whole[0].numpy(), images[0])


def test_a_quarter_turn_is_a_quarter_turn_clockwise() -> None:
    image = random_images(1, 2, 6, 6)
    found = rotate(torch.from_numpy(image), np.array([math.pi / 2]), outside="zeros")
    np.testing.assert_array_equal(found.numpy(), np.rot90(image, k=-1, axes=(2, 3)))


@pytest.mark.parametrize(("height", "width"), [(12, 7), (32, 32), (1, 1), (1, 9)])
def test_erased_rectangles_are_those_of_a_plain_loop(height: int, width: int) -> None:
    chosen = ViewsConfig(count=2, erasing=0.7)
    words = words_for(40, 2)
    found = erase_views(torch.ones(80, 3, height, width), chosen, words)
    for view, own in zip(found, words.reshape(80, 5), strict=True):
        top, high, left, wide = plain_box(own, 0.7, height, width)
        expected = torch.ones(3, height, width)
        expected[:, top : top + high, left : left + wide] = 0
        assert torch.equal(view, expected)
    assert (found == 0).any() or height == 1


def test_rotated_views_are_turned_first_and_cropped_then() -> None:
    chosen = ViewsConfig(count=2, crop_padding=2, padding="zeros", flip=0.5, rotation=30.0)
    images, words = random_images(5, 3, 8, 6), words_for(5, 2)
    found = make_views(torch.from_numpy(images), chosen, words).numpy()
    for index, own in enumerate(words.reshape(10, 5)):
        angle = math.radians(30) * (2 * halves_of(own)[3] / 2**32 - 1)
        turned = plain_rotation(images[index // 2], angle, outside="zeros")
        assert np.abs(found[index] - plain_crop(turned, chosen, own)).max() <= 0.5 + 5e-3


# --- what is drawn ---------------------------------------------------------------------------------------------------


def found_offsets(flip: float, pixels: int, views: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each view of an image of coordinates was cut out, and whether it is mirrored: read off its middle."""
    rows, columns = np.indices((9, 9), dtype=np.uint8)
    image = torch.from_numpy(np.stack([rows, columns])[None])
    chosen = ViewsConfig.model_construct(count=views, crop_padding=pixels, padding="zeros", flip=flip)
    middle = make_views(image, chosen, words_for(1, views)).long().numpy()[:, :, 4, 4:6]
    mirrored_views = middle[:, 1, 1] < middle[:, 1, 0]
    x = np.where(mirrored_views, 8 - middle[:, 1, 0], middle[:, 1, 0]) - 4 + pixels
    return np.stack([middle[:, 0, 0] - 4 + pixels, x], axis=1), mirrored_views


def test_every_crop_is_equally_likely_with_and_without_the_mirror() -> None:
    # 7 × 7 places × mirrored or not, 200 views expected in each: chi-square, false alarm 1e-6.
    places, mirrored_views = found_offsets(0.5, 3, 49 * 2 * 200)
    counts = np.bincount((places[:, 0] * 7 + places[:, 1]) * 2 + mirrored_views, minlength=98)
    assert len(counts) == 98
    assert chisquare(counts).pvalue > FALSE_ALARM
    # The same test rejects crops that leave out one of the fourteen borders half of the time.
    short = np.where(places[:, 0] == 6, places[:, 0] - np.arange(len(places)) % 2, places[:, 0])
    assert chisquare(np.bincount(short * 7 + places[:, 1], minlength=49)).pvalue < FALSE_ALARM


@pytest.mark.parametrize("flip", [0.0, 0.25, 1.0])
def test_views_are_mirrored_with_the_probability_asked_for(flip: float) -> None:
    _, mirrored_views = found_offsets(flip, 1, 20_000)
    assert binomtest(int(mirrored_views.sum()), 20_000, flip).pvalue > FALSE_ALARM


def test_angles_are_even_between_minus_and_plus_the_largest() -> None:
    # On an image whose channels are its coordinates, two neighbours of the middle show cosine and sine.
    y, x = torch.meshgrid(torch.arange(9.0), torch.arange(9.0), indexing="ij")
    words = words_for(1, 4000)
    turned = make_views(torch.stack([y, x])[None], ViewsConfig.model_construct(count=4000, rotation=15.0), words)
    ramp_x = turned[:, 1]
    angles = torch.rad2deg(torch.atan2(ramp_x[:, 5, 4] - ramp_x[:, 4, 4], ramp_x[:, 4, 5] - ramp_x[:, 4, 4])).numpy()
    assert np.abs(angles).max() <= 15.001
    assert chisquare(np.histogram(angles, bins=20, range=(-15.001, 15.001))[0]).pvalue > FALSE_ALARM


def test_rectangles_are_erased_with_the_probability_asked_for_and_within_their_sizes() -> None:
    chosen = ViewsConfig.model_construct(count=5000, erasing=0.25)
    erased = erase_views(torch.ones(5000, 1, 40, 40), chosen, words_for(1, 5000)) == 0
    area = erased.flatten(1).sum(1) / 1600
    hit = area > 0
    assert binomtest(int(hit.sum()), 5000, 0.25).pvalue > FALSE_ALARM
    # A side is rounded by half a pixel at most: a rectangle of 2 % has sides of 3.1 pixels or more.
    assert 0.012 < area[hit].min() < 0.03
    assert 0.31 < area[hit].max() < 0.345
    # Even in area: the mean is (2 % + 33 %) / 2; five standard errors of a uniform over 1,250 hits.
    assert abs(float(area[hit].mean()) - 0.175) < 5 * 0.31 / 12**0.5 / 1200**0.5


# --- views in draws --------------------------------------------------------------------------------------------------


def store_of(rows_of_unit: list[int], *, seed: int = 0) -> ImageStore:
    units = np.repeat(np.arange(len(rows_of_unit)), rows_of_unit)
    images = random_images(len(units), 1, 6, 6, seed=seed)
    return store_of_arrays(
        images=images, labels=np.arange(len(units)) % 3, class_names=["a", "b", "c"], name="made", unit_names=units
    )


draws_of = partial(draws_at_rate, keys=KEYS, normalisation=NORMALISATION)


def inputs_by_unit(draws: ImageBatches, step: int, *, units: int = 4) -> dict[int, Tensor]:
    """What each drawn unit gives to the model."""
    pieces = list(draws.batch(step).microbatches(units))
    by_unit = [unit for p in pieces for unit in p.inputs.unflatten(0, (units, -1))] if pieces else []
    return dict(zip(draws.units(step).tolist(), by_unit, strict=False))


def same(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[unit], other[unit]) for unit in one)


def test_without_views_a_draw_is_bit_for_bit_the_images_themselves() -> None:
    store = store_of([1] * 20)
    draws = draws_of(store, ViewsConfig(), rate=0.5)
    units = draws.units(3)
    (piece,) = draws.batch(3).microbatches(20)
    assert torch.equal(piece.inputs[: len(units)], NORMALISATION.apply(store.images[torch.from_numpy(units)]))
    assert piece.row_weights_UR.shape == (20, 1)


def test_a_unit_gives_all_views_of_each_of_its_rows_and_their_labels() -> None:
    store = store_of([1, 2, 3])
    draws = draws_of(store, EVERYTHING, rows_per_unit=2)
    (piece,) = draws.batch(0).microbatches(4)
    assert piece.inputs.shape == (4 * 2 * 3, 1, 6, 6)
    assert piece.targets.unflatten(0, (4, 2, 3))[:2].tolist() == [[[0] * 3, [0] * 3], [[1] * 3, [2] * 3]]
    # Rows that are not there and the padding unit have no weight; the others' shares sum to one up to rounding.
    torch.testing.assert_close(piece.row_weights_UR.sum(1), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    third, sixth = np.float32(1 / 3), np.float32(1 / 6)
    assert piece.row_weights_UR[0].tolist() == [third, third, third, 0, 0, 0]
    assert piece.row_weights_UR[1].tolist() == [sixth] * 6


def test_the_views_in_a_draw_are_made_of_the_units_own_words() -> None:
    store = store_of([1] * 20)
    draws = draws_of(store, EVERYTHING, rate=0.5)
    drawn = inputs_by_unit(draws, 7)
    whole_stream = KEYS.bits(20 * 16, "augmentation", 7).reshape(20, 16)[:, :15].reshape(20, 3, 5)
    for unit, found in drawn.items():
        words = whole_stream[unit : unit + 1]
        views = NORMALISATION.apply(make_views(store.images[unit : unit + 1], EVERYTHING, words))
        assert torch.equal(found, erase_views(views, EVERYTHING, words))
    assert len(drawn) > 3


@pytest.mark.parametrize("units", [1, 2, 3, 50])
def test_the_micro_batch_size_changes_no_view(units: int) -> None:
    draws = draws_of(store_of([1, 3, 2, 1] * 5), EVERYTHING, rate=0.7, rows_per_unit=2)
    for step in range(3):
        assert same(inputs_by_unit(draws, step, units=units), inputs_by_unit(draws, step, units=4))


def test_a_unit_changes_no_view_of_the_others_by_being_there_or_by_its_size() -> None:
    alone = draws_of(store_of([1, 2, 1, 4, 1]), EVERYTHING, rate=0.6, rows_per_unit=2)
    company = store_of([1, 2, 1, 4, 1, 9, 1])
    beside = draws_of(company, EVERYTHING, rate=0.6, rows_per_unit=2)
    for step in range(10):
        before, after = inputs_by_unit(alone, step), inputs_by_unit(beside, step)
        assert same(before, {unit: views for unit, views in after.items() if unit < 5})


def test_a_repeated_step_gives_the_same_views_and_every_other_step_or_key_others() -> None:
    store = store_of([1] * 20)
    first, again = draws_of(store, EVERYTHING), draws_of(store, EVERYTHING)
    list(again.batch(1).microbatches(8))
    assert same(inputs_by_unit(first, 5), inputs_by_unit(again, 5))
    other_step, other_key = (
        inputs_by_unit(first, 6),
        inputs_by_unit(draws_of(store, EVERYTHING, keys=KEYS.bind("b")), 5),
    )
    for unit, views in inputs_by_unit(first, 5).items():
        assert not torch.equal(views, other_step[unit])
        assert not torch.equal(views, other_key[unit])


def test_views_of_one_image_and_of_equal_images_differ() -> None:
    store = store_of([2] * 10)
    store.images[:] = store.images[:1].clone()
    chosen = ViewsConfig(count=4, crop_padding=4, flip=0.5)
    drawn = torch.cat(list(inputs_by_unit(draws_of(store, chosen, rows_per_unit=2), 0, units=10).values()))
    # 80 views of one image in 162 ways: about 63 different ones if drawn apart, 4 or 8 if rows or units share words.
    assert len(drawn) == 80
    assert len({view.numpy().tobytes() for view in drawn}) > 45


def test_padding_holds_zeros_whatever_is_done_to_images() -> None:
    draws = draws_of(store_of([1, 1, 1]), EVERYTHING, rows_per_unit=2)
    (piece,) = draws.batch(0).microbatches(5)
    absent = piece.row_weights_UR.reshape(-1) == 0
    assert absent.tolist() == [False, False, False, True, True, True] * 3 + [True] * 12
    assert (piece.inputs[absent] == 0).all()
    assert (piece.targets[absent] == 0).all()
    assert (piece.inputs[~absent] != 0).flatten(1).any(1).all()


def test_an_empty_draw_and_an_empty_store_have_no_views() -> None:
    assert list(draws_of(store_of([1] * 5), EVERYTHING, rate=1e-12).batch(0).microbatches(2)) == []
    assert list(draws_of(store_of([]), EVERYTHING).batch(0).microbatches(2)) == []


# --- one clip --------------------------------------------------------------------------------------------------------


def steep_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))


def steep_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 50 * cross_entropy(outputs, targets)


@pytest.mark.parametrize("rows_per_unit", [1, 2])
def test_a_unit_with_many_views_moves_the_sum_by_at_most_one_clip_norm(rows_per_unit: int) -> None:
    model, clip_norm = steep_model(), 0.37
    for step in range(3):
        sums = []
        for sizes in ([3] * 8, [3] * 9):
            batch = draws_of(store_of(sizes, seed=step), EVERYTHING, rows_per_unit=rows_per_unit).batch(step)
            performance = Performance(microbatch_size=3)
            found = clipped_sum_of_batch(model, steep_loss, batch, clip_norm=clip_norm, performance=performance)
            sums.append(found.gradients)
        moved = distance(*sums)
        assert moved <= clip_norm * (1 + 1e-5)  # rounding of float32 sums of nine units
        assert moved >= 0.9 * clip_norm  # the loss is so steep that every unit is clipped


def test_views_are_averaged_before_the_clip() -> None:
    model, clip_norm = steep_model(), 0.37
    draws = draws_of(store_of([1]), EVERYTHING)
    found = clipped_sum_of_batch(
        model, steep_loss, draws.batch(2), clip_norm=clip_norm, performance=Performance(microbatch_size=1)
    ).gradients
    (piece,) = draws.batch(2).microbatches(1)
    mean = steep_loss(model(piece.inputs), piece.targets).mean()
    true = dict(zip(found, torch.autograd.grad(mean, list(model.parameters())), strict=True))
    assert total_norm(true) > clip_norm
    clipped = {name: part * (clip_norm / total_norm(true)) for name, part in true.items()}
    assert relative_error(found, clipped) < 1e-5  # float32, and the slack that keeps the norm below the bound


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "greater than or equal to 1"),
        ({"count": 4}, "4 views of an image would be equal: give crop_padding, flip, rotation or erasing too"),
        ({"crop_padding": -1}, "greater than or equal to 0"),
        ({"padding": "edge"}, "should be 'reflect', 'symmetric' or 'zeros'"),
        ({"flip": 1.5}, "less than or equal to 1"),
        ({"erasing": float("nan")}, "finite number"),
        ({"rotation": -1.0}, "greater than or equal to 0"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ViewsConfig(**change)
