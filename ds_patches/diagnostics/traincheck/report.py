"""The report of `train_check`, and its messages."""

from dataclasses import dataclass
from typing import Literal

from ds_patches.core.errors import DsPatchesError

#: The reaction of `train_check` to a parameter that did not train.
Action = Literal["raise", "warn", "report"]


@dataclass(frozen=True)
class Untrained:
    """A trainable parameter that got no gradient in any step of the block."""

    name: str
    module: str  # the class of its module
    note: str = ""

    def __str__(self) -> str:
        return f"  {self.name} ({self.module})" + f", {self.note}" * bool(self.note)


@dataclass
class TrainReport:
    """The result of a train check, filled at the end of the block.

    steps: 0 if there is no verdict. untrained: parameters without a gradient whose modules ran, or
    are compiled, where a run is not recorded. idle: those whose modules did not run, or that the
    optimizer does not have.
    """

    steps: int = 0
    skipped: int = 0  # for overflow; not part of `steps`
    parameters: int = 0  # trainable ones
    untrained: tuple[Untrained, ...] = ()
    idle: tuple[Untrained, ...] = ()

    def text(self, *, idle: bool = False) -> str:
        """Return the message on the untrained parameters, or on the idle ones."""
        params = self.idle if idle else self.untrained
        clause = "and their modules were not seen to run" if idle else "though their modules ran"
        return (
            f"{len(params)} of {self.parameters} trainable parameters got no gradient in "
            f"{self.steps} step(s), {clause}:\n" + "\n".join(map(str, params))
        )


class NotTrained(DsPatchesError, RuntimeError):
    """Parameters did not train although their modules ran; `report` has them."""

    def __init__(self, report: TrainReport) -> None:
        self.report = report
        super().__init__(report.text())
