"""Frozen parameters under checkpoint(): what a recomputation sees, and what it leaves gathered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.scripts import adapters
from tests.scripts.worlds import FRUGAL
from tests.training import stock
from tests.training.models import build
from tests.training.options import SMALL_PREFETCH
from tests.training.run import Outcome, applied, check, measure, run
from tests.world import World

#: Reentrant recomputation holds all that is frozen.
HOLDS_FROZEN = not stock.LOSES_FROZEN


@pytest.mark.core_case(settings=FRUGAL)
@pytest.mark.parametrize("settings", [FRUGAL, SMALL_PREFETCH, {}], ids=str)
def test_a_recomputation_sees_what_the_forward_saw(world: World, settings: dict[str, Any]) -> None:
    script = adapters.low_rank_recomputed
    options = script.at(3, steps=3, zero=settings)
    for one in world.run(run, script, options):
        assert ("Recomputed values for" in one.error) == stock.LOSES_FROZEN, one
    check(world, script, options, "zero3_retain")


def looked_at(patches: tuple[str, ...], model: str, settings: dict[str, Any]) -> Outcome:
    options = replace(adapters.low_rank.at(3, steps=3), model=model, zero=settings)
    around_engine = applied(*patches) if patches else None
    return measure(adapters.low_rank, options, around_engine, looks=["memory"], strict=False)


def elements_of_a_block(model: str) -> int:
    """And of what is in use beside it: the embedding, which is the largest."""
    built: Any = build(model)
    return sum(p.numel() for part in (built.blocks[0], built.embed) for p in part.parameters())


@pytest.mark.core_case(model="DeepReentrantAdapted")
@pytest.mark.parametrize(
    "model", [pytest.param("DeepAdapted", marks=pytest.mark.exhaustive), "DeepReentrantAdapted"]
)
def test_one_block_is_gathered_at_a_time(world: World, model: str) -> None:
    for one in world.run(looked_at, (), model, FRUGAL):
        if HOLDS_FROZEN and model == "DeepReentrantAdapted":
            assert max(one.peaks) > 3 * elements_of_a_block(model), "stock is right"
    for one in world.run(looked_at, ("zero3_retain",), model, FRUGAL):
        assert one.equal, one
        assert max(one.peaks) <= elements_of_a_block(model)
        assert not any(one.available)


@pytest.mark.core_case
def test_a_module_may_hand_out_what_another_has(world: World) -> None:
    """As PEFT's ``modules_to_save``: stock takes the other's counters for its own."""
    options = adapters.modules_to_save.at(3, steps=3)
    for one in world.run(run, adapters.modules_to_save, options):
        assert ("has no attribute 'ds_grads_remaining'" in one.error) == stock.TAKES_COUNTERS, one
    check(world, adapters.modules_to_save, options, "zero3_retain")
