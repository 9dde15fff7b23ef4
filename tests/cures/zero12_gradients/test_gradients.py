"""Gradients in tiles, of no elements, in fp32 sums that scripts use; overflow on one rank alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import RankError, World, WorldTimeout, applied, engine_trainer, run
from tests.harness.cases import check, checked, of
from tests.harness.models import TwoHeads, loss_of
from tests.harness.models.shapes import Block
from tests.harness.options import BF16_SUMS, FP16, OFFLOADED, OVERLAP, Given, Options
from tests.harness.stock import RELEASE, Version, up_to
from tests.scripts.ordinary import micro_steps, one_backward

PATCH = "zero12_gradients"
IN_TILES = pytest.mark.skipif(
    not Version("0.17.0") <= RELEASE <= Version("0.18.5"),
    reason="older releases have no tiled computation; from 0.18.6 on stock is right",
)
#: From 0.17.6 to 0.18.4 another optimizer has them, which half_without_zero is about; and to 0.18.9
#: what is read is not averaged if accumulation does not see to it.
READS_ANOTHER = not Version("0.17.6") <= RELEASE <= Version("0.18.4")
NEEDS = ["accumulation"] * (Version("0.18.5") <= RELEASE <= Version("0.18.9"))
HANGS = pytest.mark.skipif(
    not Version("0.17.1") <= RELEASE <= Version("0.17.6"),
    reason="stock's ranks agree on an overflow up to 0.17.0 and from 0.18.0 on",
)


class Emptied(TwoHeads):
    """A model with parameters of no elements: first, in the middle and last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0))
        self.blocks[0].none = nn.Parameter(torch.empty(0))
        self.last = nn.Linear(1, 0)

    def forward(self, tokens: Tensor) -> Any:
        nothing = self.first.sum() + self.blocks[0].none.sum() + self.last.weight.sum()
        return self.heads(self.through_blocks(self.embed(tokens) + nothing))


class Tiled(TwoHeads):
    """Its blocks compute three parts of a sequence one after another, where an engine trains it."""

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = in_tiles(block, x) if hasattr(self, "tiled") else block(x)
        return self.heads(x)


def in_tiles(block: Block, x: Tensor) -> Tensor:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    result: Tensor = TiledMLP.apply(
        lambda block, part: block(part), block, x[None], 3, [*block.parameters()]
    )
    return result[0]


def tiled(trainer: Any) -> None:
    if trainer.is_engine:
        trainer.module.tiled = True
    micro_steps(trainer)


def overflows(trainer: Any) -> None:
    """The second of three steps is skipped: one gradient of its is infinite, on one rank's part."""
    for step in trainer.steps():
        if step == 1 and not trainer.is_engine:
            continue
        handle = None
        if step == 1:
            embed = trainer.module.embed.weight
            handle = embed.register_hook(lambda grad: torch.full_like(grad, float("inf")))
        trainer.backward(loss_of(trainer, step))
        if handle is not None:
            handle.remove()
        trainer.step()


TILED = [
    {"marks": [IN_TILES], "model": Tiled, **more}
    for more in ({}, OVERLAP, {"zero": {"reduce_bucket_size": 100_000}})
]
test_tiles = checked(
    *(of(PATCH, tiled, 1, 2, **more, core={1, 2}) for more in TILED),
    *(of(f"{PATCH} accumulation coalesce", tiled, 1, 2, **more) for more in TILED),
    of(PATCH, tiled, 2, marks=[IN_TILES], model=Tiled, **BF16_SUMS),
)


@HANGS
def test_stock_hangs(fresh_world: World) -> None:
    with pytest.raises((WorldTimeout, RankError)):
        fresh_world.within(15).run(run, overflows, Options(1, **FP16))


test_an_overflow_on_one_rank = checked(of(PATCH, overflows, 1, core={1}, marks=[HANGS], **FP16))


READ: list[list[Tensor]] = []


