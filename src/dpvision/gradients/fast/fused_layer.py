"""A fast layer in the place of a layer of the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

L = TypeVar("L", bound=nn.Module)
T = TypeVar("T")


class StandIn(nn.Module, Generic[L]):
    """Stands in for a layer, with its parameters.

    Between ``hold`` and ``release`` what it derives from them is made only once.
    """

    def __init__(self, layer: L) -> None:
        super().__init__()
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)
        self._layers = [layer]  # in a list: not a child, so that each parameter has one owner here
        self._holding = False
        self._held: dict[str, Any] = {}

    @property
    def layer(self) -> L:
        """What it stands in for."""
        return self._layers[0]

    def hold(self) -> None:
        """Keep what is derived from now on: the weights stay as they are."""
        self.release()  # a step that broke off may have left something
        self._holding = True

    def release(self) -> None:
        """Forget it."""
        self._holding = False
        self._held.clear()

    def derived(self, name: str, make: Callable[[], T]) -> T:
        """Something made of the weights alone, kept while that is allowed."""
        if name in self._held:
            return self._held[name]
        with torch.no_grad():
            made = make()
        if self._holding:
            self._held[name] = made
        return made
