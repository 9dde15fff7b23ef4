"""What a train check found, and how it says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_patches.core.errors import DsPatchesError

#: What `train_check` does where something did not train.
Action = Literal["raise", "warn", "report"]


@dataclass(frozen=True)
class Untrained:
    """A trainable parameter that got no gradient in any step of the block."""

    name: str
    module: str  # the class that owns it
    note: str = ""

    def __str__(self) -> str:
        return f"  {self.name} ({self.module})" + f", {self.note}" * bool(self.note)


@dataclass
class TrainReport:
    """Filled when the block ends. `steps` is 0 while there is no verdict."""

    steps: int = 0
    skipped: int = 0  # for overflow; they tell nothing
    parameters: int = 0  # trainable ones
    #: Their modules ran, or a gradient came, or they are compiled and are not seen to run.
    untrained: tuple[Untrained, ...] = ()
    #: Their modules did not run, or the optimizer does not have them.
    idle: tuple[Untrained, ...] = ()

    def accusation(self) -> str:
        """Name those that did not train though their modules ran."""
        return self._named(self.untrained, "though their modules ran")

    def remark(self) -> str:
        """Name those without a gradient that are not accused."""
        return self._named(self.idle, "and their modules were not seen to run")

    def _named(self, some: tuple[Untrained, ...], how: str) -> str:
        count = f"{len(some)} of {self.parameters} trainable parameters"
        head = f"{count} got no gradient in {self.steps} step(s), {how}:"
        return "\n".join([head, *map(str, some)])


class NotTrained(DsPatchesError, RuntimeError):
    """Parameters did not train though their modules ran; `report` has them."""

    def __init__(self, report: TrainReport) -> None:
        self.report = report
        super().__init__(report.accusation())
