"""A block that gathers each parameter once: when, how much lives, and that it stays right."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_patches
from ds_patches.coalesce.suspended_hooks import SuspendedHooks
from tests.coalesce.loops import BACKWARDS, several_backwards
from tests.training import models, stock
from tests.training.models import loss_of
from tests.training.options import OFFLOADED, OFFLOADED_ALL, Options
from tests.training.run import applied, check
from tests.training.trainers import engine_trainer, gathered, worst_difference
from tests.world import World

PERSISTENT = {"zero": {"stage3_param_persistence_threshold": 20}}
SMALL_PREFETCH = {"zero": {"stage3_prefetch_bucket_size": 40}}
NO_REUSE = {"zero": {"stage3_max_reuse_distance": 0}}
gathers_once = partial(several_backwards, gather_once=True)

ONCE: dict[str, Any] = {"gather_once": True}
NOT_ONCE: dict[str, Any] = {"gather_once": False}
WAYS = pytest.mark.parametrize("given", [{}, ONCE], ids=["", "asked for"])
MODELS = ["FrozenTrunk", "TiedEmbedding", "SharedBlock", "LeafModule", "Reentrant", "NonReentrant"]


def holds(world: World, given: dict[str, Any], *others: str, **options: Any) -> None:
    stock.needs_style(options.get("style", "engine"))
    script = partial(several_backwards, **given)
    check(world.within(60), script, Options(3, **options), "coalesce", *others)


# --- How often, and how much ---------------------------------------------------------------------


def limited(elements: int, **zero: Any) -> dict[str, Any]:
    return {"zero": {"stage3_max_live_parameters": elements, **zero}}


def elements_of(model: str) -> int:
    return sum(param.numel() for param in models.build(model).parameters())


class Gathers:
    """How often each parameter of an engine is gathered, and the most elements that are so at once.

    Elements are counted wherever a module begins or ends.
    """

    def __init__(self, trainer: Any) -> None:
        engine = trainer.engine
        self.params = dict(engine.module.named_parameters())
        self.names = {id(param): name for name, param in self.params.items()}
        self.begin()
        for param in self.params.values():
            param.all_gather_coalesced = partial(self._gather, param.all_gather_coalesced)
        for module in engine.module.modules():
            module.register_forward_pre_hook(self._look)
            module.register_forward_hook(self._look)
            module.register_full_backward_hook(self._look)
        trainer.note()

    def begin(self) -> None:
        self.counts: Counter[str] = Counter()
        self.most = 0

    def _gather(self, wrapped: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        self.counts.update(self.names[id(param)] for param in params)
        return wrapped(params, *args, **kwargs)

    def _look(self, *_: Any) -> None:
        whole = (p for p in self.params.values() if p.ds_status.name != "NOT_AVAILABLE")
        self.most = max(self.most, sum(param.ds_numel for param in whole))


Seen = tuple[Counter[str], int]


def seen(given: dict[str, Any] | None, backwards: int, options: Options) -> list[Seen]:
    """Of each step's block; on stock, without one, where `given` is None."""
    with nullcontext() if given is None else applied("coalesce"):
        trainer = engine_trainer(models.build(options.model), stage=3, zero=options.zero)
        if options.model == "Sometimes":
            trainer.module.used = (True, False)
        gathers, found = Gathers(trainer), []
        for step in range(4):
            gathers.begin()
            with nullcontext() if given is None else trainer.window(**given):
                for micro in range(backwards):
                    trainer.backward(loss_of(trainer, step, micro))
            found.append((gathers.counts, gathers.most))
            trainer.step()
        return found


@pytest.mark.core_case(given={}, model="TwoHeads")
@pytest.mark.parametrize("model", ["TwoHeads", *MODELS])
@WAYS
def test_what_fits_is_gathered_once(world: World, model: str, given: dict[str, Any]) -> None:
    """By default as well, and never more than is allowed to live."""
    most = elements_of(model)
    for found in world.run(seen, given, 4, Options(model=model, **limited(most))):
        for counts, live in found:
            assert set(counts.values()) == {1}
            assert set(counts) == {name for name, _ in models.build(model).named_parameters()}
            assert live <= most


