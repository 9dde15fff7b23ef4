"""DeepSpeed releases beside each other, and the core subset of the suite on each of them.

    python -m tests.releases install 0.16.3 0.18.2     # into .releases/<version>/
    python -m tests.releases run 0.16.3 0.18.2         # the core cases, once per release
    python -m tests.releases run --turn-of 6           # on those of six parts whose turn it is
    python -m tests.releases run --whole 0.18.2        # every test of the patches
    python -m tests.releases record                    # what docs/compatibility.json lacks
    python -m tests.releases record --pair 0.16.9+2.6.0  # with another torch; see pairs.json
    python -m tests.releases support 0.19.9            # all that a new release asks for
    python -m tests.releases index                     # is there a new release?
    python -m tests.releases page                      # docs/compatibility.md from the records
    python -m tests.releases install accelerate==1.7.0 # for the tests that ask for it

One interpreter and one torch serve all but the pairs: a release is chosen by being first on
PYTHONPATH. That goes for other packages too, which lie in .releases/<name>-<version>/. What is
missing is installed, and two releases run at a time.
DEEPSPEED_TEST_RELEASES names another folder than .releases.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
Result = TypeVar("Result")

#: Each release has two ranks, and waits for compilers and for imports more than it computes.
AT_ONCE = min(os.cpu_count() or 1, 2)


def place(wanted: str) -> Path:
    """Where a release lies: of DeepSpeed, by its version, or of a package, by name==version."""
    return folder() / wanted.replace("==", "-")


def folder() -> Path:
    """Where the releases lie, each in a folder named by its version."""
    return Path(os.environ.get("DEEPSPEED_TEST_RELEASES", ROOT / ".releases")).resolve()


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
