"""Networks that use their parameters in every way we know of, with rows for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import grads_reference as reference
from dpvision.gradients.clipped_sum import clipped_sum
from dpvision.gradients.ownership import OwnershipOverrides
from dpvision.gradients.plan import plan_for
from dpvision.models.layers import ScalarGain, WSConv2d
from dpvision.privacy.values import Microbatch
from grads_support import relative_error, wavy_loss


def overrides_of(model: nn.Module, inputs: Tensor, rows_per_unit: int = 1) -> OwnershipOverrides:
    """What the engine can't do the usual way for this model. It would hide a wrong rule, so tests look at it."""
    rows = Microbatch(inputs, torch.zeros(inputs.shape[0]).to(inputs.dtype), torch.ones(1, rows_per_unit))
    return plan_for(model, wavy_loss, rows).overrides


def agrees(model: nn.Module, inputs: Tensor, *, rows_per_unit: int = 1, tolerance: float = 1e-10) -> bool:
    targets = torch.linspace(0, 1, inputs.shape[0], dtype=torch.float64)
    for clip_norm in (0.1, 1e6):
        arguments = {"clip_norm": clip_norm, "rows_per_unit": rows_per_unit}
        found = clipped_sum(model, wavy_loss, inputs, targets, **arguments, microbatch_size=2).gradients
        true = reference.clipped_sum_by_loop(model, wavy_loss, inputs, targets, **arguments).gradients
        if not relative_error(found, true) <= tolerance:
            return False
    return True


def pictures(rows: int = 6, channels: int = 3, size: int = 5) -> Tensor:
    return torch.randn(rows, channels, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sequences(rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def features(rows: int = 6) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class TiedLayers(nn.Module):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class CalledThreeTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.conv = nn.Linear(6, 6), nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.conv(self.layer(x)[:, None])[:, 0]) + x
        return x


class TwoNamesOneModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Sequential(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class TwoNamesOneParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6))
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.a) * self.b


class BehindItsOwnersBack(nn.Module):
    """The encoder's weight is used again by the decoder, without calling the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t()))


class OwnAndChilds(nn.Module):
    """A bare parameter that is also a child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(6, 6)
        self.own = self.child.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.child(x)) @ self.own + x


class InPlace(nn.Module):
    """In-place activations on fresh outputs and on views, and an in-place residual addition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True)
        self.mid, self.linear = nn.Conv2d(4, 4, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm(self.conv(x)), 0.3, inplace=True)
        out = self.mid(h)
        out += h
        return self.linear(out).tanh_()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Mish())
        self.gain, self.token = ScalarGain(0.3), nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain(self.inner(x + self.token))


class NestedBare(nn.Module):
    """Blocks with bare parameters of their own around children with rules, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.blocks = nn.Sequential(Residual(), nn.Sequential(Residual(), nn.Conv2d(3, 2, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.scale


class Attention(nn.Module):
    """Positions looked up without a batch, attention with a projection that is never called as a module."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.position = nn.Embedding(4, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)
        self.token, self.head = nn.Parameter(torch.randn(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position(torch.arange(4)) + self.token
        x = x if self.batch_first else x.transpose(0, 1)
        x, _ = self.attention(x, x, value=x, need_weights=False)
        return self.head(x).mean(1 if self.batch_first else 0)


class Recurrent(nn.Module):
    """Tuple outputs; time in front or rows in front; the state, whose rows are in the middle, used or not."""

    def __init__(self, kind: type[nn.RNNBase], batch_first: bool, use_state: bool = True) -> None:
        super().__init__()
        self.use_state = use_state
        self.cell, self.head = kind(6, 5, batch_first=batch_first), nn.Linear(5, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.cell(x if self.batch_first else x.transpose(0, 1))
        out = self.head(out.mean(1 if self.batch_first else 0))
        if not self.use_state:
            return out
        return out + (state[0] if isinstance(state, tuple) else state)[0][:, :3]


class Windows(nn.Module):
    """Several entries in front for each row, rows together; and the same with rows apart."""

    def __init__(self, rows_together: bool) -> None:
        super().__init__()
        self.layer, self.rows_together = nn.Linear(6, 6), rows_together

    def forward(self, x: Tensor) -> Tensor:
        if self.rows_together:
            return self.layer(x.flatten(0, 1)).unflatten(0, (-1, 4)).tanh()
        return self.layer(x.transpose(0, 1).reshape(-1, 6)).unflatten(0, (4, -1)).transpose(0, 1).tanh()


class TwoOutputs(nn.Module):
    """Outputs that use each other inside, in a dictionary; inputs by keyword; a value that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor, *, table: Tensor, power: int) -> dict[str, Any]:
            y = torch.tanh(x * self.weight + table)
            return {"y": y, "z": y**power, "note": "no tensor"}

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x, table=torch.linspace(0, 1, 6, dtype=x.dtype), power=2)
        return out["y"] + 3 * out["z"].cos()


class ValueFlow(nn.Module):
    """Control flow on values: no batching rule can run it, so it is run unit by unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        rows = [row * self.weight if float(row.sum()) > 0 else row - self.weight for row in x]
        return torch.tanh(torch.stack(rows))


class Recomputed(nn.Module):
    """Activations that are thrown away and computed again on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), TwoNamesOneParameter(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) + x


