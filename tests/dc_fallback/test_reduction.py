"""Buckets against averaging by all-reduce, and slicing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_patches.dc_fallback import reduction
from ds_patches.dc_fallback.reduction import Reduction
from tests.world import World

Shape = tuple[int, ...]
F32, BF16 = torch.float32, torch.bfloat16


@dataclass
class Sent:
    """What was observed of one reduction."""

    expected: list[list[float]]
    received: list[list[float]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)  # elements per rank, of each bucket
    most_in_flight: int = 0
    pending: list[bool] = field(default_factory=list)
    untouched: bool = True


class Watched:
    """A reduction that notes what comes out of it, and each collective that it starts."""

    def __init__(
        self,
        dtype_of: Callable[[Tensor], torch.dtype],
        capacity: int,
        group_of: Callable[[Any], Any] = lambda param: None,
    ) -> None:
        self.parts: list[tuple[Any, Tensor]] = []
        self.buckets: list[int] = []
        self.arrived = self.most_in_flight = 0
        self.reduction = Reduction(group_of, dtype_of, self.receive, capacity)
        self._start = dist.reduce_scatter_tensor

    def receive(self, param: Any, part: Tensor) -> None:
        self.parts.append((param, part.clone()))

    def __enter__(self) -> Watched:
        def started(out: Tensor, *args: Any, **kwargs: Any) -> Any:
            work = self._start(out, *args, **kwargs)
            self.buckets.append(out.numel())
            in_flight = len(self.buckets) - self.arrived
            self.most_in_flight = max(self.most_in_flight, in_flight)
            return _Work(work, self)

        dist.reduce_scatter_tensor = started
        return self

    def __exit__(self, *raised: Any) -> None:
        dist.reduce_scatter_tensor = self._start


@dataclass
class _Work:
    work: Any
    watched: Watched

    def wait(self) -> None:
        self.work.wait()
        self.watched.arrived += 1


def gradients(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], seed: int) -> list[Tensor]:
    """Those of this rank; no two ranks have the same."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return [
        torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)])
        for i, shape in enumerate(shapes)
    ]


