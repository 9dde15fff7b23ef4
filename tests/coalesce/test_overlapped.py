"""Reductions during the last backward, on plain tensors, on engines, and by order of streams."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_patches.coalesce.overlapped import BucketPlan, OverlappedReduction
from ds_patches.coalesce.upstream.streams import SideStream
from tests.coalesce import cases, flat, flat_engines
from tests.coalesce.test_flat_flush import BF16, FP32_SUMS
from tests.groups import group_of
from tests.world import World

# --- Plain tensors ------------------------------------------------------------------------------


def overlapped(problem: dict[str, Any], scatters: bool, late: int) -> dict[str, Any]:
    """Gradients arrive roughly from the last to the first, in an order that differs by rank.

    `late`: so many parameters are not reached by this backward.
    """
    case = flat.Problem(**problem)
    order = list(reversed(range(len(case.params))))
    shuffle = random.Random(dist.get_rank())
    left_out = set(shuffle.sample(order, late))
    order.sort(key=lambda number: -number + shuffle.uniform(0, 3))
    reduction = case.overlapped(scatters=scatters)
    with flat.Traffic() as traffic:
        for number in order:
            if number not in left_out and case.params[number].grad is not None:
                reduction.ready(case.params[number])
        in_time = len(traffic.seen)
        reduction.finish()
    return {
        "worst": case.worst(),
        "sent": traffic.seen,
        "in time": in_time,
        "kept": sum(param.grad is not None for param in case.params),
    }


def outcomes(world: World, scatters: bool, late: int = 0, **problem: Any) -> list[dict[str, Any]]:
    found = world.run(overlapped, problem, scatters, late)
    assert all(outcome["sent"] == found[0]["sent"] for outcome in found)
    assert all(outcome["kept"] == 0 for outcome in found)
    return found


@pytest.mark.parametrize("scatters", [False, True], ids=["to the owner", "to all"])
@pytest.mark.parametrize("late", [0, 2, 7])
@pytest.mark.parametrize("bucket", [1, 5, 24, 10**6])
def test_each_rank_gets_its_partition(world: World, bucket: int, late: int, scatters: bool) -> None:
    for outcome in outcomes(world, scatters, late, bucket=bucket, gap=late):
        assert outcome["worst"] == 0.0
        if not late:
            assert outcome["in time"] == len(outcome["sent"])


@pytest.mark.parametrize("scatters", [False, True], ids=["to the owner", "to all"])
def test_three_ranks(three: World, scatters: bool) -> None:
    for outcome in outcomes(three, scatters, bucket=24, late=1):
        assert outcome["worst"] <= 1e-6


def of_a_group(scatters: bool) -> float:
    """Ranks 0 and 2; rank 1 is alone. The second of the two is not rank 1 of the world."""
    case = flat.Problem(bucket=24, group=group_of([[0, 2], [1]]))
    reduction = case.overlapped(scatters=scatters)
    for param in reversed(case.params):
        reduction.ready(param)
    reduction.finish()
    return case.worst()


@pytest.mark.parametrize("scatters", [False, True], ids=["to the owner", "to all"])
def test_some_ranks_of_three(three: World, scatters: bool) -> None:
    assert three.run(of_a_group, scatters) == [0.0] * 3


@pytest.mark.parametrize("scatters", [False, True], ids=["to the owner", "to all"])
def test_ranks_need_not_reach_the_same_parameters(world: World, scatters: bool) -> None:
    missing = [(0, 1), (1, 2), (0, 4), (1, 4)]
    for outcome in outcomes(world, scatters, bucket=24, missing=missing):
        assert outcome["worst"] == 0.0


@pytest.mark.parametrize("bucket", [5, 24])
def test_the_bytes_are_those_of_the_flush(world: World, bucket: int) -> None:
    def sent(scatters: bool) -> int:
        first, _ = outcomes(world, scatters, bucket=bucket)
        return sum(numel for _, numel in first["sent"])

    parameters = sum(torch.Size(shape).numel() for group in flat.SHAPES for shape in group)
    padding = 2 * 2 * 2  # two ranks, two groups, two elements of alignment
    assert parameters <= sent(False) <= sent(True) <= parameters + padding


def two_groups_in_turn(scatters: bool) -> list[int]:
    """How many reductions have started after each gradient; a model's layers are in two groups."""
    case = flat.Problem(shapes=[[(4,)] * 4, [(4,)] * 4], bucket=8 if scatters else 4)
    model = [param for pair in zip(case.params[:4], case.params[4:], strict=True) for param in pair]
    reduction = case.overlapped(model, scatters)
    started = []
    with flat.Traffic() as traffic:
        for param in reversed(model):
            reduction.ready(param)
            started.append(len(traffic.seen))
        reduction.finish()
    assert case.worst() == 0.0
    return started


def test_buckets_go_out_by_the_order_of_the_model(world: World) -> None:
    """Not group after group: the second one's first layer comes last in a backward."""
    assert world.run(two_groups_in_turn, False) == [[1, 2, 3, 4, 5, 6, 7, 8]] * 2
    # Of two ranks, the second one's half of each group is filled first and waits for the other.
    assert world.run(two_groups_in_turn, True) == [[0, 0, 0, 0, 1, 2, 3, 4]] * 2


