"""Engines that are left to stock DeepSpeed, which is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch.distributed as dist

from tests.dc_fallback import patterns, stand_in
from tests.dc_fallback.loops import patched
from tests.listening import listening
from tests.training.options import config
from tests.training.surroundings import build_engine
from tests.world import World


def _nothing(engine: Any) -> None:
    """The engine is as it was configured."""


def _no_optimizer(engine: Any) -> None:
    """An engine that trains nothing."""


def _sequence_parallel(engine: Any) -> None:
    engine.optimizer.sequence_parallel_size = 2  # Ulysses would take more ranks than there are


def _one_parameter_of_a_smaller_group(engine: Any) -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    next(engine.module.parameters()).ds_process_group = alone[dist.get_rank()]


def compiled(settings: dict[str, Any], change: Callable[[Any], None]) -> tuple[bool, list[str]]:
    """Whether the patch has taken a compiled engine in, and what was said."""
    given = config(3, **settings, compile={"deepcompile": True})
    model = patterns.build("Compiled")
    with stand_in.deep_compile(), patched(), listening() as heard:
        if change is _no_optimizer:
            engine, *_ = deepspeed.initialize(model=model, config=given)
        else:
            engine = build_engine(model, given)
        change(engine)
        engine.compile(backend="eager")
        taken_in = vars(engine).get("_ds_patches_dc_fallback") is not None
    return taken_in, [text for text in heard if "to stock" in text]


@pytest.mark.parametrize(
    ("settings", "change", "taken_in", "why"),
    [
        ({}, _nothing, True, None),
        ({}, _no_optimizer, False, None),
        ({"zero": {"offload_optimizer": {"device": "cpu"}}}, _nothing, False, "an offloaded"),
        ({"zero": {"zero_hpz_partition_size": 2}}, _nothing, False, "secondary partitions"),
        ({}, _sequence_parallel, False, "under sequence parallelism"),
        ({}, _one_parameter_of_a_smaller_group, False, "some parameters (AutoEP's experts)"),
    ],
    ids=["taken in", "no optimizer", "offload", "hpz", "sequence parallel", "experts"],
)
def test_what_it_does_not_cover_it_names(
    world: World,
    settings: dict[str, Any],
    change: Callable[[Any], None],
    taken_in: bool,
    why: str | None,
) -> None:
    for taken, said in world.run(compiled, settings, change):
        assert taken == taken_in
        assert len(said) == (why is not None)
        assert all(str(why) in text for text in said)
