"""Refusals of a block and of no_sync(), and what they leave when the patch goes."""

from contextlib import nullcontext
from typing import Any

import pytest

from ds_patches.core.errors import Misused, NotCovered, Refused
from tests.harness import BF16, BF16_SUMS, STAGES, applied, engine_of, leftovers, on_ranks, stock
from tests.harness.models import loss_of


def enter(context: Any) -> None:
    with context:
        pass


@on_ranks
@pytest.mark.core_case(stage=2)
@STAGES
def test_inside_a_block_and_no_sync(stage: int) -> None:
    """In words that are upstream's too: programs look for them."""
    with applied("coalesce"):
        engine = engine_of(stage=stage)
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine, 0))
            with pytest.raises(Misused, match=r"engine\.step\(\) inside .*no_sync"):
                engine.step()
            with pytest.raises(Misused, match="nested inside another of"):
                enter(engine.coalesce_grad_reduction())
            with pytest.raises((Misused, AssertionError), match="" if stage == 1 else "nested"):
                enter(engine.no_sync())
        engine.step()
        with engine.no_sync():
            engine.backward(loss_of(engine, 0))
            with pytest.raises(Misused, match="nested inside another no_sync context"):
                enter(engine.coalesce_grad_reduction())
            with pytest.raises((Misused, AssertionError), match="reentry"):
                enter(engine.no_sync())
            with pytest.raises((Misused, AssertionError), match=r"step.* inside .*no_sync context"):
                engine.step()
        if stage > 1:
            with pytest.raises(Refused, match="no backward has reduced"):
                engine.step()


UNMANAGED = {"settings": {"managed_gradient_accumulation": False}}
SINCE_0_19_4 = stock.since("0.19.4", "managed_gradient_accumulation")


@on_ranks
@pytest.mark.core_case(kind="")
@pytest.mark.parametrize(
    ("stage", "more", "kind", "says"),
    [
        (0, {}, "", "requires ZeRO stage 1/2/3; this engine has stage 0"),
        (1, BF16_SUMS, "", "does not cover the optimizer wrapper"),
        (0, BF16, "", "requires ZeRO stage"),
        pytest.param(2, UNMANAGED, "", "managed_gradient_acc", marks=SINCE_0_19_4),
        # These cannot be built on a CPU: the guard goes by what an engine is.
        *((2, {}, kind, "") for kind in ("pipeline_parallelism", "zenflow", "SuperOffload")),
    ],
    ids=str,
)
def test_engines_that_are_not_covered(
    stage: int, more: dict[str, Any], kind: str, says: str
) -> None:
    with applied("coalesce"):
        engine = engine_of(stage=stage, **more)
        if kind == "SuperOffload":
            engine.optimizer.__class__ = type(kind, (type(engine.optimizer),), {})
        elif kind:
            setattr(engine, kind, True)
        with pytest.raises(Misused if "managed" in says else NotCovered, match=says):
            enter(engine.coalesce_grad_reduction())
        stocks = pytest.raises(AssertionError, match="incompatible") if kind else nullcontext()
        with stocks:
            enter(engine.no_sync())


@on_ranks
@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_taken_back_while_gradients_wait_it_leaves_nothing(stage: int) -> None:
    engine = engine_of(stage=stage)  # before the patch is applied
    with applied("coalesce"), engine.no_sync():
        engine.backward(loss_of(engine, 0))
        assert leftovers.of_patches(engine)
    assert not leftovers.of_patches(engine)
