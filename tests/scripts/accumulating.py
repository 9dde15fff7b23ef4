"""Gradients that wait for their step, or are dropped before it."""

from typing import Any

import torch

from tests.harness.models import both_losses, loss_of
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
def nothing_to_step(trainer: Any, step: int) -> None:
    """The only backward of a step is dropped by ``zero_grad()``: nothing moves."""
    trainer.backward(loss_of(trainer, step))
    if step % 2:
        trainer.zero_grad()


@script({1: RIGHT, 2: RIGHT, 3: WRONG}, at_rest=False)
def abandoned_between_two_losses(trainer: Any, step: int) -> None:
    """``zero_grad()`` drops the first of two losses, and another batch comes in."""
    trainer.backward(both_losses(trainer, step, 5)[0], retain_graph=True)
    trainer.zero_grad()
    trainer.backward(loss_of(trainer, step))


@script(ALL_RIGHT)
def abandoned_forward(trainer: Any) -> None:
    """A loss that is not a number has no backward at all."""
    for step in trainer.steps():
        loss = loss_of(trainer, step, 1) * (float("nan") if step == 2 else 1)
        if loss.isfinite():
            trainer.backward(loss)
            trainer.step()


@script({1: WRONG, 2: WRONG, 3: WRONG})
def two_forwards_first(trainer: Any, step: int) -> None:
    """Two forwards, then their two backwards, then one step."""
    for loss in [loss_of(trainer, step, micro) for micro in range(2)]:
        trainer.backward(loss)


@script({1: WRONG, 2: WRONG, 3: RIGHT})
def boundaries_twice(trainer: Any, step: int) -> None:
    """``set_gradient_accumulation_boundary()`` marks the second and fourth of four backwards."""
    for micro in range(4):
        trainer.boundary(micro % 2 == 1)
        trainer.backward(loss_of(trainer, step, micro))


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


@script(ALL_RIGHT, micro_steps=2)
def evaluated_in_between(trainer: Any) -> None:
    """An evaluation between two micro steps of one step."""
    for step in trainer.steps():
        for micro in range(2):
            trainer.backward(loss_of(trainer, step, micro))
            trainer.step()
            trainer.module.eval()
            with torch.no_grad():
                loss_of(trainer, step, 7)
            trainer.module.train()


@script(ALL_RIGHT)
def failed_backward(trainer: Any, step: int) -> None:
    """A backward that raises in a hook, is caught, and is followed by a clean step."""
    if step == 2:
        loss = loss_of(trainer, step, 1)
        loss.register_hook(_refuse)
        try:
            trainer.backward(loss)
        except ValueError:
            trainer.zero_grad()
    trainer.backward(loss_of(trainer, step))


def _refuse(grad: torch.Tensor) -> None:
    raise ValueError("out of memory, say")
