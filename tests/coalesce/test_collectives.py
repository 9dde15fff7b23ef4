"""A step costs one reduction, however many backwards its block has, or its no_sync()."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.coalesce.loops import UPSTREAM, several_backwards
from tests.scripts import nested, unsynced
from tests.training.collectives import Gradients
from tests.training.options import OFFLOADED, OVERLAP
from tests.training.run import applied
from tests.training.trainers import engine_trainer
from tests.world import World


def in_a_block(trainer: Any, backwards: int) -> None:
    several_backwards(trainer, backwards=backwards)


def reductions(loop: Any, stage: int, backwards: int, more: dict[str, Any]) -> Counter[str]:
    """Of three steps."""
    if loop is unsynced.stepped_inside:
        more = more | {"micro_steps": backwards}
    with applied("coalesce"):
        trainer = engine_trainer(stage=stage, **more)
        with Gradients() as sent:
            loop(trainer, backwards)
    return Counter({name: count for name, count in sent.seen.items() if "reduce" in name})


@pytest.mark.core_case(loop=in_a_block, more={}, stage=3)
@pytest.mark.core_case(loop=unsynced.all_but_the_last, stage=2)
@pytest.mark.core_case(loop=nested.in_parts, stage=2)
@pytest.mark.parametrize(
    ("loop", "more"),
    [
        *((in_a_block, more) for more in ({}, OFFLOADED, OVERLAP, UPSTREAM)),
        (unsynced.all_but_the_last, {}),
        (unsynced.stepped_inside, {}),
        (nested.in_parts, {}),
        (nested.in_parts_of_a_window, {}),
    ],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_costs_one_reduction(
    world: World, stage: int, loop: Any, more: dict[str, Any]
) -> None:
    if stage == 1 and loop is unsynced.stepped_inside:
        pytest.skip("stock's own refuses engine.step() inside")
    stocks = stage == 1 and loop is unsynced.all_but_the_last
    few, many, block = (
        world.run(reductions, one, stage, backwards, more)
        for one, backwards in ((loop, 2), (loop, 8), (in_a_block, 2))
    )
    assert few == many
    assert few[0].total() > 0
    assert stocks or few == block, "as many as a block's"
