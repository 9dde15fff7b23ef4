"""What it costs that the ranks of an engine compare their patches, at many ranks.

    python -m benchmarks.agreement

Every rank is a thread with its own connection to one real TCPStore, as every rank of a job has one;
the threads of a process take turns, so a job of as many processes is faster. Prints the seconds
from the first rank's arrival until the last has its verdict.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
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


def some_ranks(port: int, mine: range, ranks: int, begin: Any, times: Any) -> None:
    def compare(rank: int, store: Any) -> str:
        return Exchange(store, "here", tuple(range(ranks)), 120.0).compare(rank, HOLDINGS)

    with ThreadPoolExecutor(len(mine)) as pool:
        # At once: every now and then a connection takes five seconds.
        stores = list(pool.map(connect, [port] * len(mine)))
        begin.wait()
        verdicts = list(pool.map(compare, mine, stores))
    assert not any(verdicts), verdicts
    times.put(time.monotonic())


def seconds(ranks: int, processes: int) -> float:
    """From when all ranks are connected until the last one has its verdict."""
    context = multiprocessing.get_context("spawn")
    store = connect(0, is_master=True)
    begin, times = context.Barrier(processes + 1), context.Queue()
    shares = [range(ranks * k // processes, ranks * (k + 1) // processes) for k in range(processes)]
    children = [
        context.Process(target=some_ranks, args=(store.port, share, ranks, begin, times))
        for share in shares
    ]
    for child in children:
        child.start()
    begin.wait()
    start = time.monotonic()
    end = max(times.get() for _ in children)
    for child in children:
        child.join()
    return end - start


def main() -> None:
    print(f"{RANKS} ranks: {seconds(RANKS, PROCESSES):.2f} s", flush=True)


if __name__ == "__main__":
    main()
