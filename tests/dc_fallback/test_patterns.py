"""Whatever Dynamo skips, the engine trains as plain PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dc_fallback import patterns, stand_in
from tests.dc_fallback.loops import trains
from tests.world import World

NAMES = [
    # The import of transformers takes longer than all other patterns.
    pytest.param(name, marks=pytest.mark.exhaustive) if name == "QwenMoe" else name
    for name in (pattern.__name__ for pattern in patterns.ALL)
]


@pytest.mark.core_case
@pytest.mark.parametrize(
    "pattern", ["Disabled", "TiedToSkipped", "Shared", "Frozen", "Leaf", "FusedExperts"]
)
def test_nothing_is_compiled(world: World, pattern: str) -> None:
    trains(world, f"skipped {pattern}")


def compiled_once(trainer: Any) -> None:
    graphs = set()
    for step in trainer.steps():
        trainer.backward(trainer(*patterns.inputs(step)))
        trainer.step()
        graphs.add(stand_in.native.compiled)
    assert len(graphs) == 1, "something was compiled again"


@pytest.mark.core_case(pattern="Mixed")
@pytest.mark.core_case(pattern="TiedGraphs")
@pytest.mark.core_case(pattern="LoopOfBlocks")
@pytest.mark.parametrize("pattern", NAMES)
def test_trains_as_pytorch_does(world: World, pattern: str) -> None:
    trains(world, pattern, compiled_once)
