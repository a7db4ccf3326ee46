"""The values that travel through a step, in one direction: Batch → ClippedSum → PrivateGrad.

The types are the guarantee's plumbing: only ``noise.privatize`` opens a ``ClippedSum``, once, and only it makes a
``PrivateGrad``; a private optimizer accepts nothing else. ``repr`` prints no private value.

Shapes: U units, R rows per unit. Rows of one unit are neighbours: row ``u * R + r`` belongs to unit ``u``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor

from dpvision.errors import PrivacyError
from dpvision.privacy.sampling import Sampling

PROOF_OF_NOISE = object()
"""Given to ``PrivateGrad`` by ``noise.privatize``, and by nothing else."""


@final
@dataclass(frozen=True)
class Microbatch:
    """A fixed-shape piece of a draw. Sensitive.

    Attributes:
        inputs: U·R rows.
        targets: as many targets.
        row_weights_UR: the weights with which rows enter their unit's loss: they sum to one in a real unit and to zero
            in a padding unit.
    """

    inputs: Tensor
    targets: Tensor
    row_weights_UR: Tensor

    def __repr__(self) -> str:
        return f"Microbatch(inputs={tuple(self.inputs.shape)}, sensitive)"


class Batch(Protocol):
    """One draw of units. It owns the whole draw; nothing of it outlives the step."""

    @property
    def sampling(self) -> Sampling:
        """How the units were chosen."""
        ...

    def microbatches(self, units: int) -> Iterator[Microbatch]:
        """Yield the draw in pieces of exactly ``units`` units, the last one padded. An empty draw yields nothing."""
        ...


@final
class ClippedSum:
    """The exact sum over units of their clipped gradients. Sensitive: ``noise.privatize`` opens it, once.

    Args:
        gradients: the sums by parameter name.
        clip_norm: the L2 bound on one unit's contribution.
        disposable: whether nothing else holds these tensors and no two share memory, so that the release may
            overwrite them.

    Guarantee: adding or removing one unit moves it by at most ``clip_norm`` in L2.
    """

    __slots__ = ("clip_norm", "disposable", "gradients", "taken")

    def __init__(self, gradients: Mapping[str, Tensor], clip_norm: float, *, disposable: bool = False) -> None:
        self.gradients: Mapping[str, Tensor] = gradients
        self.clip_norm = clip_norm
        self.disposable = disposable
        self.taken = False

    def take(self) -> dict[str, Tensor]:
        """Return the sums and remove them from here, so that noise is drawn once for each and memory is freed.

        Raises:
            PrivacyError: they were taken before.
        """
        if self.taken:
            raise PrivacyError("this sum has been released: a second time would be another release. Compute it again.")
        sums, self.gradients, self.taken = dict(self.gradients), {}, True
        return sums

    def __repr__(self) -> str:
        return f"ClippedSum({len(self.gradients)} parameters, clip_norm={self.clip_norm}, sensitive)"


@final
class PrivateGrad:
    """A noisy gradient, already divided by the public divisor: safe to use and to keep.

    Args:
        gradients: the noisy means by parameter name.
        step: the step that they belong to.
        proof: ``PROOF_OF_NOISE``.

    Raises:
        PrivacyError: made by anything but ``noise.privatize``.
    """

    __slots__ = ("gradients", "step")

    def __init__(self, gradients: Mapping[str, Tensor], step: int, *, proof: object) -> None:
        if proof is not PROOF_OF_NOISE:
            raise PrivacyError("only noise.privatize makes a PrivateGrad.")
        self.gradients = gradients
        self.step = step

    def __repr__(self) -> str:
        return f"PrivateGrad({len(self.gradients)} parameters, step={self.step})"


@final
class OrdinaryGrad:
    """A mean gradient without noise: no guarantee. Only an optimizer made for ordinary training takes it."""

    __slots__ = ("gradients", "step")

    def __init__(self, gradients: Mapping[str, Tensor], step: int) -> None:
        self.gradients = gradients
        self.step = step


def groups_by_size(sizes: Mapping[str, int], *, most: int) -> Iterator[tuple[str, ...]]:
    """Yield names in order, as many at once as stay within ``most`` numbers together, and at least one.

    Args:
        sizes: numbers of each parameter, by name.
        most: the limit for a group of several.
    """
    names: tuple[str, ...] = ()
    numbers = 0
    for name, size in sizes.items():
        if names and numbers + size > most:
            yield names
            names, numbers = (), 0
        names, numbers = (*names, name), numbers + size
    if names:
        yield names
