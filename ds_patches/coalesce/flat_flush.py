"""Stages 1 and 2: a window's sums reach this rank's partition by one pass of reduce-scatters.

When the window closes all gradients are there, so every chunk can hold a part of each rank's
partition: all ranks send and receive all the time, and half as much as in the all-reduce that
upstream flushes by. Beside the gradients and the new partition this takes two staging buffers,
each of one chunk per rank and no larger than ``reduce_bucket_size``.
"""

from __future__ import annotations

from typing import Any

from .flat_reduction import LONGEST_CHUNK, FlatLayout, PartitionReduction, length_of
from .upstream import flat_layout


def flush(optimizer: Any) -> None:
    """Reduce the gradients on the parameters, which must be complete, and clear them.

    Leaves `optimizer` as upstream's epilogue does at a boundary. Only for what
    `flat_layout.covers`. A collective: every rank of the data parallel group takes part,
    whichever of its parameters have gradients.
    """
    flat_layout.release_buckets(optimizer)
    layout = flat_layout.layout(optimizer)
    reduce(layout)
    flat_layout.deliver(optimizer, layout)


def reduce(layout: FlatLayout) -> None:
    """Fill the partitions; they are complete behind the current stream."""
    longest = max(1, min(layout.bucket_elements // layout.ranks, LONGEST_CHUNK))
    chunks = layout.chunks(longest, across_groups=True)
    reduction = PartitionReduction(layout, max(map(length_of, chunks)), scatters=True)
    for chunk in chunks:
        reduction.reduce_scatter(chunk)
    reduction.finish()
