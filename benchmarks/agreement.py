"""What it costs that the ranks of an engine compare their patches, at many ranks.

    python -m benchmarks.agreement

Every rank is a thread with its own connection to one real TCPStore, as every rank of a job has one;
the threads of a process take turns, so a job of as many processes is faster. Prints the seconds
from the first rank's arrival until the last has its verdict.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from ds_patches.core.agreement import Exchange, Holdings

RANKS, PROCESSES = 1000, 8
HOLDINGS = Holdings(
    {"ds_patches": "0.1.0", "DeepSpeed": "0.19.8"},
    dict.fromkeys(("one", "two", "three", "four"), "live with some=option, another=option"),
    {},
)


def connect(port: int, is_master: bool = False) -> Any:
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=120)
    return TCPStore("127.0.0.1", port, None, is_master, timeout, wait_for_workers=False)


def some_ranks(port: int, mine: range, ranks: int, begin: Any) -> float:
    """When the last of these has its verdict."""

    def compare(rank: int, store: Any) -> str:
        return Exchange(store, "here", tuple(range(ranks)), 120.0).compare(rank, HOLDINGS)

    with ThreadPoolExecutor(len(mine)) as pool:
        # At once: every now and then a connection takes five seconds.
        stores = list(pool.map(connect, [port] * len(mine)))
        begin.wait()
        verdicts = list(pool.map(compare, mine, stores))
    assert not any(verdicts), verdicts
    return time.monotonic()


def seconds(ranks: int, processes: int) -> float:
    """From when all ranks are connected until the last one has its verdict."""
    store = connect(0, is_master=True)
    spawn = multiprocessing.get_context("spawn")
    shares = [range(ranks * k // processes, ranks * (k + 1) // processes) for k in range(processes)]
    with spawn.Manager() as manager, ProcessPoolExecutor(processes, spawn) as pool:
        begin = manager.Barrier(processes + 1)
        ends = [pool.submit(some_ranks, store.port, share, ranks, begin) for share in shares]
        begin.wait()
        start = time.monotonic()
        return max(end.result() for end in ends) - start


def main() -> None:
    print(f"{RANKS} ranks: {seconds(RANKS, PROCESSES):.2f} s", flush=True)


if __name__ == "__main__":
    main()