def read_sums(trainer: Any) -> None:
    """Two micro steps; then each gradient is read, and has to be what plain PyTorch's was."""
    if not trainer.is_engine:
        READ.clear()
    for step in trainer.steps():
        for micro in range(2):
            trainer.backward(loss_of(trainer, 2 * step + micro))
            if micro:
                grads = [grad.detach().float().clone() for grad in trainer.full_grads()]
                if not trainer.is_engine:
                    READ.append(grads)
                for grad, right in zip(grads, READ[step], strict=True):
                    assert (grad - right).norm() < 0.02 * right.norm(), "read wrong"
            trainer.step()


def set_sums(trainer: Any, step: int) -> None:
    trainer.backward(loss_of(trainer, step))
    trainer.give(trainer.module.parameters(), 2.0)


@pytest.mark.skipif(not READS_ANOTHER, reason="another optimizer has the gradients")
@pytest.mark.core_case(immediate=False)
@pytest.mark.parametrize("immediate", [False, True])
@pytest.mark.parametrize(
    ("script", "micro_steps"), [pytest.param(read_sums, 2, marks=up_to("0.19.7")), (set_sums, 1)]
)
def test_sums(world: World, script: Any, micro_steps: int, immediate: bool) -> None:
    halves = {"bf16": {"enabled": True, "immediate_grad_update": immediate}}
    options = Options(1, micro_steps=micro_steps, settings=halves, **BF16_SUMS)
    for outcome in world.run(run, script, options):
        assert "read wrong" in outcome.error or outcome.difference > 0.1
    check(world, script, options, PATCH, *NEEDS)
    check(world, script, options, PATCH, "accumulation", "coalesce")


@pytest.mark.core_case
@pytest.mark.skipif(READS_ANOTHER, reason="the gradients are ZeRO's")
def test_sums_of_another_optimizer(world: World) -> None:
    """Stock trains nothing, or has them read times a loss scale: half_without_zero's."""
    options = Options(1, micro_steps=2, **BF16_SUMS)
    for outcome in world.run(run, read_sums, options):
        assert "read wrong" in outcome.error
    check(world, read_sums, options, "half_without_zero")


@pytest.mark.skipif(not READS_ANOTHER, reason="another optimizer has the gradients")
def test_calls_of_a_step_in_which_nothing_is_read(world: World) -> None:
    options = Options(1, steps=4, **BF16_SUMS)
    case = run, one_backward, options
    runs = [world.run(*case, *patches, looks=["calls"]) for patches in ([], [PATCH], [])]
    for before, patched, after in zip(*runs, strict=True):
        assert patched.calls <= 1.015 * max(before.calls, after.calls)


@pytest.mark.skipif(not READS_ANOTHER, reason="another optimizer has the gradients")
def test_the_gradient_of_one_rank_stays() -> None:
    """The step takes this gradient, and a script may look at it."""
    with World(1) as alone:
        alone.run(keeps_its_gradient)


def keeps_its_gradient() -> None:
    with applied(PATCH):
        trainer = engine_trainer(stage=1, **BF16_SUMS)
        trainer.backward(loss_of(trainer, 0))
        assert all(param.grad is not None for param in trainer.module.parameters())


@pytest.mark.core_case(more={})
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("more", [{}, BF16_SUMS, OFFLOADED], ids=str)
def test_parameters_of_no_elements(world: World, stage: int, more: Given) -> None:
    # From 0.17.6 to 0.18.4 another optimizer has fp32 sums at stage 1.
    others = ["half_without_zero"] * (more == BF16_SUMS and not READS_ANOTHER)
    options = Options(stage, model=Emptied, micro_steps=2, **more)
    check(world, micro_steps, options, PATCH, "accumulation", *others)


@up_to("0.19.5")
def test_stock_fails_for_parameters_of_no_elements(fresh_world: World) -> None:
    try:
        outcomes = fresh_world.within(15).run(run, micro_steps, Options(2, model=Emptied))
    except (RankError, WorldTimeout):
        return
    assert all(outcome.error for outcome in outcomes)
