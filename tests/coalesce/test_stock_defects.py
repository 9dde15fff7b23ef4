"""What is wrong without the patch, shown on stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.coalesce import cases, releases
from tests.coalesce.test_failure import Breakable, window_that_raises
from tests.world import World
from tests.zero3_retain import models, trainers
from tests.zero3_retain.test_failure import Boom


def has_method() -> bool:
    from deepspeed.runtime.engine import DeepSpeedEngine

    return hasattr(DeepSpeedEngine, "coalesce_grad_reduction")


@pytest.mark.core_case
def test_the_method_is_missing_before_0_19_1(world: World) -> None:
    assert world.run(has_method) == [releases.NATIVE] * 2


def reduced_by_native_after_an_exception(stage: int, patch: bool) -> bool:
    """Whether a window that raised left reduced gradients for the next step."""
    from contextlib import nullcontext

    with cases.patched() if patch else nullcontext():
        start = models.build(Breakable)
        trainer = cases.EngineTrainer(trainers.build_engine(start, trainers.config(stage)))
        with pytest.raises(Boom):
            window_that_raises(trainer, "between", 0)
        averaged: dict[int, Any] = trainer.engine.optimizer.averaged_gradients
        return any(gradient is not None for gradient in averaged.values())


@pytest.mark.core_case(stage=2)
@pytest.mark.skipif(not releases.NATIVE, reason="coalesce_grad_reduction came with 0.19.1")
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_native_reduces_half_a_window_after_an_exception(
    world: World, stage: int, patch: bool
) -> None:
    assert world.run(reduced_by_native_after_an_exception, stage, patch) == [not patch] * 2


def plain_backwards(stage: int, settings: dict[str, Any]) -> cases.Outcome:
    """Several backwards per step, no window and no boundary set."""

    class NoWindow(cases.BoundaryTrainer):
        backward = trainers.EngineTrainer.backward

    start = models.build(models.TwoHeads)
    script = cases.several_backwards
    return cases.run(script, start, stage, patch=False, trainer_class=NoWindow, settings=settings)


@pytest.mark.parametrize("stage", [1, 2])
def test_stock_drops_all_but_the_last_backward_with_an_offloaded_optimizer(
    world: World, stage: int
) -> None:
    settings = {"zero": {"offload_optimizer": {"device": "cpu"}}}
    for result in world.run(plain_backwards, stage, settings):
        assert not result.error
        assert result.difference > 1e-2


def non_contiguous(stage: int) -> cases.Outcome:
    class NoWindow(cases.BoundaryTrainer):
        backward = trainers.EngineTrainer.backward

    def one_backward(trainer: Any) -> None:
        cases.several_backwards(trainer, backwards=1)

    settings = {"zero": {"contiguous_gradients": False}}
    start = models.build(models.TwoHeads)
    return cases.run(
        one_backward, start, stage, patch=False, trainer_class=NoWindow, settings=settings
    )


@pytest.mark.core_case
@pytest.mark.skipif(not releases.NON_CONTIGUOUS_IS_WRONG, reason="mended in 0.19.8")
@pytest.mark.parametrize("stage", [1, 2])
def test_stock_reduces_nothing_on_cpu_without_contiguous_gradients(
    world: World, stage: int
) -> None:
    for result in world.run(non_contiguous, stage):
        assert not result.error
        assert result.difference > 1e-3


def one_backward_in_bfloat16() -> cases.Outcome:
    class NoWindow(cases.BoundaryTrainer):
        backward = trainers.EngineTrainer.backward

    def one_backward(trainer: Any) -> None:
        cases.several_backwards(trainer, backwards=1)

    settings = {
        "zero": {"offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    start = models.build(models.TwoHeads, torch.bfloat16)
    return cases.run(one_backward, start, 1, patch=False, trainer_class=NoWindow, settings=settings)


def test_stock_steps_with_sums_that_only_one_rank_has(world: World) -> None:
    """Stage 1, fp32 sums of a low precision model, an offloaded optimizer."""
    for result in world.run(one_backward_in_bfloat16):
        assert not result.error
        assert result.equal("bfloat16") != releases.STEPS_WITH_LOCAL_SUMS, result
