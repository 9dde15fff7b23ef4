"""What one cell of the compatibility page says, and what it takes to say it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ds_patches.core.state import State
from tests.releases.run import Outcome


class Cell(Enum):
    """One patch, or the core, on one DeepSpeed release."""

    PASS = "pass"
    FIXED_UPSTREAM = "fixed upstream"
    NOT_APPLICABLE = "not applicable"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @property
    def settled(self) -> bool:
        """Whether there is nothing to look into."""
        return self not in (Cell.FAILED, Cell.UNKNOWN)


#: What the gate's refusals are to a reader. Any other state but READY says nothing about a release.
_REFUSALS = {
    State.FIXED_UPSTREAM: Cell.FIXED_UPSTREAM,
    State.OUT_OF_RANGE: Cell.NOT_APPLICABLE,
    State.SHAPE_CHANGED: Cell.REFUSED,
    State.BLOCKED: Cell.REFUSED,
    State.UNKNOWN_VERSION: Cell.REFUSED,
}


@dataclass(frozen=True)
class Answer:
    """What a process with the release on its path says of a patch; see tests.releases.probe.

    state, reason: the gate's, before anything was imported.
    live: whether the patch was in the call path after `apply_all()`.
    after: why it was, or was not.
    """

    state: State
    reason: str
    live: bool = False
    after: str = ""


def of_tests(outcome: Outcome) -> tuple[Cell, str]:
    """The cell of tests that were run, and why it is no pass."""
    if not outcome.trouble:
        return Cell.PASS, ""
    return (Cell.FAILED if outcome.failed else Cell.UNKNOWN), outcome.trouble


def of_patch(answer: Answer, outcome: Outcome) -> tuple[Cell, str]:
    """The cell of a patch, and why it is no pass. Tests of a refused patch do not count."""
    if answer.state is not State.READY:
        return _REFUSALS.get(answer.state, Cell.UNKNOWN), answer.reason
    if not answer.live:
        return Cell.FAILED, answer.after
    return of_tests(outcome)
