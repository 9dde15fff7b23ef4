"""A block that gathers each parameter once: when, how much lives, and that it stays right."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

import ds_patches
from tests.coalesce.loops import several_backwards
from tests.training import models
from tests.training.models import loss_of
from tests.training.options import Options
from tests.training.run import applied
from tests.training.trainers import engine_trainer
from tests.world import World

PERSISTENT = {"zero": {"stage3_param_persistence_threshold": 20}}
SMALL_PREFETCH = {"zero": {"stage3_prefetch_bucket_size": 40}}
NO_REUSE = {"zero": {"stage3_max_reuse_distance": 0}}
gathers_once = partial(several_backwards, gather_once=True)

ONCE: dict[str, Any] = {"gather_once": True}
NOT_ONCE: dict[str, Any] = {"gather_once": False}
WAYS = pytest.mark.parametrize("given", [{}, ONCE], ids=["", "asked for"])
MODELS = ["FrozenTrunk", "TiedEmbedding", "SharedBlock", "LeafModule", "Reentrant", "NonReentrant"]


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
