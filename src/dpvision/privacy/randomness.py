"""Keys and random streams: one secret per run, one named stream per purpose, indexed by step.

A stream's key is HMAC-SHA256(secret, context, stream name, index). The context binds the secret to one run,
one configuration and one dataset, so that a fork of a run can't repeat its noise.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field, replace
from typing import Literal, final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from dpvision.errors import ArgumentError

Stream = Literal["run", "sampling", "rows", "noise", "init", "views", "augmentation", "statistics", "holdout", "search"]
SECRET_BYTES = 32
_BLOCK_WORDS = 2
_FIRST_COUNTER = bytes(16)
_PIECE = 1 << 16
_ZEROS = memoryview(bytes(_PIECE))


@final
@dataclass(frozen=True)
class Keys:
    """The secret of a run and what it is bound to.

    Attributes:
        secret: 32 bytes, never released.
        context: what the keys are bound to.
        hand_seeded: whether the secret comes from a number; such a run is not for release.

    Guarantee: keys of different context, stream or index are independent up to the security of HMAC-SHA256.

    The caller guarantees that the secret stays secret, and that a stream is read at an index for one purpose and one
    set of data: noise that is drawn twice at one index subtracts to an exact gradient.
    """

    secret: bytes = field(repr=False)
    context: str
    hand_seeded: bool = False

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ArgumentError(f"secret must have {SECRET_BYTES} bytes, got {len(self.secret)}.")

    @staticmethod
    def from_os_entropy(context: str = "") -> Keys:
        """Draw a fresh secret from the operating system: the only kind that may back a release."""
        return Keys(secrets.token_bytes(SECRET_BYTES), context)

    @staticmethod
    def from_seed(seed: int, context: str = "") -> Keys:
        """Make a secret from a number, for tests and repeatable experiments; never for release."""
        secret = hashlib.sha256(b"dpvision hand seed " + str(seed).encode()).digest()
        return Keys(secret, context, hand_seeded=True)

    def bind(self, *facts: str) -> Keys:
        """Return the same secret bound to ``facts`` (run, configuration, data, fork) instead of its old context."""
        return replace(self, context=hashlib.sha256(_frame(*facts)).hexdigest())

    def derive(self, stream: Stream, *index: int | str) -> bytes:
        """Return the 256-bit key of one stream at one index, such as ``derive("sampling", step)``."""
        message = _frame("dpvision/1", self.context, stream, *map(str, index))
        return hmac.new(self.secret, message, hashlib.sha256).digest()

    def bits(self, count: int, stream: Stream, *index: int | str) -> NDArray[np.uint64]:
        """Return ``count`` uniform 64-bit words of one stream."""
        return random_words(self.derive(stream, *index), count)

    def bits_by_unit(
        self, units: NDArray[np.int64], count: int, stream: Stream, *index: int | str
    ) -> NDArray[np.uint64]:
        """Return ``count`` uniform words for each unit, from its own part of one stream: shape (units, count)."""
        return words_by_unit(self.derive(stream, *index), units, count)

    def seed(self, stream: Stream, *index: int | str) -> int:
        """Return a 63-bit seed for generators that are not part of the guarantee (initial weights, views)."""
        return int.from_bytes(self.derive(stream, *index)[:8], "big") >> 1


class WordStream:
    """The AES-256-CTR key stream of a key, counter from zero, as 64-bit words. Every word is returned once."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(_FIRST_COUNTER)).encryptor()

    def take(self, count: int) -> NDArray[np.uint64]:
        """Return the next ``count`` words."""
        words = np.empty(count, dtype="<u8")
        stream = words.view(np.uint8).data
        # In pieces that stay in the cache: faster than one long call, and the same bytes.
        for start in range(0, len(stream), _PIECE):
            piece = stream[start : start + _PIECE]
            self._encryptor.update_into(_ZEROS[: len(piece)], piece)
        return words


def random_words(key: bytes, count: int) -> NDArray[np.uint64]:
    """Return the first ``count`` words of the stream of ``key``."""
    return WordStream(key).take(count)


def words_by_unit(key: bytes, units: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
    """Return for each unit the first ``count`` words of its own part of the key stream; parts are whole blocks."""
    blocks = -(-count // _BLOCK_WORDS)
    counters = np.zeros((len(units), blocks, _BLOCK_WORDS), dtype=">u8")
    counters[:, :, 1] = units[:, None] * blocks + np.arange(blocks)
    # The counter mode by hand, because its counters here are not in a row: no two of one key are equal.
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305
    words = np.frombuffer(encryptor.update(counters.tobytes()), dtype="<u8")
    return words.reshape(len(units), blocks * _BLOCK_WORDS)[:, :count]


def _frame(*parts: str) -> bytes:
    """Concatenate with length prefixes: no two lists of parts give the same bytes."""
    encoded = [part.encode() for part in parts]
    return b"".join(len(part).to_bytes(8, "big") + part for part in encoded)
