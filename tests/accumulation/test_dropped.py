"""What a step has reduced is dropped by `zero_grad()` and by a backward that raised: all of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.scripts import accumulating, ordinary
from tests.training import leftovers
from tests.training.models import backward_that_raises, loss_of
from tests.training.options import BF16_SUMS, OFFLOADED, OVERLAP, Options
from tests.training.run import Outcome, Script, applied, check
from tests.training.trainers import EngineTrainer, engine_of
from tests.world import World

STAGES = [1, 2, 3]
PLACES = pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["", "offloaded"])


def holds(world: World, script: Script, stage: int, **options: Any) -> list[Outcome]:
    return check(world, script, Options(stage, **options), "accumulation", quiet=False)


# --- zero_grad() ----------------------------------------------------------------------------------


class ByTheOptimizer(EngineTrainer):
    """The same by ``engine.optimizer.zero_grad()``."""

    zero_grad = EngineTrainer.zero_optimizer_grad


KINDS = pytest.mark.parametrize("kind", [EngineTrainer, ByTheOptimizer])


def bad_batches(trainer: Any) -> None:
    """A backward that is thought better of comes before each step."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step, 5))
        trainer.zero_grad()
        for micro in range(trainer.options.micro_steps):
            trainer.backward(loss_of(trainer, step, micro, slice(2) if step % 2 else slice(1)))
            trainer.step()


@pytest.mark.core_case(kind=EngineTrainer, stage=3, more={}, gas=1)
@pytest.mark.core_case(kind=ByTheOptimizer, stage=2, more=OFFLOADED, gas=2)
@KINDS
@pytest.mark.parametrize("gas", [1, 2])
@PLACES
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_drops_what_came_before(
    world: World, stage: int, more: dict[str, Any], gas: int, kind: Any
) -> None:
    check(world, bad_batches, Options(stage, micro_steps=gas, **more), "accumulation", engine=kind)


def zeroed_at_the_top(trainer: Any) -> None:
    """A loop from PyTorch, which is meant to accumulate."""
    for step in trainer.steps():
        for micro in range(2):
            if trainer.is_engine:
                trainer.zero_grad()
            trainer.backward(loss_of(trainer, step, micro))
            trainer.step()


@pytest.mark.core_case(kind=EngineTrainer, stage=2)
@KINDS
@pytest.mark.parametrize("stage", STAGES)
def test_between_micro_steps(world: World, stage: int, kind: Any) -> None:
    """What is counted stays; stage 1 has it at the parameters, where stock drops it."""
    script = accumulating.zeroed_in_the_middle if stage == 1 else zeroed_at_the_top
    options = Options(stage, micro_steps=2)
    check(world, script, options, "accumulation", engine=kind, quiet=False)


def bad_in_the_middle(trainer: Any) -> None:
    """A backward that is thought better of, between two micro steps: PyTorch drops both."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step, 0))
        trainer.step()
        trainer.backward(loss_of(trainer, step, 5))
        trainer.zero_grad()
        trainer.backward(loss_of(trainer, step, 1))
        trainer.step()


@pytest.mark.core_case(kind=EngineTrainer, more={})
@KINDS
@PLACES
@pytest.mark.parametrize("stage", STAGES)
def test_after_another_backward_they_go_too(
    world: World, stage: int, more: dict[str, Any], kind: Any
) -> None:
    options = Options(stage, micro_steps=2, **more)
    found = check(world, bad_in_the_middle, options, "accumulation", engine=kind, quiet=False)
    for outcome in found:
        assert ["zero_grad() after a backward" in text for text in outcome.said] == [True]


def stepped_again(trainer: Any) -> None:
    """``engine.step()`` without a backward since the last one."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        if trainer.is_engine:
            trainer.engine.step()


@pytest.mark.parametrize(
    ("script", "more"),
    [
        *((accumulating.nothing_to_step, more) for more in ({}, OFFLOADED)),
        (stepped_again, OFFLOADED),  # without, it fails on stock too
        *((accumulating.abandoned_between_two_losses, more) for more in ({}, {"style": "torch"})),
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_steps_without_gradients(
    world: World, stage: int, script: Script, more: dict[str, Any]
) -> None:
    holds(world, script, stage, **more)


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
