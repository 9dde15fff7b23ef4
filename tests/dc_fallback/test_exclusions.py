"""Engines that are left to stock DeepSpeed, which is said."""

from __future__ import annotations

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


def compiled(settings: dict[str, Any], change: str) -> tuple[bool, list[str]]:
    """Whether the patch has taken a compiled engine in, and what was said."""
    given = config(3, **settings, compile={"deepcompile": True})
    model = patterns.build("Compiled")
    with stand_in.deep_compile(), patched(), listening() as heard:
        if change == "no optimizer":
            engine, *_ = deepspeed.initialize(model=model, config=given)
        else:
            engine = build_engine(model, given)
        if change == "sequence parallel":  # Ulysses would take more ranks than there are
            engine.optimizer.sequence_parallel_size = 2
        if change == "experts":
            alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            next(engine.module.parameters()).ds_process_group = alone[dist.get_rank()]
        engine.compile(backend="eager")
        taken_in = vars(engine).get("_ds_patches_dc_fallback") is not None
    return taken_in, [text for text in heard if "to stock" in text]


@pytest.mark.parametrize(
    ("settings", "change", "taken_in", "why"),
    [
        ({}, "", True, None),
        ({}, "no optimizer", False, None),
        ({"zero": {"offload_optimizer": {"device": "cpu"}}}, "", False, "an offloaded"),
        ({"zero": {"zero_hpz_partition_size": 2}}, "", False, "secondary partitions"),
        ({}, "sequence parallel", False, "under sequence parallelism"),
        ({}, "experts", False, "some parameters (AutoEP's experts)"),
    ],
)
def test_what_it_does_not_cover_it_names(
    world: World, settings: dict[str, Any], change: str, taken_in: bool, why: str | None
) -> None:
    for taken, said in world.run(compiled, settings, change):
        assert taken == taken_in
        assert len(said) == (why is not None)
        assert all(str(why) in text for text in said)
