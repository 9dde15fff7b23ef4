"""A gradient that comes to a parameter again in one backward counts again, and each once."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.harness import Options, applied, checked, engine_trainer, of, run, stock
from tests.harness.models import RaiseInBackward, backward_that_raises, loss_of
from tests.harness.options import (
    ALL_REDUCED,
    BF16,
    BF16_SUMS,
    FP16,
    OFFLOADED,
    OFFLOADED_ALL,
    OVERLAP,
    SCATTERED,
)
from tests.scripts import adapters, arrivals, divided, engines
from tests.world import World, on_ranks

retained = partial(of, "zero3_retain coalesce")
twice = partial(retained, arrivals.two_forwards_for_one_loss)
LARGE, TINY = ({"zero": {"reduce_bucket_size": size}} for size in (10**6, 40))
PLAIN = {"style": "torch"}

test_two_forwards_for_one_loss = checked(
    twice(1, 2, 3, core={2, 3}),
    *(twice(1, 2, 3, **more) for more in (OVERLAP, LARGE, TINY, OFFLOADED, PLAIN, BF16, FP16)),
    *(twice(2, core={2}, **more) for more in (OFFLOADED, OVERLAP, SCATTERED)),
    *(twice(1, 2, zero=more["zero"] | OVERLAP["zero"]) for more in (LARGE, TINY, SCATTERED)),
    *(twice(1, 2, **more) for more in (SCATTERED, ALL_REDUCED, BF16_SUMS)),
    twice(3, **OFFLOADED_ALL),
    twice(3, **ALL_REDUCED),
    twice(2, 3, clip=0.05),
    twice(2, 3, clip=0.05, **OFFLOADED),
    twice(2, zero={"round_robin_gradients": True}),
    twice(2, 3, rates=(0.1, 0.05)),
)

test_more_arrivals_than_two = checked(
    *(
        retained(script, 1, 2, 3, **more)
        for script in (
            arrivals.three_forwards_for_one_loss,
            arrivals.applied_twelve_times,
            arrivals.inside_and_then_outside,
            arrivals.outside_and_then_inside,
            arrivals.two_losses_over_two_forwards,
        )
        for more in (OVERLAP, LARGE)
    ),
    retained(arrivals.outside_and_then_inside, 2, core={2}),
    retained(arrivals.applied_twelve_times, 2, 3, **OFFLOADED),
)

test_in_micro_steps = checked(
    *(
        retained(arrivals.micro_steps_of_two_forwards, 1, 2, 3, **more)
        for more in ({}, OVERLAP, OFFLOADED, PLAIN)
    ),
)

test_another_number_of_forwards = checked(
    retained(arrivals.fewer_forwards_later, 1, 2, 3, core={2}, steps=4),
    retained(arrivals.fewer_forwards_later, 1, 2, steps=4, **OVERLAP),
    retained(arrivals.more_forwards_later, 2, 3, steps=4, **LARGE),
    retained(arrivals.ranks_of_unlike_forwards, 1, 2, core={2}, steps=4),
    retained(arrivals.ranks_of_unlike_forwards, 1, 2, steps=4, **LARGE),
)


def test_more_gradients_than_the_ranks_agreed_on_are_refused(world: World) -> None:
    """Each rank keeps to the order of reductions that it knows."""
    script = arrivals.more_forwards_later
    for outcome in world.run(run, script, script.at(2, steps=4), "accumulation"):
        assert outcome.error.startswith("Refused: a backward brought"), outcome


def raising_in_the_middle(trainer: Any, step: int) -> None:
    """A backward over two forwards raises when one of them has come, and is tried again."""
    if trainer.is_engine:
        first = RaiseInBackward.apply(loss_of(trainer, step, 7))  # its backward comes last
        backward_that_raises(trainer, first + loss_of(trainer, step, 8))
    arrivals.forward_and_backward(trainer, step, 2)


test_a_backward_that_raises_takes_along_what_was_reduced = checked(
    retained(raising_in_the_middle, 1, 2, 3, model="Reentrant"),
    retained(raising_in_the_middle, 1, 2, model="Reentrant", **OVERLAP),
    retained(raising_in_the_middle, 2, 3, model="Reentrant", **OFFLOADED),
    says=["A backward raised"] * 3,
)


class RaiseAtOnce(RaiseInBackward):
    """Raises before a gradient has come to a parameter."""


def retried(trainer: Any, step: int, micro: int) -> None:
    """The second micro step tries a backward that raises before its first gradient."""
    if micro and trainer.is_engine:
        backward_that_raises(trainer, RaiseAtOnce.apply(loss_of(trainer, step, 7)))
    trainer.backward(loss_of(trainer, step, micro))


test_a_backward_that_raises_at_once_takes_nothing_along = checked(
    retained(retried, 1, 2, 3, core={1, 2, 3}, micro_steps=2),
    *(retained(retried, 1, 2, 3, micro_steps=2, **more) for more in (OVERLAP, OFFLOADED, PLAIN)),
)


def gradients(stage: int, **options: Any) -> list[torch.Tensor]:
    """Run a backward over two forwards; return the gradients that ``safe_get_full_grad`` reads."""
    trainer = engine_trainer("Reentrant", stage=stage, **options)
    arrivals.forward_and_backward(trainer, 0, 2)
    return [gradient.clone() for gradient in trainer.full_grads()]


@on_ranks
@pytest.mark.parametrize("options", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_gradient_that_is_read_is_the_sum(stage: int, options: Any) -> None:
    with applied("zero3_retain"):
        read, expected = gradients(stage, **options), gradients(1)
    for gradient, other in zip(read, expected, strict=True):
        torch.testing.assert_close(gradient, other)


# --- Divided once ---------------------------------------------------------------------------------

DIVIDED = (
    divided.with_a_penalty_on_a_weight,
    divided.beside_the_module,
    divided.beside_a_layer,
    divided.with_a_parameter_returned,
    divided.with_a_gradient_penalty,
    divided.behind_a_layer_of_its_own,
    divided.by_turns,
    divided.by_turns_in_a_window,
)
SINCE_0_18_5 = stock.since("0.18.5", "a plain backward past all outputs, in DeepSpeed's count,")

test_a_plain_backward_is_divided_once = checked(
    *(retained(script, 1, 2, 3) for script in DIVIDED),
    *(retained(script, 1, 2, **OVERLAP) for script in DIVIDED),
    *(retained(script, 2, 3, **OFFLOADED) for script in DIVIDED),
    *(retained(script, 1, 2, **SCATTERED) for script in DIVIDED),
    retained(divided.with_a_backward_of_a_penalty, 1, 2, 3, marks=[SINCE_0_18_5]),
    retained(divided.by_turns, 2, **TINY),
)


# --- Of this step, and of this engine -------------------------------------------------------------

SINCE_0_16_6 = stock.since("0.16.6", "hooks that outlive the freezing of their parameter")

test_what_was_written_in_this_step_is_stepped = checked(
    *(
        retained(script, 1, 2, 3, marks=[SINCE_0_16_6], **more)
        for script in (
            adapters.trained_by_turns,
            adapters.frozen_at_the_boundary,
            adapters.unfrozen_at_the_boundary,
            adapters.trained_by_turns_in_a_window,
        )
        for more in ({}, OFFLOADED, {"clip": 0.05})
    ),
    retained(adapters.trained_by_turns, 3, core={3}, marks=[SINCE_0_16_6]),
)

SINCE_0_18_3 = stock.since("0.18.3", "an epilogue after another engine's backward")

test_gradients_of_another_engines_backward_are_kept = checked(
    retained(engines.encoder_of_two_heads, 1, 2, 3, core={2, 3}, marks=[SINCE_0_18_3]),
    retained(engines.encoder_of_two_heads, 1, 2, 3, marks=[SINCE_0_18_3], **OFFLOADED),
)


@on_ranks
@pytest.mark.core_case
@pytest.mark.skipif(
    stock.TORCH_STYLE, reason="from 0.18.3 on these gradients are kept, and stepped"
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_or_refused(stage: int) -> None:
    options = Options(stage, model="Linears")
    outcome = run(engines.encoder_of_two_heads, options, "zero3_retain", "coalesce")
    assert outcome.error.startswith("Refused"), outcome


test_or_dropped_as_a_backward_of_its_own_begins = checked(
    retained(engines.gan_whose_zero_grad_is_swallowed, 1, 2, 3, core={2, 3}),
    retained(engines.gan_whose_zero_grad_is_swallowed, 1, 2, 3, **OFFLOADED),
    says=["another engine's backward"],
)
test_or_by_the_script = checked(retained(engines.gan, 2, 3, core={3}))


@on_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("style", ["torch", "scale"])
def test_reentrant_checkpointing_and_a_plain_backward(stage: int, style: str) -> None:
    """In 0.18.3 and 0.18.4 DeepSpeed's epilogue runs before what was recomputed has come."""
    stock.needs_style(style)
    outcome = run(arrivals.once, Options(stage, model="Reentrant", style=style), "zero3_retain")
    assert outcome.equal, outcome
