"""One block is one step: the sum that plain PyTorch has, whatever the ZeRO settings."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import OVERLAP, PERSISTENT, SMALL_PREFETCH, Options, World, stock
from tests.harness.cases import STAGES, Case, at, cases, checked, of, trains
from tests.harness.experts import Experts, engine_with
from tests.harness.models import loss_of
from tests.harness.options import ALL_REDUCED, BF16, BF16_SUMS, FP16, OFFLOADED, OFFLOADED_ALL
from tests.harness.run import applied, check, run
from tests.harness.trainers import EngineTrainer, worst_difference
from tests.scripts import nested, windows
from tests.world import on_ranks

#: What ends a block: our own reductions, or DeepSpeed's in two ways.
REDUCERS: tuple[dict[str, Any], ...] = ({}, ALL_REDUCED, OFFLOADED)
TWO_GROUPS, FIVE_GROUPS = {"rates": (0.1,) * 2}, {"rates": (0.1,) * 5}
#: Padding between parameters.
ALIGNED = {"zero": {"parameter_alignment": True}}
SINCE_0_19_7 = stock.since("0.19.7", "parameter_alignment")
ROUND_ROBIN = {"zero": {"round_robin_gradients": True}}
TRICKY = {"contiguous_gradients": False, "overlap_comm": True, "reduce_scatter": False}


def bucket(elements: int) -> dict[str, Any]:
    return {"zero": {"reduce_bucket_size": elements}}


coalesce = partial(of, "coalesce")
window = partial(coalesce, windows.window)


test_a_block_is_a_sum = checked(
    *(window(1, 2, 3, core={2}, **more) for more in REDUCERS),
    window(3, **OFFLOADED_ALL),
    window(1, 2, 3, core={1, 2, 3}, **OVERLAP),
    window(1, 2, 3, zero=TRICKY),
    window(1, 2, 3, **FP16),
    *(window(1, 2, 3, **BF16, **more) for more in REDUCERS),
    *(window(2, 3, core={2}, **BF16_SUMS, **more) for more in REDUCERS),
    window(2, **BF16_SUMS, settings={"communication_data_type": "fp32"}),
    *(window(1, 2, 3, style=style) for style in ("scale", "torch")),
    *(window(1, 2, 3, model=m) for m in ("SharedBlock", "Reentrant", "NonReentrant", "LeafModule")),
    *(window(3, model=model) for model in ("FrozenTrunk", "TiedEmbedding")),
    *(window(3, zero=zero) for zero in (PERSISTENT, SMALL_PREFETCH)),
    *(of("coalesce zero3_retain", windows.window, 3, style=style) for style in ("engine", "torch")),
    *(
        window(1, 2, core={2}, **more)
        for more in ({"model": "Unused"}, {"clip": 0.05, **TWO_GROUPS})
    ),
    *(window(1, 2, **FIVE_GROUPS, **more) for more in ({}, ROUND_ROBIN, bucket(1), bucket(24))),
    window(1, 2, marks=[SINCE_0_19_7], **ALIGNED),
)


SCRIPTS = windows.uneven_windows, windows.two_windows, windows.window_among_micro_steps
#: Backwards in each other, as cached losses have them: the outer one ends with one reduction.
NESTED = nested.cached, nested.cached_in_a_window, nested.cached_after_another
retained = partial(of, "coalesce zero3_retain")


# Parameters that rest count as zeros; a block adds to what its step has reduced.
test_scripts = checked(
    *(coalesce(script, 1, 2, 3, core={2}, steps=4, **m) for script in SCRIPTS for m in REDUCERS),
    *(coalesce(windows.two_windows_before_one_step, 1, 2, 3, **more) for more in REDUCERS),
    coalesce(nested.cached, 1, 2, 3, core={1, 2, 3}),
    *(coalesce(script, 1, 2, 3, **m) for script in NESTED for m in REDUCERS[1:]),
    retained(windows.window_over_one_forward, 1, 2, 3, core={3}),
    retained(windows.window_over_one_forward, 1, 2, 3, style="torch"),
    retained(windows.window_over_an_auxiliary_tensor, 1, 2, 3),
)


@pytest.mark.core_case(stage=2)
@STAGES
def test_a_tensor_that_is_no_output_is_refused(world: World, stage: int) -> None:
    """``engine.backward`` would have scaled it."""
    script = windows.window_over_an_auxiliary_tensor
    for outcome in world.run(run, script, script.at(stage, **FP16), "coalesce"):
        assert re.search("engine.backward.(tensor|loss)", outcome.error), outcome


class BoundaryTrainer(EngineTrainer):
    """Stock's own way to several backwards per step: all but the last are no boundary."""

    @contextmanager
    def window(self) -> Iterator[None]:
        self._left = 3
        yield

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        self._left -= 1
        self.boundary(self._left == 0)
        super().backward(loss, retain_graph)


class BothWays(BoundaryTrainer):
    """Sets boundaries in a block too: they change nothing there, and the last one holds after."""

    @contextmanager
    def window(self) -> Iterator[None]:
        with super().window(), EngineTrainer.window(self):
            yield
        assert self.engine._is_gradient_accumulation_boundary is True


@STAGES
def test_boundaries_inside_a_block(world: World, stage: int) -> None:
    check(world, windows.window, Options(stage), "coalesce", engine=BothWays)


@trains("coalesce", at(2, **FP16))
def test_an_overflow_on_one_rank_skips_the_step_on_all(trainer: Any) -> None:
    for step in trainer.steps():
        if step == 1 and not trainer.is_engine:
            continue
        with trainer.window():
            for micro in range(3):
                bad = step == micro == dist.get_rank() == 1
                trainer.backward(loss_of(trainer, step, micro) * (float("inf") if bad else 1))
        trainer.step()


@cases(*(window(2, **more) for more in (bucket(24), bucket(10**6), FIVE_GROUPS, {"clip": 0.05})))
def test_three_ranks(three: World, case: Case) -> None:
    case.check(three)


@on_ranks
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_experts_that_reduce_over_other_ranks(stage: int, ep_size: int) -> None:
    """Blocks end where stock's own sum does."""
    ends = []
    for kind in (EngineTrainer, BoundaryTrainer):
        with applied("coalesce"):
            engine, origin = engine_with(partial(Experts, ep_size), Options(stage))
            windows.window(trainer := kind(engine, Options(stage)))
            ends.append(trainer.parameters())
    assert worst_difference(*ends)[0] <= 1e-6 < 1e-3 < worst_difference(ends[1], origin)[0]


@trains("coalesce", at(1, 2, 3, micro_steps=2))
def test_gradient_accumulation_divides_the_loss(trainer: Any) -> None:
    """At a boundary that is set, one step ends what plain PyTorch counts as two micro steps."""
    for step in trainer.steps():
        if trainer.is_engine:
            trainer.boundary(True)
        with trainer.window():
            for micro in range(3):
                trainer.backward(loss_of(trainer, step, micro))
        for _ in range(1 if trainer.is_engine else 2):
            trainer.step()
