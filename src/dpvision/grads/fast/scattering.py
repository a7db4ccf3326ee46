"""The fixed scattering transform by a native kernel.

Shapes: N rows, C channels, H height, W width.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from dpvision.grads.fast.stand_in import StandIn
from dpvision.models.scattering import Scattering
from dpvision.native import scattering


@final
class FastScattering(StandIn[Scattering]):
    """Stands in for a ``Scattering``; what doesn't fit the kernel goes that one's way."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Scatter each colour on its own."""
        wavelets, blurs = self.layer.tables()
        right_size = tuple(x_NCHW.shape[-2:]) == self.layer.image_size
        if not right_size or not scattering.takes(x_NCHW, wavelets):
            return self.layer(x_NCHW)
        return scattering.scatter(x_NCHW, wavelets, blurs, self.layer.padding)
