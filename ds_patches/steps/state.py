"""The states of a step: which backwards belong to it, and what they have left."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class StepState(Enum):
    """What the backwards since the last ``engine.step()`` have left."""

    #: No gradient: there was no backward, or the user has dropped what it brought.
    EMPTY = auto()
    #: Gradients.
    HELD = auto()
    #: No gradient: the last backward raised, and took those of the others with it.
    FAILED = auto()


@dataclass(frozen=True)
class Step:
    """One step of an engine, from one update of its parameters to the next.

    first, last: while it is HELD, the numbers of the micro steps that its first and its last
        backward were in, as ``engine.micro_steps`` counts them.
    is_foreign: all its gradients are of the ``engine.backward`` of other engines.
    """

    state: StepState = StepState.EMPTY
    first: int = -1
    last: int = -1
    is_foreign: bool = False

    def after_backward(self, micro_step: int, is_foreign: bool = False) -> Step:
        """Return the step with one more backward, in this micro step."""
        if self.state is not StepState.HELD:
            return Step(StepState.HELD, micro_step, micro_step, is_foreign)
        return Step(StepState.HELD, self.first, micro_step, self.is_foreign and is_foreign)

    def has_backward_in(self, micro_step: int) -> bool:
        """Whether its last backward was in this micro step."""
        return self.state is StepState.HELD and self.last == micro_step
