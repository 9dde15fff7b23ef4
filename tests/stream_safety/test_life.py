"""Applied and taken back around a living engine."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import ds_patches
from tests.stream_safety import on_streams
from tests.stream_safety.on_streams import engine_on_streams
from tests.stream_safety.test_races import RELEASE, SpecifierSet, lives
from tests.training.options import Options, config
from tests.training.run import applied
from tests.training.surroundings import build_engine
from tests.training.trainers import EngineTrainer
from tests.world import World

ONE_STEP = Options(steps=1)


def attributes(frozen: bool) -> list[list[str]]:
    """What is ours at the optimizer: while it is applied, and afterwards.

    frozen: the program has called ``gc.freeze()``, and the collector no longer tells of the engine.
    """
    with engine_on_streams("several") as engine:
        before, found = {*vars(engine.optimizer)}, []

        def step(strict: bool = True) -> None:
            on_streams.steps(EngineTrainer(engine, ONE_STEP, strict=strict))
            found.append(sorted({*vars(engine.optimizer)} - before))

        if frozen:
            gc.freeze()
        ds_patches.apply("stream_safety")
        step(strict=not frozen)
        ds_patches.unapply("stream_safety")
        step()
    return found


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_left(world: World, frozen: bool) -> None:
    applied, after = world.run(attributes, frozen)[0]
    assert {"average_tensor", "_ds_patches_stream_safety"} <= {*applied}
    assert not after


def watches_gradients(around: str) -> list[bool]:
    """Whether the patch looks at each gradient: before the first step, and after each of two."""
    from ds_patches.upstream import streams

    with applied("stream_safety"), engine_on_streams(around) as engine:
        own = vars(engine.optimizer)
        found = [streams.GRADIENT_METHOD in own]
        for _ in range(2):
            on_streams.steps(EngineTrainer(engine, ONE_STEP, strict=False))
            found.append(streams.GRADIENT_METHOD in own)
    return found


@pytest.mark.core_case
@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ("", [True, False, False]),
        ("several", [True, True, True]),
        ("several later", [True, False, True]),
    ],
)
def test_gradients_are_let_be_where_all_come_from_one_stream(
    world: World, around: str, expected: list[bool]
) -> None:
    """A step costs nothing per parameter then. Up to 0.19.2 a later stream would go unnoticed."""
    tells_streams = RELEASE in SpecifierSet(">=0.19.3")
    watched = world.run(watches_gradients, around)[0]
    assert watched == (expected if tells_streams else [True, True, True])


def calls_for_each_bucket() -> tuple[int, int]:
    """How many buckets a step reduces that all gradients fill on one stream; the patch's calls."""
    calls: Counter[str] = Counter()
    ours = str(Path(ds_patches.__file__).parent)

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            calls[code.co_name] += 1
            calls["ours"] += code.co_filename.startswith(ours)

    with applied("stream_safety"), engine_on_streams() as engine:
        trainer = EngineTrainer(engine, ONE_STEP, strict=False)
        on_streams.steps(trainer)
        sys.setprofile(count)
        try:
            on_streams.steps(trainer)
        finally:
            sys.setprofile(None)
    return calls["average_tensor"], calls["ours"]


def test_a_bucket_of_one_stream_costs_a_call(world: World) -> None:
    if RELEASE not in SpecifierSet(">=0.19.3"):
        pytest.skip("buckets do not tell of streams")
    for buckets, ours in world.run(calls_for_each_bucket):
        assert buckets >= 5
        assert ours <= buckets + 8  # those of a backward's end and of the step


def on_a_device_that_keeps_order() -> list[Any]:
    """The CPU as it is: what is known of an optimizer."""
    with applied("stream_safety"):
        engine = build_engine(on_streams.model(), config(2, zero={"overlap_comm": True}))
        on_streams.steps(EngineTrainer(engine, ONE_STEP))
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
