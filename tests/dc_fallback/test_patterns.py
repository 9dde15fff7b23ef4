"""Whatever Dynamo skips, the engine trains as plain PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dc_fallback import patterns
from tests.dc_fallback.cases import Outcome, train
from tests.world import World

NAMES = [
    # The import of transformers takes longer than all other patterns.
    pytest.param(name, marks=pytest.mark.exhaustive) if name == "QwenMoe" else name
    for name in (pattern.__name__ for pattern in patterns.ALL)
]


def outcome(world: World, pattern: str, **case: Any) -> Outcome:
    """The outcome of `case`, which must be the same on both ranks."""
    first, second = world.run(train, pattern, **case)
    assert (first.difference, first.error) == (second.difference, second.error)
    return first


def assert_trained(found: Outcome) -> None:
    assert not found.untrained, found
    assert found.equal, found
    assert not any(found.available), "a parameter stayed gathered"


@pytest.mark.core_case
@pytest.mark.parametrize(
    "pattern", ["Disabled", "TiedToSkipped", "Shared", "Frozen", "Leaf", "FusedExperts"]
)
def test_nothing_is_compiled(world: World, pattern: str) -> None:
    assert_trained(outcome(world, pattern, whole=True))


@pytest.mark.core_case(pattern="Mixed")
@pytest.mark.core_case(pattern="TiedGraphs")
@pytest.mark.core_case(pattern="LoopOfBlocks")
@pytest.mark.parametrize("pattern", NAMES)
def test_trains_as_pytorch_does(world: World, pattern: str) -> None:
    found = outcome(world, pattern)
    assert_trained(found)
    assert len(set(found.graphs)) == 1, "something was compiled again"
