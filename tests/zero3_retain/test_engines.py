"""Engines of all ages: built before the patch, used after it, and stock again."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

import ds_patches
from tests.scripts import heads
from tests.training import models, stock
from tests.training.models import both_losses, loss_of
from tests.training.options import OFFLOADED, Options
from tests.training.run import Script, check
from tests.training.trainers import (
    EngineTrainer,
    Parameters,
    PlainTrainer,
    engine_of,
    engine_trainer,
    worst_difference,
)
from tests.world import World
from tests.zero3_retain.test_gradients import patched, several_backwards

EXACT = 1e-6


def plainly(script: Script, start: torch.nn.Module, steps: int = 3) -> Parameters:
    trainer = PlainTrainer(deepcopy(start), Options(steps=steps))
    script(trainer)
    return trainer.parameters()


def engine_built_before() -> tuple[float, list[str], list[str]]:
    """Difference to PyTorch, the notes of `apply`, and what is left at the modules at the end."""
    start = models.build("TwoHeads")
    expected = plainly(several_backwards, start)
    trainer = engine_trainer(start)
    loss_of(trainer, 0)  # as old as can be: its modules have run under stock
    before = functions_at_modules(trainer.engine)
    ds_patches.apply("zero3_retain")
    notes = ds_patches.status()["accumulation"].notes  # which meets the engines for both
    try:
        several_backwards(trainer)
        during = functions_at_modules(trainer.engine)
        difference, _ = worst_difference(trainer.parameters(), expected)
    finally:
        ds_patches.unapply("zero3_retain")
    after = functions_at_modules(trainer.engine)
    left = [name for name in before if before[name] is not after[name]]
    assert not any(before[name] is during[name] for name in before)
    return difference, list(notes), left


def functions_at_modules(engine: Any) -> dict[str, Any]:
    return {
        f"{name}.{attribute}": vars(module).get(attribute)
        for name, module in engine.module.named_modules()
        for attribute in ("pre_bwd_fn", "post_bwd_fn")
    }


@pytest.mark.core_case
def test_engine_built_before_works_and_is_given_back(world: World) -> None:
    for difference, notes, left in world.run(engine_built_before):
        assert difference <= EXACT
        assert any("built before" in note for note in notes)
        assert not left


def stock_after_unapply() -> tuple[float, str]:
    """An engine born patched trains on stock afterwards, and crashes there as stock does."""
    start = models.build("TwoHeads")
    expected = plainly(partial(several_backwards, backwards=1), start, steps=4)
    with patched():
        trainer = engine_trainer(start)
        for step in (0, 1):
            single_backward(trainer, step)
    for step in (2, 3):
        single_backward(trainer, step)
    difference, _ = worst_difference(trainer.parameters(), expected)
    try:
        several_backwards(trainer)
    except RuntimeError as error:
        return difference, str(error)
    return difference, "no error"


def single_backward(trainer: Any, step: int) -> None:
    trainer.backward(both_losses(trainer, step)[0])
    trainer.step()


def test_stock_is_back_after_unapply(world: World) -> None:
    for difference, error in world.run(stock_after_unapply):
        # The unused head keeps an old gradient on stock ZeRO-3; the trained parts are compared.
        assert "size of tensor a (0)" in error
        assert difference <= EXACT


def applied_again() -> float:
    start = models.build("TwoHeads")
    with patched():
        pass
    with patched():
        trainer = engine_trainer(deepcopy(start))
        several_backwards(trainer)
        return worst_difference(trainer.parameters(), plainly(several_backwards, start))[0]


def test_applied_again(world: World) -> None:
    assert max(world.run(applied_again)) <= EXACT


@pytest.mark.core_case(script=heads.parts_then_whole, more={})
@pytest.mark.core_case(script=heads.one_head_rests, more=OFFLOADED)
@pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("script", [heads.parts_then_whole, heads.one_head_rests])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_of_every_kind(
    world: World, stage: int, script: Script, more: dict[str, Any]
) -> None:
    check(world, script, Options(stage, steps=6, **more), "zero3_retain", quiet=False)


def two_engines() -> list[float]:
    """Two engines whose windows interleave, as a generator's and a critic's do."""
    starts = [models.build("TwoHeads"), models.build("SharedBlock")]
    expected = [plainly(several_backwards, start) for start in starts]
    with patched():
        both = [engine_trainer(start) for start in starts]
        for step in range(3):
            losses = [both_losses(trainer, step) for trainer in both]
            for index in (0, 1):
                for trainer, pair in zip(both, losses, strict=True):
                    trainer.backward(pair[index], retain_graph=index == 0)
            for trainer in both:
                trainer.step()
        return [
            worst_difference(trainer.parameters(), wanted)[0]
            for trainer, wanted in zip(both, expected, strict=True)
        ]


def test_two_engines(world: World) -> None:
    for differences in world.run(two_engines):
        assert max(differences) <= EXACT


def scale_accepts_retain_graph() -> bool:
    with patched():
        engine = engine_of()
        loss = both_losses(engine, 0)[0]
        return bool(torch.equal(engine.scale(loss, retain_graph=True), loss))


@pytest.mark.skipif(not stock.TORCH_STYLE, reason="engine.scale came with 0.18.3")
def test_scale_accepts_the_argument_of_pull_request_8135(world: World) -> None:
    assert all(world.run(scale_accepts_retain_graph))


class HooksSetAgain(EngineTrainer):
    """What libraries do around generation: take ZeRO-3's module hooks off and set them again."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        loss_of(self, 0)
        offload = self.engine.optimizer.parameter_offload
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        register = getattr(offload, "_register_deepspeed_module", None)
        (register or offload._register_hooks_recursively)(offload.module)


@pytest.mark.skipif(
    stock.Version("0.19.2") > stock.RELEASE,
    reason="stock's own trace does not survive it before 0.19.2: 'pop from an empty deque'",
)
def test_hooks_set_again(world: World) -> None:
    script, options = several_backwards, Options()
    check(world, script, options, "zero3_retain", engine=HooksSetAgain, quiet=False)
