"""The same training at another price: batch and noise scaled together, as Sander et al. (TAN, 2022) search.

What training feels is the noise on the mean gradient, ``noise_multiplier / expected_batch_size``, and the number of
steps. Both stay as they are here, so that a learning rate found at a small batch fits the large one. What does not stay
is epsilon: below a noise multiplier of about two it explodes.
"""

from __future__ import annotations

from dataclasses import replace

from dpvision.checks import Problems
from dpvision.mechanism import Mechanism


def scaled(mechanism: Mechanism, *, by: float) -> Mechanism:
    """The mechanism with batch and noise multiplier both times ``by``, at equal steps: ``by`` below one is cheaper.

    Guarantee: none carries over from ``mechanism``. The result has an epsilon of its own; a small batch's protects
    nobody.
    """
    problems = Problems()
    problems.positive("by", by)
    problems.raise_if_any()
    return replace(
        mechanism,
        expected_batch_size=mechanism.expected_batch_size * by,
        noise_multiplier=mechanism.noise_multiplier * by,
    )
