"""Gradients that a script gives by hand: of a head that no backward reached, or not the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.scripts.declared import ALL_RIGHT, WRONG, script
from tests.training.models import loss_of
from tests.training.options import OFFLOADED

#: Which losses a backward is of: the second head has a gradient by the second one.
FIRST, BOTH = slice(1), slice(2)
CLIPPED = {"clip": 0.05}


def give(trainer: Any, step: int) -> None:
    trainer.give(trainer.module.rebuild.parameters(), 0.1 * (step + 1))


def given(stock: dict[int, str], reached: Callable[[int], slice], **options: Any) -> Any:
    """Declare a script whose steps each have one backward, and then a gradient by hand."""

    def declare(train: Callable[[Any], None]) -> Any:
        def run(trainer: Any) -> None:
            for step in trainer.steps():
                trainer.backward(loss_of(trainer, step, only=reached(step)))
                give(trainer, step)
                trainer.step()

        run.__name__, run.__doc__, run.__module__ = train.__name__, train.__doc__, train.__module__
        return script(stock, at_rest=False, **options)(run)

    return declare


@given(ALL_RIGHT, lambda step: FIRST)
def given_where_none_came(trainer: Any) -> None:
    """A head that no backward reaches has its gradient by hand."""


@given(ALL_RIGHT, lambda step: FIRST, **OFFLOADED)
def given_where_none_came_offloaded(trainer: Any) -> None:
    """The same, with the optimizer on the CPU."""


@given(ALL_RIGHT, lambda step: FIRST if step else BOTH)
def given_where_one_came_earlier(trainer: Any) -> None:
    """The head was reached by an earlier step's backward, and not by this one's."""


@given(ALL_RIGHT, lambda step: FIRST if step else BOTH, **OFFLOADED)
def given_where_one_came_earlier_offloaded(trainer: Any) -> None:
    """The same, with the optimizer on the CPU."""


@given({1: WRONG, 2: WRONG, 3: WRONG}, lambda step: FIRST if step else BOTH, **OFFLOADED, **CLIPPED)
def given_and_clipped_offloaded(trainer: Any) -> None:
    """The same with clipping: stock clips by the norm of what was there before."""


@script(ALL_RIGHT, at_rest=False, micro_steps=2)
def given_after_two_micro_steps(trainer: Any) -> None:
    """Two micro steps, of which the first alone reaches the head; then it is given a gradient."""
    for step in trainer.steps():
        for micro, reached in enumerate((BOTH, FIRST)):
            trainer.backward(loss_of(trainer, step, micro, reached))
            if micro:
                give(trainer, step)
            trainer.step()


@script(ALL_RIGHT, at_rest=False, micro_steps=2, **OFFLOADED)
def given_after_two_micro_steps_offloaded(trainer: Any) -> None:
    """The same, with the optimizer on the CPU."""
    given_after_two_micro_steps(trainer)


@script({2: WRONG, 3: WRONG}, at_rest=False, micro_steps=2, **OFFLOADED)
def given_between_micro_steps_offloaded(trainer: Any) -> None:
    """A gradient by hand after the first of two micro steps; the second adds to it."""
    for step in trainer.steps():
        for micro in range(2):
            trainer.backward(loss_of(trainer, step, micro))
            if not micro:
                give(trainer, step)
            trainer.step()


@script({3: WRONG}, at_rest=False)
def given_before_the_backward(trainer: Any) -> None:
    """A gradient by hand, and then a backward that adds to it. At ZeRO 1 and 2 it is refused."""
    for step in trainer.steps():
        give(trainer, step)
        trainer.backward(loss_of(trainer, step))
        trainer.step()


@script({3: WRONG}, at_rest=False)
def read_where_none_came(trainer: Any) -> None:
    """What is read of a head that this step has not reached is zero, and given back changed."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step, only=FIRST if step else BOTH))
        trainer.change_grads(lambda grad: 0.5 * grad)
        trainer.step()
