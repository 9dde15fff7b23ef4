"""Whatever the style, the graph and the mode, the gradients are PyTorch's."""

from functools import partial
from typing import Any

import pytest

from tests.harness import NO_REUSE, OFFLOADED_ALL, PERSISTENT, SMALL_PREFETCH, Case, World, stock
from tests.harness.cases import cases, of
from tests.harness.models import both_losses
from tests.harness.options import ALL_REDUCED, BF16, BF16_SUMS, FP16, OFFLOADED, OVERLAP, SCATTERED
from tests.harness.run import applied, run
from tests.scripts import losses, slopes

GRAPHS = ["DictOutput", "SharedBlock", "TiedEmbedding", "FrozenTrunk", "Reentrant", "NonReentrant"]
GRAPHS += ["NamedArguments", "LeafModule"]
PREFETCH = SMALL_PREFETCH | NO_REUSE
MICRO_STEPS, CLIPPED = {"micro_steps": 2}, {"clip": 0.05}
QUEUED = pytest.mark.skipif(not stock.QUEUES_EPILOGUE, reason="stock refuses plain backwards there")
patched = partial(applied, "zero3_retain")


def several_backwards(
    trainer: Any, step: int, micro: int, *, backwards: int = 2, zero: bool = False
) -> None:
    """Run backwards of up to four losses over one forward; the first two reach one head each.

    zero: call ``zero_grad()`` before every backward but the first.
    """
    first, second = both_losses(trainer, step, micro)
    every = [first, second, first * second, 0.1 * (first - second) ** 2]
    for index, loss in enumerate(every[:backwards]):
        if zero and index:
            trainer.zero_grad()
        trainer.backward(loss, retain_graph=index < backwards - 1)


two, three, four = (
    partial(of, "zero3_retain", partial(several_backwards, backwards=count)) for count in (2, 3, 4)
)
zeroed = partial(of, "zero3_retain", partial(several_backwards, zero=True))
parts = partial(of, "zero3_retain", losses.three_backwards, steps=5)


@cases(
    two(1, 2, 3, core={1, 2, 3}),
    *(two(1, 2, 3, core={1, 2, 3}, style=style) for style in ("scale", "torch")),
    zeroed(1, 2, 3, core={1, 2, 3}),
    *(zeroed(1, 2, 3, style=style) for style in ("scale", "torch")),
    *(several(1, 2, 3) for several in (three, four)),
    two(1, 2, 3, core={1, 2, 3}, **MICRO_STEPS),
    two(1, 2, 3, core={1, 2, 3}, **OFFLOADED, **MICRO_STEPS),
    *(several(1, 2, 3, **OFFLOADED) for several in (two, zeroed)),
    *(two(1, 2, 3, **CLIPPED, **more) for more in ({}, OFFLOADED)),
    *(two(1, 2, 3, **BF16, style=style) for style in ("engine", "torch")),
    *(two(2, 3, **BF16_SUMS, style=style) for style in ("engine", "torch")),
    two(1, **BF16_SUMS),
    two(1, marks=[QUEUED], **BF16_SUMS, style="torch"),
    *(two(1, 2, 3, **FP16, style=style) for style in ("engine", "scale")),
    *(two(1, 2, 3, **more) for more in (OVERLAP, ALL_REDUCED, SCATTERED)),
    three(3, core={3}, steps=5, zero=PREFETCH),
    *(several(3, **OFFLOADED_ALL) for several in (two, zeroed)),
    *(two(3, zero=zero) for zero in (NO_REUSE, SMALL_PREFETCH, PERSISTENT)),
    *(parts(3, style=style) for style in ("engine", "torch")),
    *(parts(3, core={3}, zero=zero) for zero in (SMALL_PREFETCH, PREFETCH)),
)
def test_options(world: World, case: Case) -> None:
    """Also what is prefetched for a branch that no backward runs is partitioned."""
    for outcome in case.check(world, says=None):
        left = outcome.left if case.script is losses.three_backwards else outcome.available
        assert not any(left), left


@cases(
    *(
        two(3, core={3} if model in ("SharedBlock", "Reentrant", "LeafModule") else (), model=model)
        for model in GRAPHS
    ),
    *(three(3, model=model) for model in GRAPHS),
    *(zeroed(3, model=model, style="torch") for model in GRAPHS),
)
def test_graphs(world: World, case: Case) -> None:
    for outcome in case.check(world, says=None):
        assert not any(outcome.available), outcome.available


by_hand = partial(of, "zero3_retain")


@cases(
    by_hand(slopes.gradient_penalty, 3, core={3}),
    by_hand(slopes.slope_at_the_input, 2, 3, core={3}),
    by_hand(slopes.gradient_penalty, 3, model="Linears"),
    by_hand(slopes.penalty_in_the_middle, 3),
    by_hand(slopes.slope_then_two_backwards, 2, 3),
    *(
        by_hand(script, 3, style="torch")
        for script in (
            slopes.gradient_penalty,
            slopes.penalty_in_the_middle,
            slopes.slope_then_two_backwards,
            slopes.slope_at_the_input,
        )
    ),
)
def test_gradients_by_hand(world: World, case: Case) -> None:
    """The backward of a backward gathers what it needs, too."""
    for outcome in case.check(world):
        assert "slope" in case.name or not any(outcome.available)
    if case.options.stage == 3:
        for outcome in world.run(run, case.script, case.options):
            assert outcome.error or outcome.difference > 1e-3, "stock is right"
