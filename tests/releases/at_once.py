"""Work that is done for several releases at a time, and what of it was not begun in time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TypeVar

Result = TypeVar("Result")

#: Each release has two ranks, and waits for compilers and for imports more than it computes.
AT_ONCE = min(os.cpu_count() or 1, 2)


def each(
    work: Callable[[str], Result], names: Sequence[str], within: float | None = None
) -> Iterator[tuple[str, Result | None]]:
    """Every name with what `work` made of it, as they end.

    within: seconds from now; what was not begun by then is not done, and has None for a result.
    Whoever leaves the loop early waits for what was begun, and begins no more.
    """
    until = float("inf") if within is None else time.monotonic() + within

    def unless_late(name: str) -> Result | None:
        return work(name) if time.monotonic() < until else None

    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        futures: dict[Future[Result | None], str] = {
            pool.submit(unless_late, name): name for name in names
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def say(text: str) -> None:
    """Print in one piece: what is done at the same time prints as well."""
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, for pages and for what is printed."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
