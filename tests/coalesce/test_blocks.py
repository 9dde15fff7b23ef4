"""One block is one step: the sum that plain PyTorch has, whatever the ZeRO settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from ds_patches.coalesce import block
from tests.coalesce.loops import BACKWARDS, UPSTREAM, several_backwards
from tests.scripts import windows
from tests.training import models, stock
from tests.training.models import loss_of
from tests.training.options import BF16, BF16_SUMS, FP16, OFFLOADED, OFFLOADED_ALL, Options
from tests.training.run import applied, check, run
from tests.training.surroundings import RATE, build_engine
from tests.training.trainers import EngineTrainer, worst_difference
from tests.world import World

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
#: What ends a block: our own reductions, or DeepSpeed's in two ways.
REDUCERS: tuple[dict[str, Any], ...] = ({}, UPSTREAM, OFFLOADED)
by_reducer = pytest.mark.parametrize("more", REDUCERS, ids=["", "upstream", "offloaded"])


def zero(contiguous: bool, overlap: bool, scatters: bool) -> dict[str, Any]:
    given = {"contiguous_gradients": contiguous, "overlap_comm": overlap}
    return {"zero": {**given, "reduce_scatter": scatters}}


OPTIONS: tuple[dict[str, Any], ...] = (
    *REDUCERS,
    # Every pair of values.
    *(zero(True, True, True), zero(True, False, False)),
    *(zero(False, False, True), zero(False, True, False)),
    *(  # 500 is everywhere else's.
        {"zero": {"reduce_bucket_size": bucket, "reduce_scatter": scatters}}
        for bucket in (40, 10**6)
        for scatters in (True, False)
    ),
    *({"model": model} for model in ("FrozenTrunk", "SharedBlock", "TiedEmbedding")),
    *({"model": model} for model in ("Reentrant", "NonReentrant", "LeafModule")),
    *({"style": style} for style in ("scale", "torch")),
    *({"clip": 0.05, **more} for more in ({}, OFFLOADED)),
    *(dtype | more for dtype in (BF16, BF16_SUMS) for more in REDUCERS),
    FP16,
)


@pytest.mark.core_case(more=zero(True, True, True))
@pytest.mark.core_case(stage=2, more={})
@pytest.mark.core_case(stage=2, more=OFFLOADED)
@pytest.mark.core_case(stage=2, more=BF16_SUMS)
@pytest.mark.core_case(stage=2, more=BF16_SUMS | OFFLOADED)
@pytest.mark.parametrize("more", OPTIONS, ids=str)
@STAGES
def test_a_block_is_a_sum(world: World, stage: int, more: dict[str, Any]) -> None:
    if stage < 3 and more == zero(False, True, False):
        stock.needs_non_contiguous()
    stock.needs_a_zero_optimizer(stage, more)
    check(world, several_backwards, Options(stage, **more), "coalesce")


def test_offloaded_parameters(world: World) -> None:
    check(world, several_backwards, Options(3, **OFFLOADED_ALL), "coalesce")


class BoundaryTrainer(EngineTrainer):
    """Stock's own way to several backwards per step: all but the last are no boundary."""

    @contextmanager
    def window(self, **_: Any) -> Iterator[None]:
        self._left = BACKWARDS
        yield

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        self._left -= 1
        self.boundary(self._left == 0)
        super().backward(loss, retain_graph)


class BothWays(BoundaryTrainer):
    """Sets boundaries in a block too: they change nothing there, and the last one holds after."""

    @contextmanager
    def window(self, **arguments: Any) -> Iterator[None]:
        with super().window(), EngineTrainer.window(self, **arguments):
            yield
        assert self.engine._is_gradient_accumulation_boundary is True


@STAGES
def test_boundaries_inside_a_block(world: World, stage: int) -> None:
    check(world, several_backwards, Options(stage), "coalesce", engine=BothWays)


class Mixture(torch.nn.Module):
    """Two of DeepSpeed's experts; each token goes to one of them."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(models.WIDTH, models.Block(), 2, ep_size=ep_size, min_capacity=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.moe(x)[0]
        return output


def against_boundaries(stage: int, ep_size: int) -> tuple[float, float]:
    """How far the ends by blocks and by stock's own sum are from each other, and the start."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    ends = []
    for kind in (EngineTrainer, BoundaryTrainer):
        model: Any = models.build("TwoHeads")
        model.blocks.append(Mixture(ep_size))
        origin = {name: p.detach().clone() for name, p in model.named_parameters()}
        groups = split({"params": list(model.parameters()), "name": "all"})
        optimizer = torch.optim.SGD(groups, lr=RATE)
        with applied("coalesce"):
            engine = build_engine(model, Options(stage).config, optimizer=optimizer)
            several_backwards(trainer := kind(engine, Options(stage)))
            ends.append(trainer.parameters())
    return worst_difference(*ends)[0], worst_difference(ends[1], origin)[0]


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_experts_that_reduce_over_other_ranks(world: World, stage: int, ep_size: int) -> None:
    for difference, moved in world.run(against_boundaries, stage, ep_size):
        assert difference <= 1e-6 < 1e-3 < moved


# --- Scripts -------------------------------------------------------------------------------------


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


@pytest.mark.core_case(style="engine", stage=3, script=windows.window_over_one_forward)
@pytest.mark.parametrize(
    ("script", "style"),
    [
        (windows.window_over_one_forward, "engine"),
        (windows.window_over_one_forward, "torch"),
        (windows.window_over_an_auxiliary_tensor, "engine"),
    ],
)
@STAGES
def test_with_zero3_retain(world: World, stage: int, script: Any, style: str) -> None:
    check(world, script, script.at(stage, style=style), "coalesce", "zero3_retain")


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("more", [{"micro_steps": 2}, FP16], ids=["divided", "scaled"])
@STAGES
def test_a_tensor_that_is_no_output_is_refused(world: World, stage: int, more: Any) -> None:
    """Where ``engine.backward`` would have done more than its plain backward."""
    if "micro_steps" in more and not stock.TORCH_STYLE:
        pytest.skip("stock divides no plain backward: the others are not either")
    script = windows.window_over_an_auxiliary_tensor
    for one in world.run(run, script, script.at(stage, style="engine", **more), "coalesce"):
        assert re.search("engine.backward.(tensor|loss)", one.error), one


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
