"""Parameters, gradients and states that the program reads, writes or moves."""

from typing import Any

import torch

from tests.harness.models import loss_of
from tests.scripts.declared import ALL_RIGHT, LOOKED_AT, RIGHT, raises, script
from tests.scripts.ordinary import one_backward


@script(ALL_RIGHT, grouped=(2, 3), costs=LOOKED_AT)
def gradient_noise(trainer: Any, step: int) -> None:
    """Each gradient is read and set again, by safe_get_full_grad and safe_set_full_grad."""
    trainer.backward(loss_of(trainer, step))
    trainer.change_grads(lambda grad: 0.5 * grad + 0.01 * torch.cos(grad))


@script({1: RIGHT, 2: RIGHT, 3: raises("FusedAdam")}, refusal="FusedAdam")
def offloaded_states(trainer: Any) -> None:
    """``offload_states`` and ``reload_states`` between steps, as for a rollout."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        trainer.offload()


def first_half(trainer: Any) -> None:
    """Train and save."""
    one_backward(trainer)
    trainer.save()


@script(ALL_RIGHT, before=first_half, grouped=(2, 3))
def resumed(trainer: Any) -> None:
    """A checkpoint of stock is loaded with the patches, and one of theirs by stock."""
    trainer.load()
    one_backward(trainer)
