"""Applied and taken back around a living engine."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import ds_patches
from ds_patches.stream_safety.binding import LACKS
from tests.stream_safety import on_streams
from tests.stream_safety.races import detecting
from tests.stream_safety.test_races import lives
from tests.training.options import config
from tests.training.run import applied
from tests.training.stock import RELEASE
from tests.training.surroundings import build_engine
from tests.training.trainers import EngineTrainer
from tests.world import World


def kinds(frozen: bool) -> dict[str, list[str]]:
    """Of the lists that hold the buffers: while it is applied, and afterwards.

    frozen: the program has called ``gc.freeze()``, and the collector no longer tells of the engine.
    """
    from ds_patches.stream_safety.upstream import flat

    given = config(2, zero={"overlap_comm": True, "reduce_bucket_size": on_streams.BUCKET})
    found: dict[str, list[str]] = {}
    with detecting():
        engine = build_engine(on_streams.model(), given)
        optimizer = engine.optimizer

        def note(when: str) -> Any:
            places = flat._places(optimizer)
            kinds = [type(getattr(holder, name)).__name__ for holder, name in places]
            found.setdefault(when, kinds)

        if frozen:
            gc.freeze()
        ds_patches.apply("stream_safety", parts="all")
        if frozen:
            engine.backward(engine(on_streams.batch(0)).square().mean())
            engine.step()
        next(engine.module.parameters()).register_hook(lambda grad: note("applied"))
        on_streams.steps(EngineTrainer(engine), 1)
        found["state"] = [name for name in vars(optimizer) if "ds_patches" in name]
        ds_patches.unapply("stream_safety")
        note("after")
        left = {**vars(optimizer), **vars(engine.tput_timer)}
        found["left"] = [name for name in left if "ds_patches" in name]
        found["left"] += [name for name in vars(optimizer.reduction_stream) if "record" in name]
        on_streams.steps(EngineTrainer(engine), 1)
    return found


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_left(world: World, frozen: bool) -> None:
    found = world.run(kinds, frozen)[0]
    assert set(found["applied"]) == {"Buffers"}
    assert found["state"]
    assert "Buffers" not in found["after"]
    assert not found["left"]


def on_a_device_that_keeps_order() -> list[Any]:
    """The CPU as it is: what is known of an optimizer."""
    with applied("stream_safety"):
        engine = build_engine(on_streams.model(), config(2, zero={"overlap_comm": True}))
        on_streams.steps(EngineTrainer(engine), 1)
        return [value for name, value in vars(engine.optimizer).items() if "ds_patches" in name]


def test_a_device_that_keeps_order(world: World) -> None:
    assert world.run(on_a_device_that_keeps_order) == [[None]] * 2


@pytest.mark.core_case
def test_the_buffers_of_a_bucket_take_turns() -> None:
    """Where nothing else would show it: 0.17.5 to 0.18.4 wait for every reduction."""
    if not lives("ping_pong"):
        pytest.skip("this release has the fix, or no such buckets")
    from deepspeed.runtime.zero.stage_1_and_2 import IPGBucket

    bucket = IPGBucket(index=1)
    bucket.clear()
    assert bucket.index == 0
    with applied("stream_safety"):
        bucket = IPGBucket(index=1, elements=7)
        bucket.clear()
        assert (bucket.index, bucket.elements) == (1, 0)


def test_a_part_that_is_not_lacking_says_so() -> None:
    fixed = [part for part in LACKS if not lives(part)]
    try:
        notes = ds_patches.apply("stream_safety", parts="+".join(["buffer_reuse", *fixed])).notes
        said = "{} is not live in DeepSpeed {}: it is for {}"
        assert list(notes) == [said.format(part, RELEASE, LACKS[part]) for part in fixed]
        ds_patches.unapply("stream_safety")
        assert not ds_patches.apply("stream_safety").notes
    finally:
        ds_patches.unapply("stream_safety")
