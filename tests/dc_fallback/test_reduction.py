"""Buckets against averaging by all-reduce, and slicing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ds_patches.dc_fallback import reduction
from tests.world import World

Shape = tuple[int, ...]
F32, BF16 = torch.float32, torch.bfloat16


@contextmanager
def watched() -> Iterator[Any]:
    """Note each collective that is started: its elements per rank, and whether it was awaited."""
    found = SimpleNamespace(buckets=[], arrived=0, most_in_flight=0)
    start = dist.reduce_scatter_tensor

    def started(out: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = start(out, *args, **kwargs)
        found.buckets.append(out.numel())
        found.most_in_flight = max(found.most_in_flight, len(found.buckets) - found.arrived)
        return SimpleNamespace(wait=lambda: wait(work))

    def wait(work: Any) -> None:
        work.wait()
        found.arrived += 1

    with mock.patch.object(dist, "reduce_scatter_tensor", started):
        yield found


def gradients(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype] = (F32,)) -> list[Tensor]:
    """Those of this rank; no two ranks have the same."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [
        torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)])
        for i, shape in enumerate(shapes)
    ]


def part_of(grad: Tensor, dtype: torch.dtype, alone: bool) -> Tensor:
    """The part of this rank of the average, its end padded with zeros."""
    if alone:
        return grad
    ranks = dist.get_world_size()
    average = (grad.to(dtype) / ranks).float()
    dist.all_reduce(average)
    width = -(-average.numel() // ranks)
    padded = torch.zeros(ranks * width)
    padded[: average.numel()] = average.flatten()
    return padded.view(ranks, width)[dist.get_rank()].to(dtype)


def reduce(
    shapes: Sequence[Shape],
    capacity: int = 1000,
    *,
    dtypes: Sequence[torch.dtype] = (F32,),
    send_as: torch.dtype | None = None,
    alone: Sequence[int] = (),
    dropped: int = 0,
) -> tuple[list[int], int]:
    """Each rank gets its part of the average; what was sent, and how much of it at a time.

    alone: gradients of so many elements are of this rank alone, as those of an expert.
    dropped: so many come before, and are abandoned, some in flight and one waiting.
    """
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())] if alone else [None] * 2
    grads = gradients(shapes, dtypes)
    sent = [send_as or grad.dtype for grad in grads]
    expected = [part_of(g, d, g.numel() in alone) for g, d in zip(grads, sent, strict=True)]
    before = [grad.clone() for grad in grads]
    params = [Parameter(torch.zeros_like(grad)) for grad in grads]
    parts: list[tuple[Any, Tensor]] = []
    reducing = reduction.Reduction(
        lambda param: own[dist.get_rank()] if param.numel() in alone else None,
        lambda grad: send_as or grad.dtype,
        lambda param, part: parts.append((param, part.clone())),
        capacity,
    )
    with watched() as found:
        for grad in gradients([(7,)] * dropped):
            reducing.add(Parameter(grad), grad)
        reducing.abandon()
        assert found.arrived == len(found.buckets)
        parts.clear()
        found.buckets, found.arrived = [], 0
        for param, grad in zip(params, grads, strict=True):
            reducing.add(param, grad)
        reducing.finish()
    assert all(param is one for (param, _), one in zip(parts, params, strict=True))
    for (_, part), wanted, grad, old in zip(parts, expected, grads, before, strict=True):
        assert part.dtype == wanted.dtype
        assert torch.equal(part, wanted)
        assert torch.equal(grad, old), "the gradient is the user's"
    return found.buckets, found.most_in_flight


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


def test_a_bucket_holds_what_fits(world: World) -> None:
    for shapes, buckets in (
        ([], []),
        ([4, 4, 1, 7], [4, 5]),  # the capacity is reached, not crossed: 8, then 1 + 7
        ([2, 20, 2, 2], [1, 10, 2]),  # larger than the capacity: alone
        ([20, 20], [10, 10]),
    ):
        given = [(one,) for one in shapes]
        assert [found for found, _ in world.run(reduce, given, 8)] == [buckets] * 2


def test_few_buckets_are_in_flight(world: World) -> None:
    assert reduction._IN_FLIGHT == 2
    assert world.run(reduce, [(5,)] * 7, 5) == [([3] * 7, 2)] * 2


def test_another_dtype_or_group_begins_a_bucket(world: World) -> None:
    three = [(4,), (5,), (6,)]
    assert world.run(reduce, three, dtypes=(F32, BF16))[0][0] == [2, 3, 3]
    assert world.run(reduce, three, alone=[5])[0][0] == [2, 5, 3]


@pytest.mark.parametrize(("dtype", "send_as"), [(BF16, F32), (F32, BF16)])
def test_sent_in_another_dtype(world: World, dtype: torch.dtype, send_as: torch.dtype) -> None:
    world.run(reduce, [(4,), (5,)], dtypes=(dtype,), send_as=send_as)


@pytest.mark.parametrize("dropped", [1, 2, 4])
def test_abandoned_gradients_are_not_in_the_next_ones(world: World, dropped: int) -> None:
    world.run(reduce, [(5,), (3,), (1,)], 1, dropped=dropped)
