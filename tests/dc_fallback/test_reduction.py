"""Buckets against averaging by all-reduce, and slicing."""

from collections.abc import Sequence
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

F32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.milliseconds


class Watched:
    """Each collective that is started: its elements per rank, and whether it was awaited."""

    def __init__(self) -> None:
        self.buckets: list[int] = []
        self.in_flight = self.most_in_flight = 0
        self._start = dist.reduce_scatter_tensor

    def __call__(self, out: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = self._start(out, *args, **kwargs)
        self.buckets.append(out.numel())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

        def wait() -> None:
            work.wait()
            self.in_flight -= 1

        return SimpleNamespace(wait=wait)


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
    shapes: Sequence[int | tuple[int, ...]],
    capacity: int = 8,
    *,
    dtypes: Sequence[torch.dtype] = (),
    send_as: torch.dtype | None = None,
    alone: int = -1,
    dropped: int = 0,
) -> tuple[list[int], int]:
    """Each rank gets its part of the average; what was sent, and how much of it at a time.

    alone: a gradient of so many elements is of this rank alone, as that of an expert.
    dropped: so many come before, and are abandoned, some in flight and one waiting.
    """
    own = [dist.new_group([rank]) if alone > 0 else None for rank in range(dist.get_world_size())]
    torch.manual_seed(dist.get_rank())
    grads = [torch.randn(shape) for shape in shapes]
    grads = [g.to(d) for g, d in zip(grads, dtypes or [F32] * len(grads), strict=True)]
    expected = [part_of(grad, send_as or grad.dtype, grad.numel() == alone) for grad in grads]
    before = [grad.clone() for grad in grads]
    params = [Parameter(torch.zeros_like(grad)) for grad in grads]
    parts: list[tuple[Any, Tensor]] = []
    reducing = reduction.Reduction(
        lambda param: own[dist.get_rank()] if param.numel() == alone else None,
        lambda grad: send_as or grad.dtype,
        lambda param, part: parts.append((param, part.clone())),
        capacity,
    )
    with mock.patch.object(dist, "reduce_scatter_tensor", Watched()) as watched:
        for _ in range(dropped):
            reducing.add(Parameter(torch.ones(7)), torch.ones(7))
        reducing.abandon()
        assert not watched.in_flight
        parts.clear()
        watched.buckets.clear()
        for param, grad in zip(params, grads, strict=True):
            reducing.add(param, grad)
        reducing.finish()
    assert [id(param) for param, _ in parts] == [*map(id, params)]
    torch.testing.assert_close([part for _, part in parts], expected, rtol=0, atol=0)
    assert all(map(torch.equal, grads, before)), "the gradients are the user's"
    return watched.buckets, watched.most_in_flight


@pytest.mark.parametrize(
    ("shapes", "more", "buckets"),
    [
        ([], {}, []),
        ([(3, 5), (7,), (2, 2), (9,)], {"capacity": 1000}, [19]),  # do not divide
        ([(1,), (), (5,), (1, 1)], {}, [6]),  # of one element the second rank gets padding
        ([(0,), (3,), (4, 0)], {}, [2]),
        ([4, 4, 1, 7], {}, [4, 5]),  # the capacity is reached, not crossed: 8, then 1 + 7
        ([2, 20, 2, 2], {}, [1, 10, 2]),  # larger than the capacity: alone
        ([5] * 7, {"capacity": 5}, [3] * 7),
        ([2, 3, 3], {"dtypes": (F32, BF16, F32)}, [1, 2, 2]),
        ([2, 3, 3], {"dtypes": [BF16] * 3, "send_as": F32}, [5]),
        ([2, 3, 3], {"send_as": BF16}, [5]),
        ([2, 1, 2], {"alone": 1}, [1, 1, 1]),
        *(([5, 3, 1], {"capacity": 1, "dropped": n}, [3, 2, 1]) for n in (1, 2, 4)),
    ],
    ids=str,
)
def test_each_rank_gets_its_part_of_the_average(
    world: World, shapes: Any, more: Any, buckets: list[int]
) -> None:
    """A bucket is of one dtype and group, and holds what fits; two are in flight at most."""
    for sent, in_flight in world.run(reduce, shapes, **more):
        assert sent == buckets
        assert in_flight <= 2
