"""Sees whether parameters moved in any way but through the optimizer's door.

An exact copy is kept and compared bit by bit. Version counters miss edits through ``.data``, sums of bits miss pairs of
sign flips, and a cryptographic hash takes longer than the comparison, which reads the memory once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn

from dpvision.checks import PrivacyError

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REMEDY = "Nothing but Optimizer.step may move a model whose training is certified; begin a new run from these weights."


@final
class Watch:
    """The parameters of one model, and its saved buffers if asked, as the last step left them.

    Guarantee: ``check`` fails if a watched tensor differs in one bit, was replaced, added or removed. It does not see a
    change that was undone before the check.
    """

    def __init__(self, model: nn.Module, *, buffers: bool) -> None:
        self._model = model
        self._buffers = buffers
        self._tensors = dict(self._named_tensors())
        self._copies = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}

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
        if name not in now or name not in self._copies:
            return False
        # Buffers are often replaced by their own module (``self.buffer = …``); parameters never are.
        same_object = now[name] is self._tensors[name] or not isinstance(now[name], nn.Parameter)
        return same_object and _equal_bits(now[name], self._copies[name])

    @torch.no_grad()
    def accept(self, names: Mapping[str, Tensor]) -> None:
        """Take these tensors' present values as rightly theirs."""
        for name, tensor in names.items():
            self._copies[name].copy_(tensor)

    def digests(self) -> dict[str, str]:
        """SHA-256 of every watched tensor as the last step left it, for a checkpoint."""
        return {name: _digest(copy) for name, copy in self._copies.items()}

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


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    words = _WORDS.get(one.element_size())
    # Whole numbers, because NaN differs from itself and 0.0 equals -0.0.
    return torch.equal(one, other) if words is None else torch.equal(one.detach().view(words), other.view(words))


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