@pytest.mark.core_case(model="Sometimes", more={})
@pytest.mark.parametrize("more", [{}, NO_REUSE, SMALL_PREFETCH, PERSISTENT], ids=str)
@pytest.mark.parametrize("model", ["Sometimes", *MODELS])
def test_a_block_of_one_backward_gathers_no_more_than_stock(
    world: World, model: str, more: dict[str, Any]
) -> None:
    options = Options(model=model, **more)
    for ours, stocks in zip(
        world.run(seen, {}, 1, options), world.run(seen, None, 1, options), strict=True
    ):
        for (counts, _), (expected, _) in zip(ours, stocks, strict=True):
            assert all(counts[name] <= expected[name] for name in counts), (counts, expected)


@pytest.mark.core_case(limit=-1)
@pytest.mark.parametrize("limit", [-1, None])
def test_what_does_not_fit_is_gathered_as_ever(world: World, limit: int | None) -> None:
    """One element too many; and where the caller says so."""
    options = limited(elements_of("TwoHeads") + (limit or 0), stage3_prefetch_bucket_size=0)
    given = {} if limit else NOT_ONCE
    for ours, stocks in zip(
        world.run(seen, given, 4, Options(**options)),
        world.run(seen, None, 4, Options(**options)),
        strict=True,
    ):
        assert [counts for counts, _ in ours[1:]] == [counts for counts, _ in stocks[1:]]
        assert max(live for _, live in ours) <= max(live for _, live in stocks)
        assert max(ours[-1][0].values()) >= 4


def noted(given: dict[str, Any], **options: Any) -> tuple[str, ...]:
    with applied("coalesce"):
        trainer = engine_trainer(stage=3, **options)
        for _ in range(2):
            with trainer.window(**given):
                trainer.backward(loss_of(trainer, 0))
        return ds_patches.status()["coalesce"].notes


