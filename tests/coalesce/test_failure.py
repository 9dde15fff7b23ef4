"""A block that raises reduces nothing, and the next step is as if it had not been."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ds_patches import OtherRankFailed
from tests.coalesce.loops import UPSTREAM
from tests.coalesce.test_blocks import BothWays
from tests.listening import listening
from tests.scripts.slopes import slope_and_losses
from tests.training import stock
from tests.training.models import Boom, RaiseInBackward, RaiseInForward, loss_of
from tests.training.options import OFFLOADED, Options
from tests.training.run import applied, check
from tests.training.trainers import engine_of, engine_trainer
from tests.world import World

PLACES = ["forward", "first backward", "middle backward", "last backward", "between", "after"]
STAGES = [1, 2, 3]
#: Here a device may be out of memory, when parameters are in flight already.
GATHER = "deepspeed.runtime.zero.partition_parameters._dist_allgather_fn"


def block_that_raises(trainer: Any, place: str, step: int) -> None:
    """Three backwards; raises Boom at `place`."""
    failing = {"first backward": 0, "middle backward": 1, "last backward": 2}.get(place)
    try:
        with trainer.window():
            for index in range(3):
                RaiseInForward.armed = place == "forward" and index == 1
                RaiseInBackward.armed = index == failing
                with contextlib.ExitStack() as gather:
                    if place == "gather" and index == 0:
                        gather.enter_context(mock.patch(GATHER, side_effect=Boom))
                    trainer.backward(loss_of(trainer, step, index))
                if place == "between" and index == 1:
                    raise Boom("in user code")
            if place == "after":
                raise Boom("in user code")
    finally:
        RaiseInForward.armed = RaiseInBackward.armed = False


def fail_and_go_on(trainer: Any, place: str, failing: tuple[int, ...]) -> None:
    """Steps 1 and 2 of 4 are tried, fail, and are done again; the reference meets no failure."""
    for step in trainer.steps():
        if trainer.is_engine and step in (1, 2):
            here = dist.get_rank() in failing
            with pytest.raises(Boom if here else OtherRankFailed) as caught:
                block_that_raises(trainer, place if here else "", step)
            if not here:
                assert "rank 1 raised Boom" in str(caught.value)
            assert trainer.engine.inside_no_sync_ctxt is False
            assert all(p.grad is None for p in trainer.engine.module.parameters())
            trainer.leaves_nothing()
        with trainer.window():
            for index in range(2):
                trainer.backward(loss_of(trainer, step, index))
        trainer.step()


def on_two_hosts(trainer: Any, place: str, failing: tuple[int, ...]) -> None:
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}):
        fail_and_go_on(trainer, place, failing)


def all_gathered(trainer: Any, place: str, failing: tuple[int, ...] = (1,)) -> None:
    """The others gather nothing on their way to the end, so they get there and hear of it."""
    trainer.window = partial(trainer.window, gather_once=True)
    fail_and_go_on(trainer, place, failing)


ALL_RANKS, ONE_RANK = (0, 1), (1,)
MIDDLE = "middle backward"


@pytest.mark.core_case(script=fail_and_go_on, failing=ALL_RANKS, place=MIDDLE, more={})
@pytest.mark.core_case(script=fail_and_go_on, failing=ONE_RANK, place=MIDDLE, stage=2)
@pytest.mark.core_case(script=all_gathered, place=MIDDLE)
@pytest.mark.core_case(place="gather")
@pytest.mark.parametrize(
    ("script", "stage", "failing", "place", "more"),
    [
        *((fail_and_go_on, stage, ALL_RANKS, p, {}) for stage in STAGES for p in PLACES),
        *(
            (fail_and_go_on, stage, ALL_RANKS, place, {"style": "torch"})
            for stage in STAGES
            for place in PLACES[2:4]
        ),
        *(
            (fail_and_go_on, stage, ALL_RANKS, MIDDLE, more)
            for stage in STAGES
            for more in (OFFLOADED, UPSTREAM)
        ),
        *((fail_and_go_on, stage, ONE_RANK, p, {}) for stage in (1, 2) for p in PLACES),
        (on_two_hosts, 2, ONE_RANK, MIDDLE, {}),
        (fail_and_go_on, 3, ONE_RANK, "after", {}),  # its last gather
        (fail_and_go_on, 3, ALL_RANKS, "gather", {}),
        *((all_gathered, 3, ONE_RANK, place, {}) for place in PLACES),
    ],
)
def test_the_next_step_is_as_if_it_had_not_happened(
    world: World, script: Any, stage: int, failing: Any, place: str, more: dict[str, Any]
) -> None:
    options = Options(stage, model="Breakable", steps=4, **more)
    fails = partial(script, place=place, failing=failing)
    for outcome in check(world.within(60), fails, options, "coalesce", quiet=False):
        assert sum("gradients were dropped" in text for text in outcome.said) == 2


def alone_between_gathers() -> tuple[str, float]:
    """What a rank raises, and after how long, if rank 1 fails in the middle of a block."""
    from torch.distributed import distributed_c10d

    with applied("coalesce"), listening():
        trainer = engine_trainer("Breakable", stage=3)
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
        begin = time.monotonic()
        try:
            block_that_raises(trainer, "middle backward" if dist.get_rank() else "", 0)
        except Exception as error:
            return type(error).__name__, time.monotonic() - begin
        return "", 0.0


@pytest.mark.exhaustive
def test_at_stage_3_the_others_wait_no_longer_than_a_collective_does(fresh_world: World) -> None:
    """Each forward and backward gathers, and a gather that one rank does not come to times out."""
    (other, waited), (failing, _) = fresh_world.within(60).run(alone_between_gathers)
    assert failing == "Boom"
    assert other
    assert waited < 30


def flags_after_failure(stage: int) -> list[bool]:
    """What a block that raised leaves of what the user had set."""
    with applied("coalesce"), listening():
        options = Options(stage)
        trainer = BothWays(engine_of("Breakable", stage=stage), options)
        engine = trainer.engine
        found = []
        for boundary in (None, False, True):
            engine._is_gradient_accumulation_boundary = boundary
            with pytest.raises(Boom):
                block_that_raises(trainer, "middle backward", 0)
            found.append(engine._is_gradient_accumulation_boundary is boundary)
            found.append(engine.optimizer.micro_step_id == (0 if stage == 3 else -1))
        return found


@pytest.mark.parametrize("stage", STAGES)
def test_flags_are_restored(world: World, stage: int) -> None:
    for found in world.run(flags_after_failure, stage):
        assert all(found)


def caught_inside(stage: int, style: str, goes_on: bool) -> str:
    """The text that a block ends with when a backward's exception was caught in it."""
    with applied("coalesce"), listening():
        trainer = engine_trainer("Breakable", stage=stage, style=style)
        RaiseInBackward.armed = True
        try:
            with trainer.window():
                with contextlib.suppress(Boom):
                    trainer.backward(loss_of(trainer, 0))
                RaiseInBackward.armed = False
                if goes_on:
                    trainer.backward(loss_of(trainer, 0))
        except RuntimeError as error:
            return str(error)
        finally:
            RaiseInBackward.armed = False
        return "no error"


