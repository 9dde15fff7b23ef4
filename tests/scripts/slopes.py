"""``torch.autograd.grad``, which is no backward of the step."""

from typing import Any

import torch
from torch.nn.functional import one_hot

from tests.harness.models import WIDTH, batch, features, losses
from tests.scripts.declared import WRONG, raises, script

#: ``torch.autograd.grad`` is a backward to stock, in which no parameter has a gradient.
NOT_A_STEPS = raises("list index out of range")


@script({1: NOT_A_STEPS, 2: NOT_A_STEPS, 3: raises("invalid for input of size 0")}, model="Critic")
def gradient_penalty(trainer: Any, step: int, micro: int) -> None:
    """A gradient penalty on the inputs, as with WGAN-GP."""
    x = (features(step).detach() + micro).requires_grad_()
    judged = trainer(x)
    (slope,) = torch.autograd.grad(judged.sum(), x, create_graph=True)
    trainer.backward(judged.square().mean() + (slope.norm(dim=-1) - 1).square().mean())


@script({1: NOT_A_STEPS, 2: NOT_A_STEPS, 3: raises("invalid for input of size 0")}, model="Critic")
def penalty_in_the_middle(trainer: Any, step: int) -> None:
    """A gradient penalty on an intermediate tensor, over a part of the model."""
    judged = trainer(features(step))
    (slope,) = torch.autograd.grad(judged.sum(), trainer.module.middle, create_graph=True)
    trainer.backward(judged.square().mean() + slope.square().mean())


def slope_and_losses(trainer: Any, step: int, micro: int = 0) -> tuple[torch.Tensor, ...]:
    tokens, classes = batch(step, micro)
    outputs = trainer(tokens)
    first, second = losses(outputs, classes)
    (slope,) = torch.autograd.grad(first, outputs.logits, retain_graph=True)
    return slope.abs().sum(), first, second


@script({1: WRONG, 2: NOT_A_STEPS, 3: WRONG}, micro_steps=2)
def slope_in_each_micro_step(trainer: Any, step: int, micro: int) -> None:
    """``torch.autograd.grad`` by an output in each micro step."""
    slope, first, second = slope_and_losses(trainer, step, micro)
    trainer.backward(first * slope + second)


@script({1: NOT_A_STEPS, 2: NOT_A_STEPS, 3: raises("size of tensor a (0)")})
def slope_then_two_backwards(trainer: Any, step: int) -> None:
    """``torch.autograd.grad``, then two backwards over the whole graph."""
    slope, first, second = slope_and_losses(trainer, step)
    trainer.backward(first * slope, retain_graph=True)
    trainer.backward(second)


@script({1: NOT_A_STEPS, 2: NOT_A_STEPS, 3: raises("size of tensor a (0)")}, model="FloatInput")
def slope_at_the_input(trainer: Any, step: int) -> None:
    """The gradient at the input weighs a second loss, as in an adversarial step."""
    tokens, classes = batch(step)
    inputs = one_hot(tokens, WIDTH).float().requires_grad_()
    first, second = losses(trainer(inputs), classes)
    (slope,) = torch.autograd.grad(first, inputs, retain_graph=True)
    trainer.backward(first, retain_graph=True)
    trainer.backward(slope.square().sum() * second)
