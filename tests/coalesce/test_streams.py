"""coalesce alone, without stream_safety, on streams: it adds no race to those that stock has."""

from typing import Any

import pytest

from tests.stream_safety import on_streams
from tests.stream_safety.test_races import NO_TIMER, lives
from tests.world import World


def unsynced(trainer: Any, step: int) -> None:
    with trainer.no_sync():
        on_streams.three_backwards(trainer, step)
    trainer.backward(trainer(on_streams.batch(9 + step)).square().mean())


def kinds(world: World, stage: int, around: str, **case: Any) -> set[str]:
    """Return the kinds of races, without the throughput timer, whose waits would hide some."""
    ranks = world.run(on_streams.train, stage, around=around, settings=NO_TIMER, **case)
    assert all(outcome.difference <= on_streams.EXACT for outcome in ranks), "the CPU runs in order"
    return {race for outcome in ranks for race in outcome.races}


@pytest.mark.parametrize(
    ("stage", "around", "scripts"),
    [
        (1, "several", (on_streams.coalesced,)),
        (2, "several", (on_streams.coalesced, unsynced)),
        *((3, around, (on_streams.coalesced, unsynced)) for around in ("", "side")),
    ],
)
def test_no_race_that_stock_has_not(world: World, stage: int, around: str, scripts: Any) -> None:
    """At stage 3 that is the gather right after a step, which stream_safety orders behind it."""
    if around == "side" and lives("zero3_producer"):
        pytest.skip("this release races here without us: no backward of it waits for a side stream")
    stocks = kinds(world, stage, around)
    for script in scripts:
        races = kinds(world, stage, around, script=script, beside=("coalesce",))
        assert races <= stocks, (script, races - stocks)
        assert stage == 3 or not races, "autograd has joined its streams before the reduction"
