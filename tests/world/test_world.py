"""The living world itself: what fails on a rank fails the test, and the next one finds ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.world import RankError, World


def who() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def give_up() -> None:
    if dist.get_rank() == 1:
        raise KeyError("rank 1 gave up")
    dist.barrier()


def exit_hard() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


@pytest.mark.core_case(act=give_up)
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (give_up, ["KeyError: 'rank 1 gave up'", "in give_up"]),
        (exit_hard, ["rank 0", "exited with code 7"]),
    ],
)
def test_a_rank_fails_alone_and_the_next_case_finds_a_working_world(
    world: World, act: Callable[[], None], said: list[str]
) -> None:
    before = world.run(who)
    assert world.run(who) == before, "they live on between cases"
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        world.run(act)
    assert time.monotonic() - start < 30
    assert all(words in str(caught.value) for words in said), caught.value

    after = world.run(who)
    assert [answer[:2] for answer in after] == [(0, 2), (1, 2)]
    assert {a[2] for a in after}.isdisjoint(b[2] for b in before)
    for _, _, pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
