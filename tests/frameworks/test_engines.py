"""Loops without a framework that go through two engines, or backward in their own way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.conftest import Ranks
from tests.frameworks.runs import Run, assert_equal, assert_patched, on_one, on_two
from tests.training import options, trainers
from tests.world import World

SCRIPT = "engines"
CHUNKS, STEPS = 4, 3
TWICE_REDUCED = {2: "has already been reduced", 3: "AssertionError"}

exhaustive = pytest.mark.exhaustive
stages = pytest.mark.parametrize("stage", [1, 2, 3])


def train(world: World, loop: str, stage: int, **more: Any) -> Run:
    config = options.config(stage, zero={"reduce_bucket_size": 10**6})
    return on_two(world, SCRIPT, loop, config, **more)


@pytest.fixture(scope="module")
def adversaries(alone: World) -> Run:
    """Whether the discriminator is frozen meanwhile makes no difference to PyTorch."""
    free = on_one(alone, SCRIPT, "adversaries")
    frozen = on_one(alone, SCRIPT, "adversaries", freezes=True)
    assert free.parameters.keys() == frozen.parameters.keys()
    assert trainers.worst_difference(free.parameters, frozen.parameters)[0] == 0
    return free


@stages
def test_adversaries(ranks: Ranks, adversaries: Run, stage: int) -> None:
    """The discriminator is zeroed where PyTorch would zero it, after the generator's backward.

    Stock refuses to reduce it again; so do the patches, at stage 3 of an old release.
    """
    for world in ranks[1:]:
        found = train(world, "adversaries", stage)
        if (stage == 3 and ranks.old) or (stage > 1 and world is ranks.stock):
            assert TWICE_REDUCED[stage] in found.error
            continue
        assert_ends_equal(found, adversaries)
        if world is ranks.patched:
            assert_patched(found)


@stages
def test_a_frozen_discriminator(ranks: Ranks, adversaries: Run, stage: int) -> None:
    """Nothing in it gets a gradient of the generator's loss, which passes through it."""
    for world in ranks[1:]:
        found = train(world, "adversaries", stage, freezes=True)
        assert_ends_equal(found, adversaries)
        assert found.reductions == 2 * STEPS
        assert not found.heard


@exhaustive
@stages
def test_cached_gradients(unpatched: World, patched: World, alone: World, stage: int) -> None:
    """Each chunk's surrogate has a plain backward; stock's stages 1 and 2 keep the last one's."""
    reference = on_one(alone, SCRIPT, "cached_gradients")
    stock = train(unpatched, "cached_gradients", stage)
    apart = trainers.worst_difference(stock.parameters, reference.parameters)[0]
    assert (apart > 0.1) == (stage < 3), apart
    for reduces_once in (False, True):
        found = train(patched, "cached_gradients", stage, reduces_once=reduces_once)
        assert_patched(found)
        assert_ends_equal(found, reference)
        assert found.reductions == STEPS * (1 if reduces_once else CHUNKS)


def assert_ends_equal(found: Run, reference: Run) -> None:
    """The parameters: a loss is that of a rank's own batch here."""
    assert_equal(
        Run(parameters=found.parameters, error=found.error), Run(parameters=reference.parameters)
    )
