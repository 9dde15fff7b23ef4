"""What a step has reduced is dropped by `zero_grad()` and by a backward that raised: all of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.scripts import accumulating, ordinary
from tests.training import leftovers, stock
from tests.training.models import backward_that_raises, loss_of
from tests.training.options import BF16_SUMS, OFFLOADED, OVERLAP, Options
from tests.training.run import Outcome, Script, applied, check
from tests.training.trainers import EngineTrainer, engine_of
from tests.world import World

STAGES = [1, 2, 3]
PLACES = pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["", "offloaded"])


def holds(world: World, script: Script, stage: int, **options: Any) -> list[Outcome]:
    stock.needs_style(options.get("style", "engine"))
    return check(world, script, Options(stage, **options), "accumulation", quiet=False)


# --- zero_grad() ----------------------------------------------------------------------------------

ZEROS = pytest.mark.parametrize("zero", ["zero_grad", "zero_optimizer_grad"])


def bad_batches(trainer: Any, zero: str) -> None:
    """A backward that is thought better of comes before each step."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step, 5))
        getattr(trainer, zero)()
        for micro in range(trainer.options.micro_steps):
            trainer.backward(loss_of(trainer, step, micro, slice(2) if step % 2 else slice(1)))
            trainer.step()


@pytest.mark.core_case(zero="zero_grad", stage=3, more={}, gas=1)
@pytest.mark.core_case(zero="zero_optimizer_grad", stage=2, more=OFFLOADED, gas=2)
@ZEROS
@pytest.mark.parametrize("gas", [1, 2])
@PLACES
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_drops_what_came_before(
    world: World, stage: int, more: dict[str, Any], gas: int, zero: str
) -> None:
    holds(world, partial(bad_batches, zero=zero), stage, micro_steps=gas, **more)


def written_for_pytorch(trainer: Any, zero: str) -> None:
    """Each micro step begins with ``zero_grad()``, and DeepSpeed is to add them up."""
    for step in trainer.steps():
        for micro in range(2):
            if trainer.is_engine:
                getattr(trainer, zero)()
            trainer.backward(loss_of(trainer, step, micro))
            trainer.step()


@pytest.mark.core_case(zero="zero_grad", stage=2)
@ZEROS
@pytest.mark.parametrize("stage", [2, 3])
def test_counted_micro_steps_stay(world: World, stage: int, zero: str) -> None:
    script = partial(written_for_pytorch, zero=zero)
    check(world, script, Options(stage, micro_steps=2), "accumulation")


def bad_in_the_middle(trainer: Any, zero: str) -> None:
    """A backward that is thought better of, between two micro steps: PyTorch drops both."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step, 0))
        trainer.step()
        trainer.backward(loss_of(trainer, step, 5))
        getattr(trainer, zero)()
        trainer.backward(loss_of(trainer, step, 1))
        trainer.step()


@pytest.mark.core_case(zero="zero_grad", more={})
@ZEROS
@PLACES
@pytest.mark.parametrize("stage", STAGES)
def test_after_another_backward_they_go_too(
    world: World, stage: int, more: dict[str, Any], zero: str
) -> None:
    script = partial(bad_in_the_middle, zero=zero)
    for outcome in holds(world, script, stage, micro_steps=2, **more):
        assert ["zero_grad() after a backward" in text for text in outcome.said] == [True]


def in_the_middle(trainer: Any, zero: str) -> None:
    """Of two micro steps the first is dropped; the second is divided by two all the same."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step, 0))
        trainer.step()
        getattr(trainer, zero)()
        trainer.backward(loss_of(trainer, step, 1))
        trainer.step()


@ZEROS
def test_stage_1_has_its_gradients_at_the_parameters_until_the_boundary(
    world: World, zero: str
) -> None:
    """There stock drops them as PyTorch does, counted or not."""
    holds(world, partial(in_the_middle, zero=zero), 1, micro_steps=2)


@PLACES
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_gradients_changes_nothing(
    world: World, stage: int, more: dict[str, Any]
) -> None:
    holds(world, accumulating.nothing_to_step, stage, **more)


def stepped_again(trainer: Any) -> None:
    """``engine.step()`` without a backward since the last one."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        if trainer.is_engine:
            trainer.engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_a_backward_changes_nothing(world: World, stage: int) -> None:
    """Without offload it fails, on stock too."""
    holds(world, stepped_again, stage, **OFFLOADED)


@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_abandoned_forward(world: World, stage: int, style: str) -> None:
    holds(world, accumulating.abandoned_between_two_losses, stage, style=style)


# --- A backward that raised -----------------------------------------------------------------------


def one_raises(trainer: Any, backwards: int) -> None:
    """In the second step the last backward raises; the step is taken again from its beginning."""
    for step in trainer.steps():
        if trainer.is_engine and step == 1:
            for micro in range(backwards - 1):
                trainer.backward(loss_of(trainer, step, micro))
            backward_that_raises(trainer, loss_of(trainer, step, 5))
        for micro in range(backwards):
            trainer.boundary(micro == backwards - 1)
            trainer.backward(loss_of(trainer, step, micro, slice(1 if step == 1 else 2)))
        trainer.step()


@pytest.mark.core_case(style="engine", stage=2, more=OFFLOADED)
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("more", [{}, OFFLOADED, OVERLAP], ids=["", "offloaded", "overlap"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_next_step_is_right_after_a_backward_that_raised(
    world: World, stage: int, more: dict[str, Any], style: str, backwards: int
) -> None:
    script = partial(one_raises, backwards=backwards)
    for outcome in holds(world, script, stage, style=style, model="Fragile", **more):
        (said,) = outcome.said
        assert "every gradient reduced since the last optimizer step was dropped" in said


# --- The end of the patch -------------------------------------------------------------------------


def left_after(**options: Any) -> dict[str, int]:
    """What is at an engine that was trained with the patch, and was not before."""
    engine = engine_of(**options)
    before = leftovers.of(engine)
    with applied("accumulation"):
        ordinary.one_backward(EngineTrainer(engine))
        assert leftovers.since(before, engine, but=()), "the patch has not seen the engine"
    return leftovers.since(before, engine, but=())


@pytest.mark.parametrize(
    ("stage", "more"),
    [(1, BF16_SUMS), (1, OFFLOADED | BF16_SUMS), (2, OFFLOADED), (3, OFFLOADED)],
    ids=["1-fp32-sums", "1-fp32-sums-offloaded", "2-offloaded", "3-offloaded"],
)
def test_nothing_is_left_after_unapply(world: World, stage: int, more: dict[str, Any]) -> None:
    for left in world.run(left_after, stage=stage, **more):
        assert not left
