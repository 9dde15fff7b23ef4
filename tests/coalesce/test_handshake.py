"""What ranks tell each other, in the orders that threads find."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_patches import OtherRankFailed
from ds_patches.coalesce import counters, handshake
from ds_patches.coalesce.counters import FileCounters, are_on_one_host
from ds_patches.coalesce.handshake import Handshake

RANKS = 3


class SlowStore:
    """A real store whose answers take a while, so that ranks come between each other's words."""

    def __init__(self) -> None:
        self.store = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def slow(*arguments: Any) -> Any:
            time.sleep(random.choice((0, 0, 1e-4, 5e-4)))
            found = method(*arguments)
            time.sleep(random.choice((0, 0, 1e-4, 5e-4)))
            return found

        return slow


#: How a rank's block ends: by what it has to reduce, or by an exception.
End = int | None


class Rank(threading.Thread):
    """One rank's blocks; notes how each of them ended: whether ranks differ, or the error."""

    def __init__(self, ends: list[End], on_one_host: bool) -> None:
        super().__init__(daemon=True)
        self.handshake = Handshake("the same on all ranks", RANKS, "block", on_one_host)
        self.ends = ends
        self.told: list[bool | str] = []

    def run(self) -> None:
        for end in self.ends:
            self.handshake.begin()
            try:
                time.sleep(random.random() * 2e-3)
                if end is None:
                    raise ZeroDivisionError
                self.told.append(self.handshake.leave(end))
            except (OtherRankFailed, ZeroDivisionError) as error:
                self.told.append(type(error).__name__)
                self.handshake.fail(error)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    slow = SlowStore()
    monkeypatch.setattr(handshake, "store", lambda: slow)
    monkeypatch.setattr(handshake, "patience", lambda: 20.0)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return slow


def run(ends: list[list[End]], on_one_host: bool = False) -> list[list[bool | str]]:
    """By block and rank: how it ended."""
    ranks = [Rank([block[rank] for block in ends], on_one_host) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert not rank.is_alive(), "a rank waits for ever"
    return [list(block) for block in zip(*(rank.told for rank in ranks), strict=True)]


@pytest.mark.parametrize("on_one_host", [False, True], ids=["store", "memory"])
@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_agree_on_every_block(store: SlowStore, seed: int, on_one_host: bool) -> None:
    random.seed(seed)
    ends: list[list[End]] = [random.choices([0, None], [2, 1], k=RANKS) for _ in range(25)]
    for block, found in zip(ends, run(ends, on_one_host), strict=True):
        told = "OtherRankFailed" if None in block else False
        assert found == ["ZeroDivisionError" if end is None else told for end in block]


def test_patterns_are_compared(store: SlowStore) -> None:
    most = (1 << 24) - 1
    ends: list[list[End]] = [[1] * 3, [1, 1, 2], [most] * 3, [0] * 3, [most, most, most - 1]]
    assert run(ends) == [[differ] * RANKS for differ in (False, True, False, False, True)]


def test_nothing_piles_up_in_the_store(store: SlowStore) -> None:
    run([[0] * RANKS] * 12)
    assert store.store.num_keys() <= handshake._COUNTERS


def test_nothing_is_left_in_memory(store: SlowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def ours() -> set[Path]:
        return set(counters._MEMORY.glob("ds_patches-*"))

    before, files = ours(), len(os.listdir("/proc/self/fd"))
    run([[0] * RANKS, [None] * RANKS, [0] * RANKS], on_one_host=True)
    with pytest.raises(AttributeError):
        FileCounters(None, "key", 1, 2)  # which cannot say where its file is
    gc.collect()
    assert ours() == before
    assert len(os.listdir("/proc/self/fd")) <= files


def test_one_that_raises_after_it_has_left_is_heard_in_the_next(store: SlowStore) -> None:
    first, second = Handshake("here", 2, "block"), Handshake("here", 2, "block")
    for rank in (first, second):
        rank.begin()
    other = threading.Thread(target=first.leave)
    other.start()
    second.leave()
    other.join(20)
    first.fail(ZeroDivisionError())
    second.begin()
    with pytest.raises(OtherRankFailed, match="rank 0 raised ZeroDivisionError") as caught:
        second.leave()
    second.fail(caught.value)
    assert (first._failures, second._failures) == (1, 1)


def test_a_handshake_that_could_not_begin_masks_nothing(store: SlowStore, tmp_path: Path) -> None:
    """In a container of its own the file that another rank named is not there."""
    rank = Handshake("here", 2, "block", on_one_host=True)
    store.store.set("here/0", f"1:2 {tmp_path / 'elsewhere'}")
    with pytest.raises(RuntimeError, match="LOCAL_WORLD_SIZE") as caught:
        rank.begin()
    rank.fail(caught.value)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, True),  # torchrun
        ({"WORLD_SIZE": "8", "LOCAL_SIZE": "8"}, True),  # deepspeed
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, False),
        ({"WORLD_SIZE": "8"}, False),
    ],
    ids=str,
)
def test_what_the_launcher_says(environment: dict[str, str], expected: bool) -> None:
    assert are_on_one_host(environment) == expected


def test_a_rank_that_does_not_come(store: SlowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others give up; when it comes, it does not reduce alone."""
    monkeypatch.setattr(handshake, "patience", lambda: 0.05)
    on_time, late = Handshake("here", 2, "block"), Handshake("here", 2, "block")
    for rank in (on_time, late):
        rank.begin()
        with pytest.raises(OtherRankFailed, match="had not come to the end"):
            rank.leave()
