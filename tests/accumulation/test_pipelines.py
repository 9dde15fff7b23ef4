"""Pipelines: every stage moves as plain PyTorch does over the whole batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.pipelines import (
    Pipeline,
    Trained,
    run,
    train_and_evaluate,
    train_and_unapply,
)
from tests.training.stock import RELEASE, Version
from tests.world import World

#: All stages move micro-steps times as far; stages before the last 1 / micro-steps as far; they
#: refuse to run.
ADDS_UP = Version("0.18.2") >= RELEASE
DIVIDES_AGAIN = Version("0.18.3") <= RELEASE <= Version("0.19.2")
REFUSES = Version("0.18.3") <= RELEASE <= Version("0.18.4")

TWO_STAGES, TWO_RANKS = Pipeline(), Pipeline(stages=1)


def outcomes(world: World, one: Pipeline, *patches: str, **more: Any) -> list[Trained]:
    found: list[Trained] = world.run(run, one, *patches, **more)
    return found


def check(world: World, one: Pipeline, **more: Any) -> None:
    for found in outcomes(world, one, "accumulation", **more):
        assert found.equal, found
        assert found.losses == pytest.approx(found.expected, abs=2e-3)
        if not ADDS_UP or one.micro_steps == 1:
            assert not found.said
        assert all("learning rate" in text for text in found.said)


@pytest.mark.core_case(zero=1)
@pytest.mark.parametrize("zero", [0, 1])
def test_stock(world: World, zero: int) -> None:
    """As it is said to be wrong, so that this does not outlive the reason."""
    if REFUSES and zero == 0:
        pytest.skip("one stage raises, and the other waits for it")
    one = Pipeline(zero=zero)
    for found in outcomes(world, one):
        first = "0.linear.weight" in found.ratios
        if ADDS_UP:
            assert min(found.ratios.values()) > 1.5
        elif DIVIDES_AGAIN and first:
            assert max(found.ratios.values()) < 0.3
        elif not DIVIDES_AGAIN:
            assert found.equal, found


CASES = {
    "two-stages": TWO_STAGES,
    "two-stages-zero1": Pipeline(zero=1),
    "two-ranks": TWO_RANKS,
    "two-ranks-zero1": Pipeline(stages=1, zero=1),
    "one-micro-step": Pipeline(micro_steps=1),
    "one-micro-step-zero1": Pipeline(micro_steps=1, zero=1),
    "one-micro-step-two-ranks": Pipeline(stages=1, micro_steps=1),
    "bf16": Pipeline(dtype="bfloat16"),
    "bf16-zero1": Pipeline(dtype="bfloat16", zero=1),
    "bf16-two-ranks": Pipeline(dtype="bfloat16", stages=1),
    "bf16-fp32-sums": Pipeline(dtype="bfloat16", sums="fp32", zero=1),
    "fp16": Pipeline(dtype="float16", zero=1),
    "tied": Pipeline(tied=True),
    "tied-zero1": Pipeline(tied=True, zero=1),
    "recomputed": Pipeline(checkpointing=True),
    "recomputed-zero1": Pipeline(checkpointing=True, zero=1),
    "two-tensors": Pipeline(pair=True),
    "two-tensors-zero1": Pipeline(pair=True, zero=1),
    "clipped": Pipeline(clip=0.5, zero=1),
}


@pytest.mark.core_case(name="two-stages")
@pytest.mark.core_case(name="two-ranks-zero1")
@pytest.mark.core_case(name="bf16")
@pytest.mark.core_case(name="fp16")
@pytest.mark.parametrize("name", CASES)
def test_patched(world: World, name: str) -> None:
    check(world, CASES[name])


@pytest.mark.core_case
def test_with_evaluations(world: World) -> None:
    check(world, TWO_STAGES, script=train_and_evaluate)


@pytest.mark.skipif(ADDS_UP or DIVIDES_AGAIN, reason="the last step is stock's")
def test_after_unapply(world: World) -> None:
    check(world, TWO_STAGES, script=train_and_unapply)


@pytest.fixture(scope="module")
def four() -> Any:
    with World(4) as ranks:
        yield ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("zero", [0, 1])
def test_four_ranks(four: World, zero: int, stages: int) -> None:
    """Of four stages the first was divided three times too often."""
    check(four, Pipeline(zero=zero, stages=stages))
