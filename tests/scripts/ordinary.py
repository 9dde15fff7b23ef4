"""Ordinary training, in which no patch has anything to do."""

from __future__ import annotations

from typing import Any

from tests.scripts.declared import RIGHT, raises, script
from tests.scripts.models import loss_of

ALL_RIGHT = {1: RIGHT, 2: RIGHT, 3: RIGHT}


@script(ALL_RIGHT, model="Deep", quick=(2, 3))
def one_backward(trainer: Any) -> None:
    """One forward, one backward, one step."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()


@script(ALL_RIGHT, model="Deep", micro_steps=2, quick=(2,))
def micro_steps(trainer: Any) -> None:
    """Two micro steps, which DeepSpeed counts."""
    for step in trainer.steps():
        for micro in range(2):
            trainer.backward(loss_of(trainer, step, micro))
            trainer.step()


@script(ALL_RIGHT, model="Deep", micro_steps=2, quick=(2,), settings={"zero": {"overlap_comm": True}})
def micro_steps_overlapped(trainer: Any) -> None:
    """The same, with reductions beside the backward."""
    micro_steps.run(trainer)


@script(ALL_RIGHT, settings={"gradient_clipping": 0.1}, grouped=False)
def clipped(trainer: Any) -> None:
    """Gradients are clipped."""
    one_backward.run(trainer)


assert raises
