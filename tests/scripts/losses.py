"""More than one loss, and losses of another kind."""

from typing import Any

from tests.harness.models import both_losses, loss_of
from tests.harness.options import SMALL_PREFETCH
from tests.scripts.declared import ALL_RIGHT, RIGHT, WRONG, raises, script

LAST_ONLY = {1: WRONG, 2: WRONG, 3: raises("size of tensor a (0)")}


@script(LAST_ONLY, model="Auxiliary")
def auxiliary_tensor(trainer: Any, step: int) -> None:
    """A tensor that the forward keeps on the module has a backward of its own."""
    first, second = both_losses(trainer, step)
    trainer.backward(first + second, retain_graph=True)
    trainer.backward(trainer.module.aux)


@script(LAST_ONLY, model="Auxiliary")
def auxiliary_tensor_first(trainer: Any, step: int) -> None:
    """A tensor that the forward keeps on the module has its backward before the outputs."""
    first, second = both_losses(trainer, step)
    trainer.backward(trainer.module.aux, retain_graph=True)
    trainer.backward(first + second)


@script(LAST_ONLY, grouped=(2, 3))
def two_backwards(trainer: Any, step: int) -> None:
    """Two losses over one forward, one after the other."""
    first, second = both_losses(trainer, step)
    trainer.backward(first, retain_graph=True)
    trainer.backward(second)


@script(LAST_ONLY, model="TwoBranches", zero=SMALL_PREFETCH)
def three_backwards(trainer: Any, step: int) -> None:
    """Three backwards over one forward; the second uses other parameters."""
    first, second = both_losses(trainer, step)
    trainer.backward(first + second, retain_graph=True)
    trainer.backward(first, retain_graph=True)
    trainer.backward(second)


@script({1: WRONG, 2: WRONG, 3: RIGHT})
def two_forwards(trainer: Any, step: int) -> None:
    """Two forwards and backwards before one step, with one micro step."""
    for micro in range(2):
        trainer.backward(loss_of(trainer, step, micro))


@script({1: RIGHT, 2: RIGHT, 3: WRONG}, micro_steps=2)
def around_the_engine(trainer: Any, step: int, micro: int) -> None:
    """One micro step calls the engine, the next one ``engine.module``."""
    trainer.backward(loss_of(trainer.around_the_engine if micro else trainer, step, micro))


@script(ALL_RIGHT, costs=dict.fromkeys((1, 2), "accumulation does what a forward does"))
def always_around_the_engine(trainer: Any, step: int) -> None:
    """``engine.module`` alone is called."""
    trainer.backward(loss_of(trainer.around_the_engine, step))


@script(ALL_RIGHT, style="torch")
def epilogue_by_hand(trainer: Any, step: int) -> None:
    """``engine.module`` alone is called, and DeepSpeed's epilogue, as for a loss of two engines."""
    trainer.backward(loss_of(trainer.around_the_engine, step))
    if trainer.is_engine:
        trainer.engine._backward_epilogue()
