"""Each part, on a release that lacks its fix: stock races, and with the part it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_patches.stream_safety.binding import LACKS, SAFE
from tests.stream_safety import on_streams
from tests.training.stock import RELEASE
from tests.world import World

FP32_SUMS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
NO_TIMER = {"timers": {"throughput": {"enabled": False, "synchronized": False}}}

#: 0.17.5 to 0.18.4 wait for every reduction at once, which hides what may happen meanwhile.
WAITS_FOR_ALL = RELEASE in SpecifierSet(">=0.17.5,<=0.18.4")
#: DeepSpeed knows by itself from which streams a bucket was filled.
SHOWS_STREAMS = RELEASE in SpecifierSet(">=0.19.3")
#: A buffer is written again before what was in it has been reduced.
OVERWRITTEN = "on stream 1, then write by aten::copy_"

#: What shows each defect, and a word of the races that it makes.
SHOWN: dict[str, tuple[dict[str, Any], str]] = {
    "ping_pong": ({"stage": 2}, OVERWRITTEN),
    "zero3_producer": ({"stage": 3, "around": "side"}, "write by aten::mm on side"),
    # The throughput timer waits for the device in each step, but the first two.
    "zero3_gather": ({"stage": 3, "settings": NO_TIMER}, "on default, then read by aten::cat"),
    "record_stream": ({"stage": 2, "bucket": 32}, "freed for default"),
    "producer_streams": ({"stage": 2, "around": "several"}, "write by aten::copy_ on second, then"),
    "buffer_reuse": ({"stage": 2, "around": "several"}, OVERWRITTEN),
}
EXACT = on_streams.EXACT


def lives(part: str) -> bool:
    """Whether this release lacks it."""
    return RELEASE in SpecifierSet(LACKS[part])


def shows(part: str) -> bool:
    """Whether stock has the defect, and nothing hides it."""
    if part in ("ping_pong", "record_stream") and WAITS_FOR_ALL:
        return False
    if part == "record_stream":  # from 0.19.0 on with more ranks only, below
        return Version("0.19.0") > RELEASE
    return lives(part)


def of(found: on_streams.Found, part: str) -> Counter[str]:
    """Its races of this part's kind."""
    return Counter(race for race in found.races if SHOWN[part][1] in race)


def clean(world: World, stage: int, parts: str = "all", **case: Any) -> list[on_streams.Found]:
    """Trained without a race, and in single precision to where plain PyTorch does."""
    found: list[on_streams.Found] = world.run(on_streams.train, stage, parts, **case)
    for one in found:
        assert not one.races, Counter(one.races).most_common(5)
        assert one.difference <= EXACT or "bf16" in (case.get("settings") or {})
    return found


@pytest.fixture(scope="module")
def stock() -> Iterator[World]:
    """Ranks to which nothing is ever applied."""
    with World() as living:
        yield living


@pytest.mark.core_case
@pytest.mark.parametrize("part", SHOWN)
def test_stock_races_where_it_lacks_the_fix(stock: World, part: str) -> None:
    if not shows(part):
        pytest.skip("this release has the fix, or hides that it has not")
    found = stock.run(on_streams.train, **SHOWN[part][0])
    assert any(of(one, part) for one in found)
    assert all(one.difference <= EXACT for one in found), "the CPU runs in order"


@pytest.mark.core_case
@pytest.mark.parametrize("part", SHOWN)
def test_none_is_left(world: World, part: str) -> None:
    clean(world, **SHOWN[part][0])


@pytest.mark.parametrize("part", SHOWN)
def test_each_part_does_its_own(world: World, part: str) -> None:
    for one in world.run(on_streams.train, parts=part, **SHOWN[part][0]):
        assert not of(one, part), of(one, part).most_common(5)


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with World(4) as living:
        yield living


@pytest.mark.exhaustive
def test_a_large_gradient_of_others_is_freed_too_early(four: World) -> None:
    """0.19.0 and later record it on the ranks that own a part of it, and on no other."""
    if WAITS_FOR_ALL:
        pytest.skip("this release waits for every reduction at once")
    stock = four.run(on_streams.train, 2, bucket=32)
    assert any("freed for default" in race for one in stock for race in one.races)
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
    clean(world, stage, **case)


@pytest.mark.core_case(around="hooks", micro_steps=1, parts="all")
@pytest.mark.parametrize("parts", ["+".join(SAFE), "all"], ids=["default", "all"])
@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("around", ["", "side", "several", "hooks", "checkpoints"])
def test_no_race_with_what_the_program_does(
    world: World, around: str, stage: int, micro_steps: int, parts: str
) -> None:
    """What hooks behind DeepSpeed's do to a gradient is reduced, too."""
    clean(world, stage, parts, around=around, micro_steps=micro_steps)


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
    watched = world.run(on_streams.watches_gradients, "+".join(SAFE), around)[0]
    assert watched == (expected if SHOWS_STREAMS else [True, True, True])


