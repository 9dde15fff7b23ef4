"""Plain backwards of several micro steps, whose losses go past the engine's outputs."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.models import WIDTH, both_losses, features, loss_of
from tests.scripts.declared import ALL_RIGHT, RIGHT, WRONG, raises, script
from tests.scripts.slopes import NOT_A_STEPS, gradient_penalty

PLAIN = {"style": "torch", "micro_steps": 2}
ALL_WRONG = {1: WRONG, 2: WRONG, 3: WRONG}


@script({1: WRONG, 2: WRONG, 3: raises("returned an invalid gradient")}, **PLAIN)
def with_a_penalty_on_a_weight(trainer: Any, step: int, micro: int) -> None:
    """A regularizer on a weight, in the loss."""
    weight = trainer.module.rebuild.weight
    with trainer.gathered([weight]):
        trainer.backward(loss_of(trainer, step, micro) + weight.square().mean())


@script(
    {1: raises("KeyError: 0"), 2: raises("already been reduced"), 3: raises("'numel'")}, **PLAIN
)
def with_a_backward_of_a_penalty(trainer: Any, step: int, micro: int) -> None:
    """A regularizer on a weight, in a backward of its own."""
    trainer.backward(loss_of(trainer, step, micro))
    weight = trainer.module.rebuild.weight
    with trainer.gathered([weight]):
        trainer.backward(weight.square().mean())


@script(ALL_WRONG, **PLAIN)
def beside_the_module(trainer: Any, step: int, micro: int) -> None:
    """The engine and its module, in one loss."""
    inside = loss_of(trainer.around_the_engine, step, micro + 5)
    trainer.backward(loss_of(trainer, step, micro) + inside)


@script({1: WRONG, 2: WRONG, 3: RIGHT}, model="ReturnsAScale", at_rest=False, **PLAIN)
def with_a_parameter_returned(trainer: Any, step: int, micro: int) -> None:
    """An output is a parameter, as CLIP's ``logit_scale``."""
    output, scale = trainer(features(step).detach() + micro)
    trainer.backward((output * scale).square().mean() + scale.square().sum())


@script(
    {1: raises("KeyError: 0"), 2: NOT_A_STEPS, 3: raises("invalid for input of size 0")},
    model="Critic",
    **PLAIN,
)
def with_a_gradient_penalty(trainer: Any) -> None:
    """A penalty on gradients at the inputs."""
    gradient_penalty(trainer)


class Before(nn.Module):
    """A layer in front of the engine, which no engine trains."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def step(self) -> None:
        """Subtract this rank's gradient."""
        with torch.no_grad():
            self.weight -= self.weight.grad
        self.weight.grad = None


@script({1: WRONG, 2: WRONG, 3: RIGHT}, model="Linears", at_rest=False, **PLAIN)
def behind_a_layer_of_its_own(trainer: Any) -> None:
    """A layer in front of the engine is trained by hand, also by a leaf of its output."""
    before = Before().to(next(trainer.module.parameters()).device)
    for step in trainer.steps():
        for micro in range(trainer.options.micro_steps):
            hidden = before(features(step).detach() + micro)
            leaf = hidden.detach().requires_grad_()
            trainer.backward(10 * trainer(leaf).square().mean())
            hidden.backward(leaf.grad, retain_graph=True)
            trainer.backward(10 * trainer(hidden).sin().mean())
            trainer.step()
        before.step()


@script(ALL_RIGHT, at_rest=False, **PLAIN)
def by_turns(trainer: Any, step: int, micro: int) -> None:
    """A backward by the engine, and a plain one."""
    first, second = both_losses(trainer, step, micro)
    if not micro and trainer.is_engine:
        trainer.engine.backward(first + second)
    else:
        trainer.backward(first + second)


@script({1: WRONG, 2: WRONG, 3: RIGHT}, at_rest=False, **PLAIN)
def by_turns_in_a_window(trainer: Any, step: int, micro: int) -> None:
    """In a window, a backward by the engine, and a plain one."""
    with trainer.window():
        by_turns.train(trainer, step, 0)
        by_turns.train(trainer, step, 1)
