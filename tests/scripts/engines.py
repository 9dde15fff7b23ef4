"""More than one engine in a program."""

from __future__ import annotations

from typing import Any

import torch

from tests.scripts.declared import ALL_RIGHT, script
from tests.training.models import features, loss_of


@script(ALL_RIGHT)
def two_engines(trainer: Any) -> None:
    """Another engine trains in turns with this one."""
    other = trainer.another()
    for step in trainer.steps():
        for one in (trainer, other):
            one.backward(loss_of(one, step))
            one.step()


@script(ALL_RIGHT)
def teacher(trainer: Any) -> None:
    """Another engine is asked for targets, and never trained."""
    other = trainer.another()
    for step in trainer.steps():
        with torch.no_grad():
            target = loss_of(other, step)
        trainer.backward((loss_of(trainer, step) - 0.5 * target).square())
        trainer.step()


@script(ALL_RIGHT, model="Linears")
def adversarial(trainer: Any) -> None:
    """One engine learns from what the other makes of its outputs, and the other in its turn."""
    other = trainer.another()
    for step in trainer.steps():
        x = features(step).detach()
        trainer.backward(10 * other(trainer(x)).square().mean())
        trainer.step()
        other.zero_optimizer_grad()
        other.backward(10 * (other(trainer(x).detach()) - 1).square().mean())
        other.step()