@pytest.mark.core_case(stage=3, goes_on=True)
@pytest.mark.parametrize("goes_on", [False, True], ids=["alone", "then another"])
@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_raised_spoils_its_block(
    world: World, stage: int, style: str, goes_on: bool
) -> None:
    stock.needs_style(style)
    for text in world.run(caught_inside, stage, style, goes_on):
        assert "a backward inside this coalesce_grad_reduction() raised" in text
        assert "let the exception leave the block" in text


def beside_other_gradients(trainer: Any) -> None:
    """A backward that reaches no parameter, as for a gradient penalty, is none of the block's."""
    for step in trainer.steps():
        with trainer.window():
            slope, first, second = slope_and_losses(trainer, step)
            trainer.backward(first * slope + second)
        trainer.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_other_tensors(world: World, stage: int) -> None:
    check(world, beside_other_gradients, Options(stage), "coalesce")


def two_engines_in_each_other() -> list[str]:
    """Rank 1 raises in the outer block, after the inner one has closed."""
    with applied("coalesce"), listening():
        engines = [engine_of("Breakable", stage=2) for _ in range(2)]
        errors = []
        for _ in range(3):
            try:
                with engines[0].coalesce_grad_reduction():
                    with engines[1].coalesce_grad_reduction():
                        engines[1].backward(loss_of(engines[1], 0))
                    if dist.get_rank() == 1:
                        raise Boom("outside the inner block")
            except RuntimeError as error:
                errors.append(str(error))
        return errors


def test_blocks_of_two_engines_do_not_take_each_others_word(world: World) -> None:
    first, second = world.within(60).run(two_engines_in_each_other)
    assert second == ["outside the inner block"] * 3
    assert len(first) == 3
    assert all("rank 1 raised Boom" in text for text in first)


def reduced_after_an_exception(stage: int, patch: bool) -> bool:
    """Whether a block that raised left reduced gradients for the next step."""
    with applied("coalesce") if patch else contextlib.nullcontext():
        trainer = engine_trainer("Breakable", stage=stage)
        with pytest.raises(Boom):
            block_that_raises(trainer, "between", 0)
        averaged: dict[int, Any] = trainer.engine.optimizer.averaged_gradients
        return any(gradient is not None for gradient in averaged.values())


@pytest.mark.core_case(stage=2)
@stock.since("0.19.1", "coalesce_grad_reduction")
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize("stage", STAGES)
def test_stocks_own_reduces_half_a_block(world: World, stage: int, patch: bool) -> None:
    assert world.run(reduced_after_an_exception, stage, patch) == [not patch] * 2