@pytest.mark.parametrize(
    ("given", "more", "says"),
    [
        ({}, {}, "once: all fit into stage3_max_live_parameters"),
        ({}, limited(10), r"in each .*: \d+ elements are more than stage3_max_live_parameters, 10"),
        (ONCE, limited(10), "once: gather_once=True"),
        (NOT_ONCE, {}, "in each forward and backward: gather_once=False"),
        (
            {},
            {"zero": {"stage3_module_granularity_threshold": 5}},
            "in each .* not tested with stage3_module_granularity_threshold",
        ),
    ],
    ids=str,
)
def test_the_status_says_which_way_was_taken(
    world: World, given: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    for (note,) in world.run(noted, given, **more):
        assert re.fullmatch(f"a ZeRO-3 block gathered parameters {says}", note)


def steps_after(blocks: bool) -> list[Seen]:
    """Of steps without a block, behind some that have one; or behind none."""
    with applied("coalesce"):
        trainer = engine_trainer(stage=3, **NO_REUSE)
        gathers, found = Gathers(trainer), []
        for step in range(8):
            gathers.begin()
            with trainer.window() if blocks and step in (2, 3) else nullcontext():
                trainer.backward(loss_of(trainer, step))
            found.append((gathers.counts, gathers.most))
            trainer.step()
        return found[-3:]


@pytest.mark.core_case
def test_steps_after_a_block_gather_and_hold_as_ever(world: World) -> None:
    """DeepSpeed remembers what it may release, and a block must teach it nothing."""
    assert world.run(steps_after, True) == world.run(steps_after, False)


# --- That it is right ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["TwoHeads", *MODELS])
def test_models(world: World, model: str) -> None:
    """By default test_windows.py has them."""
    holds(world, ONCE, model=model, steps=4)


@pytest.mark.parametrize("more", [OFFLOADED_ALL, OFFLOADED, PERSISTENT, SMALL_PREFETCH], ids=str)
@WAYS
def test_options(world: World, more: dict[str, Any], given: dict[str, Any]) -> None:
    holds(world, given, **more)


@pytest.mark.parametrize("style", ["engine", "torch"])
def test_with_zero3_retain(world: World, style: str) -> None:
    holds(world, ONCE, "zero3_retain", style=style)


def _by_turns(trainer: Any, given: dict[str, Any]) -> None:
    """Blocks that gather once, blocks that do not, and steps without any."""
    for step in trainer.steps():
        kind = step % 3
        with trainer.window(**(given if kind == 0 else NOT_ONCE)) if kind < 2 else nullcontext():
            for index in range(1 if kind == 2 else BACKWARDS):
                trainer.backward(loss_of(trainer, step, index))
        trainer.step()


def _forward_from_before(trainer: Any, given: dict[str, Any]) -> None:
    for step in trainer.steps():
        early = loss_of(trainer, step, 0)
        with trainer.window(**given):
            trainer.backward(early)
            trainer.backward(loss_of(trainer, step, 1))
        trainer.step()


def _backwards_after_all_forwards(trainer: Any, given: dict[str, Any]) -> None:
    for step in trainer.steps():
        with trainer.window(**given):
            for part in range(2):
                for loss in [loss_of(trainer, step, 2 * part + micro) for micro in range(2)]:
                    trainer.backward(loss)
        trainer.step()


def _interrupted(trainer: Any, given: dict[str, Any], do: Any) -> None:
    """Something is done before and after every forward and backward."""
    for step in trainer.steps():
        with trainer.window(**given):
            for index in range(BACKWARDS):
                do(trainer)
                loss = loss_of(trainer, step, index)
                do(trainer)
                trainer.backward(loss)
            do(trainer)
        trainer.step()


def _partition_everything(trainer: Any) -> None:
    if trainer.is_engine:
        trainer.engine.optimizer._partition_all_parameters()


def _read(trainer: Any) -> None:
    with trainer.gathered(trainer.module.blocks.parameters()):
        assert all(param.numel() for param in trainer.module.blocks.parameters())


def _evaluate(trainer: Any) -> None:
    """As GradCache's first pass is without gradients."""
    trainer.module.eval()
    with torch.no_grad():
        loss_of(trainer, 0)
    trainer.module.train()


def _save(folder: Path, trainer: Any) -> None:
    if trainer.is_engine:
        trainer.engine.save_checkpoint(str(folder))


def and_nothing_stays(trainer: Any, script: Any, given: dict[str, Any]) -> None:
    script(trainer, given)
    if trainer.is_engine:
        assert not gathered(trainer.engine, entitled=False)


SCRIPTS: dict[str, Any] = {
    "by turns": _by_turns,
    "forward from before": _forward_from_before,
    "backwards after all forwards": _backwards_after_all_forwards,
    "partition": partial(_interrupted, do=_partition_everything),
    "read": partial(_interrupted, do=_read),
    "evaluate": partial(_interrupted, do=_evaluate),
}


@pytest.mark.core_case(script="read", given={})
@pytest.mark.parametrize("script", SCRIPTS)
@WAYS
def test_what_else_may_happen(world: World, script: str, given: dict[str, Any]) -> None:
    wanted = partial(and_nothing_stays, script=SCRIPTS[script], given=given)
    check(world.within(60), wanted, Options(3, steps=6), "coalesce")


@WAYS
def test_saving_inside(world: World, tmp_path: Path, given: dict[str, Any]) -> None:
    script = partial(_interrupted, do=partial(_save, tmp_path))
    wanted = partial(and_nothing_stays, script=script, given=given)
    check(world.within(60), wanted, Options(3, steps=2), "coalesce")


def written_inside(given: dict[str, Any], by: float) -> dict[str, torch.Tensor]:
    """Where a training ends whose weights change in the middle of its blocks."""
    from deepspeed.runtime.zero import GatheredParameters

    with applied("coalesce"):
        trainer = engine_trainer(stage=3)
        # Not the embedding, which stock up to 0.18.2 has in use from a backward to the step.
        params = list(trainer.module.blocks.parameters())
        for step in trainer.steps():
            with trainer.window(**given):
                for index in range(BACKWARDS):
                    trainer.backward(loss_of(trainer, step, index))
                    with GatheredParameters(params, modifier_rank=0), torch.no_grad():
                        for param in params:
                            param.mul_(by)
            trainer.step()
        return trainer.parameters()


@pytest.mark.core_case(given={})
@WAYS
def test_weights_that_are_written_inside(world: World, given: dict[str, Any]) -> None:
    """As DeepSpeed has it: until the step, which writes its own."""
    for ours, expected, others in zip(
        world.run(written_inside, given, 0.5),
        world.run(written_inside, NOT_ONCE, 0.5),
        world.run(written_inside, given, 1.0),
        strict=True,
    ):
        assert worst_difference(ours, expected)[0] <= 1e-6
        assert worst_difference(ours, others)[0] > 1e-3


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
