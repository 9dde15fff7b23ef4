"""Whatever the style, the graph and the mode, the gradients are PyTorch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.scripts import slopes
from tests.training import stock
from tests.training.models import batch, both_losses, losses
from tests.training.options import (
    BF16,
    BF16_SUMS,
    FP16,
    NO_REUSE,
    OFFLOADED,
    OFFLOADED_ALL,
    OVERLAP,
    SMALL_PREFETCH,
    Options,
)
from tests.training.run import Outcome, applied, check, run
from tests.world import World

STAGES = [1, 2, 3]
CRASH = "The size of tensor a (0) must match the size of tensor b"
GRAPHS = [
    "DictOutput",
    "SharedBlock",
    "TiedEmbedding",
    "FrozenTrunk",
    "Reentrant",
    "NonReentrant",
    "NamedArguments",
    "LeafModule",
]
PREFETCH = {"zero": {**SMALL_PREFETCH, **NO_REUSE}}
patched = partial(applied, "zero3_retain")
STYLES = pytest.mark.parametrize("style", ["engine", "scale", "torch"])
ZEROS = pytest.mark.parametrize("zero", [False, True], ids=["sum", "zero_grad"])


def several_backwards(trainer: Any, *, backwards: int = 2, zero: bool = False) -> None:
    """Of up to four losses over one forward, the first two of which reach one head each.

    zero: call ``zero_grad()`` before every backward but the first.
    """
    for step in trainer.steps():
        for micro in range(trainer.options.micro_steps):
            first, second = both_losses(trainer, step, micro)
            every = [first, second, first * second, 0.1 * (first - second) ** 2]
            for index, loss in enumerate(every[:backwards]):
                if zero and index:
                    trainer.zero_grad()
                trainer.backward(loss, retain_graph=index < backwards - 1)
            trainer.step()


def holds(world: World, backwards: int = 2, zeroed: bool = False, **options: Any) -> list[Outcome]:
    """Plain PyTorch's ends, on any model and with any options."""
    script = partial(several_backwards, backwards=backwards, zero=zeroed)
    return check(world, script, Options(**options), "zero3_retain", quiet=False)


@pytest.mark.core_case(zero=False)
@pytest.mark.core_case(zero=True, style="engine")
@ZEROS
@STYLES
@pytest.mark.parametrize("stage", STAGES)
def test_two_backwards(world: World, stage: int, style: str, zero: bool) -> None:
    for outcome in holds(world, stage=stage, style=style, zeroed=zero):
        assert not any(outcome.available)


CLIPPED, MICRO_STEPS, TORCH = {"clip": 0.05}, {"micro_steps": 2}, {"style": "torch"}


