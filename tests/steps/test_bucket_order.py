"""Gradients arrive on each rank in an order of chance: each is reduced once, on all ranks alike."""

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import Options, World, run

#: What comes to a rank in one backward: the numbers of parameters, in turn.
Arrivals = list[int]


class Chain(nn.Module):
    """Uses parameters of these sizes one after the other, any of them several times.

    A gradient arrives for each use, the last one first: what is used again is recomputed.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.links = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, arrivals: Arrivals) -> Tensor:
        x = torch.zeros((), requires_grad=True)
        for number in reversed(arrivals):
            if arrivals.count(number) > 1:
                x = checkpoint(self.use, number, x, use_reentrant=True)
            else:
                x = self.use(number, x)
        return x

    def use(self, number: int, x: Tensor) -> Tensor:
        return x + self.links[number].sum()


def outcome_of(
    sizes: Sequence[int], backwards: Sequence[Sequence[Arrivals]], stage: int, **zero: Any
) -> str:
    """Train with what comes on each rank in each backward; return what is wrong, or ""."""

    def script(trainer: Any, step: int) -> None:
        rank = dist.get_rank()
        trainer.backward(trainer(backwards[step][rank]) * 16.0**-rank)

    model: Any = partial(Chain, sizes)
    options = Options(stage, model=model, steps=len(backwards), zero=zero)
    outcome = run(script, options, "accumulation")
    return "" if outcome.equal else f"{options} {backwards}: {outcome}"


def some_of(random: Random, arrivals: Arrivals) -> Arrivals:
    return random.sample(arrivals, random.randint(1, len(arrivals)))


def in_turn(random: Random, most: Arrivals) -> Arrivals:
    """Often as it is, else with some missing, or in another order."""
    fewer = [number for number in most if random.random() < 0.8] or most
    return random.choice([most, fewer, some_of(random, most)])


def of_chance(seed: int, stage: int, overlaps: bool) -> str:
    random = Random(seed)
    sizes = random.choices(range(1, 9), k=random.randint(2, 7))
    most = random.choices(range(len(sizes)), k=random.randint(1, 12))
    others = [[in_turn(random, most) for _ in range(3)] for _ in range(9)]
    return outcome_of(
        sizes,
        [[most, *others[0][1:]], *others],
        stage,
        reduce_bucket_size=random.choice([1, 4, 8, 16, 1000]),
        overlap_comm=overlaps,
    )


def wrong_ones() -> list[str]:
    seeds = enumerate(12 // 3 * [(1, True), (2, False), (2, True)])
    return [wrong for seed, way in seeds if (wrong := of_chance(seed, *way))]


def test_no_rank_brings_more_than_one_did_at_first(three: World) -> None:
    assert three.run(wrong_ones) == [[]] * 3


def test_a_parameter_that_is_new_comes_last_on_one_rank(world: World) -> None:
    backwards = [[[0], [0]], [[0, 1], [0]], [[1, 0], [0]]]
    small = {"reduce_bucket_size": 1, "overlap_comm": False}
    assert world.run(outcome_of, [1, 1], backwards, 2, **small) == ["", ""]
