"""Applied and taken back around a living engine."""

import gc

import pytest

import ds_patches
from ds_patches.stream_safety.order import GRADIENT_METHOD
from tests.harness import EngineTrainer, Options, applied, on_ranks
from tests.stream_safety import on_streams
from tests.stream_safety.on_streams import engine_on_streams
from tests.stream_safety.test_races import RELEASE, SpecifierSet, lives

ONE_STEP = Options(steps=1)


@on_ranks
def test_an_engine_that_the_collector_does_not_tell_of() -> None:
    """The program has called ``gc.freeze()``: the optimizer is found as it steps, and let go."""
    with engine_on_streams("several") as engine:
        before, attributes = {*vars(engine.optimizer)}, []
        with applied("stream_safety"):
            assert "average_tensor" in vars(engine.optimizer)
        gc.freeze()
        for change in (ds_patches.apply, ds_patches.unapply):
            change("stream_safety")
            on_streams.steps(EngineTrainer(engine, ONE_STEP, strict=False))
            attributes.append({*vars(engine.optimizer)} - before)
    while_applied, after = attributes
    assert {"average_tensor", "_ds_patches_stream_safety"} <= while_applied
    assert not after


@on_ranks
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
    around: str, expected: list[bool]
) -> None:
    """Looked at before the first step, and after each of two: else none costs anything.

    Up to 0.19.2 a later stream would go unnoticed.
    """
    with applied("stream_safety"), engine_on_streams(around) as engine:
        watched = [GRADIENT_METHOD in vars(engine.optimizer)]
        for _ in range(2):
            on_streams.steps(EngineTrainer(engine, ONE_STEP, strict=False))
            watched.append(GRADIENT_METHOD in vars(engine.optimizer))
    tells_streams = RELEASE in SpecifierSet(">=0.19.3")
    assert watched == (expected if tells_streams else [True, True, True])


@on_ranks
@pytest.mark.core_case
@pytest.mark.skipif(not lives("ping_pong"), reason="only 0.17.2 to 0.18.4 turn buckets back")
def test_the_buffers_of_a_bucket_take_turns() -> None:
    """Where nothing else would show it: 0.17.5 to 0.18.4 wait for every reduction."""
    states = []
    with engine_on_streams("") as engine:
        (bucket,) = engine.optimizer.ipg_buckets.values()
        for patches in ((), ("stream_safety",), ()):
            bucket.index, bucket.elements = 1, 7
            with applied(*patches):
                bucket.clear()
            states.append((bucket.index, bucket.elements))
    assert states == [(0, 0), (1, 0), (0, 0)]
