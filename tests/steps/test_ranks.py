"""Ranks that wait for each other in the store of their process group."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from ds_patches.core import agreement
from ds_patches.steps.ranks import rendezvous_key, wait_at_rendezvous


def test_a_rank_that_waits_leaves_the_store_open_to_other_threads() -> None:
    store, absent = dist.TCPStore("127.0.0.1", 0, 1, True), list[int]()
    wait = lambda: absent.extend(wait_at_rendezvous(store, "here", (0, 1), 0, 1.0))  # noqa: E731
    waiting = threading.Thread(target=wait)
    waiting.start()
    while not store.check(["here/0"]):
        pass
    store.set("theirs", "")
    assert waiting.is_alive()
    waiting.join(5)
    assert absent == [1]


def test_ranks_that_meet_again_meet_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes first, and in a store of a process group that is built anew from the start."""
    for store in (dist.HashStore(), dist.HashStore()):
        monkeypatch.setattr(agreement, "store", lambda store=store: store)
        first = [rendezvous_key("ranks", (0, 1), 0) for _ in range(2)]
        assert [rendezvous_key("ranks", (0, 1), 1) for _ in range(2)] == first
        others = [rendezvous_key("ranks", (0, 2), 0), rendezvous_key("block", (0, 1), 0)]
        assert len({*first, *others}) == 4
