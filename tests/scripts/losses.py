"""More than one loss, and losses of another kind."""

from __future__ import annotations

from typing import Any

import torch

from tests.scripts.declared import ALL_RIGHT, RIGHT, WRONG, raises, script
from tests.scripts.models import WIDTH, batch, losses

LAST_ONLY = {1: WRONG, 2: WRONG, 3: raises("size of tensor a (0)")}


def both_losses(trainer: Any, step: int, micro: int = 0) -> list[torch.Tensor]:
    tokens, classes = batch(step, micro)
    return losses(trainer(tokens), classes)


@script(LAST_ONLY, model="Auxiliary", quick=(3,))
def auxiliary_tensor(trainer: Any) -> None:
    """A tensor that the forward keeps on the module has a backward of its own."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(first + second, retain_graph=True)
        trainer.backward(trainer.module.aux)
        trainer.step()


@script(LAST_ONLY, model="Auxiliary", quick=())
def auxiliary_tensor_first(trainer: Any) -> None:
    """The same, and it has its backward before the outputs have theirs."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(trainer.module.aux, retain_graph=True)
        trainer.backward(first + second)
        trainer.step()


@script(ALL_RIGHT, model="Auxiliary", quick=())
def auxiliary_loss(trainer: Any) -> None:
    """The usual way: it is added to the loss."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(first + second + 0.1 * trainer.module.aux)
        trainer.step()


@script(LAST_ONLY, grouped=(2, 3), quick=(2,))
def two_backwards(trainer: Any) -> None:
    """Two losses over one forward, one after the other."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()


@script(
    LAST_ONLY,
    model="TwoBranches",
    settings={"zero": {"stage3_prefetch_bucket_size": 600}},
    quick=(3,),
)
def three_backwards(trainer: Any) -> None:
    """The second of three over one forward does not use what the others do."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(first + second, retain_graph=True)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()


@script(LAST_ONLY, model="NonReentrant", quick=())
def two_backwards_recomputed(trainer: Any) -> None:
    """Two losses over blocks under checkpoint(use_reentrant=False)."""
    two_backwards.run(trainer)


@script({1: WRONG, 2: WRONG, 3: RIGHT}, quick=())
def two_forwards(trainer: Any) -> None:
    """Two forwards and backwards before one step, with one micro step."""
    for step in trainer.steps():
        for micro in range(2):
            trainer.backward(sum(both_losses(trainer, step, micro)))
        trainer.step()


@script(ALL_RIGHT, quick=())
def sum_over_two_forwards(trainer: Any) -> None:
    """Two forwards, and one backward over the sum, as with pairs of texts."""
    for step in trainer.steps():
        total = sum(both_losses(trainer, step, 0)) + sum(both_losses(trainer, step, 1))
        trainer.backward(total)
        trainer.step()


@script({1: RIGHT, 2: RIGHT, 3: WRONG}, micro_steps=2, quick=(2,))
def around_the_engine(trainer: Any) -> None:
    """One micro step calls the engine, the next the module in it."""
    for step in trainer.steps():
        trainer.backward(sum(both_losses(trainer, step, 0)))
        trainer.step()
        tokens, classes = batch(step, 1)
        trainer.backward(sum(losses(trainer.module(tokens), classes)))
        trainer.step()


def inputs(step: int) -> torch.Tensor:
    """Continuous ones, for a critic."""
    tokens, _ = batch(step)
    at = torch.arange(WIDTH, dtype=torch.float32)
    return torch.sin(tokens[:, None] * 0.7 + at).requires_grad_()


#: ``torch.autograd.grad`` is a backward to stock, in which no parameter has a gradient.
NOT_A_STEPS = raises("list index out of range")


@script(
    {1: NOT_A_STEPS, 2: NOT_A_STEPS, 3: raises("invalid for input of size 0")},
    model="Critic",
    quick=(3,),
)
def gradient_penalty(trainer: Any) -> None:
    """The loss has the gradient by the inputs in it, as with WGAN-GP."""
    for step in trainer.steps():
        x = inputs(step)
        judged = trainer(x)
        (slope,) = torch.autograd.grad(judged.sum(), x, create_graph=True)
        trainer.backward(judged.square().mean() + (slope.norm(dim=-1) - 1).square().mean())
        trainer.step()


@script(
    {1: NOT_A_STEPS, 2: NOT_A_STEPS, 3: raises("size of tensor a (0)")}, model="Critic", quick=(2,)
)
def saliency(trainer: Any) -> None:
    """``torch.autograd.grad`` by the inputs, beside an ordinary backward."""
    for step in trainer.steps():
        x = inputs(step)
        judged = trainer(x)
        torch.autograd.grad(judged.sum(), x, retain_graph=True)
        trainer.backward(judged.square().mean())
        trainer.step()
