"""A backward that raises half way leaves the next step as if it had not happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.listening import listening
from tests.world import World
from tests.zero3_retain import models, releases, trainers
from tests.zero3_retain.cases import EXACT, Outcome, patched, run


class Boom(RuntimeError):
    """What the failing backward raises."""


class RaiseInBackward(torch.autograd.Function):
    """Identity; its backward raises while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if RaiseInBackward.armed:
            raise Boom("half way")
        return grad


class Fragile(models.TwoHeads):
    """Raises between its two blocks: half the parameters have their gradients by then."""

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.blocks[1](RaiseInBackward.apply(self.blocks[0](x)))


def backward_that_raises(trainer: Any, loss: Tensor) -> None:
    RaiseInBackward.armed = True
    try:
        trainer.backward(loss, retain_graph=True)
    except Boom:
        return
    finally:
        RaiseInBackward.armed = False
    raise AssertionError("the backward was meant to raise")


def script(trainer: Any, *, failing: int, zero: bool) -> None:
    """Step 1 of 3 meets a failure at its backward number `failing`; then it is run again.

    The reference takes the same steps and no failure.
    """
    is_engine = isinstance(trainer, trainers.EngineTrainer)
    for step in range(3):
        tokens, classes = models.batch(step)
        if is_engine and step == 1:
            losses = models.losses(trainer.forward(tokens), classes)
            for loss in losses[: failing - 1]:
                trainer.backward(loss, retain_graph=True)
            backward_that_raises(trainer, losses[failing - 1])
            if trainer.style == "engine":  # else nobody has heard of it yet
                trainer.leaves_nothing()
            if zero:
                trainer.zero_grad()
        first, second = models.losses(trainer.forward(tokens), classes)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()


def fail_and_go_on(stage: int, style: str, failing: int, zero: bool) -> Outcome:
    start = models.build(Fragile)
    return run(lambda trainer: script(trainer, failing=failing, zero=zero), start, stage, style)


@pytest.mark.core_case(zero=False, failing=2)
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero_grad"])
@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("stage", [2, 3])
def test_next_step_is_as_if_it_had_not_happened(
    world: World, stage: int, style: str, failing: int, zero: bool
) -> None:
    releases.needs_torch_style(style)
    for result in world.run(fail_and_go_on, stage, style, failing, zero):
        assert not result.error
        assert result.difference <= EXACT, result
        assert not any(result.available[-4:]), "parameters stayed gathered"


def step_after_failure(style: str) -> str:
    """The text of what ``step()`` raises right after a backward that raised."""
    with patched():
        engine = trainers.build_engine(models.build(Fragile), trainers.config(3))
        trainer = trainers.EngineTrainer(engine, style)
        tokens, classes = models.batch(0)
        losses = models.losses(trainer.forward(tokens), classes)
        backward_that_raises(trainer, losses[0])
        try:
            trainer.step()
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("style", ["engine", "torch"])
def test_step_without_a_backward_since_is_refused(world: World, style: str) -> None:
    releases.needs_torch_style(style)
    for text in world.run(step_after_failure, style):
        assert "Run forward and backward again" in text


def warnings_of_failure() -> list[str]:
    with listening() as heard:
        fail_and_go_on(3, "engine", 2, False)
    return [text for text in heard if "raised" in text]


def test_dropped_gradients_are_announced(world: World) -> None:
    for texts in world.run(warnings_of_failure):
        assert len(texts) == 1
        assert "every gradient reduced since the last optimizer step was dropped" in texts[0]


def backward_across_a_step(first_of_its_forward: bool) -> str:
    """A backward over a forward from before ``engine.step()``."""
    with patched():
        engine = trainers.build_engine(models.build(models.TwoHeads), trainers.config(3))
        tokens, classes = models.batch(0)
        first, second = models.losses(engine(tokens), classes)
        if first_of_its_forward:
            first, _ = models.losses(engine(tokens), classes)
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

    model = models.build(models.TwoHeads)
    tokens, classes = models.batch(0)
    with patched():
        engine = trainers.build_engine(model, trainers.config(3)) if sharded else model
        backward = engine.backward if sharded else Tensor.backward
        first, second = models.losses(engine(tokens), classes)
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
