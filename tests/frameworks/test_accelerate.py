"""Loops of one's own by Accelerate; its older releases are in tests/coalesce/test_accelerate.py."""

from __future__ import annotations

import pytest
import torch

from tests.frameworks.conftest import Ranks
from tests.frameworks.runs import (
    WRONG,
    Run,
    assert_equal,
    assert_patched,
    on_one,
    on_two,
    part_lost,
)
from tests.frameworks.user import accelerated
from tests.training import options
from tests.training.trainers import Parameters
from tests.world import World

SCRIPT = "accelerated"
MICRO_STEPS = 4
BATCHES = accelerated.ROWS // (2 * accelerated.BATCH)
REFUSED = "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage"

stages = pytest.mark.parametrize("stage", [2, 3])


@pytest.fixture(scope="module")
def start() -> Parameters:
    torch.manual_seed(accelerated.SEED)
    return {name: param.detach() for name, param in accelerated.TwoHeads().named_parameters()}


@pytest.fixture(scope="module")
def accumulated(alone: World) -> Run:
    return on_one(alone, SCRIPT, "accumulation", micro_steps=2 * MICRO_STEPS)


@pytest.fixture(scope="module")
def two_losses(alone: World) -> Run:
    return on_one(alone, SCRIPT, "two_losses", micro_steps=2)


def train(world: World, loop: str, stage: int, micro_steps: int = 1) -> Run:
    zero = {"reduce_bucket_size": 10**6}
    batch = accelerated.BATCH
    settings = options.config(
        stage, micro_steps=micro_steps, train_micro_batch_size_per_gpu=batch, zero=zero
    )
    return on_two(world, SCRIPT, loop, settings, micro_steps=micro_steps)


def assert_ends_equal(found: Run, reference: Run, start: Parameters) -> None:
    """The losses of one process are one by one those of both ranks."""
    pairs = torch.tensor(reference.losses).view(-1, 2).mean(1)
    reference = Run(losses=pairs.tolist(), parameters=reference.parameters)
    assert_equal(found, reference, start)


@stages
def test_accumulate(ranks: Ranks, accumulated: Run, start: Parameters, stage: int) -> None:
    """The newest Accelerate reduces each micro step, on a release that adds them up.

    Stage 2 of the old release trains on the last micro step alone.
    """
    stock, found = (train(world, "accumulation", stage, MICRO_STEPS) for world in ranks[1:])
    assert not stock.live
    assert_patched(found)
    assert_ends_equal(found, accumulated, start)
    if ranks.old and stage == 2:
        assert part_lost(stock, accumulated, start) > WRONG
    else:
        assert_ends_equal(stock, accumulated, start)
    assert ranks.old or stock.reductions == found.reductions == BATCHES


@stages
def test_two_losses_by_the_engine(
    ranks: Ranks, two_losses: Run, start: Parameters, stage: int
) -> None:
    """By its own methods: stock refuses, patched reduces once a batch."""
    stock, found = (train(world, "two_losses_of_engine", stage) for world in ranks[1:])
    assert f"{REFUSED} {stage}" in stock.error
    assert_patched(found)
    assert_ends_equal(found, two_losses, start)
    assert found.reductions == BATCHES


@stages
def test_two_losses_by_accelerate(unpatched: World, patched: World, stage: int) -> None:
    """Its no_sync() does nothing at stages 2 and 3, and its backward() steps: two steps a batch."""
    stock = train(unpatched, "two_losses", stage)
    if stage == 3:
        assert "size of tensor a (0)" in stock.error
    else:
        assert stock.engine_steps == 2 * BATCHES
    found = train(patched, "two_losses", stage)
    (said,) = [found.error] if stage == 3 else found.heard
    assert "backward over a forward from before engine.step()" in said
