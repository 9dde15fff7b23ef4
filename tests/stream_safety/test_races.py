"""Each part, on a release that lacks its fix: stock races, and with the part it does not."""

from collections import Counter
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.conftest import living
from tests.harness import Outcome, World
from tests.harness.stock import RELEASE, since
from tests.stream_safety import on_streams

FP32_SUMS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
NO_TIMER = {"timers": {"throughput": {"enabled": False, "synchronized": False}}}

#: 0.17.5 to 0.18.4 wait for every reduction at once, which hides what may happen meanwhile.
WAITS_FOR_ALL = RELEASE in SpecifierSet(">=0.17.5,<=0.18.4")
#: A buffer is written again before what was in it has been reduced.
OVERWRITTEN = "on stream 1, then write by aten::copy_"

#: The releases that lack a fix which others have.
LACKS = {
    "ping_pong": ">=0.17.2,<=0.18.4",
    "zero3_producer": "<=0.18.7",
    "producer_streams": "<=0.19.2",
}
#: What shows each defect, and a word of the races that it makes.
SHOWN: dict[str, tuple[dict[str, Any], str]] = {
    "ping_pong": ({"stage": 2}, OVERWRITTEN),
    "zero3_producer": ({"stage": 3, "around": "side"}, "write by aten::mm on side"),
    # The throughput timer waits for the device in each step, but the first two.
    "zero3_gather": ({"stage": 3, "settings": NO_TIMER}, "on default, then read by aten::cat"),
    "record_stream": ({"stage": 2, "bucket": 32}, "freed for default"),
    "all_reduced": ({"stage": 1, "bucket": 32, "reduce_scatter": False}, "freed for default"),
    "producer_streams": ({"stage": 2, "around": "several"}, "write by aten::copy_ on second, then"),
    "buffer_reuse": ({"stage": 2, "around": "several"}, OVERWRITTEN),
}
EXACT = on_streams.EXACT


def lives(part: str) -> bool:
    return RELEASE in SpecifierSet(LACKS.get(part, ""))


def shows(part: str) -> bool:
    """Return True if stock has the defect, and nothing hides it."""
    if part in ("ping_pong", "record_stream", "all_reduced") and WAITS_FOR_ALL:
        return False
    if part == "record_stream":  # from 0.19.0 on with more ranks only, below
        return Version("0.19.0") > RELEASE
    return lives(part)


def races(outcomes: list[Outcome], part: str) -> bool:
    return any(SHOWN[part][1] in race for outcome in outcomes for race in outcome.races)


def clean(world: World, stage: int, **case: Any) -> list[Outcome]:
    """Trained without a race, and in single precision to where plain PyTorch does."""
    outcomes: list[Outcome] = world.run(on_streams.train, stage, patched=True, **case)
    for outcome in outcomes:
        assert not outcome.error, outcome.error
        assert not outcome.races, Counter(outcome.races).most_common(5)
        assert outcome.difference <= EXACT or "bf16" in (case.get("settings") or {})
    return outcomes


stock = living("module")  # to which nothing is ever applied


@pytest.mark.core_case
@pytest.mark.parametrize("part", SHOWN)
def test_stock_races_where_it_lacks_the_fix(stock: World, part: str) -> None:
    if not shows(part):
        pytest.skip("this release has the fix, or hides that it has not")
    outcomes = stock.run(on_streams.train, **SHOWN[part][0])
    assert races(outcomes, part)
    assert all(outcome.difference <= EXACT for outcome in outcomes), "the CPU runs in order"


@pytest.mark.core_case
@pytest.mark.parametrize("part", SHOWN)
def test_none_is_left(world: World, part: str) -> None:
    clean(world, **SHOWN[part][0])


@pytest.mark.exhaustive
def test_a_large_gradient_of_others_is_freed_too_early() -> None:
    """0.19.0 and later record it on the ranks that own a part of it, and on no other."""
    if WAITS_FOR_ALL:
        pytest.skip("this release waits for every reduction at once")
    with World(4) as four:
        assert races(four.run(on_streams.train, 2, bucket=32), "record_stream")
        clean(four, 2, bucket=32)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"around": "side"},
        {"micro_steps": 3},
        {"micro_steps": 3, "bucket": 32},
        {"micro_steps": 3, "settings": FP32_SUMS},
        {"bucket": 32},
        {"contiguous_gradients": False},
        {"settings": NO_TIMER},
        {"reduce_scatter": False},
        {"overlap_comm": False},
        {"settings": {"bf16": {"enabled": True}}},
    ],
    ids=lambda case: ", ".join(case) or "plain",
)
def test_no_race_in(world: World, stage: int, case: dict[str, Any]) -> None:
    if stage < 3 and "contiguous_gradients" in case and Version("0.19.8") > RELEASE:
        pytest.skip("to 0.19.7 stock reduces nothing here on a CPU, even with one backward")
    clean(world, stage, **case)


@pytest.mark.core_case(around="hooks", micro_steps=1)
@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("around", ["", "side", "several", "hooks", "checkpoints"])
def test_no_race_with_what_the_program_does(
    world: World, around: str, stage: int, micro_steps: int
) -> None:
    """Changes of a gradient by hooks behind DeepSpeed's are reduced, too."""
    clean(world, stage, around=around, micro_steps=micro_steps)


@pytest.mark.parametrize("around", ["", "side", "several"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("patch", ["coalesce", "zero3_retain"])
def test_no_race_beside(world: World, patch: str, stage: int, around: str) -> None:
    """Reductions of the other patches obey the same rules."""
    if stage == 3 and around == "several":
        pytest.skip("the hooks of this case run no gather on the stream that they set")
    script = on_streams.coalesced if patch == "coalesce" else on_streams.retained
    clean(world, stage, script=script, beside=(patch,), around=around)


@since("0.19.4", "managed_gradient_accumulation")
def test_a_step_that_no_backward_knew_of(world: World) -> None:
    """``"managed_gradient_accumulation": false``: it is the program that says when to step."""
    settings = {"managed_gradient_accumulation": False, **NO_TIMER}
    clean(world, 2, script=on_streams.three_backwards, settings=settings)
