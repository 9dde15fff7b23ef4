"""Whatever the style, the graph and the mode, the gradients are PyTorch's."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.world import World
from tests.zero3_retain import models, releases, trainers
from tests.zero3_retain.cases import (
    Outcome,
    one_forward_several_backwards,
    patched,
    run,
    train,
)

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

OFFLOADED_OPTIMIZER = {"zero": {"offload_optimizer": {"device": "cpu"}}}
OFFLOADED_ALL = {
    "zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
}
NO_REUSE = {"stage3_max_reuse_distance": 0}
PREFETCH = {"zero": {"stage3_prefetch_bucket_size": 600, **NO_REUSE}}


def outcome(world: World, **case: Any) -> Outcome:
    """The outcome of `case`, which must be the same on both ranks."""
    first, second = world.run(train, **case)
    assert (first.difference, first.error) == (second.difference, second.error)
    return first


def assert_like_pytorch(result: Outcome) -> None:
    assert result.equal, result


@pytest.mark.core_case(zero=False)
@pytest.mark.core_case(zero=True, style="engine")
@pytest.mark.parametrize("zero", [False, True], ids=["sum", "zero_grad"])
@pytest.mark.parametrize("style", ["engine", "scale", "torch"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_backwards(world: World, stage: int, style: str, zero: bool) -> None:
    releases.needs_torch_style(style)
    result = outcome(world, stage=stage, style=style, zero=zero)
    assert_like_pytorch(result)
    assert not any(result.available)


@pytest.mark.parametrize("zero", [False, True], ids=["sum", "zero_grad"])
@pytest.mark.parametrize("backwards", [3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_more_backwards(world: World, stage: int, backwards: int, zero: bool) -> None:
    assert_like_pytorch(outcome(world, stage=stage, backwards=backwards, zero=zero))


@pytest.mark.core_case
@pytest.mark.parametrize("style", ["engine", "scale", "torch"])
def test_stock_crashes_at_the_second_backward_of_stage_3(world: World, style: str) -> None:
    releases.needs_torch_style(style)
    result = outcome(world, style=style, patch=False)
    assert CRASH in result.error
    assert len(result.available) == 1, "the first backward ran"


@pytest.mark.core_case
@pytest.mark.parametrize("stage", [1, 2])
def test_stock_loses_all_but_one_loss_on_stages_1_and_2(world: World, stage: int) -> None:
    result = outcome(world, stage=stage, patch=False)
    if releases.stock_sums_over(stage):
        assert result.equal, result
    elif releases.LOSES_MICRO_STEPS:
        assert "TypeError" in result.error
    else:
        assert result.difference > 0.01, result


def evaluation_then_two_backwards(trainer: Any) -> None:
    """A ``no_grad`` forward leaves a gather to spend; on stock the second backward then runs."""
    tokens, classes = models.batch(0)
    for _ in range(2):
        with torch.no_grad():
            trainer.forward(tokens)
    first, second = models.losses(trainer.forward(tokens), classes)
    trainer.backward(first, retain_graph=True)
    trainer.backward(second)
    trainer.step()


def after_an_evaluation(patch: bool) -> Outcome:
    return run(evaluation_then_two_backwards, models.build(models.TwoHeads), 3, patch=patch)


def test_a_forward_without_gradients_turns_stocks_crash_into_a_wrong_gradient(
    world: World,
) -> None:
    if releases.Version("0.18.5") <= releases.RELEASE:  # before, the sum comes out by accident
        for result in world.run(after_an_evaluation, False):
            assert not result.error
            assert result.difference > 1e-3
    for result in world.run(after_an_evaluation, True):
        assert_like_pytorch(result)


@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs(world: World, graph: str) -> None:
    assert_like_pytorch(outcome(world, model=graph, backwards=3))


@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_torch_style(world: World, graph: str) -> None:
    releases.needs_torch_style("torch")
    assert_like_pytorch(outcome(world, model=graph, style="torch", zero=True))


@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_train_on_stock_with_one_backward_and_not_with_two(world: World, graph: str) -> None:
    """It crashes; where checkpointing gathers again, on older releases, it trains wrong."""
    assert_like_pytorch(outcome(world, model=graph, backwards=1, patch=False))
    found = outcome(world, model=graph, backwards=2, patch=False)
    assert found.error or found.difference > 0.01


@pytest.mark.core_case
@pytest.mark.parametrize("graph", ["SharedBlock", "Reentrant", "LeafModule"])
def test_graphs_on_every_release(world: World, graph: str) -> None:
    assert_like_pytorch(outcome(world, model=graph))


@pytest.mark.core_case
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_accumulation(world: World, stage: int) -> None:
    """What ``zero_grad()`` means in it: tests/accumulation/test_dropped.py."""
    assert_like_pytorch(outcome(world, stage=stage, micro_steps=2))


@pytest.mark.core_case(zero=False, micro_steps=2)
@pytest.mark.parametrize(
    ("micro_steps", "zero"),
    [(1, False), (1, True), (2, False)],
    ids=["sum", "zero_grad", "micro-steps"],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_optimizer(world: World, stage: int, micro_steps: int, zero: bool) -> None:
    assert_like_pytorch(
        outcome(
            world,
            stage=stage,
            micro_steps=micro_steps,
            zero=zero,
            settings=OFFLOADED_OPTIMIZER,
        )
    )


@pytest.mark.parametrize("zero", [False, True], ids=["sum", "zero_grad"])
def test_offloaded_optimizer_stage_1(world: World, zero: bool) -> None:
    assert_like_pytorch(outcome(world, stage=1, zero=zero, settings=OFFLOADED_OPTIMIZER))


@pytest.mark.parametrize("zero", [False, True], ids=["sum", "zero_grad"])
def test_offloaded_parameters(world: World, zero: bool) -> None:
    assert_like_pytorch(outcome(world, zero=zero, settings=OFFLOADED_ALL))


def norms_of_two_backwards(stage: int, settings: dict[str, Any]) -> tuple[float, float]:
    """The gradient norm that clipping goes by, and PyTorch's of the same sum."""
    start = models.build(models.TwoHeads)
    reference = trainers.PlainTrainer(deepcopy(start))
    tokens, classes = models.batch(0)
    sum(models.losses(reference.forward(tokens), classes)).backward()
    gradients = [param.grad for param in reference.model.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
    expected = torch.stack([g.norm() for g in gradients]).norm() / dist.get_world_size()
    with patched():
        wanted = trainers.config(stage, gradient_clipping=1e9, **settings)
        trainer = trainers.EngineTrainer(trainers.build_engine(start, wanted))
        one_forward_several_backwards(trainer, backwards=2, steps=1)
        return float(trainer.engine.get_global_grad_norm()), float(expected)


@pytest.mark.parametrize("settings", [{}, OFFLOADED_OPTIMIZER], ids=["", "offloaded"])
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_goes_by_the_sum(world: World, stage: int, settings: dict[str, Any]) -> None:
    for found, expected in world.run(norms_of_two_backwards, stage, settings):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.core_case
def test_prefetch(world: World) -> None:
    assert_like_pytorch(outcome(world, steps=5, backwards=3, settings=PREFETCH))


@pytest.mark.parametrize(
    ("stage", "zero_settings"),
    [
        (3, {"overlap_comm": True}),
        (3, NO_REUSE),
        (3, {"stage3_prefetch_bucket_size": 600}),
        (3, {"stage3_param_persistence_threshold": 40}),
        (3, {"contiguous_gradients": False}),
        (2, {"overlap_comm": True}),
        (2, {"reduce_scatter": False}),
        (2, {"contiguous_gradients": False}),
        (1, {"overlap_comm": True}),
    ],
    ids=str,
)
def test_zero_settings(world: World, stage: int, zero_settings: dict[str, Any]) -> None:
    result = outcome(world, stage=stage, steps=4, settings={"zero": zero_settings})
    assert_like_pytorch(result)


#: A parameter of size 2 in that dtype, one rounding step off.
ROUNDING = {"bfloat16": 2**-6, "float16": 2**-9}


@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("accumulate_in", [None, "fp32"], ids=["low", "fp32"])
@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16(world: World, stage: int, accumulate_in: str | None, style: str) -> None:
    releases.needs_torch_style(style)
    if stage == 1 and accumulate_in and releases.BF16_SUMS_DO_NOT_TRAIN:
        pytest.skip(f"nothing trains here on {releases.RELEASE}, patched or not")
    settings: dict[str, Any] = {"bf16": {"enabled": True}}
    if accumulate_in:
        settings["data_types"] = {"grad_accum_dtype": accumulate_in}
    result = outcome(world, stage=stage, style=style, dtype="bfloat16", settings=settings)
    assert not result.error
    assert result.difference <= ROUNDING["bfloat16"] < result.moved / 4


@pytest.mark.parametrize("style", releases.STYLES[:2])
@pytest.mark.parametrize("stage", [2, 3])
def test_float16_with_a_dynamic_loss_scale(world: World, stage: int, style: str) -> None:
    first, _ = world.run(train_in_float16, stage=stage, style=style)
    assert not first.error
    assert first.difference <= ROUNDING["float16"] < first.moved / 4


def train_in_float16(**case: Any) -> Outcome:
    from tests.zero3_retain.cases import half_precision_allowed

    with half_precision_allowed():
        settings = {"fp16": {"enabled": True, "initial_scale_power": 8}}
        return train(dtype="float16", settings=settings, **case)
