"""Fresh secrets that are the same in every run of the tests, for tests of something else than randomness."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dpvision.privacy.randomness import Keys


@contextmanager
def numbered_secrets(series: str) -> Iterator[None]:
    """Inside, the first secret of the operating system is always the same one, and so are the second and the rest.

    Where units are held out by a keyed draw, the part of a small dataset is empty now and then, and the run is refused.
    Keys that are bound to a run's configuration still depend on the place of its data.

    Args:
        series: a name; the secrets of another series are others.
    """
    numbers = itertools.count()

    def numbered(context: str = "") -> Keys:
        return Keys(hashlib.sha256(f"secret {next(numbers)} of {series}".encode()).digest(), context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keys, "from_os_entropy", staticmethod(numbered))
        yield
