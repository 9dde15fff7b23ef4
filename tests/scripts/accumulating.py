"""Gradients that wait for their step, or are dropped before it."""

from typing import Any

from tests.harness.models import loss_of
from tests.harness.options import OFFLOADED
from tests.scripts.declared import ALL_RIGHT, RIGHT, WRONG, script


@script({1: RIGHT, 2: RIGHT, 3: WRONG}, at_rest=False)
def abandoned_backward(trainer: Any) -> None:
    """A bad batch: ``zero_grad()`` of the engine or its optimizer, and the next one is stepped."""
    for step in trainer.steps():
        trainer.backward(1000 * loss_of(trainer, step, 5))
        zero_grad(trainer, step)
        for micro in range(trainer.options.micro_steps):
            trainer.backward(loss_of(trainer, step, micro, slice(1 + step % 2)))
            trainer.step()


def zero_grad(trainer: Any, step: int) -> None:
    """By turns of the engine and of its optimizer."""
    (trainer.zero_grad if step % 2 else trainer.zero_optimizer_grad)()


@script(
    {1: WRONG, 2: WRONG, 3: WRONG},
    **OFFLOADED,
    settings={"fp16": {"enabled": True, "initial_scale_power": 8}},
    tolerance=0.01,
)
def abandoned_overflow_offloaded(trainer: Any) -> None:
    """A bad batch overflows in half precision and is dropped, with the optimizer on the CPU."""
    abandoned_backward(trainer)


@script({1: RIGHT}, micro_steps=2)
def zeroed_in_the_middle(trainer: Any, step: int, micro: int) -> None:
    """The first of two micro steps is dropped, and the second is halved all the same."""
    if micro:
        trainer.zero_grad()
    trainer.backward(loss_of(trainer, step, micro))


@script({1: WRONG, 2: WRONG, 3: WRONG})
def two_forwards_first(trainer: Any, step: int) -> None:
    """Two forwards, then their two backwards, then one step."""
    for loss in [loss_of(trainer, step, micro) for micro in range(2)]:
        trainer.backward(loss)


@script(ALL_RIGHT, micro_steps=2)
def scaled_by_the_user(trainer: Any, step: int, micro: int) -> None:
    """``engine.backward(loss, scale_wrt_gas=False)``, as the Trainer of transformers has it."""
    trainer.unscaled_backward(loss_of(trainer, step, micro) / 2)


@script(ALL_RIGHT)
def boundary_by_hand(trainer: Any, step: int) -> None:
    """The program says which backward is the last of a step, as Accelerate does."""
    for micro in range(3):
        trainer.boundary(micro == 2)
        trainer.backward(loss_of(trainer, step, micro))
