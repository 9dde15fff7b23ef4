"""Gradients that come to a parameter more than once in a backward.

Reentrant checkpointing of a layer that runs twice before one backward.
"""

from typing import Any

import torch.distributed as dist

from tests.harness.models import loss_of
from tests.scripts.declared import RIGHT, WRONG, raises, script

TWICE = {1: RIGHT, 2: raises("already been reduced"), 3: raises("AssertionError")}
#: A bucket of ZeRO 3 was reduced between the two: each is divided and added, the first one twice.
REDUCED_BETWEEN = TWICE | {3: WRONG}
RECOMPUTED = {"model": "Reentrant", "at_rest": False}


def forward_and_backward(trainer: Any, step: int, count: int) -> None:
    """Run so many forwards, and one backward over the sum of their losses."""
    trainer.backward(sum(loss_of(trainer, step, micro) for micro in range(count)))


def once(trainer: Any, step: int) -> None:
    """Run one of each."""
    forward_and_backward(trainer, step, 1)


@script(REDUCED_BETWEEN, **RECOMPUTED)
def two_forwards_for_one_loss(trainer: Any, step: int) -> None:
    """Two forwards of the engine, and one backward over the sum of their losses."""
    forward_and_backward(trainer, step, 2)


@script(REDUCED_BETWEEN, model="SharedTwelveTimes", at_rest=False)
def applied_twelve_times(trainer: Any, step: int) -> None:
    """A block that is applied twelve times in one forward."""
    trainer.backward(loss_of(trainer, step))


@script(REDUCED_BETWEEN, model="HeadFirst", at_rest=False)
def outside_and_then_inside(trainer: Any, step: int) -> None:
    """A tied weight: the head is not recomputed, and a block that uses it is."""
    trainer.backward(loss_of(trainer, step))


@script(REDUCED_BETWEEN, **RECOMPUTED)
def fewer_forwards_later(trainer: Any, step: int) -> None:
    """Two forwards for one loss in the first two steps, then one."""
    forward_and_backward(trainer, step, 2 if step < 2 else 1)


@script(REDUCED_BETWEEN, refusal="more often than in earlier backwards", **RECOMPUTED)
def more_forwards_later(trainer: Any, step: int) -> None:
    """One forward for a loss in the first two steps, then two."""
    forward_and_backward(trainer, step, 1 if step < 2 else 2)


@script({1: RIGHT, 3: WRONG}, **RECOMPUTED)
def ranks_of_unlike_forwards(trainer: Any, step: int) -> None:
    """One rank has two forwards for a loss, the other has one: not at ZeRO 3, which would hang.

    At ZeRO 2, stock's ranks meet in collectives of unlike sizes, and gloo ends the process.
    """
    differ = dist.get_rank() and trainer.options.stage < 3
    forward_and_backward(trainer, step, 1 if differ else 2)
