"""Backwards in ``engine.no_sync()``, which are reduced by the next one outside it."""

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from tests.harness import models
from tests.harness.models import both_losses, loss_of
from tests.scripts.declared import RIGHT, WRONG, raises, script
from tests.scripts.windows import among_micro_steps

REFUSED = {1: RIGHT, 2: raises("no_sync"), 3: raises("no_sync")}


@script(REFUSED, refusal="no_sync", at_rest=False)
def unsynced(trainer: Any, step: int, backwards: int = 3) -> None:
    """Three backwards, the first two in no_sync()."""
    with trainer.no_sync():
        for micro in range(backwards - 1):
            trainer.backward(loss_of(trainer, step, micro))
    trainer.backward(loss_of(trainer, step, backwards - 1))


@script({**REFUSED, 1: raises("no_sync")}, refusal="no_sync", micro_steps=2, at_rest=False)
def stepping_inside(trainer: Any, backwards: int = 2) -> None:
    """``engine.step()`` in every micro step, in no_sync() too, as Accelerate up to 1.7."""
    for step in trainer.steps():
        for micro in range(backwards):
            with nullcontext() if micro == backwards - 1 else trainer.no_sync():
                trainer.backward(loss_of(trainer, step, micro))
                trainer.step()


@script({**REFUSED, 1: WRONG}, at_rest=False)
def synced_in_between(trainer: Any, step: int) -> None:
    """Four backwards, every other one in no_sync()."""
    for micro in range(4):
        with nullcontext() if micro % 2 else trainer.no_sync():
            trainer.backward(loss_of(trainer, step, micro))


@script({**REFUSED, 1: WRONG}, at_rest=False)
def beside_windows(trainer: Any, step: int) -> None:
    """Backwards in no_sync(), in a block, and after it, in one step."""
    with trainer.no_sync():
        trainer.backward(loss_of(trainer, step, 0))
    with trainer.window():
        trainer.backward(loss_of(trainer, step, 1))
        trainer.backward(loss_of(trainer, step, 2))
    if step:
        trainer.backward(loss_of(trainer, step, 3))


@script(REFUSED, micro_steps=3, at_rest=False)
def unsynced_among_micro_steps(trainer: Any) -> None:
    """Three micro steps; the second has two backwards in no_sync()."""
    among_micro_steps(trainer, trainer.no_sync)


@script(REFUSED, model="Uneven", at_rest=False)
def unsynced_and_uneven(trainer: Any) -> None:
    """Parameters with a gradient in no_sync() only, on one rank only, or never."""
    alone = (dist.get_rank() == 0, dist.get_rank() == 1)
    for step in trainer.steps():
        for micro, used in enumerate([(True, True), (True, False), alone]):
            models.Either.used = used
            with trainer.no_sync() if micro < 2 else nullcontext():
                both = slice(1) if micro or step == 1 else slice(2)
                trainer.backward(loss_of(trainer, step, micro, both))
        trainer.step()
    models.Either.used = (True, True)


@script({1: RIGHT, 2: raises("no_sync")}, at_rest=False)
def unlike_numbers_unsynced(trainer: Any, step: int) -> None:
    """One rank has more backwards in no_sync() than the other."""
    with trainer.no_sync():
        for micro in range(1 + dist.get_rank() * min(step, 2)):
            trainer.backward(loss_of(trainer, step, micro))
    trainer.backward(loss_of(trainer, step, 9))


@script(REFUSED, at_rest=False)
def unsynced_and_dropped(trainer: Any, step: int) -> None:
    """``zero_grad()`` drops the gradients of no_sync()."""
    with trainer.no_sync():
        trainer.backward(loss_of(trainer, step, 5))
    trainer.zero_grad()
    with trainer.no_sync():
        trainer.backward(loss_of(trainer, step, 0))
    trainer.backward(loss_of(trainer, step, 1))


@script({**REFUSED, 1: WRONG}, at_rest=False)
def unsynced_over_one_forward(trainer: Any, step: int) -> None:
    """Two backwards over each forward: in no_sync(), across its end, and after it."""
    with trainer.no_sync():
        first, second = both_losses(trainer, step, 0)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        first, second = both_losses(trainer, step, 1)
        trainer.backward(first, retain_graph=True)
    trainer.backward(second)
    first, second = both_losses(trainer, step, 2)
    trainer.backward(first, retain_graph=True)
    trainer.backward(second)
