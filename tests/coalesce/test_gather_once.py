"""A window that gathers once is a plain module's, and leaves nothing of it behind."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from ds_patches.coalesce.suspended_hooks import SuspendedHooks
from tests.coalesce.loops import BACKWARDS, several_backwards
from tests.training import stock
from tests.training.models import loss_of
from tests.training.options import OFFLOADED, OFFLOADED_ALL, Options
from tests.training.run import check, run
from tests.training.trainers import gathered
from tests.world import World

PERSISTENT = {"zero": {"stage3_param_persistence_threshold": 20}}
SMALL_PREFETCH = {"zero": {"stage3_prefetch_bucket_size": 40}}
gathers_once = partial(several_backwards, gather_once=True)


def holds(world: World, *others: str, **options: Any) -> None:
    stock.needs_style(options.get("style", "engine"))
    check(world.within(60), gathers_once, Options(3, **options), "coalesce", *others)


@pytest.mark.parametrize(
    "model",
    [
        "TwoHeads",
        "FrozenTrunk",
        "TiedEmbedding",
        "SharedBlock",
        "LeafModule",
        "Reentrant",
        "NonReentrant",
    ],
)
def test_models(world: World, model: str) -> None:
    holds(world, model=model, steps=4)


@pytest.mark.parametrize("more", [OFFLOADED_ALL, OFFLOADED, PERSISTENT, SMALL_PREFETCH], ids=str)
def test_options(world: World, more: dict[str, Any]) -> None:
    holds(world, **more)


@pytest.mark.parametrize("style", ["engine", "torch"])
def test_with_zero3_retain(world: World, style: str) -> None:
    holds(world, "zero3_retain", style=style)


def _by_turns(trainer: Any) -> None:
    """Windows that gather once, windows that do not, and steps without any."""
    for step in trainer.steps():
        kind = step % 3
        arguments = {"gather_once": True} if kind == 0 else {}
        backwards = 1 if kind == 2 else BACKWARDS
        with trainer.window(**arguments) if kind < 2 else nullcontext():
            for index in range(backwards):
                trainer.backward(loss_of(trainer, step, index))
        trainer.step()


def _partitioned_in_between(trainer: Any) -> None:
    """In the middle of a window everything is partitioned, as saving a checkpoint does."""
    for step in trainer.steps():
        with trainer.window(gather_once=True):
            for index in range(BACKWARDS):
                trainer.backward(loss_of(trainer, step, index))
                if trainer.is_engine:
                    trainer.engine.optimizer._partition_all_parameters()
        trainer.step()


def _gathered_by_hand(trainer: Any) -> None:
    from deepspeed.runtime.zero import GatheredParameters

    with trainer.window(gather_once=True):
        if trainer.is_engine:
            with GatheredParameters(list(trainer.engine.module.parameters())):
                pass


def _forward_from_before(trainer: Any) -> None:
    for step in trainer.steps():
        early = loss_of(trainer, step, 0)
        with trainer.window(gather_once=True):
            trainer.backward(early)
            trainer.backward(loss_of(trainer, step, 1))
        trainer.step()


def _without_gradients(trainer: Any) -> None:
    """GradCache's first pass."""
    for step in trainer.steps():
        with trainer.window(gather_once=True):
            with torch.no_grad():
                loss_of(trainer, step)
            trainer.backward(loss_of(trainer, step))
        trainer.step()


def and_nothing_stays(trainer: Any, script: Any) -> None:
    script(trainer)
    if trainer.is_engine:
        assert not gathered(trainer.engine, entitled=False)


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        (_by_turns, 6),
        (_forward_from_before, 3),
        (_without_gradients, 3),
        (_partitioned_in_between, 2),
    ],
    ids=lambda script: getattr(script, "__name__", "").strip("_") or str(script),
)
def test_what_else_may_happen(world: World, script: Any, steps: int) -> None:
    wanted = partial(and_nothing_stays, script=script)
    check(world.within(60), wanted, Options(3, steps=steps), "coalesce")


def test_what_would_partition_a_part_is_refused(world: World) -> None:
    """By upstream: somebody has the parameters in use."""
    for outcome in world.within(60).run(run, _gathered_by_hand, Options(3), "coalesce"):
        assert outcome.error.startswith(("RuntimeError", "AssertionError")), outcome


# --- Hooks ---------------------------------------------------------------------------------------


def test_hooks_come_back_to_their_places() -> None:
    said: list[str] = []

    def say(word: str, *_: Any) -> None:
        said.append(word)

    module = torch.nn.Linear(1, 1)
    handles = [module.register_forward_pre_hook(partial(say, word)) for word in "abcd"]
    suspended = SuspendedHooks([handles[0], handles[2]])
    module(torch.ones(1))
    handles[3].remove()
    module.register_forward_pre_hook(partial(say, "e"))
    module(torch.ones(1))
    suspended.restore()
    module(torch.ones(1))
    suspended.restore()
    assert "".join(said) == "bd" + "be" + "abce"


def test_hooks_that_are_gone_are_left_out() -> None:
    module = torch.nn.Linear(1, 1)
    removed, orphan = (module.register_forward_hook(lambda *_: None) for _ in range(2))
    removed.remove()
    other = torch.nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    SuspendedHooks([removed, orphan, other]).restore()
    assert list(module._forward_hooks) == [orphan.id]
