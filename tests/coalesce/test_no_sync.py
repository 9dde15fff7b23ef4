"""`no_sync()` at ZeRO 2 and 3 is DistributedDataParallel's, as stock's is at ZeRO 1."""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tests.harness import STAGES, World, check, checked, gathered, of, run, stock
from tests.harness.models import Boom, RaiseInBackward, loss_of
from tests.harness.options import ALL_REDUCED, BF16, BF16_SUMS, FP16, OFFLOADED, OVERLAP, Options
from tests.scripts import unsynced

coalesce = partial(of, "coalesce")
SINCE_0_18_3 = stock.since("0.18.3", "at stage 1 a division of stock's own in no_sync()")
PLAIN, MICRO_STEPS = unsynced.unsynced, unsynced.unsynced_among_micro_steps
DROPPED = unsynced.beside_windows, unsynced.unsynced_and_uneven, unsynced.unsynced_and_dropped


test_the_next_synced_backward_reduces_the_sum = checked(
    coalesce(PLAIN, 1, 2, 3, core={1, 2, 3}),
    coalesce(PLAIN, 2, 3, **OVERLAP),  # stock's at stage 1 dies
    *(
        coalesce(script, 1, 2, 3, **more)
        for script in (PLAIN, unsynced.synced_in_between)
        for more in (BF16, BF16 | OFFLOADED, BF16_SUMS | OFFLOADED, FP16, {"style": "torch"})
    ),
    *(
        coalesce(PLAIN, 1, 2, 3, model=model)
        for model in ("FrozenTrunk", "SharedBlock", "Reentrant", "LeafModule")
    ),
    *(coalesce(unsynced.synced_in_between, 2, 3, core={2, 3}, **m) for m in ({}, OFFLOADED)),
    *(coalesce(unsynced.stepping_inside, 2, 3, core={2}, steps=4, **m) for m in ({}, OFFLOADED)),
    coalesce(MICRO_STEPS, 1, core={1}, marks=[SINCE_0_18_3]),
    *(coalesce(MICRO_STEPS, 2, 3, **more) for more in ({}, OFFLOADED)),
    coalesce(unsynced.unlike_numbers_unsynced, 1, 2),  # at stage 3 a forward is a collective
    *(coalesce(script, 1, 2, 3, steps=4) for script in DROPPED),
    *(coalesce(script, 2, 3, steps=4, **m) for script in DROPPED for m in (OFFLOADED, ALL_REDUCED)),
    *(
        of("coalesce zero3_retain", unsynced.unsynced_over_one_forward, 1, 2, 3, **m)
        for m in ({}, OFFLOADED)
    ),
)


@pytest.mark.skipif(stock.TORCH_STYLE, reason="0.18.3 and later divide in it, too")
@pytest.mark.core_case
def test_what_stage_1_does_not_divide_is_said(world: World) -> None:
    script = unsynced.unsynced_among_micro_steps
    for outcome in world.run(run, script, script.at(1), "coalesce"):
        assert "not divided by gradient_accumulation_steps" in outcome.said[0]


def fail_in_no_sync(trainer: Any, step: int, place: str, zero: bool) -> None:
    """Step 1 raises in its second backward without sync, or behind it.

    What has come until then stays as it does in DistributedDataParallel, unless a backward raised:
    then all of the step is dropped.
    """
    if step == 1:
        trainer.backward(loss_of(trainer, step, 4))
        if trainer.is_engine:
            with suppress(Boom), trainer.no_sync():
                trainer.backward(loss_of(trainer, 1, 0))
                RaiseInBackward.armed = place == "backward"
                trainer.backward(loss_of(trainer, 1, 1))
                raise Boom("in user code")
            RaiseInBackward.armed = False
            if place == "backward":
                trainer.leaves_nothing()
            elif stock.TORCH_STYLE:
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


@pytest.mark.core_case(place="backward", stage=3)
@pytest.mark.parametrize(("place", "zero"), [("user", False), ("user", True), ("backward", False)])
@STAGES
def test_what_an_exception_leaves(world: World, stage: int, place: str, zero: bool) -> None:
    script = partial(fail_in_no_sync, place=place, zero=zero)
    options = Options(stage, model="Fragile")
    for outcome in check(world, script, options, "coalesce", quiet=False):
        dropped = "every gradient reduced since the last optimizer step was dropped"
        assert sum(dropped in text for text in outcome.said) == (place == "backward")
