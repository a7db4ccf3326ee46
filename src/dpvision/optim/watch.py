"""Sees whether parameters moved in any way but through the optimizer's door.

An exact copy is kept and compared bit by bit; of a large tensor, a fingerprint with secret keys. Version counters miss
edits through ``.data``, sums of bits miss pairs of sign flips, and a cryptographic hash takes longer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn

from dpvision.checks import PrivacyError
from dpvision.optim.fingerprint import fingerprint

_LARGE = 1 << 18
"""Numbers from which on a copy's memory counts for more than a few more calls."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REMEDY = "Nothing but Optimizer.step may move a model whose training is certified; begin a new run from these weights."


@final
class Watch:
    """The parameters of one model, and its saved buffers if asked, as the last step left them.

    Guarantee: ``check`` fails if a watched tensor differs in one bit, was replaced, added or removed; a large tensor's
    changes in several places go unseen with a chance of 2⁻³². It does not see what was undone before the check.
    """

    def __init__(self, model: nn.Module, *, buffers: bool) -> None:
        self._model = model
        self._buffers = buffers
        self._tensors = dict(self._named_tensors())
        self._left = {name: _Left(tensor) for name, tensor in self._tensors.items()}

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        buffers = dict(self._model.named_buffers()) if self._buffers else {}
        if buffers:
            saved = self._model.state_dict(keep_vars=True).keys()
            yield from ((name, buffer) for name, buffer in buffers.items() if name in saved)

    def check(self) -> None:
        """Raise ``PrivacyError`` naming every tensor that moved since ``accept``."""
        now = dict(self._named_tensors())
        moved = [name for name in {**self._tensors, **now} if not self._is_as_left(name, now)]
        if moved:
            raise PrivacyError(f"moved by other means than an optimizer step: {', '.join(moved)}. {_REMEDY}")

    def _is_as_left(self, name: str, now: Mapping[str, Tensor]) -> bool:
        if name not in now or name not in self._left:
            return False
        # Buffers are often replaced by their own module (``self.buffer = …``); parameters never are.
        same_object = now[name] is self._tensors[name] or not isinstance(now[name], nn.Parameter)
        return same_object and self._left[name].is_still(now[name])

    @torch.no_grad()
    def accept(self, names: Mapping[str, Tensor]) -> None:
        """Take these tensors' present values as rightly theirs."""
        for name, tensor in names.items():
            self._left[name].take(tensor)

    def digests(self) -> dict[str, str]:
        """SHA-256 of every watched tensor as the last step left it, for a checkpoint; raises as ``check`` does."""
        self.check()
        return {name: _digest(tensor) for name, tensor in self._named_tensors()}

    def accept_saved(self, digests: Mapping[str, str]) -> None:
        """Take over the model's present values if they are those of ``digests``; otherwise ``PrivacyError``."""
        now = dict(self._named_tensors())
        wrong = [name for name in {**now, **digests} if name not in now or digests.get(name) != _digest(now[name])]
        if wrong:
            raise PrivacyError(
                f"not what the saved step left: {', '.join(wrong)}. Load the checkpoint's weights into the model "
                "before the optimizer's state."
            )
        self.accept(now)


@final
class _Left:
    """A tensor as it was left: its bits, or where they are many, their fingerprint."""

    __slots__ = ("_bits", "_kind")

    def __init__(self, tensor: Tensor) -> None:
        self._kind = _kind(tensor)
        self._bits = fingerprint(tensor) if _is_large(tensor) else tensor.detach().clone()

    def take(self, tensor: Tensor) -> None:
        """The tensor, which is of the same kind, has rightly moved."""
        self._bits.copy_(fingerprint(tensor) if _is_large(tensor) else tensor)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether this is how the tensor was left."""
        if _kind(tensor) != self._kind:
            return False
        return torch.equal(self._bits, fingerprint(tensor)) if _is_large(tensor) else _equal_bits(tensor, self._bits)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() >= _LARGE


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    words = _WORDS.get(one.element_size())
    # Whole numbers, because NaN differs from itself and 0.0 equals -0.0.
    return torch.equal(one, other) if words is None else torch.equal(one.detach().view(words), other.view(words))


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
