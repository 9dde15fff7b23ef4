"""What counts as a backward of a step: any that reaches its parameters, and no other."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.accumulation import cases
from tests.coalesce.micro_steps import one_backward
from tests.world import World
from tests.training import models, releases

STAGES = [1, 2, 3]
STYLES = pytest.mark.parametrize("style", ["engine", "torch"])


def check(world: World, script: cases.Script, stage: int, **case: Any) -> None:
    for outcome in world.run(cases.run, script, stage, **case):
        assert outcome.equal(), outcome
        assert not outcome.heard


def expect(world: World, message: str, script: cases.Script, stage: int, **case: Any) -> None:
    for outcome in world.run(cases.run, script, stage, **case):
        assert re.search(message, outcome.error), outcome


# --- Tensors that are no output -------------------------------------------------------------------


def aux_after(trainer: Any) -> None:
    """A loss that the forward kept aside has its backward after the outputs'."""
    for step in range(3):
        tokens, classes = models.batch(step)
        losses = models.losses(trainer(tokens), classes)
        trainer.backward(sum(losses), retain_graph=True)
        trainer.backward(trainer.module.aux)
        trainer.step()


def aux_before(trainer: Any) -> None:
    """And before them."""
    for step in range(3):
        tokens, classes = models.batch(step)
        losses = models.losses(trainer(tokens), classes)
        trainer.backward(trainer.module.aux, retain_graph=True)
        trainer.backward(sum(losses))
        trainer.step()


def aux_alone(trainer: Any) -> None:
    """The outputs are for nothing."""
    for step in range(3):
        trainer(models.batch(step)[0])
        trainer.backward(trainer.module.aux)
        trainer.step()


@pytest.mark.core_case(script=aux_before, stage=2)
@pytest.mark.core_case(script=aux_after, stage=3)
@pytest.mark.sampled(ways=2)
@pytest.mark.parametrize("script", [aux_after, aux_before, aux_alone])
@pytest.mark.parametrize("stage", STAGES)
def test_a_tensor_that_is_no_output(world: World, stage: int, script: cases.Script) -> None:
    # Stage 3 gathers for a second backward over one forward with zero3_retain alone.
    patch = "zero3_retain" if stage == 3 else "accumulation"
    check(world, script, stage, patch=patch, model="Auxiliary")


@pytest.mark.parametrize(
    ("script", "stage"), [(aux_before, 1), (aux_before, 3), *((aux_after, s) for s in STAGES)]
)
def test_its_plain_backward(world: World, stage: int, script: cases.Script) -> None:
    """``module.aux.backward()``, where the release has plain backwards."""
    stock.needs_style("torch")
    if script is aux_after and not stock.QUEUES_EPILOGUE:
        pytest.skip("as on stock: stage 1 takes the last only, 2 and 3 raise")
    patch = "zero3_retain" if stage == 3 else "accumulation"
    check(world, script, stage, patch=patch, model="Auxiliary", style="torch")


@pytest.mark.skipif(not stock.QUEUES_EPILOGUE, reason="as on stock: KeyError")
@pytest.mark.parametrize(("script", "micro_steps"), [(aux_alone, 1), (aux_after, 2)])
@pytest.mark.parametrize("stage", STAGES)
def test_its_plain_backward_is_refused(
    world: World, stage: int, script: cases.Script, micro_steps: int
) -> None:
    """Where DeepSpeed has reduced nothing, or has not divided it."""
    case: dict[str, Any] = {"model": "Auxiliary", "style": "torch", "micro_steps": micro_steps}
    case["patch"] = "zero3_retain" if stage == 3 else "accumulation"
    expect(world, "call engine.backward.tensor. instead", script, stage, **case)


# --- torch.autograd.grad --------------------------------------------------------------------------


def slope_before(trainer: Any) -> None:
    """A gradient at an output is asked for before the step's backward."""
    for step in range(3):
        tokens, classes = models.batch(step)
        outputs = trainer(tokens)
        first, second = models.losses(outputs, classes)
        (slope,) = torch.autograd.grad(first, outputs.logits, retain_graph=True)
        trainer.backward(first * slope.abs().sum() + second)
        trainer.step()


