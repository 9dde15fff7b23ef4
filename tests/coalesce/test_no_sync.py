"""`no_sync()` at ZeRO 2 and 3 is DistributedDataParallel's, as stock's is at ZeRO 1."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from tests.coalesce.loops import UPSTREAM
from tests.scripts import unsynced
from tests.training import stock
from tests.training.options import BF16, BF16_SUMS, FP16, OFFLOADED, OVERLAP, Options
from tests.training.run import check, run
from tests.training.surroundings import RATE
from tests.training.trainers import PlainTrainer
from tests.world import World

ALL = [1, 2, 3]
STAGES = pytest.mark.parametrize("stage", ALL)
REFUSING = [2, 3]  # stock


def holds(world: World, script: Any, stage: int, more: dict[str, Any]) -> None:
    stock.needs_a_zero_optimizer(stage, more)
    check(world, script, script.at(stage, **{"steps": 3, **more}), "coalesce")


HALVES = BF16, BF16_SUMS, BF16 | OFFLOADED, BF16_SUMS | OFFLOADED
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    UPSTREAM,
    OVERLAP,
    FP16,
    *({"model": model} for model in ("FrozenTrunk", "SharedBlock", "Reentrant", "LeafModule")),
)


@pytest.mark.core_case(more={}, stage=3)
@pytest.mark.parametrize("more", OPTIONS, ids=str)
@STAGES
def test_the_next_synced_backward_reduces_the_sum(
    world: World, stage: int, more: dict[str, Any]
) -> None:
    if stage == 1 and more == OVERLAP:
        pytest.skip("stock's own dies: 'has already been reduced'")
    holds(world, unsynced.unsynced, stage, more)


@pytest.mark.parametrize("script", [unsynced.unsynced, unsynced.synced_in_between])
@pytest.mark.parametrize("more", [*HALVES, {"style": "scale"}, {"style": "torch"}], ids=str)
@STAGES
def test_precisions_and_styles(world: World, stage: int, more: Any, script: Any) -> None:
    holds(world, script, stage, more)


class DDPTrainer(PlainTrainer):
    """PyTorch's own data parallel training, the model of `no_sync()`."""

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        super().__init__(module, options)
        self._ddp = torch.nn.parallel.DistributedDataParallel(module)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self._ddp(*inputs)

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._ddp.no_sync()
        return context

    def step(self) -> None:
        """Gradients are averaged already."""
        with torch.no_grad():
            for param in self.module.parameters():
                param -= RATE * param.grad
        self.module.zero_grad()


@STAGES
def test_as_ddp_does(world: World, stage: int) -> None:
    check(world, unsynced.unsynced, Options(stage), "coalesce", plain=DDPTrainer)


@pytest.mark.core_case(script=unsynced.stepping_inside, stage=2, more={})
@pytest.mark.core_case(script=unsynced.unsynced_among_micro_steps, stage=1)
@pytest.mark.core_case(script=unsynced.synced_in_between, stage=2, more=OFFLOADED)
@pytest.mark.core_case(script=unsynced.synced_in_between, stage=3, more={})
@pytest.mark.parametrize(
    "script",
    [
        unsynced.stepping_inside,
        unsynced.unsynced_among_micro_steps,
        unsynced.synced_in_between,
        unsynced.beside_windows,
        unsynced.unsynced_and_uneven,
        unsynced.unsynced_and_dropped,
    ],
)
@pytest.mark.parametrize(
    ("stage", "more"),
    [(1, {}), (2, {}), (3, {}), (2, OFFLOADED), (3, OFFLOADED)],
    ids=["1", "2", "3", "2-offloaded", "3-offloaded"],
)
def test_scripts(world: World, stage: int, script: Any, more: dict[str, Any]) -> None:
    if stage == 1 and script is unsynced.stepping_inside:
        pytest.skip("stock's own refuses engine.step() inside")
    if stage == 1 and script.options.micro_steps == 3 and not stock.TORCH_STYLE:
        for one in world.run(run, script, script.at(1, steps=4), "coalesce"):
            assert "not divided by gradient_accumulation_steps" in one.said[0]
        return
    holds(world, script, stage, {"steps": 4, **more})


@pytest.mark.parametrize(
    ("script", "more"),
    [
        (unsynced.synced_in_between, UPSTREAM),
        (unsynced.unsynced_and_uneven, UPSTREAM),
        (unsynced.unlike_numbers_unsynced, {}),  # not at stage 3, where a forward is a collective
    ],
)
@pytest.mark.parametrize("stage", [1, 2])
def test_scripts_without_stage_3(world: World, stage: int, script: Any, more: Any) -> None:
    holds(world, script, stage, more)


@pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["", "offloaded"])
@STAGES
def test_several_backwards_over_one_forward_with_zero3_retain(
    world: World, stage: int, more: dict[str, Any]
) -> None:
    script = unsynced.unsynced_over_one_forward
    check(world, script, Options(stage, **more), "coalesce", "zero3_retain")
