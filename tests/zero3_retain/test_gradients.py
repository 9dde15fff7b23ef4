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


def holds(world: World, backwards: int = 2, zero: bool = False, **options: Any) -> list[Outcome]:
    """Plain PyTorch's ends, on any model and with any options."""
    stock.needs_style(options.get("style", "engine"))
    script = partial(several_backwards, backwards=backwards, zero=zero)
    return check(world, script, Options(**options), "zero3_retain", quiet=False)


@pytest.mark.core_case(zero=False)
@pytest.mark.core_case(zero=True, style="engine")
@ZEROS
@STYLES
@pytest.mark.parametrize("stage", STAGES)
def test_two_backwards(world: World, stage: int, style: str, zero: bool) -> None:
    for outcome in holds(world, stage=stage, style=style, zero=zero):
        assert not any(outcome.available)


@ZEROS
@pytest.mark.parametrize("backwards", [3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_more_backwards(world: World, stage: int, backwards: int, zero: bool) -> None:
    holds(world, backwards, zero, stage=stage)


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
def test_graphs(world: World, model: str) -> None:
    holds(world, 3, model=model)


@pytest.mark.parametrize("model", GRAPHS)
def test_graphs_torch_style(world: World, model: str) -> None:
    holds(world, zero=True, model=model, style="torch")


@pytest.mark.parametrize("model", GRAPHS)
def test_graphs_train_on_stock_with_one_backward_and_not_with_two(world: World, model: str) -> None:
    """It crashes; where checkpointing gathers again, on older releases, it trains wrong."""
    check(world, partial(several_backwards, backwards=1), Options(model=model))
    for outcome in world.run(run, several_backwards, Options(model=model)):
        assert outcome.error or outcome.difference > 0.01


@pytest.mark.core_case
@pytest.mark.parametrize("model", ["SharedBlock", "Reentrant", "LeafModule"])
def test_graphs_on_every_release(world: World, model: str) -> None:
    holds(world, model=model)


@pytest.mark.core_case
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_accumulation(world: World, stage: int) -> None:
    """What ``zero_grad()`` means in it: tests/accumulation/test_dropped.py."""
    holds(world, stage=stage, micro_steps=2)


@pytest.mark.core_case(zero=False, micro_steps=2)
@pytest.mark.parametrize(
    ("stage", "micro_steps", "zero"),
    [
        *((stage, micro, zero) for stage in (2, 3) for micro, zero in [(1, False), (1, True)]),
        *((stage, 2, False) for stage in (2, 3)),
        *((1, 1, zero) for zero in (False, True)),
    ],
)
def test_offloaded_optimizer(world: World, stage: int, micro_steps: int, zero: bool) -> None:
    holds(world, zero=zero, stage=stage, micro_steps=micro_steps, **OFFLOADED)


@ZEROS
def test_offloaded_parameters(world: World, zero: bool) -> None:
    holds(world, zero=zero, **OFFLOADED_ALL)


@pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_goes_by_the_sum(world: World, stage: int, more: dict[str, Any]) -> None:
    holds(world, stage=stage, clip=0.05, **more)


@pytest.mark.core_case
def test_prefetch(world: World) -> None:
    holds(world, 3, steps=5, **PREFETCH)


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (3, {"overlap_comm": True}),
        (3, NO_REUSE),
        (3, SMALL_PREFETCH),
        (3, {"stage3_param_persistence_threshold": 40}),
        (3, {"contiguous_gradients": False}),
        (2, {"overlap_comm": True}),
        (2, {"reduce_scatter": False}),
        (2, {"contiguous_gradients": False}),
        (1, {"overlap_comm": True}),
    ],
    ids=str,
)
def test_zero_settings(world: World, stage: int, zero: dict[str, Any]) -> None:
    check(world, several_backwards, Options(stage, steps=4, zero=zero), "zero3_retain", quiet=False)


@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("more", [BF16, BF16_SUMS], ids=["low", "fp32"])
@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16(world: World, stage: int, more: dict[str, Any], style: str) -> None:
    if stage == 1 and more is BF16_SUMS and stock.BF16_SUMS_DO_NOT_TRAIN:
        pytest.skip(f"nothing trains here on {stock.RELEASE}, patched or not")
    holds(world, stage=stage, style=style, **more)


@pytest.mark.parametrize("style", stock.STYLES[:2])
@pytest.mark.parametrize("stage", [2, 3])
def test_float16_with_a_dynamic_loss_scale(world: World, stage: int, style: str) -> None:
    holds(world, stage=stage, style=style, **FP16)


# --- Gradients of gradients, and by hand ----------------------------------------------------------


@pytest.mark.core_case(style="engine", script=slopes.gradient_penalty, model="Critic")
@pytest.mark.core_case(script=slopes.slope_at_the_input)
@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize(
    ("script", "model"),
    [
        (slopes.gradient_penalty, "Critic"),
        (slopes.gradient_penalty, "PlainCritic"),
        (slopes.penalty_in_the_middle, "Critic"),
        (slopes.slope_then_two_backwards, "TwoHeads"),
        (slopes.slope_at_the_input, "FloatInput"),
    ],
)
def test_gradients_by_hand(world: World, script: Any, model: str, style: str) -> None:
    """The backward of a backward gathers what it needs, too."""
    stock.needs_style(style)
    for outcome in check(world, script, Options(model=model, style=style), "zero3_retain"):
        assert "slope" in script.name or not any(outcome.available)
    if style == "engine":
        for outcome in world.run(run, script, Options(model=model)):
            assert outcome.error or outcome.difference > 1e-3, "stock is right"


@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("script", [slopes.slope_then_two_backwards, slopes.slope_at_the_input])
def test_gradients_by_hand_at_stage_2(world: World, script: Any, style: str) -> None:
    stock.needs_style(style)
    model = script.options.model
    check(world, script, Options(2, model=model, style=style), "zero3_retain")