def arriving_twice(when: str) -> str:
    case = flat.Problem(bucket=10**6)
    reduction = case.overlapped()
    for param in reversed(case.params):
        reduction.ready(param)
    late = case.params[2]
    late.grad = torch.ones(late.shape)
    try:
        if when == "hook":
            reduction.ready(late)
        reduction.finish()
    except RuntimeError as error:
        reduction.drain()
        return str(error)
    return ""


@pytest.mark.parametrize("when", ["hook", "end"])
def test_a_gradient_after_its_reduction_is_an_error(world: World, when: str) -> None:
    for error in world.run(arriving_twice, when):
        assert "arrived after its parameter was reduced" in error


def twice_before_it_is_sent() -> float:
    case = flat.Problem(bucket=10**6)
    reduction = case.overlapped()
    whole = [param.grad for param in case.params]
    first = case.params[0]
    for param in case.params[1:]:
        first.grad = whole[0] * 0.25
        reduction.ready(param)
    first.grad = whole[0]
    reduction.ready(first)
    reduction.finish()
    return case.worst()


def test_a_sum_may_grow_until_it_is_sent(world: World) -> None:
    assert world.run(twice_before_it_is_sent) == [0.0, 0.0]


# --- Order of streams ---------------------------------------------------------------------------


class FakeStreams:
    """An accelerator whose streams say what waits for what."""

    def __init__(self) -> None:
        self.current = "backward"
        self.said: list[str] = []

    def current_stream(self) -> FakeStream:
        return FakeStream(self, self.current)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class FakeStream:
    def __init__(self, streams: FakeStreams, name: str) -> None:
        self._streams = streams
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self._streams.said.append(f"{self.name} waits for {other.name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def streams() -> list[str]:
    """What is said about two buckets whose gradients come from two streams."""
    case = flat.Problem(shapes=[[(8,), (8,)]], bucket=8)
    fake = FakeStreams()

    def gradient(param: torch.Tensor) -> torch.Tensor | None:
        fake.said.append(f"read on {fake.current}")
        return param.grad

    case.layout = case.layout.__class__(**{**vars(case.layout), "gradient": gradient})
    reduction = OverlappedReduction(
        case.layout,
        BucketPlan(
            case.layout, {id(p): number for number, p in enumerate(case.params)}, scatters=False
        ),
        drop=lambda param: fake.said.append(f"dropped on {fake.current}"),
        side=SideStream(fake, FakeStream(fake, "side")),
    )
    fake.said.clear()
    for param, stream in zip(reversed(case.params), ("backward", "other"), strict=True):
        fake.current = stream
        reduction.ready(param)
    fake.current = "main"
    reduction.drain()
    return fake.said


def test_only_the_reduction_waits_before_the_window_closes(world: World) -> None:
    """It waits for every stream that produced a gradient; the rest waits for it at the end."""
    for said in world.run(streams):
        assert said == [
            "side waits for backward",
            "read on side",
            "dropped on backward",
            "side waits for backward",
            "side waits for other",
            "read on side",
            "dropped on other",
            "side waits for backward",
            "side waits for other",
            "side waits for main",
            "main waits for side",
        ]


# --- Engines ------------------------------------------------------------------------------------


def outcome(world: World, **case: Any) -> dict[str, Any]:
    """The outcome of `case`, which must be the same on both ranks."""
    first, second = world.run(flat_engines.train, "overlapped", **case)
    assert first == second
    tolerance = cases.ROUNDING[case.get("dtype", "float32")]
    assert first["moved"] > max(1e-3, 4 * tolerance)
    assert first["difference"] <= tolerance, first
    return first


@pytest.mark.core_case(contiguous=True, overlap=True)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_overlapped_flush_is_a_sum(
    world: World, stage: int, contiguous: bool, overlap: bool
) -> None:
    zero = {"contiguous_gradients": contiguous, "overlap_comm": overlap}
    result = outcome(world, stage=stage, settings={"zero": zero})
    if stage == 2 or overlap:  # else upstream has no hook that could say so
        assert all(in_time > 1 for in_time in result["in_time"])


@pytest.mark.parametrize("settings", [BF16, BF16 | FP32_SUMS], ids=["", "fp32 sums"])
def test_bf16(world: World, settings: dict[str, Any]) -> None:
    outcome(world, stage=2, dtype="bfloat16", settings=settings)


@pytest.mark.core_case(stage=2, model="Widening")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("model", ["Unused", "Widening", "FrozenTrunk", "TiedEmbedding"])
def test_parameters_that_are_not_reached(world: World, model: str, stage: int) -> None:
    outcome(world, model=model, stage=stage, settings={"zero": {"overlap_comm": True}})


def test_several_groups_overlap_too(world: World) -> None:
    """Buckets go out by the parameters' order in the model, not group after group."""
    result = outcome(world, stage=2, groups=3, clip=0.05)
    assert all(in_time > 3 for in_time in result["in_time"])


@pytest.mark.parametrize("model", ["Reentrant", "NonReentrant"])
def test_checkpointing(world: World, model: str) -> None:
    outcome(world, stage=2, model=model)
