"""What ranks tell each other at the end of a block: none waits for one that raised.

They meet at a counter, which each rank reaches without the others' help, and not by a collective:
a rank that raised would take no part in it. A block has one counter, and a rank says by one
addition either that it has left, and what it has to reduce, or that it raised.
"""

from __future__ import annotations

import time

from ds_patches.core.agreement import store
from ds_patches.core.errors import OtherRankFailed
from ds_patches.training.ranks import patience

from .counters import FileCounters, StoreCounters

_WIDTH = 12  # bits of a field of the counter, each of which counts ranks
_FIELD = (1 << _WIDTH) - 1
MOST_RANKS = _FIELD

_LEFT = 1  # reached the end of the window
_RAISED = 1 << _WIDTH
_PATTERN = 1 << 2 * _WIDTH  # above the counts: the sum of the ranks' patterns, of 24 bits each

#: Windows whose counters are in use at a time: one that is left, the next, and one set to zero.
_COUNTERS = 3


class Handshake:
    """Of one engine, over the ranks that reduce together.

    Ranks know a window by how many came before: windows of two engines may be nested.

    place: in the store, the same on all ranks; see `core.agreement.meeting`.
    size: the number of ranks, `MOST_RANKS` of them at most. where: the window, as messages begin.
    """

    def __init__(self, place: str, size: int, where: str, on_one_host: bool = False) -> None:
        self._place, self._size, self._where = place, size, where
        self._on_one_host = on_one_host
        self._counters: FileCounters | StoreCounters | None = None
        self._failures = 0  # the same on all ranks: a window fails on all of them
        self._window = -1  # since the last failure
        self._inside = False  # a window that this rank has not left

    def begin(self) -> None:
        self._inside = True
        self._open()
        self._window += 1

    def leave(self, pattern: int = 0) -> bool:
        """Wait for all ranks; returns whether their patterns, of 24 bits, differ.

        Sums that agree by chance are as rare as checksums that do. Raises OtherRankFailed once a
        rank has raised, with its number and its error, or after the time that a collective of the
        default process group would be given.
        """
        total = self._add(_LEFT + _PATTERN * pattern)
        if self._all_left(total):
            # So none looks at the counter of the window before any more.
            self._open().clear((self._window + 2) % _COUNTERS)
        else:
            total = self._await_the_others()
        self._inside = False
        return total // _PATTERN != pattern * self._size

    def fail(self, error: BaseException | None) -> None:
        """Tell the others that this rank raised, unless it was told so itself.

        Those that have left the window with it hear of it in the next. error: if it is known.
        """
        import torch.distributed as dist

        if not isinstance(error, OtherRankFailed):
            if not self._inside:
                self.begin()
            if self._counters is not None:  # else this is their own error: nobody can be told
                what = "" if error is None else f" {type(error).__name__}: {error}"
                self._say(f"rank {dist.get_rank()} raised{what}")
        self._failures += 1
        self._window, self._counters, self._inside = -1, None, False

    def _await_the_others(self) -> int:
        """Read the counter until all have left; raises OtherRankFailed if a rank does not come."""
        begin, pause = time.monotonic(), 2e-5
        # A store serves all ranks by itself, so many of them have to ask less often.
        longest = 1e-4 if self._on_one_host else 1e-4 * max(self._size, 10)
        while not self._all_left(total := self._add(0)):
            waited = time.monotonic() - begin
            if waited > 0.01 and waited > patience():
                # The late rank must not take itself for the last one and reduce alone.
                self._say(f"some rank had not come to the end after {waited:.0f} s")
                raise self._other_failed()
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return total

    def _all_left(self, total: int) -> bool:
        if total // _RAISED & _FIELD:
            raise self._other_failed()
        return total // _LEFT & _FIELD == self._size

    # --- The counter ------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        store().compare_set(f"{self._place}/{self._failures}/error", "", text)
        self._add(_RAISED)

    def _other_failed(self) -> OtherRankFailed:
        error = store().get(f"{self._place}/{self._failures}/error").decode()
        return OtherRankFailed(f"{self._where} {error}")

    def _add(self, word: int) -> int:
        return self._open().add(self._window % _COUNTERS, word)

    def _open(self) -> FileCounters | StoreCounters:
        if self._counters is None:
            key = f"{self._place}/{self._failures}"
            self._counters = (
                FileCounters(store(), key, _COUNTERS, self._size)
                if self._on_one_host
                else StoreCounters(store(), key)
            )
        return self._counters
