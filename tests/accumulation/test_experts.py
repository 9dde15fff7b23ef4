"""Ranks that use different parameters: what they reduce is of the same parameters on all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_patches.accumulation.bucket_order import merged
from tests.scripts import adapters, experts, heads, losses
from tests.training import models
from tests.training.options import BF16_SUMS, OFFLOADED, OVERLAP, Options
from tests.training.run import applied, check, run
from tests.training.stock import needs_a_zero_optimizer, needs_non_contiguous, since
from tests.training.trainers import engine_trainer
from tests.world import World

UNEVEN: dict[str, Any] = {"model": "RoutedUnevenly", "steps": 5}


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with World(4) as living:
        yield living


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", [1, 2])
def test_stock_adds_up_gradients_of_different_parameters(fresh_world: World, stage: int) -> None:
    for outcome in fresh_world.run(run, experts.routed, Options(stage, model="Routed")):
        assert outcome.difference > 0.01, outcome


@pytest.mark.core_case(more={})
@pytest.mark.core_case(more=OFFLOADED)
@pytest.mark.parametrize(
    "more",
    [
        {},
        OVERLAP,
        OFFLOADED,
        BF16_SUMS,
        {"clip": 0.05},
        {"zero": {"contiguous_gradients": False}},
        {"zero": {"reduce_bucket_size": 40}},
        {"zero": {"reduce_bucket_size": 10**6}},
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [1, 2])
def test_batches_of_one_to_three_experts(world: World, stage: int, more: dict[str, Any]) -> None:
    if "contiguous_gradients" in str(more):
        needs_non_contiguous()
    needs_a_zero_optimizer(stage, more)
    check(world, experts.routed, Options(stage, **{**UNEVEN, **more}), "accumulation")


@pytest.mark.core_case(stage=2, script=losses.two_backwards)
@pytest.mark.parametrize("script", [losses.two_backwards, experts.routed])
@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_of_two_dtypes(world: World, stage: int, script: Any) -> None:
    """Under autocast the norms have some of their own, and what is reduced first came later."""
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    zero = {"reduce_bucket_size": 600}  # up to 0.18.4 the largest parameter has to fit
    options = Options(stage, model=script.options.model, settings=autocast, zero=zero)
    for one in world.run(run, script, options, "accumulation"):
        assert not one.error, one
        assert one.difference < 0.02 * one.moved, one


@pytest.mark.core_case(script=experts.routed_micro_steps)
@pytest.mark.parametrize("model", ["RoutedUnevenly", "RoutedReentrant", "RoutedNonReentrant"])
@pytest.mark.parametrize("script", [experts.routed_micro_steps, experts.routed_losses_apart])
@pytest.mark.parametrize("stage", [1, 2])
def test_micro_steps_and_losses(world: World, stage: int, script: Any, model: str) -> None:
    micro_steps = script.options.micro_steps
    check(world, script, Options(stage, model=model, micro_steps=micro_steps), "accumulation")


def left_at_the_buckets() -> list[str]:
    """Of an engine that had a forward, and no backward, before the patch was taken back."""
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    with applied("accumulation"):
        trainer = engine_trainer(stage=2, settings=autocast)
        models.loss_of(trainer, 0)
    return [name for name in vars(trainer.engine.optimizer) if name.startswith("reduce_r")]


def test_taken_back_before_a_backward(world: World) -> None:
    assert world.run(left_at_the_buckets) == [[], []]


@since("0.16.6", "hooks that outlive the freezing of their parameter")
@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_larger_than_a_bucket_are_new(world: World, stage: int) -> None:
    """DeepSpeed then reduces a bucket that is empty."""
    tiny = {"reduce_bucket_size": 40, "overlap_comm": True}
    check(world, adapters.unfrozen_later, Options(stage, steps=4, zero=tiny), "accumulation")


def odd_one_out(trainer: Any) -> None:
    """The third rank has no second loss, from its second step on."""
    for step in trainer.steps():
        only = heads.FIRST if step and dist.get_rank() == 2 else heads.BOTH
        trainer.backward(models.loss_of(trainer, step, only=only))
        trainer.step()


def in_another_order(trainer: Any) -> None:
    """One rank's second backward comes first."""
    for step in trainer.steps():
        first, second = models.both_losses(trainer, step)
        if dist.get_rank() and step:
            first, second = second, first
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()


def used_by_one_rank_late(trainer: Any) -> None:
    """No rank uses the second head at first, then one does, and later no one again."""
    for step in trainer.steps():
        uses = step == 2 and dist.get_rank() == 1
        trainer.backward(models.loss_of(trainer, step, only=heads.BOTH if uses else heads.FIRST))
        trainer.step()


@pytest.mark.core_case(stage=2, script=used_by_one_rank_late)
@pytest.mark.parametrize("script", [in_another_order, used_by_one_rank_late])
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_differ(world: World, stage: int, script: Any) -> None:
    check(world, script, Options(stage, steps=5), "accumulation")


@pytest.mark.parametrize("more", [{}, OVERLAP], ids=["", "overlap"])
@pytest.mark.parametrize("stage", [1, 2])
def test_one_of_four_ranks_is_odd(four: World, stage: int, more: dict[str, Any]) -> None:
    check(four, odd_one_out, Options(stage, **more), "accumulation")


def elements_that_wait(script: Any, **options: Any) -> int:
    """The most elements of gradients on the parameters, in a step of ZeRO 2."""
    with applied("accumulation"):
        trainer = engine_trainer(stage=2, **options)
        most = 0

        def look(*_: Any) -> None:
            nonlocal most
            held = [p.grad for p in trainer.module.parameters() if p.grad is not None]
            most = max(most, sum(grad.numel() for grad in held))

        for param in trainer.module.parameters():
            param.register_post_accumulate_grad_hook(look)
        trainer.note()
        script(trainer)
        return most


def test_gradients_do_not_wait_for_what_no_rank_uses(world: World) -> None:
    """A head that rests is reduced as zero in its turn, so that ZeRO 2 keeps what it kept."""
    rests = world.run(elements_that_wait, heads.used_in_the_first_step_only, model="Deep")
    works = world.run(elements_that_wait, experts.routed, model="Deep")
    assert rests <= works, (rests, works)


def test_orders_are_merged_behind_what_they_are_behind() -> None:
    assert merged([[1, 2, 5], [1, 3, 5], [4, 5, 6]]) == [4, 1, 3, 2, 5, 6]


def integers_reduced(model: str) -> int:
    """All-reduces of integers, which only ranks that compare their buckets make."""
    with applied("accumulation"):
        trainer = engine_trainer(model, stage=2)
        for step in trainer.steps():
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
                trainer.backward(models.loss_of(trainer, step))
            trainer.step()
    sent = [call.args[0] if call.args else call.kwargs["tensor"] for call in reduce.mock_calls]
    return sum(tensor.dtype == torch.int64 for tensor in sent)


def test_devices_are_left_alone(world: World) -> None:
    """Ranks that agree exchange nothing, after their first step."""
    assert world.run(integers_reduced, "Deep") == [0, 0]
