"""What is wrong without the patch, shown on stock."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.coalesce.test_failure import window_that_raises
from tests.scripts import accumulating, ordinary
from tests.training import stock
from tests.training.models import Boom
from tests.training.options import BF16_SUMS, OFFLOADED, Options
from tests.training.run import applied, run
from tests.training.trainers import engine_trainer
from tests.world import World


def has_method() -> bool:
    from deepspeed.runtime.engine import DeepSpeedEngine

    return hasattr(DeepSpeedEngine, "coalesce_grad_reduction")


@pytest.mark.core_case
def test_the_method_is_missing_before_0_19_1(world: World) -> None:
    assert world.run(has_method) == [stock.NATIVE] * 2


def reduced_by_native_after_an_exception(stage: int, patch: bool) -> bool:
    """Whether a window that raised left reduced gradients for the next step."""
    with applied("coalesce") if patch else nullcontext():
        trainer = engine_trainer("Breakable", stage=stage)
        with pytest.raises(Boom):
            window_that_raises(trainer, "between", 0)
        averaged: dict[int, Any] = trainer.engine.optimizer.averaged_gradients
        return any(gradient is not None for gradient in averaged.values())


@pytest.mark.core_case(stage=2)
@pytest.mark.skipif(not stock.NATIVE, reason="coalesce_grad_reduction came with 0.19.1")
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_native_reduces_half_a_window_after_an_exception(
    world: World, stage: int, patch: bool
) -> None:
    assert world.run(reduced_by_native_after_an_exception, stage, patch) == [not patch] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_stock_drops_all_but_the_last_backward_with_an_offloaded_optimizer(
    world: World, stage: int
) -> None:
    script = accumulating.two_forwards_offloaded
    for outcome in world.run(run, script, Options(stage, **OFFLOADED)):
        assert not outcome.error
        assert outcome.difference > 1e-2


@pytest.mark.core_case
@pytest.mark.skipif(not stock.NON_CONTIGUOUS_IS_WRONG, reason="mended in 0.19.8")
@pytest.mark.parametrize("stage", [1, 2])
def test_stock_reduces_nothing_on_cpu_without_contiguous_gradients(
    world: World, stage: int
) -> None:
    options = Options(stage, zero={"contiguous_gradients": False})
    for outcome in world.run(run, ordinary.one_backward, options):
        assert not outcome.error
        assert outcome.difference > 1e-3


def test_stock_steps_with_sums_that_only_one_rank_has(world: World) -> None:
    """Stage 1, fp32 sums of a low precision model, an offloaded optimizer."""
    options = Options(1, **OFFLOADED, **BF16_SUMS)
    for outcome in world.run(run, ordinary.one_backward, options):
        assert not outcome.error
        assert outcome.equal != stock.STEPS_WITH_LOCAL_SUMS, outcome
