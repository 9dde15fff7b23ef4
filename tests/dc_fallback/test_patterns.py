"""Whatever Dynamo skips, the engine trains as plain PyTorch does."""

from __future__ import annotations

import pytest

from tests.dc_fallback import patterns
from tests.dc_fallback.run import trains
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
    trains(world, pattern, compiles={"whole": True})


@pytest.mark.core_case(pattern="Mixed")
@pytest.mark.core_case(pattern="TiedGraphs")
@pytest.mark.core_case(pattern="LoopOfBlocks")
@pytest.mark.parametrize("pattern", NAMES)
def test_trains_as_pytorch_does(world: World, pattern: str) -> None:
    _, graphs = trains(world, pattern)
    assert len(set(graphs)) == 1, "something was compiled again"
