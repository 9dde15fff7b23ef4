"""Buckets against averaging by all-reduce, and slicing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ds_patches.dc_fallback import reduction
from ds_patches.dc_fallback.reduction import Reduction
from tests.world import World

Shape = tuple[int, ...]
F32, BF16 = torch.float32, torch.bfloat16


class Watched:
    """A reduction that notes what comes out of it, and each collective that it starts."""

    def __init__(self, capacity: int = 1000, **how: Callable[[Any], Any]) -> None:
        self.parts: list[tuple[Parameter, Tensor]] = []
        self.buckets: list[int] = []  # elements per rank, of each
        self.arrived = self.most_in_flight = 0
        given = {"group_of": lambda param: None, "dtype_of": lambda grad: grad.dtype, **how}
        self.reduction = Reduction(receive=self.receive, capacity=capacity, **given)
        self._start = dist.reduce_scatter_tensor

    def receive(self, param: Any, part: Tensor) -> None:
        self.parts.append((param, part.clone()))

    def started(self, out: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = self._start(out, *args, **kwargs)
        self.buckets.append(out.numel())
        self.most_in_flight = max(self.most_in_flight, len(self.buckets) - self.arrived)
        return SimpleNamespace(wait=lambda: self.wait(work))

    def wait(self, work: Any) -> None:
        work.wait()
        self.arrived += 1

    def add(self, grads: Sequence[Tensor]) -> list[Parameter]:
        params = [Parameter(torch.zeros_like(grad)) for grad in grads]
        with mock.patch.object(dist, "reduce_scatter_tensor", self.started):
            for param, grad in zip(params, grads, strict=True):
                self.reduction.add(param, grad)
        return params

    def finish(self) -> list[Tensor]:
        with mock.patch.object(dist, "reduce_scatter_tensor", self.started):
            self.reduction.finish()
        return [part for _, part in self.parts]


def gradients(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype] = (F32,)) -> list[Tensor]:
    """Those of this rank; no two ranks have the same."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [
        torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)])
        for i, shape in enumerate(shapes)
    ]


def part_of(grad: Tensor, dtype: torch.dtype = F32) -> Tensor:
    """The part of this rank of the average, its end padded with zeros."""
    ranks = dist.get_world_size()
    average = (grad.to(dtype) / ranks).float()
    dist.all_reduce(average)
    width = -(-average.numel() // ranks)
    padded = torch.zeros(ranks * width)
    padded[: average.numel()] = average.flatten()
    return padded.view(ranks, width)[dist.get_rank()].to(dtype)


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def reduce(
    shapes: Sequence[Shape],
    capacity: int,
    dtypes: Sequence[torch.dtype] = (F32,),
    send_as: torch.dtype | None = None,
) -> tuple[list[int], int]:
    """Each rank gets its part of the average; what was sent, and how much of it at a time."""

    def dtype_of(grad: Tensor) -> torch.dtype:
        return send_as or grad.dtype

    grads = gradients(shapes, dtypes)
    before = [grad.clone() for grad in grads]
    watched = Watched(capacity, dtype_of=dtype_of)
    params = watched.add(grads)
    received = watched.finish()
    assert equal(received, [part_of(grad, dtype_of(grad)) for grad in grads])
    assert [part.dtype for part in received] == [dtype_of(grad) for grad in grads]
    assert [id(param) for param, _ in watched.parts] == [id(param) for param in params]
    assert equal(grads, before), "the gradient is the user's"
    if shapes == [(1,)] and dist.get_rank():
        assert received[0].tolist() == [0.0], "padding"
    return watched.buckets, watched.most_in_flight


SHAPES: dict[str, list[Shape]] = {
    "divide": [(4, 6), (8,)],
    "do not divide": [(3, 5), (7,), (2, 2), (9,)],
    "one element": [(1,), (), (1, 1)],
    "of one element the second rank gets padding": [(1,)],
    "one element among others": [(5,), (1,), (6,)],
    "no element": [(0,), (3,), (4, 0)],
    "no element at all": [(0,)],
}


@pytest.mark.parametrize("capacity", [1, 8, 1000])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_each_rank_gets_its_part_of_the_average(
    world: World, shapes: list[Shape], capacity: int
) -> None:
    world.run(reduce, shapes, capacity)


@pytest.mark.parametrize(
    ("shapes", "buckets"),
    [
        ([], []),
        ([(4,), (4,), (1,), (7,)], [4, 5]),  # the capacity is reached, not crossed: 8, then 1 + 7
        ([(2,), (20,), (2,), (2,)], [1, 10, 2]),  # larger than the capacity: alone
        ([(20,), (20,)], [10, 10]),
    ],
)
def test_a_bucket_holds_what_fits(world: World, shapes: list[Shape], buckets: list[int]) -> None:
    assert [found for found, _ in world.run(reduce, shapes, 8)] == [buckets] * 2


def test_few_buckets_are_in_flight(world: World) -> None:
    assert reduction._IN_FLIGHT == 2
    assert world.run(reduce, [(5,)] * 7, 5) == [([3] * 7, 2)] * 2


def test_another_dtype_begins_a_bucket(world: World) -> None:
    for buckets, _ in world.run(reduce, [(4,), (5,), (6,)], 1000, (F32, BF16)):
        assert buckets == [2, 3, 3]


@pytest.mark.parametrize(("dtype", "send_as"), [(BF16, F32), (F32, BF16)])
def test_sent_in_another_dtype(world: World, dtype: torch.dtype, send_as: torch.dtype) -> None:
    world.run(reduce, [(4,), (5,)], 1000, (dtype,), send_as)


def groups() -> list[int]:
    """The gradient of five elements is this rank's own, as that of an expert."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    grads = gradients([(4,), (5,), (6,)])
    watched = Watched(group_of=lambda param: own if len(param) == 5 else None)
    watched.add(grads)
    assert equal(watched.finish(), [part_of(grads[0]), grads[1], part_of(grads[2])])
    return watched.buckets


def test_another_group_begins_a_bucket(world: World) -> None:
    assert world.run(groups) == [[2, 5, 3]] * 2


def abandon(adds: int) -> None:
    """Some in flight and one waiting are dropped; then a whole reduction."""
    watched = Watched(capacity=1)
    watched.add(gradients([(7,)] * adds))
    watched.reduction.abandon()
    assert watched.arrived == len(watched.buckets)
    watched.parts.clear()
    grads = gradients([(5,), (3,), (1,)])
    watched.add(grads)
    assert equal(watched.finish(), [part_of(grad) for grad in grads])


@pytest.mark.parametrize("adds", [1, 2, 4])
def test_abandoned_gradients_are_not_in_the_next_ones(world: World, adds: int) -> None:
    world.run(abandon, adds)
