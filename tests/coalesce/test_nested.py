"""Backwards in each other, as cached losses have them: the outer one ends with one reduction."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from tests.coalesce.loops import UPSTREAM
from tests.scripts import nested
from tests.training.models import Boom, RaiseInBackward
from tests.training.options import OFFLOADED, OVERLAP, Options
from tests.training.run import check
from tests.world import World

STAGES = [1, 2, 3]


@pytest.mark.core_case(script=nested.cached, more={})
@pytest.mark.core_case(script=nested.cached_in_a_window, more={}, stage=2)
@pytest.mark.parametrize(
    "script",
    [
        nested.cached,
        nested.cached_in_a_window,
        nested.cached_in_no_sync,
        nested.cached_after_another,
    ],
)
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        *((stage, more) for stage in STAGES for more in ({}, OFFLOADED)),
        *((stage, more) for stage in (1, 2) for more in (UPSTREAM, OVERLAP)),
    ],
    ids=str,
)
def test_cached_losses(world: World, stage: int, script: Any, more: dict[str, Any]) -> None:
    if stage == 1 and script is nested.cached_in_no_sync:
        pytest.skip("stock's own leaves gradients on their parameters anyway")
    check(world, script, Options(stage, **more), "coalesce")


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="what came before is in the reduce buckets already"
)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_outer_loss_with_gradients_of_its_own(world: World, stage: int) -> None:
    check(world, nested.cached_beside_one_of_its_own, Options(stage), "coalesce")


def fail_and_go_on(trainer: Any, in_block: bool) -> None:
    """Step 1 of 3 is tried, its second nested backward raises, and it is done again."""
    block = trainer.window if in_block else nullcontext
    for step in trainer.steps():
        if step == 1 and trainer.is_engine:
            with pytest.raises(Boom), block():
                trainer.backward(nested.cached_loss(trainer, step, failing=1))
            RaiseInBackward.armed = False
            trainer.leaves_nothing()
        with block():
            trainer.backward(nested.cached_loss(trainer, step))
        trainer.step()


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("in_block", [False, True], ids=["", "block"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_nested_backward_that_raises(world: World, stage: int, in_block: bool) -> None:
    script = partial(fail_and_go_on, in_block=in_block)
    options = Options(stage, model="Fragile")
    for outcome in check(world, script, options, "coalesce", quiet=False):
        assert sum("A backward raised" in text for text in outcome.said) == 1
        assert sum("gradients were dropped" in text for text in outcome.said) == in_block
