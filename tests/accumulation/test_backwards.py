"""Backwards of a step: each that reaches the engine's parameters counts, once, and no other."""

import re
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import nn

from ds_patches.core.errors import Refused
from tests.harness import STAGES, applied, at, check, checked, engine_of, of, run, stock, trains
from tests.harness.models import both_losses, loss_of
from tests.harness.options import BF16_SUMS, FP16, OFFLOADED, Options
from tests.scripts import by_hand, heads, losses, nested
from tests.world import World, on_ranks

PLAIN = {"style": "torch"}
QUEUED = pytest.mark.skipif(not stock.QUEUES_EPILOGUE, reason="as on stock: KeyError, or the last")
SINCE_0_18_6 = stock.since("0.18.6", "a BF16_Optimizer for this configuration")
accumulation = partial(of, "accumulation")
#: Stage 3 gathers for a second backward over one forward with this alone.
retained = partial(of, "zero3_retain")


# Also by ``module.aux.backward()``, where the release has plain backwards.
test_a_tensor_that_is_no_output = checked(
    accumulation(losses.auxiliary_tensor_first, 1, 2, core={2}),
    retained(losses.auxiliary_tensor_first, 1, 2, 3, **PLAIN),
    retained(losses.auxiliary_tensor, 3, core={3}),
    retained(losses.auxiliary_tensor, 1, 2, 3, marks=[QUEUED], micro_steps=2, **PLAIN),
)


@on_ranks
@QUEUED
@STAGES
def test_a_plain_backward_around_the_engine_is_refused(stage: int) -> None:
    """DeepSpeed has reduced nothing."""
    script = losses.always_around_the_engine
    outcome = run(script, script.at(stage, **PLAIN), "zero3_retain")
    assert re.search("call engine.backward.tensor. instead", outcome.error), outcome


test_a_backward_inside_another_belongs_to_it = checked(
    accumulation(nested.nested, 1, 2, 3, core={2, 3}),
    accumulation(nested.nested, 1, 2, 3, **PLAIN),
    # The hook of a BF16_Optimizer, which runs it, was there before engine.backward was called.
    accumulation(nested.nested, 1, marks=[SINCE_0_18_6], **BF16_SUMS),
)


@on_ranks
@STAGES
def test_a_step_without_one_says_what_to_call(stage: int) -> None:
    with applied("accumulation"):
        engine = engine_of(stage=stage)
        engine.backward(loss_of(engine, 0))
        engine.step()
        with pytest.raises(Refused, match=r"run a forward and engine\.backward\(loss\)"):
            engine.step()


# As GradCache has them.
test_plain_backwards_add_up = checked(accumulation(losses.two_forwards, 1, 2, 3, **PLAIN))


@trains("accumulation", *(at(2, micro_steps=3, **OFFLOADED, **more) for more in ({}, BF16_SUMS)))
def test_what_is_given_counts_once(trainer: Any, step: int, micro: int) -> None:
    """All but the last of three reach the head, which has a gradient by hand after the first."""
    trainer.backward(loss_of(trainer, step, micro, heads.FIRST if micro == 2 else heads.BOTH))
    if micro == 0:
        by_hand.give(trainer, step)


def a_step_between(trainer: Any) -> None:
    """Two backwards over one forward, and a step after each, as Accelerate takes it."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(first, retain_graph=True)
        trainer.step()
        if trainer.is_engine:
            trainer.backward(second)
            trainer.step()


@on_ranks
@STAGES
def test_a_backward_over_a_forward_of_the_step_before_is_said_once(stage: int) -> None:
    outcome = run(a_step_between, Options(stage, steps=2), "zero3_retain")
    (warning,) = [outcome.error] if stage == 3 else outcome.said
    assert "backward over a forward from before engine.step()" in warning


@trains("zero3_retain", at(1, 2, 3, **FP16))
def test_a_step_that_overflow_skips_leaves_the_forward_as_it_was(trainer: Any, step: int) -> None:
    """The first of two losses over one forward overflows, and is left out."""
    first, second = both_losses(trainer, step)
    if trainer.is_engine:
        trainer.backward(first * float("inf"), retain_graph=True)
        trainer.step()
    trainer.backward(second)


@trains("zero3_retain", at(1, 2, 3, core={2}))
def test_with_an_older_torch(trainer: Any) -> None:
    """To PyTorch 2.4 this does not turn gradients on, and in a backward they are off."""

    def older(tensor: torch.Tensor) -> Any:
        return tensor.grad_fn or tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    with mock.patch("torch.autograd.graph._get_grad_fn_or_grad_acc", older):
        losses.two_backwards(trainer)


@on_ranks
@pytest.mark.core_case(stage=2)
@STAGES
def test_a_parameter_costs_the_same_beside_many(stage: int) -> None:
    """0.18.5 and 0.18.6 count all of them again for each."""

    def train(trainer: Any) -> None:
        for _ in trainer.steps():
            trainer.backward(trainer(torch.ones(2, 4)).sum())
            trainer.step()

    calls = []
    for depth in (8, 16, 64, 72):
        model: Any = lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(depth)))  # noqa: B023, E731
        options = Options(stage, model=model)
        calls.append(run(train, options, "accumulation", looks=["calls"]).calls)
    few, more, many, most = calls
    assert 0 < most - many < 1.05 * (more - few)


def compiled(trainer: Any, by_the_script: bool) -> None:
    compiler = partial(torch.compile, backend="eager")
    around: Any = nullcontext
    if trainer.is_engine and by_the_script:
        around = partial(torch._dynamo.compiled_autograd._enable, compiler)
    elif trainer.is_engine:
        trainer.engine.compile(backend="eager", compiled_autograd_enabled=True)
    for step in trainer.steps():
        for micro in range(2):
            loss = loss_of(trainer, step, micro)
            with around():
                trainer.backward(loss)
            trainer.step()


@pytest.mark.exhaustive
@stock.since("0.19.8", "compiled autograd that trains")
@pytest.mark.parametrize("by_the_script", [False, True])
def test_compiled_autograd_is_left_to_stock(fresh_world: World, by_the_script: bool) -> None:
    script = partial(compiled, by_the_script=by_the_script)
    check(fresh_world, script, Options(1, micro_steps=2), "accumulation")
