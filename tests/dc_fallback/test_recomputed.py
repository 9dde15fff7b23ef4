"""A backward that runs layers again: checkpointing breaks off what it has seen enough of."""

from __future__ import annotations

from tests.dc_fallback import patterns, stand_in
from tests.dc_fallback.loops import patched
from tests.dc_fallback.patterns import inputs
from tests.training.options import config
from tests.training.surroundings import compile_engine
from tests.world import World


def calls_left_open(pattern: str) -> list[int]:
    """How many calls of modules are under way after each backward."""
    with stand_in.deep_compile(), patched():
        engine = compile_engine(patterns.build(pattern), config(3))
        found = []
        for step in range(2):
            engine.backward(engine(*inputs(step, 0)))
            found.append(len(vars(engine)["_ds_patches_dc_fallback"].uses.calls))
            engine.step()
        return found


def test_no_call_stays_open(world: World) -> None:
    """One that did would have the next forward taken for a nested one."""
    assert world.run(calls_left_open, "Recomputed") == [[0, 0]] * 2
