"""What ranks say to each other and of each other, with threads for ranks over one store."""

from __future__ import annotations

import re
import threading

import pytest
import torch.distributed as dist

from ds_patches.core import agreement
from ds_patches.core.agreement import Exchange, Holdings


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([5, 4], "ranks 4-5"), ([0, 2, 3, 4, 7], "ranks 0, 2-4, 7")],
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
    # What is live nowhere may be so for any reason.
    everyone = {0: having(one="live", two="disabled"), 1: having(one="live", two="out of range")}
    assert not list(agreement.differences(everyone))


SOFT, HARD, OFF = (having(one=o) for o in ("live with mode=soft", "live with mode=hard", "off"))
DIFFER = "one is live with mode=soft on ranks 2, 6, live with mode=hard on rank 5$"


@pytest.mark.parametrize(
    ("holdings", "verdict"),
    [
        ([SOFT, SOFT, SOFT], "$"),
        ([SOFT, HARD, SOFT], DIFFER),
        ([OFF, SOFT, SOFT], "one is (?=.*live with mode=soft on rank).*off on rank 2"),
        ([SOFT, OFF, SOFT], "one is (?=.*live with mode=soft on rank).*off on rank 5"),
        ([OFF, None, OFF], "$"),
        ([None, OFF, OFF], "$"),
        ([None, SOFT, SOFT], "after .* rank 2 did not say.* DS_PATCHES"),
        ([SOFT, None, SOFT], "after .* rank 5 did not say.* DS_PATCHES"),
    ],
)
def test_ranks_with_live_patches_come_to_one_verdict(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    holdings: list[Holdings | None],
    verdict: str,
) -> None:
    """Of three, each a thread; None says nothing. Where nothing is live, all is well."""
    silent = None in holdings
    store, ranks, verdicts = dist.HashStore(), (2, 5, 6), {}
    monkeypatch.setattr(agreement, "PATIENCE", 0.3)

    def one(rank: int, mine: Holdings) -> None:
        exchange = Exchange(store, "here", ranks, timeout=0.6 if silent else 60)
        verdicts[rank] = exchange.compare(rank, mine)

    said = {rank: mine for rank, mine in zip(ranks, holdings, strict=True) if mine}
    threads = [threading.Thread(target=one, args=item) for item in said.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), "bounded"
    assert verdicts.keys() == said.keys()
    for rank, mine in said.items():
        assert re.match(verdict if mine.live else "$", verdicts[rank]), verdicts
    waited = silent and SOFT in holdings
    assert ("did not say" in caplog.text) is waited, "warned of before the time is over"
