"""The base of fast layers, and the cache of what they derive from weights during a step.

Weights do not change within a step, so transformed or standardised filters are computed once for all its micro-batches.
Limits bound the memory that they take; layers beyond them compute their filters again wherever they are used.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, final

import torch
from torch import nn

L = TypeVar("L", bound=nn.Module)
M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


@final
class CacheLimits(NamedTuple):
    """Bytes that may be cached for all layers of a kind together, and for a single one."""

    all_layers: int
    one_layer: int


class FusedLayer(nn.Module, Generic[L]):
    """A fast layer in the place of a layer of the model, with the same parameters.

    Between ``open_cache`` and ``close_cache``, what it derives from them is computed only once.

    Attributes:
        cache_limits: Limits of this kind of layer; None if what it caches is small.
        caches_large: Whether this layer is within them in the present step.
    """

    cache_limits: ClassVar[CacheLimits | None] = None

    def __init__(self, layer: L) -> None:
        super().__init__()
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)
        self._layers = [layer]  # in a list: not a child, so that each parameter has one owner here
        self._cache: dict[str, Any] | None = None
        self.caches_large = True

    @property
    def layer(self) -> L:
        """The layer of the model that this one replaces."""
        return self._layers[0]

    @property
    def cache_bytes(self) -> int:
        """Bytes that ``cache_limits`` count for this layer."""
        return 0

    @property
    def is_caching(self) -> bool:
        """Whether a step is under way, in which weights stay as they are."""
        return self._cache is not None

    def open_cache(self, *, large: bool = True) -> None:
        """Keep what is derived from now on; without ``large``, nothing that is larger than the weight."""
        self._cache = {}  # a step that broke off may have left something in the old one
        self.caches_large = large

    def close_cache(self) -> None:
        """Forget everything derived."""
        self._cache = None
        self.caches_large = True

    def remember(self, name: str, value: object) -> None:
        """Put a value into the cache, if it is open."""
        if self._cache is not None:
            self._cache[name] = value

    def recall(self, name: str) -> Any:
        """Return a cached value, or None."""
        return None if self._cache is None else self._cache.get(name)

    def derived(self, name: str, make: Callable[[], T]) -> T:
        """Return something made of the weights alone: from the cache, or made now and cached if that is open."""
        found = self.recall(name)
        if found is None:
            with torch.no_grad():
                found = make()
            self.remember(name, found)
        return found


@contextmanager
def weight_cache(network: nn.Module) -> Iterator[None]:
    """Let fast layers cache filters and memory inside the block, in which weights must not change.

    Only one micro-batch may be under way at a time.
    """
    layers = [module for module in network.modules() if isinstance(module, FusedLayer)]
    beyond = _beyond_limits(layers)
    for layer in layers:
        layer.open_cache(large=layer not in beyond)
    try:
        yield
    finally:
        for layer in layers:
            layer.close_cache()


def _beyond_limits(layers: Sequence[FusedLayer[Any]]) -> set[FusedLayer[Any]]:
    """Layers whose filters exceed their limits: the smallest are cached, because they are used for the most pixels."""
    kinds: dict[CacheLimits, list[FusedLayer[Any]]] = defaultdict(list)
    for layer in layers:
        if layer.cache_limits is not None:
            kinds[layer.cache_limits].append(layer)
    beyond: set[FusedLayer[Any]] = set()
    for limits, some in kinds.items():
        ordered = sorted(some, key=lambda one: one.cache_bytes)
        totals = itertools.accumulate(one.cache_bytes for one in ordered)
        for one, total in zip(ordered, totals, strict=True):
            if total > limits.all_layers or one.cache_bytes > limits.one_layer:
                beyond.add(one)
    return beyond


def as_kind(module: nn.Module, kind: type[M]) -> M:
    """Return the module as this type, for which its rule was registered.

    Raises:
        TypeError: It is of another type.
    """
    if not isinstance(module, kind):
        raise TypeError(f"not a {kind.__name__}: {type(module).__name__}")
    return module
