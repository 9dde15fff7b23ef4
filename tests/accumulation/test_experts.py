"""Ranks that use different parameters: what they reduce is of the same parameters on all."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_patches.steps.bucket_order import merge_orders
from tests.harness import applied, at, checked, engine_trainer, models, of, run, trains
from tests.harness.options import OFFLOADED, OVERLAP, Options
from tests.harness.stock import since
from tests.scripts import adapters, experts, heads, losses
from tests.world import on_ranks

accumulation = partial(of, "accumulation")
uneven = partial(accumulation, experts.routed, model="RoutedUnevenly", steps=5)
AUTOCAST: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
MODELS = "RoutedUnevenly", "RoutedReentrant", "RoutedNonReentrant"
STAGES = pytest.mark.parametrize("stage", [1, 2])


#: DeepSpeed then reduces a bucket that is empty: each of these parameters is larger, and new.
TINY = {"reduce_bucket_size": 40, "overlap_comm": True}
SINCE_0_16_6 = since("0.16.6", "hooks that outlive the freezing of their parameter")


test_batches_of_one_to_three_experts = checked(
    uneven(1, 2, core={1, 2}),
    uneven(1, 2, core={1, 2}, **OFFLOADED),
    *(accumulation(experts.routed_micro_steps, 2, core={2}, model=model) for model in MODELS),
    accumulation(experts.routed_micro_steps, 1, core={1}, model="RoutedUnevenly", **OVERLAP),
    *(accumulation(experts.routed_losses_apart, 1, 2, model=model) for model in MODELS),
    accumulation(adapters.unfrozen_later, 1, 2, core={2}, marks=[SINCE_0_16_6], steps=4, zero=TINY),
)


@on_ranks
@pytest.mark.core_case(stage=2, script=losses.two_backwards)
@pytest.mark.parametrize("script", [losses.two_backwards, experts.routed])
@STAGES
def test_buckets_of_two_dtypes(stage: int, script: Any) -> None:
    """Under autocast the norms have some of their own, and what is reduced first came later."""
    zero = {"reduce_bucket_size": 600}  # up to 0.18.4 the largest parameter has to fit
    outcome = run(script, script.at(stage, steps=3, settings=AUTOCAST, zero=zero), "accumulation")
    assert not outcome.error, outcome
    assert outcome.difference < 0.02 * outcome.moved, outcome


@on_ranks
def test_taken_back_before_a_backward() -> None:
    """The engine had a forward."""
    with applied("accumulation"):
        trainer = engine_trainer(stage=2, settings=AUTOCAST)
        models.loss_of(trainer, 0)
    assert not [name for name in vars(trainer.engine.optimizer) if name.startswith("reduce_r")]


@trains("accumulation", at(1, 2, core={2}, steps=5))
def test_used_by_one_rank_late(trainer: Any, step: int) -> None:
    """No rank uses the second head at first, then one does, and later no one again."""
    uses = step == 2 and dist.get_rank() == 1
    trainer.backward(models.loss_of(trainer, step, only=heads.BOTH if uses else heads.FIRST))


def elements_that_wait(script: Any) -> int:
    """The most elements of gradients on the parameters, in a step of ZeRO 2."""
    with applied("accumulation"):
        trainer = engine_trainer("Deep", stage=2)
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


@on_ranks
def test_gradients_do_not_wait_for_what_no_rank_uses() -> None:
    """A head that rests is reduced as zero in its turn, so that ZeRO 2 keeps what it kept."""
    rests, works = map(elements_that_wait, (heads.used_in_the_first_step_only, experts.routed))
    assert rests < works + Options().config["zero_optimization"]["reduce_bucket_size"]


def test_orders_are_merged_behind_what_they_are_behind() -> None:
    assert merge_orders([[1, 2, 5], [1, 3, 5], [4, 5, 6]]) == [4, 1, 3, 2, 5, 6]


@on_ranks
def test_devices_are_left_alone() -> None:
    """Ranks that agree exchange no integers, by which they compare, after their first step."""
    with applied("accumulation"):
        trainer = engine_trainer("Deep", stage=2)
        for step in trainer.steps():
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
                trainer.backward(models.loss_of(trainer, step))
            trainer.step()
    sent = [call.args[0] if call.args else call.kwargs["tensor"] for call in reduce.mock_calls]
    assert not any(tensor.dtype == torch.int64 for tensor in sent)
