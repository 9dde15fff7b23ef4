"""`no_sync()` at ZeRO 2 and 3 is DistributedDataParallel's, as stock's is at ZeRO 1."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from tests.coalesce.loops import UPSTREAM
from tests.scripts import ordinary, unsynced
from tests.training import stock
from tests.training.collectives import Gradients
from tests.training.options import BF16, BF16_SUMS, FP16, OFFLOADED, OVERLAP, Options
from tests.training.run import applied, check
from tests.training.surroundings import RATE
from tests.training.trainers import EngineTrainer, PlainTrainer, engine_trainer
from tests.world import World

ALL = [1, 2, 3]
STAGES = pytest.mark.parametrize("stage", ALL)
REFUSING = [2, 3]  # stock


def holds(world: World, script: Any, stage: int, **options: Any) -> None:
    stock.needs_style(options.get("style", "engine"))
    given = script.at(stage, **{"steps": 3, **options})
    check(world, script, given, "coalesce")


@pytest.mark.core_case(more={}, stage=3)
@pytest.mark.parametrize(
    ("stage", "more"),
    [  # stock's own, at stage 1, dies with overlap_comm: "has already been reduced"
        *((stage, more) for stage in ALL for more in ({}, UPSTREAM)),
        *((stage, OVERLAP) for stage in REFUSING),
    ],
    ids=str,
)
def test_the_next_synced_backward_reduces_the_sum(
    world: World, stage: int, more: dict[str, Any]
) -> None:
    holds(world, unsynced.unsynced, stage, **more)


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
        pytest.skip("stock's own leaves out the division by gradient_accumulation_steps")
    holds(world, script, stage, steps=4, **more)


@pytest.mark.parametrize("script", [unsynced.synced_in_between, unsynced.unsynced_and_uneven])
@pytest.mark.parametrize("stage", [1, 2])
def test_scripts_with_upstreams_flush(world: World, stage: int, script: Any) -> None:
    holds(world, script, stage, **UPSTREAM)


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_have_unlike_numbers_of_backwards(world: World, stage: int) -> None:
    """Not at stage 3, where a forward is a collective."""
    holds(world, unsynced.unlike_numbers_unsynced, stage)


TWO = pytest.mark.parametrize("script", [unsynced.unsynced, unsynced.synced_in_between])


@TWO
@pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("dtype", [BF16, BF16_SUMS], ids=["low", "fp32"])
@STAGES
def test_bfloat16(
    world: World, stage: int, dtype: dict[str, Any], more: dict[str, Any], script: Any
) -> None:
    if stage == 1 and dtype is BF16_SUMS and not more:
        pytest.skip("bf16 with fp32 gradients at stage 1 is BF16_Optimizer, which is not covered")
    holds(world, script, stage, **dtype, **more)


@STAGES
def test_float16_with_a_dynamic_loss_scale(world: World, stage: int) -> None:
    holds(world, unsynced.unsynced, stage, **FP16)


@pytest.mark.parametrize("model", ["FrozenTrunk", "SharedBlock", "Reentrant", "LeafModule"])
@STAGES
def test_models(world: World, stage: int, model: str) -> None:
    holds(world, unsynced.unsynced, stage, model=model)


@TWO
@pytest.mark.parametrize("style", ["scale", "torch"])
@STAGES
def test_torch_style(world: World, stage: int, script: Any, style: str) -> None:
    holds(world, script, stage, style=style)


@pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["", "offloaded"])
@STAGES
def test_several_backwards_over_one_forward_with_zero3_retain(
    world: World, stage: int, more: dict[str, Any]
) -> None:
    script = unsynced.unsynced_over_one_forward
    check(world, script, Options(stage, **more), "coalesce", "zero3_retain")


# --- Sent, and held ------------------------------------------------------------------------------


def sent_in_three_steps(stage: int, backwards: int, inside: bool) -> dict[str, int]:
    """Reductions. inside: each backward is a micro step, and stepped."""
    with applied("coalesce"):
        trainer = engine_trainer(stage=stage, micro_steps=backwards if inside else 1)
        loop = unsynced.stepped_inside if inside else unsynced.all_but_the_last
        with Gradients() as sent:
            loop(trainer, backwards)
        return {name: n for name, n in sent.seen.items() if "reduce" in name}


@pytest.mark.core_case(stage=2, inside=False)
@pytest.mark.parametrize(
    ("stage", "inside"),
    [*((stage, False) for stage in ALL), *((stage, True) for stage in REFUSING)],
)
def test_a_step_costs_one_reduction(world: World, stage: int, inside: bool) -> None:
    found = [
        sent
        for backwards in (2, 8)
        for sent in world.run(sent_in_three_steps, stage, backwards, inside)
    ]
    assert all(sent == found[0] for sent in found)
    assert sum(found[0].values()) > 0


class Watching(EngineTrainer):
    """What each backward sends, and which gradients it leaves on their parameters."""

    seen: list[tuple[dict[str, int], list[str]]]

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        with Gradients() as sent:
            super().backward(loss, retain_graph)
        left = [name for name, param in self.module.named_parameters() if param.grad is not None]
        self.seen.append((dict(sent.seen), left))


def seen_in_micro_steps(stage: int, patch: bool) -> Any:
    with applied("coalesce") if patch else nullcontext():
        options = Options(stage, micro_steps=2)
        trainer = Watching(engine_trainer(stage=stage, micro_steps=2).engine, options)
        trainer.seen = []
        ordinary.micro_steps(trainer)
        return trainer.seen


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", REFUSING)
def test_micro_steps_without_it_are_stocks(world: World, stage: int) -> None:
    """Each is reduced at once, and no gradient stays on its parameter."""
    for before, ours in zip(
        world.run(seen_in_micro_steps, stage, patch=False),
        world.run(seen_in_micro_steps, stage, patch=True),
        strict=True,
    ):
        assert ours == before
        assert len(ours) == 6
        for sent, left in ours:
            assert any("reduce" in name for name in sent)
            assert not left
