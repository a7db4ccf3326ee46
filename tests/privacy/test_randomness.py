"""Named streams: what differs must give other bits, what is equal the same, and the secret shows nowhere."""

from __future__ import annotations

import hashlib
import hmac
import itertools

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpvision.errors import ArgumentError
from dpvision.privacy.randomness import SECRET_BYTES, Keys, random_words

SECRET = bytes(range(SECRET_BYTES))


def test_words_are_the_aes_256_counter_stream() -> None:
    # Block by block with the bare cipher, which FIPS 197's example ties to the standard.
    fips_197 = bytes.fromhex("8ea2b7ca516745bfeafc49904b496089")
    encrypt = Cipher(algorithms.AES(SECRET), modes.ECB()).encryptor().update  # noqa: S305
    assert encrypt(bytes.fromhex("00112233445566778899aabbccddeeff")) == fips_197
    blocks = b"".join(encrypt(counter.to_bytes(16, "big")) for counter in range(20_000))
    for count in (0, 1, 2, 8191, 8192, 8193, 40_000):
        assert random_words(SECRET, count).tobytes() == blocks[: 8 * count]


def test_a_derived_key_is_the_documented_hmac() -> None:
    parts = [b"dpvision/1", b"context", b"noise", b"7", b"conv.weight"]
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    expected = hmac.new(SECRET, framed, hashlib.sha256).digest()
    assert Keys(SECRET, "context").derive("noise", 7, "conv.weight") == expected


def test_every_difference_gives_another_key() -> None:
    keys = [Keys(SECRET, "a"), Keys(SECRET, "b"), Keys(bytes(32), "a"), Keys(SECRET, "a").bind("a")]
    indices = [(0,), (1,), (10,), (0, "w"), (0, "w", ""), (0, "w."), ("0w",), (1, "0w"), (10, "w"), (1, "w0")]
    derived = [
        key.derive(stream, *index)
        for key in keys
        for stream in ("sampling", "rows", "noise", "init", "views", "augmentation", "statistics", "holdout")
        for index in indices
    ]
    assert len(set(derived)) == len(derived)
    assert {len(key) for key in derived} == {32}


def test_no_two_lists_of_facts_bind_alike() -> None:
    facts = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("a", "b", "c"), ()]
    contexts = [Keys(SECRET, "").bind(*fact).context for fact in facts]
    assert len(set(contexts)) == len(facts)


def test_binding_forgets_the_old_context_and_keeps_the_stamp() -> None:
    assert Keys(SECRET, "old").bind("run", "config") == Keys(SECRET, "other").bind("run", "config")
    assert Keys.from_seed(3).bind("run").hand_seeded
    assert not Keys.from_os_entropy().bind("run").hand_seeded


def test_hand_seeds_that_differ_in_any_bit_give_other_streams() -> None:
    # Bits beyond the 32 that torch's CPU generator reads are among them.
    seeds = [12345, *(12345 ^ (1 << bit) for bit in range(128)), -12345]
    words = [Keys.from_seed(seed).bits(64, "noise", 0, "w") for seed in seeds]
    for one, other in itertools.combinations(words, 2):
        assert not np.intersect1d(one, other).size  # 530,000 pairs of words each: equal by chance with 2⁻⁴⁵ in all


def test_secrets_from_the_system_differ_and_are_not_stamped() -> None:
    keys = [Keys.from_os_entropy("run") for _ in range(100)]
    assert len({key.secret for key in keys}) == 100
    assert not any(key.hand_seeded for key in keys)
    assert Keys.from_seed(0).hand_seeded


def test_the_secret_is_not_printed() -> None:
    keys = Keys.from_os_entropy("run")
    for text in (repr(keys), str(keys), f"{keys}"):
        assert keys.secret.hex() not in text
        assert repr(keys.secret) not in text
        assert "secret" not in text


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_secret_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ArgumentError, match=f"must have 32 bytes, got {length}"):
        Keys(bytes(length), "")


def test_seeds_fit_into_signed_64_bits_and_differ() -> None:
    seeds = [Keys.from_seed(0).seed("init", index) for index in range(1000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len(set(seeds)) == 1000


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_words_of_owners_are_their_parts_of_the_stream_whoever_else_asks(count: int) -> None:
    keys, each = Keys(SECRET, "a"), count + count % 2
    whole = keys.bits(100 * each, "augmentation", 3).reshape(100, each)[:, :count]
    for owners in ([], [0], [99], [7, 3, 50], list(range(100))):
        found = keys.bits_by_unit(np.array(owners, dtype=np.int64), count, "augmentation", 3)
        np.testing.assert_array_equal(found, whole[owners].reshape(len(owners), count))
    assert len(np.unique(whole)) == 100 * count
