"""`zero_grad()` and a backward that raised drop every gradient that the step has reduced."""

from functools import partial
from typing import Any

from tests.harness import at, checked, of, trains
from tests.harness.models import backward_that_raises, loss_of
from tests.harness.options import OFFLOADED, OVERLAP
from tests.scripts import accumulating

accumulation = partial(of, "accumulation")


test_what_comes_before_a_step = checked(
    accumulation(accumulating.abandoned_backward, 1, 2, 3, core={3}),
    accumulation(accumulating.abandoned_backward, 2, core={2}, micro_steps=2, **OFFLOADED),
)


@trains(
    "accumulation",
    at(1, 2, 3, core={1, 2, 3}, micro_steps=2),
    at(1, 2, 3, micro_steps=2, **OFFLOADED),
    says=["zero_grad() in the middle of a gradient"],
)
def test_one_between_two_micro_steps(trainer: Any, step: int) -> None:
    """PyTorch drops both."""
    trainer.backward(loss_of(trainer, step, 0))
    trainer.step()
    trainer.backward(loss_of(trainer, step, 5))
    accumulating.zero_grad(trainer, step)
    trainer.backward(loss_of(trainer, step, 1))


@trains(
    "accumulation",
    *(
        at(1, 2, 3, core={2} if more is OFFLOADED else (), model="Fragile", style=style, **more)
        for style in ("engine", "torch")
        for more in ({}, OFFLOADED, OVERLAP)
    ),
    says=["every gradient reduced since the last optimizer step was dropped"],
)
def test_a_backward_that_raised(trainer: Any, step: int) -> None:
    """The last one of a step, which is taken again from its beginning."""
    if trainer.is_engine and step == 1:
        trainer.backward(loss_of(trainer, step, 0))
        backward_that_raises(trainer, loss_of(trainer, step, 5))
    for micro in range(2):
        trainer.boundary(micro == 1)
        trainer.backward(loss_of(trainer, step, micro, slice(1 if step == 1 else 2)))
