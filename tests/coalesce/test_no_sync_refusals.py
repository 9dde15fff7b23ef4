"""What `no_sync()` refuses, what is left to stock, and what an exception in it leaves behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.coalesce.test_guards import caught_by, one_backward
from tests.listening import listening
from tests.training import stock
from tests.training.models import Boom, RaiseInBackward, loss_of
from tests.training.options import BF16_SUMS, Options
from tests.training.run import applied, check
from tests.training.trainers import engine_of, gathered
from tests.world import World

STAGES = [1, 2, 3]
REFUSING = [2, 3]  # stock
STOCKS = "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage"


def refusals(stage: int) -> dict[str, str]:
    with applied("coalesce"):
        engine = engine_of(stage=stage)
        found = {}
        with engine.no_sync():
            one_backward(engine)
            found["step inside"] = caught_by(engine.step)
            found["again"] = caught_by(engine.no_sync)
        found["unsynced step"] = caught_by(engine.step)
        one_backward(engine)
        found["step"] = caught_by(engine.step)
        return found


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", REFUSING)
def test_refusals(world: World, stage: int) -> None:
    """In words that stock has for them too, where it has any."""
    for found in world.run(refusals, stage):
        assert found.pop("step") == "no error"
        assert "no backward has reduced" in found.pop("unsynced step")
        assert all(text.startswith("AssertionError") for text in found.values()), found
        assert "engine.step() inside no_sync context manager" in found["step inside"]
        assert "not re-entrant" in found["again"]


# --- Left to stock -------------------------------------------------------------------------------


def left_to_stock(**options: Any) -> tuple[str, list[str]]:
    with applied("coalesce"), listening() as heard:
        return caught_by(engine_of(**options).no_sync), heard


@pytest.mark.parametrize(("stage", "more"), [(1, BF16_SUMS), (0, {})], ids=str)
def test_engines_that_are_not_covered(world: World, stage: int, more: dict[str, Any]) -> None:
    for found in world.run(left_to_stock, stage=stage, **more):
        assert found == ("no error", [])


def refused(stage: int, by: str) -> str:
    if by == "stock":
        return caught_by(engine_of(stage=stage).no_sync)
    with applied("coalesce"):
        engine = engine_of(stage=stage)
        engine.pipeline_parallelism = True
        return caught_by(engine.no_sync)


@pytest.mark.core_case(stage=2, by="stock")
@pytest.mark.parametrize("by", ["stock", "kind of engine"])
@pytest.mark.parametrize("stage", REFUSING)
def test_stock_refuses(world: World, stage: int, by: str) -> None:
    """And a patch that leaves it to stock."""
    for text in world.run(refused, stage, by):
        assert STOCKS in text


# --- Exceptions ----------------------------------------------------------------------------------


def backwards_that_raise(trainer: Any, place: str) -> None:
    with trainer.no_sync():
        trainer.backward(loss_of(trainer, 1, 0))
        RaiseInBackward.armed = place == "backward"
        try:
            trainer.backward(loss_of(trainer, 1, 1))
        finally:
            RaiseInBackward.armed = False
        raise Boom("in user code")


def fail_in_no_sync(trainer: Any, place: str, zero: bool) -> None:
    """Step 1 raises in its second backward without sync, or behind it.

    What has come until then stays as it does in DistributedDataParallel, unless a backward raised:
    then all of the step is dropped.
    """
    for step in trainer.steps():
        if step == 1:
            trainer.backward(loss_of(trainer, step, 4))
            if trainer.is_engine:
                with pytest.raises(Boom):
                    backwards_that_raise(trainer, place)
                if place == "backward":
                    trainer.leaves_nothing()
                elif place == "user" and stock.TORCH_STYLE:
                    # Older releases leave an embedding gathered between a backward and the step.
                    assert not gathered(trainer.engine, entitled=False)
            elif place == "user":
                trainer.backward(loss_of(trainer, step, 0))
                trainer.backward(loss_of(trainer, step, 1))
            else:
                trainer.zero_grad()
            if zero:
                trainer.zero_grad()
        with trainer.no_sync():
            trainer.backward(loss_of(trainer, step, 2))
        trainer.backward(loss_of(trainer, step, 3))
        trainer.step()


@pytest.mark.core_case(place="backward", stage=3)
@pytest.mark.parametrize(("place", "zero"), [("user", False), ("user", True), ("backward", False)])
@pytest.mark.parametrize("stage", STAGES)
def test_what_an_exception_leaves(world: World, stage: int, place: str, zero: bool) -> None:
    script = partial(fail_in_no_sync, place=place, zero=zero)
    options = Options(stage, model="Fragile")
    for outcome in check(world, script, options, "coalesce", quiet=False):
        dropped = "every gradient reduced since the last optimizer step was dropped"
        assert sum(dropped in text for text in outcome.said) == (place == "backward")
