"""The Gaussian mechanism: normals with full tails, added on a grid that does not depend on the data.

``noisy_mean`` is the only function that turns a sensitive ``ClippedSum`` into a ``PrivateGrad``, and only
``private_step.Privatizer`` calls it, once for each charged step.

Two things make a Gaussian mechanism on a computer weaker than on paper. First, generators that cut their tails
(``torch.randn`` on a CPU never passes 5.768 standard deviations) put a floor under delta. Here the radius of every
pair of normals reaches 13.37, finely resolved on the whole way. Second, the low bits of a floating-point sum tell
what was added to what. Here the clipped sum and the noise are both rounded to one public grid before they meet, so that
their sum is exact and everything after it is post-processing. docs/concepts/guarantee.md says what remains.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpvision import kernels as native
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.kernels import normals as kernels
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.randomness import Keys, WordStream
from dpvision.privacy.values import PROOF_OF_NOISE, ClippedSum, PrivateGrad, groups_by_size

KEY_BYTES = 32
GRID_BITS = 30  # the grid's spacing is 2⁻³⁰ of the noise's standard deviation, rounded down to a power of two

_PAIRS = 1 << 14  # pairs of normals worked on at once: small enough for the cache
_TOGETHER = 1 << 18  # numbers in a draw: a draw has a fixed cost, and more would leave the cache
_AHEAD = 8  # steps that share a draw, if their numbers are few enough
_FIRST_TAIL_WORD = np.uint64(2**64 - 2**53)  # one word in 2048 is a tail word
_LEAST_STDDEV, _MOST_STDDEV = 2.0**-400, 2.0**400  # beyond these the grid would leave float64's range


def standard_normals(key: bytes, count: int) -> NDArray[np.float64]:
    """Draw independent standard normals, a function of ``key`` and ``count`` alone.

    Box–Muller in float64 on the AES-256-CTR stream of ``key``: 64 bits for the angle, 64 for the radius, and 64 more
    for the radius in the outer 1/2048 of the mass, so that the far tail is as finely resolved as the middle.

    Native kernels make them where they are available, numpy elsewhere; both agree to the last bits.

    Args:
        key: 32 bytes, used for nothing else.
        count: how many normals.

    Returns:
        ``count`` float64 numbers.

    Guarantee: the largest possible radius is 13.37, whose tail mass is 2⁻¹²⁹; no bit depends on the number of threads.
    """
    if len(key) != KEY_BYTES:
        raise ArgumentError(f"a noise key must have {KEY_BYTES} bytes, got {len(key)}. Use Keys.derive.")
    pairs = (count + 1) // 2
    stream = WordStream(key)
    words = stream.take(2 * pairs)
    tails = np.flatnonzero(words[:pairs] >= _FIRST_TAIL_WORD)
    tail_radii = _tail_radii(words[tails], stream.take(len(tails)))
    by_kernel = kernels.from_words.takes(words, tails, tail_radii)
    from_words = kernels.from_words if by_kernel else _from_words
    return from_words(words, tails, tail_radii)[:count]


def _from_words(
    words: NDArray[np.uint64], tails: NDArray[np.int64], tail_radii: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Radii from the first half of the words, except at ``tails``, and angles from the others."""
    pairs = words.size // 2
    radius_words, angle_words = words[:pairs], words[pairs:]
    normals = np.empty(2 * pairs)
    for start in range(0, pairs, _PAIRS):
        stop = min(start + _PAIRS, pairs)
        radii = _radii(radius_words[start:stop])
        first, last = np.searchsorted(tails, (start, stop))
        radii[tails[first:last] - start] = tail_radii[first:last]
        cosines, sines = _circle(angle_words[start:stop])
        np.multiply(radii, cosines, out=normals[start:stop])
        np.multiply(radii, sines, out=normals[pairs + start : pairs + stop])
    return normals


