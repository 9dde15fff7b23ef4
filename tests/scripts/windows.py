"""``with engine.coalesce_grad_reduction():``, which 0.19.1 and later have of their own."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.harness import models
from tests.harness.models import batch, both_losses, loss_of, losses
from tests.scripts.declared import ALL_RIGHT, RIGHT, WRONG, raises, script


@script(ALL_RIGHT, at_rest=False, grouped=(2, 3))
def window(trainer: Any, step: int, backwards: int = 3) -> None:
    """Three backwards and one reduction."""
    with trainer.window():
        for micro in range(backwards):
            trainer.backward(loss_of(trainer, step, micro))


@script(
    {1: RIGHT, 2: RIGHT, 3: raises("Expected weight to be of same shape")},
    model="Auxiliary",
    at_rest=False,
)
def window_over_an_auxiliary_tensor(trainer: Any, step: int) -> None:
    """A block in which a tensor that is no output has a backward after the outputs."""
    with trainer.window():
        tokens, classes = batch(step)
        loss = sum(losses(trainer(tokens), classes))
        loss.backward(retain_graph=True)
        trainer.module.aux.backward()


@script({1: WRONG, 2: WRONG, 3: RIGHT}, micro_steps=2, at_rest=False)
def two_windows(trainer: Any, step: int, micro: int) -> None:
    """Two blocks and two calls of step() make one step of two micro steps."""
    part_of_a_step(trainer, step, micro)


def part_of_a_step(trainer: Any, step: int, part: int) -> None:
    with trainer.window():
        for micro in range(2):
            trainer.backward(loss_of(trainer, step, 2 * part + micro))


@script({1: WRONG, 2: WRONG, 3: RIGHT}, at_rest=False)
def two_windows_before_one_step(trainer: Any, step: int) -> None:
    """Two blocks and one call of step()."""
    for part in range(2):
        part_of_a_step(trainer, step, part)


@script({1: WRONG, 2: WRONG, 3: RIGHT}, micro_steps=3, at_rest=False)
def window_among_micro_steps(trainer: Any) -> None:
    """Three micro steps; the second is a block."""
    among_micro_steps(trainer, trainer.window)


def among_micro_steps(trainer: Any, block: Callable[[], Any]) -> None:
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step, 0))
        trainer.step()
        with block():
            trainer.backward(loss_of(trainer, step, 1))
            trainer.backward(loss_of(trainer, step, 2))
        trainer.step()
        trainer.backward(loss_of(trainer, step, 3))
        trainer.step()


@script({1: WRONG, 2: WRONG, 3: WRONG}, model="Uneven", at_rest=False)
def uneven_windows(trainer: Any) -> None:
    """In some steps, parameters have no gradient on one rank or on both."""
    rank = dist.get_rank()
    for step in trainer.steps():
        used = [(True, True), (True, False), (rank == 0, rank == 1), (True, True)][step % 4]
        models.Either.used = used
        with trainer.window():
            for micro in range(2):
                trainer.backward(loss_of(trainer, step, micro, slice(1 if step == 1 else 2)))
        trainer.step()
    models.Either.used = (True, True)


@script({1: RIGHT, 2: RIGHT, 3: raises("Expected weight to be of same shape")}, at_rest=False)
def window_over_one_forward(trainer: Any, step: int) -> None:
    """A block with two backwards over each of two forwards."""
    with trainer.window():
        for micro in range(2):
            first, second = both_losses(trainer, step, micro)
            trainer.backward(first, retain_graph=True)
            trainer.backward(second)
