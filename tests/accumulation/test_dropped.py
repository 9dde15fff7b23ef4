"""What a step has reduced is dropped by `zero_grad()` and by a backward that raised: all of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import ds_patches
from tests.training import leftovers
from tests.accumulation import cases
from tests.accumulation.cases import OFFLOADED, OVERLAP, Script
from tests.accumulation.ledger import BF16, each_step
from tests.coalesce.micro_steps import one_backward
from tests.world import World
from tests.training import models, stock, trainers
from tests.zero3_retain.test_failure import backward_that_raises

STAGES = [1, 2, 3]
PLACES = pytest.mark.parametrize("settings", [{}, OFFLOADED], ids=["", "offloaded"])


def check(world: World, script: Script, stage: int, **case: Any) -> None:
    for outcome in world.run(cases.run, script, stage, **case):
        assert outcome.equal(), outcome


# --- zero_grad() ----------------------------------------------------------------------------------

ZEROS = pytest.mark.parametrize("zero", ["zero_grad", "zero_optimizer_grad"])


def bad_batches(trainer: Any, zero: str, micro_steps: int) -> None:
    """A backward that is thought better of comes before each step."""
    for step in range(3):
        one_backward(trainer, step, 5)
        getattr(trainer, zero)()
        for index in range(micro_steps):
            one_backward(trainer, step, index, slice(2) if step % 2 else slice(1))
            trainer.step()


@pytest.mark.core_case(zero="zero_grad", stage=3, settings={}, gas=1)
@pytest.mark.core_case(zero="zero_optimizer_grad", stage=2, settings=OFFLOADED, gas=2)
@pytest.mark.sampled(ways=2)
@ZEROS
@pytest.mark.parametrize("gas", [1, 2])
@PLACES
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_drops_what_came_before(
    world: World, stage: int, settings: dict[str, Any], gas: int, zero: str
) -> None:
    script = partial(bad_batches, zero=zero, micro_steps=gas)
    check(world, script, stage, micro_steps=gas, settings=settings)


def written_for_pytorch(trainer: Any, zero: str) -> None:
    """Each micro step begins with ``zero_grad()``, and DeepSpeed is to add them up."""
    for step in range(3):
        for index in range(2):
            if trainer.is_engine:
                getattr(trainer, zero)()
            one_backward(trainer, step, index)
            trainer.step()


@pytest.mark.core_case(zero="zero_grad", stage=2)
@ZEROS
@pytest.mark.parametrize("stage", [2, 3])
def test_counted_micro_steps_stay(world: World, stage: int, zero: str) -> None:
    script = partial(written_for_pytorch, zero=zero)
    for outcome in world.run(cases.run, script, stage, micro_steps=2):
        assert outcome.equal(), outcome
        assert not outcome.heard


def bad_in_the_middle(trainer: Any, zero: str) -> None:
    """A backward that is thought better of, between two micro steps: PyTorch drops both."""
    for step in range(3):
        one_backward(trainer, step, 0)
        trainer.step()
        one_backward(trainer, step, 5)
        getattr(trainer, zero)()
        one_backward(trainer, step, 1)
        trainer.step()


@pytest.mark.core_case(zero="zero_grad", settings={})
@pytest.mark.sampled(ways=2)
@ZEROS
@PLACES
@pytest.mark.parametrize("stage", STAGES)
def test_after_another_backward_they_go_too(
    world: World, stage: int, settings: dict[str, Any], zero: str
) -> None:
    script = partial(bad_in_the_middle, zero=zero)
    for outcome in world.run(cases.run, script, stage, micro_steps=2, settings=settings):
        assert outcome.equal(), outcome
        assert ["zero_grad() after a backward" in text for text in outcome.heard] == [True]


def in_the_middle(trainer: Any, zero: str) -> None:
    """Of two micro steps the first is dropped; the second is divided by two all the same."""
    for step in range(3):
        one_backward(trainer, step, 0)
        trainer.step()
        getattr(trainer, zero)()
        one_backward(trainer, step, 1)
        trainer.step()


@ZEROS
def test_stage_1_has_its_gradients_at_the_parameters_until_the_boundary(
    world: World, zero: str
) -> None:
    """There stock drops them as PyTorch does, counted or not."""
    check(world, partial(in_the_middle, zero=zero), 1, micro_steps=2)


def after_the_only_backward(trainer: Any) -> None:
    """What is stepped then has no gradient: nothing moves, as in PyTorch."""
    for step in range(4):
        one_backward(trainer, step)
        if step % 2:
            trainer.zero_grad()
        trainer.step()


@PLACES
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_gradients_changes_nothing(
    world: World, stage: int, settings: dict[str, Any]
) -> None:
    check(world, after_the_only_backward, stage, settings=settings)


def stepped_again(trainer: Any) -> None:
    """``engine.step()`` without a backward since the last one."""
    for step in range(3):
        one_backward(trainer, step)
        trainer.step()
        if trainer.is_engine:
            trainer.engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_a_backward_changes_nothing(world: World, stage: int) -> None:
    """Without offload it fails, on stock too."""
    check(world, stepped_again, stage, settings=OFFLOADED)


def retained_and_abandoned(trainer: Any) -> None:
    """One of two losses had its backward, and then another batch comes in."""
    for step in range(3):
        tokens, classes = models.batch(step, 5)
        first, _ = models.losses(trainer(tokens), classes)
        trainer.backward(first, retain_graph=True)
        trainer.zero_grad()
        one_backward(trainer, step)
        trainer.step()


@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_abandoned_forward(world: World, stage: int, style: str) -> None:
    stock.needs_style(style)
    check(world, retained_and_abandoned, stage, style=style)


# --- A backward that raised -----------------------------------------------------------------------


def one_raises(trainer: Any, micro_steps: int) -> None:
    """In the second step the last backward raises; the step is taken again from its beginning."""
    for step in range(3):
        if trainer.is_engine and step == 1:
            for index in range(micro_steps - 1):
                one_backward(trainer, step, index)
            tokens, classes = models.batch(step, 5)
            losses = models.losses(trainer(tokens), classes)
            backward_that_raises(trainer, sum(losses))
        for index in range(micro_steps):
            trainer.boundary(index == micro_steps - 1)
            one_backward(trainer, step, index, slice(1) if step == 1 else slice(2))
        trainer.step()


@pytest.mark.core_case(style="engine", stage=2, settings=OFFLOADED)
@pytest.mark.sampled(ways=2)
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("settings", [{}, OFFLOADED, OVERLAP], ids=["", "offloaded", "overlap"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_next_step_is_right_after_a_backward_that_raised(
    world: World, stage: int, settings: dict[str, Any], style: str, backwards: int
) -> None:
    stock.needs_style(style)
    script = partial(one_raises, micro_steps=backwards)
    case = {"settings": settings, "style": style, "model": "Fragile"}
    for outcome in world.run(cases.run, script, stage, **case):
        assert outcome.equal(), outcome
        (said,) = outcome.heard
        assert "every gradient reduced since the last optimizer step was dropped" in said


# --- The end of the patch -------------------------------------------------------------------------


def left_after(stage: int, settings: dict[str, Any], dtype: str) -> dict[str, int]:
    """What is at an engine that was trained with the patch, and was not before."""
    ds_patches.unapply_all()
    start = models.build(models.TwoHeads, getattr(torch, dtype))
    engine = trainers.build_engine(start, trainers.config(stage, **settings))
    before = leftovers.of(engine)
    with cases.applied("accumulation"):
        each_step(trainers.EngineTrainer(engine))
        assert leftovers.since(before, engine, but=()), "the patch has not seen the engine"
    return leftovers.since(before, engine, but=())


@pytest.mark.parametrize(
    ("stage", "settings", "dtype"),
    [
        (1, BF16, "bfloat16"),
        (1, OFFLOADED | BF16, "bfloat16"),
        (2, OFFLOADED, "float32"),
        (3, OFFLOADED, "float32"),
    ],
    ids=["1-fp32-sums", "1-fp32-sums-offloaded", "2-offloaded", "3-offloaded"],
)
def test_nothing_is_left_after_unapply(
    world: World, stage: int, settings: dict[str, Any], dtype: str
) -> None:
    for left in world.run(left_after, stage, settings, dtype):
        assert not left