def _radii(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """√(−2·log(1 − w·2⁻⁶⁴)): as fine near zero as float64 allows. Tail words come out coarse or infinite here."""
    radii = words * -(2.0**-64)
    with np.errstate(divide="ignore"):
        np.log1p(radii, out=radii)
    radii *= -2.0
    return np.sqrt(radii, out=radii)


def _tail_radii(words: NDArray[np.uint64], more_words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The radii of tail words, from what ``words`` lack to 2⁶⁴, continued by 64 bits below the point."""
    rest = (~words).astype(np.float64) + (more_words * 2.0**-64 + 2.0**-65)
    return np.sqrt(-2.0 * (np.log(rest) - 64.0 * math.log(2.0)))


def _circle(words: NDArray[np.uint64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosine and sine of a uniform angle, both from the tangent of its half: one slow function instead of two."""
    tangents = np.tan(words.view(np.int64) * (math.pi * 2.0**-64))
    twice_squared_cosines = 2.0 / (tangents * tangents + 1.0)
    return twice_squared_cosines - 1.0, tangents * twice_squared_cosines


def noisy_count(count: int, *, noise_multiplier: float, key: bytes) -> int:
    """Release a number that one unit moves by at most one: a Gaussian mechanism of ``CountedUnits.event``.

    Args:
        count: the true number. Sensitive.
        noise_multiplier: standard deviation of the noise.
        key: 32 bytes, used for nothing else.

    Returns:
        The noisy number, rounded, at least one.

    The caller guarantees that the event is charged with, or before, the first use of the number outside.
    """
    (normal,) = standard_normals(key, 1)
    return max(1, round(count + noise_multiplier * float(normal)))


def generator_fingerprint() -> str:
    """Return a digest of 2¹⁶ normals of a fixed key, and of how they are assigned to parameters.

    It differs where this machine's arithmetic differs in their last bits. A resumed run may replay a step only where
    its noise comes out bit for bit as before, so this belongs to what the noise key is bound to.
    """
    dealt_out = f"parameters by name, together up to {_TOGETHER} numbers and {_AHEAD} steps, else in parts".encode()
    return hashlib.sha256(dealt_out + standard_normals(bytes(KEY_BYTES), 1 << 16).tobytes()).hexdigest()


@final
@dataclass(frozen=True, kw_only=True)
class Grid:
    """The public grid of one release.

    Attributes:
        spacing: the distance of its points, a power of two.
        noise_stddev: the noise's standard deviation on it.
    """

    spacing: float
    noise_stddev: float

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def for_mechanism(mechanism: Mechanism, *, coordinates: int) -> Grid:
        """Return the grid for a sum of ``coordinates`` numbers.

        Rounding a sum to the grid can move two neighbouring sums apart by at most ``spacing·√coordinates``. That much
        is added to the clip norm here, so that the ratio of noise to sensitivity is the mechanism's own. It is below
        2e-6 for a million numbers.
        """
        stddev = mechanism.noise_stddev
        if not _LEAST_STDDEV <= stddev <= _MOST_STDDEV:
            raise ArgumentError(
                f"noise_stddev must lie between {_LEAST_STDDEV:.1g} and {_MOST_STDDEV:.1g}, got {stddev:g} "
                "(noise_multiplier * clip_norm). Choose a clip_norm nearer to one."
            )
        spacing = math.ldexp(1.0, math.frexp(stddev)[1] - 1 - GRID_BITS)
        sensitivity = mechanism.clip_norm + spacing * math.sqrt(coordinates)
        return Grid(spacing=spacing, noise_stddev=mechanism.noise_multiplier * sensitivity)


def noisy_mean(
    clipped: ClippedSum, mechanism: Mechanism, keys: Keys, *, step: int, sizes: Mapping[str, int] | None = None
) -> PrivateGrad:
    """Release the noisy mean gradient of one step: ``(sum + noise) / divisor``, noise drawn once, for the sum.

    Args:
        clipped: the clipped sum; it is used up, also when it is refused because it is not finite.
        mechanism: the noise and the public divisor.
        keys: the keys of the run. Never call this twice with the same keys and step for different sums: the noise
            would be the same, and the difference of the releases would be exact.
        step: the index of the step, from zero.
        sizes: numbers of every parameter of the model, where ``clipped`` is the sum of some ``noise_groups`` of them.

    Returns:
        The noisy mean, in the dtypes of the sums.

    Raises:
        PrivacyError: the sum was clipped to another norm, was taken before, or is not finite.

    Order of rounding: the sum is taken to float64 (exact) and rounded to the grid; the noise is made in float64 and
    rounded to the same grid; both are whole numbers of grid steps, and their float64 sum is the correctly rounded
    value of the exact one. As rounding commutes with adding a grid point, the result equals ``round(sum + noise)`` of
    an ideal real-valued mechanism whose sum lies on the grid: scaling, division by the public divisor (the expected
    batch size, and the clip norm too with ``unit_norm``) and the cast to the parameter's dtype come after it and see
    nothing else.

    Guarantee: a Gaussian mechanism of ``noise_multiplier`` for sums that one unit moves by at most ``clip_norm``, up
    to the generator's computational security and the float64 accuracy of single normals. Each (step, parameter) has
    its own noise; the same keys, step and sum give the same bits, on any device and number of threads and in any
    order of the parameters. Other names or sizes drawn together get other noise.
    """
    _require_sound(clipped, mechanism, step)
    sizes = {name: each.numel() for name, each in clipped.gradients.items()} if sizes is None else sizes
    grid = Grid.for_mechanism(mechanism, coordinates=sum(sizes.values()))
    sums = clipped.take()
    gradients: dict[str, Tensor] = {}
    groups = noise_groups(sizes)
    for names in groups:
        if names[0] not in sums:
            continue  # another process has it
        # One set after the other leaves: a large model's sums and means don't lie side by side.
        some = {name: sums.pop(name) for name in names}
        noise = _Noise(keys, step, some, ahead=len(groups) == 1)
        rows = {name: kernels.row_of(each, copy=not clipped.disposable) for name, each in some.items()}
        _release_in_place(rows, noise, grid, divisor=mechanism.divisor)
        gradients |= {name: row.to(some[name]) for name, row in rows.items()}
    return PrivateGrad(gradients, step, proof=PROOF_OF_NOISE)


def noise_groups(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return which parameters get their noise from one draw, by name; ``sizes`` are their numbers."""
    return list(groups_by_size(dict(sorted(sizes.items())), most=_TOGETHER))


def steps_per_draw(numbers: int) -> int:
    """Return how many steps of a model with ``numbers`` trainable numbers get their noise from one draw."""
    return max(1, min(_AHEAD, _TOGETHER // max(1, numbers)))


@final
class _Noise:
    """The standard normals of one step for some parameters, in parts.

    With ``ahead``, those of a few steps come from one draw, each its own part of it, which can't be written to.
    """

    def __init__(self, keys: Keys, step: int, sums: dict[str, Tensor], *, ahead: bool) -> None:
        self._keys = keys
        self._step = step
        self._sizes = tuple(fact for name, each in sums.items() for fact in (name, each.numel()))
        numbers = sum(each.numel() for each in sums.values())
        self._steps = steps_per_draw(numbers) if ahead else 1

    def part(self, index: int, count: int) -> NDArray[np.float64]:
        """Return ``count`` normals for this part, which no other part has."""
        steps, first = self._steps, self._step - self._step % self._steps
        if steps == 1:
            return standard_normals(self._keys.derive("noise", first, steps, index, *self._sizes), count)
        start = (self._step - first) * count
        drawn = _drawn_ahead(self._keys, first, steps, (index, *self._sizes), steps * count, native.identity())
        return drawn[start : start + count]


@functools.lru_cache(maxsize=4)
def _drawn_ahead(
    keys: Keys, first: int, steps: int, facts: tuple[str | int, ...], count: int, _: str
) -> NDArray[np.float64]:
    """Draw the noise of several steps at once, read-only; the last argument is the identity of the code."""
    normals = standard_normals(keys.derive("noise", first, steps, *facts), count)
    normals.flags.writeable = False
    return normals


def _require_sound(clipped: ClippedSum, mechanism: Mechanism, step: int) -> None:
    if type(clipped) is not ClippedSum:
        raise PrivacyError(f"only a ClippedSum can be made private, got {type(clipped).__name__}. Use clipped_sum.")
    if type(step) is not int or step < 0:
        raise ArgumentError(f"step must be a whole number >= 0, got {step!r}.")
    if not clipped.clip_norm == mechanism.clip_norm:
        raise PrivacyError(
            f"the sum was clipped to {clipped.clip_norm}, but the noise is for clip_norm {mechanism.clip_norm}: the "
            "epsilon would be false. Clip with the mechanism's own clip_norm."
        )
    whole = [name for name, sums in clipped.gradients.items() if not sums.is_floating_point()]
    if whole:
        raise PrivacyError(f"the clipped sum must be floating-point numbers, and is not in {', '.join(whole)}.")


def _parts(rows: list[Tensor]) -> list[list[Tensor]]:
    """Return what gets its noise at once: all of these rows, or a piece of a long one after the other.

    A piece stays in the cache from its random words to its release, and a large model's noise takes no memory.
    """
    if len(rows) > 1 or rows[0].numel() <= _TOGETHER:
        return [rows]
    return [[piece] for piece in torch.split(rows[0].view(-1), _TOGETHER)]


def _release_in_place(rows: dict[str, Tensor], noise: _Noise, grid: Grid, *, divisor: float) -> None:
    """Turn sums into noisy means, in the same memory; raise if a sum was not finite."""
    release = kernels.release if native.available() else _release
    finite = True
    for index, some in enumerate(_parts(list(rows.values()))):
        finite &= release(
            some,
            noise.part(index, sum(row.numel() for row in some)),
            steps_per_sum=1.0 / grid.spacing,  # a power of two: exact
            steps_per_normal=grid.noise_stddev / grid.spacing,
            mean_per_step=grid.spacing / divisor,
        )
    if not finite:
        broken = [name for name, row in rows.items() if not row.isfinite().all()]
        raise PrivacyError(
            f"the clipped sum must be finite, and is not in {', '.join(broken)}: noise would not hide it. "
            "A unit without a finite gradient must contribute zero."
        )


def _release(
    rows: list[Tensor],
    normals: NDArray[np.float64],
    *,
    steps_per_sum: float,
    steps_per_normal: float,
    mean_per_step: float,
) -> bool:
    """Round sums and noise to whole numbers of grid steps, add, scale, all in place; return whether sums are finite."""
    finite = True
    for row in rows:
        sums, normals_here, normals = row.view(-1).numpy(), normals[: row.numel()], normals[row.numel() :]
        finite &= bool(np.isfinite(sums).all())
        for start in range(0, sums.size, _PAIRS):
            released = sums[start : start + _PAIRS]
            released *= steps_per_sum
            np.rint(released, out=released)
            released += np.rint(normals_here[start : start + _PAIRS] * steps_per_normal)
            released *= mean_per_step
    return finite
