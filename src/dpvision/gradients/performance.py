"""Settings that change speed and memory, never the result beyond rounding."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, final

from pydantic import BaseModel, ConfigDict, Field

from dpvision.kernels import switched_off


@final
class Performance(BaseModel):
    """How a step is computed. Nothing here is a privacy setting.

    ``microbatch_size`` counts units; ``None`` lets the engine choose so that a micro-batch stays near ``memory_mib``;
    eight units of a model with many weights may take twice as much, four of any model four times.
    ``channels_last`` lays pictures out channel by channel, where the model takes them so: faster on a CPU.
    ``kernels`` says what computes: "native" compiled C++ where it is at hand and the layer fits (refused where it is
    not at hand), "compiled" fused norms by ``torch.compile``, "plain" PyTorch's own operations; "auto" is native if
    possible, else plain.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    microbatch_size: int | None = Field(default=None, ge=1)
    channels_last: bool = True
    kernels: Literal["auto", "native", "compiled", "plain"] = "auto"
    memory_mib: int = Field(default=256, ge=1)

    def chosen_kernels(self) -> AbstractContextManager[None]:
        """Native kernels inside, unless others were asked for."""
        return switched_off(when=self.kernels in ("plain", "compiled"))
