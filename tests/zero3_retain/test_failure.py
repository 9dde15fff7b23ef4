"""A backward that raises half way leaves the next step as if it had not happened."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training import models, stock
from tests.training.models import backward_that_raises, both_losses
from tests.training.options import Options
from tests.training.run import check
from tests.training.trainers import engine_of, engine_trainer
from tests.world import World
from tests.zero3_retain.test_gradients import patched


def fail_and_go_on(trainer: Any, *, failing: int, zero: bool) -> None:
    """Step 1 of 3 meets a failure at its backward number `failing`; then it is run again.

    The reference takes the same steps and no failure.
    """
    for step in trainer.steps():
        if trainer.is_engine and step == 1:
            losses = both_losses(trainer, step)
            for loss in losses[: failing - 1]:
                trainer.backward(loss, retain_graph=True)
            backward_that_raises(trainer, losses[failing - 1])
            if trainer.style == "engine":  # else nobody has heard of it yet
                trainer.leaves_nothing()
            if zero:
                trainer.zero_grad()
        first, second = both_losses(trainer, step)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()


@pytest.mark.core_case(zero=False, failing=2)
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero_grad"])
@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("stage", [2, 3])
def test_next_step_is_as_if_it_had_not_happened(
    world: World, stage: int, style: str, failing: int, zero: bool
) -> None:
    script = partial(fail_and_go_on, failing=failing, zero=zero)
    options = Options(stage, model="Fragile", style=style)
    for outcome in check(world, script, options, "zero3_retain", quiet=False):
        assert not any(outcome.available[-4:]), "parameters stayed gathered"


def step_after_failure(style: str) -> str:
    """The text of what ``step()`` raises right after a backward that raised."""
    with patched():
        trainer = engine_trainer("Fragile", style=style)
        backward_that_raises(trainer, both_losses(trainer, 0)[0])
        try:
            trainer.step()
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("style", ["engine", "torch"])
def test_step_without_a_backward_since_is_refused(world: World, style: str) -> None:
    stock.needs_style(style)
    for text in world.run(step_after_failure, style):
        assert "Run forward and backward again" in text


def backward_across_a_step(first_of_its_forward: bool) -> str:
    """A backward over a forward from before ``engine.step()``."""
    with patched():
        engine = engine_of()
        first, second = both_losses(engine, 0)
        if first_of_its_forward:
            first, _ = both_losses(engine, 0)
        engine.backward(first, retain_graph=True)
        engine.step()
        try:
            engine.backward(second)
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.core_case
@pytest.mark.parametrize("first_of_its_forward", [False, True], ids=["second", "first"])
def test_backward_over_parameters_that_are_gone_is_refused(
    world: World, first_of_its_forward: bool
) -> None:
    """PyTorch refuses too: 'modified by an inplace operation'."""
    for text in world.run(backward_across_a_step, first_of_its_forward):
        assert "backward over a forward from before engine.step()" in text


def backward_over_a_changed_parameter(sharded: bool) -> str:
    """A parameter changes between two backwards over one forward; sharded: of ZeRO-3."""
    from deepspeed.runtime.zero import GatheredParameters

    model: Any = models.build("TwoHeads")
    with patched():
        engine = engine_of(model) if sharded else model
        backward = engine.backward if sharded else Tensor.backward
        first, second = both_losses(engine, 0)
        backward(first, retain_graph=True)
        weight = model.blocks[1].down.weight
        with GatheredParameters([weight], modifier_rank=0, enabled=sharded), torch.no_grad():
            weight.mul_(2)
        try:
            backward(second)
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.core_case
@pytest.mark.parametrize("sharded", [False, True], ids=["pytorch", "zero3"])
def test_backward_over_a_parameter_that_was_changed_is_refused(world: World, sharded: bool) -> None:
    for text in world.run(backward_over_a_changed_parameter, sharded):
        assert "modified by an inplace operation" in text
