"""DeepCompile with ZeRO-3; its C++ and its compiler are stood in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.dc_fallback import patterns
from tests.scripts.declared import DEEPCOMPILE, RIGHT, WRONG, Script, raises, script


def under_deepcompile(
    stock: str, model: str = "Compiled", **said: Any
) -> Callable[[Callable[[Any], None]], Script]:
    settings = {"tolerance": 2e-6, "on": DEEPCOMPILE, "model": f"patterns.{model}", **said}
    return script({3: stock}, **settings)


def loss_of(trainer: Any, step: int, part: int = 0) -> Tensor:
    loss: Tensor = trainer(*patterns.batch(step, part, dist.get_rank()))
    return loss


@under_deepcompile(RIGHT, quick=())
def compiled(trainer: Any) -> None:
    """Nothing is skipped."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()


@under_deepcompile(WRONG, "Mixed", quick=())
def partly_compiled(trainer: Any) -> None:
    """Some frames are skipped."""
    compiled.run(trainer)


@under_deepcompile(RIGHT, quick=())
def compiled_bad_batch(trainer: Any) -> None:
    """A bad batch: ``engine.optimizer.zero_grad()``, and the next one is stepped."""
    for step in trainer.steps():
        trainer.backward(1000 * loss_of(trainer, step, 1))
        trainer.zero_optimizer_grad()
        trainer.backward(loss_of(trainer, step))
        trainer.step()


@under_deepcompile(WRONG, "Mixed", quick=())
def partly_compiled_bad_batch(trainer: Any) -> None:
    """The same where frames are skipped."""
    compiled_bad_batch.run(trainer)


@under_deepcompile(WRONG, quick=())
def compiled_two_backwards(trainer: Any) -> None:
    """Two backwards over one forward."""
    for step in trainer.steps():
        loss = loss_of(trainer, step)
        trainer.backward(loss, retain_graph=True)
        trainer.backward(0.5 * loss)
        trainer.step()


@under_deepcompile(WRONG, quick=())
def compiled_two_forwards(trainer: Any) -> None:
    """Two forwards and backwards before one step."""
    for step in trainer.steps():
        for part in range(2):
            trainer.backward(loss_of(trainer, step, part))
        trainer.step()


@under_deepcompile(WRONG, quick=())
def compiled_parameter_hook(trainer: Any) -> None:
    """``param.register_hook`` makes some gradients smaller, which eager ZeRO-3 honours."""
    for layer in trainer.module.layers:
        layer.weight.register_hook(lambda grad: 0.5 * grad)
    compiled.run(trainer)


@under_deepcompile(WRONG, "Disabled", quick=())
def skipped_parameter_hook(trainer: Any) -> None:
    """The same in a frame that is skipped."""
    compiled_parameter_hook.run(trainer)


@under_deepcompile(RIGHT, quick=())
def compiled_inference_mode(trainer: Any) -> None:
    """An evaluation under ``torch.inference_mode()`` between steps."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        with torch.inference_mode():
            loss_of(trainer, step, 7)


@under_deepcompile(WRONG, "Disabled", quick=())
def skipped_inference_mode(trainer: Any) -> None:
    """The same where a frame is skipped."""
    compiled_inference_mode.run(trainer)


@under_deepcompile(raises("traced for partitioned"), "RecomputedMethod", quick=())
def skipped_recomputed_method(trainer: Any) -> None:
    """``torch.utils.checkpoint`` of a method that reads ``self.weight``."""
    compiled.run(trainer)


@under_deepcompile(WRONG, "OwnCompile", quick=())
def skipped_with_a_compiled_layer(trainer: Any) -> None:
    """A layer of a skipped frame that its owner compiles: ``layer.compile()``."""
    compiled.run(trainer)