class ByKeyword(nn.Module):
    """Layers called with their input as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.standardised, self.up = nn.Conv2d(3, 4, 3), WSConv2d(4, 4, 3), nn.ConvTranspose2d(4, 3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.standardised(x_NCHW=self.conv(input=x).tanh())
        return self.up(input=h, output_size=[7, 7])


class Flattening(nn.Module):
    """Reshapes in a way that only one memory format allows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).tanh()
        return self.head(h.view(h.shape[0], -1))


class SideChannel(nn.Module):
    """A module that also hands out a value through an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ValueFlow()
        self.child = self.Child()

    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.kept = nn.Parameter(torch.randn(6)), torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.kept = torch.tanh(x * self.weight)
            return self.kept + x

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) * self.child.kept


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 6, 3)), nn.Tanh(), nn.Conv2d(6, 2, 1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "tied layers": (TiedLayers, features),
    "a module called three times": (CalledThreeTimes, features),
    "one module under two names": (TwoNamesOneModule, features),
    "one parameter under two names": (TwoNamesOneParameter, features),
    "a weight used behind its owner's back": (BehindItsOwnersBack, features),
    "a parameter that is also a child's": (OwnAndChilds, features),
    "in-place activations and additions": (InPlace, pictures),
    "nested bare parameters": (NestedBare, pictures),
    "attention, rows first": (lambda: Attention(True), sequences),
    "attention, time first": (lambda: Attention(False), sequences),
    "lstm, rows first": (lambda: Recurrent(nn.LSTM, True), sequences),
    "lstm, time first": (lambda: Recurrent(nn.LSTM, False), sequences),
    "lstm, rows first, state unused": (lambda: Recurrent(nn.LSTM, True, False), sequences),
    "gru, rows first": (lambda: Recurrent(nn.GRU, True), sequences),
    "windows of one row together": (lambda: Windows(True), sequences),
    "windows of one row apart": (lambda: Windows(False), sequences),
    "two outputs, keyword inputs": (TwoOutputs, features),
    "control flow on values": (ValueFlow, features),
    "a side channel": (SideChannel, features),
    "recomputed activations": (Recomputed, features),
    "layers called by keyword": (ByKeyword, pictures),
    "a view that depends on the memory format": (Flattening, pictures),
    "weight norm": (weight_norm, pictures),
    "batch norm in evaluation mode": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()), pictures),
    "standardised convolutions": (
        lambda: nn.Sequential(WSConv2d(3, 8, 3, stride=2), nn.Mish(), WSConv2d(8, 4, 3), nn.GroupNorm(2, 4)),
        pictures,
    ),
}
