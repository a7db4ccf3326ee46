"""Settings that change speed and memory, never the result beyond rounding."""

from __future__ import annotations

from typing import final

from pydantic import BaseModel, ConfigDict, Field


@final
class Performance(BaseModel):
    """How a step is computed. Nothing here is a privacy setting.

    ``microbatch_size`` counts units; ``None`` lets the engine choose so that a micro-batch stays near ``memory_mib``.
    ``channels_last`` lays pictures out channel by channel, where the model takes them so: faster on a CPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    microbatch_size: int | None = Field(default=None, ge=1)
    channels_last: bool = True
    memory_mib: int = Field(default=256, ge=1)
