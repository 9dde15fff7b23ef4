"""Forwards without a backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.scripts.declared import ALL_RIGHT, RIGHT, WRONG, raises, script
from tests.training.models import VOCABULARY, both_losses, loss_of
from tests.training.options import SMALL_PREFETCH

INFERENCE_TENSORS = {1: RIGHT, 2: RIGHT, 3: raises("Inference tensors cannot be saved")}


@script(INFERENCE_TENSORS, zero=SMALL_PREFETCH)
def inference_mode(trainer: Any) -> None:
    """An evaluation under ``torch.inference_mode()`` after each step."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        trainer.module.eval()
        with torch.inference_mode():
            loss_of(trainer, step, 7)
        trainer.module.train()


@script(INFERENCE_TENSORS, zero=SMALL_PREFETCH)
def inference_mode_of_the_module(trainer: Any) -> None:
    """The same by ``engine.module``, which the engine does not see."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        with torch.inference_mode():
            loss_of(trainer.module, step, 7)


@script({1: RIGHT, 2: RIGHT, 3: raises("has no attribute 'next_functions'")}, model="Judged")
def inference_mode_first(trainer: Any) -> None:
    """An evaluation before each step, by a head among others that does not train."""
    for step in trainer.steps():
        trainer.module.eval()
        with torch.inference_mode():
            loss_of(trainer, step, 7)
        trainer.module.train()
        trainer.backward(loss_of(trainer, step))
        trainer.step()


@script(ALL_RIGHT)
def no_grad(trainer: Any) -> None:
    """An evaluation under ``torch.no_grad()`` before each step."""
    for step in trainer.steps():
        with torch.no_grad():
            loss_of(trainer, step, 7)
        trainer.backward(loss_of(trainer, step))
        trainer.step()


@script({1: WRONG, 2: WRONG, 3: WRONG})
def evaluated_between_backwards(trainer: Any) -> None:
    """An evaluation between two backwards over one forward."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(first, retain_graph=True)
        with torch.no_grad():
            loss_of(trainer, step, 7)
        trainer.backward(second)
        trainer.step()


@script(ALL_RIGHT)
def generation(trainer: Any) -> None:
    """Ranks generate until all are done, as ``generate(synced_gpus=True)``, then train on it."""
    for step in trainer.steps():
        generate(trainer, start=dist.get_rank(), least=2 + dist.get_rank() % 2)
        trainer.backward(loss_of(trainer, step))
        trainer.step()


def generate(trainer: Any, start: int, least: int) -> list[int]:
    """Up to `least` tokens; a rank that is done goes on while another is not."""
    tokens = [start]
    with torch.no_grad():
        while True:
            going = torch.tensor(float(len(tokens) < least))
            dist.all_reduce(going)
            if not going:
                return tokens[:least]
            logits, _ = trainer(torch.tensor(tokens))
            tokens.append(int(logits[-1].argmax()) % VOCABULARY)


@script(ALL_RIGHT, grouped=(2, 3))
def moving_average(trainer: Any) -> None:
    """An average of the gathered parameters, with which the model is evaluated and left alone."""
    params = list(trainer.module.parameters())
    averages: list[torch.Tensor] = []
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        with trainer.gathered(params), torch.no_grad():
            now = [param.detach().clone() for param in params]
        averages = [0.9 * a + 0.1 * n for a, n in zip(averages or now, now, strict=True)]
