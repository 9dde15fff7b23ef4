"""Ranks leave a window together, so that none waits in a reduction for one that raised.

They meet in the process group's store, which each rank reaches without the others' help, and not
by a collective: a rank that raised would take no part in it. A rank adds one to the window's
counter; the last one opens the door for all. A rank that raised opens it itself, with its error.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

#: Seconds. A wait for the store cannot be interrupted, so it is done in slices.
_SLICE = timedelta(seconds=2)
#: The counter holds the arrivals above the sum of their patterns, which have 24 bits each.
_ARRIVAL = 1 << 44
_EVEN, _UNEVEN, _FAILED = "even", "uneven", "failed: "

#: How many engines have had a window over each set of ranks.
_engines: Counter[tuple[int, ...]] = Counter()


class OtherRankFailed(RuntimeError):
    """Another rank raised in this window, or did not leave it."""


class Handshake:
    """Of one engine, over the ranks that reduce together.

    Create it at the engine's first window. Ranks know the engine by the order of these, and its
    windows by theirs: windows of two engines may be nested.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._size = len(ranks)
        group = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
        self._engine = f"ds_patches/coalesce/{group}/{_engines[tuple(ranks)]}"
        _engines[tuple(ranks)] += 1
        self._window = -1

    def begin(self) -> None:
        """A window opens."""
        self._window += 1

    def leave(self, pattern: int) -> bool:
        """Wait for all ranks; returns whether their patterns differ.

        Raises OtherRankFailed once a rank has raised, with its number and its error, or after the
        time that a collective of the default process group would be given.
        """
        store = _store()
        total = store.add(self._key("arrived"), _ARRIVAL + pattern)
        if total // _ARRIVAL == self._size:
            even = total % _ARRIVAL == pattern * self._size
            verdict = self._settle(_EVEN if even else _UNEVEN)
            self._tidy_up(store)
        else:
            verdict = self._await(store)
        if verdict.startswith(_FAILED):
            raise OtherRankFailed(f"in this coalesce_grad_reduction(), {verdict[len(_FAILED) :]}")
        return verdict == _UNEVEN

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank raised; waits for nobody."""
        import torch.distributed as dist

        if not isinstance(error, OtherRankFailed):
            text = f"rank {dist.get_rank()} raised {type(error).__name__}: {error}"
            self._settle(_FAILED + text)

    def _settle(self, verdict: str) -> str:
        """Give this verdict unless there is one; returns the one that holds."""
        return str(_store().compare_set(self._key("verdict"), "", verdict).decode())

    def _await(self, store: Any) -> str:
        import torch.distributed as dist

        key, begin, patience = self._key("verdict"), time.monotonic(), _patience()
        while True:
            try:
                store.wait([key], _SLICE)
            except dist.DistStoreError:  # nobody has set it yet; a store that is gone is another
                waited = time.monotonic() - begin
                if waited > patience:
                    # The late rank must not take itself for the last one and reduce alone.
                    late = f"some rank had not left its window after {waited:.0f} s"
                    return self._settle(_FAILED + late)
            else:
                return str(store.get(key).decode())

    def _tidy_up(self, store: Any) -> None:
        # All ranks have come to this window, so none reads the previous one's keys any more.
        if self._window:
            for name in ("arrived", "verdict"):
                store.delete_key(self._key(name, self._window - 1))

    def _key(self, name: str, window: int | None = None) -> str:
        return f"{self._engine}/{self._window if window is None else window}/{name}"


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _patience() -> float:
    """Seconds that a collective of the default group would wait."""
    from torch.distributed import distributed_c10d

    group: Any = distributed_c10d._get_default_group()
    timeout = group._get_backend(_device()).options._timeout
    return float(timeout.total_seconds())


def _device() -> Any:
    import torch
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().device_name())
