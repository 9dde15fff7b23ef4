"""Models of which a part is frozen."""

from typing import Any

from tests.harness.models import loss_of
from tests.scripts.declared import ALL_RIGHT, RIGHT, WRONG, raises, script
from tests.scripts.ordinary import one_backward


@script(ALL_RIGHT, model="Adapted", grouped=(2, 3))
def low_rank(trainer: Any) -> None:
    """Low-rank adapters on a frozen trunk."""
    one_backward(trainer)


@script(ALL_RIGHT, model="CheckpointedAdapted")
def low_rank_recomputed(trainer: Any) -> None:
    """The same under checkpoint(use_reentrant=False), whose inputs are made to need a gradient."""
    one_backward(trainer)


@script(
    ALL_RIGHT,
    model="DeepReentrantAdapted",
    costs={3: "zero3_retain gathers again what stock has held"},
)
def low_rank_recomputed_reentrantly(trainer: Any) -> None:
    """Many low-rank adapters under checkpoint(use_reentrant=True), one block gathered at a time."""
    one_backward(trainer)


@script(ALL_RIGHT, model="SavedModules")
def modules_to_save(trainer: Any) -> None:
    """Heads that train as copies, in wrappers that hand out the copies' attributes."""
    one_backward(trainer)


@script(ALL_RIGHT)
def unfrozen_later(trainer: Any, step: int) -> None:
    """The trunk rests in the first steps and trains from the third on."""
    trainer.module.blocks.requires_grad_(step >= 2)
    trainer.backward(loss_of(trainer, step))


def train_alone(trainer: Any, index: int) -> None:
    """Freeze all blocks but one, as PEFT's ``set_adapter`` does."""
    for place, block in enumerate(trainer.module.blocks):
        block.requires_grad_(place == index)


# ZeRO 3 steps zeros for a parameter that is frozen when a backward at the boundary ends.
@script({1: RIGHT, 2: RIGHT, 3: WRONG}, model="DictOutput", micro_steps=2, at_rest=False)
def trained_by_turns(trainer: Any, step: int, micro: int) -> None:
    """Each micro step trains another block, and the other is frozen."""
    train_alone(trainer, micro)
    trainer.backward(loss_of(trainer, step, micro))


# ZeRO 3 steps zeros, as in `trained_by_turns`.
@script({1: RIGHT, 2: RIGHT, 3: WRONG}, model="DictOutput", micro_steps=2, at_rest=False)
def unfrozen_at_the_boundary(trainer: Any, step: int, micro: int) -> None:
    """A block is frozen in the last backward, and trains again before the step."""
    trainer.module.blocks[0].requires_grad_(micro == 0)
    trainer.backward(loss_of(trainer, step, micro))
    trainer.module.blocks[0].requires_grad_()


@script(
    {1: WRONG, 2: WRONG, 3: raises("unknown parameter type")}, model="DictOutput", at_rest=False
)
def trained_by_turns_in_a_window(trainer: Any, step: int) -> None:
    """Each backward of a window trains another block, and the other is frozen.

    At ZeRO 3, DeepSpeed records the stream of a gradient that is left, which a CPU has not.
    """
    with trainer.window():
        for micro in range(2):
            train_alone(trainer, micro)
            trainer.backward(loss_of(trainer, step, micro))
