"""A gradient that comes to a parameter again in one backward counts again, and each once."""

from functools import partial
from typing import Any

import pytest

from tests.harness import Options, checked, of, run, stock
from tests.harness.models import RaiseInBackward, backward_that_raises, loss_of
from tests.harness.options import OFFLOADED, OVERLAP, SCATTERED
from tests.scripts import adapters, arrivals, divided, engines
from tests.world import World, on_ranks

retained = partial(of, "zero3_retain coalesce")
twice = partial(retained, arrivals.two_forwards_for_one_loss)

test_two_forwards_for_one_loss = checked(
    twice(1, 2, 3, core={2, 3}),
    # In 0.18.3 and 0.18.4 DeepSpeed's epilogue of a plain backward runs before its end.
    twice(2, core={2}, style="torch"),
    *(twice(2, core={2}, **more) for more in (OFFLOADED, OVERLAP, SCATTERED)),
    retained(arrivals.outside_and_then_inside, 2, core={2}),
    retained(arrivals.fewer_forwards_later, 1, 2, 3, core={2}, steps=4),
    retained(arrivals.ranks_of_unlike_forwards, 1, 2, core={2}, steps=4),
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
    *(
        retained(retried, 1, 2, 3, micro_steps=2, **more)
        for more in (OFFLOADED, {"style": "torch"})
    ),
)

# --- Divided once ---------------------------------------------------------------------------------

DIVIDED = (
    divided.with_a_penalty_on_a_weight,
    divided.beside_the_module,
    divided.with_a_parameter_returned,
    divided.with_a_gradient_penalty,
    divided.behind_a_layer_of_its_own,
    divided.by_turns,
    divided.by_turns_in_a_window,
)
SINCE_0_18_5 = stock.since("0.18.5", "a plain backward past all outputs, in DeepSpeed's count,")

test_a_plain_backward_is_divided_once = checked(
    *(retained(script, 1, 2, 3) for script in DIVIDED),
    retained(divided.with_a_backward_of_a_penalty, 1, 2, 3, marks=[SINCE_0_18_5]),
)


# --- Of this step, and of this engine -------------------------------------------------------------

SINCE_0_16_6 = stock.since("0.16.6", "hooks that outlive the freezing of their parameter")

test_what_was_written_in_this_step_is_stepped = checked(
    retained(adapters.trained_by_turns, 1, 2, 3, core={3}, marks=[SINCE_0_16_6]),
)

SINCE_0_18_3 = stock.since("0.18.3", "an epilogue after another engine's backward")

test_gradients_of_another_engines_backward_are_kept = checked(
    retained(engines.encoder_of_two_heads, 1, 2, 3, core={2, 3}, marks=[SINCE_0_18_3]),
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
    says=["another engine's backward"],
)
test_or_by_the_script = checked(retained(engines.gan, 2, 3, core={3}))