@pytest.mark.core_case(backwards=2, more=MICRO_STEPS)
@pytest.mark.core_case(backwards=2, zero=False, more=OFFLOADED | MICRO_STEPS)
@pytest.mark.parametrize(
    ("backwards", "zero", "more"),
    [
        *((backwards, zero, {}) for backwards in (3, 4) for zero in (False, True)),
        (2, False, MICRO_STEPS),  # what zero_grad() means in it: tests/accumulation/test_dropped.py
        *((2, zero, OFFLOADED) for zero in (False, True)),
        (2, False, OFFLOADED | MICRO_STEPS),
        (2, False, CLIPPED),
        (2, False, OFFLOADED | CLIPPED),
        *((2, False, dtype | style) for dtype in (BF16, BF16_SUMS) for style in ({}, TORCH)),
        *((2, False, FP16 | style) for style in ({}, {"style": "scale"})),
        (2, False, OVERLAP),
        (2, False, {"zero": {"reduce_scatter": False}}),
        (2, False, {"zero": {"contiguous_gradients": False}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", STAGES)
def test_options(
    world: World, stage: int, backwards: int, zero: bool, more: dict[str, Any]
) -> None:
    if stage < 3 and "contiguous_gradients" in str(more):
        stock.needs_non_contiguous()
    if stage == 1 and more == BF16_SUMS | TORCH and not stock.QUEUES_EPILOGUE:
        pytest.skip("stock refuses plain backwards there, patched or not")
    holds(world, backwards, zero, stage=stage, **more)


@pytest.mark.core_case(backwards=3, more=PREFETCH)
@pytest.mark.parametrize(
    ("backwards", "zero", "more"),
    [
        (3, False, PREFETCH),
        *((2, zero, OFFLOADED_ALL) for zero in (False, True)),
        (2, False, {"zero": NO_REUSE}),
        (2, False, {"zero": SMALL_PREFETCH}),
        (2, False, {"zero": {"stage3_param_persistence_threshold": 40}}),
    ],
    ids=str,
)
def test_options_of_stage_3(world: World, backwards: int, zero: bool, more: dict[str, Any]) -> None:
    holds(world, backwards, zero, steps=5, **more)


@pytest.mark.core_case(backwards=2, zero=False, model="SharedBlock")
@pytest.mark.core_case(backwards=2, zero=False, model="Reentrant")
@pytest.mark.core_case(backwards=2, zero=False, model="LeafModule")
@pytest.mark.parametrize(
    ("backwards", "zero", "style"), [(2, False, "engine"), (3, False, "engine"), (2, True, "torch")]
)
@pytest.mark.parametrize("model", GRAPHS)
def test_graphs(world: World, model: str, backwards: int, zero: bool, style: str) -> None:
    for outcome in holds(world, backwards, zero, model=model, style=style, steps=4):
        assert not any(outcome.available), outcome.available


@pytest.mark.core_case
@STYLES
def test_stock_crashes_at_the_second_backward_of_stage_3(world: World, style: str) -> None:
    stock.needs_style(style)
    for outcome in world.run(run, several_backwards, Options(style=style)):
        assert CRASH in outcome.error
        assert len(outcome.available) == 1, "the first backward ran"


@pytest.mark.core_case
@pytest.mark.parametrize("stage", [1, 2])
def test_stock_loses_all_but_one_loss_on_stages_1_and_2(world: World, stage: int) -> None:
    for outcome in world.run(run, several_backwards, Options(stage=stage)):
        if stock.stock_sums_over(stage):
            assert outcome.equal, outcome
        elif stock.LOSES_MICRO_STEPS:
            assert "TypeError" in outcome.error
        else:
            assert outcome.difference > 0.01, outcome


def evaluation_then_two_backwards(trainer: Any) -> None:
    """A ``no_grad`` forward leaves a gather to spend; on stock the second backward then runs."""
    tokens, classes = batch(0)
    for _ in range(2):
        with torch.no_grad():
            trainer(tokens)
    first, second = losses(trainer(tokens), classes)
    trainer.backward(first, retain_graph=True)
    trainer.backward(second)
    trainer.step()


def test_a_forward_without_gradients_turns_stocks_crash_into_a_wrong_gradient(
    world: World,
) -> None:
    if stock.Version("0.18.5") <= stock.RELEASE:  # before, the sum comes out by accident
        for outcome in world.run(run, evaluation_then_two_backwards, Options()):
            assert not outcome.error
            assert outcome.difference > 0.01
    check(world, evaluation_then_two_backwards, Options(), "zero3_retain")


@pytest.mark.parametrize("model", GRAPHS)
def test_graphs_train_on_stock_with_one_backward_and_not_with_two(world: World, model: str) -> None:
    """It crashes; where checkpointing gathers again, on older releases, it trains wrong."""
    check(world, partial(several_backwards, backwards=1), Options(model=model))
    for outcome in world.run(run, several_backwards, Options(model=model)):
        assert outcome.error or outcome.difference > 0.01


# --- Gradients of gradients, and by hand ----------------------------------------------------------


@pytest.mark.core_case(style="engine", script=slopes.gradient_penalty, model="Critic")
@pytest.mark.core_case(script=slopes.slope_at_the_input, stage=3)
@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize(
    ("script", "model", "stage"),
    [
        (slopes.gradient_penalty, "Critic", 3),
        (slopes.gradient_penalty, "PlainCritic", 3),
        (slopes.penalty_in_the_middle, "Critic", 3),
        *((slopes.slope_then_two_backwards, "TwoHeads", stage) for stage in (2, 3)),
        *((slopes.slope_at_the_input, "FloatInput", stage) for stage in (2, 3)),
    ],
)
def test_gradients_by_hand(world: World, script: Any, model: str, stage: int, style: str) -> None:
    """The backward of a backward gathers what it needs, too."""
    options = Options(stage, model=model, style=style)
    for outcome in check(world, script, options, "zero3_retain"):
        assert "slope" in script.name or not any(outcome.available)
    if style == "engine" and stage == 3:
        for outcome in world.run(run, script, options):
            assert outcome.error or outcome.difference > 1e-3, "stock is right"
