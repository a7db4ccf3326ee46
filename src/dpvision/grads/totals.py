"""Sums over micro-batches, in float64, each in the order in which its parts come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from dpvision.grads.shares import Finish, Share
from dpvision.native.memory import GivingBack


@final
class Totals:
    """One running sum a parameter.

    Float64, because rounding in a long float32 sum could let one unit move it by more than the clip norm.
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._finish: dict[nn.Parameter, Finish] = {}
        self._giving_back = GivingBack()

    @torch.no_grad()
    def add(
        self, shares: dict[nn.Parameter, Share], factors: Mapping[nn.Parameter, Tensor], dead_U: Tensor | None
    ) -> None:
        """Add one micro-batch: every unit's gradient times its factors, those marked in ``dead_U`` left out.

        It takes the shares out of ``shares``: what one holds is gone before the next one is added, and all of it before
        the next micro-batch is run.
        """
        for parameter in list(shares):
            share, is_new = shares.pop(parameter), parameter not in self._finish
            if is_new:
                # The first micro-batch's will do: it depends on weights alone, which are the same for all of them.
                self._finish[parameter] = share.finish
            self._sums[parameter] = share.add_weighted_sum(self._sums.get(parameter), factors[parameter], dead_U)
            del share
            if is_new:
                self._giving_back.replaced(self._sums[parameter].nbytes)

    @torch.no_grad()
    def gradients(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """By name, in the parameters' own shapes; zeros where nothing was added. Nothing is left here afterwards."""
        return {name: self._gradient(parameter) for name, parameter in parameters.items()}

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self._sums:
            return torch.zeros_like(parameter.detach(), dtype=torch.float64)
        return self._finish.pop(parameter)(self._sums.pop(parameter)).contiguous()
