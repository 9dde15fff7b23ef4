"""Gradients that a script gives by hand: of a head that no backward reached, or not the last."""

from typing import Any

from tests.harness.models import loss_of
from tests.harness.options import OFFLOADED
from tests.scripts.declared import ALL_RIGHT, WRONG, script
from tests.scripts.heads import BOTH, FIRST


def give(trainer: Any, step: int) -> None:
    trainer.give(trainer.module.rebuild.parameters(), 0.1 * (step + 1))


def give_each_time(trainer: Any, step: int, at_first: slice) -> None:
    """One backward, which reaches the first head alone but at first, and a gradient."""
    trainer.backward(loss_of(trainer, step, only=FIRST if step else at_first))
    give(trainer, step)


@script(ALL_RIGHT, at_rest=False)
def given_where_one_came_earlier(trainer: Any, step: int) -> None:
    """The head was reached by an earlier step's backward, and not by this one's."""
    give_each_time(trainer, step, BOTH)


@script({1: WRONG, 2: WRONG, 3: WRONG}, at_rest=False, **OFFLOADED, clip=0.05)
def given_and_clipped_offloaded(trainer: Any, step: int) -> None:
    """A gradient set by hand, with clipping: stock clips by the norm of the one before."""
    give_each_time(trainer, step, BOTH)


@script(ALL_RIGHT, at_rest=False, micro_steps=2)
def given_after_two_micro_steps(trainer: Any, step: int, micro: int) -> None:
    """Two micro steps, of which the first alone reaches the head; then it is given a gradient."""
    trainer.backward(loss_of(trainer, step, micro, FIRST if micro else BOTH))
    if micro:
        give(trainer, step)


@script({3: WRONG}, at_rest=False)
def given_before_the_backward(trainer: Any, step: int) -> None:
    """A gradient set by hand, then a backward that adds to it. ZeRO 1 and 2 refuse that."""
    give(trainer, step)
    trainer.backward(loss_of(trainer, step))


@script({3: WRONG}, at_rest=False)
def read_where_none_came(trainer: Any, step: int) -> None:
    """The gradient of a head that this step has not reached reads zero, and is set."""
    trainer.backward(loss_of(trainer, step, only=FIRST if step else BOTH))
    trainer.change_grads(lambda grad: 0.5 * grad)
