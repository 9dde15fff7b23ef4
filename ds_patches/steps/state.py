"""The states of a step, by its backwards, and the patches' callbacks at backwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ds_patches.core.errors import Refused
from ds_patches.upstream import engine as upstream_engine


class StepState(Enum):
    """State of the gradients that the backwards since the last ``engine.step()`` brought."""

    #: No gradient: there was no backward, or the user dropped its gradients.
    EMPTY = auto()
    #: Has gradients.
    HELD = auto()
    #: No gradient: the last backward raised, and the step's gradients were dropped.
    FAILED = auto()


@dataclass(frozen=True)
class Step:
    """One step of an engine, from one update of its parameters to the next.

    first, last: while HELD, the `engine.micro_steps` of the step's first and last backward.
    is_foreign: other engines' ``engine.backward`` brought all of its gradients.
    """

    state: StepState = StepState.EMPTY
    first: int = -1
    last: int = -1
    is_foreign: bool = False

    def after_backward(self, micro_step: int, is_foreign: bool = False) -> Step:
        """Return the step after one more backward, in this micro step."""
        if self.state is not StepState.HELD:
            return Step(StepState.HELD, micro_step, micro_step, is_foreign)
        return Step(StepState.HELD, self.first, micro_step, self.is_foreign and is_foreign)

    def has_backward_in(self, micro_step: int) -> bool:
        """Return True if the step's last backward was in this micro step."""
        return self.state is StepState.HELD and self.last == micro_step


def refuse_unseen_backward(engine: Any) -> None:
    """Raise Refused if parameters got gradients, and no epilogue of DeepSpeed reduced them.

    Scripts may run the epilogue themselves, as DeepSpeed's own tests of several models do.
    """
    state = upstream_engine.hook_state(engine.optimizer)
    # DeepSpeed's parameter hooks begin a backward only if the forward has had another before.
    is_unseen = state and state.hooks_fired_this_backward and not state.backward_seen_this_step
    if is_unseen and not state.epilogue_ran_this_backward:
        raise Refused(
            "engine.step() without a reduced gradient, after a backward() of a tensor that is no "
            "output of the engine, which DeepSpeed does not see: call engine.backward(tensor) "
            "instead."
        )


class Listener:
    """Callbacks at an engine's backwards. They do nothing unless overridden."""

    #: True if `backward_begins` is to be called.
    awaits_backwards = True

    def backward_begins(self, same_forward: bool) -> None:
        """Called in the graph task of a backward that begins.

        same_forward: no forward has run since the last backward.
        """

    def wrap_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that runs ``engine.backward(loss)``: `run`, or a wrapper of it."""
        return run

    def backward_nested(self) -> None:
        """Called when a backward over a forward of the engine begins inside the running one."""

    def backward_raised(self) -> None:
        """Called after a backward raised; then `gradients_dropped` if it had brought gradients."""

    def gradients_dropped(self, failed: bool) -> None:
        """Called when the step's gradients were dropped: by the user, or as a backward `failed`."""