@pytest.mark.parametrize("around", ["", "side", "several"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("patch", ["coalesce", "zero3_retain"])
def test_no_race_beside(world: World, patch: str, stage: int, around: str) -> None:
    """What the other patches reduce obeys the same rules."""
    if stage == 3 and around == "several":
        pytest.skip("the hooks of this case run no gather on the stream that they set")
    script = on_streams.coalesced if patch == "coalesce" else on_streams.retained
    clean(world, stage, script=script, beside=(patch,), around=around)


@pytest.mark.core_case
@pytest.mark.parametrize("bucket", [on_streams.BUCKET, 32])
def test_the_backward_waits_for_less(world: World, bucket: int) -> None:
    """Of what is too large for a bucket, for nothing; with eight buffers, for few."""
    stock, patched = (
        world.run(on_streams.train, 2, parts, bucket=bucket)[0].seen for parts in ("", "all")
    )
    assert patched < stock


TRANSFORMER = (*(4 * (8, 8, 8, 8, 8, 32)), 8)  # a wide layer, one back, four small ones, and again


def end(world: World, parts: str, **case: Any) -> float:
    """Of all work on rank 0, by the lengths of products and reductions."""
    return float(world.run(on_streams.train, 2, parts, **case)[0].end)


@pytest.mark.parametrize("reduction", [0.8, 1.25])
def test_the_backward_ends_earlier(world: World, reduction: float) -> None:
    """None of the wide layers fits a buffer."""
    case = {"bucket": 64, "widths": TRANSFORMER, "reduction": reduction}
    assert end(world, "all", **case) <= 0.83 * end(world, "", **case)


@pytest.mark.core_case
@pytest.mark.parametrize("bucket", [on_streams.WIDTH**2, on_streams.BUCKET])
def test_a_reduction_begins_when_its_bucket_is_there(world: World, bucket: int) -> None:
    """And not when the next gradient is, a layer later: also where all layers are alike."""
    case = {"bucket": bucket, "reduction": 1.0}
    assert end(world, "bucket_ready", **case) <= 0.98 * end(world, "", **case)


def syncs(world: World, parts: str, stage: int = 2, **case: Any) -> int:
    """How often the host waits for the device."""
    given = {"settings": NO_TIMER, **case}
    return int(world.run(on_streams.train, stage, parts, **given)[0].syncs)


@pytest.mark.core_case
@pytest.mark.parametrize("stage", [1, 2])
def test_the_host_goes_on(world: World, stage: int) -> None:
    """In stock it waits for the device at the end of each of the three backwards."""
    assert syncs(world, "", stage) - syncs(world, "host_wait", stage) == 3


@pytest.mark.exhaustive
def test_micro_steps_hide_reductions_behind_the_next_forward(world: World) -> None:
    """Where reductions take longer than the backward, as they do without direct copies."""
    case: dict[str, Any] = {"bucket": 64, "widths": TRANSFORMER, "reduction": 1.6}
    case |= {"micro_steps": 4, "settings": NO_TIMER}
    stock, patched = world.run(on_streams.train, 2, **case), clean(world, 2, **case)
    other_parts = "+".join(part for part in LACKS if part != "micro_steps")
    others = world.run(on_streams.train, 2, other_parts, **case)
    assert [one.difference for one in patched] == [one.difference for one in stock]
    if lives("micro_steps"):
        assert patched[0].end <= 0.7 * stock[0].end
        assert patched[0].end <= 0.9 * others[0].end
    else:
        assert patched[0].end == others[0].end


def test_micro_steps_wait_for_nothing_but_a_step(world: World) -> None:
    if not lives("micro_steps"):
        pytest.skip("older releases let gradients be read between micro steps")
    found = syncs(world, "micro_steps", micro_steps=3)
    assert found == 3, "of nine backwards, three come before a step"


@pytest.mark.exhaustive
def test_nor_does_the_throughput_timer(world: World) -> None:
    """Which by default waits for the device twice in each micro step, from the third step on."""

    def waits(parts: str) -> int:
        case = {"micro_steps": 3, "bucket": 64}
        return syncs(world, parts, settings=None, **case) - syncs(world, parts, **case)

    assert waits("") == waits("host_wait") == 6
    assert waits("micro_steps") == waits("all") == (2 if lives("micro_steps") else 6)


def test_large_buckets_are_not_kept_for_it(world: World) -> None:
    """Of 512 MiB and a bit, for its two buffers."""
    case = {"micro_steps": 3, "bucket": 2**26 + 1}
    assert syncs(world, "micro_steps", **case) == syncs(world, "", **case) == 9


@pytest.mark.parametrize("parts", ["micro_steps", "all"])
def test_a_step_that_no_backward_knew_of(world: World, parts: str) -> None:
    """``"managed_gradient_accumulation": false``: it is the program that says when to step."""
    if Version("0.19.4") > RELEASE:
        pytest.skip("managed_gradient_accumulation came with 0.19.4")
    settings = {"managed_gradient_accumulation": False, **NO_TIMER}
    clean(world, 2, parts, script=on_streams.unmanaged, settings=settings)


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_a_backward_in_parts(world: World, micro_steps: int) -> None:
    """Checkpointing that is reentrant ends a backward in each of them, from 0.18.5 on."""
    given = {"around": "checkpoints", "settings": FP32_SUMS, "micro_steps": micro_steps}
    stock, patched = world.run(on_streams.train, 2, "", **given), clean(world, 2, **given)
    assert [one.difference for one in patched] == [one.difference for one in stock]
