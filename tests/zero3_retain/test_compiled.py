"""Engines whose modules Dynamo compiles: the boundaries are traced as stock's Functions are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.training import stock
from tests.training.options import Options
from tests.training.run import run
from tests.training.trainers import EngineTrainer
from tests.world import World
from tests.zero3_retain.test_gradients import several_backwards


class CompiledBlocks(EngineTrainer):
    def __init__(self, engine: Any, *arguments: Any) -> None:
        for block in engine.module.blocks:
            block.compile(backend="eager")
        super().__init__(engine, *arguments)


def train_compiled(patch: bool, backwards: int) -> tuple[float, dict[str, int]]:
    """Difference to PyTorch, and how often Dynamo compiled and broke a graph."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    script = partial(several_backwards, backwards=backwards)
    outcome = run(script, Options(), *(["zero3_retain"] if patch else []), engine=CompiledBlocks)
    assert not outcome.error, outcome.error
    compiled = {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }
    return outcome.difference, compiled


@pytest.fixture(scope="module")
def without(world: World) -> list[tuple[float, dict[str, int]]]:
    return world.within(300).run(train_compiled, False, 1)


@pytest.mark.exhaustive
@pytest.mark.skipif(not stock.TORCH_STYLE, reason="tried on 0.18.3 and later only")
@pytest.mark.parametrize("backwards", [1, 2])
def test_compiled_blocks(
    world: World, without: list[tuple[float, dict[str, int]]], backwards: int
) -> None:
    for (_, before), (difference, after) in zip(
        without, world.within(300).run(train_compiled, True, backwards), strict=True
    ):
        assert difference <= 1e-6
        assert after["graphs"] <= before["graphs"]
        assert after["breaks"] <= before["breaks"]
        assert before["graphs"] > 0
