"""Ordinary training, in which no patch has anything to do."""

from typing import Any

from tests.harness.models import loss_of
from tests.scripts.declared import ALL_RIGHT, GATHERED_AGAIN, script


@script(ALL_RIGHT, model="Deep")
def one_backward(trainer: Any, step: int) -> None:
    """One forward, one backward, one step."""
    trainer.backward(loss_of(trainer, step))


@script(ALL_RIGHT, model="Deep", micro_steps=2)
def micro_steps(trainer: Any, step: int, micro: int) -> None:
    """Two micro steps, which DeepSpeed counts."""
    trainer.backward(loss_of(trainer, step, micro))


@script(
    ALL_RIGHT,
    settings={"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
    tolerance=0.01,
)
def skipped_step(trainer: Any) -> None:
    """A gradient overflows in half precision, and the step is left out."""
    for step in trainer.steps():
        if step == 2 and not trainer.is_engine:
            continue
        loss = loss_of(trainer, step)
        trainer.backward(loss * (float("inf") if step == 2 else 1))
        trainer.step()


@script(ALL_RIGHT, grouped=(2, 3))
def plain_backward(trainer: Any, step: int) -> None:
    """``loss.backward()``, as the rest of the world writes it."""
    loss_of(trainer, step).backward()


@script(ALL_RIGHT, model="NonReentrant")
def non_reentrant(trainer: Any) -> None:
    """Blocks under ``checkpoint(use_reentrant=False)``, as Hugging Face's Trainer has them."""
    one_backward(trainer)


@script(ALL_RIGHT, model="Reentrant")
def reentrant(trainer: Any) -> None:
    """Blocks under ``checkpoint(use_reentrant=True)``."""
    one_backward(trainer)


@script(ALL_RIGHT, model="SharedBlock", costs=GATHERED_AGAIN)
def shared_block(trainer: Any) -> None:
    """One block runs three times."""
    one_backward(trainer)


@script(ALL_RIGHT, model="CompiledBlock")
def compiled_block(trainer: Any) -> None:
    """``block.compile(backend="aot_eager")`` by the user, outside DeepCompile."""
    one_backward(trainer)
