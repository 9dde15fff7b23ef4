"""What the ranks of a window tell each other, so that none waits for one that raised.

They meet at a counter, which each rank reaches without the others' help, and not by a collective:
a rank that raised would take no part in it. A window has one counter, and a rank says everything by
adding to it. The additions have an order, and each returns the sum so far, so a rank that raises
knows, without waiting for one that may be waiting for it, whether the others count on it in
reductions that they have begun.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ds_patches.core.device import accelerator

from .counters import Counters, FileCounters, StoreCounters

_WIDTH = 12  # bits of a field of the counter, each of which counts ranks
_FIELD = (1 << _WIDTH) - 1
_MOST_RANKS = _FIELD

_LEFT = 1  # reached the end of the window
_RAISED = 1 << _WIDTH
# Where the last backward may be announced: who has, who left without, and whether they begin.
_ANNOUNCED = 1 << 2 * _WIDTH
_SILENT = 1 << 3 * _WIDTH
_BEGIN = 1 << 4 * _WIDTH
_CANCEL = 1 << 4 * _WIDTH + 1
# Elsewhere: the sum of the ranks' patterns, which have 24 bits each.
_PATTERN = 1 << 2 * _WIDTH

#: Windows whose counters are in use at a time: one that is left, the next, and one set to zero.
_COUNTERS = 3

#: How many engines have had a window over each set of ranks.
_engines: Counter[tuple[int, ...]] = Counter()


class OtherRankFailed(RuntimeError):
    """Another rank raised in this window, or did not leave it."""


class Handshake:
    """Of one engine, over the ranks that reduce together.

    Create it at the engine's first window. Ranks know the engine by the order of these, and its
    windows by theirs: windows of two engines may be nested.
    """

    def __init__(self, ranks: Sequence[int], on_one_host: bool = False) -> None:
        """Raises NotImplementedError for more ranks than the counter has room for."""
        if len(ranks) > _MOST_RANKS:
            raise NotImplementedError(
                f"coalesce_grad_reduction() over {len(ranks)} ranks needs handshake=off: ranks "
                f"tell each other of failures up to {_MOST_RANKS} of them"
            )
        self._size = len(ranks)
        self._on_one_host = on_one_host
        self._counters: Counters | None = None
        group = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
        self._engine = f"ds_patches/coalesce/{group}/{_engines[tuple(ranks)]}"
        _engines[tuple(ranks)] += 1
        self._failures = 0  # the same on all ranks: a window fails on all of them
        self._window = -1  # since the last failure
        self._announced = False
        self._begun: bool | None = None

    def begin(self) -> None:
        """A window opens."""
        self._open()
        self._window += 1
        self._announced, self._begun = False, None

    # --- The last backward, where it may be announced ---------------------------------------------

    def announce(self) -> None:
        """This rank's last backward begins, and it is ready to reduce."""
        self._announced = True
        self._look_for_beginning(self._add(_ANNOUNCED), arriving=True)

    def all_begin(self) -> bool:
        """Whether all ranks have announced; does not wait for those that have not.

        Once it has been True here, every rank takes part in what the others send, also one that
        raises. Raises OtherRankFailed if one raised before it announced.
        """
        if self._begun is None:
            self._look_for_beginning(self._add(0))
        return bool(self._begun)

    def await_beginning(self) -> bool:
        """Wait until it is known: False if some rank has left without announcing."""
        self._await(lambda total: self._look_for_beginning(total) is not None)
        return bool(self._begun)

    def _look_for_beginning(self, total: int, arriving: bool = False) -> bool | None:
        if self._begun is not None:
            return self._begun
        if total & _BEGIN:
            self._begun = True
        elif total & _CANCEL or (_count(total, _RAISED) and not self._all(total, _ANNOUNCED)):
            raise self._other_failed()
        elif _count(total, _SILENT):
            self._begun = False
        elif arriving and self._all(total, _ANNOUNCED):
            # The last to announce decides for all, by whether a failure came before it.
            raised = bool(_count(total, _RAISED))
            self._add(_CANCEL if raised else _BEGIN)
            if raised:
                raise self._other_failed()
            self._begun = True
        return self._begun

    # --- The end ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Wait for all ranks, where the last backward may be announced.

        Raises OtherRankFailed once a rank has raised, with its number and its error, or after the
        time that a collective of the default process group would be given.
        """
        self._leave(_LEFT if self._announced else _LEFT + _SILENT)

    def compare(self, pattern: int) -> bool:
        """Wait for all ranks, where it may not be; returns whether their patterns differ.

        Raises as `leave` does. Sums that agree by chance are as rare as checksums that do.
        """
        total = self._leave(_LEFT + _PATTERN * pattern)
        return total // _PATTERN != pattern * self._size

    def fail(self, error: BaseException) -> bool:
        """Tell the others that this rank raised.

        Returns whether they count on it in the reductions of the last backward.
        """
        import torch.distributed as dist

        # Without counters this is their own error, and there is no way to tell it.
        if not isinstance(error, OtherRankFailed) and self._counters is not None:
            total = self._say(f"rank {dist.get_rank()} raised {type(error).__name__}: {error}")
            # One that had not announced yet will find the failure, and cancel.
            if self._announced and self._begun is None and self._all(total, _ANNOUNCED):
                with suppress(OtherRankFailed):
                    total = self._await(lambda total: bool(total & (_BEGIN | _CANCEL)), total)
                    self._begun = bool(total & _BEGIN)
        begun = bool(self._begun)
        self._failures += 1
        self._window, self._counters = -1, None
        return begun

    def _leave(self, word: int) -> int:
        total = self._add(word)
        if self._all_left(total):
            # So none looks at the counter of the window before any more.
            self._open().clear((self._window + 2) % _COUNTERS)
            return total
        return self._await(self._all_left, total)

    def _all_left(self, total: int) -> bool:
        if _count(total, _RAISED):
            raise self._other_failed()
        return self._all(total, _LEFT)

    # --- The counter ------------------------------------------------------------------------------

    def _await(self, done: Callable[[int], bool], total: int | None = None) -> int:
        """Read the counter until it says so; raises OtherRankFailed if a rank does not come."""
        begin, pause = time.monotonic(), 2e-5
        while True:
            total = self._add(0) if total is None else total
            if done(total):
                return total
            waited = time.monotonic() - begin
            if waited > 0.01 and waited > _patience():
                # The late rank must not take itself for the last one and reduce alone.
                self._say(f"some rank had not left its window after {waited:.0f} s")
                raise self._other_failed()
            # A store serves all ranks by itself, so many of them have to ask less often.
            time.sleep(pause)
            pause, total = min(2 * pause, 1e-4 * max(self._size, 10)), None

    def _say(self, text: str) -> int:
        _store().compare_set(f"{self._engine}/{self._failures}/error", "", text)
        return self._add(_RAISED)

    def _other_failed(self) -> OtherRankFailed:
        error = _store().get(f"{self._engine}/{self._failures}/error").decode()
        return OtherRankFailed(f"in this coalesce_grad_reduction(), {error}")

    def _add(self, word: int) -> int:
        return self._open().add(self._window % _COUNTERS, word)

    def _open(self) -> Counters:
        if self._counters is None:
            key = f"{self._engine}/{self._failures}"
            self._counters = (
                FileCounters(_store(), key, _COUNTERS, self._size)
                if self._on_one_host
                else StoreCounters(_store(), key)
            )
        return self._counters

    def _all(self, total: int, word: int) -> bool:
        return _count(total, word) == self._size


def _count(total: int, word: int) -> int:
    """How many ranks have added `word`."""
    return total // word & _FIELD


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _patience() -> float:
    """Seconds that a collective of the default group would wait."""
    import torch
    from torch.distributed import distributed_c10d

    group: Any = distributed_c10d._get_default_group()
    device = torch.device(accelerator().device_name())
    timeout = group._get_backend(device).options._timeout
    return float(timeout.total_seconds())
