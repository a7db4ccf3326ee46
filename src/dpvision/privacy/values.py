"""The values that travel through a step, in one direction: Batch → ClippedSum → PrivateGrad.

Shapes: U units, R rows per unit. Rows of one unit are neighbours: row ``u * R + r`` belongs to unit ``u``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor

from dpvision.errors import PrivacyError
from dpvision.privacy.sampling import Sampling


@final
@dataclass(frozen=True)
class Microbatch:
    """A fixed-shape piece of a draw. Sensitive.

    ``row_weights_UR`` are the shares with which rows enter their unit's loss: they sum to one in a real unit and to
    zero in a padding unit.
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
        """The draw in pieces of exactly ``units`` units, the last one padded. An empty draw yields nothing."""
        ...


@final
class ClippedSum:
    """The exact sum over units of their clipped gradients. Sensitive: only ``noise.privatize`` may open it, and once.

    ``disposable`` says that nobody else holds these tensors, and no two share memory: the release may take their place.

    Guarantee: adding or removing one unit moves it by at most ``clip_norm`` in L2.
    """

    __slots__ = ("clip_norm", "disposable", "gradients", "taken")

    def __init__(self, gradients: Mapping[str, Tensor], clip_norm: float, *, disposable: bool = False) -> None:
        self.gradients: Mapping[str, Tensor] = gradients
        self.clip_norm = clip_norm
        self.disposable = disposable
        self.taken = False

    def take(self) -> dict[str, Tensor]:
        """The sums, which are gone from here afterwards: noise is drawn once for each, and memory is freed with it."""
        if self.taken:
            raise PrivacyError("this sum has been released: a second time would be another release. Compute it anew.")
        sums, self.gradients, self.taken = dict(self.gradients), {}, True
        return sums

    def __repr__(self) -> str:
        return f"ClippedSum({len(self.gradients)} parameters, clip_norm={self.clip_norm}, sensitive)"


PROOF_OF_NOISE = object()


@final
class PrivateGrad:
    """A noisy gradient, already divided by the public batch size: safe to use and to keep."""

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
