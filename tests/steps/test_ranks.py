"""Ranks that wait for each other in the store of their process group."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from ds_patches.core import agreement
from ds_patches.steps import ranks

here = threading.local()


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts a thread, which is a rank of two, and waits for the other."""
    monkeypatch.setattr(dist, "get_rank", lambda: here.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(ranks, "collective_timeout", lambda: 1.0)

    def start(store: Any, rank: int, *subjects: str) -> tuple[threading.Thread, list[list[int]]]:
        monkeypatch.setattr(agreement, "store", lambda: store)
        absent: list[list[int]] = []

        def wait() -> None:
            here.rank = rank
            absent.extend(ranks.absent_ranks(subject) for subject in subjects)

        thread = threading.Thread(target=wait)
        thread.start()
        return thread, absent

    return start


def test_a_rank_that_waits_leaves_the_store_open_to_other_threads(meet: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    waiting, absent = meet(store, 0, "here")
    while not store.check(["ds_patches/here/0/1"]):
        pass
    store.set("theirs", "")
    assert waiting.is_alive()
    waiting.join(5)
    assert absent == [[1]]


def test_ranks_that_meet_again_meet_elsewhere(meet: Any) -> None:
    """Whoever comes first, and in a store of a process group that is built anew from the start."""
    for store in (dist.HashStore(), dist.HashStore()):
        pairs = [meet(store, rank, "ranks", "ranks", f"of {rank}") for rank in (0, 1)]
        for thread, _ in pairs:
            thread.join(10)
        assert [absent for _, absent in pairs] == [[[], [], [1]], [[], [], [0]]]
        again, absent = meet(store, 0, "ranks")
        again.join(10)
        assert absent == [[1]]
