"""Gradients reduced straight into each rank's flat partition: plain PyTorch, no DeepSpeed.

Stages 1 and 2 lay the parameters of a group end to end and cut the whole into one equal partition
per rank. A rank needs the reduced gradients of its own partition and of nothing else, so a
reduce-scatter fills the same chunk of every rank's partition: all ranks send and receive all the
time, and half of the bytes of the all-reduce that upstream flushes by.

What comes out equals DeepSpeed's own reduction to the bit on two ranks, where a sum has one order:
gradients are divided by the number of ranks first and summed in the communication dtype. It may be
more exact where that is wider than DeepSpeed's buckets, which round once more. With more ranks a
backend may sum in another order, so the two agree within rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.upstream.zero12_layout import Chunk, FlatLayout

#: Elements. Chunks of a rank's partition are no longer than this even where the bucket size would
#: allow it: with several chunks, one is packed while the one before is on the wire.
_LONGEST_CHUNK = 1 << 25


def _length_of(chunk: Chunk) -> int:
    """In elements, of one rank's share."""
    return sum(piece.length for piece in chunk)


class Flush:
    """One pass of reduce-scatters over a layout, in two staging buffers that take turns.

    A collective: every rank of the process group takes part, whichever of its parameters have
    gradients. What can fail on one rank alone, the allocation of buffers above all, fails in the
    constructor, before anything is sent. Beside the gradients and the new partition this takes the
    buffers, each of one chunk per rank and no larger than ``reduce_bucket_size``.

    Everything is queued on the stream that is current, which must be the same in the constructor
    and in `reduce`: a buffer is packed again only behind the collective that read it. The
    collectives themselves run beside that stream.
    """

    def __init__(self, layout: FlatLayout) -> None:
        """Allocate, and pack the first chunk: the gradients must be complete."""
        self.layout = layout
        longest = max(1, min(layout.bucket_elements // layout.ranks, _LONGEST_CHUNK))
        self._chunks = layout.chunks(longest)
        elements = layout.ranks * max(map(_length_of, self._chunks))
        device = layout.groups[0].partition.device
        self._staging = [
            torch.empty(elements, dtype=layout.comm_dtype, device=device) for _ in range(2)
        ]
        self._sent: deque[tuple[Any, Callable[[], None]]] = deque()  # one for each buffer in use
        self._backend_scatters = True
        self._first = self._pack(self._chunks[0])

    def reduce(self) -> None:
        """Fill the partitions; they are complete behind the current stream."""
        self._send(self._chunks[0], self._first)
        for chunk in self._chunks[1:]:
            self._send(chunk, self._pack(chunk))
        while self._sent:
            self._finish()

    @torch.no_grad()
    def _pack(self, chunk: Chunk) -> torch.Tensor:
        """The gradients of `chunk` of all partitions, divided: [ranks, length of the chunk].

        Waits, on the current stream, for the collective that last had the buffer.
        """
        if len(self._sent) == len(self._staging):
            self._finish()
        self._staging.reverse()
        length = _length_of(chunk)
        staging = self._staging[0][: self.layout.ranks * length]
        _fill(staging, self._segments(chunk))
        if self.layout.ranks > 1:
            staging.div_(self.layout.ranks)
        return staging.view(-1, length)

    def _finish(self) -> None:
        """Let the current stream wait for the oldest collective, and take what it brought."""
        work, take = self._sent.popleft()
        work.wait()
        take()

    def _segments(self, chunk: Chunk) -> Iterator[tuple[int, torch.Tensor]]:
        """Gradients in the order of a staging buffer, and where in it each begins."""
        layout, begin = self.layout, 0
        for owner in range(layout.ranks):
            for piece in chunk:
                group = layout.groups[piece.group]
                start = owner * group.partition.numel() + piece.start
                for param, source, at, length in group.slices(start, start + piece.length):
                    if (gradient := layout.gradient(param)) is not None:
                        layout.note_read(gradient)
                        yield begin + at, gradient.reshape(-1).narrow(0, source, length)
                begin += piece.length

    def _send(self, chunk: Chunk, rows: torch.Tensor) -> None:
        group = self.layout.process_group
        if self._backend_scatters:
            target = self._target(chunk)
            # torch 2.13 renamed it.
            start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            try:
                work = start(target, rows.view(-1), group=group, async_op=True)
                self._sent.append((work, lambda: self._take(chunk, target)))
                return
            except RuntimeError:
                # gloo learned it late. It says no on every rank, before anything is sent; what else
                # is wrong with it, an all-reduce raises as well.
                if dist.get_backend(group) != dist.Backend.GLOO:
                    raise
                self._backend_scatters = False
        work = dist.all_reduce(rows, group=group, async_op=True)
        self._sent.append((work, lambda: self._take(chunk, rows[self.layout.rank])))

    def _target(self, chunk: Chunk) -> torch.Tensor:
        """Where a reduce-scatter writes: into the partition, if the chunk is one range of it."""
        partition = self.layout.groups[chunk[0].group].partition
        if len(chunk) == 1 and partition.dtype == self.layout.comm_dtype:
            return partition.narrow(0, chunk[0].start, chunk[0].length)
        length = _length_of(chunk)
        return torch.empty(length, dtype=self.layout.comm_dtype, device=partition.device)

    @torch.no_grad()
    def _take(self, chunk: Chunk, arrived: torch.Tensor) -> None:
        """Copy what was reduced into this rank's partitions, unless it arrived there."""
        at = 0
        for piece in chunk:
            partition = self.layout.groups[piece.group].partition
            target = partition.narrow(0, piece.start, piece.length)
            if target.data_ptr() != arrived.data_ptr():
                target.copy_(arrived.narrow(0, at, piece.length))
            at += piece.length


def _fill(target: torch.Tensor, segments: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Copy 1-D tensors to where they begin in `target`, in ascending order; zeros in the gaps.

    Neighbours are copied by one call: a call costs the host more than a layer's copy the device.
    """
    run: list[torch.Tensor] = []
    start = end = 0

    def copy_run() -> None:
        if run:
            torch.cat(run, out=target[start:end])

    for begin, source in segments:
        if begin != end:
            copy_run()
            target[end:begin].zero_()
            run, start = [], begin
        run.append(source)
        end = begin + source.numel()
    copy_run()
    target[end:].zero_()
