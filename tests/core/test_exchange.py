"""What ranks say to each other and of each other, with threads for ranks over one store."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from ds_patches.core import agreement
from ds_patches.core.agreement import Exchange, Holdings


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([0, 2, 3, 4, 7], "ranks 0, 2-4, 7"),
        ([5, 4], "ranks 4-5"),
    ],
)
def test_ranks_are_named_with_spans(ranks: list[int], text: str) -> None:
    assert agreement._named(ranks) == text


VERSIONS = {"ds_patches": "0.1.0", "DeepSpeed": "0.19.8"}


def having(**patches: str) -> Holdings:
    """What a rank has; what is not "live" is the reason why it is not."""
    live = {name: text for name, text in patches.items() if text.startswith("live")}
    rest = {name: text for name, text in patches.items() if name not in live}
    return Holdings(VERSIONS, live, rest)


def test_differences_name_what_and_where() -> None:
    everyone = {
        0: having(one="live with mode=soft", two="live"),
        1: having(one="disabled (DS_PATCHES_SKIP=one)", two="live"),
        2: having(one="live with mode=soft", two="live"),
        3: Holdings({"ds_patches": "0.1.0", "DeepSpeed": "0.19.7"}, {"two": "live"}, {}),
    }
    assert list(agreement.differences(everyone)) == [
        "DeepSpeed is 0.19.8 on ranks 0-2, 0.19.7 on rank 3",
        "one is live with mode=soft on ranks 0, 2, disabled (DS_PATCHES_SKIP=one) on rank 1, "
        "unknown to ds_patches on rank 3",
    ]
    assert not list(agreement.differences({0: having(one="live"), 1: having(one="live")}))


def test_patches_that_are_live_nowhere_may_be_so_for_any_reason() -> None:
    everyone = {0: having(one="live", two="disabled"), 1: having(one="live", two="out of range")}
    assert not list(agreement.differences(everyone))


# --- The exchange, with threads for ranks -------------------------------------------------------


def exchange(
    monkeypatch: pytest.MonkeyPatch, holdings: dict[int, Holdings | None], timeout: float = 0.6
) -> dict[int, str]:
    """Let these ranks compare over one store; None for a rank that says nothing."""
    store, ranks, verdicts = dist.HashStore(), tuple(holdings), {}
    monkeypatch.setattr(agreement, "PATIENCE", 0.3)

    def one(rank: int, mine: Holdings) -> None:
        verdicts[rank] = Exchange(store, "here", ranks, timeout).compare(rank, mine)

    threads = [
        threading.Thread(target=one, args=(rank, mine))
        for rank, mine in holdings.items()
        if mine is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "bounded"
    return verdicts


def test_every_rank_gets_the_same_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = having(one="live with mode=soft"), having(one="live with mode=hard")
    assert exchange(monkeypatch, {2: soft, 5: soft, 6: soft}) == {2: "", 5: "", 6: ""}
    verdict = "one is live with mode=soft on ranks 2, 6, live with mode=hard on rank 5"
    found = exchange(monkeypatch, {2: soft, 5: hard, 6: soft})
    assert found == dict.fromkeys((2, 5, 6), verdict)


@pytest.mark.parametrize("bare", [2, 5])
def test_a_rank_without_live_patches_goes_on(monkeypatch: pytest.MonkeyPatch, bare: int) -> None:
    """The others refuse, whether it is the first one or not, and need not wait for its silence."""
    mine, other = having(one="live"), having(one="disabled")
    begin = time.monotonic()
    found = exchange(monkeypatch, {r: other if r == bare else mine for r in (2, 5, 6)}, timeout=60)
    assert time.monotonic() - begin < 5
    assert found.pop(bare) == ""
    for verdict in found.values():
        assert verdict.startswith("one is ")
        assert "live on rank" in verdict
        assert f"disabled on rank {bare}" in verdict


@pytest.mark.parametrize("silent", [2, 5])
def test_silence_is_nothing_to_ranks_without_live_patches(
    monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    begin = time.monotonic()
    holdings = {rank: None if rank == silent else having(one="disabled") for rank in (2, 5, 6)}
    found = exchange(monkeypatch, holdings, timeout=60)
    assert set(found.values()) == {""}
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("silent", [2, 5])
def test_a_silent_rank_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, silent: int
) -> None:
    holdings = {rank: None if rank == silent else having(one="live") for rank in (2, 5, 6)}
    begin = time.monotonic()
    verdicts = exchange(monkeypatch, holdings)
    assert time.monotonic() - begin < 5
    assert set(verdicts) == {2, 5, 6} - {silent}
    for verdict in verdicts.values():
        assert f"rank {silent} did not say" in verdict
        assert "DS_PATCHES" in verdict
    assert f"rank {silent} did not say" in caplog.text, "warned of before the time is over"


@pytest.mark.exhaustive
def test_the_benchmark_of_many_ranks_runs() -> None:
    from benchmarks.agreement import seconds

    assert 0 < seconds(ranks=12, processes=2) < 30
