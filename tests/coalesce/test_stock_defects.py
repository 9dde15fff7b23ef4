"""What is wrong without the patch, shown on stock; of sums, tests/accumulation/ledger.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.coalesce.test_failure import window_that_raises
from tests.training import stock
from tests.training.models import Boom
from tests.training.run import applied
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