def part_of(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The part of this rank of the average, its end padded with zeros."""
    ranks = dist.get_world_size()
    average = (grad.to(dtype) / ranks).float()
    dist.all_reduce(average)
    width = -(-average.numel() // ranks)
    padded = torch.zeros(ranks * width)
    padded[: average.numel()] = average.flatten()
    rank = dist.get_rank()
    return padded[rank * width : (rank + 1) * width].to(dtype).float()


def reduce(
    shapes: Sequence[Shape],
    capacity: int,
    dtypes: Sequence[torch.dtype] = (F32,),
    send_as: torch.dtype | None = None,
) -> Sent:
    def dtype_of(grad: Tensor) -> torch.dtype:
        return send_as or grad.dtype

    grads = gradients(shapes, dtypes, seed=1)
    before = [grad.clone() for grad in grads]
    params = [torch.nn.Parameter(torch.empty(0)) for _ in grads]
    sent = Sent([part_of(grad, dtype_of(grad)).tolist() for grad in grads])
    with Watched(dtype_of, capacity) as watched:
        sent.pending.append(watched.reduction.pending)
        for param, grad in zip(params, grads, strict=True):
            watched.reduction.add(param, grad)
        sent.pending.append(watched.reduction.pending)
        watched.reduction.finish()
        sent.pending.append(watched.reduction.pending)
    sent.received = [part.float().tolist() for _, part in watched.parts]
    sent.dtypes = [str(part.dtype) for _, part in watched.parts]
    places = {id(param): place for place, param in enumerate(params)}
    sent.order = [places[id(param)] for param, _ in watched.parts]
    sent.buckets, sent.most_in_flight = watched.buckets, watched.most_in_flight
    sent.untouched = all(torch.equal(*pair) for pair in zip(grads, before, strict=True))
    return sent


SHAPES: dict[str, list[Shape]] = {
    "divide": [(4, 6), (8,)],
    "do not divide": [(3, 5), (7,), (2, 2), (9,)],
    "one element": [(1,), (), (1, 1)],
    "one element among others": [(5,), (1,), (6,)],
    "no element": [(0,), (3,), (4, 0)],
    "no element at all": [(0,)],
}


@pytest.mark.parametrize("capacity", [1, 8, 1000])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_each_rank_gets_its_part_of_the_average(
    world: World, shapes: list[Shape], capacity: int
) -> None:
    for sent in world.run(reduce, shapes, capacity):
        assert sent.received == sent.expected
        assert sent.order == list(range(len(shapes)))
        assert sent.pending == [False, True, False]
        assert sent.untouched, "the gradient is the user's"


def test_of_one_element_the_second_rank_gets_padding(world: World) -> None:
    first, second = world.run(reduce, [(1,)], 8)
    assert first.received != [[0.0]]
    assert second.received == [[0.0]]


def test_nothing_to_send(world: World) -> None:
    for sent in world.run(reduce, [], 8):
        assert (sent.received, sent.buckets) == ([], [])
        assert sent.pending == [False, False, False]


@pytest.mark.parametrize(
    ("shapes", "buckets"),
    [
        ([(4,), (4,), (1,), (7,)], [4, 5]),  # the capacity is reached, not crossed: 8, then 1 + 7
        ([(2,), (20,), (2,), (2,)], [1, 10, 2]),  # larger than the capacity: alone
        ([(20,), (20,)], [10, 10]),
    ],
)
def test_a_bucket_holds_what_fits(world: World, shapes: list[Shape], buckets: list[int]) -> None:
    for sent in world.run(reduce, shapes, 8):
        assert sent.buckets == buckets
        assert sent.received == sent.expected


def test_few_buckets_are_in_flight(world: World) -> None:
    for sent in world.run(reduce, [(5,)] * 7, 5):
        assert sent.buckets == [3] * 7
        assert sent.most_in_flight == reduction._IN_FLIGHT == 2
        assert sent.received == sent.expected


def test_another_dtype_begins_a_bucket(world: World) -> None:
    for sent in world.run(reduce, [(4,), (5,), (6,)], 1000, (F32, BF16)):
        assert sent.buckets == [2, 3, 3]
        assert sent.dtypes == ["torch.float32", "torch.bfloat16", "torch.float32"]
        assert sent.received == sent.expected


def groups() -> tuple[list[int], list[list[float]], list[list[float]]]:
    """The second of three gradients is this rank's own, as that of an expert."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    params = [torch.nn.Parameter(torch.empty(0)) for _ in range(3)]
    grads = gradients([(4,), (5,), (6,)], (F32,), seed=4)
    expected = [part_of(grads[0], F32), grads[1], part_of(grads[2], F32)]

    def group_of(param: Any) -> Any:
        return own if param is params[1] else None

    with Watched(lambda grad: grad.dtype, 1000, group_of) as watched:
        for param, grad in zip(params, grads, strict=True):
            watched.reduction.add(param, grad)
        watched.reduction.finish()
    received = [part.tolist() for _, part in watched.parts]
    return watched.buckets, received, [part.tolist() for part in expected]


def test_another_group_begins_a_bucket(world: World) -> None:
    for buckets, received, expected in world.run(groups):
        assert buckets == [2, 5, 3]
        assert received == expected


@pytest.mark.parametrize(("dtype", "send_as"), [(BF16, F32), (F32, BF16)])
def test_sent_in_another_dtype(world: World, dtype: torch.dtype, send_as: torch.dtype) -> None:
    for sent in world.run(reduce, [(4,), (5,)], 1000, (dtype,), send_as):
        assert sent.dtypes == [str(send_as)] * 2
        assert sent.received == sent.expected
        assert sent.untouched


def abandon(adds: int) -> tuple[list[bool], list[list[float]], list[list[float]]]:
    """Some in flight and one waiting are dropped; then a whole reduction."""
    shapes = [(5,), (3,), (1,)]
    with Watched(lambda grad: grad.dtype, capacity=1) as watched:
        for grad in gradients([(5,)] * adds, (F32,), seed=2):
            watched.reduction.add(torch.nn.Parameter(torch.empty(0)), grad)
        pending = [watched.reduction.pending]
        watched.reduction.abandon()
        pending.append(watched.reduction.pending)
        pending.append(watched.arrived == len(watched.buckets))
        watched.parts.clear()
        grads = gradients(shapes, (F32,), seed=3)
        for grad in grads:
            watched.reduction.add(torch.nn.Parameter(torch.empty(0)), grad)
        watched.reduction.finish()
    expected = [part_of(grad, F32).tolist() for grad in grads]
    return pending, [part.tolist() for _, part in watched.parts], expected


@pytest.mark.parametrize("adds", [1, 2, 4])
def test_abandoned_gradients_are_not_in_the_next_ones(world: World, adds: int) -> None:
    for pending, received, expected in world.run(abandon, adds):
        assert pending == [True, False, True]
        assert received == expected


def refused() -> list[bool]:
    """What arrives is refused; nothing waits then, but a bucket is under way."""

    def refuse(param: Any, part: Tensor) -> None:
        raise RuntimeError("refused")

    dropping = Reduction(lambda param: None, lambda grad: grad.dtype, refuse, capacity=1)
    for grad in gradients([(5,), (5,)], (F32,), seed=5):
        dropping.add(torch.nn.Parameter(torch.empty(0)), grad)
    with pytest.raises(RuntimeError, match="refused"):
        dropping.finish()
    pending = [dropping.pending]
    dropping.abandon()
    return [*pending, dropping.pending]


def test_what_is_under_way_is_pending(world: World) -> None:
    assert world.run(refused) == [[True, False]] * 2
