"""A block that raises reduces nothing, and the next step is as if it had not been."""

import contextlib
from functools import partial
from typing import Any
from unittest import mock

import pytest

from ds_patches.core.errors import Refused
from ds_patches.steps import graph_task
from tests.coalesce.test_blocks import BothWays
from tests.harness import STAGES, Case, World, applied, cases, listening, of, on_ranks, stock
from tests.harness.models import Boom, RaiseInBackward, RaiseInForward, loss_of
from tests.harness.options import ALL_REDUCED, OFFLOADED, Options
from tests.harness.trainers import engine_of, engine_trainer
from tests.scripts.nested import cached_loss

MIDDLE = "middle backward"
OTHERS = ["forward", "first backward", "last backward", "between", "after"]
#: Here a device may be out of memory, when parameters are in flight already.
GATHER = "deepspeed.runtime.zero.partition_parameters._dist_allgather_fn"


def block_that_raises(trainer: Any, place: str, step: int) -> None:
    """Three backwards; raises Boom at `place`."""
    failing = {"first backward": 0, "middle backward": 1, "last backward": 2}.get(place)
    try:
        with trainer.window():
            trainer.boundary(True)
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


def fail_and_go_on(trainer: Any, step: int, place: str) -> None:
    """Steps 1 and 2 of 4 are tried, fail, and are done again; the reference meets no failure."""
    if trainer.is_engine and step in (1, 2):
        with pytest.raises(Boom):
            block_that_raises(trainer, place, step)
        assert trainer.engine.inside_no_sync_ctxt is False
        assert trainer.engine._is_gradient_accumulation_boundary is None
        assert all(p.grad is None for p in trainer.engine.module.parameters())
        trainer.leaves_nothing()
    with trainer.window():
        for index in range(2):
            trainer.backward(loss_of(trainer, step, index))


def held_by_a_thread(trainer: Any, place: str) -> None:
    """As by a device's, which lets go of a backward that raised when it has other work."""
    held: list[Any] = []
    queue = graph_task.at_end_of_task
    trainer.leaves_nothing = held.clear
    with mock.patch.object(
        graph_task, "at_end_of_task", lambda end: (held.append(end), queue(end))
    ):
        trainer.train(fail_and_go_on, place=place)


def fails(script: Any, place: str, *stages: int, **options: Any) -> list[Any]:
    wanted = partial(script, place=place)
    return of("coalesce", wanted, *stages, model="Breakable", steps=4, **options)


@cases(
    fails(fail_and_go_on, MIDDLE, 1, 2, 3, core={1, 2, 3}),
    *(
        fails(fail_and_go_on, MIDDLE, 1, 2, 3, **more)
        for more in ({"style": "torch"}, OFFLOADED, ALL_REDUCED)
    ),
    *(fails(fail_and_go_on, place, 1, 2, 3) for place in OTHERS),
    fails(held_by_a_thread, MIDDLE, 1, 2, 3, style="torch", core={2}),
    fails(fail_and_go_on, "gather", 3, core={3}),
)
def test_the_next_step_is_as_if_it_had_not_happened(world: World, case: Case) -> None:
    for outcome in case.check(world.within(60), says=None):
        assert sum("gradients were dropped" in text for text in outcome.said) == 2


def nested_one_fails(trainer: Any, step: int, in_block: bool) -> None:
    """Step 1 of 3 is tried, its second nested backward raises, and it is done again."""
    block = trainer.window if in_block else contextlib.nullcontext
    if step == 1 and trainer.is_engine:
        with pytest.raises(Boom), block():
            trainer.backward(cached_loss(trainer, step, failing=1))
        RaiseInBackward.armed = False
        trainer.leaves_nothing()
    with block():
        trainer.backward(cached_loss(trainer, step))


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("in_block", [False, True], ids=["", "block"])
@STAGES
def test_a_nested_backward_that_raises(world: World, stage: int, in_block: bool) -> None:
    script = partial(nested_one_fails, in_block=in_block)
    case = Case(script, Options(stage, model="Fragile"), ("coalesce",))
    case.check(world, says=["A backward raised", *["gradients were dropped"] * in_block])


@pytest.mark.core_case(stage=3, goes_on=True)
@pytest.mark.parametrize("goes_on", [False, True], ids=["alone", "then another"])
@pytest.mark.parametrize("style", stock.STYLES)
@STAGES
@on_ranks
def test_a_backward_that_raised_spoils_its_block(stage: int, style: str, goes_on: bool) -> None:
    """Where its exception was caught in the block."""
    with applied("coalesce"), listening():
        trainer = engine_trainer("Breakable", stage=stage, style=style)

        def block() -> None:
            with trainer.window():
                RaiseInBackward.armed = True
                with contextlib.suppress(Boom):
                    trainer.backward(loss_of(trainer, 0))
                RaiseInBackward.armed = False
                if goes_on:
                    trainer.backward(loss_of(trainer, 0))

        with pytest.raises(Refused, match=r"a backward inside this .* raised"):
            block()


@on_ranks
@STAGES
def test_flags_are_restored(stage: int) -> None:
    """A block that raised restores the flags that the user had set."""
    with applied("coalesce"), listening():
        trainer = BothWays(engine_of("Breakable", stage=stage), Options(stage))
        engine = trainer.engine
        for boundary in (None, False, True):
            engine._is_gradient_accumulation_boundary = boundary
            with pytest.raises(Boom):
                block_that_raises(trainer, MIDDLE, 0)
            assert engine._is_gradient_accumulation_boundary is boundary
            assert engine.optimizer.micro_step_id == (0 if stage == 3 else -1)