def slope_between(trainer: Any) -> None:
    """Between two micro steps, over a part of another forward's graph, which has no backward."""
    for step in range(3):
        for index in range(2):
            tokens, classes = models.batch(step, 7)
            outputs = trainer(tokens)
            first, _ = models.losses(outputs, classes)
            torch.autograd.grad(first, outputs.logits)
            one_backward(trainer, step, index)
        trainer.step()


@pytest.mark.sampled(ways=2)
@STYLES
@pytest.mark.parametrize("script", [slope_before, slope_between])
@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_is_no_backward_of_the_step(
    world: World, stage: int, script: cases.Script, style: str
) -> None:
    stock.needs_style(style)
    check(world, script, stage, style=style)


def slopes(trainer: Any) -> None:
    """What it returns weighs the loss."""
    for step in range(3):
        for index in range(2):
            tokens, classes = models.batch(step, index)
            outputs = trainer(tokens)
            first, second = models.losses(outputs, classes)
            (slope,) = torch.autograd.grad(first, outputs.logits, retain_graph=True)
            trainer.backward(first * slope.abs().sum() + second)
            trainer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_is_not_divided_by_the_micro_steps(world: World, stage: int) -> None:
    check(world, slopes, stage, micro_steps=2)


# --- A backward inside a backward -----------------------------------------------------------------


def hooked(loss: torch.Tensor, run: Any) -> torch.Tensor:
    """`loss`, in whose backward `run` is called."""

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            run()

    loss.register_hook(hook)
    return loss


def nested(trainer: Any) -> None:
    """The backward over one batch runs inside that over another."""
    for step in range(3):
        losses = []
        for index in range(2):
            tokens, classes = models.batch(step, index)
            losses.append(sum(models.losses(trainer(tokens), classes)))
        outer, inner = losses
        trainer.backward(hooked(outer, inner.backward))
        trainer.step()


def cached(trainer: Any) -> None:
    """Mini-batches are run again in a hook of the loss over them, as sentence-transformers does."""
    for step in range(3):
        batches = [models.batch(step, index)[0] for index in range(2)]
        with torch.no_grad():
            kept = [trainer(tokens)[1] for tokens in batches]
        leaves = [one.detach().requires_grad_() for one in kept]
        loss = (leaves[0] - leaves[1]).square().mean() + leaves[0].abs().mean()
        gradients = torch.autograd.grad(loss, leaves)

        def again(batches: Any = batches, gradients: Any = gradients) -> None:
            for tokens, gradient in zip(batches, gradients, strict=True):
                (trainer(tokens)[1] * gradient).sum().backward()

        leaf = loss.detach().requires_grad_()
        trainer.backward(hooked(leaf * 1.0, again))
        trainer.step()


@pytest.mark.core_case(stage=3, script=nested, style="engine")
@pytest.mark.sampled(ways=2)
@STYLES
@pytest.mark.parametrize("script", [nested, cached])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_inside_another_belongs_to_it(
    world: World,
    stage: int,
    script: cases.Script,
    style: str,
    request: pytest.FixtureRequest,
) -> None:
    stock.needs_style(style)
    if stage == 2 and style == "engine":
        reason = "as on stock: 'Gradient computed twice for this partition'"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    check(world, script, stage, style=style)


# --- A forward of the step before -----------------------------------------------------------------


def a_step_between(trainer: Any) -> None:
    """Two backwards over one forward, and a step after each, as Accelerate takes it."""
    for step in range(2):
        tokens, classes = models.batch(step)
        first, second = models.losses(trainer(tokens), classes)
        trainer.backward(first, retain_graph=True)
        trainer.step()
        if trainer.is_engine:
            trainer.backward(second)
            trainer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_over_a_forward_of_the_step_before_is_said_once(
    world: World, stage: int
) -> None:
    for outcome in world.run(cases.run, a_step_between, stage, "zero3_retain"):
        (said,) = [outcome.error] if stage == 3 else outcome.heard
        assert "backward over a forward from before engine.step()" in said
