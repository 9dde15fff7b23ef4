"""DeepCompile with ZeRO-3; its C++ and its compiler are stood in for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.dc_fallback import patterns
from tests.harness.surroundings import DEEPCOMPILE
from tests.scripts.declared import RIGHT, WRONG, Script, raises, script


def under_deepcompile(
    stock: str, model: str = "Compiled", **options: Any
) -> Callable[[Callable[[Any], None]], Script]:
    settings = {"tolerance": 2e-6, "on": DEEPCOMPILE, "model": f"patterns.{model}", **options}
    return script({3: stock}, **settings)


def loss_of(trainer: Any, step: int, part: int = 0) -> Tensor:
    loss: Tensor = trainer(*patterns.inputs(step, part))
    return loss


@under_deepcompile(RIGHT)
def compiled(trainer: Any, step: int) -> None:
    """Nothing is skipped."""
    trainer.backward(loss_of(trainer, step))


@under_deepcompile(WRONG, "Mixed")
def partly_compiled(trainer: Any) -> None:
    """Dynamo skips some frames."""
    compiled(trainer)


@under_deepcompile(RIGHT)
def compiled_bad_batch(trainer: Any, step: int) -> None:
    """A bad batch: ``zero_grad()`` of the engine or its optimizer, and the next one is stepped."""
    trainer.backward(1000 * loss_of(trainer, step, 1))
    (trainer.zero_grad if step % 2 else trainer.zero_optimizer_grad)()
    trainer.backward(loss_of(trainer, step))


@under_deepcompile(WRONG, "Mixed")
def partly_compiled_bad_batch(trainer: Any) -> None:
    """A bad batch is dropped by ``zero_grad()``, and Dynamo skips some frames."""
    compiled_bad_batch(trainer)


@under_deepcompile(WRONG)
def compiled_two_backwards(trainer: Any, step: int) -> None:
    """Two backwards over one forward."""
    loss = loss_of(trainer, step)
    trainer.backward(loss, retain_graph=True)
    trainer.backward(0.5 * loss)


@under_deepcompile(WRONG)
def compiled_two_forwards(trainer: Any, step: int) -> None:
    """Two forwards and backwards before one step."""
    for part in range(2):
        trainer.backward(loss_of(trainer, step, part))


@under_deepcompile(RIGHT, micro_steps=2)
def compiled_zeroed_at_the_top(trainer: Any, step: int, micro: int) -> None:
    """Each micro step begins with ``zero_grad()``, as loops that were written for PyTorch do."""
    if trainer.is_engine or not micro:
        trainer.zero_grad()
    trainer.backward(loss_of(trainer, step, micro))


@under_deepcompile(RIGHT, micro_steps=2)
def compiled_abandoned_in_the_middle(trainer: Any, step: int) -> None:
    """A batch between two micro steps is dropped, and the first of them with it."""
    trainer.backward(loss_of(trainer, step, 0))
    trainer.step()
    trainer.backward(1000 * loss_of(trainer, step, 2))
    trainer.zero_grad()
    trainer.backward(loss_of(trainer, step, 1))


@under_deepcompile(WRONG, warns=WRONG)
def compiled_parameter_hook(trainer: Any) -> None:
    """``param.register_hook`` makes some gradients smaller, which eager ZeRO-3 honours."""
    for layer in trainer.module.layers:
        layer.weight.register_hook(lambda grad: 0.5 * grad)
    compiled(trainer)


@under_deepcompile(WRONG, "Disabled")
def skipped_parameter_hook(trainer: Any) -> None:
    """``param.register_hook`` in a frame that Dynamo skips."""
    compiled_parameter_hook(trainer)


@under_deepcompile(WRONG, "Disabled")
def skipped_inference_mode(trainer: Any) -> None:
    """An evaluation under ``torch.inference_mode()`` between steps, and Dynamo skips a frame."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        with torch.inference_mode():
            loss_of(trainer, step, 7)


@under_deepcompile(raises("traced for partitioned"), "RecomputedMethod")
def skipped_recomputed_method(trainer: Any) -> None:
    """``torch.utils.checkpoint`` of a method that reads ``self.weight``."""
    compiled(trainer)


@under_deepcompile(WRONG, "OwnCompile")
def skipped_with_a_compiled_layer(trainer: Any) -> None:
    """``layer.compile()`` by the user, in a frame that Dynamo skips."""
    compiled(trainer)
