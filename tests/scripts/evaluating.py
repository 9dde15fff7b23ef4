"""Forwards without a backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.harness.models import batch, loss_of
from tests.harness.options import SMALL_PREFETCH
from tests.scripts.declared import ALL_RIGHT, LOOKED_AT, RIGHT, raises, script

#: What is gathered in an evaluation stays for the training that follows.
KEPT = {"zero": SMALL_PREFETCH | {"stage3_max_live_parameters": 10**9}}

INFERENCE_TENSORS = {1: RIGHT, 2: RIGHT, 3: raises("Inference tensors cannot be saved")}


@script(INFERENCE_TENSORS, **KEPT)
def inference_mode(trainer: Any) -> None:
    """An evaluation under ``torch.inference_mode()`` after each step."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        trainer.module.eval()
        with torch.inference_mode():
            loss_of(trainer, step, 7)
        trainer.module.train()


@script(INFERENCE_TENSORS, **KEPT)
def inference_mode_of_the_module(trainer: Any) -> None:
    """An evaluation of ``engine.module`` under ``torch.inference_mode()`` after each step."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        with torch.inference_mode():
            loss_of(trainer.module, step, 7)


@script({1: RIGHT, 2: RIGHT, 3: raises("has no attribute 'next_functions'")}, model="Judged")
def inference_mode_first(trainer: Any, step: int) -> None:
    """An evaluation under ``torch.inference_mode()`` before each step, of a head that rests."""
    trainer.module.eval()
    with torch.inference_mode():
        loss_of(trainer, step, 7)
    trainer.module.train()
    trainer.backward(loss_of(trainer, step))


def unwrapped(trainer: Any, step: int, forward: Any) -> None:
    """Gather all parameters and do without the engine's hooks, as TRL did up to its fix."""
    with trainer.gathered(trainer.module.parameters()), without_hooks(trainer), torch.no_grad():
        forward(batch(step)[0])


@contextmanager
def without_hooks(trainer: Any) -> Iterator[None]:
    optimizer = trainer.engine.optimizer if trainer.is_engine else None
    if (offload := getattr(optimizer, "parameter_offload", None)) is None:
        yield
        return
    for param in offload.module.parameters():
        param.ds_active_sub_modules.clear()
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    yield
    register = getattr(offload, "_register_deepspeed_module", None)
    (register or offload._register_hooks_recursively)(offload.module)


@script(ALL_RIGHT, costs=LOOKED_AT)
def generation_without_hooks(trainer: Any) -> None:
    """An inner module generates after each step; ZeRO-3's hooks are removed and added again."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        unwrapped(trainer, step, trainer.module.trunk)


@script(ALL_RIGHT, costs=LOOKED_AT)
def generation_of_the_root(trainer: Any, step: int) -> None:
    """The same by the whole model, before each step."""
    unwrapped(trainer, step, trainer.module)
    trainer.backward(loss_of(trainer, step))
