"""What counts as a backward of a step: any that reaches its parameters, and no other."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.scripts import by_hand, heads, losses, nested, slopes
from tests.training import stock
from tests.training.models import both_losses, loss_of
from tests.training.options import BF16_SUMS, FP16, OFFLOADED, Options
from tests.training.run import check, run
from tests.world import World

STAGES = [1, 2, 3]
STYLES = pytest.mark.parametrize("style", ["engine", "torch"])
AUXILIARY = losses.auxiliary_tensor, losses.auxiliary_tensor_first, losses.auxiliary_alone


def patch_for(stage: int) -> str:
    """Stage 3 gathers for a second backward over one forward with zero3_retain alone."""
    return "zero3_retain" if stage == 3 else "accumulation"


@pytest.mark.core_case(script=losses.auxiliary_tensor_first, stage=2)
@pytest.mark.core_case(script=losses.auxiliary_tensor, stage=3)
@pytest.mark.parametrize("script", AUXILIARY)
@pytest.mark.parametrize("stage", STAGES)
def test_a_tensor_that_is_no_output(world: World, stage: int, script: Any) -> None:
    check(world, script, Options(stage, model="Auxiliary"), patch_for(stage))


@pytest.mark.parametrize(
    ("script", "stage"),
    [(AUXILIARY[1], 1), (AUXILIARY[1], 3), *((AUXILIARY[0], stage) for stage in STAGES)],
)
def test_its_plain_backward(world: World, stage: int, script: Any) -> None:
    """``module.aux.backward()``, where the release has plain backwards."""
    if script is AUXILIARY[0] and not stock.QUEUES_EPILOGUE:
        pytest.skip("as on stock: stage 1 takes the last only, 2 and 3 raise")
    check(world, script, Options(stage, model="Auxiliary", style="torch"), patch_for(stage))


@pytest.mark.skipif(not stock.QUEUES_EPILOGUE, reason="as on stock: KeyError")
@pytest.mark.parametrize(("script", "micro_steps"), [(AUXILIARY[2], 1), (AUXILIARY[0], 2)])
@pytest.mark.parametrize("stage", STAGES)
def test_its_plain_backward_is_refused(
    world: World, stage: int, script: Any, micro_steps: int
) -> None:
    """Where DeepSpeed has reduced nothing, or has not divided it."""
    options = Options(stage, model="Auxiliary", style="torch", micro_steps=micro_steps)
    for outcome in world.run(run, script, options, patch_for(stage)):
        assert re.search("call engine.backward.tensor. instead", outcome.error), outcome


@pytest.mark.parametrize(
    ("script", "style"),
    [
        *((slopes.slope_before, style) for style in ("engine", "torch")),
        *((slopes.slope_between, style) for style in ("engine", "torch")),
        (slopes.slope_in_each_micro_step, "engine"),  # and is not divided by them
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_is_no_backward_of_the_step(
    world: World, stage: int, script: Any, style: str
) -> None:
    check(world, script, script.at(stage, steps=3, style=style), "accumulation")


@pytest.mark.core_case(stage=3, script=nested.nested, style="engine")
@STYLES
@pytest.mark.parametrize("script", [nested.nested, nested.cached_behind_an_output])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_inside_another_belongs_to_it(
    world: World, stage: int, script: Any, style: str, request: pytest.FixtureRequest
) -> None:
    stock.needs_style(style)
    if stage == 2 and style == "engine":
        reason = "as on stock: 'Gradient computed twice for this partition'"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    check(world, script, Options(stage, style=style), "accumulation")


@stock.since("0.18.6", "a BF16_Optimizer for this configuration")
def test_so_does_one_of_a_bf16_optimizer(world: World) -> None:
    """Its hook, which runs it, was there before ``engine.backward`` was called."""
    check(world, nested.nested, Options(1, **BF16_SUMS), "accumulation")


def given_before_two_micro_steps(trainer: Any) -> None:
    """Of three, all but the last reach the head, which has a gradient by hand after the first."""
    for step in trainer.steps():
        for micro, reached in enumerate((heads.BOTH, heads.BOTH, heads.FIRST)):
            trainer.backward(loss_of(trainer, step, micro, reached))
            if micro == 0:
                by_hand.give(trainer, step)
            trainer.step()


@pytest.mark.parametrize("more", [OFFLOADED, OFFLOADED | BF16_SUMS], ids=["fp32", "bf16"])
def test_what_is_given_counts_once(world: World, more: dict[str, Any]) -> None:
    options = Options(2, micro_steps=3, **more)
    check(world, given_before_two_micro_steps, options, "accumulation")


def a_step_between(trainer: Any) -> None:
    """Two backwards over one forward, and a step after each, as Accelerate takes it."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(first, retain_graph=True)
        trainer.step()
        if trainer.is_engine:
            trainer.backward(second)
            trainer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_over_a_forward_of_the_step_before_is_said_once(
    world: World, stage: int
) -> None:
    for outcome in world.run(run, a_step_between, Options(stage, steps=2), "zero3_retain"):
        (said,) = [outcome.error] if stage == 3 else outcome.said
        assert "backward over a forward from before engine.step()" in said


def a_skipped_step_between(trainer: Any) -> None:
    """The first of two losses over one forward overflows, and is left out."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        if trainer.is_engine:
            trainer.backward(first * float("inf"), retain_graph=True)
            trainer.step()
        trainer.backward(second)
        trainer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_overflow_skips_leaves_the_forward_as_it_was(world: World, stage: int) -> None:
    check(world, a_skipped_step_between, Options(stage, **FP16), "zero3_retain")
