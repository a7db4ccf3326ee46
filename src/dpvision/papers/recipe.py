"""What a recipe is: a configuration with its source and its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from dpvision.config import RunConfig
from dpvision.errors import ArgumentError

NOT_RUN = "not run yet"
SCALES = ("paper", "cpu")


@final
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named configuration with its source and its evidence.

    Args:
        config: The configuration at the paper's scale; its name is the recipe's.
        source: The paper or study.
        summary: Dataset, model and what is special, in one line.
        accuracy: The source's accuracy (or Dice × 100) in percent.
        figure: In words, what that number is, or why there is none.
        top5: The source's top-5 accuracy in percent.
        also: Other values that the source prints for the same setting, by name, such as mean, std or best.
        ours: What we reached, with its n.
        differs: What is not as in the source, and what the source leaves open.
        needs: What must be available that cannot be downloaded, in one line.
        after: The recipe whose run gives the initial weights.
        cpu: The reduced version for two cores.
        reduction: What was reduced in it.
    """

    config: RunConfig
    source: str
    summary: str
    accuracy: float | None = None
    figure: str = ""
    top5: float | None = None
    also: Mapping[str, float] = field(default_factory=dict[str, float])
    ours: str = NOT_RUN
    differs: tuple[str, ...] = ()
    needs: str | None = None
    after: str | None = None
    cpu: RunConfig | None = None
    reduction: str = ""

    @property
    def name(self) -> str:
        """The name under which ``dpvision train --recipe`` finds it."""
        return self.config.name

    @property
    def command(self) -> str:
        """The command that runs it."""
        return f"dpvision train --recipe {self.name}"

    @property
    def paper(self) -> str:
        """The source's result in one line."""
        if self.accuracy is None:
            return self.figure or "no result"
        epsilon = self.config.privacy.target_epsilon
        where = "without privacy" if not self.config.privacy.enabled else f"at epsilon {epsilon:g}" if epsilon else ""
        top5 = [] if self.top5 is None else [f"top-5 {self.top5:g}"]
        words = [
            *([self.figure] if self.figure else []),
            *top5,
            *(f"{name} {value:g}" for name, value in self.also.items()),
        ]
        end = f" ({'; '.join(words)})" if words else ""
        return f"{self.accuracy:g} % {where}{end}".replace("  ", " ").rstrip()

    def at(self, scale: str) -> RunConfig:
        """Return the configuration at a scale. No forecast refuses it: a recipe is a decision that was made before.

        Args:
            scale: ``paper`` or ``cpu``.

        Raises:
            ArgumentError: The scale is unknown, or the recipe has no reduced version.
        """
        if scale not in SCALES:
            raise ArgumentError(f"--scale must be one of {', '.join(SCALES)}, got {scale!r}.")
        if scale == "paper":
            return changed(self.config, privacy={"anyway": True})
        if self.cpu is None:
            raise ArgumentError(f"recipe {self.name} has no version at --scale {scale}. Run it as it is, or --quick.")
        return changed(self.cpu, privacy={"anyway": True})

    def lines(self) -> list[str]:
        """Return everything about the recipe as lines of text."""
        found = [f"{self.name}: {self.summary}", f"source: {self.source}", f"command: {self.command}"]
        found += [f"needs: {self.needs}"] if self.needs else []
        found += [f"first: dpvision train --recipe {self.after}"] if self.after else []
        found += [f"paper: {self.paper}", f"ours: {self.ours}"]
        found += [f"differs: {text}" for text in self.differs]
        if self.cpu is not None:
            found.append(f"reduced: {self.command} --scale cpu ({self.reduction})")
        return [*found, f"smoke test: {self.command} --quick"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "source": self.source,
            "summary": self.summary,
            "command": self.command,
            "paper": self.paper,
            "paper_accuracy": self.accuracy,
            "paper_top5": self.top5,
            "paper_also": dict(self.also),
            "ours": self.ours,
            "differs": list(self.differs),
            "needs": self.needs,
            "after": self.after,
            "reduction": self.reduction or None,
            "config": self.config.model_dump(mode="json"),
            "cpu": None if self.cpu is None else self.cpu.model_dump(mode="json"),
        }


def changed(config: RunConfig, **sections: Any) -> RunConfig:
    """Return a configuration with other values, validated again.

    Args:
        config: The configuration to start from.
        sections: New values by section: a mapping updates a section, anything else replaces it.
    """
    values = config.model_dump()
    for name, update in sections.items():
        both = isinstance(update, Mapping) and isinstance(values[name], Mapping)
        values[name] = {**values[name], **update} if both else update
    return RunConfig.model_validate(values)


def whole(config: RunConfig) -> RunConfig:
    """Return the reduced version of a setting that needs no reduction: the same under another name."""
    return changed(config, name=f"{config.name}-cpu")
