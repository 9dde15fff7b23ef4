"""A window that gathers once is a plain module's, and leaves nothing of it behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from ds_patches.coalesce.suspended_hooks import SuspendedHooks
from tests.coalesce import cases
from tests.world import World
from tests.zero3_retain import models, trainers

CPU = {"device": "cpu"}
OFFLOADED = {"zero": {"offload_param": CPU, "offload_optimizer": CPU}}
OFFLOADED_OPTIMIZER = {"zero": {"offload_optimizer": CPU}}
PERSISTENT = {"zero": {"stage3_param_persistence_threshold": 20}}
SMALL_PREFETCH = {"zero": {"stage3_prefetch_bucket_size": 40}}


def check(world: World, **case: Any) -> None:
    for result in world.within(60).run(cases.train, stage=3, gather_once=True, **case):
        assert result.equal(case.get("dtype", "float32")), result


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
    check(world, model=model, steps=4)


@pytest.mark.parametrize(
    "settings", [OFFLOADED, OFFLOADED_OPTIMIZER, PERSISTENT, SMALL_PREFETCH], ids=str
)
def test_settings(world: World, settings: dict[str, Any]) -> None:
    check(world, settings=settings)


@pytest.mark.parametrize("style", ["engine", "torch"])
def test_with_zero3_retain(world: World, style: str) -> None:
    from tests.coalesce import releases

    releases.needs_torch_style(style)
    check(world, style=style, others=("zero3_retain",))


def _by_turns(trainer: Any) -> None:
    """Windows that gather once, windows that do not, and steps without any."""
    for step in range(6):
        kind = step % 3
        arguments = {"gather_once": True} if kind == 0 else {}
        backwards = 1 if kind == 2 else cases.BACKWARDS
        with trainer.window(**arguments) if kind < 2 else trainer.no_window():
            for index in range(backwards):
                tokens, classes = models.batch(step, index)
                trainer.backward(sum(models.losses(trainer.forward(tokens), classes)))
        trainer.step()


class Plain(cases.PlainTrainer):
    no_window = cases.PlainTrainer.window


class Engine(cases.EngineTrainer):
    no_window = cases.PlainTrainer.window


def by_turns(script: Any) -> tuple[cases.Outcome, int]:
    start = models.build(models.TwoHeads)
    seen: list[int] = []

    def and_count(trainer: Any) -> None:
        script(trainer)
        if isinstance(trainer, cases.EngineTrainer):
            seen.append(len(trainers.available(trainer.engine)))

    found = cases.run(and_count, start, 3, trainer_class=Engine, reference=Plain)
    return found, sum(seen)


def test_other_steps_in_between(world: World) -> None:
    for result, gathered in world.within(60).run(by_turns, _by_turns):
        assert result.equal(), result
        assert gathered == 0


def _partitioned_in_between(trainer: Any) -> None:
    """In the middle of a window everything is partitioned, as saving a checkpoint does."""
    for step in range(2):
        with trainer.window(gather_once=True):
            for index in range(cases.BACKWARDS):
                tokens, classes = models.batch(step, index)
                trainer.backward(sum(models.losses(trainer.forward(tokens), classes)))
                if isinstance(trainer, cases.EngineTrainer):
                    trainer.engine.optimizer._partition_all_parameters()
        trainer.step()


def _gathered_by_hand(trainer: Any) -> None:
    from deepspeed.runtime.zero import GatheredParameters

    with trainer.window(gather_once=True):
        if isinstance(trainer, cases.EngineTrainer):
            with GatheredParameters(list(trainer.engine.module.parameters())):
                pass


def _forward_from_before(trainer: Any) -> None:
    for step in range(3):
        tokens, classes = models.batch(step, 0)
        early = sum(models.losses(trainer.forward(tokens), classes))
        with trainer.window(gather_once=True):
            trainer.backward(early)
            tokens, classes = models.batch(step, 1)
            trainer.backward(sum(models.losses(trainer.forward(tokens), classes)))
        trainer.step()


def _without_gradients(trainer: Any) -> None:
    """GradCache's first pass."""
    for step in range(3):
        with trainer.window(gather_once=True):
            tokens, classes = models.batch(step, 0)
            with torch.no_grad():
                trainer.forward(tokens)
            trainer.backward(sum(models.losses(trainer.forward(tokens), classes)))
        trainer.step()


@pytest.mark.parametrize(
    "script",
    [_forward_from_before, _without_gradients, _partitioned_in_between],
    ids=lambda script: script.__name__.strip("_"),
)
def test_what_else_may_happen(world: World, script: Any) -> None:
    for result, gathered in world.within(60).run(by_turns, script):
        assert result.equal(), result
        assert gathered == 0


def test_what_would_partition_a_part_is_refused(world: World) -> None:
    """By upstream: somebody has the parameters in use."""
    for result, _ in world.within(60).run(by_turns, _gathered_by_hand):
        assert result.error.startswith(("RuntimeError", "AssertionError")), result


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
