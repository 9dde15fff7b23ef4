"""Several engines of one model, of which one trains: initialized again, and again."""

import gc
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.harness import OFFLOADED, Options, applied, build_engine, listening, models
from tests.harness.models import loss_of
from tests.harness.trainers import EngineTrainer, PlainTrainer, worst_difference
from tests.world import World, on_ranks

#: So large that an older engine, whose hooks still fire, reduces nothing by itself.
LARGE = {"zero": {"reduce_bucket_size": 10**7}}


class Engines:
    """Each made of the model as it is now, and plain PyTorch, which trains what they train."""

    def __init__(self, options: Options) -> None:
        start = models.build(options.model)
        self.plain, self.module = PlainTrainer(deepcopy(start), options), start
        self.options, self.steps = options, 0

    def another(self) -> EngineTrainer:
        engine = build_engine(self.module, self.options.config, options=self.options)
        return EngineTrainer(engine, self.options, strict=False)

    def train(self, one: EngineTrainer) -> None:
        for micro in range(self.options.micro_steps):
            for trainer in (self.plain, one):
                trainer.backward(loss_of(trainer, self.steps, micro))
                trainer.step()
        self.steps += 1

    def are_equal(self) -> bool:
        found = EngineTrainer.parameters(self)  # type: ignore[arg-type]
        return worst_difference(found, self.plain.parameters())[0] <= 1e-6


def left(engines: Engines) -> None:
    """By a cell of a notebook that runs again."""
    engines.train(engines.another())
    last = engines.another()
    for _ in range(2):
        engines.train(last)


def never_used(engines: Engines) -> None:
    engines.another()
    last = engines.another()
    for _ in range(2):
        engines.train(last)


def destroyed_late(engines: Engines) -> None:
    first = engines.another()
    engines.train(first)
    last = engines.another()
    engines.train(last)
    first.engine.destroy()
    engines.train(last)


def collected(engines: Engines) -> None:
    engines.train(engines.another())
    gc.collect()
    last = engines.another()
    gc.collect()
    engines.train(last)


@on_ranks
@pytest.mark.core_case(script=left)
@pytest.mark.parametrize("script", [left, never_used, destroyed_late, collected])
@pytest.mark.parametrize(
    "options",
    [
        *(Options(stage, micro_steps=2, **LARGE) for stage in (1, 2)),
        *(Options(stage, **LARGE) for stage in (1, 2)),
        Options(2, micro_steps=2, **{**LARGE, **OFFLOADED}),
        Options(3, micro_steps=2, **LARGE),  # with one, stock's prefetcher fails
    ],
    ids=lambda one: f"{one.stage}-{one.micro_steps}-{'-'.join(one.offload)}",
)
def test_the_last_engine_trains(options: Options, script: Callable[[Engines], None]) -> None:
    with applied("coalesce", "zero3_retain"), listening() as heard:
        engines = Engines(options)
        script(engines)
        assert engines.are_equal()
    assert not heard


def test_a_part_that_another_engine_has_frozen_is_not_told(world: World) -> None:
    assert world.run(_with_a_frozen_trunk) == [[], []]


def _with_a_frozen_trunk() -> list[str]:
    options = Options(2, **LARGE)
    with applied("accumulation"), listening() as heard:
        engines = Engines(options)
        first = engines.another()
        engines.module.embed.requires_grad_(False)
        engines.module.blocks.requires_grad_(False)
        head = build_engine(
            torch.nn.Sequential(engines.module.embed, torch.nn.Linear(16, 1)), options.config
        )
        for step in range(2):
            engines.module.requires_grad_(True)
            first.backward(loss_of(first, step))
            first.step()
            engines.module.embed.requires_grad_(False)
            head.backward(head(torch.arange(6)).square().mean())
            head.step()
    return list(heard)


@on_ranks
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_to_go_back_is_told(micro_steps: int) -> None:
    """Each steps from its own copy of the weights, here as on stock."""
    options: Any = Options(1, micro_steps=micro_steps, **LARGE)
    with applied("accumulation"), listening() as heard:
        engines = Engines(options)
        first = engines.another()
        engines.train(first)
        engines.train(engines.another())
        engines.train(first)
        engines.train(first)
    assert [text for text in heard if "another engine has trained since" in text] == heard[:1]
    assert len(heard) == 1
