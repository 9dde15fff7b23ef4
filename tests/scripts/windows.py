"""``with engine.coalesce_grad_reduction():``, which 0.19.1 and later have of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.scripts.declared import ALL_RIGHT, RIGHT, WRONG, raises, script
from tests.training import models
from tests.training.models import batch, both_losses, loss_of, losses
from tests.training.options import OFFLOADED


@script(ALL_RIGHT, at_rest=False, grouped=(2, 3))
def window(trainer: Any) -> None:
    """Three backwards and one reduction."""
    for step in trainer.steps():
        with trainer.window():
            for micro in range(3):
                trainer.backward(loss_of(trainer, step, micro))
        trainer.step()


@script(ALL_RIGHT, model="Reentrant", at_rest=False)
def window_recomputed(trainer: Any) -> None:
    """The same over blocks that are recomputed in backwards of their own."""
    window(trainer)


@script(
    ALL_RIGHT,
    **OFFLOADED,
    at_rest=False,
)
def window_offloaded(trainer: Any) -> None:
    """The same with the optimizer on the host."""
    window(trainer)


@script({1: RIGHT, 2: RIGHT, 3: WRONG}, model="Sometimes", at_rest=False)
def window_with_unused(trainer: Any) -> None:
    """The same, with a parameter that only some blocks use."""
    for step in trainer.steps():
        trainer.module.used = (True, step % 2 == 0)
        with trainer.window():
            for micro in range(2):
                trainer.backward(loss_of(trainer, step, micro))
        trainer.step()
    trainer.module.used = (True, True)


@script(ALL_RIGHT, at_rest=False)
def cached_loss(trainer: Any) -> None:
    """Mini-batches have their backwards in a hook of the outer loss, as GradCache losses do."""
    for step in trainer.steps():
        loss = _cached_loss(trainer, step)
        with trainer.window():
            trainer.backward(1.0 * loss)
        trainer.step()


@script(
    {stage: raises("loss must be a scalar tensor") for stage in (1, 2, 3)},
    at_rest=False,
)
def cached_loss_without_a_block(trainer: Any) -> None:
    """The same as a framework has it: it gets a loss that is a leaf, and knows of no block."""
    for step in trainer.steps():
        trainer.backward(_cached_loss(trainer, step))
        trainer.step()


def _cached_loss(trainer: Any, step: int) -> torch.Tensor:
    """The loss that a user gets: it has no other gradient than what its hook makes of it."""
    with torch.no_grad():
        outputs = [trainer(batch(step, micro)[0])[1] for micro in range(2)]
    leaves = [output.detach().requires_grad_() for output in outputs]
    loss = torch.cat(leaves).square().mean()
    gradients = torch.autograd.grad(loss, leaves)
    outer = loss.detach().requires_grad_()
    outer.register_hook(_backwards_of_mini_batches(trainer, step, gradients))
    return outer


def _backwards_of_mini_batches(trainer: Any, step: int, gradients: Any) -> Any:
    def run(_: torch.Tensor) -> None:
        with torch.enable_grad():
            for micro, gradient in enumerate(gradients):
                output = trainer(batch(step, micro)[0])[1]
                (output * gradient).sum().backward()

    return run


@script(
    {1: RIGHT, 2: RIGHT, 3: raises("Expected weight to be of same shape")},
    model="Auxiliary",
    at_rest=False,
)
def window_over_an_auxiliary_tensor(trainer: Any) -> None:
    """A block in which a tensor that is no output has a backward after the outputs."""
    for step in trainer.steps():
        with trainer.window():
            tokens, classes = batch(step)
            loss = sum(losses(trainer(tokens), classes))
            loss.backward(retain_graph=True)
            trainer.module.aux.backward()
        trainer.step()


@script(
    {1: WRONG, 2: WRONG, 3: RIGHT},
    micro_steps=2,
    at_rest=False,
)
def two_windows(trainer: Any) -> None:
    """Two blocks and two calls of step() make one step of two micro steps."""
    for step in trainer.steps():
        for part in range(2):
            with trainer.window():
                for micro in range(2):
                    trainer.backward(loss_of(trainer, step, 2 * part + micro))
            trainer.step()


@script({1: WRONG, 2: WRONG, 3: RIGHT}, at_rest=False)
def two_windows_before_one_step(trainer: Any) -> None:
    """And two blocks with one call."""
    for step in trainer.steps():
        for part in range(2):
            with trainer.window():
                for micro in range(2):
                    trainer.backward(loss_of(trainer, step, 2 * part + micro))
        trainer.step()


@script({1: WRONG, 2: WRONG, 3: RIGHT}, micro_steps=3, at_rest=False)
def window_among_micro_steps(trainer: Any) -> None:
    """Of three micro steps, the second is a block."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step, 0))
        trainer.step()
        with trainer.window():
            trainer.backward(loss_of(trainer, step, 1))
            trainer.backward(loss_of(trainer, step, 2))
        trainer.step()
        trainer.backward(loss_of(trainer, step, 3))
        trainer.step()


@script({1: WRONG, 2: WRONG, 3: WRONG}, model="Uneven", at_rest=False)
def uneven_windows(trainer: Any) -> None:
    """Parameters that rest on one rank, on both, in some steps: they count as zeros."""
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
def window_over_one_forward(trainer: Any) -> None:
    """Two backwards over each of two forwards."""
    for step in trainer.steps():
        with trainer.window():
            for micro in range(2):
                first, second = both_losses(trainer, step, micro)
                trainer.backward(first, retain_graph=True)
                trainer.backward(second)
        trainer.step()


@script(ALL_RIGHT, at_rest=False)
def nested_windows(trainer: Any) -> None:
    """A program that falls back where upstream's text says that blocks cannot be nested."""
    for step in trainer.steps():
        if trainer.is_engine:
            with trainer.window():
                _expect("nested", trainer.window)
                trainer.backward(sum(both_losses(trainer, step)))
        else:
            trainer.backward(sum(both_losses(trainer, step)))
        trainer.step()


@script(ALL_RIGHT, at_rest=False)
def step_in_a_window(trainer: Any) -> None:
    """A program that knows upstream's text for a step inside a block."""
    for step in trainer.steps():
        with trainer.window():
            trainer.backward(loss_of(trainer, step))
            if trainer.is_engine:
                _expect("no_sync", trainer.step)
        trainer.step()


def _expect(words: str, call: Any) -> None:
    """The error that upstream's own tests look for."""
    try:
        found = call()
        if hasattr(found, "__enter__"):
            with found:
                pass
    except AssertionError as error:
        if words not in str(error):
            raise
    else:
        raise RuntimeError("nothing was refused")
