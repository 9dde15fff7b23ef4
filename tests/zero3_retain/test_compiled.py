"""Engines whose modules Dynamo compiles: the boundaries are traced as stock's Functions are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.world import World
from tests.zero3_retain import models, releases, trainers
from tests.zero3_retain.cases import EXACT, one_forward_several_backwards, patched


def train_compiled(patch: bool, backwards: int) -> tuple[float, dict[str, int]]:
    """Difference to PyTorch, and how often Dynamo compiled and broke a graph."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    start = models.build(models.TwoHeads)

    def script(trainer: Any) -> None:
        one_forward_several_backwards(trainer, backwards=backwards)

    expected = trainers.plain(start, script)
    with patched() if patch else nullcontext():
        engine = trainers.build_engine(start, trainers.config(3))
        for block in engine.module.blocks:
            block.compile(backend="eager")
        trainer = trainers.EngineTrainer(engine)
        script(trainer)
        difference, _ = trainers.worst_difference(trainer.parameters(), expected)
    compiled = {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }
    return difference, compiled


@pytest.fixture(scope="module")
def stock(world: World) -> list[tuple[float, dict[str, int]]]:
    return world.within(300).run(train_compiled, False, 1)


@pytest.mark.exhaustive
@pytest.mark.skipif(not releases.TORCH_STYLE, reason="tried on 0.18.3 and later only")
@pytest.mark.parametrize("backwards", [1, 2])
def test_compiled_blocks(
    world: World, stock: list[tuple[float, dict[str, int]]], backwards: int
) -> None:
    for (_, before), (difference, after) in zip(
        stock, world.within(300).run(train_compiled, True, backwards), strict=True
    ):
        assert difference <= EXACT
        assert after["graphs"] <= before["graphs"]
        assert after["breaks"] <= before["breaks"]
        assert before["graphs"] > 0
