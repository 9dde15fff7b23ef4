"""Engines of all ages: built before the patch, used after it, and stock again."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import ds_patches
from tests.scripts import evaluating, heads
from tests.training import leftovers, stock
from tests.training.models import both_losses, loss_of
from tests.training.options import OFFLOADED, Options
from tests.training.run import Script, check
from tests.training.trainers import engine_of
from tests.world import World
from tests.zero3_retain.test_gradients import patched, several_backwards


def of_all_ages(trainer: Any, late: bool) -> None:
    """Two steps with the patch, and two of stock's own, in which nothing of it is there.

    late: it comes after the engine and its first forward, and anew in each step.
    """
    loss_of(trainer, 0)
    for step in trainer.steps():
        if trainer.is_engine and step == 2:
            ds_patches.unapply_all()
            assert not [what for what in leftovers.of(trainer.engine) if "is ours" in what]
        with patched() if trainer.is_engine and late and step < 2 else nullcontext():
            first, second = both_losses(trainer, step)
            if step < 2:
                trainer.backward(first, retain_graph=True)
                trainer.backward(second)
            else:
                trainer.backward(first + second)
            trainer.step()


@pytest.mark.core_case(late=True)
@pytest.mark.parametrize("late", [False, True])
def test_engines_of_all_ages(world: World, late: bool) -> None:
    script, patches = partial(of_all_ages, late=late), () if late else ("zero3_retain",)
    for outcome in check(world, script, Options(steps=4), *patches, quiet=False):
        assert any("built before" in text for text in outcome.said) == late


@pytest.mark.core_case(script=heads.parts_then_whole, more={})
@pytest.mark.core_case(script=heads.one_head_rests, more=OFFLOADED)
@pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("script", [heads.parts_then_whole, heads.one_head_rests])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_of_every_kind(
    world: World, stage: int, script: Script, more: dict[str, Any]
) -> None:
    check(world, script, Options(stage, steps=6, **more), "zero3_retain", quiet=False)


def two_engines(trainer: Any) -> None:
    """Their backwards interleave, as a generator's and a critic's do."""
    both = trainer, trainer.another()
    for step in trainer.steps():
        losses = [both_losses(one, step) for one in both]
        for index in (0, 1):
            for one, pair in zip(both, losses, strict=True):
                one.backward(pair[index], retain_graph=index == 0)
        for one in both:
            one.step()


def test_two_engines(world: World) -> None:
    check(world, two_engines, Options(), "zero3_retain")


def scale_accepts_retain_graph() -> bool:
    with patched():
        engine = engine_of()
        loss = both_losses(engine, 0)[0]
        return bool(torch.equal(engine.scale(loss, retain_graph=True), loss))


@pytest.mark.skipif(not stock.TORCH_STYLE, reason="engine.scale came with 0.18.3")
def test_scale_accepts_the_argument_of_pull_request_8135(world: World) -> None:
    assert all(world.run(scale_accepts_retain_graph))


def hooks_set_again(trainer: Any) -> None:
    """What libraries do around generation: take ZeRO-3's module hooks off and set them again."""
    loss_of(trainer, 0)
    with evaluating.without_hooks(trainer):
        pass
    if trainer.is_engine:
        trainer.note()
    several_backwards(trainer)


@pytest.mark.skipif(
    stock.Version("0.19.2") > stock.RELEASE,
    reason="stock's own trace does not survive it before 0.19.2: 'pop from an empty deque'",
)
def test_hooks_set_again(world: World) -> None:
    check(world, hooks_set_again, Options(), "zero3_retain")
