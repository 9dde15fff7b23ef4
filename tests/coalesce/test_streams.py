"""coalesce alone, without stream_safety, on streams: it adds no race to those that stock has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.coalesce.loops import UPSTREAM
from tests.stream_safety import on_streams
from tests.stream_safety.test_races import NO_TIMER, lives
from tests.world import World


def unsynced(trainer: Any, micro_steps: int = 1) -> None:
    """Three backwards without a reduction, and one that reduces them all."""
    for step in range(3):
        with trainer.no_sync():
            on_streams.three_backwards(trainer, step)
        trainer.backward(trainer(on_streams.batch(9 + step)).square().mean())
        trainer.step()


#: What reduces, by name: a script, and the options that it needs.
SCRIPTS: dict[str, tuple[on_streams.Script, dict[str, Any]]] = {
    "block": (on_streams.coalesced, {}),
    "gathered once": (on_streams.gathered_once, {}),
    "upstream": (on_streams.coalesced, UPSTREAM["zero"]),
    "no_sync": (unsynced, {}),
}
#: By stage: what the program does on streams of its own, and the scripts.
CASES = [
    pytest.param(stage, around, script, id=f"{stage}-{around or 'default'}-{script}")
    for stage, all_around, scripts in (
        (1, ["several"], ["block", "upstream"]),
        (2, ["several"], ["block", "upstream", "no_sync"]),
        (3, ["", "side"], ["block", "gathered once", "no_sync"]),
    )
    for around in all_around
    for script in scripts
]


def kinds(world: World, stage: int, around: str, **case: Any) -> set[str]:
    """Of races on any rank. The throughput timer, which waits for the device, would hide some."""
    ranks = world.run(on_streams.train, stage, "", around=around, settings=NO_TIMER, **case)
    assert all(found.difference <= on_streams.EXACT for found in ranks), "the CPU runs in order"
    return {race for found in ranks for race in found.races}


@pytest.fixture(scope="module")
def of_stock(world: World) -> Callable[[int, str], set[str]]:
    """Kinds of races in stock's own steps, of one backward each."""
    return functools.cache(partial(kinds, world))


@pytest.mark.parametrize(("stage", "around", "script"), CASES)
def test_no_race_that_stock_has_not(
    world: World, of_stock: Callable[..., set[str]], stage: int, around: str, script: str
) -> None:
    """At stage 3 that is the gather right after a step, which stream_safety orders behind it."""
    if around == "side" and lives("zero3_producer"):
        pytest.skip("this release races here without us: no backward of it waits for a side stream")
    run, options = SCRIPTS[script]
    found = kinds(world, stage, around, script=run, beside=("coalesce",), **options)
    assert found <= of_stock(stage, around), found - of_stock(stage, around)
    assert stage == 3 or not found, "its own reductions wait for every stream"
