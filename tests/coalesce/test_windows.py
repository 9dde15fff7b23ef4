"""One window is one step: the sum that plain PyTorch has, whatever the ZeRO settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from ds_patches.coalesce import block
from tests.coalesce import experts
from tests.coalesce.loops import BACKWARDS, UPSTREAM, several_backwards
from tests.scripts import windows
from tests.training import stock
from tests.training.models import loss_of
from tests.training.options import BF16, BF16_SUMS, FP16, OFFLOADED, OFFLOADED_ALL, Options
from tests.training.run import check
from tests.training.trainers import EngineTrainer
from tests.world import World

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
#: What ends a block: our own reductions, or DeepSpeed's in two ways.
by_reducer = pytest.mark.parametrize(
    "more", [{}, UPSTREAM, OFFLOADED], ids=["", "upstream", "offloaded"]
)


def holds(world: World, **options: Any) -> None:
    stock.needs_style(options.get("style", "engine"))
    check(world, several_backwards, Options(**options), "coalesce")


@pytest.mark.core_case(scatters=True, contiguous=True, overlap=True)
@pytest.mark.parametrize(
    ("contiguous", "overlap", "scatters"),
    [  # every pair of values, at every stage
        (True, True, True),
        (True, False, False),
        (False, False, True),
        (False, True, False),
    ],
)
@STAGES
def test_a_block_is_a_sum(
    world: World, stage: int, contiguous: bool, overlap: bool, scatters: bool
) -> None:
    if stage < 3 and not scatters and not contiguous:
        stock.needs_non_contiguous()
    zero = {"contiguous_gradients": contiguous, "overlap_comm": overlap}
    holds(world, stage=stage, zero={**zero, "reduce_scatter": scatters})


@pytest.mark.core_case(stage=2, more={})
@pytest.mark.core_case(stage=2, more=OFFLOADED)
@by_reducer
@STAGES
def test_reducers(world: World, stage: int, more: dict[str, Any]) -> None:
    holds(world, stage=stage, **more)


def test_offloaded_parameters(world: World) -> None:
    holds(world, stage=3, **OFFLOADED_ALL)


@pytest.mark.parametrize("scatters", [True, False])
@pytest.mark.parametrize("bucket", [40, 10**6])  # 500 is everywhere else's
@STAGES
def test_buckets(world: World, stage: int, bucket: int, scatters: bool) -> None:
    holds(world, stage=stage, zero={"reduce_bucket_size": bucket, "reduce_scatter": scatters})


@pytest.mark.parametrize(
    "model",
    ["FrozenTrunk", "SharedBlock", "TiedEmbedding", "Reentrant", "NonReentrant", "LeafModule"],
)
@STAGES
def test_models(world: World, stage: int, model: str) -> None:
    holds(world, stage=stage, model=model)


@pytest.mark.parametrize("style", ["scale", "torch"])
@STAGES
def test_torch_style(world: World, stage: int, style: str) -> None:
    holds(world, stage=stage, style=style)


@pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["", "offloaded"])
@STAGES
def test_clipping_goes_by_the_norm_of_the_sum(
    world: World, stage: int, more: dict[str, Any]
) -> None:
    holds(world, stage=stage, clip=0.05, **more)


@pytest.mark.core_case(stage=2, dtype=BF16_SUMS, more={})
@pytest.mark.core_case(stage=2, dtype=BF16_SUMS, more=OFFLOADED)
@by_reducer
@pytest.mark.parametrize("dtype", [BF16, BF16_SUMS], ids=["low", "fp32"])
@STAGES
def test_bfloat16(world: World, stage: int, dtype: dict[str, Any], more: dict[str, Any]) -> None:
    if stage == 1 and dtype is BF16_SUMS and more != OFFLOADED:
        pytest.skip("bf16 with fp32 gradients at stage 1 is BF16_Optimizer, which is refused")
    holds(world, stage=stage, **dtype, **more)


@STAGES
def test_float16_with_a_dynamic_loss_scale(world: World, stage: int) -> None:
    holds(world, stage=stage, **FP16)


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_experts(world: World, stage: int, ep_size: int) -> None:
    for difference, moved in world.run(experts.against_boundaries, stage, ep_size):
        assert difference <= 1e-6 < 1e-3 < moved


# --- Scripts -------------------------------------------------------------------------------------


class BothWays(EngineTrainer):
    """Sets boundaries in a window too: they change nothing there, and the last one holds after."""

    _left = 0

    @contextmanager
    def window(self, **arguments: Any) -> Iterator[None]:
        self._left = BACKWARDS
        with super().window(**arguments):
            yield
        assert self.engine._is_gradient_accumulation_boundary is True

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        self._left -= 1
        self.boundary(self._left == 0)
        super().backward(loss, retain_graph)


@STAGES
def test_boundaries_inside_a_window(world: World, stage: int) -> None:
    check(world, several_backwards, Options(stage), "coalesce", engine=BothWays)


def halved(trainer: Any) -> None:
    """At a boundary that is set, one step ends what plain PyTorch counts as two micro steps."""
    for step in trainer.steps():
        if trainer.is_engine:
            trainer.boundary(True)
        with trainer.window():
            for micro in range(BACKWARDS):
                trainer.backward(loss_of(trainer, step, micro))
        for _ in range(1 if trainer.is_engine else 2):
            trainer.step()


@STAGES
def test_gradient_accumulation_divides_the_loss(world: World, stage: int) -> None:
    check(world, halved, Options(stage, micro_steps=2), "coalesce")


@pytest.mark.core_case(style="engine", stage=3)
@pytest.mark.parametrize("style", ["engine", "torch"])
@STAGES
def test_several_backwards_over_each_forward_with_zero3_retain(
    world: World, stage: int, style: str
) -> None:
    stock.needs_style(style)
    options = Options(stage, style=style)
    check(world, windows.window_over_one_forward, options, "coalesce", "zero3_retain")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_tensor_that_is_no_output_has_a_backward_in_a_window(world: World, stage: int) -> None:
    script, options = windows.window_over_an_auxiliary_tensor, Options(stage, model="Auxiliary")
    check(world, script, options, "coalesce", "zero3_retain")


@pytest.mark.core_case(script=windows.uneven_windows, more=OFFLOADED, stage=2)
@pytest.mark.core_case(script=windows.two_windows, stage=2)
@pytest.mark.core_case(script=windows.two_windows, stage=3, more={})
@pytest.mark.core_case(script=windows.window_among_micro_steps, stage=2)
@by_reducer
@pytest.mark.parametrize(
    "script",
    [
        windows.uneven_windows,
        windows.two_windows,
        windows.two_windows_before_one_step,
        windows.window_among_micro_steps,
    ],
)
@STAGES
def test_scripts(world: World, stage: int, script: Any, more: dict[str, Any]) -> None:
    """Parameters that rest count as zeros; a block adds to what its step has reduced."""
    check(world, script, script.at(stage, steps=4, **more), "coalesce")


def uncounted(trainer: Any) -> None:
    """The ranks are more than can tell each other what they have."""
    with mock.patch.object(block, "MOST_RANKS", 1):
        windows.uneven_windows(trainer)


@by_reducer
@STAGES
def test_more_ranks_than_can_be_counted(world: World, stage: int, more: dict[str, Any]) -> None:
    check(world, uncounted, windows.uneven_windows.at(stage, steps=4, **more), "coalesce")
