"""Gradients of gradients at stage 3: the backward of a backward gathers what it needs, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.world import World
from tests.zero3_retain import models, releases
from tests.zero3_retain.cases import Outcome, run
from tests.zero3_retain.trainers import PlainTrainer


class Critic(nn.Module):
    """Judges continuous inputs; keeps what lies in its middle."""

    middle: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([models.Block(), models.Block()])
        self.judge = nn.Linear(models.WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.middle = self.blocks[0](x)
        judged: Tensor = self.judge(self.blocks[1](self.middle))
        return judged


class Plain(nn.Module):
    """Saves nothing but views of weights, and what the Tanh has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(models.WIDTH, models.WIDTH), nn.Tanh(), nn.Linear(models.WIDTH, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        judged: Tensor = self.layers(x)
        return judged


def inputs(step: int) -> Tensor:
    tokens, _ = models.batch(step)
    at = torch.arange(models.WIDTH, dtype=torch.float32, device=tokens.device)
    return torch.sin(tokens[:, None] * 0.7 + at).requires_grad_()


def at_the_input(trainer: Any) -> None:
    """As WGAN-GP has it."""
    for step in range(3):
        x = inputs(step)
        judged = trainer.forward(x)
        (slope,) = torch.autograd.grad(judged.sum(), x, create_graph=True)
        trainer.backward(judged.square().mean() + (slope.norm(dim=-1) - 1).square().mean())
        trainer.step()


def in_the_middle(trainer: Any) -> None:
    """The gradient at an intermediate, by a part of the model."""
    for step in range(3):
        judged = trainer.forward(inputs(step))
        model = trainer.model if isinstance(trainer, PlainTrainer) else trainer.engine.module
        (slope,) = torch.autograd.grad(judged.sum(), model.middle, create_graph=True)
        trainer.backward(judged.square().mean() + slope.square().mean())
        trainer.step()


def penalized(script: Any, model: str, style: str, patch: bool = True) -> Outcome:
    return run(script, models.build(globals()[model]), 3, style, patch=patch)


PENALTIES = pytest.mark.parametrize(
    ("script", "model"),
    [(at_the_input, "Critic"), (in_the_middle, "Critic"), (at_the_input, "Plain")],
    ids=["input", "intermediate", "tanh"],
)


@pytest.mark.core_case(style="engine", script=at_the_input, model="Critic")
@pytest.mark.parametrize("style", ["engine", "torch"])
@PENALTIES
def test_penalties(world: World, script: Any, model: str, style: str) -> None:
    releases.needs_torch_style(style)
    for outcome in world.run(penalized, script, model, style):
        assert outcome.equal, outcome
        assert not any(outcome.available)


@PENALTIES
def test_stock_crashes_or_is_wrong(world: World, script: Any, model: str) -> None:
    for outcome in world.run(penalized, script, model, "engine", False):
        assert outcome.error or outcome.difference > 1e-3
