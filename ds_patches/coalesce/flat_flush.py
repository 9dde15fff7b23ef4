"""Stages 1 and 2: a window's sums reach this rank's partition by one pass of reduce-scatters.

When the window closes all gradients are there, so every chunk can hold a part of each rank's
partition: all ranks send and receive all the time, and half as much as in the all-reduce that
upstream flushes by. Beside the gradients and the new partition this takes two staging buffers,
each of one chunk per rank and no larger than ``reduce_bucket_size``.
"""

from __future__ import annotations

from .flat_reduction import FlatLayout, Packed, PartitionReduction, length_of

#: Elements. Chunks of a rank's partition are no longer than this even where the bucket size would
#: allow it: with several chunks, one is packed while the one before is on the wire.
_LONGEST_CHUNK = 1 << 25


class Flush:
    """One pass over a layout.

    A collective: every rank of the process group takes part, whichever of its parameters have
    gradients. What can fail on one rank alone, the allocation of buffers above all, fails in the
    constructor, before anything is sent.
    """

    def __init__(self, layout: FlatLayout) -> None:
        """Allocate, and pack the first chunk: the gradients must be complete."""
        self.layout = layout
        longest = max(1, min(layout.bucket_elements // layout.ranks, _LONGEST_CHUNK))
        self._owners = range(layout.ranks)
        self._chunks = layout.chunks(longest, across_groups=True)
        self._reduction = PartitionReduction(
            layout, max(map(length_of, self._chunks)), scatters=True
        )
        self._first = self._pack(0)

    def reduce(self) -> None:
        """Fill the partitions; they are complete behind the current stream."""
        self._reduction.send(self._first)
        for index in range(1, len(self._chunks)):
            self._reduction.send(self._pack(index))
        self._reduction.finish()

    def _pack(self, index: int) -> Packed:
        return self._reduction.pack(self._chunks[index], self._owners)
