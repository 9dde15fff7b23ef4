"""The rows: ways to run several forwards and backwards and one optimizer step.

A step marks the end of up to four phases: enter (a context that holds reductions back), backwards
(all of them, with their forwards), exit (of the context), step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.micro_batches import MicroBatches, loss_of
from benchmarks.timing import Mark

PHASES = ("enter", "backwards", "exit", "step")
ModeStep = Callable[[Any, MicroBatches, Mark], None]


def _boundaries(engine: Any, micro_batches: MicroBatches, mark: Mark) -> None:
    """DeepSpeed's first way: every backward but the last is said to be no boundary."""
    for number, inputs in enumerate(micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches))
        engine.backward(loss_of(engine(inputs)))
    mark("backwards")
    engine.step()
    mark("step")
    # As an engine begins: it goes by its own count again, for the row that has the next turn.
    engine._is_gradient_accumulation_boundary = None


def _window(**arguments: Any) -> ModeStep:
    """``coalesce_grad_reduction(**arguments)``."""

    def step(engine: Any, micro_batches: MicroBatches, mark: Mark) -> None:
        with engine.coalesce_grad_reduction(**arguments):
            mark("enter")
            for inputs in micro_batches:
                engine.backward(loss_of(engine(inputs)))
            mark("backwards")
        mark("exit")
        engine.step()
        mark("step")

    return step


def _no_sync(engine: Any, micro_batches: MicroBatches, mark: Mark) -> None:
    """The last backward is outside, and reduces what is there."""
    *held_back, last = micro_batches
    with engine.no_sync():
        mark("enter")
        for inputs in held_back:
            engine.backward(loss_of(engine(inputs)))
    engine.backward(loss_of(engine(last)))
    mark("backwards")
    engine.step()
    mark("step")


@dataclass(frozen=True)
class Mode:
    """One way.

    reduced: the phase after which the gradients of the step are reduced.
    crash: what upstream says where it fails, as some releases do: recorded, not timed.
    """

    name: str
    patched: bool
    step: ModeStep
    reduced: str = "exit"
    stages: tuple[int, ...] = (1, 2, 3)
    crash: str = ""

    def may_raise(self, error: str) -> bool:
        return bool(self.crash) and self.crash in error


MULTI, NATIVE, NO_SYNC = "multi", "native", "no_sync"
OURS, GATHER_ONCE = "ours", "ours, gather_once"
FLOOR = "floor"

MODES = (
    Mode(MULTI, False, _boundaries, reduced="backwards"),
    Mode(NATIVE, False, _window()),
    Mode(
        NO_SYNC,
        False,
        _no_sync,
        reduced="backwards",
        stages=(1,),
        crash="has already been reduced",
    ),
    Mode(OURS, True, _window()),
    Mode(GATHER_ONCE, True, _window(gather_once=True), stages=(3,)),
)


def modes_of(stage: int) -> list[Mode]:
    return [mode for mode in MODES if stage in mode.stages]
