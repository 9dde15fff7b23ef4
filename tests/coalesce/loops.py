"""What the tests of blocks do in a step."""

from __future__ import annotations

from typing import Any

from tests.training.models import loss_of

BACKWARDS = 3
#: At stages 1 and 2 DeepSpeed's own reducer ends a block then.
UPSTREAM: dict[str, Any] = {"zero": {"reduce_scatter": False}}


def several_backwards(trainer: Any, *, backwards: int = BACKWARDS, **arguments: Any) -> None:
    """Each step is one block of `backwards` forwards and backwards, over other batches."""
    for step in trainer.steps():
        with trainer.window(**arguments):
            for micro in range(backwards):
                trainer.backward(loss_of(trainer, step, micro))
        trainer.step()
