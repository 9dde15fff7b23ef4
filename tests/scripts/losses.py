"""More than one loss, and losses of another kind."""

from typing import Any

from tests.scripts.declared import ALL_RIGHT, GATHERED_AGAIN, RIGHT, WRONG, raises, script
from tests.training.models import batch, both_losses, loss_of, losses
from tests.training.options import SMALL_PREFETCH

LAST_ONLY = {1: WRONG, 2: WRONG, 3: raises("size of tensor a (0)")}


@script(LAST_ONLY, model="Auxiliary")
def auxiliary_tensor(trainer: Any) -> None:
    """A tensor that the forward keeps on the module has a backward of its own."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(first + second, retain_graph=True)
        trainer.backward(trainer.module.aux)
        trainer.step()


@script(LAST_ONLY, model="Auxiliary")
def auxiliary_tensor_first(trainer: Any) -> None:
    """A tensor that the forward keeps on the module has its backward before the outputs."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(trainer.module.aux, retain_graph=True)
        trainer.backward(first + second)
        trainer.step()


@script(ALL_RIGHT, model="Auxiliary", at_rest=False)
def auxiliary_alone(trainer: Any) -> None:
    """The outputs are for nothing."""
    for step in trainer.steps():
        trainer(batch(step)[0])
        trainer.backward(trainer.module.aux)
        trainer.step()


@script(LAST_ONLY, grouped=(2, 3))
def two_backwards(trainer: Any) -> None:
    """Two losses over one forward, one after the other."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()


@script(LAST_ONLY, model="TwoBranches", zero=SMALL_PREFETCH)
def three_backwards(trainer: Any) -> None:
    """Three backwards over one forward; the second uses other parameters."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(first + second, retain_graph=True)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()


@script({1: WRONG, 2: WRONG, 3: RIGHT})
def two_forwards(trainer: Any) -> None:
    """Two forwards and backwards before one step, with one micro step."""
    for step in trainer.steps():
        for micro in range(2):
            trainer.backward(loss_of(trainer, step, micro))
        trainer.step()


@script(ALL_RIGHT, costs=GATHERED_AGAIN)
def sum_over_two_forwards(trainer: Any) -> None:
    """Two forwards, and one backward over the sum, as with pairs of texts."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step, 0) + loss_of(trainer, step, 1))
        trainer.step()


@script({1: RIGHT, 2: RIGHT, 3: WRONG}, micro_steps=2)
def around_the_engine(trainer: Any) -> None:
    """One micro step calls the engine, the next one ``engine.module``."""
    in_turns(trainer, [trainer, trainer.around_the_engine])


@script(ALL_RIGHT, micro_steps=2)
def around_the_engine_first(trainer: Any) -> None:
    """One micro step calls ``engine.module``, the next one the engine."""
    in_turns(trainer, [trainer.around_the_engine, trainer])


def in_turns(trainer: Any, forwards: list[Any]) -> None:
    for step in trainer.steps():
        for micro, forward in enumerate(forwards):
            tokens, classes = batch(step, micro)
            trainer.backward(sum(losses(forward(tokens), classes)))
            trainer.step()
