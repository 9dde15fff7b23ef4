"""Models of which a part is frozen."""

from typing import Any

from tests.harness.models import loss_of
from tests.scripts.declared import ALL_RIGHT, script
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
def unfrozen_later(trainer: Any) -> None:
    """The trunk rests in the first steps and trains from the third on."""
    trunk = list(trainer.module.blocks.parameters())
    for step in trainer.steps():
        for param in trunk:
            param.requires_grad_(step >= 2)
        trainer.backward(loss_of(trainer, step))
        trainer.step()
